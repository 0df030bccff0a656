"""What MCBN is compared with, in the same verbs: MC dropout, constant uncertainty, MNF, deep ensemble."""

from mcbn.baselines.constant import ConstantUncertainty
from mcbn.baselines.dropout import MCDropout
from mcbn.baselines.ensemble import DeepEnsemble
from mcbn.baselines.mnf import MNF
from mcbn.baselines.mnf_layers import MNFLinear, MNFNetwork

__all__ = ["MNF", "ConstantUncertainty", "DeepEnsemble", "MCDropout", "MNFLinear", "MNFNetwork"]
