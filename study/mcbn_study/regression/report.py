"""The regression records as estimates, tables and figures: summary.csv, tables.md, tables.tex, figures/*.png."""

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby, product
from pathlib import Path
from statistics import fmean, mean, stdev
from typing import Any, NamedTuple, TypeAlias

from mcbn.data import NAMES, describe
from mcbn.errors import MCBNError, require_choice
from mcbn.files import write_text
from mcbn_study import journal, paper
from mcbn_study.estimates import Estimate, cell, difference, estimate, p_value
from mcbn_study.journal import RECORDS, Record, total_seconds
from mcbn_study.regression.figures import METHODS, write_figures
from mcbn_study.tables import MISSING, Table, Words, read_words, render, table, to_csv, to_latex

_COMMAND = "mcbn reproduce regression"
_TARGET_WITHIN, _TARGET_SIGNIFICANT = 7, 6  # of the eight data sets
_REPEATED = ("rmse", "crps")
_SETTINGS = ("method", "batch_size", "n_samples")  # what tells runs of the sensitivity study apart
_LATEX = "% Made from the records by `mcbn reproduce tables`. Needs \\usepackage{booktabs,graphicx}.\n"
_WORDS = read_words(__package__)
METRICS: dict[str, str] = _WORDS["metrics"]
_TWINS = {"mcbn": "cubn", "mcdo": "cudo"}  # the same mean with one constant variance: scored in the same line
_CONSTANT = {"rmse": "rmse", "crps": "crps_constant", "pll": "pll_constant"}  # the twin's metrics there
Key: TypeAlias = tuple[str, str, str]  # data set, method, metric
Summary: TypeAlias = Mapping[Key, Estimate]
Pairs: TypeAlias = Mapping[str, tuple[Estimate | None, Estimate | None]]  # ours and the paper's by data set


class RegressionReport(NamedTuple):
    """All that the records say, as tables by what they are about, in the order of tables.md."""

    summary: Summary
    profiles: Sequence[str]
    fidelity: Sequence[Table]
    repeats: Sequence[Table]
    paper: Sequence[Table]
    sensitivity: Sequence[Table]
    further: Sequence[Table]
    costs: Sequence[Table]

    @property
    def tables(self) -> list[Table]:
        """List every table."""
        return [table for group in self[2:] for table in group]


def write(results: str | Path = "results") -> list[Path]:
    """Write summary.csv, tables.md, tables.tex and figures/ into results/regression, from records and predictions."""
    out, report = Path(results) / "regression", read(results)
    if not report.profiles:
        raise MCBNError(f"{out} holds no records of test runs; make them with `{_COMMAND}`")
    written = [write_text(out / "summary.csv", summary_csv(report.summary))]
    written += [write_text(out / "tables.tex", "\n".join([_LATEX, *map(to_latex, report.tables)]))]
    figures = write_figures(out / "predictions", out / "figures")
    shown = [figure.relative_to(out) for figure in figures]
    once = [describe(d).title for d in NAMES if (e := report.summary.get((d, "mcbn", "rmse"))) and e.searches == 1]
    text = render(__package__, report=report, figures=shown, command=_COMMAND, once=once)
    return [*written, write_text(out / "tables.md", text), *figures]


def read(results: str | Path) -> RegressionReport:
    """Lay out every table of records.jsonl in regression, sensitivity, search, boston and mnf_published of a folder."""
    results = Path(results)
    recorded = [r for study in ("regression", "sensitivity") for r in journal.read(results / study / RECORDS)]
    tests, varied = runs(recorded), runs(recorded, kind="sensitivity", apart=_SETTINGS)
    files = {int(path.parent.name): path for path in (results / "search").glob("[0-9]*/records.jsonl")}
    searches = {1: summarise(tests)} | {seed: summarise(runs(journal.read(files[seed]))) for seed in sorted(files)}
    summary = over_searches(list(searches.values()))
    repeated = [row for name in NAMES for row in _repeat_rows(name, searches)]
    repeats = [table(_WORDS["repeats"], repeated)] if repeated else []
    return RegressionReport(
        summary=summary,
        profiles=sorted({str(run.get("profile")) for run in [*tests, *varied]}),
        fidelity=fidelity_tables(summary, experiments(results)),
        repeats=repeats + _boston_tables(results / "boston", searches),
        paper=paper_tables(summary),
        sensitivity=sensitivity_tables(varied),
        further=[*further_tables(searches[1]), coverage_table(summary)],
        costs=[cost_table(recorded)],
    )


