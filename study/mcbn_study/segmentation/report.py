"""Summary, tables and pictures of the segmentation study, from its records and the maps it kept."""

import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mcbn import plots
from mcbn.errors import MCBNError
from mcbn.files import write_text
from mcbn_study.data.scenes import SCENE_SETS, Scenes, SceneSet, load_scenes
from mcbn_study.estimates import mean_cell
from mcbn_study.journal import RECORDS, Record, latest, read
from mcbn_study.segmentation.scores import REFUSED
from mcbn_study.tables import PHOTOGRAPH, read_words, render, save_figure, to_csv

_WORDS = read_words(__package__)
SETS, TITLES, MAPS = (_WORDS[name] for name in ("sets", "methods", "maps"))
COLUMNS = _WORDS["columns"]["maps"]  # of a picture: method, map, title
LINES = _WORDS["refusal"]["lines"]  # of the refusal curve: method, map, name, colour
VOID_COLOUR = (235, 235, 235)
Scores = Mapping[str, float | None]


def write(out: str | Path) -> list[Path]:
    """Write summary.csv, table.md and the figures into the folder of records; return what was written."""
    out = Path(out)
    for record in (recorded := read(out / RECORDS)):
        record.setdefault("seed", record["config"].get("seed", 0))
    records = sorted(latest(recorded, ("dataset", "method", "seed")), key=lambda r: r["seed"])
    if not (scored := [record for record in records if record["kind"] == "scores"]):
        raise MCBNError(f"{out} holds no scores yet; run `mcbn reproduce segmentation --out {out}`")
    header = ("dataset", "method", "seed", "metric", "value")
    rows = [(*(r[key] for key in header[:3]), name, value) for r in scored for name, value in r["scores"].items()]
    datasets = sorted({record["dataset"] for record in scored})
    written = [
        write_text(out / "summary.csv", to_csv(header, rows, digits=6)),
        write_text(out / "table.md", tables(records)),
        save_figure(refusal(scored, datasets), out / "refusal.png", PHOTOGRAPH),
    ]
    for dataset in datasets:
        config = next(r["config"] for r in reversed(scored) if r["dataset"] == dataset)
        if figure := pictures(out / "examples", dataset, config):
            colours = (*SCENE_SETS[config["dataset"]].colours, VOID_COLOUR)
            written.append(save_figure(figure, out / f"{dataset}.png", PHOTOGRAPH, colours))
    return written


def tables(records: Sequence[Record]) -> str:
    """Lay out everything in Markdown."""
    sets = []
    for dataset in sorted({record["dataset"] for record in records}):
        training = [r for r in records if (r["dataset"], r["kind"]) == (dataset, "training")]
        sets.append((SETS[dataset], training, scores_by_method(records, dataset)))
    content = {"refused": REFUSED, "titles": TITLES, "maps": MAPS, "values": values, "mean_cell": mean_cell}
    return render(__package__, sets=sets, **content)


def scores_by_method(records: Sequence[Record], dataset: str) -> dict[str, list[Scores]]:
    """Return the scores by method, in the order shown, of every network that all methods were tried on."""
    methods = {
        m: {r["seed"]: r["scores"] for r in records if (r["dataset"], r["method"]) == (dataset, m)} for m in TITLES
    }
    tried = {method: scores for method, scores in methods.items() if scores}
    seeds = sorted(set.intersection(*map(set, tried.values()))) if tried else []
    return {method: [scores[seed] for seed in seeds] for method, scores in tried.items() if seeds}


def values(runs: Sequence[Scores], name: str, less: Sequence[Scores] = ()) -> list[float]:
    """Return a score of every network that has it, or by how much it is above that of others, network by network."""
    found = [value for run in runs if (value := run.get(name)) is not None]
    return [a - b for a, b in zip(found, values(less, name), strict=True)] if less else found


def refusal(scored: Sequence[Record], datasets: Sequence[str]) -> "plots.Figure":
    """Draw accuracy against the share of pixels refused, one panel a data set."""
    figure = plots.new_figure(5.2 * len(datasets) + 0.4, 4.4, dpi=100)
    for ax, dataset in zip(figure.subplots(1, len(datasets), squeeze=False)[0], datasets, strict=True):
        by_method = scores_by_method(scored, dataset)
        for method, name, label, colour in LINES:
            runs = by_method.get(method, [])
            if values(runs, f"error_auroc_{name}"):
                accuracies = [fmean(values(runs, f"accuracy_refused_{percent}_{name}")) for percent in REFUSED]
                ax.plot(REFUSED, accuracies, marker="o", markersize=4, color=colour, label=f"{label}: {MAPS[name]}")
        ax.set(xlabel="most uncertain pixels refused (%)", ylabel="accuracy of the pixels left (%)")
        ax.set_title(SETS[dataset], fontsize="medium")
        ax.grid(alpha=0.3)
        ax.legend(frameon=False, fontsize="small")
    return figure


