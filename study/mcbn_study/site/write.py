"""The reproduction as a static site: every table and figure of the paper, ours beside the paper's."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mcbn.data import NAMES, describe
from mcbn.errors import MCBNError
from mcbn.page import scores
from mcbn.page.templates import Spec, axis, render, rounded, save, series
from mcbn.plots import Z50, Z95
from mcbn.progress import tracked
from mcbn_study import journal
from mcbn_study.journal import Provenance, trace
from mcbn_study.regression.figures import METHODS, TOY, first_split, load_arrays, read_predictions
from mcbn_study.regression.report import RegressionReport
from mcbn_study.regression.report import read as read_regression
from mcbn_study.site.markdown import embed, pictures_of, read_blocks
from mcbn_study.tables import MISSING, read_words, table

_WORDS = read_words(__package__)
Item = dict[str, str]  # where the paper has it, what, study, page, anchor, printed: report.toml says more
ITEMS: list[Item] = _WORDS["items"]
FURTHER = "Not in the paper"  # where the others are
STUDIES = ("regression", "sensitivity", "statistics", "objective", "regularizer")  # each with a page of its own making
FOLDERS, THEORY, SPEED, PAGES = (_WORDS[name] for name in ("folders", "theory", "speed", "pages"))  # name -> title
COMMANDS = {study: f"mcbn reproduce {study}" for study in ("toy", *STUDIES, *FOLDERS)} | _WORDS["commands"]
WHOLE, PARTLY = "complete", "Not run yet: "
COLORS = {"mcbn": "blue", "mnf": "violet", "mcdo": "red", "ensemble": "green"}  # as in Figure 2, which has these first
ANCHORS = {"cifar10": "table:cifar_results"}  # of a folder's tables; the paper's own label where it has one
Content = dict[str, Any]


def report(results: Path = Path("results"), out: Path = Path("site"), benchmarks: Path | None = None) -> Path:
    """Write the reproduction as a static site and return its way in, out/index.html."""
    return site(results, out, benchmarks=benchmarks)[0]


def site(results: str | Path, out: str | Path, *, benchmarks: str | Path | None = None) -> list[Path]:
    """Write the site into a folder and return its files; index.html is the way in.

    Reads the records, predictions and tables under `results` (regression, sensitivity, statistics, objective,
    regularizer) and the speed tables under `benchmarks`, by default benchmarks/results beside it. Every other folder
    with Markdown or PNG files (cifar10, segmentation, ...) becomes a page as it is. What is not there is listed as not
    run yet; a folder without any record is an error. Nothing is trained, and no page loads anything from elsewhere.
    """
    results = Path(results)
    reproduction = _read(results, Path(benchmarks) if benchmarks else results.parent / "benchmarks" / "results")
    if not reproduction.folders and not any(p.records for p in reproduction.provenance.values()):
        command = COMMANDS["regression"]
        raise MCBNError(f"{results} holds no records; make them with `{command}`, or name another folder")
    pages = PAGES | {f"{name}.html": title for name, title in reproduction.folders.items()}
    files = []
    for page in tracked(pages, "writing pages", "page"):
        template, content = _content(page.removesuffix(".html"), reproduction)
        title = "Monte Carlo batch normalisation, reproduced" if page == "index.html" else pages[page]
        text = render(f"{template}.html.j2", package=__package__, title=title, page=page, pages=pages, **content)
        files.append(save(Path(out) / page, text))
    return files


class Reproduction(NamedTuple):
    """All that the site shows, read from a folder of results."""

    folder: Path
    predictions: Path  # what the networks of the regression study predict
    benchmarks: Path
    provenance: Mapping[str, Provenance]
    folders: Mapping[str, str]  # shown as they are, with their titles
    tables: RegressionReport


def _read(results: Path, benchmarks: Path) -> Reproduction:
    records = {study: journal.read(results / study / journal.RECORDS) for study in STUDIES}
    records["speed"] = [r for name in ("cpu", "cuda") for r in journal.read(benchmarks / f"{name}.jsonl")]
    provenance = {study: trace(study, rows, COMMANDS[study]) for study, rows in records.items()}
    folders = find_folders(results)
    for name in folders:  # a command among the records counts more than ours
        rows = [record for path in sorted((results / name).glob("*.jsonl")) for record in journal.read(path)]
        told = [str(record["command"]) for record in rows if record.get("command")]
        provenance[name] = trace(name, rows, told[-1] if told else COMMANDS.get(name, f"mcbn reproduce {name}"))
    predictions = results / "regression" / "predictions"
    return Reproduction(results, predictions, benchmarks, provenance, folders, read_regression(results))


def find_folders(results: Path) -> dict[str, str]:
    """Return the folders that have something to show, with their titles: the known ones first, then any other."""
    present = sorted(path.name for path in results.iterdir() if path.is_dir()) if results.is_dir() else []
    titles = FOLDERS | {name: _words(name) for name in present if name not in (*FOLDERS, *STUDIES)}
    shown = {path.parent.name for pattern in ("*/*.md", "*/*.png") for path in results.glob(pattern)}
    return {name: title for name, title in titles.items() if name in shown}


def _words(name: str) -> str:
    text = name.replace("_", " ").replace("-", " ")
    return text[:1].upper() + text[1:]


def _content(page: str, reproduction: Reproduction) -> tuple[str, Content]:
    """Return the template of a page and what it shows."""
    folder, provenance, tables = reproduction.folder, reproduction.provenance, reproduction.tables
    match page:
        case "index":
            return page, _index(reproduction)
        case "regression":
            sizes = [(d.title, f"{d.n:,}", str(d.q), d.target) for d in map(describe, NAMES)]
            shown = [*tables.paper, table(_WORDS["sizes"], sizes), *tables.further]
            return "tables", {"provenance": provenance[page], "tables": shown}
        case "sensitivity":
            return "tables", {"provenance": provenance[page], "tables": tables.sensitivity}
        case "figures":
            return page, {"provenance": provenance["regression"], **_figures(reproduction.predictions)}
        case "statistics":
            return page, {"provenance": provenance[page], **_statistics(folder / page)}
        case "theory":
            tests = [(_document(folder / n / "table.md", t, n, n), provenance[n]) for n, t in THEORY.items()]
            return "documents", {"documents": tests}
        case "speed":
            benchmarks = reproduction.benchmarks
            timings = [(_document(benchmarks / f"{n}.md", t, n, page), None) for n, t in SPEED.items()]
            return "documents", {"documents": timings}
    return "folder", {"provenance": provenance[page], **_folder(folder / page)}


def _index(reproduction: Reproduction) -> Content:
    printed = {item["study"] for item in ITEMS}
    folders = {name: title for name, title in reproduction.folders.items() if name not in printed}
    further: list[Item] = [
        {"where": FURTHER, "what": title, "study": name, "page": f"{name}.html", "anchor": "top"}
        for name, title in folders.items()
    ]
    entries = [(item, *_progress(item, reproduction)) for item in (*ITEMS, *further)]
    states = [state for item, _, state, _ in entries if item["where"] != FURTHER]
    counts = {"total": len(states), "whole": states.count(WHOLE), "partly": sum(s.startswith(PARTLY) for s in states)}
    return {**counts, "entries": entries, "fidelity": reproduction.tables.fidelity}


def _progress(item: Item, reproduction: Reproduction) -> tuple[bool, str, Provenance]:
    """Tell whether a table or figure was run, how far it is, and where it comes from."""
    study = item["study"]
    provenance = reproduction.provenance.get(study) or trace(study, [], COMMANDS.get(study, ""))
    toy = study == "toy" and (reproduction.predictions / "toy.npz").exists()
    run = toy or study == "data" or bool(provenance.records) or study in reproduction.folders
    if not run:
        return False, f"Not run yet. The paper: {item.get('printed', 'see there')}", provenance
    tables = {table.label: table for table in (*reproduction.tables.paper, *reproduction.tables.sensitivity)}
    missing = []
    if item["anchor"] in tables:
        ours = [row for row in tables[item["anchor"]].rows if row[1] == "ours"]
        missing = [row[0] for row in ours if all(cell == MISSING for cell in row[2:])]
    elif study == "regression":
        predictions = reproduction.predictions
        missing = [describe(name).title for name in NAMES if not first_split(predictions, name, item["anchor"])]
    return True, f"{PARTLY}{', '.join(missing)}" if missing else WHOLE, provenance


def _figures(predictions: Path) -> Content:
    """Show Figure 1, then the uncertainty-error plots of every method that has predictions, the paper's first."""
    methods, toy = [], predictions / "toy.npz"
    for method in dict.fromkeys(("mcbn", "mnf", "mcdo", *METHODS)):
        files = {name: file for name in NAMES if (file := first_split(predictions, name, method))}
        absent = [describe(name).title for name in NAMES if name not in files]
        if charts := {f"{method}-{name}": read_predictions(name, file) for name, file in files.items()}:
            about = {"name": method, "title": METHODS[method], "color": COLORS.get(method, "blue")}
            methods.append({**about, "absent": absent, "charts": charts})
    drawn = {"toy": _toy_chart(toy) if toy.exists() else None, "methods": methods, "scores": scores}
    return {**drawn, "toy_command": COMMANDS["toy"]}


