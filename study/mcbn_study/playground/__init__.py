"""The toy problem of Teye et al. 2018, Figure 1, live in the browser: click to add points, the network retrains."""
