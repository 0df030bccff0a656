"""The tables of the study of shifts, as table.md beside the records and inside docs/field.md."""

import math
from collections.abc import Iterator
from operator import itemgetter
from pathlib import Path
from statistics import fmean
from typing import Any

from scipy.stats import binom  # type: ignore[import-untyped]

from mcbn.errors import MCBNError
from mcbn.files import write_text
from mcbn_study.estimates import mean_cell
from mcbn_study.journal import RECORDS, Record, read
from mcbn_study.tables import read_words, render

NAMES: dict[str, str] = read_words(__package__)["methods"]
START, END = "<!-- shift -->", "<!-- /shift -->"
LEVEL, RATE = 0.99, 0.01
KEYS = ["kind", "network", "seed", "what", "M", "corruption", "severity", "method", "pair", "data", "centre", "drift"]
REPAIRS = ("repair", "ensemble")
FEW = ("mcbn", "adapt 256", "adapt 32", "adapt pair")
BASELINES = ("softmax", "entropy", "energy", "mahalanobis", "knn")
Aim = tuple[str, str, str, bool]  # what, asked, measured, reached


class Selection(list[Record]):
    """Some of the records, and what tables ask of them."""

    def where(self, **wanted: Any) -> "Selection":
        """Keep the records whose fields are these, or one of several in a tuple or list."""
        choices = {name: value if isinstance(value, tuple | list) else [value] for name, value in wanted.items()}
        return Selection(r for r in self if all(r.get(name) in values for name, values in choices.items()))

    @property
    def shifted(self) -> "Selection":
        """Leave out what was measured on clean images."""
        return Selection(r for r in self if r["severity"])

    def each(self, *fields: str) -> list[Any]:
        """List the values of a field, tuples of several, in the order of their first record."""
        return list(dict.fromkeys(map(itemgetter(*fields), self)))

    def by_seed(self, field: str) -> list[float]:
        """Average a field over the records of each seed: one number a network."""
        return [fmean(float(r[field]) for r in self.where(seed=seed)) for seed in self.each("seed")]

    def cell(self, field: str, **shown: Any) -> str:
        """Show the mean over networks with its standard error."""
        return mean_cell(self.by_seed(field), **shown)

    def mean(self, field: str, **wanted: Any) -> float:
        """Mean over networks of the records wanted; NaN where nothing was measured."""
        values = self.where(**wanted).by_seed(field)
        return fmean(values) if values else math.nan

    def relative(self, fields: dict[str, str], less: float = 0.0, **home: Any) -> "Selection":
        """Divide each field by one of the record of the same network and seed at home, and take `less` from that."""
        at_home = {(r["network"], r["seed"]): r for r in self.where(**home)}
        pairs = [(r, at_home.get((r["network"], r["seed"]))) for r in self]
        whole = [(r, h) for r, h in pairs if h and fields.keys() <= r.keys()]
        return Selection({**r, **{f: r[f] / h[of] - less for f, of in fields.items()}} for r, h in whole)


def write(out: Path, page: Path | None = None) -> list[Path]:
    """Write table.md, and put the tables between the marks of a page."""
    if not (records := read(out / RECORDS)):
        raise MCBNError(f"{out} holds no records; make them with `mcbn reproduce shift`")
    kept = comparable(records)
    ours = Selection(r for r in kept if not r["network"].startswith("foreign"))
    judged = {"aims": [aim for aims in AIMS for aim in aims(ours)], "alarms": list(count_alarms(kept))}
    tables = render(__package__, records=kept, ours=ours, **judged, names=NAMES, few=FEW, mean_cell=mean_cell)
    written = [write_text(out / "table.md", f"# Shifts\n\n{tables}")]
    if page is not None and START in (text := page.read_text("utf-8")):
        before, after = text.split(START)[0], text.split(END)[1]
        written.append(write_text(page, f"{before}{START}\n{tables}{END}{after}"))
    return written


def comparable(records: list[Record]) -> Selection:
    """Keep the last record of everything, and of repairs the corruptions that every network and method has."""
    newest = Selection({tuple(str(record.get(key)) for key in KEYS): record for record in records}.values())
    repairs, common = newest.where(kind=REPAIRS), {}
    for network, severity in repairs.each("network", "severity"):
        tried = repairs.where(network=network, severity=severity)
        runs = [set(tried.where(method=m, seed=s).each("corruption")) for m, s in tried.each("method", "seed")]
        common[network, severity] = set.intersection(*runs)
    others = (r for r in newest if r["kind"] not in REPAIRS)
    return Selection([*others, *(r for r in repairs if r["corruption"] in common[r["network"], r["severity"]])])


