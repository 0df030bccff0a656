"""MCBN against what one would use instead: who is better, as summary.csv, table.md and severity.png."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from mcbn import plots
from mcbn.errors import MCBNError
from mcbn.files import write_text
from mcbn_study import journal
from mcbn_study.estimates import mean_cell
from mcbn_study.journal import RECORDS, Record
from mcbn_study.png import save_figure
from mcbn_study.tables import MISSING, Table, to_csv, to_markdown

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
DRAWN = {  # with their colours
    ("plain", False): "0.6",
    ("plain", True): "tab:orange",
    ("dropout", False): "tab:red",
    ("laplace", False): "tab:purple",
    ("ensemble", False): "tab:green",
    BEST: "tab:blue",
}


class Results:
    """The last record of every method, seed and set of images, with the best MCBN mode of each seed beside them."""

    def __init__(self, recorded: Iterable[Record]) -> None:
        rows = list(recorded)
        self.scores: dict[tuple[Method, int | None, str], Record] = {
            ((r["method"], r["tempered"]), r["seed"], r["data"]): r for r in rows if r["kind"] == "score"
        }
        self.costs = {r["method"]: r for r in rows if r["kind"] == "cost"}
        self.best: dict[tuple[Method, int | None], Method] = {}
        for best, modes in MODES.items():
            self._choose(best, modes)
        self.shown = [method for method in NAMES if self.seeds(method)]
        sets = [d for d in dict.fromkeys(d for _, _, d in self.scores) if d not in ("validation", "test")]
        self.corrupted = [data for data in sets if data.startswith(CORRUPTED)]
        self.foreign = [data for data in sets if data not in self.corrupted]

    def _choose(self, best: Method, modes: Sequence[Method]) -> None:
        """Find each seed's MCBN mode of least NLL on the validation images; the test images have no say."""
        judged = {(m, s): r["nll"] for (m, s, d), r in self.scores.items() if d == "validation" and m in modes}
        for seed in dict.fromkeys(seed for _, seed in judged):
            nll = {m: value for (m, s), value in judged.items() if s == seed}
            chosen = self.best[best, seed] = min(nll, key=nll.__getitem__)
            self.scores |= {(best, s, d): r for (m, s, d), r in self.scores.items() if (m, s) == (chosen, seed)}

    def seeds(self, method: Method) -> list[int | None]:
        """List the seeds of a method."""
        return sorted({s for m, s, _ in self.scores if m == method}, key=lambda s: -1 if s is None else s)

    def by_seed(self, method: Method, sets: Sequence[str], metric: str) -> dict[int | None, list[float]]:
        """Return a metric on those of the sets that have it, by seed."""
        rows = {s: [self.scores.get((method, s, d), {}).get(metric) for d in sets] for s in self.seeds(method)}
        return {s: [value for value in values if value is not None] for s, values in rows.items()}

    def values(self, method: Method, data: str, metric: str) -> list[float]:
        """Return a metric of every seed."""
        return [value for values in self.by_seed(method, [data], metric).values() for value in values]

    def mean(self, method: Method, sets: Sequence[str], metric: str) -> float | None:
        """Average a metric over seeds and sets of images."""
        values = [value for data in sets for value in self.values(method, data, metric)]
        return sum(values) / len(values) if values else None


def write(out: str | Path = "results/alternatives") -> list[Path]:
    """Write summary.csv, table.md and severity.png of the records in a folder."""
    out = Path(out)
    recorded = journal.read(out / RECORDS)
    if not any(r["kind"] == "score" for r in recorded):
        raise MCBNError(f"{out} holds no records; make them with `mcbn reproduce alternatives`")
    results = Results(recorded)
    tables = [main_table(results), best_table(results), severity_table(results), foreign_table(results)]
    text = "\n".join(["# What one would use instead of MCBN", "", verdict(results), "", *map(to_markdown, tables)])
    header = ("method", "tempered", "seed", "data", "metric", "value")
    written = [write_text(out / "summary.csv", to_csv(header, _summary(results))), write_text(out / "table.md", text)]
    return [*written, draw(results, out / "severity.png")]


