"""CIFAR-10 from its records alone: Table 2 beside the paper's, the sweep over M, fresh against shared batches."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

from mcbn import plots
from mcbn.errors import MCBNError
from mcbn.files import write_text
from mcbn_study import journal, paper
from mcbn_study.cifar10.run import KIND, TRAINING
from mcbn_study.estimates import Score, mean_cell
from mcbn_study.journal import RECORDS, Record, latest
from mcbn_study.png import save_figure
from mcbn_study.tables import MISSING, Table, read_words, table, to_csv, to_markdown

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLUMNS = ("network", "method", "seed", "n_samples", "batch_size", "metric", "value")
KEYS = ("network", "method", "seed", "part", "n_samples", "batch_size")
_WORDS = read_words(__package__)
SCORES = {name: Score(**words) for name, words in _WORDS["measured"].items()}
PLAIN_TARGET, MCBN_TARGET, REACHED_BY, TRAINING_SECONDS = -0.32, -0.28, 4, 600
Values = dict[int, float]  # by seed


class Measurements(NamedTuple):
    """The last record of every measurement of one network, and of every training."""

    network: str
    rows: list[Record]
    training: list[Record]

    def values(self, name: str, method: str, part: str = "test", T: int | None = None, M: int | None = None) -> Values:
        """Return a score by seed."""
        wanted = {"method": method, "part": part, "n_samples": T, "batch_size": M}
        rows = [r for r in self.rows if wanted.items() <= r.items() and name in r["scores"]]
        return {r["seed"]: r["scores"][name] for r in sorted(rows, key=lambda r: r["seed"])}

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
        return {T: v for T in sizes if (v := self.values("pll", "mcbn", T=T, M=self.batch_size))}


def write(out: str | Path = "results/cifar10") -> list[Path]:
    """Write summary.csv, table.md and a figure a network of the records in a folder."""
    out = Path(out)
    recorded = journal.read(out / RECORDS)
    studies = collect(recorded)
    text = "\n".join(["# CIFAR-10", "", *(section for study in studies for section in sections(study))])
    written = [write_text(out / "summary.csv", summary(recorded)), write_text(out / "table.md", text)]
    return [*written, *(save_figure(figure(study), out / f"{study.network}-pll.png") for study in studies)]


def collect(recorded: Iterable[Record]) -> list[Measurements]:
    """Group the records by network; of a repeated measurement the last counts."""
    rows, training = _latest(list(recorded))
    if not rows:
        raise MCBNError("there are no CIFAR-10 records; make them with `mcbn reproduce cifar10`")
    names = sorted({r["network"] for r in rows})
    return [Measurements(n, *([r for r in group if r["network"] == n] for group in (rows, training))) for n in names]


def _latest(recorded: Sequence[Record]) -> tuple[list[Record], list[Record]]:
    """Return the last record of every measurement, and of every training."""
    rows = latest([r for r in recorded if r["kind"] == KIND], KEYS)
    return rows, latest([r for r in recorded if r["kind"] == TRAINING], ("network", "seed"))


def summary(recorded: Sequence[Record]) -> str:
    """Lay out every score as a CSV row; scores on validation images and standard errors have names of their own."""
    return to_csv(COLUMNS, _summary_rows(*_latest(recorded)))


def _summary_rows(rows: Iterable[Record], training: Iterable[Record]) -> Iterator[Sequence[Any]]:
    for r in training:
        for name in ("seconds", "milliseconds_per_step", "loss", "accuracy"):
            yield r["network"], "training", r["seed"], None, None, name, f"{r[name]:.6g}"
    for r in rows:
        prefix = "validation_" if r["part"] == "validation" else ""
        scores = r["scores"] | {f"{name}_standard_error": value for name, value in r["errors"].items()}
        for name, value in scores.items():
            yield *(r[column] for column in COLUMNS[:5]), prefix + name, f"{value:.8g}"


def sections(study: Measurements) -> list[str]:
    """Lay out all tables of one network, and what was asked of it."""
    tables = [passes_table(study), scores_table(study), batch_size_table(study), query_table(study)]
    where = sorted({f"{r['hardware']}, torch {r['torch']}, commit {r['commit'][:12]}" for r in study.rows})
    lines = [f"{study.network}; measured on {'; '.join(where)}.", "", *(f"- {t}" for t in targets(study)), ""]
    return [*lines, *map(to_markdown, tables)]


def passes_table(study: Measurements) -> Table:
    """Table 2: PLL at every T, by seed, their mean, and the paper's."""
    columns = {None: study.values("pll", "plain")} | study.curve
    printed = {T: _printed(T) for T in columns}
    gaps = [None if p is None else fmean(columns[T].values()) - p for T, p in printed.items()]
    rows = [
        ("paper", *(_show(p, ".2f") for p in printed.values())),
        ("ours", *(mean_cell(c.values(), decimals=3) for c in columns.values())),
        ("difference", *(_show(gap, "+.3f") for gap in gaps)),
        *((f"seed {s}", *(_show(c.get(s), ".4f") for c in columns.values())) for s in columns[None]),
    ]
    return table(_WORDS["passes"], rows, [f"T = {T}" for T in study.curve], M=study.batch_size)


def _show(value: float | None, digits: str) -> str:
    return MISSING if value is None else f"{value:{digits}}"


