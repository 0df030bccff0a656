"""Studies that leave Markdown, pictures and records in a folder, each as a page."""

from collections.abc import Mapping
from pathlib import Path

from mcbn.page.html import Markup, element
from mcbn_study import journal
from mcbn_study.site.catalogue import COMMANDS, FOLDERS, STUDIES
from mcbn_study.site.markdown import pictures_of, to_html
from mcbn_study.site.parts import provenance_part
from mcbn_study.site.pictures import image_part
from mcbn_study.site.provenance import Provenance, trace

ANCHORS = {"cifar10": "table:cifar_results"}  # of the tables; the paper's own label where it has one


def find_folders(results: Path) -> dict[str, str]:
    """Return the folders that have something to show, with their titles: the known ones first, then any other."""
    others = sorted(path.name for path in results.iterdir() if path.is_dir()) if results.is_dir() else []
    named = FOLDERS | {name: _words(name) for name in others if name not in FOLDERS}
    return {name: title for name, title in named.items() if name not in STUDIES and _shown(results / name)}


def _shown(folder: Path) -> bool:
    return any(folder.glob("*.md")) or any(folder.glob("*.png"))


def trace_folder(folder: Path) -> Provenance:
    """Collect what the records of a folder tell; a command among them counts more than ours."""
    found = [record for path in sorted(folder.glob("*.jsonl")) for record in journal.read(path)]
    named = next((str(record["command"]) for record in reversed(found) if record.get("command")), None)
    return trace(folder.name, found, named or COMMANDS.get(folder.name, f"mcbn reproduce {folder.name}"))


def folder_part(folder: Path, made: Provenance) -> list[Markup]:
    """Show the tables of a folder, then the pictures that they do not name."""
    texts = {path: path.read_text("utf-8") for path in _tables_first(folder)}
    parts = [element("div", provenance_part(made) if made.records else _unrecorded(made), id="top")]
    anchor = ANCHORS.get(folder.name, "tables")
    parts.append(element("div", *(to_html(text, folder) for text in texts.values()), id=anchor))
    named = {file: alt for text in texts.values() for file, alt in pictures_of(text).items()}
    return [*parts, element("div", *_pictures(folder, named), id="pictures"), *_numbers(folder)]


def _tables_first(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.md"), key=lambda path: (path.stem != "table", path.stem))


def _pictures(folder: Path, named: Mapping[str, str]) -> list[Markup]:
    """Embed the remaining pictures; a file's name stands for the words it lacks."""
    rest = [path for path in sorted(folder.glob("*.png")) if path.name not in named]
    rest += [path for path in sorted(folder.glob("figures/*.png")) if f"figures/{path.name}" not in named]
    return [image_part(path, _words(path.stem)) for path in rest]


def _words(name: str) -> str:
    text = name.replace("_", " ").replace("-", " ")
    return text[:1].upper() + text[1:]


def _numbers(folder: Path) -> list[Markup]:
    path = folder / "summary.csv"
    if not path.is_file():
        return []
    rows = sum(1 for line in path.read_text("utf-8").splitlines() if line) - 1
    name, count = element("code", f"{folder.name}/{path.name}"), f"{rows:,} row{'' if rows == 1 else 's'}"
    return [element("p", "All numbers: ", name, f" in the folder of results, {count}.", class_="muted")]


def _unrecorded(made: Provenance) -> Markup:
    text = ". Hardware and time are not on record."
    return element("p", "Made by ", element("code", made.command), text, class_="muted")
