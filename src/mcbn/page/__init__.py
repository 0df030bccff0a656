"""One HTML file that shows whether a prediction's uncertainty can be trusted."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mcbn.errors import MCBNError
from mcbn.model import MCBN
from mcbn.page import evidence, examples, scores
from mcbn.page.evidence import Names, Spread, Votes
from mcbn.page.templates import render, save

__all__ = ["write_page", "write_prediction_page"]


def write_page(
    path: str | Path,
    bayes: MCBN[Any],
    x: Any,
    y: Any,
    *,
    train: Any = None,
    constant_std: float | None = None,
    ignore_index: int | None = None,
    title: str = "How far can this network be trusted?",
    units: str = "target units",
    names: Names = None,
    classes: Names = None,
    groups: Names = None,
    seed: int = 0,
) -> Path:
    """Predict held-out data and write one self-contained, interactive HTML file about it.

    The page says in words and numbers how errors go with uncertainty; it draws errors against uncertainty (Teye et al.
    2018, Figure 2), reliability, coverage, risk-coverage and a histogram, shows the most and least certain inputs, and
    a table against constant uncertainty (regression) or the plain network (classification). Beyond 10,000 points a
    random 10,000 are drawn; scores count all, of the pixels of a segmentation a random two million.

    Args:
        path: the file to write, which is returned; its folder is made.
        bayes: a fitted `mcbn.MCBN`, for regression tuned (without tau there is no likelihood, and the page says so).
        x: held-out inputs; a tensor is predicted block by block, anything else the model takes at once.
        y: their targets or labels, (N,), (N, 1) or maps (N, H, W); never used to tune anything of `bayes`.
        train: the data of the fit; with it the page holds `bayes.check(train)`: warnings, and each layer's share.
        constant_std: of the twin, as tuned on validation data; without it, tuned on the data shown.
        ignore_index: a label to leave out, such as the void class of a segmentation.
        title, units, names, classes: heading of the page, units of the target, one name a column of x, one a class.
        groups: one name an input: the page then counts the coverage of each group by itself.
        seed: of the training examples that the checks take.
    """
    y = torch.as_tensor(y)
    if y.ndim == 0:
        raise MCBNError("y must hold one target an input; got a single number")
    if groups is not None and len(groups) != len(y):
        raise MCBNError(f"groups holds {len(groups)} names for {len(y)} inputs; give one an input")
    if isinstance(x, Tensor) and x.ndim == 2:
        examples.feature_names(x, names)  # refuse wrong names before anything runs
    if bayes.task == "multilabel":
        raise MCBNError("a page shows one label an input; score several by mcbn.metrics, such as nll(pred.probs, y)")
    if bayes.task == "regression":
        content = _regression(evidence.spread(bayes, x, y, constant_std=constant_std), x, units, names)
    else:
        ours, plain = evidence.votes(bayes, x, y, ignore_index=ignore_index)
        content = _classification(ours, plain, x, names, classes)
        if y.ndim > 1 and len(ours.inputs) > len(y) and examples.is_image(x):
            content |= examples.map_examples(bayes, ours, x, y, ignore_index, content["classes"])
    content["diagnosis"] = None if train is None else evidence.check_draws(bayes, x, train, seed)
    content |= {"title": title, "n_inputs": len(y), "posterior": bayes.posterior, "groups": groups}
    return save(Path(path), render(scores=scores, **content))


def write_prediction_page(
    path: str | Path,
    prediction: Mapping[str, Any],
    y: Any,
    *,
    x: Any = None,
    constant_std: float | None = None,
    title: str = "How far can these predictions be trusted?",
    units: str = "target units",
    names: Names = None,
    classes: Names = None,
) -> Path:
    """Write the page about predictions that were made before, such as those of `mcbn predict`, without their network.

    What needs the network is left out: the comparison with the plain one, the share of the network's own variance, and
    the checks of the draws. The log likelihood of a regression is that of a Gaussian with the given std.

    Args:
        prediction: mean and std (N,), or probs (N, K) and, where known, mutual_information (N,).
        y: targets or labels, (N,).
        x: the inputs, to show the most and the least certain.
        path, constant_std, title, units, names, classes: as for `write_page`.
    """
    y, vectors = torch.as_tensor(y), {name: torch.as_tensor(values) for name, values in prediction.items()}
    sizes = {name: len(values) for name, values in vectors.items()}
    if set(sizes.values()) != {len(y)}:
        raise MCBNError(f"predictions and targets must be equally many; got {sizes} and {len(y)} targets")
    if "probs" in vectors:
        ours = evidence.votes_of(vectors["probs"], y, vectors.get("mutual_information"))
        content = _classification(ours, None, x, names, classes)
    elif {"mean", "std"} <= set(vectors):
        content = _regression(evidence.spread_of(vectors["mean"], vectors["std"], y, constant_std), x, units, names)
    else:
        raise MCBNError(f"predictions need mean and std, or probs; got {', '.join(vectors) or 'nothing'}")
    content |= {"title": title, "n_inputs": len(y), "posterior": None, "groups": None}
    return save(Path(path), render(scores=scores, **content))


def _regression(spread: Spread, x: Any, units: str, names: Names) -> dict[str, Any]:
    columns = {"mean": spread.mean, "std": spread.std, "target": spread.y, "|error|": spread.error}
    return {
        "template": "regression.html.j2",
        "shown": spread,
        "units": units,
        "small": spread.error <= np.median(spread.error),
        "examples": examples.show_ends(spread, spread.std, columns, x, names),
    }


def _classification(ours: Votes, plain: Votes | None, x: Any, names: Names, classes: Names) -> dict[str, Any]:
    n_classes = 1 + int(max(labels.max() for labels in (ours.label, ours.truth, (plain or ours).label)))
    if classes is not None and len(classes) < n_classes:
        raise MCBNError(f"classes holds {len(classes)} names, but there are {n_classes} classes or more")
    named = np.array([f"class {k}" for k in range(n_classes)] if classes is None else classes, dtype=object)
    columns = {"answer": named[ours.label], "truth": named[ours.truth]}
    columns |= {"confidence": ours.confidence, "entropy": ours.entropy}
    rows = scores.class_scores(ours, plain)
    return {
        "template": "classification.html.j2",
        "shown": ours,
        "plain": plain,
        "classes": named,
        "rows": rows if plain else [(row.name, row.better, row.ours, row.bound) for row in rows],
        "examples": examples.show_ends(ours, ours.entropy, columns, x, names),
    }
