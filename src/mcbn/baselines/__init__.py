"""What MCBN is compared with, in the same verbs: MC dropout, constant uncertainty, ensemble, temperature."""

from mcbn.baselines.dropout import MCDropout
from mcbn.baselines.ensemble import DeepEnsemble, Temperature
from mcbn.baselines.predictor import ConstantUncertainty
from mcbn.plugins import moved_names

__all__ = ["ConstantUncertainty", "DeepEnsemble", "MCDropout", "Temperature"]

__getattr__ = moved_names(__name__, "MNF", "MNFLinear", "MNFNetwork")
