"""Reproduction of the paper: one module an experiment; records are append-only."""
