"""CIFAR-10: training, and the files of its networks."""

import dataclasses
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mcbn
from cifar import TINY, images
from mcbn_study.cifar10.profile import PAPER, CifarProfile
from mcbn_study.cifar10.train import (
    ResNetTrainer,
    epoch_choices,
    learning_rate,
    load_network,
    save_network,
    train,
)
from mcbn_study.data.cifar import Images
from mcbn_study.networks import CifarResNet, standardize


def test_learning_rates_are_those_of_the_protocol() -> None:
    steps = {0: 0.1, 39_999: 0.1, 40_000: 0.01, 59_999: 0.01, 60_000: 0.001, 80_000: 0.0001, 82_499: 0.0001}
    assert {step: learning_rate(PAPER, step) for step in steps} == steps
    assert (PAPER.steps, PAPER.batch_size, PAPER.weight_decay, PAPER.momentum) == (82_500, 32, 2e-4, 0.9)
    assert PAPER.steps % (48_000 // PAPER.batch_size) == 0  # whole epochs


def naive_training(profile: CifarProfile, data: Images, seed: int) -> nn.Module:
    """SGD with momentum written out, image by image."""
    network = CifarResNet(profile.depth, seed=seed).train()
    momenta = {name: torch.zeros_like(p) for name, p in network.named_parameters()}
    per_epoch = len(data.x) // profile.batch_size
    for step in range(profile.steps):
        chosen = epoch_choices(len(data.x), profile.batch_size, seed, step // per_epoch)
        one = [part[step % per_epoch] for part in chosen]
        framed = F.pad(data.x, (2, 2, 2, 2))
        batch = []
        for row, top, left, flip in zip(*one, strict=True):
            image = framed[row, :, top : top + 32, left : left + 32]
            batch.append(image.flip(2) if flip else image)
        loss = F.cross_entropy(network(standardize(torch.stack(batch))), data.y[one[0]])
        network.zero_grad()
        loss.backward()
        with torch.no_grad():
            for name, p in network.named_parameters():
                decay = profile.weight_decay if p.ndim > 1 else 0.0
                momenta[name].mul_(profile.momentum).add_(p.grad + decay * p)
                p -= learning_rate(profile, step) * momenta[name]
    return network.eval()


def test_training_is_momentum_sgd_on_augmented_batches() -> None:
    profile = dataclasses.replace(TINY, steps=4, rates=((0, 0.02), (3, 0.005)), weight_decay=0.05)  # 2 steps an epoch
    found, expected = train(profile, images(16), seed=3)[0], naive_training(profile, images(16), 3)
    for (name, a), b in zip(found.state_dict().items(), expected.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=3e-5, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="a CUDA graph needs a GPU")
def test_a_captured_step_is_the_step() -> None:
    profile = dataclasses.replace(TINY, steps=4, rates=((0, 0.02), (3, 0.005)), weight_decay=0.05)
    captured, other = (ResNetTrainer(profile, images(16), seed=3, dropout=0.0, device="cuda") for _ in range(2))
    replay = captured.captured_step()
    for _ in range(2):
        assert captured.take_epoch(replay) == pytest.approx(other.take_epoch(other.step), rel=1e-2)  # TF32
    pairs = zip(captured.network.state_dict().items(), other.network.state_dict().values(), strict=True)
    for (name, a), b in pairs:
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-3, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="a CUDA graph needs a GPU")
def test_captured_dropout_is_reproducible() -> None:
    def loss(seed: int) -> float:
        trainer = ResNetTrainer(dataclasses.replace(TINY, steps=2), images(16), seed=seed, dropout=0.3, device="cuda")
        return trainer.take_epoch(trainer.captured_step())[0]

    assert loss(3) == pytest.approx(loss(3), rel=1e-2)


def test_the_last_epoch_may_be_shorter() -> None:
    _, facts = train(TINY, images(), seed=1)
    assert facts["steps"] == 14  # of 5 an epoch


def test_training_depends_on_the_seed_alone_and_leaves_the_global_generator() -> None:
    profile = dataclasses.replace(TINY, steps=2)
    torch.manual_seed(5)
    a = train(profile, images(), seed=1, dropout=0.2)[0]
    assert torch.equal(torch.rand(3), torch.rand(3, generator=torch.Generator().manual_seed(5)))
    b, c = (train(profile, images(), seed=s, dropout=0.2)[0] for s in (1, 2))
    assert torch.equal(a.last.weight, b.last.weight)
    assert not torch.equal(a.last.weight, c.last.weight)
    assert not a.training


def test_training_that_diverges_says_so() -> None:
    with pytest.raises(mcbn.MCBNError, match="diverged before step 5"):
        train(dataclasses.replace(TINY, rates=((0, 1e30),)), images(), seed=0)


def test_training_refuses_other_images_and_too_few() -> None:
    x, y = images()
    with pytest.raises(mcbn.MCBNError, match=r"\(N, 3, 32, 32\); got uint8 of shape \(40, 3, 28, 28\).*resize"):
        train(TINY, Images(x[:, :, :28, :28], y), seed=0)
    with pytest.raises(mcbn.MCBNError, match="float32"):
        train(TINY, Images(x.float(), y), seed=0)
    with pytest.raises(mcbn.MCBNError, match="5 images make no batch of 8"):
        train(TINY, Images(x[:5], y[:5]), seed=0)


def test_a_saved_network_is_the_network(tmp_path: Path) -> None:
    network = CifarResNet(14, dropout=0.25, seed=2)
    found, facts = load_network(save_network(network, tmp_path / "net.safetensors", {"seed": 2}))
    assert facts == {"seed": 2}
    assert (found.depth, found.dropout, found.training) == (14, 0.25, False)
    assert all(torch.equal(a, b) for a, b in zip(found.parameters(), network.parameters(), strict=True))


def test_files_that_hold_no_such_network_are_refused(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    path = save_network(CifarResNet(8, seed=0), tmp_path / "net.safetensors", {})
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(mcbn.MCBNError, match="is not a whole safetensors file"):
        load_network(path)
    with pytest.raises(mcbn.MCBNError, match=r"there is no file .*none\.safetensors"):
        load_network(tmp_path / "none.safetensors")
    save_file({"a": torch.zeros(1)}, tmp_path / "other.safetensors")
    with pytest.raises(mcbn.MCBNError, match="holds no network"):
        load_network(tmp_path / "other.safetensors")
