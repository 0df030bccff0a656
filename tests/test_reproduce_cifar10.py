"""CIFAR-10: augmentation, training and its resumption, the estimators, and what is written of them."""

import copy
import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mcbn.records
from kinds import norms_in_training
from mcbn.data import Images
from mcbn.data.images import find_cifar10
from mcbn.networks import CifarResNet, standardize
from mcbn.reproduce.cifar10 import Augmented, held_out, load_network, per_query, save_network, study
from mcbn.reproduce.cifar10.augmentation import OFFSETS, PADDING, Choices, crop, epoch_choices, fresh_choices, pad
from mcbn.reproduce.cifar10.evaluation import Evaluation, difference
from mcbn.reproduce.cifar10.per_query import fresh_batches
from mcbn.reproduce.cifar10.profiles import PAPER, QUICK, Profile, find_profile
from mcbn.reproduce.cifar10.scores import curve, score
from mcbn.reproduce.cifar10.trainer import Epoch, Together, Trainer, learning_rate
from mcbn.reproduce.cifar10.training import train, train_together

TINY = dataclasses.replace(
    QUICK,
    batch_size=8,
    steps=14,
    rates=((0, 0.1), (7, 0.01)),
    n_samples=(1, 2, 4),
    n_draws=4,
    batch_sizes=(4, 8),
    sweep_samples=2,
    query_images=6,
    query_samples=2,
)


def images(n: int = 40, seed: int = 0) -> Images:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(0, 256, (n, 3, 32, 32), dtype=torch.uint8, generator=generator)
    return Images(x, torch.arange(n) % 10)


def choices(rows: list[int], top: int, left: int, flip: bool) -> Choices:
    n = len(rows)
    return Choices(torch.tensor(rows), torch.full((n,), top), torch.full((n,), left), torch.full((n,), flip))


# Images held out


def test_held_out_images_are_fixed_disjoint_and_all_there_are() -> None:
    train_index, validation = held_out()
    assert (len(train_index), len(validation)) == (48_000, 2_000)
    assert torch.equal(torch.cat([train_index, validation]).sort().values, torch.arange(50_000))
    assert torch.equal(held_out()[1], validation)


# Augmentation


def test_crop_in_the_middle_without_flip_is_the_image() -> None:
    x = images().x
    assert torch.equal(crop(pad(x), choices([3, 0], PADDING, PADDING, False)), x[[3, 0]])


@pytest.mark.parametrize(("top", "left", "flip"), [(0, 4, False), (4, 1, True), (2, 2, True), (0, 0, True)])
def test_crop_is_the_naive_one(top: int, left: int, flip: bool) -> None:
    x = images().x
    framed = np.zeros((3, 36, 36), np.uint8)
    framed[:, 2:34, 2:34] = x[5].numpy()
    expected = framed[:, top : top + 32, left : left + 32]
    expected = expected[:, :, ::-1] if flip else expected
    assert np.array_equal(crop(pad(x), choices([5], top, left, flip))[0].numpy(), expected)


def test_each_image_of_a_batch_has_its_own_crop() -> None:
    padded = pad(images().x)
    chosen = fresh_choices(40, 12, 1, np.random.default_rng(0))
    together = crop(padded, Choices(*(part[0] for part in chosen)))
    alone = [crop(padded, Choices(*(part[0, i : i + 1] for part in chosen))) for i in range(12)]
    assert torch.equal(together, torch.cat(alone))


def test_an_epoch_shows_each_image_once_and_is_its_seed_and_number_alone() -> None:
    first = epoch_choices(43, 8, 1, 0)
    assert first.rows.shape == (5, 8)
    assert len(first.rows.unique()) == 40
    assert all(torch.equal(a, b) for a, b in zip(first, epoch_choices(43, 8, 1, 0), strict=True))
    for other in (epoch_choices(43, 8, 2, 0), epoch_choices(43, 8, 1, 1)):
        assert not torch.equal(first.rows, other.rows)


def test_crops_and_flips_are_uniform() -> None:
    chosen = epoch_choices(20_000, 10, 1, 0)
    for part, kinds in ((chosen.top, OFFSETS), (chosen.left, OFFSETS), (chosen.flip.long(), 2)):
        counts = torch.bincount(part.flatten(), minlength=kinds)
        assert len(counts) == kinds
        assert ((counts - 20_000 / kinds).abs() < 5 * math.sqrt(20_000 / kinds)).all()
    pairs = torch.stack([chosen.top.flatten(), chosen.left.flatten(), chosen.flip.flatten().long()]).double()
    assert (torch.corrcoef(pairs) - torch.eye(3)).abs().max() < 5 / math.sqrt(20_000)


