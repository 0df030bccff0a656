"""Batch-norm calls of a network: find them by running it, record one batch's statistics, put recorded ones back.

`calls` sees them, `modes` answers them, `arithmetic` is what batch norm computes.
"""

from mcbn.batch_norm.arithmetic import normalize, scale_and_shift, statistics_dtype, train_batch_norm
from mcbn.batch_norm.calls import READERS, BatchNormCall, BatchNormMode, layer_of, watch
from mcbn.batch_norm.modes import Record, Replay, Survey

__all__ = [
    "READERS",
    "BatchNormCall",
    "BatchNormMode",
    "Record",
    "Replay",
    "Survey",
    "layer_of",
    "normalize",
    "scale_and_shift",
    "statistics_dtype",
    "train_batch_norm",
    "watch",
]
