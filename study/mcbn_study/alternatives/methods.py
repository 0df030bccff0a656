"""What a user could pick, each in one form: images in, logits of T draws out.

Probabilities are 1/T sum_t softmax(tau * logits_t), tau = 1 or tuned on the validation images (Guo et al. 2017); with
the plain network, T = 1, that is temperature scaling.
"""

import copy
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, StackDataset, TensorDataset

from mcbn import noise
from mcbn.baselines import DeepEnsemble, MCDropout
from mcbn.model import MCBN
from mcbn.prediction import ClassificationPrediction
from mcbn.randomness import isolated_random
from mcbn_study.alternatives.abnn import ABNN
from mcbn_study.data.cifar import Images
from mcbn_study.networks import standardize

Sampler = Callable[[Tensor], Tensor]  # bytes (N, 3, H, W) to logits (T, N, K)
THINNED = {"thinned_plain": "plain", "thinned_mcbn": "mcbn", "thinned_joint": "mcbn_joint"}  # on MC dropout's network
METHODS = ["plain", "mcbn", "mcbn_linear", "mcbn_gaussian", "mcbn_tuned", "mcbn_joint", "dropout"]
METHODS += [*THINNED, "laplace", "abnn", "ensemble"]
AT_ONCE = {"cuda": 1250, "cpu": 100}  # images; on a GPU as many as let batch norm be folded into the weights
LAPLACE_AT_ONCE, LAPLACE = 1000, "pip install 'mcbn[laplace]', or leave `laplace` out of the methods"
ABNN_BATCH_SIZE = 128  # torch-uncertainty
TUNING_SHARE = 4  # the search for M uses a quarter of the draws
JOINT = tuple(2.0**power for power in range(-2, 8))  # times M of the fit; at the end the draws are nearly one network


@dataclass(frozen=True)
class Material:
    """What the methods are made of, for one seed."""

    network: nn.Module
    train: Dataset[Tensor]  # standardised, augmented as in training
    clean: Images  # the same images as they are
    validation: Images
    members: Sequence[nn.Module] = ()  # of the ensemble
    n_samples: int = 128  # T
    batch_size: int = 32  # M
    seed: int = 0
    chosen: dict[str, int] = field(default_factory=dict, init=False)  # M by method, where it was tuned

    @property
    def device(self) -> torch.device:
        """Where the network lies."""
        return next(self.network.parameters()).device

    def prepare(self, x: Tensor) -> Iterator[Tensor]:
        """Standardise images, as many as run at once."""
        return (standardize(images.to(self.device)) for images in torch.split(x, AT_ONCE[self.device.type]))

    @cached_property
    def bayes(self) -> MCBN[ClassificationPrediction]:
        """MCBN fitted on augmented training batches; one fit serves all its methods."""
        bayes = MCBN(self.network, "classification")
        return bayes.fit(self.train, n_samples=self.n_samples, batch_size=self.batch_size, seed=self.seed)

    def sample(self, run: Sampler, x: Tensor) -> Tensor:
        """Run standardised images a few at a time, (T, N, K)."""
        with torch.no_grad():
            return torch.cat([run(images).float().to(self.device) for images in self.prepare(x)], 1)


def make(method: str, material: Material) -> Sampler:
    """Make a method ready to be asked."""
    return partial(material.sample, _MAKERS[THINNED.get(method, method)](material))


