"""Bayesian uncertainty for trained batch-normalised PyTorch networks."""

from importlib import import_module
from typing import Any

from mcbn import algorithm, data, metrics
from mcbn.errors import MCBNError
from mcbn.model import MCBN
from mcbn.posterior import Posterior
from mcbn.prediction import ClassificationPrediction, MultilabelPrediction, RegressionPrediction

__version__ = "0.1.0"
__all__ = [
    "MCBN",
    "ClassificationPrediction",
    "MCBNError",
    "MultilabelPrediction",
    "Posterior",
    "RegressionPrediction",
    "algorithm",
    "compare",
    "data",
    "decide",
    "metrics",
]


def __getattr__(name: str) -> Any:
    """Load what few calls need once it is asked for."""
    if name == "compare":
        return import_module("mcbn.comparison").compare
    if name == "decide":
        return import_module("mcbn.decide")
    raise AttributeError(f"module 'mcbn' has no attribute {name!r}")
