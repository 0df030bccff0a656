"""Distributions of batch statistics (appendix)."""
