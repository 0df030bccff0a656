"""Train, predict in every way, score, record. The same call goes on after an interruption."""

import copy
import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from mcbn.errors import MCBNError
from mcbn.files import replacing
from mcbn.model import MCBN
from mcbn.prediction import ClassificationPrediction
from mcbn_study.data.scenes import SCENE_SETS, Scenes
from mcbn_study.journal import Journal
from mcbn_study.machine import fastest_convolutions, timed
from mcbn_study.networks.segnet import SegNet
from mcbn_study.segmentation import measure as estimators
from mcbn_study.segmentation import train as training
from mcbn_study.segmentation.augmentation import normalize, training_batches
from mcbn_study.segmentation.profile import Profile
from mcbn_study.segmentation.saved import load_network, save_network
from mcbn_study.segmentation.scores import PixelScores

METHODS = ("plain", "paper", "mcbn", "mcbn_tuned")
AT_ONCE = 8  # images of one prediction
MEMORY_IMAGES = 2
Echo = Callable[[str], None]


def run(profile: Profile, out: str | Path, *, device: str = "cpu", echo: Echo = lambda line: None) -> Path:
    """Train and evaluate one data set into the folder `out`; return the file of records."""
    train_network(profile, out, device=device, echo=echo)
    return evaluate(profile, out, device=device, echo=echo)


def train_network(profile: Profile, out: str | Path, *, device: str = "cpu", echo: Echo = lambda line: None) -> Path:
    """Train unless the network is there already; return its file."""
    out = Path(out)
    path = out / "networks" / f"{profile.dataset}.safetensors"
    if path.exists():
        load_network(profile, len(SCENE_SETS[profile.dataset].classes), path)  # refuses one of other settings
        return path
    checkpoint = out / "checkpoints" / f"{profile.dataset}.pt"
    checkpoint.parent.mkdir(parents=True, exist_ok=True)
    (checkpoint.parent / ".gitignore").write_text("*\n")  # to go on from, not to publish
    scenes = profile.load("train")
    val = profile.load("val") if profile.test_part != "val" else None

    def say(done: training.Run) -> None:
        if done.epoch % profile.save_every == 0 or done.epoch == profile.epochs:
            checked = f", val mIoU {done.checks[-1][1]:.1f} at {done.checks[-1][0]}" if done.checks else ""
            echo(f"epoch {done.epoch}: loss {done.losses[-1]:.4f}{checked}, {done.seconds:.0f} s")

    with fastest_convolutions():
        done = training.train(profile, scenes, val, checkpoint, device=device, on_epoch=say)
    assert isinstance(done.network, SegNet)
    save_network(done.network, profile, path)
    row = {"kind": "training", "dataset": profile.dataset, "method": "training", "seconds": round(done.seconds, 2)}
    row |= {"losses": [round(loss, 5) for loss in done.losses], "val_miou": done.checks}
    Journal(out, profile.settings(), device).add([row])
    return path


def evaluate(
    profile: Profile,
    out: str | Path,
    *,
    device: str = "cpu",
    methods: Sequence[str] = METHODS,
    echo: Echo = lambda line: None,
) -> Path:
    """Score every method that is not recorded yet for this network; write the maps of a few images."""
    unknown = sorted(set(methods) - set(METHODS))
    if unknown:
        raise MCBNError(f"no method {unknown[0]!r}; there are {list(METHODS)}")
    out = Path(out)
    weights = out / "networks" / f"{profile.dataset}.safetensors"
    if not weights.exists():
        raise MCBNError(f"no {weights}: train first")
    config = profile.settings() | {"network": hashlib.sha256(weights.read_bytes()).hexdigest()[:12]}
    journal = Journal(out, config, device)
    wanted = [method for method in methods if method in available(profile) and not journal.has(method=method)]
    if wanted:
        with fastest_convolutions():
            evaluation = Evaluation(profile, weights, device)
            for method in wanted:
                row, arrays = evaluation.score(method)
                _save_arrays(out / "examples" / f"{profile.dataset}-{method}.npz", arrays)
                journal.add([row])
                echo(f"{method}: mIoU {row['scores']['miou']:.2f} in {row['seconds']} s")
    return journal.path


def available(profile: Profile) -> tuple[str, ...]:
    """Name the methods that apply: M is tuned only where there are validation images besides the test images."""
    return METHODS if profile.tuned_batch_sizes else METHODS[:-1]


