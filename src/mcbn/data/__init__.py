"""The paper's regression sets, its splits and folds, and a 1-D toy set."""

from mcbn.data.regression import NAMES, Dataset, Fold, Regression, Split, describe, folds, load, split, toy
from mcbn.plugins import moved_names

__all__ = ["NAMES", "Dataset", "Fold", "Regression", "Split", "describe", "folds", "load", "split", "toy"]

__getattr__ = moved_names(__name__, "CIFAR10_CLASSES", "Images", "cifar10")
