"""The paper's regression sets, its train/test splits and folds, and a 1-D toy set."""

from mcbn.data.catalog import NAMES, Dataset, Regression, describe
from mcbn.data.sources import load
from mcbn.data.splits import Fold, Split, folds, split
from mcbn.data.toy import toy

__all__ = [
    "NAMES",
    "Dataset",
    "Fold",
    "Regression",
    "Split",
    "describe",
    "folds",
    "load",
    "split",
    "toy",
]
