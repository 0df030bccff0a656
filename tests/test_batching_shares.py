"""Draws shared out and merged: the posterior of one process, bit for bit."""

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

import kinds
import mcbn
from mcbn import MCBNError, Posterior
from mcbn.batching import GROUP, shares
from mcbn.engine import constants

T = 2 * GROUP + 7


def small() -> tuple[nn.Module, Tensor]:
    x = torch.randn(200, 5, generator=torch.Generator().manual_seed(0))
    network = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 6), nn.BatchNorm1d(6))
    return kinds.settle(network, x), x


def fit(network: nn.Module, data: object, **options: object) -> Posterior:
    return mcbn.MCBN(network, "regression").fit(data, **{"n_samples": T, "batch_size": 16, **options}).posterior


def equal(a: Posterior, b: Posterior) -> bool:
    assert (a.layers, a.batch_size, a.seed, a.numbers) == (b.layers, b.batch_size, b.seed, b.numbers)
    return all(torch.equal(a.mean[name], b.mean[name]) and torch.equal(a.var[name], b.var[name]) for name in a.layers)


class Noisy(Dataset):
    """Rows with a random transform: its noise must come from (seed, t) too."""

    def __init__(self, x: Tensor) -> None:
        self.x = x

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> Tensor:
        return self.x[i] + 0.01 * torch.randn(5)


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 9])
def test_whole_groups_are_dealt_out_evenly_and_once(workers):
    dealt = shares(T, workers)
    assert [t for part in dealt for t in part] == list(range(T))
    assert all(part.start % GROUP == 0 for part in dealt if part)
    sizes = [-(-len(part) // GROUP) for part in dealt]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("grouped", [True, False])
@pytest.mark.parametrize("workers", [2, 3, 5])
def test_merged_shares_are_the_posterior_of_one_process(workers, grouped, monkeypatch):
    if not grouped:
        monkeypatch.setattr(constants, "CPU_GROUP_WIDTH", 0)
    network, x = small()
    whole = fit(network, x, seed=3)
    parts = [fit(network, x, seed=3, draws=share) for share in shares(T, workers) if share]
    assert equal(Posterior.merge(reversed(parts)), whole)
    assert whole.numbers is None


def test_images_alone_in_their_passes_merge_to_the_same_bits():
    network, x = kinds.make("residual")
    whole = fit(network, x, batch_size=8)
    assert equal(Posterior.merge([fit(network, x, batch_size=8, draws=share) for share in shares(T, 3)]), whole)


def test_random_transforms_and_worker_processes_do_not_matter():
    network, x = small()
    whole = fit(network, DataLoader(Noisy(x), batch_size=16), batch_size=None, n_samples=40)
    loaders = [DataLoader(Noisy(x), batch_size=16), DataLoader(Noisy(x), batch_size=16, num_workers=1)]
    parts = [
        fit(network, loader, batch_size=None, n_samples=40, draws=share)
        for loader, share in zip(loaders, shares(40, 2), strict=True)
    ]
    assert equal(Posterior.merge(parts), whole)


def test_any_set_of_draws_agrees_with_the_whole():
    network, x = small()
    whole = fit(network, x)
    odd = fit(network, x, draws=range(1, T, 2))
    assert odd.numbers == tuple(range(1, T, 2))
    for name in whole.layers:
        torch.testing.assert_close(odd.mean[name], whole.mean[name][1::2])
    merged = Posterior.merge([odd, fit(network, x, draws=[0, 4])])
    assert merged.numbers == tuple(sorted([0, 4, *range(1, T, 2)]))


def test_a_last_group_of_one_draw_takes_the_way_of_all():
    """By itself a single batch would run through the network's own code, whose rounding differs from a group's."""
    x = torch.randn(200, 5, generator=torch.Generator().manual_seed(0))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = nn.Sequential(nn.Linear(5, 200), nn.BatchNorm1d(200), nn.ReLU(), nn.Linear(200, 99))
        network.append(nn.BatchNorm1d(99))
    kinds.settle(network, x)
    whole = fit(network, x, n_samples=GROUP + 1)
    parts = [fit(network, x, n_samples=GROUP + 1, draws=share) for share in shares(GROUP + 1, 2)]
    assert parts[1].numbers == (GROUP,)
    assert equal(Posterior.merge(parts), whole)


def test_a_share_survives_its_file(tmp_path):
    network, x = small()
    parts = []
    for number, share in enumerate(shares(T, 2)):
        bayes = mcbn.MCBN(network, "regression").fit(x, n_samples=T, batch_size=16, seed=5, draws=share)
        bayes.save(tmp_path / f"{number}.mcbn")
        parts.append(mcbn.MCBN.load(tmp_path / f"{number}.mcbn", network).posterior)
    assert equal(Posterior.merge(parts), fit(network, x, seed=5))


def test_what_is_not_one_fit_is_not_merged():
    network, x = small()
    part = fit(network, x, n_samples=8, draws=range(4))
    rest = {"n_samples": 8, "draws": range(4, 8)}
    other = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8))
    bad = {
        "draw 3 is in several": fit(network, x, n_samples=8, draws=range(3, 8)),
        "seed=0 and seed=1": fit(network, x, seed=1, **rest),
        "batch_size=16 and batch_size=12": fit(network, x, batch_size=12, **rest),
        "different layers": fit(kinds.settle(other, x), x, **rest),
        "family 'gaussian'": fit(network, x, n_samples=8).as_gaussian(),
        "then rescale": fit(network, x, **rest).at_batch_size(8),
    }
    for message, second in bad.items():
        with pytest.raises(MCBNError, match=message):
            Posterior.merge([part, second])
    with pytest.raises(MCBNError, match="no parts to merge"):
        Posterior.merge([])
    assert Posterior.merge([part, fit(network, x, **rest)]).numbers is None


@pytest.mark.parametrize("draws", [[], [8], [-1], [1, 1], [0.5]])
def test_draws_that_do_not_exist_are_refused(draws):
    network, x = small()
    with pytest.raises(MCBNError, match="draws="):
        fit(network, x, n_samples=8, draws=draws)


def test_shares_of_a_stream_or_a_gaussian_are_refused():
    network, x = small()

    class Stream(IterableDataset):
        def __iter__(self):
            return iter(x)

    with pytest.raises(MCBNError, match="a stream has no draw t"):
        fit(network, Stream(), n_samples=8, draws=[2])
    with pytest.raises(MCBNError, match='goes with posterior="sample"'):
        fit(network, x, n_samples=8, draws=[2], posterior="gaussian")
