"""The toy problem of Teye et al. 2018, Figure 1, live in the browser: click to add points, the network retrains."""

from mcbn_study.playground.server import main, open_server

__all__ = ["main", "open_server"]
