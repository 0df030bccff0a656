"""scikit-learn estimators: a batch-normalised network, trained and made Bayesian, behind `fit` and `predict`."""

try:
    import sklearn as _sklearn  # type: ignore[import-untyped]  # noqa: F401
except ImportError as error:
    from mcbn.errors import MissingExtraError

    raise MissingExtraError("mcbn.sklearn needs scikit-learn: pip install 'mcbn[sklearn]'") from error

from mcbn.sklearn.estimators import MCBNClassifier, MCBNRegressor

__all__ = ["MCBNClassifier", "MCBNRegressor"]
