"""The regression study in seconds: a profile, the methods that train no flows, and what a run leaves."""

from dataclasses import replace

import numpy as np

from mcbn_study.regression.profile import QUICK

TINY = replace(
    QUICK,
    name="tiny",
    datasets=("boston",),
    splits=(1, 2),
    n_folds=2,
    weight_decays=(1e-1, 1e-4),
    batch_sizes=(64, 128),
    rates=(0.05, 0.01),
    evaluate_every=5,
    patience=1,
    max_epochs=15,
    n_samples=20,
    selection_samples=10,
    sensitivity_batch_sizes=(32, 128),
    sensitivity_samples=10,
    sensitivity_pass_counts=(10, 5),
)
OURS = ("mcbn", "bn", "mcdo", "do", "ensemble")


def predictions(folder):
    return {path.name: {k: v.tolist() for k, v in np.load(path).items()} for path in sorted(folder.iterdir())}
