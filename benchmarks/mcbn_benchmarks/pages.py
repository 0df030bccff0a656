"""Tables in README and documentation that come from records: each stands between its markers and is written anew.

A page holds `<!-- NAME -->` and `<!-- /NAME -->`; what lies between is replaced by the table of that name.
`<!-- quote FILE K -->` and `<!-- /quote -->` hold the K-th table of a page of results, counted from 1;
`<!-- file FILE -->` and `<!-- /file -->` a whole file.
"""

import csv
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Annotated

import typer

from mcbn.data import NAMES, describe
from mcbn.errors import MCBNError
from mcbn.files import write_text
from mcbn_benchmarks.zoo.table import latest, readme_matrix
from mcbn_study.journal import Journal, Record, read
from mcbn_study.tables import markdown

PAGES = ("README.md", "docs/**/*.md", "benchmarks/*.md")
MARKED = re.compile(r"<!-- (\w+)((?: \S+)*) -->\n.*?<!-- /\1 -->", re.DOTALL)
Measured = Annotated[Path, typer.Option(help="folder of measured times")]
SHOWN = ("rmse", "crps", "crps_normalized")
TITLES = {"mlp": "MLP, T = 500", "resnet32": "ResNet-32, T = 128", "unet": "UNet, 256 px, T = 20"}
TITLES |= {"resnet50": "ResNet-50, T = 32"}
TIMED = ("mlp 1", "mlp 100", "resnet32 1", "resnet32 32", "unet 1", "resnet50 32")  # in the table of speed: with N
PRICES = {"cuda": 3.50, "cpu": 0.09}  # assumptions: US dollars an hour, of one H200, of two cores of a server
DRAWS = (32, 100, 500)


def pages(root: Annotated[Path, typer.Option(help="the checkout")] = Path()) -> list[object]:
    """Write the tables of README and documentation anew from the records."""
    changed: list[object] = []
    for path in sorted(path for pattern in PAGES for path in root.glob(pattern)):
        text = path.read_text()
        renewed = MARKED.sub(partial(_renew, path, root), text)
        if renewed != text:
            changed.append(write_text(path, renewed))
    return changed or ["every table is that of the records"]


def _renew(page: Path, root: Path, marked: re.Match[str]) -> str:
    name, options = marked[1], marked[2].split()
    if name not in TABLES:
        raise MCBNError(f"{page.name} asks for a table {name!r}; there are {', '.join(TABLES)}")
    return f"<!-- {name}{marked[2]} -->\n{TABLES[name](root, *options).strip()}\n<!-- /{name} -->"


def quote(root: Path, place: str, number: str) -> str:
    """Repeat one table of a page of results."""
    return str(re.findall(r"(?:^\|.*\n)+", (root / place).read_text(), re.MULTILINE)[int(number) - 1])


def regression(root: Path) -> str:
    """Lay out the paper's regression sets: ours over searches, the paper's in brackets."""
    with (root / "results" / "regression" / "summary.csv").open() as file:
        rows = {(r["dataset"], r["metric"]): r for r in csv.DictReader(file) if r["method"] == "mcbn"}
    head = ("data", "RMSE", "CRPS", "normalised CRPS, %")
    return markdown(head, [(describe(d).title, *(_beside(rows[d, metric]) for metric in SHOWN)) for d in NAMES], "l")


def _beside(row: dict[str, str]) -> str:
    """Show a mean, with its error if it is a normalised score, and the paper's in brackets."""
    fields = ("mean", "standard_error") if row["metric"] == "crps_normalized" else ("mean",)
    digits = 3 if row["dataset"] == "kin8nm" and len(fields) == 1 else 2
    ours, theirs = (" ± ".join(f"{float(row[prefix + f]):.{digits}f}" for f in fields) for prefix in ("", "paper_"))
    return f"{ours} ({theirs})"


