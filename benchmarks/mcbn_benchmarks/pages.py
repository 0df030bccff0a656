"""Tables in README and documentation that come from records: each stands between its markers and is written anew.

A page holds `<!-- NAME -->` and `<!-- /NAME -->`; what lies between is replaced by the table of that name.
`<!-- quote FILE WORDS -->` and `<!-- /quote -->` hold the first table under the heading that starts with WORDS;
`<!-- file FILE -->` and `<!-- /file -->` a whole file.
"""

import csv
import re
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import typer

from mcbn.data import NAMES, describe
from mcbn.errors import MCBNError
from mcbn.files import write_text
from mcbn_benchmarks.speed.measures import latest as latest_runs
from mcbn_benchmarks.speed.report import compare, show_ratio
from mcbn_benchmarks.zoo import table as zoo_table
from mcbn_study.journal import Journal, Record, latest, read
from mcbn_study.tables import render

PAGES = ("README.md", "docs/**/*.md", "benchmarks/*.md", "results/solar_cells/*.md")
MARKED = re.compile(r"<!-- (\w+)((?: \S+)*) -->\n.*?<!-- /\1 -->", re.DOTALL)
Measured = Annotated[Path, typer.Option(help="folder of measured times")]
MEASURED = Path("benchmarks/results")
JOB = ("changed", "part_inputs", "gpus")  # what tells simulated jobs apart
PRICES = {"cuda": 3.50, "cpu": 0.09}  # assumptions: US dollars an hour, of one H200, of two cores of a server


def pages(root: Annotated[Path, typer.Option(help="the checkout")] = Path()) -> list[object]:
    """Write the tables of README and documentation anew from the records."""
    changed: list[object] = []
    for path in sorted(path for pattern in PAGES for path in root.glob(pattern)):
        text = path.read_text()
        if (renewed := MARKED.sub(partial(_renew, path, root), text)) != text:
            changed.append(write_text(path, renewed))
    return changed or ["every table is that of the records"]


def _renew(page: Path, root: Path, marked: re.Match[str]) -> str:
    name, options = marked[1], marked[2].split()
    if name not in TABLES:
        raise MCBNError(f"{page.name} asks for a table {name!r}; there are {', '.join(TABLES)}")
    return f"<!-- {name}{marked[2]} -->\n{TABLES[name](root, *options).strip()}\n<!-- /{name} -->"


def quote(root: Path, place: str, *heading: str) -> str:
    """Repeat the first table of a page of results, or the first under a heading that starts with these words."""
    above = rf"^## {re.escape(' '.join(heading))}.*?" if heading else ""
    found = re.search(rf"{above}((?:^\|[^\n]*\n)+)", (root / place).read_text(), re.MULTILINE | re.DOTALL)
    if not found:
        raise MCBNError(f"{place} has no table under {' '.join(heading)!r}")
    return found[1]


def entries(root: Path, place: str, section: str) -> str:
    """Lay out a section of a docstring in NumPy's style, as scikit-learn has them: a row an entry."""
    text = (root / place).read_text().partition(f"{section}\n")[2].partition("\n\n")[0]
    found = re.findall(r"^    (\S.*?) : (.*(?:\n {8}.*)*)", text, re.MULTILINE)
    return _table("entries", section=section, entries=[(name, " ".join(said.split())) for name, said in found])


def _table(name: str, **content: Any) -> str:
    return render(__package__, f"tables/{name}.md.j2", **content)


def regression(root: Path) -> str:
    """Lay out the paper's regression sets: ours over searches, the paper's in brackets."""
    with (root / "results" / "regression" / "summary.csv").open() as file:
        rows = {(r["dataset"], r["metric"]): r for r in csv.DictReader(file) if r["method"] == "mcbn"}
    scored = ("rmse", "crps", "crps_normalized")
    return _table("regression", sets=[(describe(d), {score: rows[d, score] for score in scored}) for d in NAMES])


def speed(root: Path) -> str:
    """Lay out the time of `predict` beside Algorithm 1 and T plain passes, on both devices, from the newest runs."""
    newest = {}
    for device in ("cpu", "cuda"):
        path = root / MEASURED / f"{device}.jsonl"
        for row in compare(latest_runs(path, read(path)[-1]["hardware"])):
            newest[device, row.case, row.n, row.against] = row
    return _table("speed", newest=defaultdict(str, newest), show_ratio=show_ratio)


def statistics(root: Path) -> str:
    """Lay out the shares of units whose statistics pass each test, averaged over epochs."""
    with (root / "results" / "statistics" / "table.csv").open() as file:
        head, *lines = csv.reader(file)
    groups = [(place, [*of_epochs]) for place, of_epochs in groupby(lines, itemgetter(0, 1, 2))]
    return _table("statistics", head=head, groups=groups, mean=fmean)


def zoo(root: Path) -> str:
    """Lay out the networks of others that run exactly."""
    return zoo_table.readme_matrix(zoo_table.latest(Journal(root / "results" / "zoo").records))


def read_costs(folder: Path) -> list[Record]:
    """Read the latest record of every network at the largest N measured, with microseconds of an input and draw."""
    newest: dict[tuple[str, str], Record] = {}
    for device in PRICES:
        for record in read(folder / f"{device}.jsonl"):
            timed = record["method"] == "mcbn" and record["milliseconds"] and record["n_samples"] > 1
            place = record["case"], device
            if timed and " " not in record["case"] and record["n"] >= newest.get(place, {"n": 0})["n"]:
                each = 1000 * record["milliseconds"] / (record["n"] * record["n_samples"])
                newest[place] = record | {"device": device, "microseconds": each}
    if not newest:
        raise MCBNError(f"{folder} holds no measured times; run `mcbn bench` first")
    return list(newest.values())


def costs(records: Measured = MEASURED) -> list[str]:
    """Work out what a million predictions cost, from measured times.

    N inputs with T draws take a * N * T, a from the largest N that was measured; money is time at an assumed price.
    """
    return [_table("costs", records=read_costs(records), prices=PRICES)]


def file(root: Path, place: str) -> str:
    """Repeat a file: a page as it is, a snippet and what it prints as code."""
    fence = {".md": "", ".py": "```python\n", ".txt": "```text\n"}[Path(place).suffix]
    return f"{fence}{(root / place).read_text().rstrip()}\n{fence[:3]}"


TABLES: dict[str, Callable[..., str]] = {
    **{table.__name__: table for table in (quote, file, entries, regression, speed, zoo, statistics)},
    "shift": lambda root: (root / "results" / "shift" / "table.md").read_text().removeprefix("# Shifts"),
    "solar_cells": lambda root: _table("solar_cells", **read(root / "results" / "solar_cells" / "records.jsonl")[-1]),
    "costs": lambda root: costs(root / MEASURED)[0],
    "sweep": lambda root: _table("sweep", jobs=latest(read(root / MEASURED / "sweep.jsonl"), JOB)),
}
