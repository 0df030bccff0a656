"""CIFAR-10 from its records alone: Table 2 beside the paper's, the sweep over M, fresh against shared batches."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from mcbn import plots
from mcbn.errors import MCBNError
from mcbn.files import write_text
from mcbn_study import paper
from mcbn_study.cifar10.run import KIND, TRAINING
from mcbn_study.estimates import Score, mean_cell
from mcbn_study.journal import RECORDS, Record, latest, read
from mcbn_study.tables import MISSING, read_words, render, save_figure

KEYS = ("network", "method", "seed", "part", "n_samples", "batch_size")
_WORDS = read_words(__package__)
SCORES = {name: Score(**words) for name, words in _WORDS["measured"].items()}
N_TEST = 10_000  # all test images
Values = dict[int, float]  # by seed


class Measurements(NamedTuple):
    """The last record of every measurement of one network."""

    network: str
    batch_size: int  # of the training
    rows: list[Record]

    def values(self, name: str, method: str, part: str = "test", T: int | None = None, M: int | None = None) -> Values:
        """Return a score by seed."""
        wanted = {"method": method, "part": part, "n_samples": T, "batch_size": M}
        rows = [r for r in self.rows if wanted.items() <= r.items() and name in r["scores"]]
        return {r["seed"]: r["scores"][name] for r in sorted(rows, key=lambda r: r["seed"])}

    def over(self, name: str, method: str, part: str) -> list[int]:
        """List the n_samples or batch_size that a method was measured at."""
        return sorted({r[name] for r in self.rows if (r["method"], r["part"]) == (method, part)})

    @property
    def where(self) -> list[str]:
        """Where it was measured."""
        return sorted({f"{r['hardware']}, torch {r['torch']}, commit {r['commit'][:12]}" for r in self.rows})

    def best_size(self, T: int) -> int:
        """Return the M of highest PLL on the validation images."""
        sizes = self.over("batch_size", "mcbn", "validation")
        return max(sizes, key=lambda M: fmean(self.values("pll", "mcbn", "validation", T, M).values()))

    @property
    def curve(self) -> dict[int | None, Values]:
        """PLL on the test images: of the plain network, None, and of MCBN at every T, M as in training."""
        at = {T: self.values("pll", "mcbn", T=T, M=self.batch_size) for T in self.over("n_samples", "mcbn", "test")}
        return {None: self.values("pll", "plain")} | {T: values for T, values in at.items() if values}


def write(out: str | Path = "results/cifar10") -> list[Path]:
    """Write summary.csv, table.md and a figure of each network, but those trained otherwise than the paper's."""
    out = Path(out)
    recorded = read(out / RECORDS)
    studies = collect(recorded)
    text = page(studies, gains_by_network(out.parent, studies))
    written = [write_text(out / "summary.csv", summary(recorded)), write_text(out / "table.md", text)]
    drawn = [study for study in studies if study.network.partition("-")[2] not in _WORDS["trained"]]
    return [*written, *(save_figure(figure(study), out / f"{study.network}-pll.png") for study in drawn)]


def collect(recorded: Iterable[Record]) -> list[Measurements]:
    """Group the records by network; of a repeated measurement the last counts."""
    if not (rows := latest([r for r in recorded if r["kind"] == KIND], KEYS)):
        raise MCBNError("there are no CIFAR-10 records; make them with `mcbn reproduce cifar10`")
    sizes = {r["network"]: r["config"]["batch_size"] for r in reversed(rows)}
    return [Measurements(name, M, [r for r in rows if r["network"] == name]) for name, M in sorted(sizes.items())]


def gains_by_network(results: Path, studies: Sequence[Measurements] = ()) -> list[tuple[str, ...]]:
    """Lay out networks, PLL of the plain one and MCBN, the gain, both with tau chosen, ECE of the plain one (%)."""
    pll, ece = {"paper plain": [_printed(None) or 0.0], "paper": [_printed(128) or 0.0]}, dict[str, list[float]]()
    for study in studies:
        pll |= {f"{study.network} {M}": list(study.values("pll", "mcbn", T=128, M=M).values()) for M in (32, 128)}
        for scores, name in ((pll, "pll"), (ece, "ece")):
            scores[f"{study.network} plain"] = list(study.values(name, "plain").values())
    for r in read(results / "alternatives" / RECORDS):
        if r["kind"] == "score" and r["data"] == "test":
            method = r["method"] + " tempered" * r["tempered"]
            pll.setdefault(method, []).append(-r["nll"])
            ece.setdefault(method, []).append(r["ece"])
    for r in (r for r in read(results / "foreign" / RECORDS) if r["n"] == N_TEST):
        pll[f"{r['network']} {r['method']}"], ece[f"{r['network']} {r['method']}"] = [r["pll"]], [r["ece"]]
    rows = []
    for title, *methods in _WORDS["gains"]["networks"]:
        plain, ours, *tuned = (pll.get(method, []) for method in methods)
        if plain and ours:
            gain = [b - a for a, b in zip(plain, ours, strict=True)]
            cells = (mean_cell(values, decimals=4) for values in (plain, ours, gain, *tuned))
            errors = ece.get(methods[0], [])  # the paper's has none
            rows.append((title, str(len(errors) or MISSING), *cells, mean_cell(errors, scale=100, decimals=2)))
    return rows


def page(studies: Sequence[Measurements], gains_of: Sequence[tuple[str, ...]] = ()) -> str:
    """Lay out all tables of each network; gains_of: networks, by `gains_by_network`."""

    def gains(ours: Values, theirs: Values) -> list[float]:
        return [ours[seed] - theirs[seed] for seed in ours if seed in theirs]

    content = {"mean_cell": mean_cell, "mean": fmean, "printed": _printed, "gains": gains, "trained": _WORDS["trained"]}
    return render(__package__, studies=studies, scores=SCORES, gains_of=gains_of, **content)


def summary(recorded: Sequence[Record]) -> str:
    """Lay out every score as a CSV row; scores on validation images and standard errors have names of their own."""
    rows = latest([r for r in recorded if r["kind"] == KIND], KEYS)
    training = latest([r for r in recorded if r["kind"] == TRAINING], ("network", "seed"))
    return render(__package__, "summary.csv.j2", rows=rows, training=training)


def figure(study: Measurements) -> "plots.Figure":
    """Draw PLL over T: seeds, their mean, the plain network, and the paper's numbers."""
    (_, plain), *curve = study.curve.items()
    sizes, curves = zip(*curve, strict=True)
    drawn = plots.new_figure(6.5, 4.2, dpi=100)
    ax = drawn.add_subplot()
    for number, seed in enumerate(plain):
        label = "MCBN, one seed" if number == 0 else None
        ax.plot(sizes, [c[seed] for c in curves], color="tab:blue", alpha=0.4, linewidth=1, label=label)
    ax.plot(sizes, [fmean(c.values()) for c in curves], "o-", color="tab:blue", label="MCBN, mean of seeds")
    ax.axhline(fmean(plain.values()), color="0.3", linestyle="--", label="plain network, mean of seeds")
    if theirs := [(T, p) for T in sizes if (p := _printed(T)) is not None]:
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
