"""MNF's test error by epochs of training, where ours is better than printed: how early would training have to end?

Looked at after the study, and nothing is chosen by it: `mcbn reproduce tables` names it as a likely cause.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

from mcbn_study.journal import Journal
from mcbn_study.regression.mnf import Choice, Settings, train_and_draw
from mcbn_study.regression.profile import find_profile

EPOCHS = {
    "concrete": (100, 200, 300, 400),
    "energy": (100, 200, 300, 400),
    "kin8nm": (20, 40, 60),
    "power": (10, 20, 30, 40),
}
SPLITS, SEED = (1, 2, 3, 4, 5), 1


def main(arguments: Sequence[str] | None = None) -> None:
    """Append a record for every data set, number of epochs and split."""
    parser = argparse.ArgumentParser(prog="python -m mcbn_study.mnf_epochs.run", description=__doc__)
    parser.add_argument("--datasets", nargs="+", choices=EPOCHS, default=[*EPOCHS])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--out", type=Path, default=Path("results/mnf_epochs"))
    chosen = parser.parse_args(arguments)
    profile = find_profile("paper")
    settings = Settings(profile.max_epochs, profile.n_samples)
    for dataset in chosen.datasets:
        for epochs in EPOCHS[dataset]:
            measure(dataset, epochs, settings, chosen.device, chosen.out)


def measure(dataset: str, epochs: int, settings: Settings, device: str, out: Path) -> None:
    """Train one network a split for so many epochs and append its test RMSE."""
    choices = [Choice(epochs, 1.0, 1.0) for _ in SPLITS]  # tau moves no mean
    samples, target = train_and_draw(dataset, SPLITS, [SEED], choices, settings, torch.device(device))
    errors = (samples.double().mean(1) - target).square().mean(1).sqrt().tolist()  # of each split
    rows = [
        {"kind": "epochs", "dataset": dataset, "method": "mnf", "split": s, "seed": SEED, "epochs": epochs, "rmse": e}
        for s, e in zip(SPLITS, errors, strict=True)
    ]
    Journal(out, {"n_samples": settings.n_samples}, device).add(rows)
    print(f"{dataset}, {epochs} epochs: RMSE {sum(errors) / len(errors):.4f}", flush=True)


if __name__ == "__main__":
    main()