def _summary(results: Results) -> Iterator[Sequence[Any]]:
    """Yield one row a method, seed, set of images and metric; seed "all" is an ensemble of all."""
    for (method, seed, data), record in results.scores.items():
        tempered = "" if method in MODES else str(method[1]).lower()
        known = (method[0], tempered, "all" if seed is None else seed, data)
        yield from ((*known, m, f"{record[m]:.8g}") for m in METRICS if record.get(m) is not None)
    for name, record in results.costs.items():
        head = (name, "", "all" if record["seed"] is None else record["seed"], "test")
        yield from ((*head, m, f"{record[m]:.6g}") for m in ("milliseconds", "setup_seconds"))


def verdict(results: Results) -> str:
    """Say, metric by metric, which rivals are better than the best MCBN mode, which are worse, and by how much."""
    heads = {
        BEST: "Against the best MCBN mode, chosen on validation images (means over seeds, ± standard error of the gap;"
        " MC dropout has networks of its own):",
        BEST_THINNED: "On the networks trained with dropout, against the best MCBN mode there:",
    }
    said = [[head, "", *lines, ""] for best, head in heads.items() if (lines := list(_compared(results, best)))]
    return "\n".join(line for lines in said for line in lines).rstrip()


def _compared(results: Results, best: Method) -> Iterator[str]:
    asked = {METRICS[m][0]: (m, ["test"]) for m in METRICS if m != "ood_auroc"}
    asked |= {f"{METRICS[m][0].split()[0]} on corrupted images": (m, results.corrupted) for m in ("nll", "ece")}
    asked |= {
        "OOD AUROC, corrupted": ("ood_auroc", results.corrupted),
        "OOD AUROC, foreign": ("ood_auroc", results.foreign),
    }
    for heading, (metric, sets) in asked.items():
        ours = results.mean(best, sets, metric)
        theirs = {m: value for m in RIVALS[best] if (value := results.mean(m, sets, metric)) is not None}
        if ours is None or not theirs:
            continue
        sign = 1 if METRICS[metric][3] else -1
        better, worse = (
            "; ".join(
                f"{NAMES[m]} (by {_gap(results, m, best, sets, metric)})"
                for m, value in theirs.items()
                if side * sign * (value - ours) < 0
            )
            for side in (1, -1)
        )
        said = f"better are {better}" if better else "no alternative is better"
        yield f"- {heading}: {said}.{f' Worse: {worse}.' if worse else ''}"


def _gap(results: Results, rival: Method, best: Method, sets: Sequence[str], metric: str) -> str:
    """Lay out how far a rival is from the best mode: paired by seed where it has seeds, else from the mean."""
    ours, theirs = (
        {s: fmean(v) for s, v in results.by_seed(m, sets, metric).items() if len(v) == len(sets)} for m in (best, rival)
    )
    if not (ours and theirs):
        return MISSING
    gaps = [theirs[seed] - ours[seed] for seed in ours.keys() & theirs.keys()]
    gaps = gaps or [fmean(theirs.values()) - fmean(ours.values())]
    _, factor, decimals, _ = METRICS[metric]
    return mean_cell(gaps, scale=factor if fmean(gaps) >= 0 else -factor, decimals=decimals)


def main_table(results: Results) -> Table:
    """Test images: every score; out-of-distribution AUROC averaged over the corrupted and over the foreign sets."""
    metrics = [m for m in METRICS if m != "ood_auroc"]
    rows = []
    for method in results.shown:
        cells = [_cell(results, method, "test", m) for m in metrics]
        means = (results.mean(method, sets, "ood_auroc") for sets in (results.corrupted, results.foreign))
        cells += [MISSING if value is None else f"{value:.3f}" for value in means]
        rows.append((NAMES[method], *cells, _milliseconds(results, method)))
    heads = [METRICS[m][0] for m in metrics]
    header = ("Method", *heads, "AUROC, corrupted", "AUROC, foreign", "ms an image")
    return Table("Test images", "table:alternatives", header, rows, _note(results))


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


