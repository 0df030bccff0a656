"""CIFAR-10 from its records alone: Table 2 beside the paper's, the sweep over M, fresh against shared batches."""

import csv
import io
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from mcbn import plots
from mcbn.errors import MCBNError
from mcbn.files import replacing, write_text
from mcbn_study import journal, paper, student
from mcbn_study.cifar10.run import KIND, TRAINING
from mcbn_study.journal import RECORDS, Record, latest
from mcbn_study.tables import MISSING, Table, to_markdown

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLUMNS = ("network", "method", "seed", "n_samples", "batch_size", "metric", "value")
KEYS = ("network", "method", "seed", "part", "n_samples", "batch_size")
PREFIX = {"test": "", "query": "", "validation": "validation_"}
SCORES = {
    "pll": ("PLL", 1, 4),
    "accuracy": ("Accuracy (%)", 100, 2),
    "ece": ("ECE (%)", 100, 2),
    "brier": ("Brier", 1, 4),
    "auroc_entropy": ("AUROC, entropy", 1, 4),
    "auroc_max_probability": ("AUROC, 1 - max p", 1, 4),
    "auroc_mutual_information": ("AUROC, mutual information", 1, 4),
}
TRAINING_SCORES = ("seconds", "milliseconds_per_step", "loss", "accuracy")
PLAIN_TARGET, MCBN_TARGET, REACHED_BY, TRAINING_SECONDS = -0.32, -0.28, 4, 600


Values = dict[int, float]  # by seed


class Study(NamedTuple):
    """The last record of every measurement of one network, and of every training."""

    network: str
    rows: list[Record]
    training: list[Record]

    def values(self, name: str, method: str, part: str = "test", T: int | None = None, M: int | None = None) -> Values:
        """Return a score by seed."""
        found = [r for r in self.rows if (r["method"], r["part"]) == (method, part)]
        found = [r for r in found if (r["n_samples"], r["batch_size"]) == (T, M) and name in r["scores"]]
        return {r["seed"]: r["scores"][name] for r in sorted(found, key=lambda r: r["seed"])}

    def over(self, name: str, method: str, part: str) -> list[int]:
        """List the n_samples or batch_size that a method was measured at."""
        return sorted({r[name] for r in self.rows if (r["method"], r["part"]) == (method, part)})

    @property
    def batch_size(self) -> int:
        """M of the training."""
        return int(self.rows[0]["config"]["batch_size"])

    @property
    def curve(self) -> dict[int, Values]:
        """PLL of MCBN on the test images at every T, M as in training."""
        sizes = self.over("n_samples", "mcbn", "test")
        found = {T: self.values("pll", "mcbn", T=T, M=self.batch_size) for T in sizes}
        return {T: values for T, values in found.items() if values}


def write(out: str | Path = "results/cifar10") -> list[Path]:
    """Write summary.csv, table.md and a figure a network of the records in a folder."""
    out = Path(out)
    found = journal.read(out / RECORDS)
    studies = collect(found)
    text = "\n".join(["# CIFAR-10", "", *(part for study in studies for part in sections(study))])
    written = [write_text(out / "summary.csv", summary(found)), write_text(out / "table.md", text)]
    for study in studies:
        path = out / f"{study.network}-pll.png"
        with replacing(path) as temporary:
            figure(study).savefig(temporary)
        written.append(path)
    return written


def collect(found: Iterable[Record]) -> list[Study]:
    """Group the records by network; of a repeated measurement the last counts."""
    found = list(found)
    rows = latest([r for r in found if r["kind"] == KIND], KEYS)
    if not rows:
        raise MCBNError("there are no CIFAR-10 records; make them with `mcbn reproduce cifar10`")
    training = latest([r for r in found if r["kind"] == TRAINING], ("network", "seed"))
    names = sorted({r["network"] for r in rows})
    return [Study(n, [r for r in rows if r["network"] == n], [r for r in training if r["network"] == n]) for n in names]


