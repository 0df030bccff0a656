"""Tables of the families of q(omega) from their records: scores, CRPS relative to sampled draws, costs."""

import csv
import io
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from mcbn.data import NAMES, describe
from mcbn.errors import MCBNError
from mcbn.files import write_text
from mcbn_study import journal, student
from mcbn_study.journal import Record
from mcbn_study.regression.estimates import Estimate, cell
from mcbn_study.regression.summary import METRICS, runs, score
from mcbn_study.tables import MISSING, Table, to_markdown

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
_COMMAND = "mcbn reproduce posteriors"
_COSTS = ("fit_seconds", "predict_seconds", "bytes")
_RUNS = "Mean ± standard error over the runs."
_BOUNDS = "Percent of the way from constant uncertainty (0) to the optimum (100), both of the sampled draws' mean."
_NOTES = {
    "rmse": "Lower is better.",
    "crps": "Lower is better.",
    "pll": "Higher is better. Mixture of the draws; of the linear ones the log density of their Gaussian.",
    "crps_normalized": f"{_BOUNDS} Higher is better.",
    "pll_normalized": f"{_BOUNDS} Higher is better.",
}
Runs = dict[tuple[str, str], list[Record]]  # by data set, family; in the order of split, seed


def main(out: str | Path = "results/posteriors") -> None:
    """Write the tables and print their paths."""
    print("\n".join(map(str, write(out))))


def write(out: str | Path = "results/posteriors") -> list[Path]:
    """Write table.md and table.csv, and cifar.md, of the records in a folder."""
    out = Path(out)
    found, images = journal.read(out / "records.jsonl"), journal.read(out / "cifar.jsonl")
    if not found and not images:
        raise MCBNError(f"{out} holds no records; make them with `{_COMMAND}`")
    written = []
    if found:
        own = collect(found)
        text = "\n".join(["# Families of q(omega) on the study's networks", "", *map(to_markdown, tables(own))])
        written += [write_text(out / "table.md", text), write_text(out / "table.csv", to_csv(own))]
    if images:
        written.append(write_text(out / "cifar.md", to_markdown(cifar_table(images)).replace("## ", "# ", 1)))
    return written


def collect(found: Iterable[Record]) -> Runs:
    """Group the records by data set and family; the last of a repeated run counts."""
    own: Runs = {}
    for run in runs([r | {"method": r["family"]} for r in found], kind="posterior"):
        own.setdefault((run["dataset"], run["family"]), []).append(run)
    return {key: sorted(group, key=lambda r: (r["split"], r["seed"])) for key, group in own.items()}


