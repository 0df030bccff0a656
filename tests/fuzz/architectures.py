"""Random networks: a seed decides the architecture, its weights and the shape of its inputs."""

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NORMS = {0: nn.BatchNorm1d, 1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
CONVS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
TRANSPOSED = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}


class Made(NamedTuple):
    """A network that was trained a little, one example's shape, and which output counts."""

    network: nn.Module
    shape: tuple[int, ...]
    output: Any


class Block(nn.Module):
    """Modules by number, and a function of them and the input."""

    def __init__(self, run: Callable[..., Tensor], *parts: nn.Module) -> None:
        super().__init__()
        self.parts, self.run = nn.ModuleList(parts), run

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x, *self.parts)


class Tapped(nn.Module):
    """Reads what a hook on one of its modules saw."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.seen = inner, {}
        seen = self.seen
        inner.register_forward_hook(lambda module, args, out: seen.__setitem__("h", out))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * 0.5 + self.seen["h"]


class Outputs(nn.Module):
    """Hands out several outputs."""

    def __init__(self, body: nn.Module, kind: str) -> None:
        super().__init__()
        self.body, self.kind = body, kind

    def forward(self, x: Tensor) -> Any:
        out = self.body(x)
        return {"features": x, "out": out} if self.kind == "dict" else (x, out)


def norm(r: random.Random, C: int, dims: int) -> nn.Module:
    options = {"eps": r.choice([1e-5, 1e-3]), "affine": r.random() < 0.85, "momentum": None}
    return NORMS[dims](C, track_running_stats=r.random() < 0.9, **options)


def activation(r: random.Random) -> nn.Module:
    kinds = (nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.LeakyReLU, nn.ELU, nn.Hardswish, nn.Softplus, nn.Identity)
    kind = r.choice(kinds)
    return kind(inplace=r.random() < 0.5) if kind in (nn.ReLU, nn.SiLU, nn.LeakyReLU, nn.ELU) else kind()


def layer(r: random.Random, C: int, D: int, dims: int) -> nn.Module:
    """Map C channels to D: a linear layer, or a convolution of some kind that keeps the size of images."""
    bias = r.random() < 0.5
    if dims == 0:
        return nn.Linear(C, D, bias=bias)
    groups = r.choice([g for g in (1, 1, 2, 4, C) if C % g == 0 and D % g == 0])
    if r.random() < 0.2:
        return TRANSPOSED[dims](C, D, 3, padding=1, groups=groups, bias=bias)
    size, dilation = r.choice([(1, 1), (3, 1), (3, 2), (5, 1)])
    mode = r.choice(["zeros", "zeros", "reflect", "circular"]) if dims < 3 and dilation == 1 and size < 5 else "zeros"
    options = {"padding": dilation * (size // 2), "dilation": dilation, "groups": groups, "padding_mode": mode}
    return CONVS[dims](C, D, size, bias=bias, **options)


def shuffled(x: Tensor) -> Tensor:
    N, C = x.shape[:2]
    return x.reshape(N, 2, C // 2, *x.shape[2:]).transpose(1, 2).reshape(x.shape)


def halves(x: Tensor, one: nn.Module) -> Tensor:
    a, b = x.chunk(2, 1)
    return torch.cat([one(a), b], 1)


def in_place(x: Tensor, one: nn.Module) -> Tensor:
    h = one(x)
    h += 0.5 * x
    h[:, :1].mul_(2)
    return h.clamp_(-3, 3)


def gated(x: Tensor, one: nn.Module) -> Tensor:
    axes = tuple(range(2, x.ndim))
    return x * torch.sigmoid(one(x.mean(axes, keepdim=True) if axes else x))


def strided(x: Tensor) -> Tensor:
    return x.transpose(0, 1).contiguous().transpose(0, 1).flip(1) + x


def neighbours(x: Tensor, one: nn.Module) -> Tensor:
    """Send messages along the edges of a ring of channels, as graph networks do."""
    edges = torch.arange(x.shape[1], device=x.device)
    message = one(x)[:, edges.roll(1)]
    return torch.zeros_like(x).index_add(1, edges, message) + x


def attended(x: Tensor, one: nn.Module) -> Tensor:
    flat = x.flatten(2) if x.ndim > 2 else x.unsqueeze(2)  # (N, C, P)
    tokens = flat.transpose(1, 2)
    return one(tokens, tokens, tokens, need_weights=False)[0].transpose(1, 2).reshape(x.shape) + x


def recurrent(x: Tensor, one: nn.Module) -> Tensor:
    flat = x.flatten(2) if x.ndim > 2 else x.unsqueeze(2)
    return one(flat.transpose(1, 2))[0].transpose(1, 2).reshape(x.shape)


def scaled_dot(x: Tensor, q: nn.Module, k: nn.Module) -> Tensor:
    a, b, v = (h.flatten(1).unsqueeze(1) for h in (q(x), k(x), x))
    return F.scaled_dot_product_attention(a, b, v).reshape(x.shape) + x


def branched(x: Tensor, one: nn.Module, other: nn.Module) -> Tensor:
    return one(x) if bool(x.float().mean() > 0) else other(x)


def scaled_by_value(x: Tensor, one: nn.Module) -> Tensor:
    return one(x) * (1 + 0.1 * float(x.float().std(correction=0)))


def block(r: random.Random, C: int, dims: int) -> nn.Module:
    """Choose a block that keeps the shape of its input."""

    def inner() -> nn.Module:
        return nn.Sequential(layer(r, C, C, dims), norm(r, C, dims), activation(r))

    def alone() -> nn.Module:
        return layer(r, C, C, dims)

    choices: list[Callable[[], nn.Module]] = [
        inner,
        inner,
        lambda: Block(lambda x, f: x + f(x), inner()),
        lambda: Block(lambda x, f: f(f(x)), inner()),  # shared
        lambda: Block(lambda x, f, g: g(torch.cat([f(x), x], 1)), inner(), layer(r, 2 * C, C, dims)),
        lambda: Block(shuffled),
        lambda: Block(halves, nn.Sequential(layer(r, C // 2, C // 2, dims), norm(r, C // 2, dims))),
        lambda: Block(in_place, inner()),
        lambda: Block(gated, CONVS[dims](C, C, 1) if dims else nn.Linear(C, C)),
        lambda: Block(strided),
        lambda: Block(neighbours, alone()),
        lambda: Block(attended, nn.MultiheadAttention(C, 2, batch_first=True)),
        lambda: Block(recurrent, r.choice([nn.GRU, nn.LSTM])(C, C, batch_first=True)),
        lambda: Block(scaled_dot, alone(), alone()),
        lambda: Block(lambda x, f: f(x.movedim(1, -1)).movedim(-1, 1), nn.LayerNorm(C)),
        lambda: Block(lambda x, f, g: f(x).relu_() - torch.where(x > 0, g(x), x), alone(), inner()),
        lambda: Block(lambda x, f: f(x).masked_fill(x < -1, 0.0), inner()),
        lambda: nn.Sequential(nn.Dropout(0.3), nn.GroupNorm(2, C)),
        lambda: Tapped(inner()),
        lambda: Block(branched, inner(), inner()) if r.random() < 0.3 else inner(),
        lambda: Block(scaled_by_value, inner()) if r.random() < 0.3 else inner(),
    ]
    return r.choice(choices)()


def make(seed: int) -> Made:
    """Build the network of a seed, in double precision, and let it see some batches in train mode."""
    r = random.Random(seed)
    dims = r.choice([0, 0, 1, 2, 2, 2, 3])
    C, side = r.choice([4, 8]), r.choice([5, 6, 8]) if dims < 3 else 4
    first, D = r.choice([1, 3, 4]), r.choice([1, 2, 5])
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        body = [layer(r, first, C, dims), norm(r, C, dims), activation(r)]
        for _ in range(r.randint(1, 5)):
            body.append(block(r, C, dims))
            if dims == 2 and r.random() < 0.2:
                body.append(r.choice([nn.MaxPool2d(2, 1), nn.AvgPool2d(3, 1, 1), nn.Upsample(scale_factor=2)]))
        head = [nn.AdaptiveAvgPool1d(1), nn.AdaptiveAvgPool2d(1), nn.AdaptiveAvgPool3d(1)][dims - 1 : dims]
        network: nn.Module = nn.Sequential(*body, *head, nn.Flatten(1), nn.Linear(C, D)).double()
        shape = (first, *(side,) * dims)
        with torch.no_grad():
            for _ in range(3):
                network(torch.randn(16, *shape, dtype=torch.float64))
    kind = r.choice(["tensor"] * 6 + ["dict", "tuple"])
    network = network.eval() if kind == "tensor" else Outputs(network, kind).eval()
    return Made(network, shape, {"tensor": None, "dict": "out", "tuple": 1}[kind])
