"""Tables in README and documentation that come from records: each stands between its markers and is written anew.

A page holds `<!-- NAME -->` and `<!-- /NAME -->`; what lies between is replaced by the table of that name.
`<!-- quote FILE K -->` and `<!-- /quote -->` hold the K-th table of a page of results, counted from 1.
"""

import csv
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import fmean

from mcbn.data import NAMES, describe
from mcbn.errors import MCBNError
from mcbn.files import write_text
from mcbn_benchmarks.zoo.table import latest, readme_matrix
from mcbn_study.journal import Journal
from mcbn_study.tables import markdown

PAGES = ("README.md", "docs/**/*.md", "benchmarks/*.md")
MARKED = re.compile(r"<!-- (\w+)((?: \S+)*) -->\n.*?<!-- /\1 -->", re.DOTALL)
NORMALISED = "crps_normalized"
SHOWN = (("mcbn", "rmse"), ("mcbn", "crps"), ("mcbn", NORMALISED))
TIMED = (("mlp", "1"), ("mlp", "100"), ("resnet32", "1"), ("resnet32", "32"), ("unet", "1"), ("resnet50", "32"))
CASES = {
    "mlp": "MLP, T = 500",
    "resnet32": "ResNet-32, T = 128",
    "unet": "UNet, 256 px, T = 20",
    "resnet50": "ResNet-50, T = 32",
}


def write(root: Path) -> list[Path]:
    """Write every marked table of every page anew; return the pages that changed."""
    changed = []
    for path in sorted(path for pattern in PAGES for path in root.glob(pattern)):
        text = path.read_text()
        renewed = MARKED.sub(partial(_renew, path, root), text)
        if renewed != text:
            changed.append(write_text(path, renewed))
    return changed


def _renew(page: Path, root: Path, marked: re.Match[str]) -> str:
    name, options = marked[1], marked[2].split()
    if name not in TABLES:
        raise MCBNError(f"{page.name} asks for a table {name!r}; there are {', '.join(TABLES)}")
    return f"<!-- {name}{marked[2]} -->\n{TABLES[name](root, *options).strip()}\n<!-- /{name} -->"


def quote(root: Path, place: str, number: str) -> str:
    """Repeat one table of a page of results."""
    tables: list[str] = re.findall(r"(?:^\|.*\n)+", (root / place).read_text(), re.MULTILINE)
    return tables[int(number) - 1]


def regression(root: Path) -> str:
    """Lay out the paper's regression sets: ours over searches, the paper's in brackets."""
    with (root / "results" / "regression" / "summary.csv").open() as file:
        rows = {(r["dataset"], r["method"], r["metric"]): r for r in csv.DictReader(file)}
    head = ("data", "RMSE", "CRPS", "normalised CRPS, %")
    return markdown(head, [(describe(d).title, *(_beside(rows[d, *place]) for place in SHOWN)) for d in NAMES], "l")


def _beside(row: dict[str, str]) -> str:
    """Show a mean, with its error if it is a normalised score, and the paper's in brackets."""
    fields = ("mean", "standard_error") if row["metric"] == NORMALISED else ("mean",)
    digits = 3 if row["dataset"] == "kin8nm" and len(fields) == 1 else 2
    ours, theirs = (" ± ".join(f"{float(row[prefix + f]):.{digits}f}" for f in fields) for prefix in ("", "paper_"))
    return f"{ours} ({theirs})"


def cifar10(root: Path) -> str:
    """Lay out the log likelihood of CIFAR-10 over the number of draws, as results/cifar10 has it."""
    lines = (root / "results" / "cifar10" / "table.md").read_text().splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("| PLL |"))
    rows = [
        [re.sub(" ±.*", "", cell.strip()) for cell in line.strip("|").split("|")] for line in lines[start : start + 4]
    ]
    return markdown(rows[0], rows[2:], "l")


def speed(root: Path) -> str:
    """Lay out the time of `predict` beside Algorithm 1 and T plain passes, on both devices, from the newest runs."""
    times = {device: _times(root / "benchmarks" / "results" / f"{device}.md") for device in ("cpu", "cuda")}
    rows = [
        (CASES[case], n, *(cell for device in times.values() for cell in device.get((case, n), ("", "", ""))))
        for case, n in TIMED
    ]
    head = ("network", "N", "2 CPU cores", "Algorithm 1", "T plain", "H200", "Algorithm 1", "T plain")
    return markdown(head, rows, "l")


def _times(path: Path) -> dict[tuple[str, str], list[str]]:
    """Read ours and the two ratios by case and N from a table that `speed` wrote."""
    found: dict[tuple[str, str], list[str]] = {}
    for line in path.read_text().splitlines():
        case, n, _, ours, against, _, ratio, *_ = [cell.strip() for cell in line.strip("|").split("|")] + [""] * 7
        if case in CASES and against in ("algorithm 1", "plain x T") and ratio:
            found.setdefault((case, n), [ours]).append(ratio)
    return found


def statistics(root: Path) -> str:
    """Lay out the shares of units whose statistics pass each test, averaged over epochs."""
    with (root / "results" / "statistics" / "table.csv").open() as file:
        head, *lines = csv.reader(file)
    rows: dict[tuple[str, ...], list[list[float]]] = {}
    for line in lines:
        rows.setdefault(tuple(line[:3]), []).append([float(cell) for cell in (*line[4:7], line[8])])
    cells = [
        (*place, *(f"{fmean(column):.2f}" for column in zip(*values, strict=True))) for place, values in rows.items()
    ]
    return markdown((*head[:3], *head[4:7], head[8]), cells, "l")


def zoo(root: Path) -> str:
    """Lay out the networks of others that run exactly."""
    return readme_matrix(latest(Journal(root / "results" / "zoo").records))


def shift(root: Path) -> str:
    """Show every table of the study of shifts."""
    return (root / "results" / "shift" / "table.md").read_text().removeprefix("# Shifts")


def _printed(snippet: str, root: Path) -> str:
    """Show what a snippet of the documentation prints; tests run it."""
    return f"```text\n{(root / 'docs' / 'snippets' / f'{snippet}.txt').read_text()}```"


TABLES: dict[str, Callable[..., str]] = {
    "quote": quote,
    "regression": regression,
    "cifar10": cifar10,
    "speed": speed,
    "zoo": zoo,
    "shift": shift,
    "statistics": statistics,
    "classification_output": partial(_printed, "classification"),
    "regression_output": partial(_printed, "regression"),
}
