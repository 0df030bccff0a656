"""Segmentation with uncertainty maps: Teye et al. 2018, Figure 2 (right) and the appendix, with the numbers they lack.

`training` makes the network, `estimators` the ways to predict, `scores` the numbers, `study` runs them all.
"""

from mcbn.reproduce.segmentation.study import run

__all__ = ["run"]
