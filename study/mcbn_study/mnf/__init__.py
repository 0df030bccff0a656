"""Multiplicative normalising flows (Louizos and Welling 2017), which the paper compares with."""

from mcbn_study.mnf.layers import MNFLinear, MNFNetwork
from mcbn_study.mnf.predictor import MNF

__all__ = ["MNF", "MNFLinear", "MNFNetwork"]