def to_csv(own: Runs) -> str:
    """Lay out mean and standard error of every score and cost, and of CRPS relative to `sample` in percent."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(("dataset", "family", "metric", "n", "mean", "standard_error"))
    for dataset, family in ((d, f) for d in NAMES for f in FAMILIES if (d, f) in own):
        group, reference = own[dataset, family], own.get((dataset, "sample"), [])
        estimates = {m: _estimate(v) for m in [*METRICS, *_COSTS] if (v := _values(group, m))}
        if _paired(group, reference):
            estimates["crps_relative"] = relative(group, reference)
        for metric, e in estimates.items():
            error = "" if e.error is None else f"{e.error:.10g}"
            writer.writerow((dataset, family, metric, e.n, f"{e.mean:.10g}", error))
    return text.getvalue()


def tables(own: Runs) -> list[Table]:
    """Lay out the comparison; data sets that were not run have no row."""
    sets = [name for name in NAMES if (name, "sample") in own]
    families = [family for family in FAMILIES if any((name, family) in own for name in sets)]
    scores = [_score_table(own, sets, families, metric) for metric in _NOTES]
    return [relative_table(own, sets, families), *scores, _tuned_table(own, sets), _cost_table(own, sets, families)]


def relative_table(own: Runs, sets: Sequence[str], families: Sequence[str]) -> Table:
    """CRPS against `sample`, in percent of it: 100 (mean CRPS / mean CRPS of sample - 1), errors of paired runs."""
    others = [family for family in families if family != "sample"]
    lines = []
    for name in sets:
        gaps = {family: relative(own[name, family], own[name, "sample"]) for family in others if (name, family) in own}
        reached = MISSING if "gaussian" not in gaps else "reached" if gaps["gaussian"].mean <= TARGET else "not reached"
        lines.append((describe(name).title, *(_percent(gaps.get(family)) for family in others), reached))
    note = (
        "Percent above (worse) or below (better) the CRPS of sampled draws, same network, same tau except for Tuned M;"
        " ± standard error of the paired differences. Sampled again: other training batches, so what lies within its"
        f" spread is Monte Carlo noise. Target: the full-covariance Gaussian at most {TARGET:g} % worse on every set."
    )
    header = ("Dataset", *(FAMILIES[family] for family in others), "Gaussian: target")
    return Table("CRPS relative to sampled draws (%)", "table:posterior_relative", header, tuple(lines), note)


def relative(group: Sequence[Record], reference: Sequence[Record]) -> Estimate:
    """Compare the mean CRPS of two families over the runs that both have."""
    pairs = _paired(group, reference)
    base, _ = student.mean_error([theirs for _, theirs in pairs])
    mean, error = student.mean_error([100 * (mine - theirs) / base for mine, theirs in pairs])
    return Estimate(mean, error, None, len(pairs), 2)


def _paired(group: Sequence[Record], reference: Sequence[Record]) -> list[tuple[float, float]]:
    theirs = {(r["split"], r["seed"]): score(r, "crps") for r in reference}
    pairs = [(score(r, "crps"), theirs.get((r["split"], r["seed"]))) for r in group]
    return [(a, b) for a, b in pairs if a is not None and b is not None]


def _percent(gap: Estimate | None) -> str:
    return MISSING if gap is None else cell(gap) if gap.mean < 0 else f"+{cell(gap)}"


def _score_table(own: Runs, sets: Sequence[str], families: Sequence[str], metric: str) -> Table:
    def shown(group: Sequence[Record]) -> str:
        values = _values(group, metric)
        return cell(_estimate(values)) if values else MISSING

    lines = _lines(own, sets, families, shown)
    header = ("Dataset", *(FAMILIES[family] for family in families))
    return Table(METRICS[metric], f"table:posterior_{metric}", header, lines, f"{_NOTES[metric]} {_RUNS}")


def _tuned_table(own: Runs, sets: Sequence[str]) -> Table:
    """What the folds chose, split by split."""
    lines = []
    for name in sets:
        first = {r["split"]: r for r in own.get((name, "tuned"), [])}
        before = {r["split"]: r for r in own[name, "sample"]}
        chosen = [f"{_size(before[s])} to {_size(r)}" for s, r in first.items() if s in before]
        taus = [f"{before[s]['tau']:.3g} to {r['tau']:.3g}" for s, r in first.items() if s in before]
        lines.append((describe(name).title, ", ".join(chosen) or MISSING, ", ".join(taus) or MISSING))
    note = "For each split: trained M and tau, to the M' and tau of least validation CRPS over the folds."
    return Table("Tuned M", "table:posterior_tuned", ("Dataset", "M to M'", "tau"), tuple(lines), note)


def _size(record: Record) -> int:
    return int(record["config"]["posterior_batch_size"])


def _cost_table(own: Runs, sets: Sequence[str], families: Sequence[str]) -> Table:
    def shown(group: Sequence[Record]) -> str:
        fit, predict, size = (statistics.median(_values(group, m)) for m in _COSTS)
        return f"{1000 * fit:.0f} + {1000 * predict:.1f}, {size / 1000:.0f}"

    lines = [
        (line[0], *(str(own[name, "sample"][0][key]) for key in ("n_train", "n_test")), *line[1:])
        for name, line in zip(sets, _lines(own, sets, families, shown), strict=True)
    ]
    device = ", ".join(sorted({str(r["device"]) for group in own.values() for r in group}))
    note = (
        "Milliseconds to fit + to predict all test rows (moments), then kilobytes of the saved posterior; medians over"
        f" the networks ({device}). No size depends on the N training rows; that of sampled draws grows with T, that of"
        " a Gaussian no further than the number of statistics."
    )
    header = ("Dataset", "N", "Test rows", *(FAMILIES[family] for family in families))
    return Table("Costs", "table:posterior_costs", header, tuple(lines), note)


def _lines(
    own: Runs, sets: Sequence[str], families: Sequence[str], shown: Callable[[Sequence[Record]], str]
) -> tuple[tuple[str, ...], ...]:
    return tuple((describe(d).title, *(shown(own[d, f]) if (d, f) in own else MISSING for f in families)) for d in sets)


def _estimate(values: Sequence[float]) -> Estimate:
    return Estimate(*student.mean_error(values), None, len(values))


def _values(group: Sequence[Record], metric: str) -> list[float]:
    return [value for record in group if (value := score(record, metric)) is not None]


def cifar_table(found: Sequence[Record]) -> Table:
    """Lay out the last record of each family and setting."""
    last = {(str(r["config"]), r["family"]): r for r in found}.values()
    mixed, lines = len({r["device"] for r in last}) > 1, []
    for r in sorted(last, key=lambda r: (r["config"]["n_test"], str(r["config"]), list(FAMILIES).index(r["family"]))):
        place = f" ({r['device']})" if mixed else ""
        costs = [f"{r[key]:.3g}{place}" if key in r else MISSING for key in ("fit_seconds", "predict_seconds")]
        size = f"{r['bytes'] / 1000:.0f}" if "bytes" in r else MISSING
        setting = [str(r["config"][key]) for key in ("batch_size", "n_samples", "n_test")]
        pll = f"{r['pll']:.4f} ± {r['pll_error']:.4f}"
        scores = [pll, f"{100 * r['accuracy']:.1f}", f"{100 * r['ece']:.2f}"]
        lines.append((FAMILIES[r["family"]], *setting, *scores, *costs, size))
    hardware = ", ".join(sorted({r["hardware"] for r in last}))
    header = ("Family", "M", "T", "Images", "PLL", "Accuracy (%)", "ECE (%)", "Fit (s)", "Predict (s)", "Saved (kB)")
    note = (
        "ResNet-32 trained by others at batch size 128; training images augmented as they were then. PLL is the mean"
        " log probability of the label, ± its standard error over the images; these are the same for every family, so"
        f" that differences between families are surer than it suggests. {hardware}."
    )
    return Table("Families of q(omega) on CIFAR-10", "table:posterior_cifar", header, tuple(lines), note)