def test_fresh_batches_hold_distinct_images_and_differ() -> None:
    chosen = fresh_choices(50, 31, 20, np.random.default_rng(0))
    assert all(len(row.unique()) == 31 for row in chosen.rows)
    assert not torch.equal(chosen.rows[0].sort().values, chosen.rows[1].sort().values)
    with pytest.raises(mcbn.MCBNError, match="batch of 51 distinct images cannot be drawn from 50"):
        fresh_choices(50, 51, 1, np.random.default_rng(0))


def test_augmented_items_are_standardised_crops_of_their_image() -> None:
    x = images().x
    data = Augmented(x)
    crops = [
        standardize(crop(pad(x), choices([7], top, left, flip)))[0]
        for top in range(OFFSETS)
        for left in range(OFFSETS)
        for flip in (False, True)
    ]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        drawn = [data[7] for _ in range(20)]
    assert all(any(torch.equal(one, known) for known in crops) for one in drawn)
    assert len({tuple(one.flatten()[:50].tolist()) for one in drawn}) > 5


def test_fit_takes_augmented_images_reproducibly() -> None:
    network, data = trained(), Augmented(images().x)
    posteriors = [
        mcbn.MCBN(network, "classification").fit(data, n_samples=3, batch_size=8, seed=s).posterior for s in (0, 0, 1)
    ]
    first, again, other = (p.mean["norm"] for p in posteriors)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


# Training


_TRAINED: list[CifarResNet] = []


def trained() -> CifarResNet:
    """A network whose running statistics fit `images()`; trained once."""
    if not _TRAINED:
        profile = dataclasses.replace(TINY, steps=40, rates=((0, 0.05), (15, 1e-4)))
        _TRAINED.append(train(profile, images(), seed=0).network)
    return copy.deepcopy(_TRAINED[0])


def test_learning_rates_are_those_of_the_protocol() -> None:
    steps = {0: 0.1, 39_999: 0.1, 40_000: 0.01, 59_999: 0.01, 60_000: 0.001, 80_000: 0.0001, 82_499: 0.0001}
    assert {step: learning_rate(PAPER, step) for step in steps} == steps
    assert (PAPER.steps, PAPER.batch_size, PAPER.weight_decay, PAPER.momentum) == (82_500, 32, 2e-4, 0.9)
    assert PAPER.steps % (48_000 // PAPER.batch_size) == 0  # whole epochs


def naive_training(profile: Profile, data: Images, seed: int) -> nn.Module:
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
    found, expected = train(profile, images(16), seed=3).network, naive_training(profile, images(16), 3)
    for (name, a), b in zip(found.state_dict().items(), expected.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=3e-5, msg=lambda text, name=name: f"{name}: {text}")


def same(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_networks_trained_together_are_those_trained_alone(dropout: float) -> None:
    profile, told = dataclasses.replace(TINY, steps=7), []
    found = train_together(
        profile, images(), seeds=[1, 5], dropout=dropout, watch=lambda seed, epoch: told.append((seed, epoch.steps))
    )
    for seed, (network, epochs) in zip([1, 5], found, strict=True):
        alone = train(profile, images(), seed=seed, dropout=dropout)
        assert same(network, alone.network)
        assert [e[:4] for e in epochs] == [e[:4] for e in alone.epochs]
        assert not network.training
    assert told == [(1, 5), (5, 5), (1, 7), (5, 7)]


def test_networks_interrupted_together_go_on_together_or_one_by_one(tmp_path: Path) -> None:
    files = [tmp_path / f"{seed}.safetensors" for seed in (1, 2)]
    options = {"dropout": 0.3, "checkpoint_seconds": 0.0}

    def interrupt(seed: int, epoch: Epoch) -> None:
        if epoch.number == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_together(TINY, images(), seeds=[1, 2], checkpoints=files, watch=interrupt, **options)
    whole = train(TINY, images(), seed=2, dropout=0.3).network
    assert same(train(TINY, images(), seed=2, checkpoint=files[1], **options).network, whole)
    with pytest.raises(mcbn.MCBNError, match=r"different steps, \[10, 0\].*one by one"):
        train_together(TINY, images(), seeds=[1, 2], checkpoints=files, **options)
    assert files[0].exists()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="a CUDA graph needs a GPU")
@pytest.mark.parametrize(("seeds", "parallel"), [([3], True), ([3, 4, 5], True), ([3, 4, 5], False)])
def test_a_captured_step_is_the_step(seeds: list[int], parallel: bool) -> None:
    profile = dataclasses.replace(TINY, steps=4, rates=((0, 0.02), (3, 0.005)), weight_decay=0.05)
    trainers = [[Trainer(profile, images(16), seed=s, dropout=0.0, device="cuda") for s in seeds] for _ in range(2)]
    captured, eager = Together(trainers[0], parallel=parallel), Together(trainers[1])
    eager.graph = None
    for _ in range(2):
        for found, wanted in zip(captured.epoch(), eager.epoch(), strict=True):
            assert found == pytest.approx(wanted, rel=1e-2)  # TF32
    for one, other in zip(*trainers, strict=True):
        for (name, a), b in zip(one.state().items(), other.state().values(), strict=True):
            torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-3, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="a CUDA graph needs a GPU")