def _cells(path: Path) -> list[list[str]]:
    """Read the rows of all tables of a page."""
    lines = [line for line in path.read_text().splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def cifar10(root: Path) -> str:
    """Lay out the log likelihood of CIFAR-10 over the number of draws, as results/cifar10 has it."""
    rows = _cells(root / "results" / "cifar10" / "table.md")
    start = next(i for i, row in enumerate(rows) if row[0] == "PLL")
    head, _, *shown = [[cell.partition(" ±")[0] for cell in row] for row in rows[start : start + 4]]
    return markdown(head, shown, "l")


def speed(root: Path) -> str:
    """Lay out the time of `predict` beside Algorithm 1 and T plain passes, on both devices, from the newest runs."""
    found = {}
    for device in ("cpu", "cuda"):
        for case, n, _, ours, against, _, ratio, *_ in _cells(root / "benchmarks" / "results" / f"{device}.md"):
            found[device, case, n, against] = ours, ratio
    rows = []
    for case, n in map(str.split, TIMED):
        row = [TITLES[case], n]
        for device in ("cpu", "cuda"):
            ours, loop = found.get((device, case, n, "algorithm 1"), ("", ""))
            row += [ours, loop, found.get((device, case, n, "plain x T"), ("", ""))[1]]
        rows.append(row)
    head = ("network", "N", "2 CPU cores", "Algorithm 1", "T plain", "H200", "Algorithm 1", "T plain")
    return markdown(head, rows, "l")


def statistics(root: Path) -> str:
    """Lay out the shares of units whose statistics pass each test, averaged over epochs."""
    with (root / "results" / "statistics" / "table.csv").open() as file:
        head, *lines = csv.reader(file)
    groups: dict[tuple[str, ...], list[list[float]]] = {}
    for line in lines:
        groups.setdefault(tuple(line[:3]), []).append([float(cell) for cell in (*line[4:7], line[8])])
    means = {place: map(fmean, zip(*values, strict=True)) for place, values in groups.items()}
    rows = [(*place, *(f"{mean:.2f}" for mean in columns)) for place, columns in means.items()]
    return markdown((*head[:3], *head[4:7], head[8]), rows, "l")


def zoo(root: Path) -> str:
    """Lay out the networks of others that run exactly."""
    return readme_matrix(latest(Journal(root / "results" / "zoo").records))


def read_costs(folder: Path) -> list[Record]:
    """Read the latest record of every network at the largest N measured, with microseconds of an input and draw."""
    latest: dict[tuple[str, str], Record] = {}
    for device in PRICES:
        for record in read(folder / f"{device}.jsonl"):
            timed = record["method"] == "mcbn" and record["milliseconds"] and record["n_samples"] > 1
            place = record["case"], device
            if timed and " " not in record["case"] and record["n"] >= latest.get(place, {"n": 0})["n"]:
                each = 1000 * record["milliseconds"] / (record["n"] * record["n_samples"])
                latest[place] = record | {"device": device, "microseconds": each}
    if not latest:
        raise MCBNError(f"{folder} holds no measured times; run `mcbn bench` first")
    return list(latest.values())


def costs(records: Measured = Path("benchmarks/results")) -> list[str]:
    """Work out what a million predictions cost, from measured times.

    N inputs with T draws take a * N * T, a from the largest N that was measured; money is time at an assumed price.
    """
    head = ["network", "hardware", "measured", "us an input and draw", *(f"T = {T}: hours, dollars" for T in DRAWS)]
    rows = []
    for r in read_costs(records):
        hours = [1_000_000 * T * r["microseconds"] / 3.6e9 for T in DRAWS]
        spent = [f"{each:.3g} h, ${each * PRICES[r['device']]:.3g}" for each in hours]
        measured = f"N = {r['n']:,}, T = {r['n_samples']}"
        rows.append([r["case"], r["hardware"], measured, f"{r['microseconds']:.3g}", *spent])
    return [markdown(head, rows).rstrip()]


def file(root: Path, place: str) -> str:
    """Repeat a file: a page as it is, a snippet and what it prints as code."""
    fence = {".md": "", ".py": "```python\n", ".txt": "```text\n"}[Path(place).suffix]
    return f"{fence}{(root / place).read_text().rstrip()}\n{fence[:3]}"


TABLES: dict[str, Callable[..., str]] = {
    **{table.__name__: table for table in (quote, file, regression, cifar10, speed, zoo, statistics)},
    "shift": lambda root: (root / "results" / "shift" / "table.md").read_text().removeprefix("# Shifts"),
    "costs": lambda root: costs(root / "benchmarks" / "results")[0],
}
