"""Whether calibrated intervals, sets and refusals keep what they promise."""
