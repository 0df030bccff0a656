"""Draws through the network, fast.

`trace` writes a pass down, `rewrite` and `fuse` make it faster, `plan` says how draws run, `run` proves a plan and runs it;
`record` does the same for training batches. Which changes to a graph are safe, and why, stands in `graph`.
"""
