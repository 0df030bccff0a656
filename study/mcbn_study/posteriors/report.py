"""Tables of the families of q(omega) from their records: scores, CRPS relative to sampled draws, costs."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean, median

from mcbn.data import NAMES, describe
from mcbn.errors import MCBNError
from mcbn.files import write_text
from mcbn_study import journal
from mcbn_study.estimates import Estimate, cell, estimate, mean_cell
from mcbn_study.journal import RECORDS, Record
from mcbn_study.regression.report import METRICS, runs, score
from mcbn_study.tables import read_words, render

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
        ordered = [(d, f) for d in NAMES for f in FAMILIES if (d, f) in by_family]
        rows = [(key, _estimates(by_family[key], by_family.get((key[0], "sample"), []))) for key in ordered]
        written.append(write_text(out / "table.md", page(by_family)))
        written.append(write_text(out / "table.csv", render(__package__, "table.csv.j2", rows=rows)))
    if images:
        written.append(write_text(out / "cifar.md", cifar_page(images)))
    return written


def collect(recorded: Iterable[Record]) -> Runs:
    """Group the records by data set and family; the last of a repeated run counts."""
    by_family: Runs = {}
    for run in runs(recorded, kind="posterior", apart=("family",)):
        by_family.setdefault((run["dataset"], run["family"]), []).append(run)
    return {key: sorted(group, key=lambda r: (r["split"], r["seed"])) for key, group in by_family.items()}


def _estimates(group: Sequence[Record], reference: Sequence[Record]) -> dict[str, Estimate]:
    """Return mean and standard error of every score and cost, and of CRPS relative to `sample` in percent."""
    estimates = {m: estimate(v) for m in [*METRICS, *_COSTS] if (v := _values(group, m))}
    return estimates | ({"crps_relative": relative(group, reference)} if _paired(group, reference) else {})


def page(by_family: Runs) -> str:
    """Lay out the comparison; data sets that were not run have no row."""
    sets = [name for name in NAMES if (name, "sample") in by_family]
    families = [family for family in FAMILIES if any((name, family) in by_family for name in sets)]

    def gap(dataset: str, family: str) -> Estimate | None:
        group = by_family.get((dataset, family))
        return relative(group, by_family[dataset, "sample"]) if group else None

    def tuned(dataset: str) -> list[tuple[Record, Record]]:
        before, after = ({r["split"]: r for r in by_family.get((dataset, f), [])} for f in ("sample", "tuned"))
        return [(before[s], r) for s, r in after.items() if s in before]

    functions = {"cell": cell, "mean_cell": mean_cell, "values": _values, "median": median, "gap": gap, "tuned": tuned}
    words = {"names": FAMILIES, "metrics": METRICS, "meanings": _WORDS["meanings"], "target": TARGET}
    titles, devices = {d: describe(d).title for d in sets}, {str(r["device"]) for g in by_family.values() for r in g}
    shown = {"runs": by_family, "sets": sets, "families": families, "titles": titles, "devices": sorted(devices)}
    return render(__package__, **shown, **words, **functions)


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


def cifar_page(recorded: Sequence[Record]) -> str:
    """Lay out the last record of each family and setting, fewer images first."""
    last = list({(str(r["config"]), r["family"]): r for r in recorded}.values())
    last.sort(key=lambda r: (r["config"]["n_test"], str(r["config"]), list(FAMILIES).index(r["family"])))
    return render(__package__, "cifar.md.j2", last=last, names=FAMILIES)
