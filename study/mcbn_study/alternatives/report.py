"""MCBN against what one would use instead: summary.csv, table.md and severity.png, from records alone."""

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from mcbn.errors import MCBNError
from mcbn.files import replacing, write_text
from mcbn_study import journal, student
from mcbn_study.alternatives.rivals import BEST, CORRUPTED, METRICS, MODES, NAMES, Method, Results, verdict
from mcbn_study.tables import MISSING, Table, to_markdown

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DRAWN = [("plain", False), ("plain", True), ("dropout", False), ("laplace", False), ("ensemble", False), BEST]
_COMMAND = "mcbn reproduce alternatives"


def write(out: str | Path = "results/alternatives") -> list[Path]:
    """Write summary.csv, table.md and severity.png of the records in a folder."""
    out = Path(out)
    found = journal.read(out / "records.jsonl")
    if not any(r["kind"] == "score" for r in found):
        raise MCBNError(f"{out} holds no records; make them with `{_COMMAND}`")
    results = Results(found)
    parts = [main_table(results), best_table(results), severity_table(results), foreign_table(results)]
    text = "\n".join(["# What one would use instead of MCBN", "", verdict(results), "", *map(to_markdown, parts)])
    written = [write_text(out / "summary.csv", to_csv(results)), write_text(out / "table.md", text)]
    return [*written, draw(results, out / "severity.png")]


