"""scikit-learn estimators: a batch-normalised network, trained and made Bayesian, behind `fit` and `predict`."""

from mcbn.errors import extra

with extra("sklearn", "mcbn.sklearn needs scikit-learn"):
    from mcbn.sklearn.estimators import MCBNClassifier, MCBNRegressor

__all__ = ["MCBNClassifier", "MCBNRegressor"]
