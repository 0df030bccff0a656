"""The reproduction as a static site: every table and figure of the paper, ours beside the paper's."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from mcbn.data import NAMES, describe
from mcbn.errors import MCBNError
from mcbn.page.html import Markup, document, element, join, save, table
from mcbn.progress import tracked
from mcbn_study import journal
from mcbn_study.regression.figures import first_split
from mcbn_study.regression.report import read as read_regression
from mcbn_study.site.catalogue import COMMANDS, FURTHER, ITEMS, PAGES, STUDIES, Item
from mcbn_study.site.folders import find_folders, folder_part, trace_folder
from mcbn_study.site.interactive import figures_part
from mcbn_study.site.parts import markdown_part, missing_sets, not_run, provenance_part, table_part
from mcbn_study.site.pictures import image_part
from mcbn_study.site.provenance import Provenance, trace
from mcbn_study.tables import MISSING, Table

TABLES = "mcbn reproduce tables"
WHOLE, PARTLY = "complete", "Not run yet: "


class Study(NamedTuple):
    """All that the site shows, read from a folder of results."""

    folder: Path
    benchmarks: Path
    made: Mapping[str, Provenance]
    folders: Mapping[str, str]  # shown as they are, with their titles
    regression: Sequence[Table]
    further: Sequence[Table]
    sensitivity: Sequence[Table]
    fidelity: Sequence[Table]


def site(results: str | Path, out: str | Path, *, benchmarks: str | Path | None = None) -> list[Path]:
    """Write the site into a folder and return its files; index.html is the way in.

    Reads the records, predictions and tables under `results` (regression, sensitivity, statistics, objective,
    regularizer) and the speed tables under `benchmarks`, by default benchmarks/results beside it. Every other folder
    with Markdown or PNG files (cifar10, segmentation, ...) becomes a page as it is. What is not there is listed as not
    run yet; a folder without any record is an error. Nothing is trained, and no page loads anything from elsewhere.
    """
    results = Path(results)
    study = _read(results, Path(benchmarks) if benchmarks else results.parent / "benchmarks" / "results")
    if not study.folders and not any(found.records for found in study.made.values()):
        raise MCBNError(
            f"{results} holds no records; make them with `{COMMANDS['regression']}`, or name another folder"
        )
    pages = PAGES | {f"{name}.html": title for name, title in study.folders.items()}
    return [
        save(Path(out) / name, _page(name, _body(name, study), pages))
        for name in tracked(pages, "writing pages", "page")
    ]


def _body(page: str, study: Study) -> list[Markup]:
    makers = {
        "index.html": _index,
        "regression.html": _regression,
        "figures.html": _figures,
        "sensitivity.html": _sensitivity,
        "statistics.html": _statistics,
        "theory.html": _theory,
        "speed.html": _speed,
    }
    name = page.removesuffix(".html")
    return makers[page](study) if page in makers else folder_part(study.folder / name, study.made[name])


def _read(results: Path, benchmarks: Path) -> Study:
    found = {study: journal.read(results / study / "records.jsonl") for study in STUDIES}
    made = {study: trace(study, found[study], COMMANDS[study]) for study in STUDIES}
    speed = [r for name in ("cpu", "cuda") for r in journal.read(benchmarks / f"{name}.jsonl")]
    made["speed"] = trace("speed", speed, COMMANDS["speed"])
    named = find_folders(results)
    made |= {name: trace_folder(results / name) for name in named}
    tables = read_regression(results)
    return Study(
        folder=results,
        benchmarks=benchmarks,
        made=made,
        folders=named,
        regression=tables.paper,
        further=tables.further,
        sensitivity=tables.sensitivity,
        fidelity=tables.fidelity,
    )


def _page(name: str, body: Sequence[Markup], pages: Mapping[str, str]) -> str:
    links = [
        element("a", title, href=page, aria_current="page" if page == name else None) for page, title in pages.items()
    ]
    title = "Monte Carlo batch normalisation, reproduced" if name == "index.html" else pages[name]
    lead = element("p", "Teye, Azizpour and Smith, ICML 2018: ours beside the paper's.", class_="muted")
    return document(title, *body, lead=lead, nav=join(links))


def _index(study: Study) -> list[Markup]:
    header = ("Where", "What", "Ours", "Made by", "Hardware", "Time of the study")
    note = "Every table and figure of the paper. Ours stands beside the paper's, with the difference, behind each link."
    items = [*ITEMS, *_further(study)]
    rows = [_entry(item, study) for item in items]
    states = [row[2] for item, row in zip(items, rows, strict=True) if item.where != FURTHER]
    whole, partly = states.count(WHOLE), sum(state.startswith(PARTLY) for state in states)
    sentence = (
        f"Of the paper's {len(states)} tables and figures {whole} are reproduced whole, {partly} but for some data"
        f" sets, and {len(states) - whole - partly} are not run yet."
    )
    return [
        element("p", sentence, class_="headline"),
        table(header, rows, caption=note, text=(1, 2, 3, 4, 5)),
        *(table_part(found) for found in study.fidelity),
    ]


def _further(study: Study) -> list[Item]:
    """List the folders that no table or figure of the paper stands for."""
    printed = {item.study for item in ITEMS}
    return [
        Item(FURTHER, title, name, f"{name}.html", "top")
        for name, title in study.folders.items()
        if name not in printed
    ]


def _entry(item: Item, study: Study) -> list[str]:
    made = study.made.get(item.study)
    toy = study.folder / "regression" / "predictions" / "toy.npz"
    there = item.study == "data" or (toy.exists() if item.study == "toy" else bool(made and made.records))
    there = there or item.study in study.folders
    if not there:
        state = f"Not run yet. The paper: {item.printed or 'see there'}"
        return [item.where, item.what, state, element("code", COMMANDS[item.study]), MISSING, MISSING]
    link = element("a", item.what, href=f"{item.page}#{item.anchor}")
    command = made.command if made else COMMANDS.get(item.study, MISSING)
    shown = element("code", command) if command != MISSING else Markup(MISSING)
    return [
        item.where,
        link,
        _state(item, study),
        shown,
        made.hardware or MISSING if made else MISSING,
        made.time if made else MISSING,
    ]


def _state(item: Item, study: Study) -> str:
    found = next((t for t in [*study.regression, *study.sensitivity] if t.label == item.anchor), None)
    missing = missing_sets(found) if found else []
    if not missing and item.study == "regression":
        missing = [describe(name).title for name in NAMES if not first_split(_predictions(study), name, item.anchor)]
    return f"{PARTLY}{', '.join(missing)}" if missing else WHOLE


def _regression(study: Study) -> list[Markup]:
    made = provenance_part(study.made["regression"], TABLES)
    return [made, *(table_part(t) for t in [*study.regression, _sizes(), *study.further])]


def _figures(study: Study) -> list[Markup]:
    return figures_part(_predictions(study), study.made["regression"])


def _sizes() -> Table:
    rows = tuple((describe(n).title, f"{describe(n).n:,}", str(describe(n).q), describe(n).target) for n in NAMES)
    note = (
        "N rows and Q inputs are the paper's; every file is checked against them, and by its sha256, when it is loaded."
    )
    return Table("Regression dataset summary", "table:datasets", ("Dataset", "N", "Q", "Target"), rows, note)


def _sensitivity(study: Study) -> list[Markup]:
    made = provenance_part(study.made["sensitivity"], TABLES)
    return [made, *(table_part(t) for t in study.sensitivity)]


def _predictions(study: Study) -> Path:
    return study.folder / "regression" / "predictions"


def _statistics(study: Study) -> list[Markup]:
    folder = study.folder / "statistics"
    parts = [provenance_part(study.made["statistics"])]
    for kind, title in (("mean", "means"), ("std", "standard deviations")):
        parts.append(element("h2", f"Distribution of batch {title}", id=kind))
        images = sorted(folder.glob(f"{kind}-layer*.png"))
        parts += [image_part(p, f"Batch {title}, {p.stem.partition('-')[2]}, by epoch and batch size") for p in images]
        parts += [] if images else [not_run(COMMANDS["statistics"])]
    return [*parts, markdown_part(folder / "table.md", "Tests", "table", COMMANDS["statistics"])]


def _theory(study: Study) -> list[Markup]:
    titles = {"objective": "Gradients of Eq. (1) and Eq. (2)", "regularizer": "Training with the KL regulariser"}
    parts = []
    for name, title in titles.items():
        parts.append(markdown_part(study.folder / name / "table.md", title, name, COMMANDS[name]))
        parts.append(provenance_part(study.made[name]))
    return parts


def _speed(study: Study) -> list[Markup]:
    return [
        markdown_part(study.benchmarks / f"{name}.md", f"Speed on {title}", name, COMMANDS["speed"])
        for name, title in (("cpu", "a CPU"), ("cuda", "a GPU"))
    ]
