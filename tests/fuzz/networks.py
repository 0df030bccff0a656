"""Random networks and random sequences of calls, against `mcbn.algorithm`: Algorithm 1 as printed."""

import random
import warnings
from collections.abc import Iterator
from contextlib import suppress
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import mcbn
from drawn import rows_of_draw
from fuzz.architectures import Made, make
from mcbn import algorithm
from mcbn.engine import constants
from mcbn.engine.agree import TF32_DIGIT, TIMES, is_tf32
from untouched import generators

T, M, EXAMPLES = 5, 8, 40
DTYPES = (torch.float32, torch.float32, torch.float64, torch.float64, torch.bfloat16)
OWN_ERRORS = 8.0  # a difference may be so many times what rounding does to the network's own pass


def check(seed: int, device: str = "cpu") -> str:
    """Fit and call the network of a seed; return "right", or "refused: ..."; a difference is an AssertionError."""
    r, made = random.Random(seed + 1), make(seed)
    dtype = r.choice(DTYPES)
    generator = torch.Generator().manual_seed(seed)
    data = torch.randn(EXAMPLES, *made.shape, generator=generator).to(device, dtype)
    network, exact = as_deployed(made.network, device, dtype), make(seed).network.to(device)
    before, state = contents(network), generators()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        oracle = Oracle(as_deployed(make(seed).network, device, dtype), exact, made.output)
        bayes = mcbn.MCBN(network, "regression", output=made.output)
        try:
            bayes.fit(data, n_samples=T, batch_size=M, seed=seed)
        except mcbn.MCBNError as error:
            return f"refused: {error}"
        oracle.compare_posterior(bayes, data, seed)
        shapes = [r.choice([1, 2, 3, 5, 8, 17, 33]) for _ in range(2)]  # so that plans are used again
        with mock.patch.object(constants, "DRAWS_BEFORE_PLAN", r.choice([0, 0, 0, constants.DRAWS_BEFORE_PLAN])):
            for call in range(r.randint(3, 6)):
                try:
                    oracle.compare_call(bayes, inputs(r, made, generator, data, r.choice(shapes)), r, call)
                except mcbn.MCBNError as error:
                    if "another path" not in str(error):  # as some networks do, by the values of their inputs
                        raise
    assert all(torch.equal(a, b) for a, b in zip(contents(network), before, strict=True)), "the network was changed"
    assert generators() == state, "the global generators were moved"
    return "right"


def inputs(r: random.Random, made: Made, generator: torch.Generator, like: Tensor, N: int) -> Tensor:
    """Make N inputs of some size and layout."""
    x = torch.randn(N, *made.shape, generator=generator).to(like) * r.choice([1, 1, 1, 3]) + r.choice([0, 0, 0, 1, -1])
    layout = r.choice(["plain", "plain", "last", "sliced", "turned"])
    if layout == "last" and x.ndim == 4:
        return x.contiguous(memory_format=torch.channels_last)
    if layout == "sliced":
        return torch.cat([x, x])[::2] if N > 1 else x
    return x.transpose(0, 1).contiguous().transpose(0, 1) if layout == "turned" else x


def as_deployed(network: nn.Module, device: str, dtype: torch.dtype) -> nn.Module:
    """Move a network; in half precision batch norm keeps its own numbers in single, as everybody has it."""
    for module in network.to(device, dtype).modules():
        if dtype is torch.bfloat16 and isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.float()
    return network


def contents(network: nn.Module) -> list[Tensor]:
    """Copy weights, buffers and modes."""
    modes = torch.tensor([module.training for module in network.modules()])
    return [modes, *(t.detach().clone() for t in (*network.parameters(), *network.buffers()))]


