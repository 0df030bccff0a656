"""MCBN against what one would use instead: summary.csv, table.md and severity.png, from records alone."""

import csv
import io
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from mcbn import records
from mcbn.errors import MCBNError
from mcbn.files import replacing, write_text
from mcbn.records import Record
from mcbn.report import student
from mcbn.report.layout import MISSING, Table, to_markdown

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Method = tuple[str, bool]  # its name, and whether tau was tuned on the validation images
NAMES: dict[Method, str] = {
    ("plain", False): "Softmax",
    ("plain", True): "Temperature scaling",
    ("laplace", False): "Last-layer Laplace",
    ("laplace", True): "Last-layer Laplace, tempered",
    ("ensemble", False): "Deep ensemble",
    ("ensemble", True): "Deep ensemble, tempered",
    ("mcbn", False): "MCBN",
    ("mcbn", True): "MCBN, tempered",
    ("mcbn_linear", False): "MCBN linear",
    ("mcbn_linear", True): "MCBN linear, tempered",
    ("mcbn_gaussian", False): "MCBN Gaussian",
    ("mcbn_gaussian", True): "MCBN Gaussian, tempered",
    ("mcbn_tuned", False): "MCBN, tuned M",
    ("mcbn_tuned", True): "MCBN, tuned M, tempered",
    ("mcbn_joint", True): "MCBN, tuned M and tau",
    ("mcbn_best", False): "MCBN, best mode",
    ("dropout", False): "MC dropout",
    ("dropout", True): "MC dropout, tempered",
    ("thinned_plain", False): "Softmax, dropout network",
    ("thinned_plain", True): "Temperature scaling, dropout network",
    ("thinned_mcbn", False): "MCBN, dropout network",
    ("thinned_mcbn", True): "MCBN, dropout network, tempered",
    ("thinned_joint", True): "MCBN, dropout network, tuned M and tau",
    ("thinned_best", False): "MCBN, dropout network, best mode",
}
BEST, BEST_THINNED = ("mcbn_best", False), ("thinned_best", False)
MODES = {  # of MCBN, by the best of them: on the paper's networks, and on those trained with dropout
    BEST: [key for key in NAMES if key[0].startswith("mcbn") and key != BEST],
    BEST_THINNED: [key for key in NAMES if key[0] in ("thinned_mcbn", "thinned_joint")],
}
RIVALS = {
    BEST: [key for key in NAMES if key[0] in ("plain", "laplace", "ensemble", "dropout")],
    BEST_THINNED: [key for key in NAMES if key[0] in ("thinned_plain", "dropout")],
}
METRICS = {  # name -> heading, factor, decimals, whether lower is better
    "nll": ("NLL", 1, 4, True),
    "accuracy": ("Accuracy (%)", 100, 2, False),
    "ece": ("ECE (%)", 100, 2, True),
    "brier": ("Brier", 1, 4, True),
    "error_auroc": ("Error AUROC", 1, 3, False),
    "ood_auroc": ("OOD AUROC", 1, 3, False),
}
CORRUPTED = "corrupted "
DRAWN = [("plain", False), ("plain", True), ("dropout", False), ("laplace", False), ("ensemble", False), BEST]
_COMMAND = "mcbn reproduce alternatives"


class Results:
    """The last record of every method, seed and set of images, with the best MCBN mode of each seed beside them."""

    def __init__(self, found: Iterable[Record]) -> None:
        rows = list(found)
        self.scores: dict[tuple[Method, int | None, str], Record] = {
            ((r["method"], r["tempered"]), r["seed"], r["data"]): r for r in rows if r["kind"] == "score"
        }
        self.costs = {r["method"]: r for r in rows if r["kind"] == "cost"}
        self.best: dict[tuple[Method, int | None], Method] = {}
        for best, modes in MODES.items():
            self._choose(best, modes)

    def _choose(self, best: Method, modes: Sequence[Method]) -> None:
        """Find each seed's MCBN mode of least NLL on the validation images; the test images have no say."""
        judged = {(m, s): r["nll"] for (m, s, d), r in self.scores.items() if d == "validation" and m in modes}
        for seed in dict.fromkeys(seed for _, seed in judged):
            nll = {m: value for (m, s), value in judged.items() if s == seed}
            chosen = self.best[best, seed] = min(nll, key=nll.__getitem__)
            own = [(data, record) for (m, s, data), record in self.scores.items() if (m, s) == (chosen, seed)]
            self.scores |= {(best, seed, data): record for data, record in own}

    def seeds(self, method: Method) -> list[int | None]:
        """List the seeds of a method."""
        return sorted({s for m, s, _ in self.scores if m == method}, key=lambda s: -1 if s is None else s)

    def sets(self) -> list[str]:
        """List the sets of images in the order they were asked about, validation left out."""
        return list(dict.fromkeys(d for _, _, d in self.scores if d != "validation"))

    def values(self, method: Method, data: str, metric: str) -> list[float]:
        """Return a metric of every seed."""
        found = (self.scores.get((method, seed, data), {}).get(metric) for seed in self.seeds(method))
        return [value for value in found if value is not None]

    def mean(self, method: Method, sets: Sequence[str], metric: str) -> float | None:
        """Average a metric over seeds and sets of images."""
        values = [value for data in sets for value in self.values(method, data, metric)]
        return sum(values) / len(values) if values else None


