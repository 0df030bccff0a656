"""What a user could pick instead of MCBN, on the same trained networks and images."""

from mcbn.reproduce.alternatives.samplers import METHODS
from mcbn.reproduce.alternatives.study import run, time_methods

__all__ = ["METHODS", "run", "time_methods"]
