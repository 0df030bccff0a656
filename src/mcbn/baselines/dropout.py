"""MC dropout (Gal and Ghahramani 2016): T passes with dropout on, everything else as in evaluation."""

import math
from collections.abc import Iterator
from typing import Any, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from mcbn import batches, noise
from mcbn.baselines.predictor import Predictor
from mcbn.errors import MCBNError
from mcbn.network import Output, unwrap
from mcbn.private_torch import AnyDropout

ALPHA = 1.7580993408473766  # SELU's scale * alpha: what a dropped unit is set to, negated (Klambauer et al. 2017)
ELEMENTS = {F.dropout, torch.dropout, torch.dropout_, F.alpha_dropout, torch.alpha_dropout, torch.alpha_dropout_}
CHANNELS = {F.dropout1d, F.dropout2d, F.dropout3d, torch.feature_dropout, torch.feature_dropout_}
CHANNELS |= {F.feature_alpha_dropout, torch.feature_alpha_dropout, torch.feature_alpha_dropout_}
ALPHAS = {f for f in ELEMENTS | CHANNELS if "alpha" in f.__name__}


class MCDropout(Predictor):
    """MC dropout of a trained network: `predict` gives moments over T thinned networks.

    A draw is one network: its masks hold for every input, so draw t is a function of x that depends on (seed, t)
    alone. For a single input this is the distribution of the usual pass, which draws new masks for each input.
    Dropout of modules and of functions (`F.dropout(x, p, self.training)`) is on; batch norm and the rest are as in
    evaluation. What a network does only under `if self.training:` stays off. Inputs lie on the first axis throughout.

    Args:
        model: any module with dropout; it is copied at construction and at `fit`, never modified.
        task: "regression", "classification" (one label an input, or one a pixel) or "multilabel".
        output, inputs, outputs: as for `mcbn.MCBN`.

    >>> network = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.1), nn.Linear(8, 1)).eval()
    >>> MCDropout(network, "regression").fit(n_samples=20, seed=0).sample(x).shape
    torch.Size([20, 64, 1])
    """

    def __init__(self, model: nn.Module, task: str, *, output: Output = None, **options: Any) -> None:
        super().__init__(task, **options)
        if not isinstance(model, nn.Module):
            raise MCBNError(f"model must be a torch.nn.Module, got {type(model).__name__}")
        modules = dict(unwrap(model).named_modules())
        for name, module in modules.items():
            fused = isinstance(module, nn.RNNBase) and module.num_layers > 1
            if (fused or isinstance(module, nn.MultiheadAttention)) and float(module.dropout) > 0:
                fault = f"layer {name!r} ({type(module).__name__}) drops units inside one fused call"
                cure = f"set its dropout (now {module.dropout}) to 0 to keep that part deterministic"
                raise MCBNError(f"{fault}, which cannot be thinned; {cure}")
        known = all(type(m).__module__.startswith("torch.nn.") for m in modules.values())  # calls no functions
        if known and not any(isinstance(m, AnyDropout) and m.p > 0 for m in modules.values()):
            raise MCBNError(_none_found(unwrap(model)))
        self.model, self.output = model, output
        self.fit()

    def fit(self, data: Any = None, *, n_samples: int = 100, seed: int = 0) -> Self:
        """Copy the network as it is now and set T and the seed; dropout needs no data, so `data` is not looked at."""
        self.n_samples = batches.require_int("n_samples", n_samples, 1)
        self.seed = batches.require_int("seed", seed, 0)
        noise.drop_calibration(self)
        self.network = self.copy_network(self.model, self.output)
        self.network.proven = self.network.draws_random = True
        return self

    def draws(self, inputs: Any, n_samples: int) -> Iterator[Tensor]:
        """Yield the output of each thinned network, (1, N, ...)."""
        for t in range(n_samples):
            state = int(np.random.SeedSequence([self.seed, t]).generate_state(1, np.uint64)[0])
            with self.network.undisturbed(state), SharedMasks(state) as mode:
                output = self.network.run_copy(inputs)
            if mode.calls == 0:
                raise MCBNError(_none_found(self.network.module))
            yield output.unsqueeze(0)


class SharedMasks(TorchFunctionMode):
    """Turn on every dropout call made while active, with one mask for all inputs.

    out_i = m x_i / (1 - p), m ~ Bernoulli(1 - p) of the shape of one input (one value a channel for Dropout1d, 2d,
    3d); alpha dropout: out_i = a (m x_i - ALPHA (1 - m)) + b, which keeps mean 0 and variance 1. Dropout of a
    parameter (DropConnect) has a mask of the parameter's full shape.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.generator, self.calls = torch.Generator().manual_seed(seed), 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in ELEMENTS or func in CHANNELS:
            return self._drop(func, *args, **kwargs)
        dropout_p = args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0)
        if func is F.scaled_dot_product_attention and dropout_p > 0:
            raise MCBNError("attention with dropout_p > 0 cannot be thinned; set dropout_p to 0 there")
        return func(*args, **kwargs)

    def _drop(self, func: Any, input: Tensor, p: float = 0.5, *_: Any, **options: Any) -> Tensor:
        """Drop as any of the functions would: the input, then the rate, come first in all of them."""
        if not 0 <= p <= 1:
            raise MCBNError(f"a dropout rate must lie between 0 and 1, got {p!r}")
        if p == 0:
            return input
        self.calls += 1
        shape = list(input.shape) if isinstance(input, nn.Parameter) else [1, *input.shape[1:]]
        if func in CHANNELS:
            shape[2:] = [1] * (len(shape) - 2)
        keep = (torch.rand(shape, generator=self.generator, device="cpu") >= p).to(input)  # (1, ...)
        if func not in ALPHAS:
            return input * (keep / (1 - p) if p < 1 else keep)
        a = 1 / math.sqrt((ALPHA**2 * p + 1) * (1 - p)) if p < 1 else 0.0
        return a * (input * keep - ALPHA * (1 - keep)) + a * ALPHA * p


def _none_found(model: nn.Module) -> str:
    fault = "has no dropout that acts in evaluation: no dropout layer or function with p > 0 is called"
    return f"{type(model).__name__} {fault}; train it with dropout, or use mcbn.MCBN where it has batch norm"
