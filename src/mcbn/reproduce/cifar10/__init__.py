"""CIFAR-10 with the paper's ResNet-32: Teye et al. 2018, section 4.4 and Table 2.

`parts` (which images) < `augmentation` < `training`, `per_query`, `scores` < `evaluation` < `study` (files, records).
"""

from mcbn.reproduce.cifar10.augmentation import Augmented
from mcbn.reproduce.cifar10.parts import held_out
from mcbn.reproduce.cifar10.per_query import per_query
from mcbn.reproduce.cifar10.profiles import find_profile
from mcbn.reproduce.cifar10.saved import load_network, save_network
from mcbn.reproduce.cifar10.study import run

__all__ = ["Augmented", "find_profile", "held_out", "load_network", "per_query", "run", "save_network"]