def summary(found: Sequence[Record]) -> str:
    """Lay out every score as a CSV row; scores on validation images and standard errors have names of their own."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for r in latest([r for r in found if r["kind"] == TRAINING], ("network", "seed")):
        for name in TRAINING_SCORES:
            writer.writerow((r["network"], "training", r["seed"], "", "", name, f"{r[name]:.6g}"))
    for r in latest([r for r in found if r["kind"] == KIND], KEYS):
        scores = r["scores"] | {f"{name}_standard_error": value for name, value in r["errors"].items()}
        for name, value in scores.items():
            cells = (r["network"], r["method"], r["seed"], r["n_samples"], r["batch_size"])
            writer.writerow((*("" if c is None else c for c in cells), PREFIX[r["part"]] + name, f"{value:.8g}"))
    return text.getvalue()


def sections(study: Study) -> list[str]:
    """Lay out all tables of one network, and what was asked of it."""
    tables = [passes_table(study), scores_table(study), batch_size_table(study), query_table(study)]
    where = sorted({f"{r['hardware']}, torch {r['torch']}, commit {r['commit'][:12]}" for r in study.rows})
    lines = [f"{study.network}; measured on {'; '.join(where)}.", "", *(f"- {t}" for t in targets(study)), ""]
    return [*lines, *map(to_markdown, tables)]


def passes_table(study: Study) -> Table:
    """Table 2: PLL at every T, by seed, their mean, and the paper's."""
    columns = [study.values("pll", "plain"), *study.curve.values()]
    printed = [_printed(None), *map(_printed, study.curve)]
    rows = [("paper", *(MISSING if p is None else f"{p:.2f}" for p in printed))]
    rows.append(("ours", *(_estimate(c, 1, 3) for c in columns)))
    gaps = zip(columns, printed, strict=True)
    rows.append(("difference", *(MISSING if p is None else f"{_mean(c) - p:+.3f}" for c, p in gaps)))
    rows += [(f"seed {s}", *(f"{c[s]:.4f}" if s in c else MISSING for c in columns)) for s in columns[0]]
    header = ("PLL", "Plain", *(f"T = {T}" for T in study.curve))
    note = (
        f"Mean log of the averaged softmax on the test images, M = {study.batch_size}; ours ± standard error over "
        "seeds. Higher is better. At each T the mean over all disjoint sets of T out of one series of draws. Paper: "
        "Teye et al. 2018, Table 2."
    )
    return Table("PLL over the number of passes", "table:cifar_results", header, tuple(rows), note)


def scores_table(study: Study) -> Table:
    """All scores of the plain network and of MCBN at its largest T, and their difference seed by seed."""
    M, T = study.batch_size, max(study.curve)
    rows = []
    for name, (title, scale, digits) in SCORES.items():
        plain, drawn = study.values(name, "plain"), study.values(name, "mcbn", T=T, M=M)
        gap = {seed: drawn[seed] - plain[seed] for seed in drawn if seed in plain}
        rows.append((title, *(_estimate(v, scale, digits) for v in (plain, drawn)), _signed(gap, scale, digits)))
    note = (
        f"MCBN with T = {T}, M = {M}; mean ± standard error over seeds. AUROC: how well wrong labels are found by the "
        "quantity named. Higher is better for PLL, accuracy and AUROC, lower for ECE and Brier."
    )
    return Table("Scores", "table:cifar_scores", ("Score", "Plain", "MCBN", "MCBN - plain"), tuple(rows), note)


def batch_size_table(study: Study) -> Table:
    """PLL, accuracy and ECE over M at one T; the M that validation images choose is marked."""
    T = study.over("n_samples", "mcbn", "validation")[0]
    sizes = study.over("batch_size", "mcbn", "validation")
    chosen = max(sizes, key=lambda M: _mean(study.values("pll", "mcbn", "validation", T, M)))
    rows = []
    for M in sizes:
        cells = [_estimate(study.values("pll", "mcbn", "validation", T, M), 1, 4)]
        for name in ("pll", "accuracy", "ece"):
            cells.append(_estimate(study.values(name, "mcbn", "test", T, M), *SCORES[name][1:]))
        rows.append((f"{M}{' (best on validation)' if chosen == M else ''}", *cells))
    header = ("M", "PLL, validation", "PLL", "Accuracy (%)", "ECE (%)")
    note = (
        f"T = {T}; mean ± standard error over seeds. The network was trained at M = {study.batch_size}; validation "
        "images were not trained on."
    )
    return Table("MCBN over the batch size M", "table:cifar_batch_size", header, tuple(rows), note)