def scores_table(study: Measurements) -> Table:
    """All scores of the plain network and of MCBN at its largest T, and their difference seed by seed."""
    M, T = study.batch_size, max(study.curve)
    rows = []
    for name, score in SCORES.items():
        plain, drawn = study.values(name, "plain"), study.values(name, "mcbn", T=T, M=M)
        gaps = [drawn[seed] - plain[seed] for seed in drawn if seed in plain]
        rows.append((score.title, *(score.cell(v.values()) for v in (plain, drawn)), score.cell(gaps, sign="+")))
    return table(_WORDS["scores"], rows, T=T, M=M)


def batch_size_table(study: Measurements) -> Table:
    """PLL, accuracy and ECE over M at one T; the M that validation images choose is marked."""
    T = study.over("n_samples", "mcbn", "validation")[0]
    sizes = study.over("batch_size", "mcbn", "validation")
    validation = {M: study.values("pll", "mcbn", "validation", T, M).values() for M in sizes}
    chosen = max(sizes, key=lambda M: fmean(validation[M]))
    rows = []
    for M in sizes:
        tested = (SCORES[name].cell(study.values(name, "mcbn", "test", T, M).values()) for name in list(SCORES)[:3])
        rows.append((f"{M}{' (best on validation)' * (chosen == M)}", SCORES["pll"].cell(validation[M]), *tested))
    return table(_WORDS["batch_size"], rows, T=T, M=study.batch_size)


def query_table(study: Measurements) -> Table:
    """PLL of fresh batches for every image and of shared draws, on the same images."""
    rows = []
    for r in (r for r in study.rows if r["method"] == "mcbn_per_query"):
        M, T, seed = r["batch_size"], r["n_samples"], r["seed"]
        shared = [study.values("pll", "mcbn_shared", "query", T, m).get(seed) for m in (M - 1, M)]
        gap, error = r["scores"]["pll_minus_shared"], r["errors"]["pll_minus_shared"]
        cells = [_show(pll, ".4f") for pll in (r["scores"]["pll"], *shared)]
        rows.append((f"{seed}", f"{r['n_images']}", f"{T}", *cells, f"{gap:+.4f} ± {error:.4f}"))
    return table(_WORDS["query"], rows, fresh=study.batch_size - 1)


def targets(study: Measurements) -> list[str]:
    """Say of each aim whether it was reached, with the worst seed's number."""
    plain, curve = study.values("pll", "plain"), study.curve
    T = max(curve)
    least, last = min(plain.values()), min(curve[T].values())
    gain = min(curve[T][s] - plain[s] for s in plain)
    early = min(max(c[s] for T, c in curve.items() if T <= REACHED_BY) - plain[s] for s in plain)
    fall = min((b[s] - a[s] for a, b in pairwise(curve.values()) for s in plain), default=0.0)
    seconds = max((r["seconds"] for r in study.training), default=0.0)
    aims = [
        (f"plain PLL {PLAIN_TARGET} or better", least, least >= PLAIN_TARGET),
        (f"MCBN PLL at T = {T} {MCBN_TARGET} or better", last, last >= MCBN_TARGET),
        ("MCBN better than plain on every seed: least gain", gain, gain > 0),
        (f"plain reached at T <= {REACHED_BY}: least gain there", early, early >= 0),
        ("PLL does not fall as T grows: least step", fall, fall >= 0),
        (f"training of a seed within {TRAINING_SECONDS} s: longest", seconds, seconds <= TRAINING_SECONDS),
    ]
    return [f"{aim}: {value:.4g}, {'reached' if reached else 'not reached'}." for aim, value, reached in aims]


def figure(study: Measurements) -> "Figure":
    """Draw PLL over T: seeds, their mean, the plain network, and the paper's numbers."""
    sizes, curves = list(study.curve), list(study.curve.values())
    plain, drawn = study.values("pll", "plain"), plots.new_figure(6.5, 4.2, dpi=100)
    ax = drawn.add_subplot()
    for number, seed in enumerate(plain):
        label = "MCBN, one seed" if number == 0 else None
        ax.plot(sizes, [c[seed] for c in curves], color="tab:blue", alpha=0.4, linewidth=1, label=label)
    ax.plot(sizes, [fmean(c.values()) for c in curves], "o-", color="tab:blue", label="MCBN, mean of seeds")
    ax.axhline(fmean(plain.values()), color="0.3", linestyle="--", label="plain network, mean of seeds")
    theirs = [(T, p) for T in sizes if (p := _printed(T)) is not None]
    if theirs:
        ax.plot(*zip(*theirs, strict=True), "s", color="tab:orange", label="MCBN, paper")
        ax.axhline(_printed(None) or 0.0, color="tab:orange", linestyle=":", label="plain network, paper")
    ax.set_xscale("log", base=2)
    ax.set_xticks(sizes, [str(T) for T in sizes])
    ax.set(xlabel="T, stochastic passes", ylabel="PLL on test images")
    ax.set_title(f"CIFAR-10, {study.network}, M = {study.batch_size}")
    ax.legend(loc="lower right", frameon=False)
    return drawn


def _printed(T: int | None) -> float | None:
    """Return the paper's PLL at T, None: of the plain network."""
    passes = T and paper.find_sensitivity("table:cifar_results", "cifar10", "pll", 32, T)
    printed = passes if T else paper.find("cifar10", "plain", "pll")
    return printed.mean if printed else None
