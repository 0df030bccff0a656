"""Scale and shift of every draw, shortcut and rectifier in one kernel, against operations of PyTorch."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drawn import fit, program_of
from mcbn.engine import kernels, plan as plans
from mcbn.engine.fuse import fuse_kernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF = (torch.float16, torch.bfloat16)


def expected(x: Tensor, scale: Tensor, shift: Tensor, added: Tensor | None, slope: float) -> Tensor:
    """Round where operations of their own would: a product and a sum of float32 are exact in double precision."""
    scale, shift = (table.double()[:, None, None] for table in (scale, shift))
    y = (x.double() * scale + shift).float().to(x.dtype)
    y = y if added is None else y + added
    return F.leaky_relu(y, slope) if slope else torch.relu(y)


def images(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(DEVICE, dtype)


@pytest.mark.slow
@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
@pytest.mark.parametrize(("shape", "slope"), [((2, 16, 5, 7), 0.0), ((1, 8, 3, 2), 0.1), ((3, 24, 1, 1), 1.0)])
@pytest.mark.parametrize("shared", [(), ("x",), ("added",), ("x", "added")])
def test_draws_equal_operations_of_their_own_to_the_last_bit(dtype, shape, slope, shared) -> None:
    x, added = (images(3, *shape, dtype=dtype, seed=seed) for seed in range(2))
    scale, shift = images(3, 2 * shape[1], dtype=torch.float32, seed=2).chunk(2, 1)  # columns of one table
    x[0, 0, :4, 0, 0] = torch.tensor([torch.nan, torch.inf, -torch.inf, 6e4])
    axes = {name: None if name in shared else 0 for name in ("x", "added")}
    x, added = (v[0] if axes[name] is None else v for name, v in (("x", x), ("added", added)))

    def run(x: Tensor, scale: Tensor, shift: Tensor, added: Tensor | None) -> Tensor:
        return kernels.scaled(x, scale, shift, added, slope, shape[0])

    for extra, axis in ((added, axes["added"]), (None, None)):
        found = torch.vmap(run, in_dims=(axes["x"], 0, 0, axis))(x, scale, shift, extra)
        for t in range(3):
            own_x, own = (v if v is None or a is None else v[t] for v, a in ((x, axes["x"]), (extra, axis)))
            wanted = expected(own_x, scale[t], shift[t], own, slope)
            torch.testing.assert_close(found[t], wanted, rtol=0, atol=0, equal_nan=True)
            alone = run(own_x, scale[t], shift[t], own)
            torch.testing.assert_close(alone, wanted, rtol=0, atol=0, equal_nan=True)
            assert alone.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.slow
@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("dtype", HALF)
def test_every_value_of_half_precision_is_rounded_as_pytorch_rounds(dtype: torch.dtype) -> None:
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype).view(1, 8, 64, 128)
    scale, shift = torch.full((8,), 1 + 2**-9, device=DEVICE), torch.zeros(8, device=DEVICE)
    found = kernels.scaled(every.to(DEVICE), scale, shift, None, 1.0, 1)
    wanted = (every.float() * scale.cpu()[0]).to(dtype).to(DEVICE)
    torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)


def test_draws_of_draws_are_refused() -> None:
    x, scale = torch.randn(2, 8, 3, 3), torch.randn(3, 4, 8)
    twice = torch.vmap(torch.vmap(lambda row: kernels.scaled(x, row, row, None, 1.0, 2)))
    with pytest.raises(RuntimeError):
        twice(scale)


def test_images_in_other_pieces_are_left_to_pytorch() -> None:
    for shape, dtype, taken in (
        ((1, 4, 2, 2), torch.float32, True),
        ((1, 4, 2, 2), torch.float16, False),
        ((1, 8, 2, 2), torch.bfloat16, True),
        ((1, 8, 2, 2), torch.float64, False),
        ((8, 8, 2), torch.float32, False),
        ((0, 8, 2, 2), torch.float32, False),
        ((2**20, 8, 32, 32), torch.float32, False),
    ):
        assert kernels.suits_scaled(shape, dtype) == taken


class Block(nn.Module):
    """Blocks as ResNets have them: one shortcut is what comes in, one a batch norm of its own."""

    def __init__(self, *, changes: bool = False) -> None:
        super().__init__()
        self.stem, self.bn = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
        self.conv1, self.bn1, self.short = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.BatchNorm2d(8)
        self.conv2, self.bn2, self.changes = nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8), changes

    def forward(self, x: Tensor) -> Tensor:
        x = F.leaky_relu(self.bn(self.stem(x)), 0.1, inplace=True)
        y = self.bn1(self.conv1(x))
        if self.changes:
            x.mul_(2)
        y = torch.relu(y + x)
        return F.silu(self.bn2(self.conv2(y)) + self.short(y)).mean((2, 3))


@pytest.mark.slow
@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("changes", [False, True])
@pytest.mark.parametrize("dtype", HALF)
def test_a_pass_by_kernels_gives_the_same_numbers(dtype: torch.dtype, changes: bool) -> None:
    x = images(8, 3, 6, 7, dtype=dtype)
    bayes = fit(Block(changes=changes).to(DEVICE, dtype), x, n_samples=3)
    program = program_of(bayes, x[:2], fold=False)
    each = fuse_kernels(program.each, narrow=False)
    (*_, last) = (node for node in each.graph.nodes if node.target is torch.ops.mcbn.scaled.default)
    assert plans.kernels_in(each) == {"scaled": 4}
    assert last.args[3] is not None
    added = sum(node.target is Tensor.add_ for node in each.graph.nodes)
    assert added == changes  # a shortcut that is changed before it is added stays where it is
    with torch.no_grad():
        omega = program.scales_and_shifts(bayes.posterior.mean, bayes.posterior.var)
        shared = program.run_shared(x[:2])
        wanted = program.run(shared, omega)
        found = replace(program, each=each).run(shared, omega)
    torch.testing.assert_close(found, wanted, rtol=2 * torch.finfo(dtype).eps, atol=2 * torch.finfo(dtype).eps)


@pytest.mark.slow
@pytest.mark.usefixtures("kernel")
def test_engine_takes_the_kernel_and_says_so(monkeypatch) -> None:
    x = images(8, 3, 6, 7, dtype=torch.bfloat16)
    bayes = fit(Block().to(DEVICE, torch.bfloat16), x, n_samples=3)
    monkeypatch.setattr(plans, "runs_kernels", lambda _: True)
    assert "4 batch norms in one kernel each with what follows" in bayes.explain(x[:2])
    own = torch.stack([bayes.engine.replay(bayes.engine.network.prepare(x[:2]), t) for t in range(3)])
    torch.testing.assert_close(bayes.sample(x[:2]), own.to(bayes.sample(x[:2]).dtype), rtol=0.02, atol=0.02)
