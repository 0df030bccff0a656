"""`make bench`: MCBN against the loop of Algorithm 1, against T plain passes and against its peer, in one run."""