def write(out: str | Path = "results/alternatives") -> list[Path]:
    """Write summary.csv, table.md and severity.png of the records in a folder."""
    out = Path(out)
    found = records.read(out / "records.jsonl")
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
    corrupted, foreign = _kinds(results)
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
        f" from test images. Milliseconds: all draws, many images at once ({hardware or 'not measured'})."
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
    corrupted, _ = _kinds(results)
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
    _, foreign = _kinds(results)
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


def verdict(results: Results) -> str:
    """Say, metric by metric, which rivals are better than the best MCBN mode and which are not."""
    heads = {
        BEST: "Against the best MCBN mode, chosen on validation images (means over seeds, ± standard error of the gap;"
        " MC dropout has networks of its own):",
        BEST_THINNED: "On the networks trained with dropout, against the best MCBN mode there:",
    }
    parts = [[head, "", *lines, ""] for best, head in heads.items() if (lines := list(_compared(results, best)))]
    return "\n".join(line for part in parts for line in part).rstrip()


def _compared(results: Results, best: Method) -> Iterator[str]:
    corrupted, foreign = _kinds(results)
    asked = {METRICS[m][0]: (m, ["test"]) for m in METRICS if m != "ood_auroc"}
    asked |= {"NLL on corrupted images": ("nll", corrupted), "ECE on corrupted images": ("ece", corrupted)}
    asked |= {"OOD AUROC, corrupted": ("ood_auroc", corrupted), "OOD AUROC, foreign": ("ood_auroc", foreign)}
    for heading, (metric, sets) in asked.items():
        ours = results.mean(best, sets, metric)
        theirs = {m: results.mean(m, sets, metric) for m in RIVALS[best]}
        known = {m: value for m, value in theirs.items() if value is not None}
        if ours is None or not known:
            continue
        sign = 1 if METRICS[metric][3] else -1
        winners = [
            f"{NAMES[m]} (by {_gap(results, m, best, sets, metric)})"
            for m, value in known.items()
            if sign * value < sign * ours
        ]
        said = f"better are {'; '.join(winners)}" if winners else "no alternative is better"
        yield f"- {heading}: {said}."


def _gap(results: Results, rival: Method, best: Method, sets: Sequence[str], metric: str) -> str:
    """Lay out how far a rival is from the best mode: paired by seed where it has seeds, else from the mean."""
    _, factor, decimals, _ = METRICS[metric]

    def means(method: Method) -> dict[int | None, float]:
        """Average over the sets, where there is a value for every one of them."""
        rows = {s: [results.scores.get((method, s, d), {}) for d in sets] for s in results.seeds(method)}
        known = {s: [r[metric] for r in found if r.get(metric) is not None] for s, found in rows.items()}
        return {s: fmean(values) for s, values in known.items() if len(values) == len(sets)}

    ours, theirs = means(best), means(rival)
    gaps = [theirs[seed] - ours[seed] for seed in ours.keys() & theirs.keys()]
    if not (ours and theirs):
        return MISSING
    gap, error = student.mean_error(gaps or [fmean(theirs.values()) - fmean(ours.values())])
    return f"{factor * abs(gap):.{decimals}f}" + ("" if error is None else f" ± {factor * error:.{decimals}f}")


def draw(results: Results, path: Path) -> Path:
    """Draw NLL and ECE over the severity, a line a method; severity 0 is the test images."""
    from mcbn.plots import new_figure

    corrupted, _ = _kinds(results)
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


def _kinds(results: Results) -> tuple[list[str], list[str]]:
    """Split the sets of images other than the test images into corrupted and foreign ones."""
    sets = [data for data in results.sets() if data != "test"]
    corrupted = [data for data in sets if data.startswith(CORRUPTED)]
    return corrupted, [data for data in sets if data not in corrupted]


def _cell(values: Sequence[float], metric: str) -> str:
    if not values:
        return MISSING
    _, factor, decimals, _ = METRICS[metric]
    mean, error = student.mean_error(values)
    return f"{factor * mean:.{decimals}f}" + ("" if error is None else f" ± {factor * error:.{decimals}f}")


def _plain_cell(value: float | None) -> str:
    return MISSING if value is None else f"{value:.3f}"


def _milliseconds(results: Results, method: Method) -> str:
    record = results.costs.get(method[0])
    if record is None:
        return MISSING
    mixed = len({r["device"] for r in results.costs.values()}) > 1
    return f"{record['milliseconds']:.3g}" + (f" ({record['device']})" if mixed else "")
