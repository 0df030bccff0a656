"""CIFAR-10 with the paper's ResNet-32: Teye et al. 2018, section 4.4 and Table 2."""

from mcbn.reproduce.cifar10.parts import held_out
from mcbn.reproduce.cifar10.saved import load_network, save_network

__all__ = ["held_out", "load_network", "save_network"]