def load_shown(path: Path) -> dict[str, NDArray[Any]]:
    """Read what the study kept of the images shown: names (n,), label (n, H, W), and maps (n, H, W) by name."""
    try:
        with np.load(path, allow_pickle=False) as file:
            maps = {name: file[name] * file[f"{name}_scale"] for name in MAPS if name in file}
            return {"names": file["names"], "label": file["label"], **maps}
    except (OSError, EOFError, KeyError, ValueError, zipfile.BadZipFile) as error:
        raise MCBNError(f"{path} is no whole file of maps ({error}); remove it and its records, run again") from error


def pictures(folder: Path, dataset: str, config: Mapping[str, Any]) -> "plots.Figure | None":
    """Draw rows of image, truth, segmentation and the maps there are (Figure 2, right); None without MCBN's."""
    files = {method: folder / f"{dataset}-{method}.npz" for method, _, _ in COLUMNS}
    if not files["mcbn"].exists():
        return None
    shown = {method: load_shown(path) for method, path in files.items() if path.exists()}
    kind, labels = SCENE_SETS[config["dataset"]], shown["mcbn"]["label"]
    scenes = _find(kind, config, shown["mcbn"]["names"].tolist())
    x, y = scenes.x.permute(0, 2, 3, 1).numpy(), scenes.y.numpy()
    palette = np.full((256, 3), VOID_COLOUR, dtype=np.uint8)
    palette[: len(kind.colours)] = kind.colours
    maps = {title: shown[method][name] for method, name, title in COLUMNS if method in shown}
    figure = _draw([x, palette[y], palette[labels], *maps.values()], [*_WORDS["columns"]["images"], *maps])
    _add_classes(figure, kind, np.unique(np.concatenate([y.ravel(), labels.ravel()])).tolist())
    return figure


def _draw(columns: Sequence[NDArray[Any]], titles: Sequence[str]) -> "plots.Figure":
    """Draw columns of pictures (n, H, W, 3) and of maps (n, H, W), these on one scale, the largest values cut off."""
    from matplotlib.ticker import MaxNLocator

    rows, H, W, _ = columns[0].shape
    width = 2.1 if W > H else 1.75
    height = width * H / W
    figure = plots.new_figure(width * len(titles), rows * (height + 0.06) + 1.5, dpi=100)
    grid = figure.subplots(rows + 1, len(titles), squeeze=False, height_ratios=[height] * rows + [0.1])
    for title, images, (*axes, bar) in zip(titles, columns, grid.T, strict=True):
        is_map = images.ndim == 3
        scale = {"cmap": "inferno", "vmin": 0, "vmax": float(np.quantile(images, 0.998)) or 1.0} if is_map else {}
        for ax, image in zip(axes, images, strict=True):
            drawn = ax.imshow(image, interpolation="nearest", **scale)
            ax.set(xticks=[], yticks=[])
        axes[0].set_title(title, fontsize="small")
        if is_map:
            figure.colorbar(drawn, cax=bar, orientation="horizontal", ticks=MaxNLocator(3), extend="max")
            bar.tick_params(labelsize="x-small")
        else:
            bar.set_axis_off()
    return figure


def _find(kind: SceneSet, config: Mapping[str, Any], names: Sequence[str]) -> Scenes:
    """Read the images of these names, at the size of the run."""
    scenes = load_scenes(kind, config["test_part"], limit=config["limit"])
    if missing := set(names) - set(scenes.names):
        raise MCBNError(f"{kind.name} has no image {missing.pop()!r} in its part {config['test_part']}")
    rows = [scenes.names.index(name) for name in names]
    chosen = replace(scenes, x=scenes.x[rows], y=scenes.y[rows], names=tuple(names))
    return chosen if config["size"] is None else chosen.shrink(tuple(config["size"]))


def _add_classes(figure: "plots.Figure", kind: SceneSet, labels: Sequence[int]) -> None:
    from matplotlib.patches import Patch

    names = {k: kind.classes[k] for k in labels if k < len(kind.classes)}
    entries = [Patch(facecolor=f"#{bytes(kind.colours[k]).hex()}", label=name) for k, name in names.items()]
    if kind.void in labels:
        entries.append(Patch(facecolor=f"#{bytes(VOID_COLOUR).hex()}", edgecolor="0.6", label="void, not scored"))
    columns = min(len(entries), 6)
    figure.legend(handles=entries, loc="outside lower center", ncols=columns, frameon=False, fontsize="small")