def query_table(study: Study) -> Table:
    """PLL of fresh batches for every image and of shared draws, on the same images."""
    rows = []
    for r in (r for r in study.rows if r["method"] == "mcbn_per_query"):
        M, T, seed = r["batch_size"], r["n_samples"], r["seed"]
        shared = [study.values("pll", "mcbn_shared", "query", T, m).get(seed) for m in (M - 1, M)]
        gap, error = r["scores"]["pll_minus_shared"], r["errors"]["pll_minus_shared"]
        cells = [f"{r['scores']['pll']:.4f}", *(MISSING if p is None else f"{p:.4f}" for p in shared)]
        rows.append((f"{seed}", f"{r['n_images']}", f"{T}", *cells, f"{gap:+.4f} ± {error:.4f}"))
    header = ("Seed", "Images", "T", "PLL, fresh", "PLL, shared M - 1", "PLL, shared M", "Fresh - shared M - 1")
    note = (
        f"Fresh: M - 1 = {study.batch_size - 1} augmented training images for every test image and pass, the authors' "
        "estimator. Shared: every image meets the same T draws. ± standard error of the difference, paired by image, "
        "with the spread over sets of shared draws."
    )
    return Table("Fresh batches for every image against shared draws", "table:cifar_query", header, tuple(rows), note)


def targets(study: Study) -> list[str]:
    """Say of each aim whether it was reached, with the worst seed's number."""
    plain, curve = study.values("pll", "plain"), study.curve
    T = max(curve)
    least, last = min(plain.values()), min(curve[T].values())
    gain = min(curve[T][s] - plain[s] for s in plain)
    early = min(max(c[s] for T, c in curve.items() if T <= REACHED_BY) - plain[s] for s in plain)
    fall = min((b[s] - a[s] for a, b in pairwise(curve.values()) for s in plain), default=0.0)
    seconds = max((r["seconds"] for r in study.training), default=0.0)
    return [
        _target(f"plain PLL {PLAIN_TARGET} or better", least, least >= PLAIN_TARGET),
        _target(f"MCBN PLL at T = {T} {MCBN_TARGET} or better", last, last >= MCBN_TARGET),
        _target("MCBN better than plain on every seed: least gain", gain, gain > 0),
        _target(f"plain reached at T <= {REACHED_BY}: least gain there", early, early >= 0),
        _target("PLL does not fall as T grows: least step", fall, fall >= 0),
        _target(f"training of a seed within {TRAINING_SECONDS} s: longest", seconds, seconds <= TRAINING_SECONDS),
    ]


def figure(study: Study) -> "Figure":
    """Draw PLL over T: seeds, their mean, the plain network, and the paper's numbers."""
    sizes, curves = list(study.curve), list(study.curve.values())
    plain, drawn = study.values("pll", "plain"), plots.new_figure(6.5, 4.2, dpi=100)
    ax = drawn.add_subplot()
    for number, seed in enumerate(plain):
        label = "MCBN, one seed" if number == 0 else None
        ax.plot(sizes, [c[seed] for c in curves], color="tab:blue", alpha=0.4, linewidth=1, label=label)
    ax.plot(sizes, [_mean(c) for c in curves], "o-", color="tab:blue", label="MCBN, mean of seeds")
    ax.axhline(_mean(plain), color="0.3", linestyle="--", label="plain network, mean of seeds")
    theirs = [(T, p) for T in sizes if (p := _printed(T)) is not None]
    if theirs:
        ax.plot(*zip(*theirs, strict=True), "s", color="tab:orange", label="MCBN, paper")
        ax.axhline(_printed(None) or 0.0, color="tab:orange", linestyle=":", label="plain network, paper")
    ax.set_xscale("log", base=2)
    ax.set_xticks(sizes, [str(T) for T in sizes])
    ax.set(
        xlabel="T, stochastic passes",
        ylabel="PLL on test images",
        title=f"CIFAR-10, {study.network}, M = {study.batch_size}",
    )
    ax.legend(loc="lower right", frameon=False)
    return drawn


def _printed(T: int | None) -> float | None:
    """Return the paper's PLL at T, None: of the plain network."""
    if T is None:
        found = paper.find("cifar10", "plain", "pll")
    else:
        found = paper.find_sensitivity("table:cifar_results", "cifar10", "pll", 32, T)
    return None if found is None else found.mean


def _mean(values: Values) -> float:
    return student.mean_error(list(values.values()))[0]


def _estimate(values: Values, scale: float, digits: int) -> str:
    if not values:
        return MISSING
    mean, error = student.mean_error([scale * v for v in values.values()])
    return f"{mean:.{digits}f}" + ("" if error is None else f" ± {error:.{digits}f}")


def _signed(values: Values, scale: float, digits: int) -> str:
    text = _estimate(values, scale, digits)
    return text if text == MISSING or text.startswith("-") else f"+{text}"


def _target(what: str, value: float, reached: bool) -> str:
    return f"{what}: {value:.4g}, {'reached' if reached else 'not reached'}."
