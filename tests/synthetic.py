"""Records of a study that was never run: random numbers, for tests of what reads records."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mcbn.data import NAMES
from mcbn_study import journal

RECORDED = ("mcbn", "bn", "mcdo", "do", "mnf", "ensemble", "mcbn_linear", "mcbn_gaussian", "mcbn_tuned")
SCORES = ("rmse", "crps", "pll", "crps_constant", "pll_constant", "crps_optimum", "pll_optimum")


def run(dataset: str, method: str, split: int, seed: int, rng: np.random.Generator, **changes: Any) -> dict[str, Any]:
    """One record as the regression study writes it, with random scores."""
    scores: dict[str, Any] = {name: float(rng.normal(3, 0.2)) for name in SCORES}
    for name in ("crps_normalized", "pll_normalized"):
        scores[name] = None if method in ("bn", "do") else float(rng.normal(1, 2))
    return {
        "kind": "test",
        "study": "regression",
        "profile": "paper",
        "dataset": dataset,
        "method": method,
        "split": split,
        "seed": seed,
        **scores,
        "seconds": 0.25,
        "device": "random numbers",
        "config_hash": "a1",
        **changes,
    }


def study(datasets: Sequence[str] = NAMES, methods: Sequence[str] = RECORDED) -> Iterator[dict[str, Any]]:
    """Five splits with five seeds of every method; the ensemble has one record a split."""
    rng = np.random.default_rng(0)
    for dataset in datasets:
        for method in methods:
            for split in range(1, 6):
                for seed in (1,) if method == "ensemble" else range(1, 6):
                    yield run(dataset, method, split, seed, rng)


def sensitivity(datasets: Sequence[str] = NAMES) -> Iterator[dict[str, Any]]:
    """Three splits with five seeds over both sensitivity grids."""
    rng = np.random.default_rng(1)
    settings = [(2**k, 100) for k in range(3, 11)] + [(128, 250), (128, 50)]
    for dataset in datasets:
        for M, T in settings:
            for split in range(1, 4):
                for seed in range(1, 6):
                    changes = {"kind": "sensitivity", "study": "sensitivity", "batch_size": M, "n_samples": T}
                    yield run(dataset, "mcbn", split, seed, rng, **changes)


def write(path: Path, found: Iterator[dict[str, Any]]) -> None:
    """Write records in place of those there."""
    path.unlink(missing_ok=True)
    journal.extend(path, found)


def predictions(
    folder: Path, datasets: Sequence[str] = NAMES, methods: Sequence[str] = ("mcbn",), n: int = 200
) -> None:
    """Random errors with a std that knows them, as the study saves them."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(2)
    for dataset in datasets:
        for method in methods:
            std = rng.uniform(0.5, 2, (5, n))
            arrays = {"error": rng.normal(0, std).astype(np.float16), "std": std.astype(np.float16)}
            np.savez(folder / f"{dataset}-{method}-1.npz", constant_std=np.ones(5, np.float32), **arrays)
