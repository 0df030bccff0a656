"""Ways to segment, and their scores: the plain network, draws shared by all images, and the paper's batches of each."""

import time
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mcbn import batch_norm, moments, prediction
from mcbn.layers import stochastic_layers
from mcbn.model import MCBN
from mcbn.network import Network
from mcbn.prediction import ClassificationPrediction
from mcbn_study.data.scenes import Scenes
from mcbn_study.machine import gpu_growth, timed
from mcbn_study.segmentation.profile import SceneProfile
from mcbn_study.segmentation.scores import PixelScores
from mcbn_study.segmentation.train import load_network, normalize, training_batches

AT_ONCE = 8  # images of one prediction
PAPER_LAYERS = 2  # "the first 2 blocks only": Teye et al. 2018, Section 4.5
Segmented = tuple[Tensor, dict[str, Tensor]]  # probabilities (N, K, H, W) and uncertainty maps (N, H, W) by name
Estimator = Callable[[Tensor], Segmented]  # of byte images (N, 3, H, W)


@torch.no_grad()
def plain(network: nn.Module, x: Tensor) -> Segmented:
    """The network in eval mode; its map is the entropy of the softmax."""
    probs = torch.softmax(network(normalize(x)), 1)
    return probs, {"entropy": prediction.entropy(probs, 1)}


def shared_draws(bayes: MCBN[ClassificationPrediction], n_samples: int) -> Estimator:
    """MCBN: statistics of training batches alone, the same T draws for every image."""
    return lambda x: with_maps(bayes.predict(normalize(x), n_samples=n_samples))


def query_inside(network: nn.Module, pool: Tensor, *, batch_size: int, n_samples: int, seed: int = 0) -> Estimator:
    """The paper's: for each image and pass a batch of the image and M - 1 training images, drawn with replacement.

    The first 2 batch norm layers take its statistics, the others their running ones (Section 4.5, authors' code).
    """
    inner = Network(network, None)
    batch_norm.watch(inner.module)
    generator, dtype = torch.Generator().manual_seed(seed), next(network.parameters()).dtype
    chosen = stochastic_layers(inner, normalize(pool[:1]).to(dtype), PAPER_LAYERS)

    def passes(image: Tensor) -> Iterator[Tensor]:
        rows = torch.randint(len(pool), (n_samples, batch_size - 1), generator=generator).to(pool.device)
        for companions in rows:
            with QueryInside(chosen):
                logits = inner(normalize(torch.cat([image, pool[companions]])).to(dtype))  # (1, K, H, W)
            yield logits.unsqueeze(0)

    @torch.no_grad()
    def predict(x: Tensor) -> Segmented:
        tau = torch.ones(())
        return with_maps(prediction.join([moments.classification(passes(image), tau) for image in torch.split(x, 1)]))

    return predict


class QueryInside(batch_norm.Record):
    """Normalise the chosen layers by the batch; after the last of them only the first image, the query, goes on.

    Exact where nothing goes around the chosen layers and all that follows treats images one by one, as here.
    """

    def answer(self, call: batch_norm.BatchNormCall) -> Tensor:
        """Normalise this call, and drop the companions when they are needed no more."""
        output = super().answer(call)
        return output[:1] if call.layer in self.chosen and len(self.mean) == len(self.chosen) else output


def with_maps(pred: ClassificationPrediction) -> Segmented:
    """Add the maps: variance of the softmax averaged over classes (the paper's), mutual information, entropy."""
    maps = {"variance": pred.variance.mean(1), "mutual_information": pred.mutual_information, "entropy": pred.entropy}
    return pred.probs, maps


