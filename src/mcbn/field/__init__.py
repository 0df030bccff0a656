"""The posterior in the field: see a shift (`watch`), know a strange input (`novelty`), repair it (`adapt`).

The statistics of a batch of M inputs as deployed are the null distribution of any batch that comes later, and the
coordinates in which a shift can be undone. Reached by `MCBN.watch`, `MCBN.adapt` and `MCBN.predict(x, watch=)`.
"""
