"""Everything of the user's that a call must leave bit-identical."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn


def fingerprint(model: nn.Module) -> list[Any]:
    """Tensors, modes, hooks, gradients and flags of a network."""
    tensors = [(n, t.data_ptr(), t.detach().numpy().tobytes(), t.requires_grad) for n, t in model.named_parameters()]
    tensors += [(n, t.data_ptr(), t.detach().numpy().tobytes(), False) for n, t in model.named_buffers()]
    modules = []
    for name, module in model.named_modules():
        hooks = [list(h.values()) for h in (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks)]
        modules.append((name, id(module), module.training, hooks, sorted(map(str, vars(module)))))
    grads = [p.grad is None for p in model.parameters()]
    return [tensors, modules, grads]


def generators() -> tuple[Any, ...]:
    """State of Python's, NumPy's and torch's global generators."""
    name, keys, *rest = np.random.get_state()
    return random.getstate(), name, keys.tobytes(), rest, torch.get_rng_state().numpy().tobytes()


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    before, state = fingerprint(model), generators()
    yield
    assert fingerprint(model) == before
    assert generators() == state