class Evaluation:
    """One trained network and the images it is tried on."""

    def __init__(self, profile: Profile, weights: Path, device: str) -> None:
        self.profile, self.device = profile, device
        self.train, self.test = profile.load("train").to(device), profile.load(profile.test_part).to(device)
        network = load_network(profile, len(self.test.classes), weights)
        self.network = network.to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
        self._bayes: MCBN[ClassificationPrediction] | None = None

    def score(self, method: str) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the record of a method and the arrays to draw."""
        started = time.perf_counter()
        estimator, extra = self._prepare(method)
        measured = measure(estimator, self.test, examples(len(self.test), self.profile.examples))
        seconds = time.perf_counter() - started
        extra |= {"milliseconds_per_image": 1000 * measured.seconds / len(self.test)}
        found = measured.scores.result() | extra
        row = {"kind": "scores", "dataset": self.profile.dataset, "method": method, "seconds": round(seconds, 2)}
        return row | {"scores": {name: _finite(value) for name, value in found.items()}}, measured.shown

    def _prepare(self, method: str) -> tuple[estimators.Estimator, dict[str, float]]:
        M, T = self.profile.batch_size, self.profile.n_samples
        if method == "plain":
            return estimators.plain(self.network), {}
        if method == "paper":
            inside = estimators.query_inside(
                self.network, self.train.x, batch_size=M, n_samples=T, seed=self.profile.seed
            )
            return inside, {"batch_size": M}
        if method == "mcbn":
            return estimators.shared_draws(self.bayes, T), {"batch_size": M} | self._peak_memory()
        return self._tuned()

    @property
    def bayes(self) -> MCBN[ClassificationPrediction]:
        """MCBN of all layers, on batches of images made as in training."""
        if self._bayes is None:
            M, T = self.profile.batch_size, max(self.profile.n_samples, *self.profile.memory_samples)
            batches = training_batches(self.train, M, T, seed=self.profile.seed)
            self._bayes = MCBN(self.network, "classification").fit(batches, n_samples=T, seed=self.profile.seed)
        return self._bayes

    def _tuned(self) -> tuple[estimators.Estimator, dict[str, float]]:
        """Choose M by the log likelihood of the validation part; draws are stretched, training images not needed."""
        val = self.profile.load("val").to(self.device)
        twin, drawn = copy.copy(self.bayes), self.bayes.posterior
        losses: dict[int, float] = {}
        for M in self.profile.tuned_batch_sizes:
            twin.posterior = drawn.at_batch_size(M)
            losses[M] = measure(estimators.shared_draws(twin, self.profile.n_samples), val, []).scores.nll()
        best = min(losses, key=lambda M: losses[M])
        twin.posterior = drawn.at_batch_size(best)
        extra = {"batch_size": float(best)} | {f"val_nll_at_{M}": loss for M, loss in losses.items()}
        return estimators.shared_draws(twin, self.profile.n_samples), extra

    def _peak_memory(self) -> dict[str, float]:
        """Measure by how many MiB memory grows in a prediction at few and at many draws, on a GPU."""
        if self.device != "cuda":
            return {}
        x = normalize(self.test.x[:MEMORY_IMAGES])
        found = {}
        self.bayes.predict(x, n_samples=self.profile.memory_samples[0])  # finds how to run: not to be counted
        for T in self.profile.memory_samples:
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            self.bayes.predict(x, n_samples=T)
            torch.cuda.synchronize()
            found[f"peak_mib_at_{T}"] = (torch.cuda.max_memory_allocated() - before) / 2**20
        return found


class Measured(NamedTuple):
    """Scores over all images, labels and maps of a few, and the seconds that predicting took."""

    scores: PixelScores
    shown: dict[str, Any]
    seconds: float


def measure(estimator: estimators.Estimator, scenes: Scenes, shown: Sequence[int]) -> Measured:
    """Predict all images, a few at a time."""
    scores, kept, seconds = PixelScores(scenes.classes, scenes.void), dict[str, list[Tensor]](), 0.0
    for start in range(0, len(scenes), AT_ONCE):
        part = scenes.take(range(start, min(start + AT_ONCE, len(scenes))))
        found, taken = timed(lambda x=part.x: _finished(estimator(x)))  # type: ignore[misc]
        seconds += taken
        scores.add(found.probs, found.maps, part.y)
        for row in (i - start for i in shown if start <= i < start + AT_ONCE):
            kept.setdefault("label", []).append(found.probs[row].argmax(0).byte().cpu())
            for name, values in found.maps.items():
                kept.setdefault(name, []).append(values[row].float().cpu())
    arrays = dict(_quantised({name: torch.stack(values) for name, values in kept.items()}))
    return Measured(scores, {"names": np.array([scenes.names[i] for i in shown])} | arrays, seconds)


def _finished(found: estimators.Segmented) -> estimators.Segmented:
    if found.probs.is_cuda:
        torch.cuda.synchronize()
    return found


def examples(n: int, count: int) -> list[int]:
    """Choose images to show without looking at them: the middles of equal stretches."""
    return sorted({int((i + 0.5) * n / count) for i in range(count)})


def _quantised(arrays: dict[str, Tensor]) -> Iterator[tuple[str, Any]]:
    """Store maps in 256 steps up to their largest value, kept beside them."""
    for name, values in arrays.items():
        if name == "label":
            yield name, values.numpy()
        else:
            largest = values.max().clamp(min=1e-12)
            yield name, (255 * values / largest).round().byte().numpy()
            yield f"{name}_scale", np.float32(largest.item() / 255)


def _save_arrays(path: Path, arrays: dict[str, Any]) -> None:
    with replacing(path) as temporary:
        np.savez_compressed(temporary, **arrays)


def _finite(value: float) -> float | None:
    return value if np.isfinite(value) else None
