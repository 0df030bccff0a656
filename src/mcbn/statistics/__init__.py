"""Batch-norm calls of a network: find them by running it, record one batch's statistics, put recorded ones back.

`calls` sees them, `modes` answers them, `arithmetic` is what batch norm computes.
"""

from mcbn.statistics.arithmetic import normalize, scale_and_shift, statistics_dtype, train_batch_norm
from mcbn.statistics.calls import READERS, BatchNormCall, BatchNormMode, layer_of, watch
from mcbn.statistics.modes import Record, Replay, Survey

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