class Oracle:
    """Algorithm 1 by a network and by the same one in double precision: what is right, and what rounding may do."""

    def __init__(self, network: nn.Module, exact: nn.Module, output: Any) -> None:
        self.own, self.exact = (Picked(net, output) for net in (network, exact))

    def compare_posterior(self, bayes: Any, data: Tensor, seed: int) -> None:
        """Compare the statistics of every draw with those of its batch."""
        dtype = data.dtype if data.is_cuda else None  # a GPU adds half precision up in more than one order
        for t in range(T):
            batch = data[torch.as_tensor(rows_of_draw(len(data), M, seed, t), device=data.device)]
            own, exact = (_seen(algorithm.record(net, x)) for net, x in self._both(batch))
            mean, var = bayes.posterior.draw(t)
            for name, of_call, right in zip(mean, own, exact, strict=True):
                for kind, found, expected, truth in zip(
                    ("mean", "var"), (mean[name], var[name]), of_call, right, strict=True
                ):
                    scale = truth.abs().max() + right[1].abs().max().sqrt()
                    compare(f"{kind} of {name!r}, draw {t}", found, expected, truth, scale, dtype)

    def compare_call(self, bayes: Any, x: Tensor, r: random.Random, number: int) -> None:
        """Make one call of some kind and compare its samples or moments."""
        kept, options = (
            x.clone(),
            {"n_samples": r.choice([None, None, 1, 3]), "chunk_size": r.choice([None, None, 1, 2])},
        )
        count, kind = options["n_samples"] or T, r.choice(["sample"] * 4 + ["predict"] * 3 + ["linear", "plain"])
        what = f"call {number}, {kind}, {tuple(x.shape)}, strides {x.stride()}, {options}"
        draws = [[(mean[n], var[n]) for n in mean] for mean, var in map(bayes.posterior.draw, range(count))]
        with torch.no_grad():
            if kind == "plain" and len(x) > 1:  # some have no running statistics
                compare(what, bayes.plain(x), self.own(x.clone()), self.exact(x.double()))
            elif kind == "linear" and count > 1:
                with suppress(mcbn.MCBNError):  # autograd refuses some changes in place
                    one, other = (bayes.predict(x, method="linear", n_samples=count).epistemic for _ in range(2))
                    compare(what, one, other, other, dtype=x.dtype)
            else:
                own, exact = (self._samples(net, draws, y) for net, y in self._both(x))
                found = self._call(bayes, kind, x, options)
                for one, by_own, by_exact in zip(found, reduced(kind, own), reduced(kind, exact), strict=True):
                    compare(what, one, by_own, by_exact, exact.abs().max(), x.dtype)
        assert torch.equal(x, kept), f"{what}: the inputs were changed"

    def _call(self, bayes: Any, kind: str, x: Tensor, options: dict[str, Any]) -> tuple[Tensor, ...]:
        if kind != "predict":
            return (bayes.sample(x, **options),)
        pred = bayes.predict(x, **options)
        return pred.mean, pred.epistemic.sqrt()

    def _samples(self, network: nn.Module, draws: list[Any], x: Tensor) -> Tensor:
        dtype = torch.promote_types(x.dtype, torch.float32)
        moved = [[(mean.to(dtype), var.to(dtype)) for mean, var in draw] for draw in draws]
        return torch.stack([algorithm.replay(network, draw, x.clone()) for draw in moved])

    def _both(self, x: Tensor) -> Iterator[tuple[nn.Module, Tensor]]:
        return iter([(self.own, x.clone()), (self.exact, x.double())])


class Picked(nn.Module):
    """A network with the output that counts."""

    def __init__(self, network: nn.Module, output: Any) -> None:
        super().__init__()
        self.network, self.output = network, output

    def forward(self, x: Tensor) -> Tensor:
        out = self.network(x)
        return out if self.output is None else out[self.output]


def _seen(draw: algorithm.Draw) -> list[tuple[Tensor, Tensor]]:
    return [statistics for statistics in draw if statistics is not None]


def reduced(kind: str, samples: Tensor) -> tuple[Tensor, ...]:
    """Return samples themselves, or their mean and standard deviation."""
    values = samples.to(torch.promote_types(samples.dtype, torch.float32))
    return (samples,) if kind != "predict" else (values.mean(0), values.std(0, correction=0))


def compare(
    what: str, found: Tensor, own: Tensor, exact: Tensor, scale: Tensor | None = None, dtype: torch.dtype | None = None
) -> None:
    """Require what was found to be what the network's own code gives, up to what rounding does to that."""
    assert found.shape == own.shape, f"{what}: shape {tuple(found.shape)} instead of {tuple(own.shape)}"
    if not bool(torch.isfinite(own).all()):
        return
    scale = exact.abs().max() if scale is None else scale
    digits = torch.finfo(dtype or own.dtype).eps
    rounding = digits * scale.double() * (1000 if digits < 1e-5 else 2)
    if is_tf32(own) and (dtype or own.dtype) == torch.float32:  # where its own code does not round so, a plan may
        rounding = TIMES * TF32_DIGIT * scale.double()
    error = (own.double() - exact.double()).abs().max()
    difference = (found.double() - own.double()).abs().max()
    limit = OWN_ERRORS * error + rounding
    assert difference <= limit, (
        f"{what}: {float(difference):.2e} apart, rounding is {float(error):.2e} of {float(scale):.2e}"
    )
