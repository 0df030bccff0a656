"""MNF's test error by epochs of training, where ours is better than printed: how early would training have to end?

Looked at after the study, and nothing is chosen by it: `mcbn reproduce tables` names it as a likely cause.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

from mcbn.data import load, split
from mcbn.errors import MCBNError
from mcbn.metrics import rmse
from mcbn_study.journal import Journal
from mcbn_study.regression.mnf import train_and_draw
from mcbn_study.regression.profile import PAPER

EPOCHS = {
    "concrete": (100, 200, 300, 400),
    "energy": (100, 200, 300, 400),
    "kin8nm": (20, 40, 60),
    "power": (10, 20, 30, 40),
}
SPLITS, SEED = (1, 2, 3, 4, 5), 1


def run(out: str | Path = "results/mnf_epochs", *, datasets: Sequence[str] = (), device: str = "cpu") -> Iterator[str]:
    """Append a record for every data set, number of epochs and split; yield a line on each number of epochs."""
    unknown = [name for name in datasets if name not in EPOCHS]
    if unknown:
        raise MCBNError(f"there is no data set {unknown[0]!r} here; choose from {', '.join(EPOCHS)}")
    journal = Journal(out, {"n_samples": PAPER.n_samples}, device)
    for dataset in datasets or EPOCHS:
        y = load(dataset).y
        for epochs in EPOCHS[dataset]:  # one network a split
            samples = train_and_draw(dataset, SPLITS, [SEED], [epochs] * len(SPLITS), PAPER.n_samples, device)
            means = samples.double().mean(1).cpu()  # (splits, n)
            errors = [float(rmse(mean, y[split(len(y), s).test])) for s, mean in zip(SPLITS, means, strict=True)]
            run = {"kind": "epochs", "dataset": dataset, "method": "mnf"}
            rows = [
                {"split": s, "seed": SEED, "epochs": epochs, "rmse": e} for s, e in zip(SPLITS, errors, strict=True)
            ]
            journal.add(run | row for row in rows)
            yield f"{dataset}, {epochs} epochs: RMSE {sum(errors) / len(errors):.4f}"