def _toy_chart(file: Path) -> Spec:
    x_train, y_train, x, mean, std, constant = load_arrays(file, TOY).values()
    order = np.argsort(x_train)
    bands = [
        {**series("band", f"{level} interval", "blue", x, mean + z * std), "low": rounded(mean - z * std), "deep": deep}
        for level, z, deep in (("95 %", Z95, False), ("50 %", Z50, True))
    ]
    edges = [
        series("line", f"constant 95 %, {way}", "red", x, mean + z * float(constant), dash=True)
        for way, z in (("above", Z95), ("below", -Z95))
    ]
    points = series("dots", "training points", "ink", x_train[order], y_train[order])
    return {
        "alt": "Toy problem: the MCBN bands are narrow on the points and widen in the gap and beyond both ends.",
        "x": axis("x", float(x.max()), float(x.min())),
        "y": axis("y", float((mean + Z95 * std).max()), float((mean - Z95 * std).min())),
        "series": [*bands, series("line", "mean", "blue", x, mean), *edges, {**points, "quiet": True}],
    }


def _statistics(folder: Path) -> Content:
    histograms = []
    for kind, title in (("mean", "means"), ("std", "standard deviations")):
        files = {file.stem.partition("-")[2]: file for file in sorted(folder.glob(f"{kind}-layer*.png"))}
        alt = f"Batch {title}, {{}}, by epoch and batch size"
        histograms.append((kind, title, [embed(file, alt.format(layer)) for layer, file in files.items()]))
    return {"histograms": histograms, "tests": _document(folder / "table.md", "Tests", "table", "statistics")}


def _document(path: Path, title: str, anchor: str, study: str) -> Content:
    """Read a Markdown file as the studies write them, to show under a heading of ours."""
    blocks = list(read_blocks(path.read_text("utf-8"), path.parent)) if path.exists() else None
    return {"title": title, "anchor": anchor, "command": COMMANDS[study], "blocks": blocks}


def _folder(folder: Path) -> Content:
    """Show the tables of a folder, then the pictures that they do not name."""
    files = sorted(folder.glob("*.md"), key=lambda path: (path.stem != "table", path.stem))
    texts = [file.read_text("utf-8") for file in files]
    named = {file for text in texts for file in pictures_of(text)}
    pictures = [*sorted(folder.glob("*.png")), *sorted(folder.glob("figures/*.png"))]
    summary = folder / "summary.csv"
    lines = summary.read_text("utf-8").splitlines() if summary.is_file() else []
    return {
        "folder": folder.name,
        "anchor": ANCHORS.get(folder.name, "tables"),
        "blocks": [block for text in texts for block in read_blocks(text, folder)],
        "images": [embed(p, _words(p.stem)) for p in pictures if p.relative_to(folder).as_posix() not in named],
        "n_rows": sum(map(bool, lines)) - 1 if lines else None,
    }
