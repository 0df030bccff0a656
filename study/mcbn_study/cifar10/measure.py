"""What is measured on a trained network: Table 2, a sweep over M, and fresh batches beside shared draws."""

import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mcbn.model import MCBN
from mcbn_study.cifar10.augmentation import Augmented, require_images
from mcbn_study.cifar10.per_query import per_query
from mcbn_study.cifar10.profile import Profile
from mcbn_study.cifar10.scores import Scored, curve, log_likelihood, score, set_means, standard_error
from mcbn_study.data.cifar import Images
from mcbn_study.machine import synchronize
from mcbn_study.networks.resnet import standardize

AT_ONCE = 250  # images of one call
Row = dict[str, Any]


class Inputs(NamedTuple):
    """Images brought to the network's scale, (N, 3, 32, 32), and their classes, on one device."""

    x: Tensor
    y: Tensor


class Evaluation:
    """Measures one network; every row says what was measured, on which images, in how many seconds.

    Differs: draws come from the 48,000 images that the network was trained on, not from 50,000.
    """

    def __init__(
        self,
        network: nn.Module,
        profile: Profile,
        *,
        train: Images,
        validation: Images,
        test: Images,
        seed: int,
        device: str = "cpu",
    ) -> None:
        for part in (train, validation, test):
            require_images(*part)
        self.network, self.profile, self.seed = network.to(device).eval(), profile, seed
        self.train = Augmented(train.x.to(device))
        self.parts = {
            name: Inputs(standardize(part.x.to(device)), part.y.to(device))
            for name, part in (("validation", validation), ("test", test))
        }

    def rows(self) -> Iterator[Row]:
        """Measure everything, one row a method, part of the images, T and M."""
        yield from self._plain()
        logits, seconds = self._draws(self.profile.batch_size, self.profile.n_draws, "test")
        yield from self._curve(logits, seconds)
        yield from self._sweep()
        yield from self._queries(logits)

    def _plain(self) -> Iterator[Row]:
        for part, (x, y) in self.parts.items():
            started = time.perf_counter()
            with torch.no_grad():
                logits = torch.cat([self.network(piece) for piece in torch.split(x, AT_ONCE)])
            scored = Scored(None, 1, score(torch.softmax(logits.double(), 1)[None], y))
            yield self._row("plain", part, None, scored, time.perf_counter() - started)

    def _curve(self, logits: Tensor, seconds: float) -> Iterator[Row]:
        """Score the draws at each T; seconds are those of all draws."""
        for scored in curve(logits, self.parts["test"].y, self.profile.n_samples):
            yield self._row("mcbn", "test", self.profile.batch_size, scored, seconds)

    def _sweep(self) -> Iterator[Row]:
        """Score each M on validation and test images; test scores at the M of training stand in the curve."""
        T = self.profile.sweep_samples
        for M in self.profile.batch_sizes:
            bayes = self._fit(M, T)
            for part in ("validation", "test"):
                if part == "test" and self.profile.batch_size == M and T in self.profile.n_samples:
                    continue
                started = time.perf_counter()
                logits = sample(bayes, self.parts[part].x)
                (scored,) = curve(logits, self.parts[part].y, [T])
                yield self._row("mcbn", part, M, scored, time.perf_counter() - started)

    def _queries(self, logits: Tensor) -> Iterator[Row]:
        """Compare fresh batches for each image with shared draws of M - 1 and of M images, on the same images."""
        M, T, N = self.profile.batch_size, self.profile.query_samples, self.profile.query_images
        x, y = (tensor[:N] for tensor in self.parts["test"])
        started = time.perf_counter()
        with exact():
            own = per_query(self.network, self.train, x, n_samples=T, batch_size=M, seed=self.seed)
        synchronize(own.device.type)
        seconds = time.perf_counter() - started
        alike, alike_seconds = self._draws(M - 1, self.profile.n_draws, "test", N)
        gap, error = difference(own, alike, y)
        scores = score(torch.softmax(own.double(), 2), y) | {"pll_minus_shared": gap}
        yield self._row("mcbn_per_query", "query", M, Scored(T, 1, scores, {"pll_minus_shared": error}), seconds)
        (scored,) = curve(alike, y, [T])
        yield self._row("mcbn_shared", "query", M - 1, scored, alike_seconds)
        (scored,) = curve(logits[:, :N], y, [T])
        yield self._row("mcbn_shared", "query", M, scored, None)  # draws of the curve

    def _draws(self, batch_size: int, n_samples: int, part: str, n: int | None = None) -> tuple[Tensor, float]:
        """Return logits (T, N, K) of the first n images of a part, and the seconds of fit and predictions."""
        started = time.perf_counter()
        logits = sample(self._fit(batch_size, n_samples), self.parts[part].x[:n])
        synchronize(logits.device.type)
        return logits, time.perf_counter() - started

    def _fit(self, batch_size: int, n_samples: int) -> MCBN[Any]:
        with exact():
            bayes: MCBN[Any] = MCBN(self.network, "classification")
            return bayes.fit(self.train, n_samples=n_samples, batch_size=batch_size, seed=self.seed)

    def _row(self, method: str, part: str, batch_size: int | None, scored: Scored, seconds: float | None) -> Row:
        n_images = self.profile.query_images if part == "query" else len(self.parts[part].y)
        row = {"method": method, "seed": self.seed, "part": part, "n_images": n_images, "batch_size": batch_size}
        return row | asdict(scored) | {"seconds": seconds and round(seconds, 3)}


def sample(bayes: MCBN[Any], x: Tensor) -> Tensor:
    """Return logits (T, N, K) of many images."""
    return torch.cat([bayes.sample(part) for part in torch.split(x, AT_ONCE)], 1)


def difference(own: Tensor, shared: Tensor, y: Tensor) -> tuple[float, float]:
    """Return PLL of fresh batches (T, N, K) minus that of shared draws (D, N, K), and its standard error.

    d_n = log p_n - mean_s log p_sn over the S = D // T sets of shared draws; the error has a part from the images,
    paired, and one from the sets, whose errors are common to all images: sqrt(var_n(d) / N + var_s(PLL_s) / S).
    """
    T = len(own)
    probs, others = (torch.softmax(logits.double(), 2) for logits in (own, shared))
    mine = log_likelihood(probs.mean(0), y)  # (N,)
    theirs = log_likelihood(set_means(others, T), y)  # (S, N)
    images = standard_error(mine - theirs.mean(0))
    sets = standard_error(theirs.mean(1)) if len(theirs) > 1 else 0.0
    return float((mine - theirs.mean(0)).mean()), float((images**2 + sets**2) ** 0.5)


def exact() -> Any:
    """Record statistics in full single precision: torch's default for convolutions on a GPU is TF32."""
    return torch.backends.cudnn.flags(enabled=True, allow_tf32=False)
