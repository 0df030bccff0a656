"""Several networks as one: moments over all draws, variance within and between, the verbs of one network."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import mcbn
from untouched import untouched

T = 12


def networks(outputs: int = 3) -> list[nn.Module]:
    torch.manual_seed(0)
    first = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6, momentum=None), nn.ReLU(), nn.Linear(6, outputs))
    second = nn.Sequential(nn.Linear(4, 9), nn.BatchNorm1d(9, momentum=None), nn.Tanh(), nn.Linear(9, outputs))
    for network in (first, second):
        network.double()(data()[0])
        network.eval()
    return [first, second]


def data(task: str = "regression", n: int = 60) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(n, 4, generator=generator, dtype=torch.float64)
    y = torch.randn(n, 3, generator=generator, dtype=torch.float64)
    return x, y if task == "regression" else y.argmax(1)


def several(task: str = "regression", **options: Any) -> Any:
    return mcbn.MCBN(networks(), task).fit(data()[0], n_samples=T, batch_size=16, **options)


def singles(task: str = "regression") -> list[mcbn.MCBN]:
    return [mcbn.MCBN(network, task).fit(data()[0], n_samples=T, batch_size=16) for network in networks()]


def test_moments_are_those_over_all_draws_of_all_members() -> None:
    x = data()[0]
    samples = torch.cat([bayes.sample(x) for bayes in singles()])  # (S T, N, D)
    bayes = several()
    pred = bayes.predict(x, covariance=True)
    assert torch.equal(bayes.sample(x), samples)
    assert pred.n_samples == 2 * T
    torch.testing.assert_close(pred.mean, samples.mean(0))
    torch.testing.assert_close(pred.epistemic, samples.var(0, correction=0))
    offsets = samples - samples.mean(0)
    torch.testing.assert_close(pred.epistemic_covariance, torch.einsum("tni,tnj->nij", offsets, offsets) / (2 * T))
    bayes.tau = 2.0
    y = data()[1]
    wanted = mcbn.metrics.pll(samples, y, 2.0)
    torch.testing.assert_close(bayes.predict(x).log_prob(y), wanted)


def test_variance_splits_into_within_and_between() -> None:
    x = data()[0]
    means = torch.stack([bayes.predict(x).mean for bayes in singles()])
    within = torch.stack([bayes.predict(x).epistemic for bayes in singles()]).mean(0)
    pred = several().predict(x)
    torch.testing.assert_close(pred.between, (means - means.mean(0)).square().mean(0))
    torch.testing.assert_close(pred.within, within)
    one = singles()[0].predict(x)
    assert one.between is None
    assert torch.equal(one.within, one.epistemic)


def test_classes_average_the_probabilities_of_all_draws() -> None:
    x = data()[0]
    probs = torch.cat([bayes.sample(x) for bayes in singles("classification")]).softmax(2)
    pred = several("classification").predict(x)
    torch.testing.assert_close(pred.probs, probs.mean(0))
    torch.testing.assert_close(pred.variance, probs.var(0, correction=0))
    torch.testing.assert_close(pred.expected_entropy, torch.special.entr(probs).sum(2).mean(0))
    torch.testing.assert_close(pred.within + pred.between, pred.variance)
    plain = torch.stack([bayes.plain(x).softmax(1) for bayes in singles("classification")]).mean(0)
    torch.testing.assert_close(several("classification").plain(x).softmax(1), plain)


def test_members_share_seeds() -> None:
    first, second = several().members
    assert first.posterior.seed == second.posterior.seed
    assert not torch.equal(several(seed=1).predict(data()[0]).mean, several().predict(data()[0]).mean)


def test_linear_pools_the_linear_predictions() -> None:
    x = data()[0]
    pred = several().predict(x, method="linear")
    means = torch.stack([bayes.predict(x, method="linear").mean for bayes in singles()])
    torch.testing.assert_close(pred.mean, means.mean(0))
    torch.testing.assert_close(pred.between, means.var(0, correction=0))


def test_loader_equals_tensor_and_nothing_is_touched() -> None:
    x, y = data()
    nets = networks()
    with untouched(nets[0]), untouched(nets[1]):
        bayes = mcbn.MCBN(nets, "regression").fit(x, n_samples=T, batch_size=16)
        whole = bayes.tune((x, y)).predict(x)
    batched = bayes.predict(DataLoader(TensorDataset(x, y), batch_size=25))
    torch.testing.assert_close(batched.mean, whole.mean)
    torch.testing.assert_close(batched.between, whole.between)


@pytest.mark.parametrize("sizes", [None, [16]], ids=["alone", "with sizes"])
def test_a_tau_at_its_bound_is_said(sizes: list[int] | None) -> None:
    bayes, x = several(), data()[0]
    y = bayes.predict(x).mean + 1e-3 * data()[1]
    with pytest.warns(UserWarning, match="the noise stopped at its lower bound"):
        bayes.tune((x, y), batch_sizes=sizes)


@pytest.mark.parametrize("task", ["regression", "classification"])
def test_tune_calibrate_save_and_load(task: str, tmp_path: Path) -> None:
    x, y = data(task)
    bayes = several(task).tune((x, y), batch_sizes=[4, 16, 64])
    assert {member.posterior.batch_size for member in bayes.members} <= {4, 16, 64}
    assert torch.equal(bayes.noise_precision, bayes.members[1].noise_precision)
    again = several(task).tune((x, y), batch_sizes=[bayes.posterior.batch_size])
    assert float(mcbn_loss(bayes, x, y)) <= float(mcbn_loss(several(task).tune((x, y)), x, y)) + 1e-9
    assert again.posterior.batch_size in (16, bayes.posterior.batch_size)
    bayes.calibrate((x, y), level=0.5)
    bayes.save(tmp_path / "both.mcbn")
    loaded: Any = mcbn.MCBN.load(tmp_path / "both.mcbn", networks())
    here, there = bayes.predict(x), loaded.predict(x)
    if task == "regression":
        assert torch.equal(here.interval()[0], there.interval()[0])
    else:
        assert torch.equal(here.set(), there.set())
    with pytest.raises(mcbn.MCBNError, match=r"holds the draws of 2 network\(s\), but 1 were given"):
        mcbn.MCBN.load(tmp_path / "both.mcbn", networks()[:1])


def mcbn_loss(bayes: Any, x: Tensor, y: Tensor) -> Tensor:
    pred = bayes.predict(x)
    if y.ndim == 1:
        return -pred.log_prob(y).mean()
    scores = mcbn.metrics.crps_gaussian(pred.mean, pred.variance, y).mean(0)
    return scores.sum()


def test_mistakes() -> None:
    other = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5, momentum=None), nn.Linear(5, 2)).double()
    other(data()[0])
    bayes = mcbn.MCBN([networks()[0], other.eval()], "regression").fit(data()[0], n_samples=3, batch_size=8)
    with pytest.raises(mcbn.MCBNError, match=r"members must give outputs of one shape; got \(60, 3\), \(60, 2\)"):
        bayes.predict(data()[0])
    for verb in (bayes.sample, bayes.plain_mean, lambda x: bayes.tune((x, x[:, :3]), score="pll")):
        with pytest.raises(mcbn.MCBNError, match=r"members must give outputs of one shape; got .*3\), .*2\)"):
            verb(data()[0])
    with pytest.raises(mcbn.MCBNError, match="at least one network; got an empty list"):
        mcbn.MCBN([], "regression")
    with pytest.raises(mcbn.MCBNError, match=r"model must be a torch\.nn\.Module"):
        mcbn.MCBN([3], "regression")
    with pytest.raises(mcbn.MCBNError, match="not fitted yet"):
        mcbn.MCBN(networks(), "regression").predict(data()[0])


@pytest.mark.parametrize("task", ["regression", "classification"])
def test_a_comparison_scores_all_members_together(task: str) -> None:
    bayes, (x, y) = several(task), data(task)
    compared = mcbn.compare(bayes, (x[:30], y[:30]), (x[30:], y[30:]))
    tuned = several(task).tune((x[:30], y[:30])).predict(x[30:])
    plain = mcbn.baselines.DeepEnsemble(networks(), task)
    plain = (plain.tune((x[:30], y[:30])) if task == "regression" else plain).predict(x[30:])
    for method, pred in ((0, plain), (-2, tuned)):
        scores = mcbn.metrics.crps_gaussian(pred.mean, pred.variance, y[30:]).mean(1) if task == "regression" else None
        losses = scores if scores is not None else -pred.log_prob(y[30:])
        torch.testing.assert_close(compared.losses[method], losses, rtol=1e-6, atol=1e-9)
    assert bayes.tau == several(task).tau
    other = several(task).calibrate((x, y), score="absolute" if task == "regression" else "aps")
    mcbn.compare(bayes, (x[:30], y[:30]), (x[30:], y[30:]), others={"other": other})
    assert other.tau == several(task).tau
    assert other.calibration is not None


def test_what_changes_predictions_drops_the_calibration_with_a_warning() -> None:
    x, y = data()
    bayes = several()
    for change in (
        lambda: bayes.tune((x, y)),
        lambda: bayes.tune((x, y), batch_sizes=[4, 16]),
        lambda: bayes.fit(x, n_samples=T, batch_size=16),
        lambda: setattr(bayes, "tau", 3.0),
        lambda: setattr(bayes.members[1], "tau", 3.0),
        lambda: setattr(bayes.members[0], "posterior", bayes.posterior.at_batch_size(8)),
        lambda: (next(iter(bayes.members[1].posterior.mean.values())).add_(1), bayes.predict(x)),
    ):
        bayes.calibrate((x, y), level=0.5)
        with pytest.warns(UserWarning, match=r"calibration is dropped; call calibrate\(held_out_data\) again"):
            change()
        assert bayes.calibration is None
    bayes.calibrate((x, y), level=0.5)
    assert bayes.at_batch_size(8).calibration is None
    kept = mcbn.MCBN(networks(), "regression").load_state_dict(bayes.state_dict())
    assert torch.equal(kept.predict(x).interval()[0], bayes.predict(x).interval()[0])


def test_members_with_a_head_start_with_the_noise_that_the_networks_give() -> None:
    heads, x = networks(outputs=2), data()[0]
    pred = mcbn.MCBN(heads, "regression", noise="head").fit(x, n_samples=T, batch_size=16).predict(x)
    single = [mcbn.MCBN(net, "regression", noise="head").fit(x, n_samples=T, batch_size=16).predict(x) for net in heads]
    torch.testing.assert_close(pred.aleatoric, torch.stack([one.aleatoric for one in single]).mean(0))


def test_a_file_of_several_is_not_that_of_one(tmp_path: Path) -> None:
    several().save(tmp_path / "nets.mcbn")
    with pytest.raises(mcbn.MCBNError, match=r"takes a list of 2 networks for it"):
        mcbn.MCBN.load(tmp_path / "nets.mcbn", networks()[0])


def test_adapt_moves_every_member_and_leaves_the_old_one() -> None:
    bayes, home, away = several("classification"), data(n=800)[0], 3 * data(n=200)[0] + 2
    before = bayes.predict(away).probs
    adapted = bayes.adapt(away, reference=home)
    alone = [one.adapt(away, reference=home) for one in singles("classification")]
    assert all(one.adaptation.moved for one in alone)
    torch.testing.assert_close(adapted.predict(away).probs, sum(one.predict(away).probs for one in alone) / 2)
    assert torch.equal(bayes.predict(away).probs, before)


def test_a_state_dict_holds_every_member() -> None:
    bayes, x = several(), data()[0]
    bayes.tau = 3.0
    empty = mcbn.MCBN(networks(), "regression")
    again = empty.load_state_dict(bayes.state_dict())
    assert again is empty
    assert torch.equal(again.predict(x).variance, bayes.predict(x).variance)
    with pytest.raises(mcbn.MCBNError, match="of 1 networks, this ensemble of 2"):
        again.load_state_dict({k: v for k, v in bayes.state_dict().items() if k.startswith("0.")})
    broken = bayes.state_dict() | {"1.mean.1": torch.zeros(T, 2)}
    with pytest.raises(mcbn.MCBNError):
        again.load_state_dict(broken)
    assert torch.equal(again.predict(x).variance, bayes.predict(x).variance)  # nothing half taken over


def test_a_posterior_for_all_networks_at_once_is_refused() -> None:
    bayes = several()
    with pytest.raises(mcbn.MCBNError, match="2 networks have a posterior each"):
        bayes.posterior = bayes.posterior.at_batch_size(64)


def test_an_iterator_is_not_for_several_networks() -> None:
    blocks = (data(n=600)[0][i : i + 16] for i in range(0, 600, 16))
    with pytest.raises(mcbn.MCBNError, match="would use the iterator up"):
        mcbn.MCBN(networks(), "regression").fit(blocks, n_samples=T)


def test_a_watch_is_that_of_the_first_network() -> None:
    x, bayes = data()[0], several()
    watch = bayes.watch(data(n=400)[0], batch_size=4, false_alarms=0.1)
    assert torch.equal(bayes.predict(x, watch=watch).novelty.p_value, watch.novelty(x).p_value)
    twin = copy.deepcopy(bayes.members[0].model)
    twin[3].bias.data += 1
    alike = mcbn.MCBN([bayes.members[0].model, twin], "regression").fit(x, n_samples=T, batch_size=16)
    with pytest.raises(mcbn.MCBNError, match="other weights"):
        alike.adapt(x + 3, reference=alike.watch(data(n=400)[0], batch_size=4, false_alarms=0.1), strength=1.0)


def test_a_fit_that_fails_leaves_every_member_as_it_was() -> None:
    class Ending(torch.utils.data.Dataset):  # type: ignore[type-arg]
        left = 30 * 16  # enough for the first network

        def __len__(self) -> int:
            return 60

        def __getitem__(self, row: int) -> Tensor:
            self.left -= 1
            if self.left < 0:
                raise KeyboardInterrupt
            return data()[0][row]

    bayes, x = several(), data()[0]
    before = bayes.sample(x)
    with pytest.raises(KeyboardInterrupt):
        bayes.fit(Ending(), n_samples=20, batch_size=16, seed=5)
    assert [member.posterior.n_samples for member in bayes.members] == [T, T]
    assert torch.equal(bayes.sample(x), before)


@pytest.mark.parametrize("task", ["classification", "multilabel"])
def test_small_disagreement_of_classes_keeps_its_digits(task: str) -> None:
    networks_ = [network.float() for network in networks()]
    x = data()[0].float()
    bayes = mcbn.MCBN(networks_, task).fit(x, n_samples=T, batch_size=16)
    bayes.tau = 0.01  # all probabilities nearly equal
    logits = bayes.sample(x).double() * 0.01  # (2 T, N, K)
    p = logits.softmax(2) if task == "classification" else torch.stack([logits, -logits], 2).sigmoid()
    naive = torch.special.entr(p.mean(0)).sum(1) - torch.special.entr(p).sum(2).mean(0)
    torch.testing.assert_close(bayes.predict(x).mutual_information.double(), naive, rtol=1e-3, atol=1e-12)


def test_a_warning_taken_for_an_error_leaves_tau_and_calibration_together() -> None:
    x, y = data()
    for bayes in (several(), singles()[0]):
        bayes.tau = 2.0
        bayes.calibrate((x, y))
        with pytest.raises(UserWarning, match="calibration is dropped"):
            bayes.tau = 50.0
        assert bayes.tau == 2.0
        assert bayes.calibration is not None
