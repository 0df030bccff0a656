"""The same scores give the same thresholds, intervals and sets in MAPIE and torchcp."""

import sys
import warnings
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin

import mcbn
from mcbn import conformal
from test_conformal import classes, fitted, noisy, published_scores, regressor


@pytest.fixture
def as_published(monkeypatch: pytest.MonkeyPatch) -> None:
    """Score the most probable class as the papers do, and put it into every set afterwards, as MAPIE does."""
    monkeypatch.setattr(conformal, "set_scores", published_scores)


class Predicted(RegressorMixin, BaseEstimator):
    """One field of a prediction as an estimator that is fitted already."""

    def __init__(self, bayes: Any = None, field: str = "mean") -> None:
        self.bayes, self.field = bayes, field
        self.fitted_ = True

    def fit(self, X: Any, y: Any) -> "Predicted":
        return self

    def predict(self, X: Any) -> Any:
        return getattr(self.bayes.predict(torch.as_tensor(X)), self.field)[:, 0].numpy()


class Classified(ClassifierMixin, BaseEstimator):
    def __init__(self, bayes: Any = None) -> None:
        self.bayes, self.classes_ = bayes, np.arange(4)
        self.fitted_ = True

    def fit(self, X: Any, y: Any) -> "Classified":
        return self

    def predict_proba(self, X: Any) -> Any:
        return self.bayes.predict(torch.as_tensor(X)).probs.numpy()

    def predict(self, X: Any) -> Any:
        return self.predict_proba(X).argmax(1)


class Still(np.random.RandomState):
    """No randomisation: MAPIE always randomises the scores it calibrates on."""

    def uniform(self, *_: Any, size: Any = None, **__: Any) -> Any:
        return np.zeros(size)


@pytest.mark.parametrize("score", ["absolute", "std"])
@pytest.mark.parametrize("level", [0.5, 0.9])
def test_intervals_are_those_of_mapie(score: str, level: float) -> None:
    regression = pytest.importorskip("mapie.regression")
    from mapie.conformity_scores import ResidualNormalisedScore

    bayes, held, (x, _) = regressor(), noisy(151, 2), noisy(40, 3)
    scale = ResidualNormalisedScore(Predicted(bayes, "std"), prefit=True, sym=True)
    how: Any = {"conformity_score": "absolute" if score == "absolute" else scale, "prefit": True}
    peer = regression.SplitConformalRegressor(Predicted(bayes), confidence_level=level, **how)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peer.conformalize(held[0].numpy(), held[1][:, 0].numpy())
        _, theirs = peer.predict_interval(x.numpy())
    low, high = bayes.calibrate(held, score=score).predict(x).interval(level)
    np.testing.assert_allclose(theirs[:, 0, 0], low[:, 0], rtol=1e-9)
    np.testing.assert_allclose(theirs[:, 1, 0], high[:, 0], rtol=1e-9)


@pytest.mark.usefixtures("as_published")
@pytest.mark.parametrize("level", [0.6, 0.9])
def test_sets_are_those_of_mapie(level: float) -> None:
    classification = pytest.importorskip("mapie.classification")
    bayes, held, (x, _) = fitted("classification", 4), classes(151, 2), classes(60, 3)
    how: Any = {"conformity_score": "aps", "prefit": True, "random_state": Still()}
    peer = classification.SplitConformalClassifier(Classified(bayes), confidence_level=level, **how)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peer.conformalize(held[0].numpy(), held[1].numpy())
        _, theirs = peer.predict_set(x.numpy(), conformity_score_params={"include_last_label": False})
    pred = bayes.calibrate(held).predict(x)
    ours = pred.set(level).scatter(1, pred.label.unsqueeze(1), True)
    assert np.array_equal(theirs[:, :, 0], ours.numpy())


@pytest.fixture
def peer(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Load torchcp without its parts for graphs and language models and without torchsort, which need much else."""
    stubs = {name: ModuleType(name) for name in ("torchcp.graph", "torchcp.llm", "torchsort")}
    stubs["torchsort"].soft_rank = stubs["torchsort"].soft_sort = None
    for name, module in stubs.items():
        monkeypatch.setitem(sys.modules, name, module)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield pytest.importorskip("torchcp.classification", exc_type=ImportError)
    for name in [name for name in sys.modules if name.startswith("torchcp")]:
        monkeypatch.delitem(sys.modules, name)


@pytest.mark.usefixtures("as_published")
@pytest.mark.parametrize("score", ["aps", "raps", "lac"])
@pytest.mark.parametrize("groups", [None, "class"])
def test_sets_are_those_of_torchcp(peer: Any, score: str, groups: Any) -> None:
    bayes, held, (x, _) = fitted("classification", 4), classes(600, 2), classes(60, 3)
    bayes.calibrate(held, score=score, groups=groups, penalty=(0.05, 1))
    known = {"aps": peer.score.APS, "raps": partial(peer.score.RAPS, penalty=0.05, kreg=1)}
    theirs = known[score](randomized=False) if score in known else peer.score.LAC()
    split = (peer.predictor.SplitPredictor if groups is None else peer.predictor.ClassConditionalPredictor)(theirs)
    logits = [bayes.predict(inputs).probs.log() for inputs in (held[0], x)]
    split.calculate_threshold(logits[0], held[1], 0.1)
    sets = split.predict_with_logits(logits[1]).bool()
    pred = bayes.predict(x)
    assert torch.equal(sets, pred.set(0.9))
    assert isinstance(pred, mcbn.ClassificationPrediction)
