"""The tables of the study of shifts, as table.md beside the records and inside docs/field.md."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
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
KEYS = (
    *("kind", "network", "seed", "what", "M", "corruption", "severity", "method", "pair"),
    *("data", "centre", "drift"),
)
REPAIRS = ("repair", "ensemble")
CENTRES, SCORES = ("drawn", "running"), ("accuracy", "nll", "ece")
BASELINES = ("softmax", "entropy", "energy", "mahalanobis", "knn")
Aim = tuple[str, str, str, bool]  # what, asked, measured, reached


def write(out: Path, page: Path | None = None) -> list[Path]:
    """Write table.md, and put the tables between the marks of a page."""
    records = read(out / RECORDS)
    if not records:
        raise MCBNError(f"{out} holds no records; make them with `mcbn reproduce shift`")
    tables = [to_markdown(made) for make in TABLES if (made := make(comparable(records))).rows]
    written = [write_text(out / "table.md", "\n".join(["# Shifts", "", *tables]))]
    if page is not None and START in (text := page.read_text("utf-8")):
        before, after = text.split(START)[0], text.split(END)[1]
        written.append(write_text(page, f"{before}{START}\n{chr(10).join(tables)}{END}{after}"))
    return written


def comparable(records: Iterable[Record]) -> list[Record]:
    """Keep the last record of everything, and of repairs the corruptions that every network and method has."""
    newest = {tuple(str(record.get(key)) for key in KEYS): record for record in records}.values()
    tried: dict[Any, dict[Any, set[str]]] = {}
    for r in (r for r in newest if r["kind"] in REPAIRS):
        runs = tried.setdefault((r["network"], r["severity"]), {})
        runs.setdefault((r["method"], r["seed"]), set()).add(r["corruption"])
    common = {condition: set.intersection(*runs.values()) for condition, runs in tried.items()}
    return [r for r in newest if r["kind"] not in REPAIRS or r["corruption"] in common[r["network"], r["severity"]]]


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
    sets = [(name, [r for r in kept if r["data"] == name]) for name in _each(kept, "data")]
    methods = _each(kept, "method")
    rows = [
        (name, *(mean_cell(_values(some, "auroc", "seed", method=m), decimals=3) for m in methods))
        for name, some in [*sets, ("mean of the foreign", far)]
    ]
    n = max((r["config"]["n_train"] for r in kept), default=0) * 6 // 10
    return table(_WORDS["novelty"], rows if far else [], [NAMES[method] for method in methods], n=n)


def repair_table(records: Sequence[Record]) -> Table:
    """Accuracy / NLL / ECE of each method at each severity, and over all."""
    kept = [r for r in records if r["kind"] in REPAIRS]
    severities = sorted({r["severity"] for r in kept if r["kind"] == "repair"})
    groups = {f"severity {s}" if s else "clean": [s] for s in severities}
    groups |= {"all": severities[1:]} if len(severities) > 2 else {}
    rows = []
    for network in _each(kept, "network"):
        of = [r for r in kept if r["network"] == network]
        for method in [m for m in NAMES if m in _each(of, "method") and m not in ("adapt 32", "adapt pair")]:
            cells = (_three([r for r in of if r["method"] == method and r["severity"] in g]) for g in groups.values())
            rows.append((network, NAMES[method], *cells))
    n, tent = (kept[0]["n"], kept[0]["config"]["n_tent"]) if kept else (0, 0)
    kinds = sorted({r["corruption"] for r in kept if r["kind"] == "repair" and r["severity"]})
    return table(_WORDS["repair"], rows, list(groups), n=n, tent=tent, kinds=", ".join(kinds).replace("_", " "))


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
            columns = [("accuracy", m) for m in ("mcbn", "adapt 256", "adapt 32", "adapt pair")]
            columns += [("pair_before", "adapt pair"), ("pair_after", "adapt pair")]
            cells = (mean_cell(_values(of, field, "seed", method=m), scale=100, decimals=1) for field, m in columns)
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


def centre_table(records: Sequence[Record]) -> Table:
    """Accuracy and NLL with draws of other images, as drawn and centred."""
    kept = [r for r in records if r["kind"] == "centre"]
    plain = [r for r in kept if not r["centre"]]
    rows = []
    for name in _each([r for r in kept if r["centre"]], "data"):
        of = {(f, c): _values(kept, f, "seed", data=name, centre=c) for f in ("accuracy", "nll") for c in CENTRES}
        cells = (
            mean_cell(v, scale=100 if f == "accuracy" else 1, decimals=3 - 2 * (f == "accuracy"))
            for (f, _), v in of.items()
        )
        rows.append((name, *cells))
    facts: dict[str, Any] = {"T": kept[0]["config"]["n_samples"] if kept else 0}
    facts |= {f: mean_cell([k * r[f] for r in plain], decimals=d) for f, k, d in (("accuracy", 100, 1), ("nll", 1, 3))}
    return table(_WORDS["centre"], rows, **facts)


def rule_table(records: Sequence[Record]) -> Table:
    """Spread of statistics by batch size, against the 1/M rule."""
    kept = [r for r in records if r["kind"] == "alarms" and "spread_mean" in r]
    home = {(r["network"], r["seed"]): r for r in kept if r["what"] == "M = 32"}
    rows = []
    for what in _each(kept, "what") if home else ():
        of = [(r, home[r["network"], r["seed"]]) for r in kept if r["what"] == what]
        cells = [mean_cell([r[f] / h[f] for r, h in of], decimals=3) for f in ("spread_mean", "spread_log_var")]
        rows.append((what.removeprefix("M = "), *cells))
    return table(_WORDS["rule"], rows)


def cost_table(records: Sequence[Record]) -> Table:
    """Milliseconds of a reading and of a plain pass."""
    kept = [r for r in records if r["kind"] == "cost"]
    columns = [(r, [r[f"{what}_milliseconds"] for what in ("reading", "pass")]) for r in kept]
    rows = [
        (r["network"], str(r["M"]), *(f"{t:.1f}" for t in times), f"{times[0] / times[1]:.2f}") for r, times in columns
    ]
    where = ", ".join(sorted({r["hardware"] for r in kept}))
    return table(_WORDS["cost"], rows, n=kept[0]["config"]["timed"] - 1 if kept else 0, hardware=where)


def targets_table(records: Sequence[Record]) -> Table:
    """Say of each aim whether it was reached, from the records alone."""
    ours = [r for r in records if not r["network"].startswith("foreign")]
    rows = [row for aim in AIMS for row in aim(ours)]
    return table(_WORDS["targets"], [(what, asked, shown, "yes" if met else "no") for what, asked, shown, met in rows])


def _mean(records: Sequence[Record], field: str, **wanted: Any) -> float:
    """Mean of a field over networks, of each over what was measured of it; NaN where nothing was."""
    values = _values(records, field, "seed", **wanted)
    return fmean(values) if values else math.nan


def _alarm_aims(records: Sequence[Record]) -> Iterator[Aim]:
    rows = alarms_table(records).rows
    inside = [row for row in rows if row[-1] == "yes"]
    share = f"{len(inside)} of {len(rows)}"
    yield "false alarms at 1 %", "inside the binomial interval", share, len(inside) == len(rows)
    for M, asked in ((8, 2.0), (32, 0.95)):
        powers = {m: _mean(records, "power", kind="power", M=M, severity=3, method=m) for m in ("watch", "bbsd", "mmd")}
        ratio = powers["watch"] / max(powers["bbsd"], powers["mmd"])
        met = ratio >= asked if M == 8 else powers["watch"] >= asked
        shown = f"{powers['watch']:.2f}; BBSD {powers['bbsd']:.2f}, MMD {powers['mmd']:.2f}"
        yield f"power, M = {M}, severity 3", "twice BBSD and MMD" if M == 8 else "0.95", shown, met


def _novelty_aims(records: Sequence[Record]) -> Iterator[Aim]:
    for kind, ours, asked in (("novelty", "watch", 0.98), ("near", "watch and entropy", 0.0)):
        auroc = {m: _mean(records, "auroc", kind=kind, method=m) for m in (ours, *BASELINES)}
        best = max(BASELINES, key=lambda m: auroc[m])
        what = "foreign inputs, AUROC" if kind == "novelty" else "new classes, AUROC with entropy"
        said = f"{asked}, above every baseline" if asked else "level with the best baseline"
        yield what, said, f"{auroc[ours]:.3f}; {NAMES[best]} {auroc[best]:.3f}", auroc[ours] >= max(asked, auroc[best])


def _repair_aims(records: Sequence[Record]) -> Iterator[Aim]:
    kept = [r for r in records if r["kind"] == "repair"]
    severities = sorted({r["severity"] for r in kept if r["severity"]})
    shifted = [r for r in kept if r["severity"]]
    rivals = ("batch", "blend")
    ours = {f: _mean(shifted, f, method="adapt 256") for f in SCORES}
    best = {f: (max if f == "accuracy" else min)(_mean(shifted, f, method=m) for m in rivals) for f in SCORES}
    gain = 100 * (ours["accuracy"] - best["accuracy"])
    where = f"severities {', '.join(map(str, severities))}"
    yield f"adapt, 256 unlabelled, accuracy ({where})", "1 point above BN and blend", f"{gain:+.1f}", gain >= 1
    for field, asked in (("nll", 0.75), ("ece", 0.5)):
        ratio = ours[field] / best[field]
        yield f"the same, {field.upper()} over theirs", f"at most {asked}", f"{ratio:.2f}", ratio <= asked
    clean = {m: _mean(kept, "accuracy", severity=0, method=m) for m in ("mcbn", "adapt 256", "adapt 32", "adapt pair")}
    few = [r for r in shifted if r["severity"] in {r["severity"] for r in kept if r["method"] == "adapt pair"}]
    for method, most in (("adapt 256", 0.3), ("adapt 32", 0.5), ("adapt pair", 1.0)):
        lost = 100 * (clean["mcbn"] - clean[method])
        yield f"{NAMES[method]}, clean: points lost", f"at most {most}", f"{lost:.1f}", lost <= most
        if method != "adapt 256":
            before, after, whole = (_mean(few, "accuracy", method=m) for m in ("mcbn", method, "adapt 256"))
            share = (after - before) / (whole - before)
            yield f"{NAMES[method]}: share of the gain of 256", "at least 0.8", f"{share:.2f}", share >= 0.8
    nll = {m: [_mean(kept, "nll", severity=s, method=m) for s in severities] for m in ("tent", "adapt 256")}
    lower = sum(ours < theirs for theirs, ours in zip(*nll.values(), strict=True))
    yield "NLL below TENT's", "at every severity", f"{lower} of {len(severities)}", lower == len(severities)


def _cost_aims(records: Sequence[Record]) -> Iterator[Aim]:
    ratios = [r["reading_milliseconds"] / r["pass_milliseconds"] for r in records if r["kind"] == "cost"]
    if ratios:
        yield "cost of a reading", "at most 1.5 passes", f"{max(ratios):.2f}", max(ratios) <= 1.5


AIMS = (_alarm_aims, _novelty_aims, _repair_aims, _cost_aims)
TABLES: tuple[Callable[[Sequence[Record]], Table], ...] = (
    targets_table,
    alarms_table,
    rule_table,
    power_table,
    novelty_table,
    repair_table,
    few_table,
    centre_table,
    sensor_table,
    cost_table,
)