def test_captured_dropout_is_reproducible_and_differs_between_networks() -> None:
    profile = dataclasses.replace(TINY, steps=2)

    def losses(seeds: list[int]) -> list[float]:
        trainers = [Trainer(profile, images(16), seed=s, dropout=0.3, device="cuda") for s in seeds]
        return [loss for loss, _ in Together(trainers).epoch()]

    assert losses([3, 4]) == pytest.approx(losses([3, 4]), rel=1e-2)
    twins = losses([3, 3])
    assert twins[0] != twins[1]


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_interrupted_training_goes_on_as_if_nothing_had_happened(tmp_path: Path, dropout: float) -> None:
    whole = train(TINY, images(), seed=1, dropout=dropout)
    checkpoint = tmp_path / "unfinished.safetensors"

    def interrupt(epoch: Epoch) -> None:
        if epoch.number == 1:
            raise KeyboardInterrupt

    options = {"seed": 1, "dropout": dropout, "checkpoint": checkpoint, "checkpoint_seconds": 0.0}
    with pytest.raises(KeyboardInterrupt):
        train(TINY, images(), watch=interrupt, **options)
    assert checkpoint.exists()
    resumed = train(TINY, images(), **options)
    assert [e.steps for e in resumed.epochs] == [5, 10, 14]
    assert [(e.loss, e.accuracy) for e in resumed.epochs] == [(e.loss, e.accuracy) for e in whole.epochs]
    expected = whole.network.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in resumed.network.state_dict().items())
    assert list(tmp_path.iterdir()) == []


def test_training_depends_on_the_seed_alone_and_leaves_the_global_generator() -> None:
    profile = dataclasses.replace(TINY, steps=2)
    torch.manual_seed(5)
    a = train(profile, images(), seed=1, dropout=0.2).network
    assert torch.equal(torch.rand(3), torch.rand(3, generator=torch.Generator().manual_seed(5)))
    b, c = (train(profile, images(), seed=s, dropout=0.2).network for s in (1, 2))
    assert torch.equal(a.last.weight, b.last.weight)
    assert not torch.equal(a.last.weight, c.last.weight)
    assert not a.training


def test_a_checkpoint_of_other_settings_or_damaged_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "unfinished.safetensors"
    trainer = Trainer(TINY, images(), seed=1, dropout=0.0, device="cpu")
    trainer.keep(path, [Epoch(0, 5, 1.0, 0.1, 1.0)])
    with pytest.raises(mcbn.MCBNError, match="other settings"):
        train(TINY, images(), seed=2, checkpoint=path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(mcbn.MCBNError, match=r"unfinished\.safetensors is damaged .*remove it"):
        train(TINY, images(), seed=1, checkpoint=path)


def test_training_that_diverges_says_so() -> None:
    with pytest.raises(mcbn.MCBNError, match="diverged before step 5"):
        train(dataclasses.replace(TINY, rates=((0, 1e30),)), images(), seed=0)


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        (images().x, images().y + 1, r"labels must be whole numbers 0\.\.9; got 1\.\.10"),
        (images().x, images().y - 1, r"got -1\.\.8"),
        (images().x[:, :, :28, :28], images().y, r"bytes \(N, 3, 32, 32\).*got \(40, 3, 28, 28\)"),
        (images().x[:, :1], images().y, r"got \(40, 1, 32, 32\)"),
        (images().x.float(), images().y, "float32"),
        (images().x, images().y[:3], "3 labels"),
        (images().x[:5], images().y[:5], "5 images make no batch of 8"),
    ],
)
def test_training_refuses_other_images_and_labels(x: torch.Tensor, y: torch.Tensor, message: str) -> None:
    with pytest.raises(mcbn.MCBNError, match=message):
        train(TINY, Images(x, y), seed=0)


