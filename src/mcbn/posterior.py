"""The approximate posterior q(omega): T joint draws of all batch-norm statistics, of training batches or a Gaussian."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from mcbn import batches
from mcbn.errors import MCBNError
from mcbn.gaussian import Gaussian, from_draws, stretch, stretch_positive


@dataclass(frozen=True, eq=False)
class Posterior:
    """T joint draws of the batch-norm statistics omega = {mu_B, sigma^2_B} (Teye et al. 2018, section 3.4).

    `mean[name]` and `var[name]` are (T, C), `var` biased; row t of every layer comes from one training batch of
    `batch_size` examples. A layer called twice in a forward pass has two entries, "name" and "name#2".

    Where `gaussian` is given, the rows are draws of that Gaussian, row t made from (`seed`, t) alone, and
    `sample(n)` makes any number of them without data.

    A share of the draws of a fit (`fit(..., draws=)`) knows by `numbers` which they are; `merge` puts shares together.
    """

    mean: Mapping[str, Tensor]
    var: Mapping[str, Tensor]
    batch_size: int  # M
    gaussian: Gaussian | None = None
    seed: int = 0  # of the draws
    fitted_batch_size: int | None = None  # M of the training batches, where `at_batch_size` chose another
    numbers: tuple[int, ...] | None = None  # t of each row, of a share of the draws; None: 0, ..., T - 1

    @classmethod
    def from_gaussian(cls, gaussian: Gaussian, n_samples: int, batch_size: int, *, seed: int = 0) -> "Posterior":
        """Draw T sets of statistics from a Gaussian over those of batches of M."""
        return cls(*gaussian.statistics(n_samples, seed), batch_size, gaussian, seed)

    @property
    def family(self) -> str:
        """How draws are modelled: "sample" (training batches themselves), "gaussian", "layerwise" or "diagonal"."""
        return self.gaussian.family if self.gaussian else "sample"

    @property
    def layers(self) -> tuple[str, ...]:
        """Names of the stochastic batch-norm calls, in the order the network makes them."""
        return tuple(self.mean)

    @property
    def n_samples(self) -> int:
        """T, the number of draws."""
        return len(next(iter(self.mean.values())))

    def draw(self, t: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the statistics of draw t: means and variances, each name -> (C,)."""
        return _each(self.mean, t), _each(self.var, t)

    @classmethod
    def merge(cls, parts: Iterable["Posterior"]) -> "Posterior":
        """Put disjoint shares of the draws of one fit together, in the order of t.

        Draw t depends on (seed, t) alone, so shares computed anywhere are those of one process, bit for bit, on equal
        machines. Refuses shares with a draw in common, or of another seed, batch size, family or set of layers.
        """
        shares = list(parts)
        _require_one_fit(shares)
        order = sorted((t, p, row) for p, part in enumerate(shares) for row, t in enumerate(part._numbers()))
        numbers = tuple(t for t, _, _ in order)
        twice = [t for t, after in pairwise(numbers) if t == after]
        if twice:
            raise MCBNError(f"draw {twice[0]} is in several of the parts; merge parts that share no draw")
        joined = [_join([getattr(p, kind) for p in shares], order) for kind in ("mean", "var")]
        whole = numbers == tuple(range(len(numbers)))
        return replace(shares[0], mean=joined[0], var=joined[1], numbers=None if whole else numbers)

    def select(self, numbers: Sequence[int]) -> "Posterior":
        """Take the draws with these t, each of which is among the draws here."""
        place = {t: row for row, t in enumerate(self._numbers())}
        rows = [place[t] for t in numbers]
        return replace(self, mean=_each(self.mean, rows), var=_each(self.var, rows), numbers=tuple(numbers))

    def _numbers(self) -> Sequence[int]:
        return range(self.n_samples) if self.numbers is None else self.numbers

    def sample(self, n_samples: int, *, seed: int = 0) -> "Posterior":
        """Draw n sets of statistics from the Gaussian; draw t depends on (seed, t) alone."""
        n_samples, seed = batches.require_int("n_samples", n_samples, 1), batches.require_int("seed", seed, 0)
        if self.gaussian is None:
            raise MCBNError(
                "a posterior of training batches has only the draws it was fitted with; fit more of them, or draw from "
                'posterior.as_gaussian("gaussian")'
            )
        mean, var = self.gaussian.statistics(n_samples, seed)
        return replace(self, mean=mean, var=var, seed=seed)

    def as_gaussian(self, family: str = "gaussian", *, seed: int = 0) -> "Posterior":
        """Model the drawn training batches as a Gaussian, "gaussian" or "layerwise", and draw T anew (`mcbn.gaussian`).

        `bayes.posterior = bayes.posterior.as_gaussian()` predicts with it: no data is needed.
        """
        seed = batches.require_int("seed", seed, 0)
        if self.gaussian is not None:
            raise MCBNError(f"this posterior is a Gaussian already, of family {self.family!r}; fit again for another")
        model = from_draws(self.mean, self.var, family)
        drawn = Posterior.from_gaussian(model, self.n_samples, self.batch_size, seed=seed)
        return replace(drawn, fitted_batch_size=self.fitted_batch_size)

    def at_batch_size(self, batch_size: int) -> "Posterior":
        """Rescale to batches of M' examples without data: the covariance of batch statistics goes with 1 / M.

        A Gaussian gets M / M' times its covariance; drawn statistics are stretched about their mean by sqrt(M / M'),
        standard deviations in their logarithm so that they stay positive. Back at M it is the same posterior.
        Differs from draws at M': the average statistics stay those the network was trained with, though
        E[sigma^2_B] = sigma^2 (1 - 1/M) moves with M, so that M' is a temperature and nothing else (ten Boston networks
        of the regression study, trained at M = 32: CRPS 1.69 rescaled to M' = 8, 2.15 drawn at 8); and M / M' leaves
        out that batches of M of N examples, drawn without replacement, vary less by 1 - (M - 1) / (N - 1).
        """
        if batch_size == self.batch_size:
            return self
        fitted = self.fitted_batch_size or self.batch_size
        M = batches.require_int("batch_size", batch_size, min(2, fitted))
        ratio = self.batch_size / M
        if self.gaussian is not None:
            scaled = self.gaussian.scaled(ratio)
            drawn = Posterior.from_gaussian(scaled, self.n_samples, M, seed=self.seed)
            return replace(drawn, fitted_batch_size=fitted)
        mean = {name: stretch(value, ratio**0.5) for name, value in self.mean.items()}
        std = {name: stretch_positive(value.sqrt(), ratio**0.5) for name, value in self.var.items()}
        var = {name: value.square() for name, value in std.items()}
        return replace(self, mean=mean, var=var, batch_size=M, fitted_batch_size=fitted)

    def to(self, device: torch.device | str | None, dtype: torch.dtype | None = None) -> "Posterior":
        """Move all statistics to a device; for a network of half precision they stay in float32."""
        if dtype in (torch.float16, torch.bfloat16):
            dtype = torch.float32
        moved = [{name: value.to(device, dtype) for name, value in part.items()} for part in (self.mean, self.var)]
        model = self.gaussian.to(device, dtype) if self.gaussian else None
        return replace(self, mean=moved[0], var=moved[1], gaussian=model)

    def __repr__(self) -> str:
        channels = sum(value.shape[1] for value in self.mean.values())
        return (
            f"Posterior({f'{self.family}, ' if self.gaussian else ''}n_samples={self.n_samples}, "
            f"batch_size={self.batch_size}, {len(self.layers)} layers, {channels} channels)"
        )


