"""Train, predict in every way, score, record; what is there is not done again."""

import hashlib
from pathlib import Path

import numpy as np

from mcbn.files import replacing
from mcbn_study.journal import Journal
from mcbn_study.machine import fastest_convolutions
from mcbn_study.segmentation.measure import SceneEvaluation
from mcbn_study.segmentation.profile import SceneProfile
from mcbn_study.segmentation.train import Echo, save_network, train

METHODS = ("plain", "mcbn", "mcbn_drawn", "paper", "mcbn_tuned")


def run(profile: SceneProfile, out: str | Path, *, device: str = "cpu", echo: Echo = lambda line: None) -> Path:
    """Train unless the network is there; score every method not recorded yet for it, with the maps of a few images."""
    stem = f"{profile.title}-seed{profile.seed}" if profile.seed else profile.title  # the first seed's are drawn
    out, weights = Path(out), Path(out) / "networks" / f"{stem}.safetensors"
    with fastest_convolutions():
        if not weights.exists():
            val = profile.load("val") if profile.test_part != "val" else None
            network, facts = train(profile, profile.load("train"), val, device=device, echo=echo)
            save_network(network, profile, weights)
            row = {"kind": "training", "dataset": profile.title, "method": "training", **facts}
            Journal(out, profile.settings(), device).add([row])
        config = profile.settings() | {"network": hashlib.sha256(weights.read_bytes()).hexdigest()[:12]}
        journal = Journal(out, config, device)
        # M is tuned only where there are validation images besides the test images
        ways = {"mcbn_tuned": bool(profile.tuned_batch_sizes), "mcbn_drawn": profile.title != profile.dataset}
        if wanted := [method for method in METHODS if ways.get(method, True) and not journal.has(method=method)]:
            evaluation = SceneEvaluation(profile, weights, device)
            for method in wanted:
                row, arrays = evaluation.score(method)
                with replacing(out / "examples" / f"{stem}-{method}.npz") as temporary:
                    np.savez_compressed(temporary, **arrays)
                journal.add([row])
                echo(f"{method}: mIoU {row['scores']['miou']:.2f} in {row['seconds']} s")
    return journal.path
