"""Records as estimates: mean and standard error over the runs of each data set, method and metric."""

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, stdev
from typing import Any, TypeAlias

from mcbn.data import NAMES
from mcbn.errors import MCBNError
from mcbn_study import paper
from mcbn_study.estimates import Estimate, estimate, p_value
from mcbn_study.journal import Record
from mcbn_study.tables import read_words, to_csv

METHODS: dict[str, str] = read_words(__package__)["methods"]
METRICS: dict[str, str] = read_words(__package__)["metrics"]
_TWINS = {"mcbn": "cubn", "mcdo": "cudo"}  # the same mean with one constant variance: scored in the same line
_NAMES_LISTED = 8  # of those that a message complains of
_IDENTITY = ("dataset", "method", "split", "seed")
Key: TypeAlias = tuple[str, str, str]  # data set, method, metric
Summary: TypeAlias = Mapping[Key, Estimate]


def runs(records: Iterable[Record], *, kind: str = "test", also: Sequence[str] = ()) -> list[Record]:
    """Return the records of a kind, one per run; `also` names what tells runs apart besides set, method, split, seed.

    Of a run recorded again with the same configuration the last counts, with a warning; with another
    configuration it is an error, as no one can say which was meant.
    """
    newest: dict[str, Record] = {}
    repeated: list[str] = []
    conflicts: list[str] = []
    for record in (r for r in records if r.get("kind") == kind):
        dataset, method, split, seed, *rest = (_field(record, name) for name in (*_IDENTITY, *also))
        settings = "".join(f" {name} {value}" for name, value in zip(also, rest, strict=True))
        run = f"{dataset} {method} split {split} seed {seed}{settings}"
        if run in newest:
            same = newest[run].get("config_hash") == record.get("config_hash")
            (repeated if same else conflicts).append(run)
        newest[run] = record
    if conflicts:
        raise MCBNError(
            f"recorded more than once, with different configurations: {_list(conflicts)};"
            " move the records of one of them to another folder"
        )
    if repeated:
        warnings.warn(f"mcbn: recorded more than once, the last counts: {_list(repeated)}", stacklevel=2)
    return list(newest.values())


def summarise(tests: Iterable[Record]) -> dict[Key, Estimate]:
    """Return estimates by (data set, method, metric), in that order; what has no run has none.

    CUBN and CUDO, which have no runs of their own, come from the lines of MCBN and MCDO. Normalised scores are tested
    against 0.
    """
    values: dict[Key, list[float]] = {}
    for record in tests:
        for key, value in _scores(record):
            if value is not None:
                values.setdefault(key, []).append(value)
    keys = [(d, m, s) for d in NAMES for m in METHODS for s in METRICS]
    estimates = {key: estimate(values[key]) for key in keys if key in values}
    tested = {key: e._replace(p_value=p_value(*e[:3])) for key, e in estimates.items() if "normalized" in key[2]}
    return estimates | tested


def over_searches(searches: Sequence[Summary]) -> Summary:
    """Return the first search's estimates with means over all: the error over runs is the mean of theirs."""
    pooled = dict(searches[0])
    for key, first in pooled.items():
        estimates = [search[key] for search in searches if key in search]
        if len(estimates) > 1 and first.standard_error is not None:
            mean, error = (fmean(e[i] or 0.0 for e in estimates) for i in (0, 1))
            spread, tested = stdev(e.mean for e in estimates), None
            if first.p_value is not None:
                tested = p_value(mean, error, first.n)
            pooled[key] = Estimate(mean, error, first.n, tested, search=spread, searches=len(estimates))
    return pooled


def _scores(record: Record) -> list[tuple[Key, float | None]]:
    check_names(record)
    dataset, method = record["dataset"], record["method"]
    scores: list[tuple[Key, float | None]] = [((dataset, method, s), score(record, s)) for s in METRICS]
    if twin := _TWINS.get(method):
        fields = {"rmse": "rmse", "crps": "crps_constant", "pll": "pll_constant"}
        scores += [((dataset, twin, metric), score(record, field)) for metric, field in fields.items()]
    return scores


def summary_csv(summary: Summary) -> str:
    """Lay out estimates as comma-separated values beside the paper's; empty where a value does not apply."""
    names = ("n", "mean", "standard_error", "p_value", "searches", "search", "paper_mean", "paper_standard_error")
    rows = [
        (*key, e.n, e.mean, e.standard_error, e.p_value, e.searches, e.search, *(paper.find(*key) or (None, None))[:2])
        for key, e in summary.items()
    ]
    return to_csv(("dataset", "method", "metric", *names), rows, digits=10)


def check_names(record: Record) -> None:
    """Refuse a record whose data set or method no table would show."""
    if record["dataset"] not in NAMES or record["method"] not in METHODS:
        raise MCBNError(
            f"a record has data set {record['dataset']!r} and method {record['method']!r}; known are"
            f" {', '.join(NAMES)} and {', '.join(METHODS)}; remove it or run it under a known name"
        )


def score(record: Record, name: str) -> float | None:
    """Return a number of a record, None where it does not apply."""
    value = _field(record, name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise MCBNError(f"{name} should be a number or null, not {value!r}, in {_shorten(record)}")
    return float(value)


def _field(record: Record, name: str) -> Any:
    if name not in record:
        raise MCBNError(f"a record has no {name!r}: {_shorten(record)}; remove it and run that part again")
    return record[name]


def _shorten(record: Record) -> str:
    return str({name: record[name] for name in ("kind", *_IDENTITY) if name in record})


def _list(names: Sequence[str]) -> str:
    names = list(dict.fromkeys(names))
    more = [f"and {len(names) - _NAMES_LISTED} more"] if len(names) > _NAMES_LISTED else []
    return ", ".join([*names[:_NAMES_LISTED], *more])
