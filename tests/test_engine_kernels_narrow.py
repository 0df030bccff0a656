"""Narrow convolutions in one kernel against PyTorch's: on a GPU, or compiled for the host."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drawn import fit, program_of
from mcbn.engine import constants, fuse as fusing, kernels as narrow, plan as plans
from mcbn.engine.run import Engine
from mcbn_study.networks import CifarResNet, UNet, cifar_resnet

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = 1e-5 if DEVICE == "cpu" else 3e-3  # a GPU multiplies as TF32


def expected(x: Tensor, conv: nn.Conv2d, scale: Tensor, shift: Tensor, added: Tensor | None, slope: float) -> Tensor:
    y = conv(x) * scale[:, None, None] + shift[:, None, None]
    y = y if added is None else y + added
    return F.leaky_relu(y, slope) if slope else torch.relu(y)


def assert_near(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=0, atol=TOLERANCE * float(wanted.abs().max()))


CASES = [  # C, D, k, stride, height and width: patches of an image, several images to a block, patches over the edge
    (16, 16, 3, 1, (32, 32), 0.0),
    (48, 32, 3, 2, (15, 16), 0.1),
    (16, 64, 1, 1, (4, 4), 1.0),
    (32, 16, 3, 1, (4, 16), 0.0),
    (16, 16, 3, 1, (7, 61), 0.0),
    (16, 11, 1, 1, (4, 16), 0.0),
    (16, 20, 1, 1, (4, 16), 0.1),
]
LARGE = [(16, 16, 3, 1, (256, 256), 0.0), (96, 32, 3, 1, (128, 128), 0.0), (192, 64, 3, 1, (64, 64), 0.1)]  # GPU alone


@pytest.mark.slow
@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize(("C", "D", "k", "stride", "size", "slope"), CASES + (LARGE if DEVICE == "cuda" else []))
def test_draws_equal_convolution_norm_shortcut_and_rectifier(C, D, k, stride, size, slope) -> None:
    torch.manual_seed(0)
    conv = nn.Conv2d(C, D, k, stride, k // 2, bias=slope > 0).to(DEVICE)
    conv.weight.data = narrow.rounded(conv.weight.data)
    x = torch.randn(3, 2, C, *size, device=DEVICE)  # three draws of two images
    scale, shift = torch.randn(2, 3, D, device=DEVICE)
    with torch.no_grad(), torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        added = torch.randn_like(torch.stack([conv(part) for part in x]))
        assert narrow.suits_narrow(conv.weight, added.shape, conv.stride, conv.padding, conv.dilation, conv.groups)
        weight = narrow.packed(conv.weight)

        def run(x: Tensor, scale: Tensor, shift: Tensor, added: Tensor | None = None) -> Tensor:
            return narrow.narrow(x, None, 0, weight, conv.bias, scale, shift, added, slope, stride, k // 2)

        for extra in ((), (added,)):
            found = torch.vmap(run)(x, scale, shift, *extra)
            for t in range(3):
                own = [part[t] for part in extra] or [None]
                assert_near(found[t], expected(x[t], conv, scale[t], shift[t], own[0], slope))
            assert_near(run(x[0], scale[0], shift[0], *(part[0] for part in extra)), found[0])


@pytest.mark.slow
@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("doubled", [0, 1, 2, 3])
def test_two_values_are_read_as_one_each_doubled_or_not(doubled: int) -> None:
    torch.manual_seed(0)
    conv = nn.Conv2d(48, 16, 3, 2, 1, bias=False).to(DEVICE)
    conv.weight.data = narrow.rounded(conv.weight.data)
    halves = [1 + (doubled & 1), 1 + (doubled >> 1)]
    x, beside = (torch.randn(2, C, 8 // n, 16 // n, device=DEVICE) for C, n in zip((16, 32), halves, strict=True))
    scale, shift = torch.randn(2, 16, device=DEVICE)
    with torch.no_grad(), torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        pair = [F.interpolate(part, scale_factor=n) for part, n in zip((x, beside), halves, strict=True)]
        found = narrow.narrow(x, beside, doubled, narrow.packed(conv.weight), None, scale, shift, None, 0.0, 2, 1)
        assert_near(found, expected(torch.cat(pair, 1), conv, scale, shift, None, 0.0))


@pytest.mark.slow
@pytest.mark.usefixtures("kernel")
def test_values_may_lie_anywhere_in_memory_and_be_infinite() -> None:
    torch.manual_seed(0)
    conv = nn.Conv2d(16, 16, 1, bias=False).to(DEVICE)
    conv.weight.data = narrow.rounded(conv.weight.data)
    row, x = torch.randn(99, device=DEVICE), torch.randn(1 + 2 * 16 * 64, device=DEVICE)[1:].view(2, 8, 8, 16)
    scale, shift, x = row[1:17], row[18:34], x.permute(0, 3, 1, 2)
    with torch.no_grad(), torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        found = narrow.narrow(x, None, 0, narrow.packed(conv.weight), None, scale, shift, x, 0.0, 1, 0)
        assert_near(found, expected(x, conv, scale, shift, x, 0.0))
        shift[:2] = torch.tensor([-torch.inf, torch.nan])
        found = narrow.narrow(x, None, 0, narrow.packed(conv.weight), None, scale, shift, x, 0.0, 1, 0)
        assert (found[:, 0] == 0).all()
        assert found[:, 1].isnan().all()


def test_other_convolutions_are_left_to_pytorch() -> None:
    def taken(*sizes: int, shape: tuple[int, ...] = (32, 32), **options: int | tuple[int, int]) -> bool:
        conv = nn.Conv2d(*sizes, **options)  # type: ignore[arg-type]
        return narrow.suits_narrow(conv.weight, shape, conv.stride, conv.padding, conv.dilation, conv.groups)

    assert taken(16, 32, 3, padding=1)
    assert taken(64, 64, 1)
    for sizes in ((3, 16, 3), (272, 16, 3), (16, 65, 3), (16, 16, 5), (24, 16, 1)):
        assert not taken(*sizes)
    for options in ({"dilation": 2}, {"groups": 2}, {"stride": (1, 2)}, {"padding": (0, 1)}):
        assert not taken(16, 16, 3, **options)
    for shape in ((9, 7), (3, 32), (7, 65)):
        assert not taken(16, 16, 3, shape=shape)  # patches would hang over the edges by more than a quarter


@pytest.mark.slow
@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize(
    ("build", "size", "kernels", "sums"),  # sums: shortcuts that no kernel adds
    [(lambda: cifar_resnet(2), 8, 11, 0), (UNet, 16, 12, 0), (lambda: CifarResNet(8, seed=0), 32, 6, 0)],
    ids=["resnet", "unet", "pre-activation"],
)
def test_networks_give_the_same_numbers_with_kernels(build, size: int, kernels: int, sums: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(8, 3, size, size, device=DEVICE)
    network = build().to(DEVICE).eval()
    for parameter in network.parameters():
        parameter.data = narrow.rounded(parameter.data)
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False), torch.no_grad():
        bayes = fit(network, x, n_samples=2)
        traced = program_of(bayes, x[:2], fold=False)
        omega = traced.scales_and_shifts(bayes.posterior.mean, bayes.posterior.var)
        shared = traced.run_shared(x[:2])
        other = replace(traced, each=fusing.fuse_kernels(traced.each))
        assert sum(str(node.target) == "mcbn.narrow.default" for node in other.each.graph.nodes) == kernels
        assert sum(node.target is Tensor.add_ for node in other.each.graph.nodes) == sums
        wanted = traced.run(shared, omega)
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=True):
            coarse = traced.run(shared, omega)  # on a GPU as TF32
        allowed = 2 * float((coarse - wanted).abs().max()) + 1e-5 * float(wanted.abs().max())
        for found, own in ((other.run(shared, omega), wanted), (other.run(shared, omega[1:2]), wanted[1:2])):
            torch.testing.assert_close(found, own, rtol=0, atol=allowed)


@pytest.mark.slow
@pytest.mark.usefixtures("kernel")
def test_engine_takes_the_kernels_and_says_so(monkeypatch) -> None:
    torch.manual_seed(0)
    x = torch.randn(8, 3, 16, 16, device=DEVICE)
    network = cifar_resnet(1).to(DEVICE).eval()
    for parameter in network.parameters():
        parameter.data = narrow.rounded(parameter.data)
    bayes, plain = (fit(network, x, n_samples=3) for _ in range(2))
    # how much the network itself rounds is another question: no CPU rounds to TF32
    monkeypatch.setattr(Engine, "_rounding", lambda self, inputs, _: 1e-3 * self.replay(inputs, 0))
    monkeypatch.setattr(plans, "runs_kernels", lambda _: False)
    wanted = plain.sample(x[:2])
    assert "kernel" not in plain.explain(x[:2])
    monkeypatch.setattr(plans, "runs_kernels", lambda _: True)
    for _ in range(constants.CALLS_WITHOUT_KERNELS + 1):  # on a GPU the first do not wait for kernels
        found = bayes.sample(x[:2])
    assert "6 convolutions in one kernel each with what follows" in bayes.explain(x[:2])
    assert_near(found, wanted)


def test_kernels_are_compiled_for_what_is_launched(monkeypatch) -> None:
    x = torch.randn(8, 3, 16, 16)
    bayes, begun, launched = fit(cifar_resnet(1), x, n_samples=2), [], []
    monkeypatch.setattr(narrow, "prefetch", lambda name, sizes, _: bool(begun.append((name, sizes))))
    monkeypatch.setattr(narrow, "launch", lambda name, sizes, *_: launched.append((name, sizes)))  # results: anything
    with torch.no_grad():
        traced = program_of(bayes, x[:2], fold=False)
        each = fusing.fuse_kernels(traced.each)
        assert not fusing.compiled(each, x.device)
        omega = traced.scales_and_shifts(bayes.posterior.mean, bayes.posterior.var)
        replace(traced, each=each).run(traced.run_shared(x[:2]), omega)
    assert [name for name, _ in launched] == ["scaled", *["narrow"] * 6]  # batch norm behind the first convolution
    assert sorted(map(str, begun)) == sorted(map(str, launched))


def test_rounding_takes_the_nearest_number_of_ten_digits() -> None:
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    exponent = values.abs().log2().floor()
    nearest = (values.double() * 2 ** (10 - exponent.double())).round() * 2 ** (exponent.double() - 10)
    assert torch.equal(narrow.rounded(values).double(), nearest)
    odd = torch.tensor([torch.inf, -torch.inf, 0.0, 1.0])
    assert torch.equal(narrow.rounded(odd), odd)
    assert narrow.rounded(torch.tensor([torch.nan])).isnan().all()
