"""How much the search itself decides: the study repeated with other fold networks."""

import statistics
from pathlib import Path

from mcbn.data import NAMES, describe
from mcbn_study import journal, paper
from mcbn_study.regression.estimates import cell, ours, theirs
from mcbn_study.regression.summary import METRICS, Row, Summary, runs, summarise
from mcbn_study.tables import Table

COMPARED = ("rmse", "crps")
NOTE = (
    "Cross-validation run again with other seeds of the fold networks (`mcbn reproduce regression --search-seed K --out"
    " results/search/K`), then 25 test runs each as before. The standard error over 25 runs of one search leaves out"
    " how far the chosen configuration moves from search to search; the last row of a data set shows that spread."
)


def read_repeats(folder: Path) -> dict[int, Summary]:
    """Summarise the repeated searches under a folder, by their seed."""
    found = {int(path.parent.name): journal.read(path) for path in sorted(folder.glob("[0-9]*/records.jsonl"))}
    return {seed: summarise(runs(own)) for seed, own in sorted(found.items())}


def repeat_tables(first: Summary, repeats: dict[int, Summary]) -> list[Table]:
    """Lay out MCBN's errors by seed of the search, with their spread and the paper's means; nothing without repeats."""
    rows = [row for name in NAMES for row in _rows(name, {1: first} | repeats)]
    header = ("Dataset", "", *(f"MCBN {METRICS[metric]}" for metric in COMPARED))
    return [Table("The search repeated", "table:repeats", header, tuple(rows), NOTE)] if rows else []


def _rows(dataset: str, searches: dict[int, Summary]) -> list[tuple[str, ...]]:
    found = {seed: _scores(summary, dataset) for seed, summary in searches.items() if _scores(summary, dataset)}
    if len(found) < 2:
        return []
    rows = [(describe(dataset).title, "search 1", *(cell(ours(row)) for row in found[1]))]
    rows += [("", f"search {seed}", *(cell(ours(row)) for row in own)) for seed, own in found.items() if seed > 1]
    columns = zip(*found.values(), strict=True)
    means = [[row.mean for row in column] for column in columns]
    spread = (f"{statistics.mean(m):.3f}, standard deviation {statistics.stdev(m):.3f}" for m in means)
    printed = (cell(theirs(paper.find(dataset, "mcbn", metric))) for metric in COMPARED)
    return [*rows, ("", f"mean of {len(found)} searches", *spread), ("", "paper", *printed)]


def _scores(summary: Summary, dataset: str) -> list[Row]:
    found = [summary.get((dataset, "mcbn", metric)) for metric in COMPARED]
    return [row for row in found if row is not None]
