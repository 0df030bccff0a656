"""The reproduction as a static site: every table and figure of the paper, ours beside the paper's."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from mcbn.data import NAMES, describe
from mcbn.errors import MCBNError
from mcbn.page.templates import render, save
from mcbn_study import journal
from mcbn_study.journal import Provenance, trace
from mcbn_study.machine import tracked
from mcbn_study.regression.figures import METHODS, first_split
from mcbn_study.regression.report import RegressionReport, read as read_regression
from mcbn_study.site.markdown import embed, pictures_of, read_blocks
from mcbn_study.tables import MISSING, read_words, table

_WORDS = read_words(__package__)
Item = dict[str, str]  # where the paper has it, what, study, page, anchor, printed: report.toml says more
ITEMS: list[Item] = _WORDS["items"]
STUDIES = ("regression", "sensitivity")  # their tables are laid out anew; other folders are shown as they are
FOLDERS, PAGES = _WORDS["folders"], _WORDS["pages"]  # name -> title
COMMANDS = {study: f"mcbn reproduce {study}" for study in ("toy", *STUDIES, *FOLDERS)} | _WORDS["commands"]
WHOLE, PARTLY = "complete", "Not run yet: "
ANCHORS = {"cifar10": "table:cifar_results"}  # of a folder's tables; the paper's own label where it has one


def report(results: Path = Path("results"), out: Path = Path("site")) -> Path:
    """Write the reproduction as a static site and return its way in, out/index.html.

    Tables of the regression study are made from its records, its figures are those that lie there. Every other folder
    with Markdown or PNG files becomes a page as it is, and so do the speed tables in benchmarks/results beside them.
    """
    reproduction = _read(results)
    if not reproduction.folders and not any(p.records for p in reproduction.provenance.values()):
        command = COMMANDS["regression"]
        raise MCBNError(f"{results} holds no records; make them with `{command}`, or name another folder")
    pages = PAGES | {f"{name}.html": _title(name) for name in reproduction.folders}
    for page in tracked(pages, "writing pages", "page"):
        template, content = _content(page.removesuffix(".html"), reproduction)
        title = "Monte Carlo batch normalisation, reproduced" if page == "index.html" else pages[page]
        text = render(f"{template}.html.j2", package=__package__, title=title, page=page, pages=pages, **content)
        save(out / page, text)
    return out / "index.html"


class Reproduction(NamedTuple):
    """All that the site shows, read from a folder of results."""

    regression: Path  # the folder of that study
    provenance: Mapping[str, Provenance]
    folders: Mapping[str, Path]  # shown as they are, by the names of their pages
    tables: RegressionReport


def _read(results: Path) -> Reproduction:
    folders = find_folders(results)
    files = {study: [results / study / journal.RECORDS] for study in STUDIES}
    files |= {name: sorted(folder.glob("*.jsonl")) for name, folder in folders.items()}
    if "speed" in folders:  # where other benchmarks have records too
        files["speed"] = [folders["speed"] / f"{device}.jsonl" for device in ("cpu", "cuda")]
    records = {name: [record for path in paths for record in journal.read(path)] for name, paths in files.items()}
    commands = {name: f"mcbn reproduce {name}" for name in records} | COMMANDS
    provenance = {name: trace(name, rows, commands[name]) for name, rows in records.items()}
    return Reproduction(results / "regression", provenance, folders, read_regression(results))


def find_folders(results: Path) -> dict[str, Path]:
    """Return the folders that have something to show, by name: the known ones first, then any other."""
    shown = {path.parent.name: path.parent for ending in ("md", "png") for path in results.glob(f"*/*.{ending}")}
    if any((speed := results.parent / "benchmarks" / "results").glob("*.md")):
        shown["speed"] = speed
    return {name: shown[name] for name in (*FOLDERS, *sorted(shown.keys() - {*FOLDERS, *STUDIES})) if name in shown}


def _title(name: str) -> str:
    """Name a folder or a picture in words."""
    return FOLDERS.get(name) or name.replace("_", " ").replace("-", " ").capitalize()


def _content(page: str, reproduction: Reproduction) -> tuple[str, dict[str, Any]]:
    """Return the template of a page and what it shows."""
    regression, provenance, folders, tables = reproduction
    match page:
        case "index":
            return page, _index(reproduction)
        case "figures":
            return page, {"provenance": provenance["regression"], **_figures(regression)}
        case "regression":
            sizes = [(d.title, f"{d.n:,}", str(d.q), d.target) for d in map(describe, NAMES)]
            shown = [*tables.paper, table(_WORDS["sizes"], sizes), *tables.further]
        case "sensitivity":
            shown = list(tables.sensitivity)
        case _:
            return "folder", {"provenance": provenance[page], **_folder(folders[page])}
    return "tables", {"provenance": provenance[page], "tables": shown}


def _index(reproduction: Reproduction) -> dict[str, Any]:
    entries = [(item, *_progress(item, reproduction)) for item in ITEMS]
    states = [state for _, _, state, _ in entries]
    counts = {"total": len(states), "whole": states.count(WHOLE), "partly": sum(s.startswith(PARTLY) for s in states)}
    printed = {item["study"] for item in ITEMS}
    for name in (name for name in reproduction.folders if name not in printed):
        further = {"where": "Not in the paper", "what": _title(name), "page": f"{name}.html", "anchor": "top"}
        entries.append((further, True, WHOLE, reproduction.provenance[name]))
    return {**counts, "entries": entries, "fidelity": reproduction.tables.fidelity}


def _progress(item: Item, reproduction: Reproduction) -> tuple[bool, str, Provenance]:
    """Tell whether a table or figure of the paper was run, how far it is, and where it comes from."""
    study, anchor = item["study"], item["anchor"]
    provenance = reproduction.provenance.get(study) or trace(study, [], COMMANDS.get(study, ""))
    run = study == "data" or bool(provenance.records) or study in reproduction.folders
    if item["page"] == "figures.html":
        run = _figure(reproduction.regression, anchor).exists()
    if not run:
        return False, f"Not run yet. The paper: {item.get('printed', 'see there')}", provenance
    tables = {table.label: table for table in (*reproduction.tables.paper, *reproduction.tables.sensitivity)}
    missing = []
    if anchor in tables:
        ours = [row for row in tables[anchor].rows if row[1] == "ours"]
        missing = [row[0] for row in ours if all(cell == MISSING for cell in row[2:])]
    elif study == "regression":
        predictions = reproduction.regression / "predictions"
        missing = [describe(name).title for name in NAMES if not first_split(predictions, name, anchor)]
    return True, f"{PARTLY}{', '.join(missing)}" if missing else WHOLE, provenance


def _figure(regression: Path, name: str) -> Path:
    return regression / "figures" / ("toy.png" if name == "toy" else f"uncertainty_error_{name}.png")


def _figures(regression: Path) -> dict[str, Any]:
    """Show Figure 1, then the uncertainty-error plots of every method that has one, the paper's first."""
    titles = {"toy": "MCBN and constant uncertainty"}
    titles |= {name: METHODS[name] for name in dict.fromkeys(("mcbn", "mnf", "mcdo", *METHODS))}
    files = {name: file for name in titles if (file := _figure(regression, name)).exists()}
    return {"images": {name: embed(file, titles[name]) for name, file in files.items()}, "toy_command": COMMANDS["toy"]}


def _folder(folder: Path) -> dict[str, Any]:
    """Show the tables of a folder, then the pictures that they do not name."""
    files = sorted(folder.glob("*.md"), key=lambda path: (path.stem != "table", path.stem))
    texts = [file.read_text("utf-8") for file in files]
    named = {file for text in texts for file in pictures_of(text)}
    pictures = [*sorted(folder.glob("*.png")), *sorted(folder.glob("figures/*.png"))]
    return {
        "folder": folder.name,
        "anchor": ANCHORS.get(folder.name, "tables"),
        "blocks": [block for text in texts for block in read_blocks(text, folder)],
        "images": [embed(p, _title(p.stem)) for p in pictures if p.relative_to(folder).as_posix() not in named],
        "summary": (folder / "summary.csv").is_file(),
    }