def count_alarms(records: Selection) -> Iterator[Record]:
    """Count alarms, network by network, beside the binomial interval; streams may stay below it."""
    for network, seed, what in (kept := records.where(kind=("alarms", "streams"))).each("network", "seed", "what"):
        of = kept.where(network=network, seed=seed, what=what)
        count, n = (sum(r[name] for r in of) for name in ("alarms", "n"))
        low, high = (int(end) for end in binom.interval(LEVEL, n, RATE))
        inside = low <= count <= high or (what == "streams" and count <= high)
        place = {"network": f"{network}, {seed}", "what": what}
        yield place | {"count": count, "n": n, "low": low, "high": high, "inside": inside}


def _alarm_aims(records: Selection) -> Iterator[Aim]:
    inside = [row["inside"] for row in count_alarms(records)]
    yield "false alarms at 1 %", "inside the binomial interval", f"{sum(inside)} of {len(inside)}", all(inside)
    for M, asked in ((8, 2.0), (32, 0.95)):
        at = records.where(kind="power", M=M, severity=3)
        ours, bbsd, mmd = (at.mean("power", method=m) for m in ("watch", "bbsd", "mmd"))
        met = ours / max(bbsd, mmd) >= asked if M == 8 else ours >= asked
        shown = f"{ours:.2f}; BBSD {bbsd:.2f}, MMD {mmd:.2f}"
        yield f"power, M = {M}, severity 3", "twice BBSD and MMD" if M == 8 else "0.95", shown, met


def _novelty_aims(records: Selection) -> Iterator[Aim]:
    for kind, method, least, what, asked in (
        ("novelty", "watch", 0.98, "foreign inputs, AUROC", "0.98, above every baseline"),
        ("near", "watch and entropy", 0.0, "new classes, AUROC with entropy", "level with the best baseline"),
    ):
        ours, *theirs = (records.mean("auroc", kind=kind, method=m) for m in (method, *BASELINES))
        best = max(theirs)
        name = NAMES[BASELINES[theirs.index(best)]]
        yield what, asked, f"{ours:.3f}; {name} {best:.3f}", ours >= max(least, best)


def _repair_aims(records: Selection) -> Iterator[Aim]:
    kept = records.where(kind="repair")
    shifted, severities = kept.shifted, sorted(kept.shifted.each("severity"))
    scores, methods = ("accuracy", "nll", "ece"), ("adapt 256", "batch", "blend")
    ours, *rivals = ({score: shifted.mean(score, method=m) for score in scores} for m in methods)
    gain = 100 * (ours["accuracy"] - max(r["accuracy"] for r in rivals))
    where = f"severities {', '.join(map(str, severities))}"
    yield f"adapt, 256 unlabelled, accuracy ({where})", "1 point above BN and blend", f"{gain:+.1f}", gain >= 1
    for field, asked in (("nll", 0.75), ("ece", 0.5)):
        ratio = ours[field] / min(r[field] for r in rivals)
        yield f"the same, {field.upper()} over theirs", f"at most {asked}", f"{ratio:.2f}", ratio <= asked
    few = shifted.where(severity=kept.where(method="adapt pair").each("severity"))
    before, whole = (few.mean("accuracy", method=m) for m in FEW[:2])
    for method, most in zip(FEW[1:], (0.3, 0.5, 1.0), strict=True):
        clean, adapted = (kept.mean("accuracy", severity=0, method=m) for m in ("mcbn", method))
        lost = 100 * (clean - adapted)
        yield f"{NAMES[method]}, clean: points lost", f"at most {most}", f"{lost:.1f}", lost <= most
        if method != "adapt 256":
            share = (few.mean("accuracy", method=method) - before) / (whole - before)
            yield f"{NAMES[method]}: share of the gain of 256", "at least 0.8", f"{share:.2f}", share >= 0.8
    by_severity = [kept.where(severity=s) for s in severities]
    lower = sum(at.mean("nll", method="adapt 256") < at.mean("nll", method="tent") for at in by_severity)
    yield "NLL below TENT's", "at every severity", f"{lower} of {len(severities)}", lower == len(severities)


def _cost_aims(records: Selection) -> Iterator[Aim]:
    ratios = [r["reading_milliseconds"] / r["pass_milliseconds"] for r in records.where(kind="cost")]
    if ratios:
        yield "cost of a reading", "at most 1.5 passes", f"{max(ratios):.2f}", max(ratios) <= 1.5


AIMS = (_alarm_aims, _novelty_aims, _repair_aims, _cost_aims)