class SceneEvaluation:
    """One trained network and the images it is tried on."""

    def __init__(self, profile: SceneProfile, weights: Path, device: str) -> None:
        self.profile, self.device = profile, device
        self.train, self.test = profile.load("train").to(device), profile.load(profile.test_part).to(device)
        network = load_network(profile, weights)
        self.network = network.to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]

    def score(self, method: str) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the record of a method and the arrays to draw."""
        started = time.perf_counter()
        estimator, extra = self._prepare(method)
        scores, shown, predicting = measure(estimator, self.test, examples(len(self.test), self.profile.examples))
        seconds = round(time.perf_counter() - started, 2)
        values = scores.result() | extra | {"milliseconds_per_image": 1000 * predicting / len(self.test)}
        finite = {name: value if np.isfinite(value) else None for name, value in values.items()}
        row = {"kind": "scores", "dataset": self.profile.title, "method": method, "seconds": seconds}
        return row | {"scores": finite}, shown

    def _prepare(self, method: str) -> tuple[Estimator, dict[str, float]]:
        M, T = self.profile.batch_size, self.profile.n_samples
        if method == "plain":
            return partial(plain, self.network), {}
        if method == "paper":
            inside = query_inside(self.network, self.train.x, batch_size=M, n_samples=T, seed=self.profile.seed)
            return inside, {"batch_size": M}
        if method == "mcbn":
            return shared_draws(self.bayes, T), {"batch_size": M} | self._peak_memory()
        if method == "mcbn_drawn":
            return shared_draws(self._fit("drawn"), T), {"batch_size": M}
        return self._tuned()

    @cached_property
    def bayes(self) -> MCBN[ClassificationPrediction]:
        """MCBN of all layers, on batches of images made as in training; a frozen encoder keeps its own centre."""
        return self._fit("drawn" if self.profile.title == self.profile.dataset else "running")

    def _fit(self, centre: str) -> MCBN[ClassificationPrediction]:
        T = max(self.profile.n_samples, *self.profile.memory_samples)
        batches = training_batches(self.train, self.profile.batch_size, T, seed=self.profile.seed)
        return MCBN(self.network, "classification").fit(batches, n_samples=T, seed=self.profile.seed, centre=centre)

    def _tuned(self) -> tuple[Estimator, dict[str, float]]:
        """Choose M by the log likelihood of the validation part; draws are stretched, training images not needed."""
        val, T = self.profile.load("val").to(self.device), self.profile.n_samples
        drawn = {M: self.bayes.posterior.at_batch_size(M) for M in self.profile.tuned_batch_sizes}
        by_size = {M: shared_draws(self.bayes.with_posterior(draws), T) for M, draws in drawn.items()}
        losses = {M: measure(estimator, val, [])[0].result()["nll"] for M, estimator in by_size.items()}
        best = min(losses, key=lambda M: losses[M])
        return by_size[best], {"batch_size": float(best)} | {f"val_nll_at_{M}": loss for M, loss in losses.items()}

    def _peak_memory(self) -> dict[str, float]:
        """Measure by how many MiB memory grows in a prediction at few and at many draws, on a GPU."""
        if self.device != "cuda":
            return {}
        predict, few = partial(self.bayes.predict, normalize(self.test.x[:2])), self.profile.memory_samples
        predict(n_samples=few[0])  # finds how to run: not to be counted
        return {f"peak_mib_at_{T}": gpu_growth(partial(predict, n_samples=T)) / 2**20 for T in few}


def measure(estimator: Estimator, scenes: Scenes, shown: Sequence[int]) -> tuple[PixelScores, dict[str, Any], float]:
    """Predict all images: scores, labels and maps (in 256 steps up to the largest value) of those shown, seconds."""
    scores, kept, seconds = PixelScores(scenes.kind.classes, scenes.kind.void), dict[str, list[Tensor]](), 0.0
    for start in range(0, len(scenes), AT_ONCE):
        rows = slice(start, start + AT_ONCE)
        (probs, maps), taken = timed(estimator, scenes.x[rows])
        seconds += taken
        scores.add(probs, maps, scenes.y[rows])
        for row in (i - start for i in shown if start <= i < start + AT_ONCE):
            kept.setdefault("label", []).append(probs[row].argmax(0).byte().cpu())
            for name, values in maps.items():
                kept.setdefault(name, []).append(values[row].float().cpu())
    arrays: dict[str, Any] = {"names": np.array([scenes.names[i] for i in shown])}
    for name, values in ((name, torch.stack(images)) for name, images in kept.items()):
        largest = values.max().clamp(min=1e-12)
        if name != "label":
            values, arrays[f"{name}_scale"] = (255 * values / largest).round().byte(), np.float32(largest.item() / 255)
        arrays[name] = values.numpy()
    return scores, arrays, seconds


def examples(n: int, count: int) -> list[int]:
    """Choose images to show without looking at them: the middles of equal stretches."""
    return sorted({int((i + 0.5) * n / count) for i in range(count)})
