"""Tables of the families of q(omega) from their records: scores, CRPS relative to sampled draws, costs."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

from mcbn.data import NAMES, describe
from mcbn.errors import MCBNError
from mcbn.files import write_text
from mcbn_study import journal
from mcbn_study.estimates import Estimate, cell, estimate, mean_cell
from mcbn_study.journal import RECORDS, Record
from mcbn_study.regression.summary import METRICS, runs, score
from mcbn_study.tables import MISSING, Table, read_words, table, to_csv, to_markdown

_WORDS = read_words(__package__)
FAMILIES: dict[str, str] = _WORDS["families"]
TARGET = 1.0  # percent of CRPS between the full-covariance Gaussian and sampled draws
_COSTS = ("fit_seconds", "predict_seconds", "bytes")
Runs = dict[tuple[str, str], list[Record]]  # by data set, family; in the order of split, seed


def write(out: str | Path = "results/posteriors") -> list[Path]:
    """Write table.md and table.csv, and cifar.md, of the records in a folder."""
    out = Path(out)
    recorded, images = journal.read(out / RECORDS), journal.read(out / "cifar.jsonl")
    if not recorded and not images:
        raise MCBNError(f"{out} holds no records; make them with `mcbn reproduce posteriors`")
    written = []
    if recorded:
        by_family = collect(recorded)
        text = "\n".join(["# Families of q(omega) on the study's networks", "", *map(to_markdown, tables(by_family))])
        header = ("dataset", "family", "metric", "n", "mean", "standard_error")
        written.append(write_text(out / "table.md", text))
        written.append(write_text(out / "table.csv", to_csv(header, _estimates(by_family), digits=10)))
    if images:
        written.append(write_text(out / "cifar.md", to_markdown(cifar_table(images)).replace("## ", "# ", 1)))
    return written


def collect(recorded: Iterable[Record]) -> Runs:
    """Group the records by data set and family; the last of a repeated run counts."""
    by_family: Runs = {}
    for run in runs([r | {"method": r["family"]} for r in recorded], kind="posterior"):
        by_family.setdefault((run["dataset"], run["family"]), []).append(run)
    return {key: sorted(group, key=lambda r: (r["split"], r["seed"])) for key, group in by_family.items()}


def _estimates(by_family: Runs) -> Iterator[Sequence[Any]]:
    """Yield mean and standard error of every score and cost, and of CRPS relative to `sample` in percent."""
    for dataset, family in ((d, f) for d in NAMES for f in FAMILIES if (d, f) in by_family):
        group, reference = by_family[dataset, family], by_family.get((dataset, "sample"), [])
        estimates = {m: estimate(v) for m in [*METRICS, *_COSTS] if (v := _values(group, m))}
        if _paired(group, reference):
            estimates["crps_relative"] = relative(group, reference)
        yield from ((dataset, family, metric, e.n, e.mean, e.standard_error) for metric, e in estimates.items())


def tables(by_family: Runs) -> list[Table]:
    """Lay out the comparison; data sets that were not run have no row."""
    sets = [name for name in NAMES if (name, "sample") in by_family]
    families = [family for family in FAMILIES if any((name, family) in by_family for name in sets)]
    names = [FAMILIES[family] for family in families]

    def rows(shown: Callable[[Sequence[Record]], str]) -> list[tuple[str, ...]]:
        groups = {name: [by_family.get((name, family)) for family in families] for name in sets}
        return [(describe(d).title, *(shown(g) if g else MISSING for g in row)) for d, row in groups.items()]

    scores = [
        table(_WORDS["scores"], rows(partial(_mean, metric=m)), names, name=METRICS[m], metric=m, meaning=meaning)
        for m, meaning in _WORDS["meanings"].items()
    ]
    counts = [[str(by_family[name, "sample"][0][key]) for key in ("n_train", "n_test")] for name in sets]
    costs = [(title, *n, *cells) for n, (title, *cells) in zip(counts, rows(_costs), strict=True)]
    device = ", ".join(sorted({str(r["device"]) for group in by_family.values() for r in group}))
    return [
        _relative_table(by_family, sets, families),
        *scores,
        _tuned_table(by_family, sets),
        table(_WORDS["costs"], costs, names, device=device),
    ]


def _mean(group: Sequence[Record], metric: str) -> str:
    return mean_cell(_values(group, metric))


def _costs(group: Sequence[Record]) -> str:
    fit, predict, size = (median(_values(group, m)) for m in _COSTS)
    return f"{1000 * fit:.0f} + {1000 * predict:.1f}, {size / 1000:.0f}"


def _relative_table(by_family: Runs, sets: Sequence[str], families: Sequence[str]) -> Table:
    """CRPS against `sample`, in percent of it: 100 (mean CRPS / mean CRPS of sample - 1), errors of paired runs."""
    others = [family for family in families if family != "sample"]
    rows = []
    for name in sets:
        gaps = {f: relative(by_family[name, f], by_family[name, "sample"]) for f in others if (name, f) in by_family}
        reached = MISSING if "gaussian" not in gaps else "reached" if gaps["gaussian"].mean <= TARGET else "not reached"
        rows.append((describe(name).title, *(cell(gaps.get(f), sign="+") for f in others), reached))
    header = ("Dataset", *(FAMILIES[family] for family in others), "Gaussian: target")
    return table(_WORDS["relative"], rows, header, target=TARGET)


def relative(group: Sequence[Record], reference: Sequence[Record]) -> Estimate:
    """Compare the mean CRPS of two families over the runs that both have."""
    pairs = _paired(group, reference)
    base = fmean(theirs for _, theirs in pairs)
    return estimate((100 * (ours - theirs) / base for ours, theirs in pairs), decimals=2)


def _paired(group: Sequence[Record], reference: Sequence[Record]) -> list[tuple[float, float]]:
    theirs = {(r["split"], r["seed"]): score(r, "crps") for r in reference}
    pairs = [(score(r, "crps"), theirs.get((r["split"], r["seed"]))) for r in group]
    return [(a, b) for a, b in pairs if a is not None and b is not None]


def _values(group: Sequence[Record], metric: str) -> list[float]:
    return [value for record in group if (value := score(record, metric)) is not None]


def _tuned_table(by_family: Runs, sets: Sequence[str]) -> Table:
    """What the folds chose, split by split."""
    rows = []
    for name in sets:
        before = {r["split"]: r for r in by_family[name, "sample"]}
        after = {r["split"]: r for r in by_family.get((name, "tuned"), [])}
        pairs = [(before[s], r) for s, r in after.items() if s in before]
        sizes = [" to ".join(str(r["config"]["posterior_batch_size"]) for r in pair) for pair in pairs]
        taus = [" to ".join(f"{r['tau']:.3g}" for r in pair) for pair in pairs]
        rows.append((describe(name).title, ", ".join(sizes) or MISSING, ", ".join(taus) or MISSING))
    return table(_WORDS["tuned"], rows)


def cifar_table(recorded: Sequence[Record]) -> Table:
    """Lay out the last record of each family and setting."""
    last = {(str(r["config"]), r["family"]): r for r in recorded}.values()
    mixed, rows = len({r["device"] for r in last}) > 1, []
    for r in sorted(last, key=lambda r: (r["config"]["n_test"], str(r["config"]), list(FAMILIES).index(r["family"]))):
        place = f" ({r['device']})" if mixed else ""
        costs = [f"{r[key]:.3g}{place}" if key in r else MISSING for key in ("fit_seconds", "predict_seconds")]
        size = f"{r['bytes'] / 1000:.0f}" if "bytes" in r else MISSING
        setting = [str(r["config"][key]) for key in ("batch_size", "n_samples", "n_test")]
        scores = [f"{r['pll']:.4f} ± {r['pll_error']:.4f}", f"{100 * r['accuracy']:.1f}", f"{100 * r['ece']:.2f}"]
        rows.append((FAMILIES[r["family"]], *setting, *scores, *costs, size))
    hardware = ", ".join(sorted({r["hardware"] for r in last}))
    return table(_WORDS["cifar"], rows, hardware=hardware)
