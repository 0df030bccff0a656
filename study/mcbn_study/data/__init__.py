"""Image sets of the paper: where they come from, and how they are read."""

from mcbn_study.data.cifar import CIFAR10_CLASSES, Images, cifar10

__all__ = ["CIFAR10_CLASSES", "Images", "cifar10"]
