"""A compatibility run over networks that others wrote: `python -m mcbn_benchmarks zoo`."""
