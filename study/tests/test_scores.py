"""Scores that the image studies share, against naive ones."""

import math

import pytest
import torch

from mcbn.metrics import error_auroc
from mcbn_study.estimates import class_scores, log_likelihood


def test_class_scores_are_their_formulas() -> None:
    probs = torch.randn(9, 3, generator=torch.Generator().manual_seed(0)).double().softmax(1)
    y = torch.tensor([0, 1, 2, 0, 1, 2, 0, 1, 2])
    scores, pairs = class_scores(probs, y), list(zip(probs.tolist(), y.tolist(), strict=True))
    log_p = [math.log(p[k]) for p, k in pairs]
    mean = sum(log_p) / 9
    assert scores["pll"] == pytest.approx(mean)
    assert scores["pll_error"] == pytest.approx(math.sqrt(sum((value - mean) ** 2 for value in log_p) / 8 / 9))
    assert scores["accuracy"] == pytest.approx(sum(p.index(max(p)) == k for p, k in pairs) / 9)
    brier = [sum((q - (j == k)) ** 2 for j, q in enumerate(p)) for p, k in pairs]
    assert scores["brier"] == pytest.approx(sum(brier) / 9)
    doubts = {wrong: [1 - max(p) for p, k in pairs if (p.index(max(p)) != k) == wrong] for wrong in (False, True)}
    wins = [a > b for a in doubts[True] for b in doubts[False]]
    assert scores["error_auroc"] == pytest.approx(sum(wins) / len(wins))


def test_single_precision_is_scored_in_double() -> None:
    probs = torch.tensor([[0.75, 0.25], [0.5, 0.5]])
    assert class_scores(probs, torch.tensor([0, 1])) == class_scores(probs.double(), torch.tensor([0, 1]))


def test_a_probability_of_nothing_has_a_finite_score() -> None:
    assert log_likelihood(torch.tensor([[0.0, 1.0]]).double(), torch.tensor([0])).isfinite().all()


def test_without_right_and_wrong_labels_there_is_no_auroc() -> None:
    doubt = torch.tensor([0.1, 0.2, 0.3])
    assert error_auroc(doubt, torch.zeros(3, dtype=torch.bool)) is None
    assert error_auroc(doubt, torch.ones(3, dtype=torch.bool)) is None
    assert error_auroc(doubt, torch.tensor([False, False, True])) == 1
