"""The regression reproduction as tables and figures: summary.csv, tables.md, tables.tex, figures/*.png."""

from collections.abc import Sequence
from pathlib import Path

from mcbn.errors import MCBNError
from mcbn.files import write_text
from mcbn_study import journal
from mcbn_study.journal import Record
from mcbn_study.regression.fidelity import cost_table, coverage_table, fidelity_tables
from mcbn_study.regression.figures import write_figures
from mcbn_study.regression.repeats import read_repeats, repeat_tables
from mcbn_study.regression.summary import Summary, runs, summarise, to_csv
from mcbn_study.regression.tables import further_tables, paper_tables
from mcbn_study.sensitivity.report import sensitivity_tables
from mcbn_study.tables import MISSING, Table, escape_markdown, to_latex, to_markdown

_COMMAND = "mcbn reproduce regression"


def main(results: str | Path = "results") -> None:
    """Write all tables and figures and print their paths."""
    print("\n".join(map(str, write(results))))


def write(results: str | Path = "results") -> list[Path]:
    """Write summary.csv, tables.md, tables.tex and figures/ into results/regression, from the records there.

    Reads results/regression/records.jsonl and predictions/, and records.jsonl of results/sensitivity,
    results/search/<seed> and results/mnf_epochs. What has not been run yet is a dash; no run at all is an error. The
    same records give the same files.
    """
    results = Path(results)
    out = results / "regression"
    regression, sensitivity = (
        journal.read(results / study / "records.jsonl") for study in ("regression", "sensitivity")
    )
    tests = runs(regression)
    varied = runs(sensitivity, kind="sensitivity", also=("batch_size", "n_samples"))
    if not tests and not varied:
        raise MCBNError(f"{out} holds no records of test runs; make them with `{_COMMAND}`")
    summary = summarise(tests)
    repeats = read_repeats(results / "search")
    by_epochs = journal.read(results / "mnf_epochs" / "records.jsonl")
    tables = _tables(summary, repeats, by_epochs, varied, [*regression, *sensitivity])
    written = [
        write_text(out / "summary.csv", to_csv(summary.values())),
        write_text(out / "tables.tex", _latex(tables)),
    ]
    figures = write_figures(out / "predictions", out / "figures")
    profiles = sorted({str(run.get("profile")) for run in [*tests, *varied]})
    text = _markdown(tables, [figure.relative_to(out) for figure in figures], profiles)
    return [*written, write_text(out / "tables.md", text), *figures]


def _tables(
    summary: Summary,
    repeats: dict[int, Summary],
    by_epochs: Sequence[Record],
    varied: Sequence[Record],
    everything: Sequence[Record],
) -> list[Table]:
    return [
        *fidelity_tables(summary, list(repeats.values()), by_epochs),
        *repeat_tables(summary, repeats),
        *paper_tables(summary),
        *sensitivity_tables(varied),
        *further_tables(summary),
        coverage_table(summary),
        cost_table(everything),
    ]


def _markdown(tables: Sequence[Table], figures: Sequence[Path], profiles: Sequence[str]) -> str:
    head = [
        "# Regression: ours beside Teye et al. 2018",
        "",
        f"Made from the records by `mcbn reproduce tables`; the records by `{_COMMAND}`. {MISSING} marks what was not"
        f" run or is not printed in the paper. Profile of the runs: {escape_markdown(', '.join(profiles))}.",
        "",
    ]
    shown = [f"![{escape_markdown(figure.stem)}]({figure.as_posix()})\n" for figure in figures]
    heading = ["## Figures 1 and 2 (left) of the text, uncertainty-error figures of the appendix\n"] if shown else []
    return "\n".join([*head, *map(to_markdown, tables), *heading, *shown])


def _latex(tables: Sequence[Table]) -> str:
    head = "% Made from the records by `mcbn reproduce tables`. Needs \\usepackage{booktabs,graphicx}.\n"
    return "\n".join([head, *map(to_latex, tables)])
