"""The part of a report that examines the draws: warnings, and each layer's share of the uncertainty."""

import warnings
from typing import Any

import numpy as np
from torch import Tensor

from mcbn.check.diagnosis import ENOUGH_EXAMPLES, Diagnosis, LayerDiagnosis
from mcbn.model import MCBN
from mcbn.page.html import MISSING, Markup, element, join, number, table
from mcbn.progress import bar, counting

VALUES = 2**24  # of all training inputs that a check runs


def warning(text: str) -> Markup:
    """Set a warning apart."""
    return element("div", text, class_="warning")


def enough_examples(x: Any) -> int:
    """Bound the training examples that a check runs through the network: fewer of large inputs."""
    size = x[0].numel() if isinstance(x, Tensor) else 1
    return max(1, min(ENOUGH_EXAMPLES, VALUES // size))


def checks(bayes: MCBN[Any], train: Any, n_examples: int, seed: int) -> list[Markup]:
    """Examine the draws against so many examples of the training data, where it is given."""
    parts = [element("h2", "Checks of the draws")]
    if train is None:
        note = "Not made: they need the training data (write_page(..., train=...)), and tell each layer's share."
        return [*parts, element("p", note, class_="muted")]
    names = bayes.engine.network.accepted_keys()
    with warnings.catch_warnings(), bar("checking the draws", None, "batch") as tick, counting(bayes, names, tick):
        warnings.filterwarnings("ignore", message="mcbn:")  # what they say stands on the page
        found = bayes.check(train, n_examples=n_examples, seed=seed)
    parts += [warning(text) for text in found.warnings] or [element("p", "Nothing speaks against these draws.")]
    return [*parts, *_compared(found), element("h2", "Where the uncertainty comes from"), _layers(found)]


def _compared(found: Diagnosis) -> list[Markup]:
    if found.n_compared == found.n_examples:
        return []
    of = "" if found.n_examples is None else f" of the {found.n_examples:,}"
    text = f"Compared with {found.n_compared:,}{of} training examples, chosen at random."
    return [element("p", text, class_="muted")]


def _layers(found: Diagnosis) -> Markup:
    header = ("Batch norm layer", "Share of the variance", "Units", "Means Gaussian", "Stds Gaussian", "Drift")
    rows = [_layer(row) for row in found.layers]
    worth = f"{found.n_effective:.1f}"
    note = (
        f"{found.n_samples} draws, worth {worth} independent batches. Shares of the predictive variance sum to 100 %;"
        " a negative one cancels part of another's. Gaussian: share of units that pass the test, 95 % if exact."
    )
    return table(header, rows, caption=note, text=(1,))


def _layer(row: LayerDiagnosis) -> list[str | float]:
    moved = MISSING if row.drift is None else number(row.drift.effect, 2)
    passing = [MISSING if np.isnan(v) else f"{v:.0%}" for v in (row.mean_gaussian, row.std_gaussian)]
    return [row.layer or "(network)", _bar(row.share), str(row.units), *passing, moved]


def _bar(share: float | None) -> Markup:
    if share is None:
        return Markup(MISSING)
    width = f"width:{min(1.0, abs(share)) * 8:.2f}em"
    bar = element("span", class_="share" if share >= 0 else "share negative", style=width, aria_hidden="true")
    return join([bar, f"{share:.1%}"])
