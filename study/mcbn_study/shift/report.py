"""The tables of the study of shifts, as table.md beside the records and inside docs/field.md."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from scipy.stats import binom  # type: ignore[import-untyped]

from mcbn.errors import MCBNError
from mcbn.files import write_text
from mcbn_study.estimates import mean_cell
from mcbn_study.journal import RECORDS, Record, read
from mcbn_study.tables import MISSING, Table, read_words, table, to_markdown

_WORDS = read_words(__package__)
NAMES: dict[str, str] = _WORDS["methods"]
START, END = "<!-- shift -->", "<!-- /shift -->"
LEVEL, RATE = 0.99, 0.01


def write(out: Path, page: Path | None = None) -> list[Path]:
    """Write table.md, and put the tables between the marks of a page."""
    records = read(out / RECORDS)
    if not records:
        raise MCBNError(f"{out} holds no records; make them with `mcbn reproduce shift`")
    tables = [to_markdown(made) for make in TABLES if (made := make(records)).rows]
    written = [write_text(out / "table.md", "\n".join(["# Shifts", "", *tables]))]
    if page is not None and START in (text := page.read_text("utf-8")):
        before, after = text.split(START)[0], text.split(END)[1]
        written.append(write_text(page, f"{before}{START}\n{chr(10).join(tables)}{END}{after}"))
    return written


def _values(records: Iterable[Record], field: str, by: str, **wanted: Any) -> list[float]:
    """Average a field of the records wanted over each value of `by`: one number a network."""
    groups: dict[Any, list[float]] = {}
    for record in records:
        if all(record.get(name) == value for name, value in wanted.items()):
            groups.setdefault(record[by], []).append(float(record[field]))
    return [fmean(values) for values in groups.values()]


def _each(records: Sequence[Record], field: str) -> list[Any]:
    """List the values of a field in the order of their first record."""
    return list(dict.fromkeys(record[field] for record in records if field in record))


def alarms_table(records: Sequence[Record]) -> Table:
    """Count alarms, network by network, beside the binomial interval."""
    kept = [r for r in records if r["kind"] in ("alarms", "streams")]
    rows = []
    for network, what in dict.fromkeys((f"{r['network']}, {r['seed']}", r["what"]) for r in kept):
        of = [r for r in kept if (f"{r['network']}, {r['seed']}", r["what"]) == (network, what)]
        count, n = (sum(r[name] for r in of) for name in ("alarms", "n"))
        low, high = (int(end) for end in binom.interval(LEVEL, n, RATE))
        inside = "yes" if low <= count <= high or (what == "streams" and count <= high) else "no"
        rows.append((network, what, str(count), str(n), f"{low} to {high}", inside))
    return table(_WORDS["alarms"], rows)


def power_table(records: Sequence[Record]) -> Table:
    """Mean power by network, M and severity."""
    kept = [r for r in records if r["kind"] == "power" and r["severity"]]
    methods, rows = _each(kept, "method"), []
    for network, M, severity in dict.fromkeys((r["network"], r["M"], r["severity"]) for r in kept):
        wanted = {"network": network, "M": M, "severity": severity}
        cells = [mean_cell(_values(kept, "power", "seed", method=m, **wanted), decimals=2) for m in methods]
        rows.append((network, str(M), str(severity), *cells))
    return table(_WORDS["power"], rows, [NAMES[method] for method in methods])


def novelty_table(records: Sequence[Record]) -> Table:
    """AUROC of each set, and the mean of the foreign ones."""
    kept = [r for r in records if r["kind"] in ("novelty", "near") and "foreign" not in r["network"]]
    far = [r for r in kept if r["kind"] == "novelty"]
    sets: list[tuple[str, list[Record]]] = [
        (name, [r for r in kept if r["data"] == name]) for name in _each(kept, "data")
    ]
    methods = _each(kept, "method")
    rows = [
        (name, *(mean_cell(_values(some, "auroc", "seed", method=m), decimals=3) for m in methods))
        for name, some in [*sets, ("mean of the foreign", far)]
    ]
    return table(_WORDS["novelty"], rows if far else [], [NAMES[method] for method in methods])


def repair_table(records: Sequence[Record]) -> Table:
    """Accuracy / NLL / ECE of each method at each severity, and over all."""
    kept = [r for r in records if r["kind"] in ("repair", "ensemble")]
    severities = sorted(_each(kept, "severity"))
    groups = {f"severity {s}" if s else "clean": [s] for s in severities} | {"1 to 5": [s for s in severities if s]}
    rows = []
    for network in _each(kept, "network"):
        of = [r for r in kept if r["network"] == network]
        for method in [m for m in NAMES if m in _each(of, "method") and m != "adapt 32"]:
            cells = (_three([r for r in of if r["method"] == method and r["severity"] in g]) for g in groups.values())
            rows.append((network, NAMES[method], *cells))
    n, tent = (kept[0]["n"], kept[0]["config"]["n_tent"]) if kept else (0, 0)
    return table(_WORDS["repair"], rows, list(groups), n=n, tent=tent)


def _three(records: Sequence[Record]) -> str:
    if not records:
        return MISSING
    accuracy, nll, ece = (_values(records, name, "seed") for name in ("accuracy", "nll", "ece"))
    return f"{mean_cell(accuracy, scale=100, decimals=1)} / {fmean(nll):.3f} / {100 * fmean(ece):.1f}"


def few_table(records: Sequence[Record]) -> Table:
    """Accuracy where few images, or images of two classes, are to be had."""
    kept = [r for r in records if r["kind"] == "repair"]
    middle = {r["severity"] for r in kept if r["method"] == "adapt pair"}
    rows = []
    for network in _each(kept, "network"):
        for severity in sorted(middle):
            of = [r for r in kept if (r["network"], r["severity"]) == (network, severity)]
            methods = ("mcbn", "adapt 256", "adapt 32", "adapt pair")
            columns = [(m, "accuracy") for m in methods] + [
                ("adapt pair", f"pair_{when}") for when in ("before", "after")
            ]
            cells = (mean_cell(_values(of, field, "seed", method=m), scale=100, decimals=1) for m, field in columns)
            rows.append((network, f"severity {severity}" if severity else "clean", *cells))
    return table(_WORDS["few"], rows)


def sensor_table(records: Sequence[Record]) -> Table:
    """Power and error of tables, by drift."""
    kept = [r for r in records if r["kind"] == "sensor"]
    home = {(r["network"], r["seed"]): r["rmse"] for r in kept if r["drift"] == "none"}
    rows = []
    for drift in _each(kept, "drift"):
        of = [r for r in kept if r["drift"] == drift]
        changes = ([100 * (r[name] / home[r["network"], r["seed"]] - 1) for r in of] for name in ("rmse", "adapted"))
        shares = [mean_cell([float(r[name]) for r in of], decimals=2) for name in ("power", "moved")]
        rows.append((drift, shares[0], *(mean_cell(c, decimals=1, sign="+") for c in changes), shares[1]))
    return table(_WORDS["sensor"], rows)


TABLES: tuple[Callable[[Sequence[Record]], Table], ...] = (
    alarms_table,
    power_table,
    novelty_table,
    repair_table,
    few_table,
    sensor_table,
)
