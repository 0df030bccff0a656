"""Moving a posterior to where the inputs are: equations, gate, label shift; centring on running statistics."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mcbn
from deployed import M, faded, fitted, images, reference, table, trained, watched
from mcbn.field.adapt import Averages, Move, _Inputs, _move, _transport
from untouched import untouched


def some_averages(C: int, seed: int) -> Averages:
    generator = torch.Generator().manual_seed(seed)
    values = [torch.rand(C, dtype=torch.float64, generator=generator) + 0.2 for _ in range(4)]
    return Averages(*values)


def accuracy(bayes: Any, x: Tensor, y: Tensor) -> float:
    return float((bayes.predict(x).label == y).double().mean())


# The equations


@pytest.mark.parametrize(("v", "w"), [(1.0, 1.0), (0.3, 0.8), (0.0, 0.0)])
def test_transport_is_its_equation(v: float, w: float) -> None:
    before, now, drawn = some_averages(4, 1), some_averages(4, 2), fitted("table").posterior
    mean, var = torch.rand(6, 4, dtype=torch.float64), torch.rand(6, 4, dtype=torch.float64)
    posterior = mcbn.Posterior({"a": mean}, {"a": var}, drawn.batch_size)
    moved = posterior.moved(*_transport({"a": before}, {"a": now}, {"a": Move(0, 1, (v, w))}))
    for t in range(6):
        for c in range(4):
            rho = float(now.var[c] / before.var[c]) ** w
            mu_d = float(before.mean[c]) + v * float(now.mean[c] - before.mean[c])
            expected = mu_d + float(mean[t, c] - before.mean[c]) * math.sqrt(rho)
            assert float(moved.mean["a"][t, c]) == pytest.approx(expected, rel=1e-10)
            assert float(moved.var["a"][t, c]) == pytest.approx(float(var[t, c]) * rho, rel=1e-10)


def test_without_a_change_nothing_moves() -> None:
    before = some_averages(4, 1)
    shift, scale = _transport({"a": before}, {"a": before}, {"a": Move(0, 1, (1, 1))})
    torch.testing.assert_close(shift, torch.zeros(8, dtype=torch.float64))
    torch.testing.assert_close(scale, torch.ones(8, dtype=torch.float64))


def test_a_channel_that_was_dead_gets_the_variance_of_now() -> None:
    before, now = some_averages(2, 1), some_averages(2, 2)
    before.var[0] = 0
    posterior = mcbn.Posterior({"a": torch.zeros(3, 2).double()}, {"a": torch.zeros(3, 2).double()}, 8)
    moved = posterior.moved(*_transport({"a": before}, {"a": now}, {"a": Move(0, 1, (1, 1))}))
    assert moved.var["a"][:, 0].tolist() == pytest.approx([float(now.var[0])] * 3)


def test_strength_is_the_share_that_chance_does_not_explain() -> None:
    before, now, chance = some_averages(5, 1), some_averages(5, 2), 0.02
    noise = moves = log_noise = log_moves = 0.0
    for c in range(5):
        moves += float(now.mean[c] - before.mean[c]) ** 2 / float(before.var[c])
        noise += float(before.mean_noise[c] / before.var[c]) * chance
        log_moves += math.log(float(now.var[c] / before.var[c])) ** 2
        log_noise += float(before.log_var_noise[c]) * chance
    move = _move(before, now, chance, "auto")
    assert move.strength == pytest.approx((1 - noise / moves, 1 - log_noise / log_moves))
    assert move.offset == pytest.approx(math.sqrt(moves / 5))
    assert _move(before, before, chance, "auto").strength == (0, 0)
    assert _move(before, now, chance, 0.25).strength == (0.25, 0.25)


@pytest.mark.parametrize("family", ["gaussian", "layerwise", "diagonal"])
def test_a_gaussian_moves_as_its_draws_do(family: str) -> None:
    torch.manual_seed(0)
    bayes = mcbn.MCBN(trained("table"), "regression").fit(
        table(600, 1)[0], n_samples=40, batch_size=8, posterior=family
    )
    drawn, P = bayes.posterior, 2 * (12 + 10)
    shift, scale = torch.randn(P), 0.5 + torch.rand(P)
    shift[12:24] = shift[34:] = 0  # standard deviations are scaled only
    moved = drawn.moved(shift, scale)
    assert moved.family == family
    plain = mcbn.Posterior(drawn.mean, drawn.var, 8).moved(shift, scale)
    for name in drawn.layers:
        torch.testing.assert_close(moved.mean[name], plain.mean[name], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(moved.var[name], plain.var[name], rtol=1e-4, atol=1e-4)


# Adapting


def test_faded_images_are_repaired_and_the_old_mcbn_stays() -> None:
    bayes, (x, y) = fitted("images"), images(500, 41)
    before = {name: value.clone() for name, value in bayes.posterior.mean.items()}
    with untouched(trained("images")):
        adapted = bayes.adapt(faded(images(128, 42)[0]), reference=watched("images"))
    assert accuracy(bayes, faded(x), y) < 0.8
    assert accuracy(adapted, faded(x), y) > 0.95
    assert all(torch.equal(value, before[name]) for name, value in bayes.posterior.mean.items())
    assert bayes.adaptation is None
    assert adapted.adaptation.moved
    said = adapted.adaptation.explain()
    assert said.startswith("moved by 128 inputs (p = 0.001), most in layer 1: activations")
    assert "times narrower than in the reference" in said


def test_few_inputs_are_enough_to_see_a_shift_and_repair_it() -> None:
    bayes, (x, y) = fitted("images"), images(500, 41)
    for n in (16, 32):
        adapted = bayes.adapt(faded(images(n, 42)[0]), reference=watched("images"))
        assert adapted.adaptation.moved
        assert accuracy(adapted, faded(x), y) > 0.9


def test_clean_inputs_move_nothing() -> None:
    bayes = fitted("images")
    adapted = bayes.adapt(images(128, 43)[0], reference=watched("images"))
    assert adapted.posterior is bayes.posterior
    assert not adapted.adaptation.moved
    assert adapted.adaptation.explain().startswith("not moved: 128 inputs show no shift")


@pytest.mark.parametrize(
    ("kind", "classes"), [("table", (0,)), ("table", (0, 1)), ("images", (0,)), ("images", (0, 1))]
)
def test_a_clean_pool_of_few_classes_does_no_harm(kind: str, classes: tuple[int, ...]) -> None:
    bayes, draw = fitted(kind), table if kind == "table" else images
    adapted = bayes.adapt(draw(200, 44, classes)[0], reference=watched(kind))
    for chosen in ((0, 1, 2), classes):
        x, y = draw(1000, 45, chosen)
        assert accuracy(adapted, x, y) >= accuracy(bayes, x, y) - 0.01


def test_a_shifted_pool_of_two_classes_is_repaired() -> None:
    bayes, (x, y) = fitted("images"), images(500, 46)
    adapted = bayes.adapt(faded(images(200, 47, classes=(0, 1))[0]), reference=watched("images"))
    assert accuracy(bayes, faded(x), y) < 0.8
    assert accuracy(adapted, faded(x), y) > 0.95
    assert adapted.adaptation.classes.tolist() == pytest.approx([0.5, 0.5, 0], abs=0.12)


@pytest.mark.parametrize(("classes", "mixes"), [((0, 1, 2), False), ((0, 1), True)])
def test_the_reference_is_mixed_only_for_inputs_of_few_classes(classes: tuple[int, ...], mixes: bool) -> None:
    bayes, pool = fitted("images"), faded(images(200, 33, classes)[0])
    adapted = bayes.adapt(pool, reference=watched("images"))
    plain = _Inputs(bayes, pool, watched("images"))._transported(None, "auto").posterior
    assert adapted.adaptation is not None
    assert adapted.adaptation.moved
    kept = all(torch.equal(mean, plain.mean[name]) for name, mean in adapted.posterior.mean.items())
    assert kept is not mixes


def test_one_shifted_class_is_doubted() -> None:
    adapted = fitted("images").adapt(faded(images(200, 48, classes=(2,))[0]), reference=watched("images"))
    assert "may not be told apart" in adapted.adaptation.explain()


def test_what_was_moved_and_saved_is_not_moved_twice(tmp_path: Path) -> None:
    bayes, x = fitted("table"), table(60, 5)[0] + 3
    adapted = bayes.adapt(x, reference=watched("table"))
    assert adapted.adaptation.moved
    adapted.save(tmp_path / "moved.mcbn")
    for again in (
        mcbn.MCBN.load(tmp_path / "moved.mcbn", bayes.model),
        mcbn.MCBN(bayes.model, "classification").load_state_dict(adapted.state_dict()),
    ):
        with pytest.raises(mcbn.MCBNError, match="adapt moved this posterior before it was saved"):
            again.adapt(x, reference=watched("table"))
        again.save(tmp_path / "again.mcbn")
        with pytest.raises(mcbn.MCBNError, match="adapt moved this posterior before it was saved"):
            mcbn.MCBN.load(tmp_path / "again.mcbn", bayes.model).adapt(x, reference=watched("table"))
        again.load_state_dict(bayes.state_dict())
        moved = again.adapt(x, reference=watched("table")).posterior
        assert all(torch.allclose(moved.mean[n], adapted.posterior.mean[n]) for n in moved.layers)
    adapted.load_state_dict(bayes.state_dict())
    assert adapted.adaptation is None
    assert again.load_state_dict(adapted.state_dict()).moved_before is False


def test_adapting_again_is_adapting_to_all_at_once() -> None:
    bayes, x = fitted("images"), faded(images(96, 49)[0])
    once = bayes.adapt(x, reference=watched("images"))
    twice = bayes.adapt(x[:40], reference=watched("images")).adapt(x[40:], reference=watched("images"))
    assert twice.adaptation.n_inputs == 96
    for name in bayes.posterior.layers:
        torch.testing.assert_close(twice.posterior.mean[name], once.posterior.mean[name], rtol=1e-4, atol=1e-5)


def test_a_number_is_that_share_of_the_move_whatever_the_watch_says() -> None:
    bayes, x = fitted("table", "regression"), table(64, 50)[0] + 1
    still, half, whole = (bayes.adapt(x, reference=reference("table"), strength=s) for s in (0.0, 0.5, 1.0))
    mean = {s: b.posterior.mean["1"].mean(0) for s, b in ((0, still), (1, half), (2, whole))}
    torch.testing.assert_close(mean[0], bayes.posterior.mean["1"].mean(0), rtol=1e-4, atol=1e-5)
    assert float((mean[2] - mean[0]).norm()) > float((mean[1] - mean[0]).norm()) > 0
    recorded = torch.stack([trained("table")[0](batch).mean(0) for batch in x.split(M)]).mean(0)
    torch.testing.assert_close(mean[2], recorded.detach(), rtol=0, atol=0.3)  # the training draws' own offset stays


def test_an_adapted_posterior_is_an_ordinary_one(tmp_path: Path) -> None:
    bayes, (x, y) = fitted("images"), images(64, 51)
    adapted = bayes.adapt(faded(x), reference=watched("images"))
    adapted.save(tmp_path / "adapted.safetensors")
    loaded = mcbn.MCBN.load(tmp_path / "adapted.safetensors", trained("images"))
    torch.testing.assert_close(loaded.predict(faded(x)).probs, adapted.predict(faded(x)).probs)
    assert adapted.predict(faded(x), method="linear").probs.shape == (64, 3)
    assert adapted.posterior.as_gaussian().sample(50).n_samples == 50
    tau = bayes.tau
    adapted.tune((faded(x), torch.where(torch.arange(64) % 8 > 0, y, (y + 1) % 3)))  # it is wrong at times
    assert bayes.tau == tau


def test_layers_that_are_not_chosen_stay() -> None:
    bayes = mcbn.MCBN(trained("images"), "classification", layers=1).fit(images(600, 1)[0], n_samples=8, batch_size=8)
    adapted = bayes.adapt(faded(images(64, 52)[0]), reference=reference("images"))
    assert list(adapted.adaptation.moves) == ["1"]


@pytest.mark.parametrize("n", [0, 1])
def test_too_few_inputs_are_refused(n: int) -> None:
    with pytest.raises(mcbn.MCBNError, match=f"at least 2 unlabelled inputs, got {n}"):
        fitted("images").adapt(images(2, 1)[0][:n], reference=watched("images"))


@pytest.mark.parametrize("strength", ["all", -0.1, 1.5, None, True])
def test_impossible_strengths_are_refused(strength: Any) -> None:
    with pytest.raises(mcbn.MCBNError, match='strength must be "auto" or a number from 0 to 1'):
        fitted("images").adapt(images(8, 1)[0], reference=watched("images"), strength=strength)


def test_watches_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    with pytest.raises(mcbn.MCBNError, match="make a watch with this network"):
        fitted("images").adapt(images(8, 1)[0], reference=watched("table"))
    from mcbn.field.watch import Watch

    watched("images").save(tmp_path / "watch.safetensors")
    loaded = Watch.load(tmp_path / "watch.safetensors", fitted("images"))
    with pytest.raises(mcbn.MCBNError, match="without its reference"):
        fitted("images").adapt(images(8, 1)[0], reference=loaded)
    with pytest.raises(mcbn.MCBNError, match="inputs have shape"):
        fitted("images").adapt(torch.zeros(8, 3, 16, 16), reference=watched("images"))
    with pytest.raises(mcbn.MCBNError, match="non-finite"):
        fitted("images").adapt(torch.full((16, 3, 12, 12), math.nan), reference=watched("images"))


# Centring on running statistics


@pytest.mark.parametrize("family", ["sample", "gaussian", "layerwise", "diagonal"])
def test_draws_of_other_data_average_to_the_running_statistics(family: str) -> None:
    other, net = 2 * table(600, 60)[0] - 1, trained("table")
    bayes = mcbn.MCBN(net, "classification")
    bayes.fit(other, n_samples=400, batch_size=8, posterior=family, centre="running")
    for name in ("1", "4"):
        norm, drawn = net[int(name)], bayes.posterior
        spread = norm.running_var.sqrt()
        assert float(((drawn.mean[name].mean(0) - norm.running_mean) / spread).abs().max()) < 0.1
        ratio = drawn.var[name].mean(0) / (norm.running_var * 7 / 8)  # biased, M = 8
        assert float((ratio.log()).abs().max()) < 0.35


def test_centring_is_its_equation() -> None:
    other, net = 2 * table(600, 60)[0] - 1, trained("table")
    bayes = mcbn.MCBN(net, "classification")
    with pytest.warns(UserWarning, match="disagree with the running statistics"):
        drawn = bayes.fit(other, n_samples=10, batch_size=8).posterior
    assert 'where nobody has that data, fit(data, centre="running")' in str(bayes.check(other))
    centred = bayes.fit(other, n_samples=10, batch_size=8, centre="running").posterior
    for name in ("1", "4"):
        norm, mean, var = net[int(name)], drawn.mean[name].double(), drawn.var[name].double()
        rho = norm.running_var.double() * 7 / 8 / var.mean(0)
        expected = norm.running_mean.double() + (mean - mean.mean(0)) * rho.sqrt()
        torch.testing.assert_close(centred.mean[name].double(), expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(centred.var[name].double(), var * rho, rtol=1e-4, atol=1e-4)


def test_centring_keeps_the_accuracy_that_stand_in_data_costs() -> None:
    (x, y), net = images(500, 61), trained("images")
    bayes = mcbn.MCBN(net, "classification")
    with pytest.warns(UserWarning, match="disagree with the running statistics"):
        stand_in = accuracy(bayes.fit(faded(images(300, 62)[0]), n_samples=20, batch_size=8), x, y)
    centred = accuracy(bayes.fit(faded(images(300, 62)[0]), n_samples=20, batch_size=8, centre="running"), x, y)
    plain = float((bayes.plain(x).argmax(1) == y).double().mean())
    assert stand_in < plain - 0.03
    assert centred > plain - 0.02


def test_centring_needs_running_statistics_and_whole_fits() -> None:
    net = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4, track_running_stats=False))
    with pytest.raises(mcbn.MCBNError, match=r"layer '1' keeps no running statistics"):
        mcbn.MCBN(net, "regression").fit(table(50, 1)[0], n_samples=3, batch_size=8, centre="running")
    bayes = mcbn.MCBN(trained("table"), "regression")
    with pytest.raises(mcbn.MCBNError, match="centre must be one of"):
        bayes.fit(table(50, 1)[0], n_samples=3, batch_size=8, centre="middle")
    with pytest.raises(mcbn.MCBNError, match="without draws="):
        bayes.fit(table(50, 1)[0], n_samples=3, batch_size=8, centre="running", draws=[0])
