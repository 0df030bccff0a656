"""CIFAR-10: training, alone and together, its resumption, and the files of its networks."""

import dataclasses
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mcbn
from cifar import TINY, images, same, train_one
from mcbn_study import checkpoints
from mcbn_study.cifar10.profile import PAPER, CifarProfile
from mcbn_study.cifar10.train import (
    Epoch,
    ResNetTrainer,
    captured_step,
    epoch_choices,
    learning_rate,
    load_network,
    save_network,
    take_epoch,
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
    found, expected = train_one(profile, images(16), seed=3).network, naive_training(profile, images(16), 3)
    for (name, a), b in zip(found.state_dict().items(), expected.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=3e-5, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_networks_trained_together_are_those_trained_alone(dropout: float) -> None:
    profile, told = dataclasses.replace(TINY, steps=7), []
    found = train(
        profile, images(), seeds=[1, 5], dropout=dropout, watch=lambda seed, epoch: told.append((seed, epoch.steps))
    )
    for seed, trainer in zip([1, 5], found, strict=True):
        alone = train_one(profile, images(), seed=seed, dropout=dropout)
        assert same(trainer.network, alone.network)
        assert [e[:4] for e in trainer.epochs] == [e[:4] for e in alone.epochs]
        assert not trainer.network.training
    assert told == [(1, 5), (5, 5), (1, 7), (5, 7)]


def test_networks_interrupted_together_go_on_together_or_one_by_one(tmp_path: Path) -> None:
    files = [tmp_path / f"{seed}.safetensors" for seed in (1, 2)]
    options = {"dropout": 0.3}

    def interrupt(seed: int, epoch: Epoch) -> None:
        if epoch.number == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(TINY, images(), seeds=[1, 2], files=files, watch=interrupt, **options)
    whole = train_one(TINY, images(), seed=2, dropout=0.3).network
    assert same(train_one(TINY, images(), seed=2, checkpoint=files[1], **options).network, whole)
    with pytest.raises(mcbn.MCBNError, match=r"different steps, \[10, 0\].*one by one"):
        train(TINY, images(), seeds=[1, 2], files=files, **options)
    assert files[0].exists()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="a CUDA graph needs a GPU")
@pytest.mark.parametrize("seeds", [[3], [3, 4, 5]])
def test_a_captured_step_is_the_step(seeds: list[int]) -> None:
    profile = dataclasses.replace(TINY, steps=4, rates=((0, 0.02), (3, 0.005)), weight_decay=0.05)
    trainers = [
        [ResNetTrainer(profile, images(16), seed=s, dropout=0.0, device="cuda") for s in seeds] for _ in range(2)
    ]
    for group, replay in zip(trainers, (captured_step(trainers[0]), None), strict=True):
        for _ in range(2):
            take_epoch(group, replay)
            for trainer in group:
                trainer.finish_epoch(0.0)
    for one, other in zip(*trainers, strict=True):
        for found, wanted in zip(one.epochs, other.epochs, strict=True):
            assert found == pytest.approx(wanted, rel=1e-2)  # TF32
        for (name, a), b in zip(one.state.items(), other.state.values(), strict=True):
            torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-3, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="a CUDA graph needs a GPU")
def test_captured_dropout_is_reproducible_and_differs_between_networks() -> None:
    profile = dataclasses.replace(TINY, steps=2)

    def losses(seeds: list[int]) -> list[float]:
        trainers = [ResNetTrainer(profile, images(16), seed=s, dropout=0.3, device="cuda") for s in seeds]
        take_epoch(trainers, captured_step(trainers))
        for trainer in trainers:
            trainer.finish_epoch(0.0)
        return [trainer.epochs[-1].loss for trainer in trainers]

    assert losses([3, 4]) == pytest.approx(losses([3, 4]), rel=1e-2)
    twins = losses([3, 3])
    assert twins[0] != twins[1]


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_interrupted_training_goes_on_as_if_nothing_had_happened(tmp_path: Path, dropout: float) -> None:
    whole = train_one(TINY, images(), seed=1, dropout=dropout)
    checkpoint = tmp_path / "unfinished.safetensors"

    def interrupt(epoch: Epoch) -> None:
        if epoch.number == 1:
            raise KeyboardInterrupt

    options = {"seed": 1, "dropout": dropout, "checkpoint": checkpoint}
    with pytest.raises(KeyboardInterrupt):
        train_one(TINY, images(), watch=interrupt, **options)
    assert checkpoint.exists()
    resumed = train_one(TINY, images(), **options)
    assert [e.steps for e in resumed.epochs] == [5, 10, 14]
    assert [(e.loss, e.accuracy) for e in resumed.epochs] == [(e.loss, e.accuracy) for e in whole.epochs]
    expected = whole.network.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in resumed.network.state_dict().items())
    assert list(tmp_path.iterdir()) == []


def test_training_depends_on_the_seed_alone_and_leaves_the_global_generator() -> None:
    profile = dataclasses.replace(TINY, steps=2)
    torch.manual_seed(5)
    a = train_one(profile, images(), seed=1, dropout=0.2).network
    assert torch.equal(torch.rand(3), torch.rand(3, generator=torch.Generator().manual_seed(5)))
    b, c = (train_one(profile, images(), seed=s, dropout=0.2).network for s in (1, 2))
    assert torch.equal(a.last.weight, b.last.weight)
    assert not torch.equal(a.last.weight, c.last.weight)
    assert not a.training


def test_a_checkpoint_of_other_settings_or_damaged_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "unfinished.safetensors"
    trainer = ResNetTrainer(TINY, images(), seed=1, dropout=0.0, device="cpu")
    trainer.epochs = [Epoch(0, 5, 1.0, 0.1, 1.0)]
    checkpoints.keep(path, trainer.state, trainer.settings, trainer.epochs)
    with pytest.raises(mcbn.MCBNError, match="other settings"):
        train_one(TINY, images(), seed=2, checkpoint=path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(
        mcbn.MCBNError, match=r"unfinished\.safetensors is not a whole .*remove it to train from the beginning"
    ):
        train_one(TINY, images(), seed=1, checkpoint=path)


def test_training_that_diverges_says_so() -> None:
    with pytest.raises(mcbn.MCBNError, match="diverged before step 5"):
        train_one(dataclasses.replace(TINY, rates=((0, 1e30),)), images(), seed=0)


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        (images().x, images().y + 1, r"labels must be whole numbers 0\.\.9; got 1\.\.10"),
        (images().x, images().y - 1, r"got -1\.\.8"),
        (images().x[:, :, :28, :28], images().y, r"images \(N, 3, 32, 32\).*got uint8 of shape \(40, 3, 28, 28\)"),
        (images().x[:, :1], images().y, r"RGB bytes.*got uint8 of shape \(40, 1, 32, 32\)"),
        (images().x.float(), images().y, "float32"),
        (images().x, images().y[:3], "3 labels"),
        (images().x[:5], images().y[:5], "5 images make no batch of 8"),
    ],
)
def test_training_refuses_other_images_and_labels(x: torch.Tensor, y: torch.Tensor, message: str) -> None:
    with pytest.raises(mcbn.MCBNError, match=message):
        train_one(TINY, Images(x, y), seed=0)


def test_a_saved_network_is_the_network(tmp_path: Path) -> None:
    network = CifarResNet(14, dropout=0.25, seed=2)
    found = load_network(save_network(network, tmp_path / "net.safetensors", {"seed": 2}))
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
