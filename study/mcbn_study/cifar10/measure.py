"""What is measured on a trained network: Table 2, a sweep over M, and fresh batches beside shared draws."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mcbn import batch_norm
from mcbn.batch_norm import BatchNormCall, BatchNormMode, scale_and_shift
from mcbn.engine.jacobian import normalize_each
from mcbn.engine.record import Statistics
from mcbn.metrics import error_auroc
from mcbn.model import MCBN
from mcbn.network import Network
from mcbn.prediction import entropy, mutual_information
from mcbn_study.cifar10.profile import CifarProfile, Split
from mcbn_study.cifar10.train import Augmented
from mcbn_study.data.cifar import Images
from mcbn_study.estimates import class_scores, log_likelihood, standard_error
from mcbn_study.journal import Record
from mcbn_study.machine import timed
from mcbn_study.networks import standardize

AT_ONCE = 250  # images of one call
MOST_SETS = 8  # of draws, for scores other than PLL
ROWS = 1024  # (image, draw) pairs in one pass
# Statistics are recorded in full single precision: torch's default for convolutions on a GPU is TF32
exact = partial(torch.backends.cudnn.flags, enabled=True, allow_tf32=False)


def score(probs: Tensor, y: Tensor) -> dict[str, float]:
    """Score draws of class probabilities (T, N, K), averaged over the draws; of one draw, as a plain network's.

    pll is the mean log of the averaged softmax (Teye et al. 2018, section 4.4, Table 2). auroc_*: how well wrong labels
    are found by entropy, by 1 - max_k p_k, and by mutual information; absent where no label, or every one, is wrong.
    """
    mean = probs.mean(0)  # (N, K)
    wrong, total, values = mean.argmax(1) != y, entropy(mean, 1), class_scores(mean, y)
    values["auroc_entropy"] = error_auroc(total, wrong)
    values["auroc_max_probability"] = values["error_auroc"]
    if len(probs) > 1:
        values["auroc_mutual_information"] = error_auroc(mutual_information(probs), wrong)
    return {name: value for name, value in values.items() if value is not None and "error" not in name}


def curve(logits: Tensor, y: Tensor, sizes: Sequence[int]) -> list[Record]:
    """Score MCBN at several T from one series of draws, logits (D, N, K).

    At each T the series is cut into D // T disjoint sets, n_sets; PLL is the mean over all of them, with its standard
    error s / sqrt(sets), other scores over the first eight. Where every T divides D and the next T, PLL cannot fall as
    T grows: log (p + q) / 2 >= (log p + log q) / 2.
    """
    probs, curve = torch.softmax(logits.double(), 2), []
    for T in (T for T in sizes if len(probs) >= T):
        sets = set_means(probs, T)  # (S, N, K)
        several = [score(draws, y) for draws in torch.split(probs, T)[: min(len(sets), MOST_SETS)]]
        names = [name for name in several[0] if all(name in one for one in several)]
        values = {name: torch.tensor([one[name] for one in several], dtype=torch.float64) for name in names}
        values["pll"] = log_likelihood(sets, y).mean(1)  # (S,)
        errors = {name: standard_error(v) for name, v in values.items() if len(v) > 1}
        means = {name: float(v.mean()) for name, v in values.items()}
        curve.append({"n_samples": T, "n_sets": len(sets), "scores": means, "errors": errors})
    return curve


def set_means(probs: Tensor, n_samples: int) -> Tensor:
    """Average probabilities (D, N, K) over D // T successive sets of T draws: (D // T, N, K)."""
    n_sets = len(probs) // n_samples
    return probs[: n_sets * n_samples].reshape(n_sets, n_samples, *probs.shape[1:]).mean(1)


def difference(fresh: Tensor, shared: Tensor, y: Tensor) -> tuple[float, float]:
    """Return PLL of fresh batches (T, N, K) minus that of shared draws (D, N, K), and its standard error.

    d_n = log p_n - mean_s log p_sn over the S = D // T sets of shared draws; the error has a part from the images,
    paired, and one from the sets, whose errors are common to all images: sqrt(var_n(d) / N + var_s(PLL_s) / S).
    """
    fresh_probs, shared_probs = (torch.softmax(logits.double(), 2) for logits in (fresh, shared))
    by_set = log_likelihood(set_means(shared_probs, len(fresh)), y)  # (S, N)
    gap = log_likelihood(fresh_probs.mean(0), y) - by_set.mean(0)  # (N,)
    sets_error = standard_error(by_set.mean(1)) if len(by_set) > 1 else 0.0
    return float(gap.mean()), float((standard_error(gap) ** 2 + sets_error**2) ** 0.5)


