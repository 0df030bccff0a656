"""The networks of the paper: one module an architecture."""

from mcbn.networks.mlp import (
    BN_EPSILON,
    INITIAL_STD,
    RegressionMLP,
    Standardized,
    StandardizedInputs,
    train_regression,
)
from mcbn.networks.resnet import CifarResNet, standardize

__all__ = [
    "BN_EPSILON",
    "INITIAL_STD",
    "CifarResNet",
    "RegressionMLP",
    "Standardized",
    "StandardizedInputs",
    "standardize",
    "train_regression",
]
