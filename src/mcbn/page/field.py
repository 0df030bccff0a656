"""One HTML file about inputs in the field: p-values over time, where the network sees a shift, the strangest inputs."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from mcbn import metrics, outputs
from mcbn.errors import MCBNError
from mcbn.field.watch import Watch
from mcbn.model import MCBN
from mcbn.page.evidence import Names
from mcbn.page.examples import COUNT, Group, heat, show_inputs, tile
from mcbn.page.templates import render, save
from mcbn.prediction import RegressionPrediction

Rows: TypeAlias = Sequence[Mapping[str, Any]]
WIDEST = 160  # cells of a row of the heat map; of more batches the farthest of neighbours is drawn


def write_watch_page(
    path: str | Path,
    watch: Watch,
    x: Any = None,
    y: Any = None,
    *,
    rows: Rows | None = None,
    bayes: MCBN[Any] | None = None,
    adapted: MCBN[Any] | None = None,
    names: Names = None,
    title: str = "Are these inputs like home?",
) -> Path:
    """Write one self-contained, interactive HTML file about a stream of inputs.

    It draws the p-value of every batch, the evidence of the stream and a heat map of layers by batches, shows the
    strangest inputs, and predictions before and after adaptation.

    Args:
        path: the file to write, which is returned; its folder is made.
        watch: what judges the inputs.
        x: the inputs in their order, (N, ...); the strangest are shown. None: `rows` alone are.
        y: their targets or labels, where known: before and after adaptation are then scored.
        rows: what `Watch.read` gave for them; read here where not given, as a new stream.
        bayes, adapted: an MCBN and what its `adapt` returned, or was loaded: shown before and after, on x.
        names, title: as for `mcbn.page.write_page`.

    >>> watch = bayes.watch(x, batch_size=4, false_alarms=0.1)
    >>> write_watch_page(folder / "watch.html", watch, x).name
    'watch.html'
    """
    if rows is None:
        watch.reset()
        rows = list(watch.read([] if x is None else [x]))
    if not rows:
        raise MCBNError(f"a page needs a whole batch, {watch.batch_size} inputs, or the rows of Watch.read")
    before, after = ({} if x is None or m is None or adapted is None else _scores(m, x, y) for m in (bayes, adapted))
    content: dict[str, Any] = {
        "surprise": -np.log10([row["p_value"] for row in rows]),
        "evidence": np.log10([row["evidence"] for row in rows]),
        "limit": -np.log10(watch.false_alarms),
        "layers": _layers(rows),
        "strangest": {} if x is None else _strangest(watch, x, names),
        "changes": [(name, before[name], after[name]) for name in before],
        "adaptation": None if adapted is None else adapted.adaptation,
    }
    return save(Path(path), render("watch.html.j2", title=title, watch=watch, rows=rows, **content))


def _layers(rows: Rows) -> dict[str, Any]:
    """Draw how far each layer is, batch by batch: a row of colours a layer, log10 of its distance."""
    names = [name for name in rows[0] if name.startswith("layer_")]
    distances = np.array([[row[name] for row in rows] for name in names])  # (L, batches)
    finite = distances[np.isfinite(distances)].max(initial=3)
    edges = np.linspace(0, len(rows), min(WIDEST, len(rows)), endpoint=False).astype(int)
    cells = np.log10(np.maximum.reduceat(distances, edges, axis=1).clip(1, finite))
    strips = [heat(cell[None], np.log10(finite)) for cell in cells]
    tiles = [tile(strip, name.removeprefix("layer_")) for name, strip in zip(names, strips, strict=True)]
    return {"rows": tiles, "scale": tile(heat(np.linspace(0, 1, 64)[None], 1)), "top": float(finite)}


def _strangest(watch: Watch, x: Any, names: Names) -> Group:
    """Show the inputs that are farthest from the reference, each by itself."""
    novelty = watch.novelty(x)
    chosen = novelty.distance.argsort(descending=True)[:COUNT].cpu().numpy()
    cells = [[str(i), float(novelty.p_value[i]), float(novelty.distance[i])] for i in chosen]
    return show_inputs(x, chosen, ["input", "p-value", "distance"], cells, names)


def _scores(bayes: MCBN[Any], x: Any, y: Any) -> dict[str, float]:
    """Sum up predictions of x, and score them where there are targets or labels y."""
    pred = bayes.predict(x)
    regression = isinstance(pred, RegressionPrediction)
    values = {"mean std": pred.variance.sqrt()} if regression else {"mean entropy (nats)": pred.entropy}
    if y is not None and regression:
        values["RMSE"] = metrics.rmse(pred.mean, y)
    elif y is not None:
        y = outputs.require_labels(y, pred.probs)  # of a table they are floats
        values |= {"accuracy": metrics.accuracy(pred.probs, y), "NLL (nats)": metrics.nll(pred.probs, y)}
    return {name: float(value.mean()) for name, value in values.items()}