class Evaluation:
    """Measures one network; every row says what was measured, on which images, in how many seconds.

    Draws come from the images that the network was trained on.
    """

    def __init__(self, network: nn.Module, profile: CifarProfile, images: Split, *, seed: int) -> None:
        (train, validation, test), device = images, next(network.parameters()).device
        self.network, self.profile, self.seed = network.eval(), profile, seed
        self.train = Augmented(train.x.to(device))
        parts = {"validation": validation, "test": test}
        self.images = {n: Images(standardize(x.to(device)), y.to(device)) for n, (x, y) in parts.items() if len(y)}
        self.queries = Images(*(tensor[: profile.query_images] for tensor in self.images["test"]))

    def rows(self) -> Iterator[Record]:
        """Measure everything, one row a method, part of the images, T and M."""
        for part, (x, y) in self.images.items():
            with torch.no_grad():
                logits, seconds = timed(_in_parts, self.network, x)
            scores = score(torch.softmax(logits.double(), 1)[None], y)
            plain = {"n_samples": None, "n_sets": 1, "scores": scores, "errors": {}}
            yield self._row("plain", part, None, plain, seconds)
        M, T = self.profile.batch_size, self.profile.sweep_samples
        logits, seconds = timed(self._draw, M)
        for scored in curve(logits, self.images["test"].y, self.profile.n_samples):
            yield self._row("mcbn", "test", M, scored, seconds)  # seconds of all draws
        for size in self.profile.batch_sizes:
            bayes = self._fit(size, T)
            for part, (x, y) in self.images.items():
                if (part, size) != ("test", M) or T not in self.profile.n_samples:  # else it stands in the curve
                    few, seconds = timed(_in_parts, bayes.sample, x)
                    yield self._row("mcbn", part, size, curve(few, y, [T])[0], seconds)
        if len(self.queries.y):
            yield from self._queries(logits)

    def _draw(self, batch_size: int) -> Tensor:
        return _in_parts(self._fit(batch_size, self.profile.n_draws).sample, self.images["test"].x)

    def _queries(self, logits: Tensor) -> Iterator[Record]:
        """Compare fresh batches for each image with shared draws of M - 1 images, and of M, of which logits are."""
        M, T, (x, y) = self.profile.batch_size, self.profile.query_samples, self.queries
        options: Record = {"n_samples": T, "batch_size": M, "seed": self.seed, "pool": self.profile.query_pool}
        with exact():
            fresh, seconds = timed(per_query, self.network, self.train, x, **options)
        shared, shared_seconds = timed(lambda: self._draw(M - 1)[:, : len(y)])
        sizes = [size for size in self.profile.n_samples if size <= T]
        for scored in curve(fresh, y, sizes):
            gap, error = difference(fresh[: scored["n_samples"]], shared, y)
            scored["scores"]["pll_minus_shared"], scored["errors"]["pll_minus_shared"] = gap, error
            yield self._row("mcbn_per_query", "query", M, scored, seconds)  # seconds of all T
        for scored in curve(shared, y, sizes):
            yield self._row("mcbn_shared", "query", M - 1, scored, shared_seconds)
        for scored in curve(logits[:, : len(y)], y, sizes):
            yield self._row("mcbn_shared", "query", M, scored, None)  # draws of the curve

    def _fit(self, batch_size: int, n_samples: int) -> MCBN[Any]:
        with exact():
            bayes: MCBN[Any] = MCBN(self.network, "classification")
            return bayes.fit(self.train, n_samples=n_samples, batch_size=batch_size, seed=self.seed)

    def _row(self, method: str, part: str, batch_size: int | None, scored: Record, seconds: float | None) -> Record:
        images = self.images.get(part, self.queries)
        row = {"method": method, "seed": self.seed, "part": part, "n_images": len(images.y), "batch_size": batch_size}
        return row | scored | {"seconds": seconds and round(seconds, 3)}


def _in_parts(run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Run many images a few at a time: logits (..., N, K)."""
    return torch.cat([run(images) for images in torch.split(x, AT_ONCE)], -2)


@torch.no_grad()
def per_query(
    network: nn.Module, images: Augmented, x: Tensor, *, n_samples: int, batch_size: int, seed: int, pool: int | None
) -> Tensor:
    """The authors' estimator: logits (T, N, K) of x (N, 3, 32, 32), each image and pass with a batch of its own.

    `MCBN` shares T draws among all images (Algorithm 1). Here image n has T draws of its own, each of M - 1 augmented
    training images: the place of the image itself is left free, it does not enter the statistics (authors' code).
    x is standardised. pool: draw only so many times, and give each image T different ones of these draws, at random.
    An image alone cannot tell; two images have T^2 / pool draws in common on average, none where there is no pool.
    """
    chosen = torch.arange(len(x) * n_samples)  # (N T,): draws
    if pool is not None:
        generator = np.random.default_rng([seed, pool])
        several = [generator.choice(pool, n_samples, replace=False) for _ in range(len(x))]
        chosen = torch.from_numpy(np.concatenate(several))
    bayes = MCBN(network, "classification")
    drawn = bayes.fit(images, n_samples=pool or len(chosen), batch_size=batch_size - 1, seed=seed).posterior
    copy = Network(network)
    batch_norm.watch(copy.module)
    logits, queries = [], copy.prepare(x)  # (N, 3, 32, 32)
    chosen = chosen.to(queries.device)
    for start in range(0, len(chosen), ROWS):
        rows = chosen[start : start + ROWS]
        image = torch.arange(start, start + len(rows), device=rows.device) // n_samples
        with RowStatistics({layer: (drawn.mean[layer][rows], drawn.var[layer][rows]) for layer in drawn.layers}):
            logits.append(copy(queries[image]))
    return torch.cat(logits).reshape(len(x), n_samples, -1).transpose(0, 1)


class RowStatistics(BatchNormMode):
    """Normalise every row by statistics of its own, (B, C) each."""

    def __init__(self, drawn: Statistics) -> None:
        super().__init__()
        self.drawn = drawn

    def answer(self, call: BatchNormCall) -> Tensor:
        """Normalise with biased variances, as recorded."""
        return normalize_each(call.x, *scale_and_shift(*self.drawn[call.name], call.weight, call.bias, call.eps))
