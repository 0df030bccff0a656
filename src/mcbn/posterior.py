"""The approximate posterior q(omega): T joint draws of all batch-norm statistics, of training batches or a Gaussian.

A further family is a `mcbn.gaussian.Gaussian`. Fitted to draws, it is one more entry of `mcbn.gaussian.BLOCKS`;
fitted otherwise, as "diagonal" is, it has a name in `FAMILIES` and a module that `MCBN.fit` calls.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mcbn import batches
from mcbn.errors import MCBNError, require_choice
from mcbn.gaussian import BLOCKS, Gaussian, from_draws, join, split, stretch, stretch_positive
from mcbn.private_torch import version_of

FAMILIES = ("sample", *BLOCKS, "diagonal")


@dataclass(frozen=True, eq=False)
class Posterior:
    """T joint draws of the batch-norm statistics omega = {mu_B, sigma^2_B} (Teye et al. 2018, section 3.4).

    Row t of every layer comes from one training batch of `batch_size` examples, or is drawn from `gaussian` by
    (`seed`, t) alone. A layer called twice in a forward pass has two entries, "name" and "name#2". A change in place
    holds from the next call on; one through `.data` or NumPy, which PyTorch does not count, is found at the latest on
    the 2nd, 4th, 8th, ... call of a shape, so put a new posterior in its place.

    >>> posterior = Posterior({"bn": torch.zeros(5, 3)}, {"bn": torch.ones(5, 3)}, batch_size=16)
    >>> posterior
    Posterior(n_samples=5, batch_size=16, 1 layers, 3 channels)
    >>> mean, var = posterior.draw(2)
    >>> mean["bn"].shape
    torch.Size([3])
    """

    mean: Mapping[str, Tensor]  # mu_B of every call, (T, C) each
    var: Mapping[str, Tensor]  # sigma^2_B of every call, biased, (T, C) each
    batch_size: int  # M
    gaussian: Gaussian | None = None  # what the draws are drawn from; None: from training batches
    seed: int = 0  # of the draws
    fitted_batch_size: int | None = None  # M of the training batches, where `at_batch_size` chose another
    numbers: tuple[int, ...] | None = None  # t of each row, of a share of the draws; None: 0, ..., T - 1

    @property
    def family(self) -> str:
        """How draws are modelled: "sample" (training batches themselves), "gaussian", "layerwise" or "diagonal"."""
        return self.gaussian.family if self.gaussian else "sample"

    @property
    def layers(self) -> tuple[str, ...]:
        """Names of the stochastic batch-norm calls, in the order the network makes them."""
        return tuple(self.mean)

    @property
    def channels(self) -> dict[str, int]:
        """C of every stochastic batch-norm call."""
        return {name: value.shape[1] for name, value in self.mean.items()}

    @property
    def n_samples(self) -> int:
        """T, the number of draws."""
        return len(next(iter(self.mean.values()), ()))

    def version(self) -> tuple[tuple[int, int], ...]:
        """Identify the statistics as they stand: which tensors, and how often each was changed in place."""
        moments = (self.gaussian.location, self.gaussian.diagonal, *self.gaussian.factors) if self.gaussian else ()
        return tuple((id(t), version_of(t)) for t in (*self.mean.values(), *self.var.values(), *moments))

    def require_valid(self, what: str) -> "Posterior":
        """Return itself, if every draw has a finite mean and a finite variance, not negative; `what` is its name."""
        shapes = [{name: tuple(value.shape) for name, value in kind.items()} for kind in (self.mean, self.var)]
        if shapes[0] != shapes[1] or {s[:-1] for s in shapes[0].values()} != {(self.n_samples,)} or not self.n_samples:
            raise MCBNError(f"{what} must have mean and var (T, C) of every layer; got {shapes[0]} and {shapes[1]}")
        for name in self.mean:
            if not bool(torch.isfinite(self.mean[name]).all() and torch.isfinite(self.var[name]).all()):
                raise MCBNError(f"{what} has statistics of layer {name!r} that are not finite (NaN or infinity)")
            if bool((self.var[name] < 0).any()):
                raise MCBNError(f"{what} has a negative variance, {float(self.var[name].min()):g}, of layer {name!r}")
        return self

    def draw(self, t: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the statistics of draw t: means and variances, each name -> (C,)."""
        return {name: v[t] for name, v in self.mean.items()}, {name: v[t] for name, v in self.var.items()}

    def rows(self, index: Any) -> "Posterior":
        """Keep the draws in these rows, a slice or a list, as a posterior of nothing but draws."""
        return Posterior(*self.draw(index), self.batch_size)

    def select(self, numbers: Sequence[int]) -> "Posterior":
        """Take the draws with these t, each of which is among the draws here."""
        row_of = {t: row for row, t in enumerate(self._numbers())}
        if lacking := [t for t in numbers if t not in row_of]:
            raise MCBNError(f"draws {lacking[:8]} are not among these {self.n_samples}: {list(row_of)[:8]}, ...")
        chosen = self.rows([row_of[t] for t in numbers])
        return replace(self, mean=chosen.mean, var=chosen.var, numbers=tuple(numbers))

    def _numbers(self) -> Sequence[int]:
        return range(self.n_samples) if self.numbers is None else self.numbers

    @classmethod
    def merge(cls, parts: Iterable["Posterior"]) -> "Posterior":
        """Put disjoint shares of the draws of one fit, given in any order, together in the order of t.

        Draw t depends on (seed, t) alone, so shares computed anywhere are those of one process, bit for bit, on equal
        machines. Refuses shares with a draw in common, or of another seed, batch size, family or set of layers.

        >>> shares = [bayes.posterior.select(range(start, 20, 2)) for start in (0, 1)]
        >>> torch.equal(Posterior.merge(shares).mean["1"], bayes.posterior.mean["1"])
        True
        """
        shares = list(parts)
        _require_one_fit(shares)
        numbers = [t for share in shares for t in share._numbers()]
        ascending, order = torch.tensor(numbers).sort()  # of the rows of all shares, laid end to end
        if twice := ascending[1:][ascending.diff() == 0].tolist():
            raise MCBNError(f"draw {twice[0]} is in several of the parts; merge parts that share no draw")
        index = order.to(next(iter(shares[0].mean.values())).device)
        kinds = [[getattr(share, kind) for share in shares] for kind in ("mean", "var")]
        mean, var = ({n: torch.cat([s[n].to(index.device) for s in kind])[index] for n in kind[0]} for kind in kinds)
        whole = sorted(numbers) == list(range(len(numbers)))
        return replace(shares[0], mean=mean, var=var, numbers=None if whole else tuple(ascending.tolist()))

    def sample(self, n_samples: int, *, seed: int = 0) -> "Posterior":
        """Draw n sets of statistics, any number, from the Gaussian; draw t depends on (seed, t) alone."""
        n_samples, seed = batches.require_int("n_samples", n_samples, 1), batches.require_int("seed", seed, 0)
        if self.gaussian is None:
            raise MCBNError("draws of training batches are as many as were fitted; fit more, or take as_gaussian()")
        return self._drawn_from(self.gaussian, n_samples, seed=seed)

    def _drawn_from(self, gaussian: Gaussian, n_samples: int | None = None, **changes: Any) -> "Posterior":
        mean, var = gaussian.statistics(n_samples or self.n_samples, changes.get("seed", self.seed))
        return replace(self, mean=mean, var=var, gaussian=gaussian, numbers=None, **changes)

    def as_gaussian(self, family: str = "gaussian", *, seed: int = 0) -> "Posterior":
        """Model the drawn training batches as a Gaussian (`mcbn.gaussian`) and draw T anew.

        `bayes.posterior = bayes.posterior.as_gaussian()` predicts with it: no data is needed. The family is "gaussian",
        with the covariance of all statistics, or "layerwise", of those of each layer; seed is that of the new draws.

        >>> bayes.posterior.as_gaussian().sample(1000)
        Posterior(gaussian, n_samples=1000, batch_size=16, 1 layers, 8 channels)
        """
        require_choice("posterior", family, tuple(BLOCKS))
        seed = batches.require_int("seed", seed, 0)
        if self.gaussian is not None:
            raise MCBNError(f"this posterior is a Gaussian already, of family {self.family!r}; fit again for another")
        return self._drawn_from(from_draws(self.mean, self.var, family), seed=seed)

    def at_batch_size(self, batch_size: int) -> "Posterior":
        """Rescale to batches of M' >= 2 examples without data: the covariance of batch statistics goes with 1 / M.

        A Gaussian gets M / M' times its covariance; drawn statistics are stretched about their mean by sqrt(M / M'),
        standard deviations in their logarithm so that they stay positive. Back at M it is the same posterior.
        Differs from draws at M': the average statistics stay those the network was trained with, so that M' is a
        temperature and nothing else (ten Boston networks trained at M = 32: CRPS 1.69 rescaled to M' = 8, 2.15 drawn
        at 8); and batches of M of N examples vary less by 1 - (M - 1) / (N - 1), which M / M' leaves out.

        >>> torch.allclose(bayes.posterior.at_batch_size(4).mean["1"].std(0), 2 * bayes.posterior.mean["1"].std(0))
        True
        """
        if batch_size == self.batch_size:
            return self
        fitted = self.fitted_batch_size or self.batch_size
        M = batches.require_int("batch_size", batch_size, min(2, fitted))
        ratio = self.batch_size / M
        if self.gaussian is not None:
            return self._drawn_from(self.gaussian.scaled(ratio), batch_size=M, fitted_batch_size=fitted)
        mean = {name: stretch(value, ratio**0.5) for name, value in self.mean.items()}
        var = {name: stretch_positive(value.sqrt(), ratio**0.5).square() for name, value in self.var.items()}
        return replace(self, mean=mean, var=var, batch_size=M, fitted_batch_size=fitted)

    def moved(self, shift: Tensor, scale: Tensor) -> "Posterior":
        """Move draws, or their Gaussian: s' = shift + scale s, (P,) each; a call's means, then standard deviations."""
        if self.gaussian is not None:
            like = self.gaussian.location
            return self._drawn_from(self.gaussian.moved(shift.to(like), scale.to(like)))
        statistics = join(self.mean, self.var)
        rows = split(shift.to(statistics) + scale.to(statistics) * statistics, self.channels)
        mean, var = {n: m for n, (m, _) in rows.items()}, {n: std.square() for n, (_, std) in rows.items()}
        return replace(self, mean=mean, var=var)

    def to(self, device: torch.device | str | None, dtype: torch.dtype | None = None) -> "Posterior":
        """Move all statistics to a device; for a network of half precision they stay in float32."""
        if dtype in (torch.float16, torch.bfloat16):
            dtype = torch.float32
        mean, var = ({name: v.to(device, dtype) for name, v in kind.items()} for kind in (self.mean, self.var))
        return replace(self, mean=mean, var=var, gaussian=self.gaussian.to(device, dtype) if self.gaussian else None)

    def __repr__(self) -> str:
        sizes = f"{len(self.layers)} layers, {sum(self.channels.values())} channels"
        family = f"{self.family}, " if self.gaussian else ""
        return f"Posterior({family}n_samples={self.n_samples}, batch_size={self.batch_size}, {sizes})"


def _require_one_fit(shares: Sequence[Posterior]) -> None:
    if not shares:
        raise MCBNError("there are no parts to merge; give at least one posterior")
    first = shares[0]
    for share in shares:
        if share.gaussian is not None:
            raise MCBNError(f"a part is of family {share.family!r}; merge draws of batches, then as_gaussian()")
        if share.fitted_batch_size not in (None, share.batch_size):
            raise MCBNError("a part was rescaled by at_batch_size; merge the parts as they were drawn, then rescale")
        if list(first.channels.items()) != list(share.channels.items()):
            raise MCBNError(f"the parts are of different layers (channels): {first.channels} and {share.channels}")
        for name in ("batch_size", "seed"):
            if (one := getattr(first, name)) != (other := getattr(share, name)):
                raise MCBNError(f"the parts were drawn with {name}={one} and {name}={other}; fit them alike")