def to_csv(results: Results) -> str:
    """One row a method, seed, set of images and metric; seed "all" is an ensemble of all."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(("method", "tempered", "seed", "data", "metric", "value"))
    for (method, seed, data), record in results.scores.items():
        head = (method[0], "" if method in MODES else str(method[1]).lower(), "all" if seed is None else seed, data)
        writer.writerows((*head, m, f"{record[m]:.8g}") for m in METRICS if record.get(m) is not None)
    for name, record in results.costs.items():
        of = "all" if record["seed"] is None else record["seed"]
        for metric in ("milliseconds", "setup_seconds"):
            writer.writerow((name, "", of, "test", metric, f"{record[metric]:.6g}"))
    return text.getvalue()


def main_table(results: Results) -> Table:
    """Test images: every score; out-of-distribution AUROC averaged over the corrupted and over the foreign sets."""
    corrupted, foreign = results.kinds()
    lines = []
    for method in NAMES:
        if not results.seeds(method):
            continue
        cells = [_cell(results.values(method, "test", m), m) for m in METRICS if m != "ood_auroc"]
        cells += [_plain_cell(results.mean(method, sets, "ood_auroc")) for sets in (corrupted, foreign)]
        lines.append((NAMES[method], *cells, _milliseconds(results, method)))
    heads = [METRICS[m][0] for m in METRICS if m != "ood_auroc"]
    header = ("Method", *heads, "AUROC, corrupted", "AUROC, foreign", "ms an image")
    return Table("Test images", "table:alternatives", header, tuple(lines), _note(results))


def _note(results: Results) -> str:
    some = next(iter(results.scores.values()))
    hardware = ", ".join(sorted({r["hardware"] for r in results.costs.values()}))
    n = next(r["n"] for (_, _, d), r in results.scores.items() if d == "test")
    return (
        f"Mean over the networks of each seed, ± its standard error; the ensemble is one. {n} CIFAR-10 test images,"
        f" T = {some['config']['n_samples']}, M = {some['config']['batch_size']} unless tuned. Tempered: the logits of"
        " every draw times one factor, fitted to 2,000 held-out images, as in temperature scaling; for each method, so"
        " that none has an advantage by it. Tuned M: by likelihood on the same held-out images, at tau = 1; tuned"
        " M and tau: both at once; best MCBN mode: too. Dropout network: trained with dropout at rate 0.1, as MC"
        " dropout needs it; dropout is off in it but for MC dropout."
        " AUROC of errors: 1 - the top probability finds wrong answers; of the others: the entropy tells those images"
        f" from test images. Milliseconds: all draws, many images at once ({hardware or 'not measured'});"
        f" {MISSING}: not timed."
    )


def best_table(results: Results) -> Table:
    """Which mode the validation images chose for each seed."""
    lines = []
    for (_, seed), mode in results.best.items():
        record = results.scores[mode, seed, "validation"]
        M = record["chosen_batch_size"] or record["config"]["batch_size"]
        lines.append((str(seed), NAMES[mode], str(M), f"{record['tau']:.3f}", f"{record['nll']:.4f}"))
    header = ("Seed", "Mode", "M", "tau", "Validation NLL")
    return Table("Best MCBN mode by validation NLL", "table:alternatives_best", header, tuple(lines))


def severity_table(results: Results) -> Table:
    """NLL and ECE of each method at each severity."""
    corrupted, _ = results.kinds()
    shown = [m for m in NAMES if results.seeds(m)]
    lines = []
    for metric in ("nll", "ece", "accuracy"):
        _, factor, decimals, _ = METRICS[metric]
        for method in shown:
            means = (results.mean(method, [data], metric) for data in corrupted)
            cells = [MISSING if v is None else f"{factor * v:.{min(decimals, 3)}f}" for v in means]
            lines.append((METRICS[metric][0] if method == shown[0] else "", NAMES[method], *cells))
    header = ("Metric", "Method", *(data.removeprefix(CORRUPTED) for data in corrupted))
    note = "Mean over seeds. Noise, blur, contrast, brightness and coarse pixels, a fifth of the images each."
    return Table("Corrupted images, by severity", "table:alternatives_severity", header, tuple(lines), note)


def foreign_table(results: Results) -> Table:
    """OOD AUROC of each set of foreign images."""
    _, foreign = results.kinds()
    lines = [
        (NAMES[m], *(_cell(results.values(m, data, "ood_auroc"), "ood_auroc") for data in foreign))
        for m in NAMES
        if results.seeds(m)
    ]
    note = (
        "voc: background of photographs; camvid: streets without vehicles and people; digits: handwritten. None shows"
        " anything of the ten classes."
    )
    return Table("Foreign images: OOD AUROC", "table:alternatives_foreign", ("Method", *foreign), tuple(lines), note)


def draw(results: Results, path: Path) -> Path:
    """Draw NLL and ECE over the severity, a line a method; severity 0 is the test images."""
    from mcbn.plots import new_figure

    corrupted, _ = results.kinds()
    figure = new_figure(10, 4.2)
    axes = figure.subplots(1, 2)
    for ax, metric in zip(axes, ("nll", "ece"), strict=True):
        _draw_lines(ax, results, ["test", *corrupted], metric)
    axes[0].legend(fontsize=8, frameon=False)
    with replacing(path) as temporary:
        figure.savefig(temporary, format="png")
    return path


def _draw_lines(ax: "Axes", results: Results, sets: Sequence[str], metric: str) -> None:
    heading, factor, _, _ = METRICS[metric]
    colors = ("0.6", "tab:orange", "tab:red", "tab:purple", "tab:green", "tab:blue")
    for method, color in zip(DRAWN, colors, strict=True):
        means = [results.mean(method, [data], metric) for data in sets]
        if any(value is not None for value in means):
            heights = [float("nan") if value is None else factor * value for value in means]
            ax.plot(range(len(sets)), heights, "o-", color=color, label=NAMES[method], markersize=4)
    ax.set_xlabel("severity (0: test images)")
    ax.set_ylabel(heading)
    ax.spines[["top", "right"]].set_visible(False)


def _cell(values: Sequence[float], metric: str) -> str:
    if not values:
        return MISSING
    _, factor, decimals, _ = METRICS[metric]
    mean, error = student.mean_error(values)
    return f"{factor * mean:.{decimals}f}" + ("" if error is None else f" ± {factor * error:.{decimals}f}")


def _plain_cell(value: float | None) -> str:
    return MISSING if value is None else f"{value:.3f}"


def _milliseconds(results: Results, method: Method) -> str:
    """Lay out the time of a method; of the best mode, that of the modes chosen, averaged over the seeds."""
    names = [mode[0] for (best, _), mode in results.best.items() if best == method] or [method[0]]
    found = [results.costs[name] for name in names if name in results.costs]
    if len(found) < len(names):
        return MISSING
    mixed = len({r["device"] for r in results.costs.values()}) > 1
    return f"{fmean(r['milliseconds'] for r in found):.3g}" + (f" ({found[0]['device']})" if mixed else "")
