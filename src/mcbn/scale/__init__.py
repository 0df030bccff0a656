"""Prediction of many files, on one machine here and on a cluster in `mcbn.ray`: parts, resumable, every row once.

The input is cut into parts, parts into batches, by the files alone: by the place of a row in its file, never by who
works on it or when. The rounding of a row depends on the batch it is computed in, so this makes the output the same bit
for bit whatever the number of workers, and equal to that of `mcbn predict` on the file alone.
"""

from mcbn.scale.work import BAD_FILES, Summary, predict, read_results

__all__ = ["BAD_FILES", "Summary", "predict", "read_results"]
