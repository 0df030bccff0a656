"""Networks of images: one module an architecture."""

from mcbn_study.networks.resnet import CifarResNet, standardize

__all__ = ["CifarResNet", "standardize"]