def experiments(results: Path) -> dict[Key, str]:
    """Say by score what was tried on a difference: MNF stopped as published, other values of tau."""
    tried: dict[Key, str] = {}
    for key, stopped in summarise(runs(journal.read(results / "mnf_published" / RECORDS))).items():
        agrees = (printed := paper.find(*key)) and not Gap(key, stopped, printed).beyond(rounding=True)
        said = "MNF stopped as published agrees" if agrees else "not explained; MNF stopped as published"
        tried[key] = f"{said}: {cell(stopped)}"
    for r, name in product(journal.read(results / "precision" / RECORDS), ("pll", "pll_normalized")):
        tried.setdefault((r["dataset"], "mcbn", name), "not explained; at multiples of tau")
        tried[r["dataset"], "mcbn", name] += f", {r['factor']:g}: {fmean(r[name]):.2f}"
    return tried


def paper_tables(summary: Summary) -> list[Table]:
    """Lay out the text's Table 1 and the appendix tables of scores; what was not run is a dash."""

    def column(head: str, method: str, metric: str, show: str) -> tuple[str, str, Pairs]:
        return head, show, {d: (summary.get((d, method, metric)), paper.find(d, method, metric)) for d in NAMES}

    shown = [_WORDS[name] for name in ("main", "crps", "pll", "raw", "rmse")]
    return [_comparison(words, [column(*c) for c in words["columns"]], **_WORDS["notes"]) for words in shown]


def _comparison(words: Words, columns: Sequence[tuple[str, str, Pairs]], heading: str = "", **fields: str) -> Table:
    """Lay out three rows a data set: ours, the paper's, the difference; columns: heading, `show` of `cell`, pairs."""
    rows: list[tuple[str, ...]] = []
    for d in NAMES:
        shown = [(show, *pairs[d]) for _, show, pairs in columns]
        rows.append((describe(d).title, "ours", *(cell(ours, show) for show, ours, _ in shown)))
        rows.append(("", "paper", *(cell(theirs, show) for show, _, theirs in shown)))
        rows.append(("", "difference", *("" if show == "p" else difference(*pair) for show, *pair in shown)))
    return table(words, rows, ("Dataset", heading, *(head for head, *_ in columns)), **fields)


def sensitivity_tables(varied: Iterable[Record]) -> list[Table]:
    """Lay out the four tables from one record a run; what was not run is a dash."""
    values: dict[tuple[str, str, int, int], list[float]] = {}
    for run in varied:
        check_names(run)
        for metric in ("crps_normalized", "pll_normalized"):
            if (value := score(run, metric)) is not None and run["method"] == "mcbn":
                values.setdefault((run["dataset"], metric, run["batch_size"], run["n_samples"]), []).append(value)
    return [_sensitivity_table(values, *shown) for shown in product(_WORDS["sensitivity"]["over"], ("CRPS", "PLL"))]


def _sensitivity_table(values: Mapping[tuple[str, str, int, int], Sequence[float]], over: str, name: str) -> Table:
    words, label, metric = _WORDS["sensitivity"], f"{over}_{name}", f"{name.lower()}_normalized"

    def pair(d: str, M: int, T: int) -> tuple[Estimate | None, Estimate | None]:
        measured = values.get((d, metric, M, T))
        return estimate(measured) if measured else None, paper.find_sensitivity(f"table:{label}", d, metric, M, T)

    varied, fixed, settings = words["over"][over].values()
    columns = [(head, "error", {d: pair(d, M, T) for d in NAMES}) for head, (M, T) in settings.items()]
    pairs = [(a, b) for *_, column in columns for a, b in column.values() if a and b]
    agree = sum(abs(a.mean - b.mean) - b.half_unit <= 8**0.5 * (a.standard_error or 0) for a, b in pairs)
    fields = {"varied": varied, "fixed": fixed, "name": name, "label": label, "metric": METRICS[metric]}
    fields["small"] = words["small"].get(label, "")
    return _comparison(words, columns, varied.capitalize(), agree=str(agree), cells=str(len(pairs)), **fields)


