"""SegNet by night and in fog: does a watch see the change, and what does `adapt` bring? shift.toml has the sizes.

The changes are formulas, no photographs. Of v in 0..1 and a share s: night is s v + 0.03 noise, fog t v + 0.8 (1 - t),
t = s^d; the distance d is 1 in the upper 30 % of the image and falls to 0.2. Images of val and test are mixed and
cut at random into a reference and others, so that clean ones are exchangeable with it.
"""

import tomllib
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mcbn.files import write_text
from mcbn.model import MCBN
from mcbn_study.journal import RECORDS, Journal, latest, read
from mcbn_study.machine import timed
from mcbn_study.segmentation.measure import Estimator, measure, plain, shared_draws
from mcbn_study.segmentation.profile import SceneProfile
from mcbn_study.segmentation.train import load_network, normalize, training_batches
from mcbn_study.shift.baselines import blended
from mcbn_study.shift.measure import cut, p_values
from mcbn_study.tables import render

SETTINGS: dict[str, Any] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
SCORES = ("pixel_accuracy", "miou", "nll", "ece")


def change(x: Tensor, kind: str, share: float) -> Tensor:
    """Change bytes (N, 3, H, W): "night", "fog" or "none"."""
    v = x / 255
    if kind == "night":
        v = share * v + 0.03 * torch.randn(v.shape, generator=torch.Generator().manual_seed(0))
    if kind == "fog":
        distance = (1.4 * torch.linspace(1, 0, v.shape[2])[:, None]).clamp(0.2, 1)  # (H, 1)
        v = torch.lerp(torch.full_like(v, 0.8), v, share**distance)
    return (v.clamp(0, 1) * 255).round().byte()


def run(profile: SceneProfile, networks: Path, out: Path, **others: Any) -> Path:
    """Watch and repair the network of a profile in a folder; add to the records of `out`; others: than `SETTINGS`."""
    use = SETTINGS | others
    journal, small = Journal(out, use | {"profile": profile.name}), replace(profile, size=tuple(use["size"]))
    network = load_network(profile, networks / f"{profile.dataset}.safetensors")
    batches = training_batches(small.load("train"), profile.batch_size, use["n_samples"], seed=profile.seed)
    bayes: MCBN[Any] = MCBN(network, "classification").fit(batches, n_samples=use["n_samples"])
    parts = [small.load(part) for part in ("val", "test")]
    x, y = (torch.cat([getattr(part, name) for part in parts]) for name in "xy")
    home, away = cut(len(x), use["n_reference"], profile.seed)
    watch = bayes.watch(normalize(x[home]), **{name: use[name] for name in ("batch_size", "false_alarms")})
    for kind, share, repaired in use["changes"]:
        images, n, about = change(x[away], kind, share), use["n_watched"], {"change": kind, "share": share}
        p, seconds = timed(p_values, watch, normalize(images[:n]), torch.arange(n).reshape(-1, watch.batch_size))
        found = int((p <= watch.false_alarms).sum())
        journal.add([about | {"method": "watch", "found": found, "n": len(p), "seconds": seconds}])
        if repaired:
            scored = replace(parts[0], x=images[n:][: use["n_scored"]], y=y[away][n:][: use["n_scored"]])
            pools = [normalize(images[n - count : n]) for count in use["unlabelled"]]
            journal.add(about | row for row in _repairs(bayes, network, watch, pools, scored))
    return write_report(out)


def _repairs(bayes: MCBN[Any], network: Any, watch: Any, pools: list[Tensor], scored: Any) -> Iterator[dict[str, Any]]:
    """Score the network as it is, by statistics of the scored images themselves, as fitted, and adapted to others."""
    adapted = {f"adapt {len(pool)}": bayes.adapt(pool, reference=watch) for pool in pools}
    ways: dict[str, Estimator] = {
        "plain": partial(plain, network),
        "batch": lambda x: (blended(network, normalize(x), len(x), 1.0).softmax(1), {}),
        **{name: shared_draws(b, b.posterior.n_samples) for name, b in {"mcbn": bayes, **adapted}.items()},
    }
    for method, estimator in ways.items():
        scores, _, seconds = measure(estimator, scored, [])
        row = {"method": method, "n": len(scored), "seconds": seconds} | {s: scores.result()[s] for s in SCORES}
        yield row | ({"moved": getattr(adapted[method].adaptation, "moved", False)} if method in adapted else {})


def write_report(out: Path) -> Path:
    """Write table.md: what the watch found, and the scores of each method, of the last records."""
    records = latest(read(out / RECORDS), ("change", "share", "method"))
    return write_text(out / "table.md", render(__package__, "shift.md.j2", records=records))
