"""MCBN against what one would use instead: who is better, as summary.csv, table.md and severity.png."""

import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from statistics import fmean

from mcbn import plots
from mcbn.errors import MCBNError
from mcbn.files import write_text
from mcbn_study.estimates import Score, estimate, p_value
from mcbn_study.journal import RECORDS, Record, read
from mcbn_study.png import save_figure
from mcbn_study.tables import MISSING, read_words, render

Method = tuple[str, bool]  # its name, and whether tau was tuned on the validation images
_WORDS = read_words(__package__)
_NAMED = _WORDS["methods"].items()
NAMES = {(method, bool(tempered)): name for method, names in _NAMED for tempered, name in enumerate(names) if name}
MODES, RIVALS = (
    {(best, False): [key for key in NAMES if key[0] in methods] for best, methods in _WORDS[role].items()}
    for role in ("modes", "rivals")
)
METRICS = {name: Score(**words) for name, words in _WORDS["scores"].items()}
LOWER_IS_BETTER = ("nll", "ece", "brier")
LEVEL = 0.05  # of Student's t-test: above it two methods count as level
DRAWN: dict[Method, str] = {(name, tempered): color for name, tempered, color in _WORDS["severity"]["drawn"]}


class Results:
    """The last record of every method, seed and set of images, with the best MCBN mode of each seed beside them."""

    def __init__(self, recorded: Iterable[Record]) -> None:
        rows = list(recorded)
        self.scores: dict[tuple[Method, int | None, str], Record] = {
            ((r["method"], r["tempered"]), r["seed"], r["data"]): r for r in rows if r["kind"] == "score"
        }
        self.costs = {r["method"]: r for r in rows if r["kind"] == "cost"}
        self.best: dict[tuple[Method, int | None], Method] = {}
        for best, modes in MODES.items():  # of least NLL on the validation images; the test images have no say
            judged = {(m, s): r["nll"] for (m, s, d), r in self.scores.items() if d == "validation" and m in modes}
            for seed in dict.fromkeys(seed for _, seed in judged):
                nll = {m: value for (m, s), value in judged.items() if s == seed}
                chosen = self.best[best, seed] = min(nll, key=nll.__getitem__)
                self.scores |= {(best, s, d): r for (m, s, d), r in self.scores.items() if (m, s) == (chosen, seed)}
        self.shown = [method for method in NAMES if self.seeds(method)]
        sets = [d for d in dict.fromkeys(d for _, _, d in self.scores) if d not in ("validation", "test")]
        self.corrupted = [data for data in sets if data.startswith("corrupted ")]
        self.foreign = [data for data in sets if data not in self.corrupted]

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
        return fmean(values) if values else None

    def show_mean(self, method: Method, sets: Sequence[str], metric: str) -> str:
        """Show that average in three decimals at most; a dash for none."""
        _, scale, decimals = METRICS[metric]
        value = self.mean(method, sets, metric)
        return MISSING if value is None else f"{scale * value:.{min(decimals, 3)}f}"

    def milliseconds(self, method: Method) -> str:
        """Show the time of a method; of the best mode, that of the modes chosen, averaged over the seeds."""
        names = [mode[0] for (best, _), mode in self.best.items() if best == method] or [method[0]]
        costs = [self.costs[name] for name in names if name in self.costs]
        if len(costs) < len(names):
            return MISSING
        mixed = len({r["device"] for r in self.costs.values()}) > 1
        return f"{fmean(r['milliseconds'] for r in costs):.3g}" + (f" ({costs[0]['device']})" if mixed else "")


def write(out: str | Path = "results/alternatives") -> list[Path]:
    """Write summary.csv, table.md and severity.png of the records in a folder."""
    out = Path(out)
    recorded = read(out / RECORDS)
    if not any(r["kind"] == "score" for r in recorded):
        raise MCBNError(f"{out} holds no records; make them with `mcbn reproduce alternatives`")
    results = Results(recorded)
    text = render(__package__, "summary.csv.j2", results=results, metrics=METRICS, modes=MODES)
    tested = next(r for (_, _, data), r in results.scores.items() if data == "test")
    words = {"names": NAMES, "metrics": METRICS, "verdict": verdict(results)}
    page = render(__package__, results=results, n=tested["n"], config=tested["config"], **words)
    written = [write_text(out / "summary.csv", text), write_text(out / "table.md", page)]
    return [*written, draw(results, out / "severity.png")]


def verdict(results: Results) -> str:
    """Say, metric by metric, which rivals are better than the best MCBN mode, level or worse, and by how much."""
    said = {best: "\n".join(_compared(results, best)) for best in MODES}
    return "\n\n".join(f"{_WORDS['verdict'][best[0]]}\n\n{lines}" for best, lines in said.items() if lines)


def _compared(results: Results, best: Method) -> Iterator[str]:
    asked = [(score.title, m, ["test"]) for m, score in METRICS.items() if m != "ood_auroc"]
    asked += [(f"{METRICS[m].title.split()[0]} on corrupted images", m, results.corrupted) for m in ("nll", "ece")]
    images = {"corrupted": results.corrupted, "foreign": results.foreign}
    asked += [(f"OOD AUROC, {name}", "ood_auroc", sets) for name, sets in images.items()]
    for heading, metric, sets in asked:
        said: dict[str, list[str]] = {"better": [], "level": [], "worse": []}
        for rival in RIVALS[best]:
            if gaps := _gaps(results, rival, best, sets, metric):
                gap = estimate(gaps)
                certain = (p_value(*gap[:3]) or 0.0) < LEVEL
                lower = (gap.mean < 0) == (metric in LOWER_IS_BETTER)
                size = METRICS[metric].cell([math.copysign(1, gap.mean) * each for each in gaps])
                said["level" if not certain else "better" if lower else "worse"].append(f"{NAMES[rival]} (by {size})")
        if any(said.values()):
            better, level, worse = map("; ".join, said.values())
            others = f"{f' Level: {level}.' if level else ''}{f' Worse: {worse}.' if worse else ''}"
            yield f"- {heading}: {f'better are {better}' if better else 'no alternative is better'}.{others}"


def _gaps(results: Results, rival: Method, best: Method, sets: Sequence[str], metric: str) -> list[float]:
    """Return how far a rival is above the best mode: seed by seed where it has seeds, else from each seed of ours."""
    both = (results.by_seed(method, sets, metric).items() for method in (best, rival))
    ours, theirs = ({seed: fmean(v) for seed, v in values if len(v) == len(sets) > 0} for values in both)
    common = ours.keys() & theirs.keys()
    return [theirs[seed] - ours[seed] for seed in common] or [a - b for a in theirs.values() for b in ours.values()]


def draw(results: Results, path: Path) -> Path:
    """Draw NLL and ECE over the severity, a line a method; severity 0 is the test images."""
    figure, sets = plots.new_figure(10, 4.2), ["test", *results.corrupted]
    axes = figure.subplots(1, 2)
    for ax, metric in zip(axes, ("nll", "ece"), strict=True):
        title, scale, _ = METRICS[metric]
        for method, color in DRAWN.items():
            means = [results.mean(method, [data], metric) for data in sets]
            if any(value is not None for value in means):
                heights = [float("nan") if value is None else scale * value for value in means]
                ax.plot(range(len(sets)), heights, "o-", color=color, label=NAMES[method], markersize=4)
        ax.set(xlabel="severity (0: test images)", ylabel=title)
        ax.spines[["top", "right"]].set_visible(False)
    axes[0].legend(fontsize=8, frameon=False)
    return save_figure(figure, path)