def further_tables(summary: Summary) -> list[Table]:
    """Lay out MCBN beside what the paper's tables do not hold, constant twins and further methods, where they ran."""
    printed = {(place.method, place.metric) for place in paper.numbers()}
    tables = []
    for metric in METRICS:
        further = {method for _, method, name in summary if name == metric and (method, metric) not in printed}
        methods = ["mcbn", *(method for method in METHODS if method in further)]
        rows = [(describe(d).title, *(cell(summary.get((d, method, metric))) for method in methods)) for d in NAMES]
        fields = {"name": METRICS[metric], "metric": metric}
        if methods[1:]:
            tables.append(table(_WORDS["further"], rows, [METHODS[method] for method in methods], **fields))
    return tables


def coverage_table(summary: Summary) -> Table:
    """Lay out the number of runs behind every cell; a run without a score counts for RMSE alone."""
    counts = {d: [summary.get((d, method, "rmse")) for method in METHODS] for d in NAMES}
    rows = [(describe(d).title, *(str(e.n) if e else MISSING for e in counts[d])) for d in NAMES]
    return table(_WORDS["coverage"], rows, list(METHODS.values()))


def cost_table(recorded: Iterable[Record]) -> Table:
    """Sum the recorded seconds per study, kind and device; those that records of one run share count once."""

    def key(record: Record) -> tuple[str, ...]:
        return tuple(str(record.get(name, MISSING)) for name in ("study", "profile", "kind", "device"))

    groups = {k: list(group) for k, group in groupby(sorted(recorded, key=key), key)}
    seconds = [total_seconds(k[0], group) for k, group in groups.items()]
    rows = [(*k, str(len(group)), f"{s:.0f}") for (k, group), s in zip(groups.items(), seconds, strict=True)]
    rows.append(("Total", "", "", "", str(sum(map(len, groups.values()))), f"{math.fsum(seconds):.0f}"))
    return table(_WORDS["cost"], rows)


def _repeat_rows(dataset: str, searches: Mapping[int, Summary]) -> list[tuple[str, ...]]:
    """Lay out MCBN's errors by seed of the search, with their spread and the paper's means; nothing without repeats."""
    keys = [(dataset, "mcbn", metric) for metric in _REPEATED]
    scored = {seed: [summary[k] for k in keys] for seed, summary in searches.items() if keys[0] in summary}
    if len(scored) < 2:
        return []
    rows = [(describe(dataset).title * (s == min(scored)), f"search {s}", *map(cell, e)) for s, e in scored.items()]
    means = [[e.mean for e in column] for column in zip(*scored.values(), strict=True)]
    digits = [max(3, 1 - math.floor(math.log10(stdev(m) or 1))) for m in means]  # two show of a spread
    spread = (f"{mean(m):.{d}f}, standard deviation {stdev(m):.{d}f}" for m, d in zip(means, digits, strict=True))
    rows.append(("", f"mean of {len(scored)} searches", *spread))
    return [*rows, ("", "paper", *(cell(paper.find(*key)) for key in keys))]