# Files


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
    with pytest.raises(mcbn.MCBNError, match="is damaged"):
        load_network(path)
    with pytest.raises(mcbn.MCBNError, match=r"there is no network .*none\.safetensors"):
        load_network(tmp_path / "none.safetensors")
    save_file({"a": torch.zeros(1)}, tmp_path / "other.safetensors")
    with pytest.raises(mcbn.MCBNError, match="holds no network"):
        load_network(tmp_path / "other.safetensors")


# Estimators


def naive_per_query(network: nn.Module, batches: list[torch.Tensor], x: torch.Tensor, n_samples: int) -> torch.Tensor:
    """For each image and pass: one batch through BN in training mode, its statistics set, the image run."""
    logits = torch.zeros(n_samples, len(x), 10, dtype=x.dtype)
    for n, t in ((n, t) for n in range(len(x)) for t in range(n_samples)):
        taught = norms_in_training(copy.deepcopy(network))
        for module in taught.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.momentum = 1.0  # running statistics become those of the batch, with 1 / (n - 1)
                module.register_forward_pre_hook(lambda m, args: setattr(m, "values", args[0][:, 0].numel()))
        taught(batches[n * n_samples + t].to(x.dtype))
        for module in taught.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.running_var *= (module.values - 1) / module.values
        logits[t, n] = taught.eval()(x[n : n + 1])[0]
    return logits


def test_per_query_is_the_loop_by_hand() -> None:
    network, data = trained().double(), Augmented(images().x)
    before = copy.deepcopy(network.state_dict())
    x = standardize(images(5, seed=9).x).double()
    batches = list(fresh_batches(data, 7, 15, seed=4))
    assert len(batches) == 15
    assert all(len(b) == 7 for b in batches)
    with torch.no_grad():
        expected = naive_per_query(network, batches, x, 3)
    found = per_query(network, data, x, n_samples=3, batch_size=8, seed=4)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    assert all(torch.equal(value, network.state_dict()[name]) for name, value in before.items())


def test_per_query_in_small_passes_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    network, data = trained().double(), Augmented(images().x)
    x = standardize(images(3, seed=9).x)
    whole = per_query(network, data, x, n_samples=4, batch_size=8, seed=4)
    monkeypatch.setitem(per_query.__globals__, "ROWS", 5)
    torch.testing.assert_close(per_query(network, data, x, n_samples=4, batch_size=8, seed=4), whole)


@pytest.mark.parametrize(("batch_size", "n_samples", "n"), [(1, 2, 2), (8, 0, 2), (8, 2, 0)])
def test_per_query_refuses_what_it_cannot_do(batch_size: int, n_samples: int, n: int) -> None:
    x = standardize(images(2).x)[:n]
    with pytest.raises(mcbn.MCBNError, match="per_query needs"):
        per_query(trained(), Augmented(images().x), x, n_samples=n_samples, batch_size=batch_size, seed=0)


def logits_and_labels(draws: int = 16, n: int = 50) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return 2 * torch.randn(draws, n, 10, generator=generator), torch.randint(10, (n,), generator=generator)


