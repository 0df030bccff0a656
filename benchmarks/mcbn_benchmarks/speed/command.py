"""`mcbn bench` under the name of older installations."""

from mcbn_benchmarks.commands import speed as bench

__all__ = ["bench"]
