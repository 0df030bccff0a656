"""The parts of a report with scores and charts, for each task."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from mcbn.model import MCBN
from mcbn.page import charts, curves
from mcbn.page.checks import warning
from mcbn.page.evidence import Spread, Votes
from mcbn.page.html import Markup, element, figure, number, table
from mcbn.page.scores import Headline, Score, class_headline, class_scores, regression_headline, regression_scores
from mcbn.page.shown import class_examples, regression_examples
from mcbn.page.wording import Wording


def _headline(found: Headline) -> list[Markup]:
    facts = element("ul", *(element("li", fact) for fact in found.facts), class_="facts")
    return [element("p", found.sentence, class_="headline"), facts]


def regression(found: Spread, x: Any, words: Wording) -> list[Markup]:
    """Headline, charts, scores and examples of a regression."""
    note = (
        f"Constant uncertainty has MCBN's means and one std, {number(found.constant_std)}, {found.constant_source}. The"
        " bound is what the best std for every single point would reach at these means."
    )
    return [
        *_headline(regression_headline(found)),
        *([] if found.log_prob is not None else [warning(UNTUNED)]),
        *_regression_charts(found, words.units),
        *_score_section(regression_scores(found), "Constant uncertainty", note),
        *regression_examples(found, x, words),
    ]


UNTUNED = (
    "tau was never tuned: the std holds no observation noise, so intervals are too narrow and there is no likelihood;"
    " call tune(validation_data)"
)


def _regression_charts(found: Spread, units: str) -> list[Markup]:
    std, error, constant = found.std, found.error, found.constant_std
    spec = charts.uncertainty_error(std, error, constant_std=constant, inputs=found.inputs, units=units)
    ours, twin = (curves.interval_coverage(error, s) for s in (std, np.full_like(std, constant)))
    coverage = charts.coverage(ours, twin, "constant uncertainty", "Interval coverage")
    bins = charts.spread_reliability(curves.spread_reliability(std, error), units)
    risk = charts.risk(std, error, None, "mean absolute error", percent=False)
    groups = ("the smaller half of errors", "the larger half of errors")
    histogram = charts.histogram(std, error <= np.median(error), groups, f"predicted std ({units})")
    note = (
        "Half of the errors should lie in the dark band, 95 % in both. Bands that rise with the running mean know where"
        f" errors are large; dashes are the bounds of one constant std.{_thinned(len(std))}"
    )
    return [
        element("h2", "Does uncertainty go with error?"),
        figure("errors", "Errors in the order of uncertainty", spec, note),
        _pair(
            figure("coverage", "Interval coverage", coverage, f"Targets inside the interval of each level. {SURE}"),
            figure("reliability", "Reliability of the std", bins, "Predicted std against the error, in ten groups."),
            figure("risk", "Risk and coverage", risk, f"Mean error of the points kept {LEFT}"),
            figure("histogram", "Uncertainty of small and large errors", histogram, APART),
        ),
    ]


SURE = "Below the diagonal: too sure of itself."
LEFT = "when the least certain are left to someone else."
APART = "The further apart, the better uncertainty tells them."


def classification(
    bayes: MCBN[Any] | None,
    ours: Votes,
    plain: Votes | None,
    x: Any,
    y: Tensor,
    ignore_index: int | None,
    words: Wording,
) -> list[Markup]:
    """Headline, charts, scores and examples of a classification."""
    note = "The bound is that of a network that is always right and sure."
    if plain is not None:
        note = f"The plain network is the same network in eval mode with its running statistics. {note}"
    return [
        *_headline(class_headline(ours, plain)),
        *_class_charts(ours, plain),
        *_score_section(class_scores(ours, plain), "Plain network" if plain else None, note),
        *class_examples(bayes, ours, x, y, ignore_index, words),
    ]


def _class_charts(ours: Votes, plain: Votes | None) -> list[Markup]:
    theirs = None if plain is None else curves.set_coverage(plain.mass_above)
    coverage = charts.coverage(curves.set_coverage(ours.mass_above), theirs, "plain network", "Set coverage")
    twin = None if plain is None else curves.reliability(plain.confidence, plain.right)
    bins = charts.class_reliability(curves.reliability(ours.confidence, ours.right), twin)
    order = None if plain is None else plain.entropy
    risk = charts.risk(ours.entropy, ours.error, order, "share of wrong answers", percent=True)
    histogram = charts.histogram(ours.entropy, ours.right > 0, ("right", "wrong"), "entropy (nats)")
    note = (
        "Every dot is a point, right at the bottom and wrong at the top; the line is the share of wrong answers among"
        f" neighbours, the dashes what confidence promises and the rate over all.{_thinned(len(ours.entropy))}"
    )
    sets = (
        "True classes in the smallest set of each level. Sets hold whole classes, so a calibrated network lies on the"
        " diagonal or above."
    )
    return [
        element("h2", "Does uncertainty go with error?"),
        figure("errors", "Share of wrong answers in the order of uncertainty", charts.error_rate(ours), note),
        _pair(
            figure("reliability", "Reliability", bins, f"Accuracy against confidence. {SURE}"),
            figure("coverage", "Coverage of sets of classes", coverage, sets),
            figure("risk", "Risk and coverage", risk, f"Wrong answers among the points kept {LEFT}"),
            figure("histogram", "Uncertainty of right and wrong answers", histogram, APART),
        ),
    ]


def _thinned(count: int) -> str:
    if count <= charts.MOST_POINTS:
        return ""
    return f" Drawn are {charts.MOST_POINTS:,} of the {count:,} points, chosen at random."


def _pair(*figures: Markup) -> Markup:
    return element("div", *figures, class_="pair")


def _score_section(rows: Sequence[Score], twin: str | None, note: str) -> list[Markup]:
    heading, header = element("h2", "Scores"), ("Score", "Better", "MCBN")
    if twin is None:
        few = [(row.name, row.better, row.ours, row.bound) for row in rows]
        return [heading, table((*header, "Bound"), few, caption=note, text=(0,))]
    return [heading, table((*header, twin, "Bound", "% of the way to the bound"), rows, caption=note, text=(0,))]
