"""mcbn on a Ray cluster: prediction of many files, fit with shared draws, the study as tasks; extra `mcbn[ray]`."""

from mcbn.ray.fitting import fit
from mcbn.ray.prediction import predict

__all__ = ["fit", "predict"]