def _boston_tables(folder: Path, searches: Mapping[int, Summary]) -> list[Table]:
    """Lay out Boston's RMSE over searches by what was done as in the published code; nothing without records."""
    key = ("boston", "mcbn", "rmse")
    means = {"ours": [summary[key].mean for summary in searches.values() if key in summary]}
    for path in sorted(folder.glob("*/[0-9]*/records.jsonl")):
        name = _WORDS["boston"]["variants"][path.parts[-3]]
        means.setdefault(name, []).append(summarise(runs(journal.read(path)))[key].mean)
    if len(means) < 2 or not means["ours"]:
        return []
    rows: list[tuple[str, ...]] = []
    printed = paper.find(*key)
    for name, m in means.items():
        below = f"{(mean(m) - printed.mean) / stdev(m):.1f}" if m[1:] and printed else MISSING
        numbers = (f"{mean(m):.3f}", f"{stdev(m):.3f}" if m[1:] else MISSING, f"{min(m):.3f}", below)
        rows.append((name, str(len(m)), *numbers, str(sum(printed is not None and rmse <= printed.mean for rmse in m))))
    searched, reached = (sum(int(row[column]) for row in rows) for column in (1, -1))
    moved = max(abs(float(row[2]) - float(rows[0][2])) for row in rows)  # from ours, the first
    return [table(_WORDS["boston"], rows, searches=searched, reached=reached or "none", moved=f"{moved:.3f}")]


class Gap(NamedTuple):
    """Our mean beside a printed one, each with a standard error."""

    key: Key
    ours: Estimate
    printed: Estimate

    def beyond(self, *, above: bool = False, rounding: bool = False, searched: bool = True) -> bool:
        """Whether the means are over 2 sqrt(e^2 + e_paper^2) apart, or ours above; e of runs and search, or of runs."""
        excess = self.ours.mean - self.printed.mean if above else abs(self.ours.mean - self.printed.mean)
        ours, printed = self.ours.apart if searched else self.ours.standard_error, self.printed.standard_error
        return excess - (self.printed.half_unit if rounding else 0.0) > 2 * math.hypot(ours or 0.0, printed or 0.0)


def gaps(summary: Summary, method: str, metric: str) -> list[Gap]:
    """Return the gap of every data set that has two runs or more and a printed number."""
    keys = [(name, method, metric) for name in NAMES]
    both = [Gap(key, ours, printed) for key in keys if (ours := summary.get(key)) and (printed := paper.find(*key))]
    return [gap for gap in both if None not in (gap.ours.standard_error, gap.printed.standard_error)]


def fidelity_tables(summary: Summary, tried: Mapping[Key, str] | None = None) -> list[Table]:
    """Count the sets on which we agree with the paper, list where we differ, with what `experiments` tried."""
    rows = []
    for metric, method in product(("rmse", "crps"), ("mcbn", "mcdo")):  # where lower is better
        compared = gaps(summary, method, metric)
        strict, lenient = (sum(not gap.beyond(above=True, rounding=r) for gap in compared) for r in (False, True))
        claim = f"{METHODS[method]}: {METRICS[metric]} within 2 combined standard errors of the paper or better"
        rows.append((claim, *_verdict(strict, len(compared), _TARGET_WITHIN), f"{lenient} of {len(compared)}"))
    tested = [e for name in NAMES if (e := summary.get((name, "mcbn", "crps_normalized"))) and e.n > 1]
    for claim, tests in zip(_WORDS["fidelity"]["significant"], (tested, [e.searched for e in tested]), strict=True):
        n = sum(e.mean > 0 and e.p_value is not None and e.p_value < 0.05 for e in tests)
        rows.append((claim, *_verdict(n, len(tested), _TARGET_SIGNIFICANT), MISSING))
    return [table(_WORDS["fidelity"], rows), _differences(summary, tried or {})]


def _verdict(n: int, tested: int, target: int) -> tuple[str, str, str]:
    short = "no" if tested == len(NAMES) else "incomplete"
    return f"{n} of {tested}", f"{target} of {len(NAMES)}", "yes" if n >= target else short


