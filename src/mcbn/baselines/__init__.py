"""What MCBN is compared with, in the same verbs: MC dropout, constant uncertainty, deep ensemble."""

from mcbn.baselines.constant import ConstantUncertainty
from mcbn.baselines.dropout import MCDropout
from mcbn.baselines.ensemble import DeepEnsemble
from mcbn.plugins import moved_names

__all__ = ["ConstantUncertainty", "DeepEnsemble", "MCDropout"]

__getattr__ = moved_names(__name__, "MNF", "MNFLinear", "MNFNetwork")
