"""Small networks fitted with a Gaussian family of q(omega), and the moments it holds written out."""

import torch
from torch import Tensor

import mcbn
from kinds import make
from mcbn.gaussian import Gaussian, split

MODELLED = ["gaussian", "layerwise", "diagonal"]


def fitted(
    kind: str = "1d", posterior: str = "gaussian", task: str = "regression", n: int = 64, **options: int
) -> tuple[mcbn.MCBN, Tensor]:
    model, x = make(kind, n=n, dtype=torch.float64, batch_size=16)
    options = {"n_samples": 200, "batch_size": 16, **options}
    return mcbn.MCBN(model, task).fit(x, posterior=posterior, **options), x


def modelled(bayes: mcbn.MCBN) -> Gaussian:
    assert bayes.posterior.gaussian is not None
    return bayes.posterior.gaussian


def dense(model: Gaussian) -> Tensor:
    """Build the covariance that is never built, (P, P)."""
    covariance = torch.diag(model.diagonal)
    if model.factors:
        covariance = covariance + torch.block_diag(*(factor.T @ factor for factor in model.factors))
    return covariance


def vector(posterior: mcbn.Posterior) -> Tensor:
    """Lay out draws as the moments are: means, then standard deviations of each call, (T, P)."""
    return torch.cat([p for n in posterior.layers for p in (posterior.mean[n], posterior.var[n].sqrt())], 1)


def parts(model: Gaussian, name: str) -> tuple[Tensor, ...]:
    """Return mean of mu_B, mean of sigma_B and the variance of each, of one call."""
    return *split(model.location, model.channels)[name], *split(model.variance, model.channels)[name]
