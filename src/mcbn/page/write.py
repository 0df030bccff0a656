"""`write_page`: a prediction on held-out data as one HTML file."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mcbn.errors import MCBNError
from mcbn.model import MCBN
from mcbn.page import evidence, examples, sections
from mcbn.page.checks import checks, enough_examples
from mcbn.page.evidence import Votes
from mcbn.page.html import Markup, document, element, save
from mcbn.page.wording import Wording


def write_page(
    path: str | Path,
    bayes: MCBN[Any],
    x: Any,
    y: Any,
    *,
    train: Any = None,
    validation: Any = None,
    constant_std: float | None = None,
    ignore_index: int | None = None,
    title: str = "How far can this network be trusted?",
    units: str = "target units",
    names: Sequence[str] | None = None,
    classes: Sequence[str] | None = None,
    seed: int = 0,
) -> Path:
    """Predict held-out data and write one self-contained, interactive HTML file about it.

    The page says in words and numbers how errors go with uncertainty; it draws errors against uncertainty (Teye et al.
    2018, Figure 2), reliability, coverage, risk-coverage and a histogram, shows the most and least certain inputs, and
    a table against constant uncertainty (regression) or the plain network (classification). It loads nothing from
    anywhere, and appears whole or not at all. Beyond 10,000 points a random 10,000 are drawn; scores count all, of the
    pixels of a segmentation a random two million.

    Args:
        path: the file to write; its folder is made.
        bayes: a fitted `mcbn.MCBN`, for regression tuned (without tau there is no likelihood, and the page says so).
        x: held-out inputs; a tensor is predicted part by part, anything else the model takes at once.
        y: their targets or labels, (N,), (N, 1) or maps (N, H, W); never used to tune anything of `bayes`.
        train: the data of the fit; with it the page holds `bayes.check(train)`: warnings, and each layer's share.
        validation: (x, y) on which the constant twin's std is tuned; without it, on the data shown.
        constant_std: the twin's std where it is known already.
        ignore_index: a label to leave out, such as the void class of a segmentation.
        title: heading of the page.
        units: of the target.
        names: one name a column of x.
        classes: one name a class.
        seed: of the training examples that the checks take.

    Returns:
        The path.
    """
    y = torch.as_tensor(y)
    if y.ndim == 0:
        raise MCBNError("y must hold one target an input; got a single number")
    if isinstance(x, Tensor) and x.ndim == 2:
        examples.feature_names(x, names)  # refuse wrong names before anything runs
    words = Wording(title, units, names, classes)
    if bayes.task == "regression":
        found = evidence.spread(bayes, x, y, validation=validation, constant_std=constant_std)
        body = sections.regression(found, x, words)
        count = population = len(found.error)
    else:
        ours, plain = evidence.votes(bayes, x, y, ignore_index=ignore_index)
        _check_classes(ours, plain, classes)
        body = sections.classification(bayes, ours, plain, x, y, ignore_index, words)
        count, population = len(ours.error), ours.population
    body += checks(bayes, train, enough_examples(x), seed)
    text = document(title, *body, _about(), lead=_lead(bayes, len(y), count, population))
    return save(Path(path), text)


def write_prediction_page(
    path: str | Path,
    prediction: Mapping[str, Any],
    y: Any,
    *,
    x: Any = None,
    constant_std: float | None = None,
    title: str = "How far can these predictions be trusted?",
    units: str = "target units",
    names: Sequence[str] | None = None,
    classes: Sequence[str] | None = None,
) -> Path:
    """Write the page about predictions that were made before, such as those of `mcbn predict`, without their network.

    What needs the network is left out: the comparison with the plain one, the share of the network's own variance, and
    the checks of the draws. The log likelihood of a regression is that of a Gaussian with the given std.

    Args:
        path: the file to write; its folder is made.
        prediction: mean and std (N,), or probs (N, K) and, where known, mutual_information (N,).
        y: targets or labels, (N,).
        x: the inputs, to show the most and the least certain.
        constant_std: of the twin; without it, tuned on the data shown.
        title, units, names, classes: as for `write_page`.
    """
    y, words = torch.as_tensor(y), Wording(title, units, names, classes)
    given = {name: torch.as_tensor(values) for name, values in prediction.items()}
    sizes = {name: len(values) for name, values in given.items()}
    if set(sizes.values()) != {len(y)}:
        raise MCBNError(f"predictions and targets must be equally many; got {sizes} and {len(y)} targets")
    if "probs" in given:
        ours = evidence.votes_of(given["probs"], y, given.get("mutual_information"))
        _check_classes(ours, ours, classes)
        body = sections.classification(None, ours, None, x, y, None, words)
    elif {"mean", "std"} <= set(given):
        found = evidence.spread_of(given["mean"], given["std"], y, constant_std)
        body = sections.regression(found, x, words)
    else:
        raise MCBNError(f"predictions need mean and std, or probs; got {', '.join(given) or 'nothing'}")
    lead = element("p", f"{len(y):,} predictions held against their targets.", class_="muted")
    return save(Path(path), document(title, *body, _about(), lead=lead))


def _check_classes(ours: Votes, plain: Votes, classes: Sequence[str] | None) -> None:
    most = 1 + int(max(ours.label.max(), ours.truth.max(), plain.label.max()))
    if classes is not None and len(classes) < most:
        raise MCBNError(f"classes holds {len(classes)} names, but there are {most} classes or more")


def _lead(bayes: MCBN[Any], inputs: int, points: int, population: int) -> Markup:
    drawn = bayes.posterior
    of = f"{points:,} points of {inputs:,} inputs" if points != inputs else f"{points:,} inputs"
    if points < population:
        of = f"{points:,} of the {population:,} points, chosen at random, of {inputs:,} inputs"
    made = f"T = {drawn.n_samples} draws of batches of M = {drawn.batch_size}"
    return element("p", f"Monte Carlo batch normalisation on {of} held out: {made}.", class_="muted")


def _about() -> Markup:
    text = (
        "Made by mcbn: Monte Carlo batch normalisation (Teye, Azizpour and Smith, ICML 2018). This file"
        " holds its own data and loads nothing. Charts: hover or focus one and use the arrow keys; legend buttons hide"
        " a series; column headings sort."
    )
    return element("footer", text)
