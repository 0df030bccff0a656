"""Draws through the network, fast.

`trace` gives a graph of a pass, `rewrite` and `fuse` make it faster, `plan` says how draws run, `run` proves a plan and
runs it; `record` does the same for training batches. Which changes to a graph are safe, and why, stands in `graph.md`;
`agree` decides whether two results are the same numbers, `constants` holds every number that decides speed alone.
"""