def _cell(results: Results, method: Method, data: str, metric: str) -> str:
    _, factor, decimals, _ = METRICS[metric]
    return mean_cell(results.values(method, data, metric), scale=factor, decimals=decimals)


def _milliseconds(results: Results, method: Method) -> str:
    """Lay out the time of a method; of the best mode, that of the modes chosen, averaged over the seeds."""
    names = [mode[0] for (best, _), mode in results.best.items() if best == method] or [method[0]]
    costs = [results.costs[name] for name in names if name in results.costs]
    if len(costs) < len(names):
        return MISSING
    mixed = len({r["device"] for r in results.costs.values()}) > 1
    return f"{fmean(r['milliseconds'] for r in costs):.3g}" + (f" ({costs[0]['device']})" if mixed else "")


def best_table(results: Results) -> Table:
    """Which mode the validation images chose for each seed."""
    rows = []
    for (_, seed), mode in results.best.items():
        record = results.scores[mode, seed, "validation"]
        M = record["chosen_batch_size"] or record["config"]["batch_size"]
        rows.append((str(seed), NAMES[mode], str(M), f"{record['tau']:.3f}", f"{record['nll']:.4f}"))
    header = ("Seed", "Mode", "M", "tau", "Validation NLL")
    return Table("Best MCBN mode by validation NLL", "table:alternatives_best", header, rows)


def severity_table(results: Results) -> Table:
    """NLL and ECE of each method at each severity."""
    rows = []
    for metric in ("nll", "ece", "accuracy"):
        heading, factor, decimals, _ = METRICS[metric]
        for method in results.shown:
            means = (results.mean(method, [data], metric) for data in results.corrupted)
            cells = [MISSING if v is None else f"{factor * v:.{min(decimals, 3)}f}" for v in means]
            rows.append((heading if method == results.shown[0] else "", NAMES[method], *cells))
    header = ("Metric", "Method", *(data.removeprefix(CORRUPTED) for data in results.corrupted))
    note = "Mean over seeds. Noise, blur, contrast, brightness and coarse pixels, a fifth of the images each."
    return Table("Corrupted images, by severity", "table:alternatives_severity", header, rows, note)


def foreign_table(results: Results) -> Table:
    """OOD AUROC of each set of foreign images."""
    rows = [(NAMES[m], *(_cell(results, m, data, "ood_auroc") for data in results.foreign)) for m in results.shown]
    note = (
        "voc: background of photographs; camvid: streets without vehicles and people; digits: handwritten. None shows"
        " anything of the ten classes."
    )
    header = ("Method", *results.foreign)
    return Table("Foreign images: OOD AUROC", "table:alternatives_foreign", header, rows, note)


def draw(results: Results, path: Path) -> Path:
    """Draw NLL and ECE over the severity, a line a method; severity 0 is the test images."""
    figure = plots.new_figure(10, 4.2)
    axes = figure.subplots(1, 2)
    for ax, metric in zip(axes, ("nll", "ece"), strict=True):
        _draw_lines(ax, results, ["test", *results.corrupted], metric)
    axes[0].legend(fontsize=8, frameon=False)
    return save_figure(figure, path)


def _draw_lines(ax: "Axes", results: Results, sets: Sequence[str], metric: str) -> None:
    heading, factor, _, _ = METRICS[metric]
    for method, color in DRAWN.items():
        means = [results.mean(method, [data], metric) for data in sets]
        if any(value is not None for value in means):
            heights = [float("nan") if value is None else factor * value for value in means]
            ax.plot(range(len(sets)), heights, "o-", color=color, label=NAMES[method], markersize=4)
    ax.set(xlabel="severity (0: test images)", ylabel=heading)
    ax.spines[["top", "right"]].set_visible(False)
