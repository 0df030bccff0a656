"""Tables of the families of q(omega) from their records: scores, CRPS relative to sampled draws, costs."""

from collections.abc import Callable, Iterable, Iterator, Sequence
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
from mcbn_study.tables import MISSING, Table, to_csv, to_markdown

FAMILIES = {
    "plain": "Plain",
    "sample": "Sampled",
    "sample_again": "Sampled again",
    "gaussian": "Gaussian",
    "layerwise": "Layerwise",
    "diagonal": "Diagonal",
    "linear": "Linear",
    "linear_gaussian": "Linear, Gaussian",
    "tuned": "Tuned M",
}
TARGET = 1.0  # percent of CRPS between the full-covariance Gaussian and sampled draws
_COSTS = ("fit_seconds", "predict_seconds", "bytes")
_BOUNDS = "Percent of the way from constant uncertainty (0) to the optimum (100), both of the sampled draws' mean."
_NOTES = {
    "rmse": "Lower is better.",
    "crps": "Lower is better.",
    "pll": "Higher is better. Mixture of the draws; of the linear ones the log density of their Gaussian.",
    "crps_normalized": f"{_BOUNDS} Higher is better.",
    "pll_normalized": f"{_BOUNDS} Higher is better.",
}
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
    header = ("Dataset", *(FAMILIES[family] for family in families))

    def rows(shown: Callable[[Sequence[Record]], str]) -> list[tuple[str, ...]]:
        groups = [[by_family.get((name, family)) for family in families] for name in sets]
        cells = [[shown(group) if group else MISSING for group in row] for row in groups]
        return [(describe(name).title, *row) for name, row in zip(sets, cells, strict=True)]

    def scored(metric: str) -> Table:
        cells = rows(lambda group: mean_cell(_values(group, metric)))
        note = f"{_NOTES[metric]} Mean ± standard error over the runs."
        return Table(METRICS[metric], f"table:posterior_{metric}", header, cells, note)

    scores = map(scored, _NOTES)
    costs = _cost_table(by_family, header, rows(_costs))
    return [_relative_table(by_family, sets, families), *scores, _tuned_table(by_family, sets), costs]


def _relative_table(by_family: Runs, sets: Sequence[str], families: Sequence[str]) -> Table:
    """CRPS against `sample`, in percent of it: 100 (mean CRPS / mean CRPS of sample - 1), errors of paired runs."""
    others = [family for family in families if family != "sample"]
    rows = []
    for name in sets:
        sampled = by_family[name, "sample"]
        gaps = {f: relative(by_family[name, f], sampled) for f in others if (name, f) in by_family}
        reached = MISSING if "gaussian" not in gaps else "reached" if gaps["gaussian"].mean <= TARGET else "not reached"
        rows.append((describe(name).title, *(cell(gaps.get(f), sign="+") for f in others), reached))
    note = (
        "Percent above (worse) or below (better) the CRPS of sampled draws, same network, same tau except for Tuned M;"
        " ± standard error of the paired differences. Sampled again: other training batches, so what lies within its"
        f" spread is Monte Carlo noise. Target: the full-covariance Gaussian at most {TARGET:g} % worse on every set."
    )
    header = ("Dataset", *(FAMILIES[family] for family in others), "Gaussian: target")
    return Table("CRPS relative to sampled draws (%)", "table:posterior_relative", header, rows, note)


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
    note = "For each split: trained M and tau, to the M' and tau of least validation CRPS over the folds."
    return Table("Tuned M", "table:posterior_tuned", ("Dataset", "M to M'", "tau"), rows, note)


def _costs(group: Sequence[Record]) -> str:
    fit, predict, size = (median(_values(group, m)) for m in _COSTS)
    return f"{1000 * fit:.0f} + {1000 * predict:.1f}, {size / 1000:.0f}"


def _cost_table(by_family: Runs, header: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    counts = {describe(d).title: (str(g[0]["n_train"]), str(g[0]["n_test"])) for (d, _), g in by_family.items()}
    device = ", ".join(sorted({str(r["device"]) for group in by_family.values() for r in group}))
    note = (
        "Milliseconds to fit + to predict all test rows (moments), then kilobytes of the saved posterior; medians over"
        f" the networks ({device}). No size depends on the N training rows; that of sampled draws grows with T, that of"
        " a Gaussian no further than the number of statistics."
    )
    lines = [(title, *counts[title], *cells) for title, *cells in rows]
    return Table("Costs", "table:posterior_costs", (header[0], "N", "Test rows", *header[1:]), lines, note)


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
    header = ("Family", "M", "T", "Images", "PLL", "Accuracy (%)", "ECE (%)", "Fit (s)", "Predict (s)", "Saved (kB)")
    note = (
        "ResNet-32 trained by others at batch size 128; training images augmented as they were then. PLL is the mean"
        " log probability of the label, ± its standard error over the images; these are the same for every family, so"
        f" that differences between families are surer than it suggests. {hardware}."
    )
    return Table("Families of q(omega) on CIFAR-10", "table:posterior_cifar", header, rows, note)