def _tuned(material: Material) -> Sampler:
    """Choose the M of least validation NLL at tau = 1: the posterior is rescaled, nothing is drawn anew."""
    drawn, count = material.bayes.posterior, max(1, material.n_samples // TUNING_SHARE)
    y, losses = material.validation.y.to(material.device), {}
    for M in noise.candidates("auto", drawn.batch_size):
        run = partial(material.bayes.with_posterior(drawn.at_batch_size(M)).sample, n_samples=count)
        log_p = torch.log_softmax(material.sample(run, material.validation.x).double(), 2)  # (T, N, K)
        losses[M] = -torch.logsumexp(log_p, 0).gather(1, y[:, None]).mean().item()
    best = material.chosen["mcbn_tuned"] = min(losses, key=losses.__getitem__)
    return material.bayes.with_posterior(drawn.at_batch_size(best)).sample


def _joint(material: Material) -> Sampler:
    """Choose M together with tau, by `MCBN.tune`; tau itself is fitted again to all draws where they are scored."""
    twin = copy.copy(material.bayes)
    x = torch.cat(list(material.prepare(material.validation.x)))
    pairs = TensorDataset(x, material.validation.y.to(x.device))
    sizes = [max(2, round(factor * material.batch_size)) for factor in JOINT]
    count = max(1, material.n_samples // TUNING_SHARE)
    twin.tune(DataLoader(pairs, AT_ONCE[x.device.type]), n_samples=count, batch_sizes=sizes)
    material.chosen["mcbn_joint"] = twin.posterior.batch_size
    return twin.sample


def _abnn(material: Material) -> Sampler:
    labels: Any = material.clean.y.tolist()
    loader = DataLoader(StackDataset(material.train, labels), ABNN_BATCH_SIZE, shuffle=True)
    return ABNN(material.network, "classification").fit(loader, n_samples=material.n_samples, seed=material.seed).sample


def _usual_dropout(material: Material) -> Sampler:
    """Switch dropout on, as usual: new masks for every image and pass, made where the network is."""
    network = copy.deepcopy(material.network)
    for module in network.modules():
        module.training = isinstance(module, nn.Dropout)
    return lambda x: torch.stack([network(x) for _ in range(material.n_samples)])


_MAKERS: dict[str, Callable[[Material], Sampler]] = {
    "plain": lambda m: lambda x: m.network(x).unsqueeze(0),
    "mcbn": lambda m: m.bayes.sample,
    "mcbn_linear": lambda m: lambda x: cast(Tensor, m.bayes.predict(x, method="linear", return_samples=True).samples),
    "mcbn_gaussian": lambda m: m.bayes.with_posterior(m.bayes.posterior.as_gaussian(seed=m.seed)).sample,
    "mcbn_tuned": _tuned,
    "mcbn_joint": _joint,
    "dropout": lambda m: MCDropout(m.network, "classification").fit(n_samples=m.n_samples, seed=m.seed).sample,
    "dropout_usual": _usual_dropout,  # to time beside "dropout", whose masks are made on the CPU and shared by images
    "abnn": _abnn,
    "laplace": lambda m: last_layer(m.network, m.prepare(m.clean.x), m.clean.y),
    "ensemble": lambda m: DeepEnsemble(m.members, "classification").sample,
}


def last_layer(network: nn.Module, x: Iterable[Tensor], y: Tensor) -> Sampler:
    """Last-layer Laplace by laplace-torch (Daxberger et al. 2021): the last linear layer has a Gaussian posterior.

    It is fitted on the layer's inputs, computed once: nothing before the layer is random. Kronecker-factored curvature,
    prior precision by marginal likelihood, probit approximation: laplace-torch's own defaults. x: prepared training
    images (N, ...), in parts, y (N,) their classes. Gives log probabilities as if of one draw, (1, N, K).
    """
    loader = DataLoader(TensorDataset(look_inside(network, x)[1].cpu(), y.cpu()), batch_size=LAPLACE_AT_ONCE)
    head = copy.deepcopy(last_linear(network)).cpu()
    with isolated_random(0), warnings.catch_warnings(action="ignore"):  # its back ends use deprecated parts of torch
        from laplace import Laplace  # type: ignore[import-not-found, unused-ignore]

        posterior = Laplace(head, "classification", subset_of_weights="all", hessian_structure="kron")
        posterior.fit(loader)
        posterior.optimize_prior_precision(method="marglik")

    def log_probabilities(x: Tensor) -> Tensor:
        with warnings.catch_warnings(action="ignore"):
            probs: Tensor = posterior(look_inside(network, [x])[1].cpu(), pred_type="glm", link_approx="probit")
        return probs.detach().clamp(min=torch.finfo(probs.dtype).tiny).log().unsqueeze(0)

    return log_probabilities


def last_linear(network: nn.Module) -> nn.Linear:
    """Find the last linear layer of a network."""
    return [module for module in network.modules() if isinstance(module, nn.Linear)][-1]


@torch.no_grad()
def look_inside(network: nn.Module, x: Iterable[Tensor]) -> tuple[Tensor, Tensor]:
    """Run images in parts: what the network gives, (N, K), and what its last linear layer is given, (N, F)."""
    hidden: list[Tensor] = []
    hook = last_linear(network).register_forward_pre_hook(lambda module, inputs: hidden.append(inputs[0]))
    try:
        logits = [network(images) for images in x]
    finally:
        hook.remove()
    return torch.cat(logits), torch.cat(hidden)
