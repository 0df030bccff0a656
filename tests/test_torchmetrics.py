import pytest
import torch

pytest.importorskip("torchmetrics", reason="torchmetrics is not installed")

from mcbn import MCBNError, metrics
from mcbn.torchmetrics import PLL, GaussianCRPS, NormalizedCRPS, NormalizedPLL


def problem(n=60, d=None, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shape = (n,) if d is None else (n, d)
    y = torch.randn(shape, generator=generator, dtype=torch.float64)
    samples = y + torch.randn((20, *shape), generator=generator, dtype=torch.float64)
    return samples, samples.mean(0), samples.var(0, correction=0) + 0.5, y


def cases(d=None):
    """Each metric, what it takes of a problem, and the functions' value over all of it."""
    samples, mean, variance, y = problem(d=d)
    tau, constant = 2.0, 0.7
    flat = torch.full_like(mean, 1 / constant)
    crps = metrics.crps_gaussian(mean, variance, y)
    pll = metrics.pll(samples, y, tau)
    of_crps = crps.mean(), metrics.crps_gaussian(mean, flat, y).mean(), metrics.crps_optimum(mean, y).mean()
    of_pll = pll.mean(), metrics.pll(mean[None], y, constant).mean(), metrics.pll_optimum(mean, y).mean()
    return {
        "pll": (lambda **o: PLL(tau, **o), lambda i: (samples[:, i], y[i]), pll.mean()),
        "crps": (lambda **o: GaussianCRPS(**o), lambda i: (mean[i], variance[i], y[i]), crps.mean()),
        "crps %": (
            lambda **o: NormalizedCRPS(constant, **o),
            lambda i: (mean[i], variance[i], y[i]),
            metrics.normalized(*of_crps),
        ),
        "pll %": (
            lambda **o: NormalizedPLL(tau, constant, **o),
            lambda i: (samples[:, i], y[i]),
            metrics.normalized(*of_pll),
        ),
    }


NAMES = list(cases())


@pytest.mark.parametrize("d", [None, 2])
@pytest.mark.parametrize("name", NAMES)
def test_batches_of_any_size_equal_the_functions_on_all_points(name, d):
    make, take, expected = cases(d)[name]
    metric = make()
    for batch in torch.arange(60).split(17):
        metric.update(*take(batch))
    torch.testing.assert_close(metric.compute(), expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", NAMES)
def test_reset_forgets(name):
    make, take, expected = cases()[name]
    metric = make()
    metric.update(*take(torch.arange(10)))
    metric.reset()
    with pytest.raises(MCBNError, match="no points"), pytest.warns(UserWarning, match="before the ``update``"):
        metric.compute()
    metric.reset()
    metric.update(*take(torch.arange(60)))
    torch.testing.assert_close(metric.compute(), expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", NAMES)
def test_merged_states_equal_all_points(name):
    make, take, expected = cases()[name]
    first, second = make(), make()
    first.update(*take(torch.arange(13)))
    second.update(*take(torch.arange(13, 60)))
    first.merge_state(second)
    torch.testing.assert_close(first.compute(), expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", NAMES)
def test_processes_of_unequal_size_are_summed_as_ddp_gathers_them(name):
    make, take, expected = cases()[name]
    other = make()
    other.update(*take(torch.arange(13, 60)))
    theirs = iter([getattr(other, state) for state in other._defaults])

    def gather(state, group=None):
        return [state, next(theirs)]

    metric = make(dist_sync_fn=gather, distributed_available_fn=lambda: True)
    metric.update(*take(torch.arange(13)))
    torch.testing.assert_close(metric.compute(), expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", NAMES)
def test_memory_does_not_grow_and_forward_gives_the_batch(name):
    make, take, _ = cases()[name]
    metric, alone = make(), make()
    for batch in torch.arange(60).split(20):
        value = metric(*take(batch))
    alone.update(*take(batch))
    torch.testing.assert_close(value, alone.compute())
    assert {state: getattr(metric, state).shape for state in metric._defaults} == {
        state: start.shape for state, start in metric._defaults.items()
    }


def test_single_precision_batches_are_summed_in_double():
    metric = GaussianCRPS()
    for _ in range(1000):
        metric.update(torch.zeros(10), torch.zeros(10), torch.full((10,), 0.1))
    assert abs(metric.compute().item() - torch.tensor(0.1).item()) < 1e-12


def test_shapes_that_do_not_match_are_refused():
    samples, mean, variance, y = problem()
    with pytest.raises(MCBNError, match="never broadcast"):
        PLL(1.0).update(samples, y[:, None])
    with pytest.raises(MCBNError, match="same shape"):
        GaussianCRPS().update(mean, variance, y[:5])
