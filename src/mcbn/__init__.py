"""Bayesian uncertainty for trained batch-normalised PyTorch networks."""

from mcbn import algorithm, data, metrics
from mcbn.errors import MCBNError
from mcbn.model import MCBN
from mcbn.posterior import Posterior
from mcbn.prediction import ClassificationPrediction, RegressionPrediction

__version__ = "0.1.0"
__all__ = [
    "MCBN",
    "ClassificationPrediction",
    "MCBNError",
    "Posterior",
    "RegressionPrediction",
    "algorithm",
    "data",
    "metrics",
]
