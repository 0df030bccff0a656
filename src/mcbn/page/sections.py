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
    parts = _headline(regression_headline(found))
    if found.log_prob is None:
        parts.append(warning("tau was never tuned: the std holds no observation noise, so intervals are too narrow and"
                              " there is no likelihood; call tune(validation_data)"))  # fmt: skip
    spec = charts.uncertainty_error(
        found.std, found.error, constant_std=found.constant_std, inputs=found.inputs, units=words.units
    )
    twin = np.full_like(found.std, found.constant_std)
    coverage = charts.coverage(
        curves.interval_coverage(found.error, found.std),
        curves.interval_coverage(found.error, twin),
        "constant uncertainty",
        "Interval coverage",
    )
    small = found.error <= np.median(found.error)
    groups = ("the smaller half of errors", "the larger half of errors")
    parts += [
        element("h2", "Does uncertainty go with error?"),
        figure("errors", "Errors in the order of uncertainty", spec,
               "Half of the errors should lie in the dark band, 95 % in both. Bands that rise with the running mean"
               " know where errors are large; dashes are the bounds of one constant std." + _thinned(found.std)),
        _pair(
            figure("coverage", "Interval coverage", coverage, "Share of targets inside the interval of each level."
                   " Below the diagonal: too sure of itself."),
            figure("reliability", "Reliability of the std", charts.spread_reliability(
                curves.spread_reliability(found.std, found.error), words.units),
                "Predicted std against the error that came, in ten groups of equally many points."),
            figure("risk", "Risk and coverage", charts.risk(found.std, found.error, None, "mean absolute error",
                   percent=False), "Mean error of the points kept when the least certain are left to someone else."),
            figure("histogram", "Uncertainty of small and large errors", charts.histogram(found.std, small, groups,
                   f"predicted std ({words.units})"), "The further apart, the better uncertainty tells them."),
        ),
        *_score_section(regression_scores(found), "Constant uncertainty", f"Constant uncertainty has MCBN's means and"
                        f" one std, {number(found.constant_std)}, tuned on {found.constant_source}. The bound is what"
                        " the best std for every single point would reach at these means."),
        *regression_examples(found, x, words),
    ]  # fmt: skip
    return parts


def classification(
    bayes: MCBN[Any], ours: Votes, plain: Votes, x: Any, y: Tensor, ignore_index: int | None, words: Wording
) -> list[Markup]:
    """Headline, charts, scores and examples of a classification."""
    coverage = charts.coverage(
        curves.set_coverage(ours.mass_above), curves.set_coverage(plain.mass_above), "plain network", "Set coverage"
    )
    bins = [curves.reliability(v.confidence, v.right) for v in (ours, plain)]
    return [
        *_headline(class_headline(ours, plain)),
        element("h2", "Does uncertainty go with error?"),
        figure("errors", "Share of wrong answers in the order of uncertainty", charts.error_rate(ours),
               "Every dot is a point, right at the bottom and wrong at the top; the line is the share of wrong answers"
               " among neighbours, the dashes what the confidence promises and the rate over all."
               + _thinned(ours.entropy)),
        _pair(
            figure("reliability", "Reliability", charts.class_reliability(*bins),
                   "Accuracy against confidence. Below the diagonal: too sure of itself."),
            figure("coverage", "Coverage of sets of classes", coverage, "Share of true classes in the smallest set of"
                   " each level. Sets hold whole classes, so a calibrated network lies on the diagonal or above."),
            figure("risk", "Risk and coverage", charts.risk(ours.entropy, ours.error, plain.entropy,
                   "share of wrong answers", percent=True),
                   "Wrong answers among the points kept when the least certain are left to someone else."),
            figure("histogram", "Uncertainty of right and wrong answers", charts.histogram(ours.entropy,
                   ours.right > 0, ("right", "wrong"), "entropy (nats)"),
                   "The further apart, the better uncertainty tells them."),
        ),
        *_score_section(class_scores(ours, plain), "Plain network", "The plain network is the same network in eval mode"
                        " with its running statistics; the bound is that of a network that is always right and sure."),
        *class_examples(bayes, ours, x, y, ignore_index, words),
    ]  # fmt: skip


def _thinned(values: np.ndarray[Any, Any]) -> str:
    if len(values) <= charts.MOST_POINTS:
        return ""
    return f" Drawn are {charts.MOST_POINTS:,} of the {len(values):,} points, chosen at random."


def _pair(*figures: Markup) -> Markup:
    return element("div", *figures, class_="pair")


def _score_section(rows: Sequence[Score], twin: str, note: str) -> list[Markup]:
    header = ("Score", "Better", "MCBN", twin, "Bound", "% of the way to the bound")
    return [element("h2", "Scores"), table(header, rows, caption=note, text=(0,))]
