"""Statistics over runs: one row per data set, method and metric, beside what the paper prints."""

import csv
import io
import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from mcbn.data import NAMES
from mcbn.errors import MCBNError
from mcbn_study import paper, student
from mcbn_study.journal import Record

METHODS = {
    "mcbn": "MCBN",
    "bn": "BN",
    "cubn": "CUBN",
    "mcdo": "MCDO",
    "do": "DO",
    "cudo": "CUDO",
    "mnf": "MNF",
    "ensemble": "Ensemble",
    "mcbn_linear": "MCBN linear",
    "mcbn_gaussian": "MCBN Gaussian",
    "mcbn_tuned": "MCBN tuned",
}
METRICS = {
    "rmse": "RMSE",
    "crps": "CRPS",
    "pll": "PLL",
    "crps_normalized": "Normalised CRPS (%)",
    "pll_normalized": "Normalised PLL (%)",
}
_TWINS = {"mcbn": "cubn", "mcdo": "cudo"}  # the same mean with one constant variance: scored in the same line
NAMES_LISTED = 8  # of those that a message complains of
_IDENTITY = ("dataset", "method", "split", "seed")
Values: TypeAlias = dict[tuple[str, str, str], list[float]]  # by data set, method, metric


class Row(NamedTuple):
    """Mean and standard error of a metric over n runs; what does not apply is None."""

    dataset: str
    method: str
    metric: str
    n: int
    mean: float
    standard_error: float | None = None
    p_value: float | None = None  # of a normalised score against 0
    paper_mean: float | None = None
    paper_standard_error: float | None = None


Summary: TypeAlias = Mapping[tuple[str, str, str], Row]


def runs(records: Iterable[Record], *, kind: str = "test", also: Sequence[str] = ()) -> list[Record]:
    """Return the records of a kind, one per run; `also` names what tells runs apart besides set, method, split, seed.

    Of a run recorded again with the same configuration the last counts, with a warning; with another
    configuration it is an error, as no one can say which was meant.
    """
    found: dict[tuple[Any, ...], Record] = {}
    repeated: list[str] = []
    conflicts: list[str] = []
    for record in records:
        if record.get("kind") != kind:
            continue
        key = tuple(_field(record, name) for name in (*_IDENTITY, *also))
        if key in found:
            same = found[key].get("config_hash") == record.get("config_hash")
            (repeated if same else conflicts).append(_show(key, also))
        found[key] = record
    _refuse(conflicts)
    if repeated:
        warnings.warn(f"mcbn: recorded more than once, the last counts: {_list(repeated)}", stacklevel=2)
    return list(found.values())


def summarise(tests: Iterable[Record]) -> dict[tuple[str, str, str], Row]:
    """Return rows by (data set, method, metric), in that order; what has no run has no row.

    CUBN and CUDO, which have no runs of their own, come from the lines of MCBN and MCDO.
    """
    values = _collect(tests)
    keys = [(d, m, s) for d in NAMES for m in METHODS for s in METRICS]
    return {key: _row(*key, values[key]) for key in keys if key in values}


def to_csv(rows: Iterable[Row]) -> str:
    """Lay out rows as comma-separated values under their column names; empty where a value does not apply."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(Row._fields)
    writer.writerows([_number(value) for value in row] for row in rows)
    return text.getvalue()


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


def _collect(tests: Iterable[Record]) -> Values:
    values: Values = {}
    for record in tests:
        check_names(record)
        dataset, method = record["dataset"], record["method"]
        _add(values, dataset, method, {metric: score(record, metric) for metric in METRICS})
        if method in _TWINS:
            constant = {metric: score(record, f"{metric}_constant") for metric in ("crps", "pll")}
            _add(values, dataset, _TWINS[method], {"rmse": score(record, "rmse"), **constant})
    return values


def _add(values: Values, dataset: str, method: str, scores: Mapping[str, float | None]) -> None:
    for metric, value in scores.items():
        if value is not None:
            values.setdefault((dataset, method, metric), []).append(value)


def _row(dataset: str, method: str, metric: str, values: Sequence[float]) -> Row:
    mean, error = student.mean_error(values)
    p = student.p_value(len(values), mean, error) if metric.endswith("_normalized") else None
    printed = paper.find(dataset, method, metric)
    theirs = (printed.mean, printed.standard_error) if printed else (None, None)
    return Row(dataset, method, metric, len(values), mean, error, p, *theirs)


def _field(record: Record, name: str) -> Any:
    if name not in record:
        raise MCBNError(f"a record has no {name!r}: {_shorten(record)}; remove it and run that part again")
    return record[name]


def _shorten(record: Record) -> str:
    return str({name: record[name] for name in ("kind", *_IDENTITY) if name in record})


def _show(key: Sequence[Any], also: Sequence[str]) -> str:
    dataset, method, split, seed, *rest = key
    extra = "".join(f" {name} {value}" for name, value in zip(also, rest, strict=True))
    return f"{dataset} {method} split {split} seed {seed}{extra}"


def _refuse(conflicts: Sequence[str]) -> None:
    if conflicts:
        raise MCBNError(
            f"recorded more than once, with different configurations: {_list(conflicts)};"
            " move the records of one of them to another folder"
        )


def _list(names: Sequence[str]) -> str:
    names = list(dict.fromkeys(names))
    more = [f"and {len(names) - NAMES_LISTED} more"] if len(names) > NAMES_LISTED else []
    return ", ".join([*names[:NAMES_LISTED], *more])


def _number(value: str | float | None) -> str:
    if isinstance(value, float):
        return f"{value:.10g}"
    return "" if value is None else str(value)
