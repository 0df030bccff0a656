import torch

from mcbn.theory import analytic_moments


def test_analytic_moments_are_the_equations_of_the_appendix():
    h = torch.randn(10_000, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).abs()
    mu, var, fourth = h.mean(0), h.var(0, correction=0), (h - h.mean(0)).pow(4).mean(0)
    found = analytic_moments(mu, var, fourth, 32)
    for c in range(3):
        sigma = var[c].item() ** 0.5
        assert abs(found.mean_std[c].item() - sigma / 32**0.5) < 1e-12
        assert abs(found.std_std[c].item() - ((fourth[c].item() - sigma**4) / (4 * sigma**2 * 32)) ** 0.5) < 1e-12


def test_analytic_moments_match_the_spread_of_drawn_batches():
    generator = torch.Generator().manual_seed(1)
    h = torch.randn(20_000, 256, dtype=torch.float64, generator=generator).exp()  # (draws, M): far from Gaussian
    pool = h.flatten()
    fourth = (pool - pool.mean()).pow(4).mean()
    found = analytic_moments(pool.mean()[None], pool.var(correction=0)[None], fourth[None], 256)
    torch.testing.assert_close(h.mean(1).std(), found.mean_std[0], rtol=0.02, atol=0)


def test_a_constant_unit_has_no_spread():
    zero = torch.zeros(1)
    assert analytic_moments(torch.ones(1), zero, zero, 8).std_std.item() == 0
