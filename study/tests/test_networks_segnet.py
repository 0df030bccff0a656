"""SegNet: sizes, order of its layers, and what max-unpooling does."""

import pytest
import torch
from torch import Tensor, nn

from mcbn import MCBN, MCBNError
from mcbn_study.networks import LEVELS, InvertedResidual, MobileSegmenter, SegNet, unpool
from untouched import generators

SMALL = (8, 8, 8, 8, 8)


@pytest.mark.parametrize("size", [(360, 480), (224, 224), (33, 47), (32, 32)])
def test_output_has_the_size_of_the_input(size: tuple[int, int]) -> None:
    network = SegNet(5, widths=(2, 2, 2, 2, 2)).eval()
    with torch.no_grad():
        assert network(torch.randn(1, 3, *size)).shape == (1, 5, *size)


def test_batch_norm_follows_every_convolution_but_the_last() -> None:
    network = SegNet(11, widths=SMALL)
    modules = [m for m in network.modules() if isinstance(m, nn.Conv2d | nn.BatchNorm2d | nn.ReLU)]
    *inner, last = modules
    assert isinstance(last, nn.Conv2d)
    assert last.out_channels == 11
    kinds = [type(m) for m in inner]
    assert kinds == [nn.Conv2d, nn.BatchNorm2d, nn.ReLU] * 25  # 13 + 12, and the classifier
    assert network(torch.randn(2, 3, 32, 32)).shape == (2, 11, 32, 32)


def test_default_is_the_size_the_docstring_says() -> None:
    assert round(sum(p.numel() for p in SegNet(11).parameters()) / 1e6, 1) == 2.9


def by_hand(network: SegNet, x: Tensor) -> Tensor:
    """The same network with pooling and unpooling spelled out pixel by pixel."""
    places = []
    for stage in network.encoder:
        x = stage(x)
        N, C, H, W = x.shape
        pooled, place = torch.zeros(N, C, H // 2, W // 2).to(x), {}
        for n, c, i, j in torch.cartesian_prod(*map(torch.arange, pooled.shape)).tolist():
            window = [(a, b) for a in (2 * i, 2 * i + 1) for b in (2 * j, 2 * j + 1)]
            best = max(window, key=lambda at: x[n, c, at[0], at[1]].item())  # the first of equal ones, as torch takes
            pooled[n, c, i, j], place[n, c, i, j] = x[n, c, best[0], best[1]], best
        places.append((place, x.shape))
        x = pooled
    for stage in network.decoder:
        place, shape = places.pop()
        unpooled = torch.zeros(shape).to(x)
        for (n, c, i, j), (a, b) in place.items():
            unpooled[n, c, a, b] = x[n, c, i, j]
        x = stage(unpooled)
    return network.classifier(x)


def test_pooling_and_unpooling_are_those_spelled_out() -> None:
    network = SegNet(4, widths=(2, 3), seed=3).double().eval()
    x = torch.randn(2, 3, 10, 13, dtype=torch.float64, generator=torch.Generator().manual_seed(0))  # odd sizes
    with torch.no_grad():
        torch.testing.assert_close(network(x), by_hand(network, x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_unpooling_is_that_of_torch_also_in_its_gradient(layout: torch.memory_format) -> None:
    image = torch.randn(2, 3, 9, 14, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    pooled, place = nn.functional.max_pool2d(image.contiguous(memory_format=layout), 2, return_indices=True)
    weight = torch.randn(image.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    found = []
    for function in (unpool, lambda x, at, size: nn.functional.max_unpool2d(x, at, [2, 2], output_size=list(size))):
        x = pooled.detach().requires_grad_()
        output = function(x, place, image.shape[-2:])
        found.append((output, *torch.autograd.grad((output * weight).sum(), x)))
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours, theirs)


def test_several_draws_share_a_pass() -> None:
    network = SegNet(3, widths=SMALL).train()
    x = torch.randn(8, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    for _ in range(60):
        network(x)
    bayes = MCBN(network.eval(), "classification").fit(x, n_samples=4, batch_size=4)
    assert "4 draws in one pass" in bayes.explain(x[:1])
    together, alone = (bayes.sample(x[:1], chunk_size=size) for size in (4, 1))
    torch.testing.assert_close(together, alone, rtol=1e-3, atol=1e-4)


def test_seed_decides_the_weights_and_leaves_the_global_generator_alone() -> None:
    before = generators()
    one, same, other = (SegNet(3, widths=SMALL, seed=s).state_dict() for s in (1, 1, 2))
    assert generators() == before
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["encoder.0.0.weight"], other["encoder.0.0.weight"])


def test_the_first_two_layers_are_those_of_the_first_stage() -> None:
    x = torch.randn(8, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    network = SegNet(3, widths=SMALL).train()
    for _ in range(60):
        network(x)  # running statistics settle
    fitted = MCBN(network.eval(), "classification", layers=2).fit(x, n_samples=3, batch_size=4)
    assert fitted.posterior.layers == ("encoder.0.1", "encoder.0.4")
    everything = MCBN(network, "classification").fit(x, n_samples=3, batch_size=4)
    assert len(everything.posterior.layers) == 25
    assert everything.explain(x[:2]).find("own code") < 0  # could be traced: no slow fallback


@pytest.mark.parametrize(
    "x",
    [torch.randn(1, 1, 64, 64), torch.randn(3, 64, 64), torch.randn(1, 3, 16, 64), torch.zeros(1, 3, 64, 64).byte()],
    ids=["grey", "no batch", "small", "bytes"],
)
def test_other_images_are_refused(x: Tensor) -> None:
    with pytest.raises(MCBNError, match=r"SegNet takes RGB images .* at least 32; got"):
        SegNet(3, widths=SMALL)(x)


def test_mobile_segmenter_trains_its_decoder_alone() -> None:
    before = generators()
    network = MobileSegmenter(5, widths=(8,)).train()
    assert generators() == before
    x = torch.randn(2, 3, 40, 72, generator=torch.Generator().manual_seed(0))
    kept = {name: value.clone() for name, value in network.features.state_dict().items()}
    output = network(x)
    assert output.shape == (2, 5, 40, 72)
    output.square().mean().backward()
    assert all(torch.equal(value, kept[name]) for name, value in network.features.state_dict().items())
    assert all((p.grad is None) == name.startswith("features.") for name, p in network.named_parameters())
    assert not torch.equal(network.sides[0][1].running_mean, torch.zeros(8))


def test_mobile_segmenter_has_the_encoder_of_the_paper() -> None:
    features = MobileSegmenter(5).features
    assert sum(p.numel() for p in features.parameters()) == 2_223_872  # 3.5 million with the classifier's 1.28
    blocks = [block for block in features if isinstance(block, InvertedResidual)]
    assert len(blocks) == 17
    assert sum(block.fits for block in blocks) == 10
    x, sizes = torch.zeros(1, 3, 224, 224), {}
    for number, block in enumerate(features.eval()):
        x = block(x)
        sizes[number] = tuple(x.shape[1:])
    assert {number: sizes[number] for number in LEVELS} == {
        3: (24, 56, 56),
        6: (32, 28, 28),
        13: (96, 14, 14),
        18: (1280, 7, 7),
    }
