"""The paper's regression sets, its splits and folds, a 1-D toy set, and image sets."""

from mcbn.data.catalog import NAMES, Dataset, Regression, describe
from mcbn.data.images import CIFAR10_CLASSES, Images, cifar10
from mcbn.data.sources import load
from mcbn.data.splits import Fold, Split, folds, split
from mcbn.data.toy import toy

__all__ = [
    "CIFAR10_CLASSES",
    "NAMES",
    "Dataset",
    "Fold",
    "Images",
    "Regression",
    "Split",
    "cifar10",
    "describe",
    "folds",
    "load",
    "split",
    "toy",
]
