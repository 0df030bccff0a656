"""The scikit-learn estimator beside the paper's MCBN, whose weight decay and batch size were searched on each set."""

import statistics
from collections.abc import Sequence
from pathlib import Path

from mcbn.files import write_text
from mcbn_study import journal, paper
from mcbn_study.estimators.run import KEYS
from mcbn_study.journal import Record, read
from mcbn_study.tables import markdown

HEAD = ("dataset", "score", "runs", "estimator", "paper's MCBN")


def write(out: str | Path = "results/estimators") -> Path:
    """Write table.md from the records."""
    records = journal.latest(read(Path(out) / "records.jsonl"), KEYS)
    return write_text(Path(out) / "table.md", table(records))


def table(records: Sequence[Record]) -> str:
    """Lay out mean ± standard error over splits and states beside the paper's."""
    rows = []
    for dataset in sorted({r["dataset"] for r in records}):
        for metric in ("rmse", "crps"):
            values = [r[metric] for r in records if r["dataset"] == dataset]
            error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else float("nan")
            printed = paper.find(dataset, "mcbn", metric)
            shown = f"{printed.mean} ± {printed.standard_error}" if printed else ""
            ours = f"{statistics.mean(values):.3f} ± {error:.3f}"
            rows.append((dataset, metric.upper(), str(len(values)), ours, shown))
    note = "`MCBNRegressor` with its default parameters; lower is better; mean ± standard error over the runs.\n\n"
    return "# The scikit-learn estimator on the embedded sets\n\n" + note + markdown(HEAD, rows)