def _require_one_fit(parts: Sequence[Posterior]) -> None:
    """Refuse to merge what are not draws of training batches of one fit."""
    if not parts:
        raise MCBNError("there are no parts to merge; give at least one posterior")
    first = parts[0]
    for part in parts:
        if part.gaussian is not None:
            raise MCBNError(
                f"a part is a Gaussian, of family {part.family!r}; merge draws of training batches, then as_gaussian()"
            )
        if part.fitted_batch_size not in (None, part.batch_size):
            raise MCBNError("a part was rescaled by at_batch_size; merge the parts as they were drawn, then rescale")
        shapes = [{name: value.shape[1] for name, value in p.mean.items()} for p in (first, part)]
        if list(shapes[0].items()) != list(shapes[1].items()):
            raise MCBNError(f"the parts are of different layers (channels): {shapes[0]} and {shapes[1]}")
        for name in ("batch_size", "seed"):
            given = getattr(first, name), getattr(part, name)
            if given[0] != given[1]:
                raise MCBNError(f"the parts were drawn with {name}={given[0]} and {name}={given[1]}; fit them alike")


def _join(parts: Sequence[Mapping[str, Tensor]], order: Sequence[tuple[int, int, int]]) -> dict[str, Tensor]:
    """Put rows of several parts, (t, part, row) each, into one tensor (T, C) a layer."""
    starts = [0]
    for part in parts:
        starts.append(starts[-1] + len(next(iter(part.values()))))
    rows = torch.tensor([starts[p] + row for _, p, row in order], dtype=torch.long)
    joined = {name: torch.cat([part[name].to(value.device) for part in parts]) for name, value in parts[0].items()}
    return {name: value[rows.to(value.device)] for name, value in joined.items()}


def _each(part: Mapping[str, Tensor], index: Any) -> dict[str, Tensor]:
    return {name: value[index] for name, value in part.items()}
