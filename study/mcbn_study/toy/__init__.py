"""The toy problem of Figure 1."""
