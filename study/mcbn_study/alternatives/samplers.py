"""What a user could pick, each in one form: images in, logits of T draws out.

Probabilities are 1/T sum_t softmax(tau * logits_t), tau = 1 or tuned on the validation images (Guo et al. 2017); with
the plain network, T = 1, that is temperature scaling.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from mcbn import noise
from mcbn.baselines import DeepEnsemble, MCDropout
from mcbn.model import MCBN
from mcbn.prediction import ClassificationPrediction
from mcbn_study.alternatives.laplace import LastLayer
from mcbn_study.data.cifar import Images

Sampler = Callable[[Tensor], Tensor]  # bytes (N, 3, H, W) to logits (T, N, K)
MCBN_METHODS = ("mcbn", "mcbn_linear", "mcbn_gaussian", "mcbn_tuned", "mcbn_joint")
THINNED = {"thinned_plain": "plain", "thinned_mcbn": "mcbn", "thinned_joint": "mcbn_joint"}  # on MC dropout's network
METHODS = ("plain", *MCBN_METHODS, "dropout", *THINNED, "laplace", "ensemble")
AT_ONCE = {"cuda": 1250, "cpu": 100}  # images; on a GPU as many as let batch norm be folded into the weights
TUNING_SHARE = 4  # the search for M uses a quarter of the draws
JOINT = tuple(2.0**power for power in range(-2, 8))  # times M of the fit; at the end the draws are nearly one network


@dataclass(frozen=True)
class Material:
    """What the methods are made of, for one seed."""

    network: nn.Module
    prepare: Callable[[Tensor], Tensor]  # bytes to what the network takes
    train: Dataset[Tensor]  # prepared, augmented as in training
    clean: Images  # the same images as they are
    validation: Images
    members: Sequence[nn.Module] = ()  # of the ensemble
    thinned: nn.Module | None = None  # trained with dropout, for MC dropout
    n_samples: int = 128  # T
    batch_size: int = 32  # M
    seed: int = 0
    fitted: dict[str, MCBN[ClassificationPrediction]] = field(default_factory=dict)  # one fit serves all MCBN methods
    chosen: dict[str, int] = field(default_factory=dict)  # M by method, where it was tuned

    @property
    def device(self) -> torch.device:
        """Where the network lies."""
        return next(self.network.parameters()).device

    def parts(self, x: Tensor) -> Iterator[Tensor]:
        """Prepare images, as many as run at once."""
        return (self.prepare(part.to(self.device)) for part in torch.split(x, AT_ONCE[self.device.type]))

    def mcbn(self) -> MCBN[ClassificationPrediction]:
        """Fit MCBN on augmented training batches, once."""
        if "mcbn" not in self.fitted:
            bayes = MCBN(self.network, "classification")
            self.fitted["mcbn"] = bayes.fit(
                self.train, n_samples=self.n_samples, batch_size=self.batch_size, seed=self.seed
            )
        return self.fitted["mcbn"]


def make(method: str, material: Material) -> Sampler:
    """Make a method ready to be asked."""
    return partial(_in_parts, material, _MAKERS[THINNED.get(method, method)](material))


def _in_parts(material: Material, run: Sampler, x: Tensor) -> Tensor:
    with torch.no_grad():
        return torch.cat([run(part).float().to(material.device) for part in material.parts(x)], 1)  # (T, N, K)


def _plain(material: Material) -> Sampler:
    return lambda x: material.network(x).unsqueeze(0)


def _mcbn(material: Material) -> Sampler:
    return material.mcbn().sample


def _mcbn_linear(material: Material) -> Sampler:
    bayes = material.mcbn()

    def run(x: Tensor) -> Tensor:
        samples = bayes.predict(x, method="linear", return_samples=True).samples
        assert samples is not None
        return samples

    return run


def _mcbn_gaussian(material: Material) -> Sampler:
    return _with(material, material.mcbn().posterior.as_gaussian(seed=material.seed)).sample


def _mcbn_tuned(material: Material) -> Sampler:
    material.chosen["mcbn_tuned"] = best_batch_size(material)
    return _with(material, material.mcbn().posterior.at_batch_size(material.chosen["mcbn_tuned"])).sample


def best_batch_size(material: Material) -> int:
    """Choose the M of least validation NLL at tau = 1: the posterior is rescaled, nothing is drawn anew."""
    drawn = material.mcbn().posterior
    count = max(1, material.n_samples // TUNING_SHARE)
    y = material.validation.y.to(material.device)
    losses = {}
    for M in noise.candidates("auto", drawn.batch_size):
        run = partial(_with(material, drawn.at_batch_size(M)).sample, n_samples=count)
        log_p = torch.log_softmax(_in_parts(material, run, material.validation.x).double(), 2)  # (T, N, K)
        losses[M] = -torch.logsumexp(log_p, 0).gather(1, y[:, None]).mean().item()
    return min(losses, key=losses.__getitem__)


def _mcbn_joint(material: Material) -> Sampler:
    """Choose M together with tau, by `MCBN.tune`; tau itself is fitted again to all draws where they are scored."""
    twin = copy.copy(material.mcbn())
    x = torch.cat(list(material.parts(material.validation.x)))
    pairs = TensorDataset(x, material.validation.y.to(x.device))
    sizes = [max(2, round(factor * material.batch_size)) for factor in JOINT]
    count = max(1, material.n_samples // TUNING_SHARE)
    twin.tune(DataLoader(pairs, AT_ONCE[x.device.type]), n_samples=count, batch_sizes=sizes)
    material.chosen["mcbn_joint"] = twin.posterior.batch_size
    return twin.sample


def _with(material: Material, posterior: Any) -> MCBN[ClassificationPrediction]:
    """Return a second MCBN of the same network with another posterior."""
    twin = copy.copy(material.mcbn())
    twin.posterior = posterior
    return twin


def _dropout(material: Material) -> Sampler:
    assert material.thinned is not None
    method = MCDropout(material.thinned, "classification").fit(n_samples=material.n_samples, seed=material.seed)
    return method.sample


def _laplace(material: Material) -> Sampler:
    clean = material.clean
    posterior = LastLayer(material.network, material.parts(clean.x), clean.y)
    return lambda x: posterior(x).unsqueeze(0)


def _ensemble(material: Material) -> Sampler:
    return DeepEnsemble(material.members, "classification").sample


_MAKERS: dict[str, Callable[[Material], Sampler]] = {
    "plain": _plain,
    "mcbn": _mcbn,
    "mcbn_linear": _mcbn_linear,
    "mcbn_gaussian": _mcbn_gaussian,
    "mcbn_tuned": _mcbn_tuned,
    "mcbn_joint": _mcbn_joint,
    "dropout": _dropout,
    "laplace": _laplace,
    "ensemble": _ensemble,
}