def _differences(summary: Summary, tried: Mapping[Key, str]) -> Table:
    compared = [gap for metric in METRICS for method in METHODS for gap in gaps(summary, method, metric)]
    apart = [gap for gap in compared if gap.beyond()]
    rows: list[tuple[str, ...]] = []
    for gap in apart:
        dataset, method, metric = gap.key
        better = "better" if (gap.ours.mean > gap.printed.mean) == (metric not in ("rmse", "crps")) else "worse"
        shown = cell(gap.ours), cell(gap.printed), difference(gap.ours, gap.printed)
        names = METRICS[metric], METHODS[method], describe(dataset).title
        finding = tried.get(gap.key, "not explained") if gap.beyond(rounding=True) else "rounding"
        rows.append((*names, *shown, better, finding))
    runs_alone, listed = sum(gap.beyond(searched=False) for gap in compared), {gap.key for gap in apart}
    lost = [
        f"{METRICS[key[2]]} of {describe(key[0]).title} ({said.rpartition(': ')[2]}, paper {cell(paper.find(*key))})"
        for key, said in tried.items()
        if key[1] == "mnf" and "agrees" not in said and key not in listed
    ]
    counts: dict[str, Any] = {"compared": len(compared), "outside": len(apart), "runs_alone": runs_alone}
    counts["lost"] = _WORDS["differences"]["lost"].format(", ".join(lost)) if lost else ""
    return table(_WORDS["differences"], rows or [("none", *[""] * 7)], chance=0.05 * len(compared), **counts)


def runs(records: Iterable[Record], *, kind: str = "test", apart: Sequence[str] = ("method",)) -> list[Record]:
    """Return the records of a kind, one per run; `apart` names what tells runs apart besides set, split and seed.

    Of a run recorded again with the same configuration the last counts; with another configuration it is an error.
    """
    newest: dict[str, Record] = {}
    for record in (r for r in records if r.get("kind") == kind):
        run = ", ".join(f"{name} {record[name]}" for name in ("dataset", *apart, "split", "seed"))
        if newest.setdefault(run, record).get("config_hash") != record.get("config_hash"):
            cure = "move the records of one of them to another folder"
            raise MCBNError(f"recorded more than once, with different configurations: {run}; {cure}")
        newest[run] = record
    return list(newest.values())


def summarise(tests: Iterable[Record]) -> dict[Key, Estimate]:
    """Return estimates by (data set, method, metric), in that order; what has no run has none.

    CUBN and CUDO, which have no runs of their own, come from the lines of MCBN and MCDO. Normalised scores are tested
    against 0.
    """
    values: dict[Key, list[float]] = {}
    for record in tests:
        check_names(record)
        method, twin = record["method"], _TWINS.get(record["method"])
        fields = {(method, metric): metric for metric in METRICS}
        fields |= {(twin, metric): field for metric, field in _CONSTANT.items()} if twin else {}
        for (name, metric), field in fields.items():
            if (value := score(record, field)) is not None:
                values.setdefault((record["dataset"], name, metric), []).append(value)
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
            spread = stdev(e.mean for e in estimates)
            tested = None if first.p_value is None else p_value(mean, error, first.n)
            pooled[key] = Estimate(mean, error, first.n, tested, search=spread, searches=len(estimates))
    return pooled


def summary_csv(summary: Summary) -> str:
    """Lay out estimates as comma-separated values beside the paper's; empty where a value does not apply."""
    names = ("n", "mean", "standard_error", "p_value", "searches", "search")
    ours = {key: [getattr(estimate, name) for name in names] for key, estimate in summary.items()}
    rows = [(*key, *numbers, *(paper.find(*key) or (None, None))[:2]) for key, numbers in ours.items()]
    return to_csv(("dataset", "method", "metric", *names, "paper_mean", "paper_standard_error"), rows, digits=10)


def check_names(record: Record) -> None:
    """Refuse a record whose data set or method no table would show."""
    for name, known in (("dataset", NAMES), ("method", [*METHODS])):
        require_choice(f"{name} of a record", record[name], known, " (remove it or run it under a known name)")


def score(record: Record, name: str) -> float | None:
    """Return a number of a record, None where it does not apply."""
    if (value := record[name]) is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise MCBNError(f"{name} should be a number or null, not {value!r}, in a record of {record['dataset']}")
    return float(value)