def test_curve_is_the_direct_computation_on_disjoint_sets() -> None:
    logits, y = logits_and_labels(12)
    found = curve(logits, y, [1, 4, 5, 16])
    assert [(s.n_samples, s.n_sets) for s in found] == [(1, 12), (4, 3), (5, 2)]
    for scored in found:
        T = scored.n_samples
        values = []
        for s in range(12 // T):
            p = logits[s * T : (s + 1) * T].double().softmax(2).mean(0)
            values.append(sum(math.log(p[n, y[n]]) for n in range(len(y))) / len(y))
        assert scored.scores["pll"] == pytest.approx(np.mean(values), abs=1e-12)
        assert scored.errors["pll"] == pytest.approx(np.std(values, ddof=1) / math.sqrt(len(values)), abs=1e-12)


def test_curve_cannot_fall_where_sets_are_nested() -> None:
    found = curve(*logits_and_labels(16), [1, 2, 4, 8, 16])
    values = [scored.scores["pll"] for scored in found]
    assert values == sorted(values)
    assert "pll" not in found[-1].errors  # one set has no error


def test_curve_at_all_draws_is_the_score_of_the_prediction() -> None:
    network, x = trained(), standardize(images(20, seed=9).x)
    y = torch.arange(20) % 10
    bayes = mcbn.MCBN(network, "classification").fit(Augmented(images().x), n_samples=4, batch_size=8)
    prediction = bayes.predict(x)
    (scored,) = curve(bayes.sample(x), y, [4])
    wrong = prediction.label != y
    expected = {
        "pll": prediction.log_prob(y).mean(),
        "accuracy": (~wrong).double().mean(),
        "ece": mcbn.metrics.ece(prediction.probs, y),
        "brier": mcbn.metrics.brier(prediction.probs, y),
        "auroc_entropy": mcbn.metrics.auroc(prediction.entropy, wrong),
        "auroc_max_probability": mcbn.metrics.auroc(1 - prediction.probs.amax(1), wrong),
        "auroc_mutual_information": mcbn.metrics.auroc(prediction.mutual_information, wrong),
    }
    assert scored.scores.keys() == expected.keys()
    for name, value in expected.items():
        assert scored.scores[name] == pytest.approx(float(value), abs=2e-2 if "auroc" in name else 1e-5), name


def test_scores_leave_out_what_cannot_be_told() -> None:
    probs = torch.eye(10).double()[None] * 0.9 + 0.01
    assert set(score(probs, torch.arange(10))) == {"pll", "accuracy", "ece", "brier"}


def test_difference_of_estimators_is_paired() -> None:
    shared, y = logits_and_labels(16)
    gap, error = difference(shared[:4], shared[:4], y)
    assert (gap, error) == (0.0, 0.0)
    gap, error = difference(shared[:4], shared[4:], y)
    p = [shared[i : i + 4].double().softmax(2).mean(0)[range(50), y].log().numpy() for i in range(0, 16, 4)]
    d = p[0] - np.mean(p[1:], 0)
    sets = [v.mean() for v in p[1:]]
    assert gap == pytest.approx(d.mean(), abs=1e-12)
    assert error == pytest.approx(math.sqrt(d.var(ddof=1) / 50 + np.var(sets, ddof=1) / 3), abs=1e-12)


def evaluate(seed: int = 0) -> list[dict]:
    data, other = images(), images(20, seed=8)
    parts = {"train": data, "validation": images(10, seed=7), "test": other}
    return list(Evaluation(trained(), TINY, **parts, seed=seed).rows())


def test_evaluation_measures_every_method_once() -> None:
    rows = evaluate()
    keys = [(r["method"], r["part"], r["batch_size"], r["n_samples"]) for r in rows]
    assert sorted(keys, key=str) == sorted(
        [
            ("plain", "validation", None, None),
            ("plain", "test", None, None),
            *(("mcbn", "test", 8, T) for T in (1, 2, 4)),
            *(("mcbn", "validation", M, 2) for M in (4, 8)),
            ("mcbn", "test", 4, 2),
            ("mcbn_per_query", "query", 8, 2),
            ("mcbn_shared", "query", 7, 2),
            ("mcbn_shared", "query", 8, 2),
        ],
        key=str,
    )
    assert {r["n_images"] for r in rows if r["part"] == "query"} == {6}
    scores = [[r["scores"] for r in evaluate()], [r["scores"] for r in rows]]
    assert scores[0] == scores[1]


def test_evaluation_refuses_labels_outside_the_classes() -> None:
    bad = Images(images().x, images().y + 5)
    with pytest.raises(mcbn.MCBNError, match="labels must be"):
        Evaluation(trained(), TINY, train=images(), validation=images(), test=bad, seed=0)


# The study


def small_study(monkeypatch: pytest.MonkeyPatch) -> None:
    """CIFAR-10 of random images, enough of them for the held-out indices."""
    generator = torch.Generator().manual_seed(0)
    few = torch.randint(0, 256, (50, 3, 32, 32), dtype=torch.uint8, generator=generator)
    large = Images(few[torch.arange(50_000) % 50], torch.arange(50_000) % 10)
    monkeypatch.setattr(study, "cifar10", lambda part: large)


STUDY = dataclasses.replace(TINY, steps=40, rates=((0, 0.05), (15, 1e-4)), n_train=40, n_validation=10, n_test=20)


@pytest.mark.slow
def test_study_trains_measures_and_records_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_study(monkeypatch)
    path = study.run(STUDY, tmp_path, seeds=[1, 2])
    files = sorted(p.name for p in (tmp_path / "networks").iterdir())
    assert files == ["resnet8-seed1.safetensors", "resnet8-seed2.safetensors"]
    found = mcbn.records.read(path)
    assert [r["seed"] for r in found if r["kind"] == study.TRAINING] == [1, 2]
    assert len([r for r in found if r["kind"] == study.KIND]) == 22
    assert all({"config_hash", "commit", "device", "hardware", "seconds", "seed"} <= r.keys() for r in found[1:12])
    study.run(STUDY, tmp_path, seeds=[1, 2])
    assert mcbn.records.read(path) == found
    elsewhere = tmp_path / "elsewhere"
    study.run(STUDY, elsewhere, seeds=[1], networks=tmp_path / "networks")
    assert not (elsewhere / "networks").exists()
    assert [r["scores"] for r in mcbn.records.read(elsewhere / "records.jsonl")[1:]] == [
        r["scores"] for r in found[1:12]
    ]


def test_study_with_dropout_trains_and_leaves_measuring_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_study(monkeypatch)
    path = study.run(STUDY, tmp_path, seeds=[1], dropout=0.1)
    assert load_network(tmp_path / "networks" / "resnet8-dropout-seed1.safetensors").dropout == 0.1
    assert [r["kind"] for r in mcbn.records.read(path)] == [study.TRAINING]


def test_seeds_of_a_study_can_be_trained_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_study(monkeypatch)
    short = dataclasses.replace(STUDY, steps=6)
    first = study.train_one(short, tmp_path / "networks", seed=2, dropout=0.1)
    before = first.read_bytes()
    path = study.run(short, tmp_path, seeds=[1, 2, 3], dropout=0.1, together=True)
    assert first.read_bytes() == before  # what is there is not trained again
    facts = {r["seed"]: r["together"] for r in mcbn.records.read(path)}
    assert facts == {1: 2, 2: 1, 3: 2}
    alone = study.train_one(short, tmp_path / "alone", seed=3, dropout=0.1)
    assert same(load_network(alone), load_network(tmp_path / "networks" / "resnet8-dropout-seed3.safetensors"))


def test_study_refuses_networks_of_other_settings_and_impossible_seeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_study(monkeypatch)
    study.train_one(STUDY, tmp_path / "networks", seed=1)
    with pytest.raises(mcbn.MCBNError, match="other settings"):
        study.run(dataclasses.replace(STUDY, steps=3), tmp_path, seeds=[1])
    for seeds in ([], [1, 1], [-1]):
        with pytest.raises(mcbn.MCBNError, match="seeds must be"):
            study.run(STUDY, tmp_path, seeds=seeds)
    with pytest.raises(mcbn.MCBNError, match="no profile 'slow'"):
        find_profile("slow")


@pytest.mark.slow
def test_quick_profile_runs_from_the_command_line(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from mcbn.cli import app

    try:
        find_cifar10()
    except mcbn.MCBNError:
        pytest.skip("CIFAR-10 is not here; `mcbn data cifar10` fetches it")
    arguments = ["reproduce", "cifar10", "--profile", "quick", "--seeds", "1", "--out", str(tmp_path)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "networks",
        "records.jsonl",
        "resnet8-pll.png",
        "summary.csv",
        "table.md",
    ]
    rows = [r for r in mcbn.records.read(tmp_path / "records.jsonl") if r["kind"] == study.KIND]
    plain = next(r for r in rows if (r["method"], r["part"]) == ("plain", "test"))
    assert plain["scores"]["accuracy"] > 0.2  # chance is 0.1


def test_the_command_line_refuses_seeds_that_are_no_numbers(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from mcbn.cli import app

    result = CliRunner().invoke(app, ["reproduce", "cifar10", "--seeds", "one", "--out", str(tmp_path / "x")])
    assert result.exit_code == 2
    assert "seeds are whole numbers" in result.output
    assert not (tmp_path / "x").exists()
