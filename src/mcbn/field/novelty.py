"""Is a single input like anything in the reference? A distance of its own statistics, and an exact p-value.

One pass under the average drawn statistics gives, for every input alone, mean and log variance over positions of what
each batch norm meets (a draw with M = 1); layers that see one value a channel give that value. The distance is that of
`mcbn.field.distance` with a ridge. Batch statistics of single inputs as a score: Dong et al. 2022 (Neural Mean
Discrepancy, CVPR); p-values over layers for it: Haroush et al. 2021 (A statistical framework for efficient
out-of-distribution detection in deep neural networks, ICLR 2022). It finds foreign inputs, not errors on familiar ones:
the entropy does that, hence `Novelty.combined`.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mcbn import batches
from mcbn.batch_norm import BatchNormCall, Replay
from mcbn.batching import Take
from mcbn.errors import MCBNError
from mcbn.field.distance import EPS, Metric, fit_metric, rank_p_values
from mcbn.field.reference import Reference
from mcbn.network import Network
from mcbn.outputs import as_logits
from mcbn.posterior import Posterior
from mcbn.prediction import entropy

MOST_FITTING, MOST_HELD_OUT = 2000, 10_000  # inputs of a reference that are run
DIRECTIONS, RIDGE = 500, 0.025  # of the distance
BLOCK, BLOCK_VALUES = 256, 2**22  # inputs in one pass, and numbers in these: 27 photographs of 224 x 224 pixels
EM_STEPS = 100
BEYOND = 0.05  # p-value from which a distance counts beside the entropy
Centre = tuple[dict[str, Tensor], dict[str, Tensor]]  # mean and variance by call, (C,) each


@dataclass(frozen=True, eq=False)
class Novelty:
    """How strange each input is, (N,) each; small p-values are strange."""

    distance: Tensor  # of an input's own statistics from the reference
    p_value: Tensor  # its rank among held-out inputs: at most alpha for a share alpha of inputs as in the reference
    combined: Tensor  # the same of distance and entropy together (`combined_p_values`); p_value without classes


class Seen(NamedTuple):
    """What one pass tells of each input alone."""

    coordinates: Tensor  # (N, P)
    entropy: Tensor  # (N,) nats; zero where the network gives no classes
    probs: Tensor  # (N, K); K = 0: the network does not give one class an input


class PerInput(Replay):
    """Normalise by fixed statistics and keep mean and log variance over positions of every input alone."""

    def __init__(self, centre: Centre, n_inputs: int) -> None:
        super().__init__(*centre)
        self.n_inputs, self.coordinates = n_inputs, list[Tensor]()

    def answer(self, call: BatchNormCall) -> Tensor:
        """Keep what this call sees of each input."""
        if call.layer in self.chosen:
            if call.x.shape[0] != self.n_inputs:  # not len: a size that the exporter leaves open stays open
                fault = f"layer {call.name!r} sees {len(call.x)} rows for {self.n_inputs} inputs"
                raise MCBNError(f"{fault}, so no row is one input's alone; leave it out with layers=")
            values = call.x.double().reshape(*call.x.shape[:2], -1)  # (N, C, positions)
            var, mean = torch.var_mean(values, 2, correction=0)
            self.coordinates += [mean.cpu(), (var + EPS).log().cpu()] if values.shape[2] > 1 else [mean.cpu()]
        return super().answer(call)


def see(network: Network, task: str, centre: Centre, x: Any, *, classes_only: bool = False) -> Seen:
    """Run inputs once under the average statistics, in blocks; for their classes alone, without coordinates (N, 0)."""
    N, blocks = batches.size_of(x), []
    size = max(1, min(BLOCK, BLOCK_VALUES * N // sum(t.numel() for t in batches.tensors_of(x))))
    for start in range(0, N, size):
        rows = range(start, min(start + size, N))
        inputs = batches.move(Take(x)(rows), network.device, network.dtype)
        mode = Replay(*centre) if classes_only else PerInput(centre, len(rows))
        with torch.no_grad(), network.undisturbed(0), mode:
            output = network.run_copy(inputs)
        z = torch.cat(mode.coordinates, 1) if isinstance(mode, PerInput) else torch.empty(len(rows), 0)
        blocks.append(Seen(z, *_classes(output, task, network)))
    return Seen(*(torch.cat(columns) for columns in zip(*blocks, strict=True)))


def centre_of(posterior: Posterior) -> Centre:
    """Average the statistics of all draws."""
    mean, var = ({name: v.mean(0) for name, v in kind.items()} for kind in (posterior.mean, posterior.var))
    return mean, var


def _classes(output: Tensor, task: str, network: Network) -> tuple[Tensor, Tensor]:
    """Return the entropy of each input, averaged over pixels, and its class probabilities where it has one class."""
    if task != "classification" or (network.reading is not None and network.reading.several):
        return torch.zeros(len(output), dtype=torch.float64), torch.empty(len(output), 0)
    probs = as_logits(output.unsqueeze(0))[0].double().softmax(1)  # (N, K, ...)
    of_input = probs if probs.ndim == 2 else probs.new_empty(len(probs), 0)
    return entropy(probs, 1).reshape(len(output), -1).mean(1).cpu(), of_input.float().cpu()


class InputNull(NamedTuple):
    """The reference's single inputs: a distance, and held-out inputs to rank among."""

    metric: Metric
    held_out: Tensor  # distances (R,)
    entropy: Tensor  # (R,)
    rows: Tensor  # (R,) of the reference
    probs: Tensor  # (R, K) as predicted; K = 0: no classes

    def novelty(self, seen: Seen, spoiled: Tensor, device: torch.device) -> Novelty:
        """Rank inputs, onto a device; those that are spoiled (NaN) are farther than any other."""
        distance = self.metric(seen.coordinates).nan_to_num(nan=torch.inf, posinf=torch.inf)
        distance, entropies = (t.masked_fill(spoiled, torch.inf) for t in (distance, seen.entropy))
        p_value = rank_p_values(distance, self.held_out)
        combined = combined_p_values((distance, entropies), (self.held_out, self.entropy))
        results = distance, p_value, combined if bool(self.entropy.any()) else p_value
        return Novelty(*(result.to(device) for result in results))


def fit_inputs(network: Network, task: str, centre: Centre, reference: Reference) -> InputNull:
    """Make the null of single inputs."""
    fitting = see(network, task, centre, reference.take(reference.rows_to_fit(MOST_FITTING)))
    rows = (reference.held_out * reference.run)[:MOST_HELD_OUT]  # one of a run: its neighbours depend on it
    held_out = see(network, task, centre, reference.take(rows))
    metric = fit_metric(fitting.coordinates, directions=DIRECTIONS, ridge=RIDGE)
    return InputNull(metric, metric(held_out.coordinates), held_out.entropy, torch.from_numpy(rows), held_out.probs)


def combined_p_values(scores: tuple[Tensor, Tensor], held_out: tuple[Tensor, Tensor]) -> Tensor:
    """Combine distance and entropy by a truncated product of their p-values, and rank it: exact, though they depend.

    With an input of scores (N,) put among the R held out, each of the R + 1 has the p-value rank / (R + 1) by either
    score, large where strange; the sum max(0, log `BEYOND` - log p_distance) - log p_entropy of the input is ranked
    among all R + 1. A distance that is not remarkable adds nothing (truncated product: Zaykin et al. 2002), so that it
    does not blur what the entropy says of inputs that look familiar.
    """
    R, blocks = len(held_out[0]), []
    for start in range(0, len(scores[0]), BLOCK):
        of_input = of_held_out = torch.zeros((), dtype=torch.float64)
        for score, reference, beyond in zip(scores, held_out, (BEYOND, 1.0), strict=True):
            some = score[start : start + BLOCK, None]  # (n, 1)
            among = R - torch.searchsorted(reference.sort().values, reference, side="left")  # (R,), itself included
            ranks = 1 + (reference >= some).sum(1), among + (some >= reference)  # (n,), (n, R)
            strange = [(beyond * (1 + R) / rank.double()).log().clamp(min=0) for rank in ranks]
            of_input, of_held_out = of_input + strange[0], of_held_out + strange[1]
        blocks.append((1 + (of_held_out >= of_input[:, None] - 1e-12).sum(1)).double() / (1 + R))
    return torch.cat(blocks)


def class_proportions(probs: Tensor, reference: Tensor) -> Tensor:
    """Estimate the class proportions (K,) of inputs by expectation maximisation (Saerens et al. 2002).

    pi_k <- mean_i q_ik,  q_ik = pi_k / prior_k p_ik / sum_l(pi_l / prior_l p_il),  from pi = prior; p (N, K) is what is
    predicted for the inputs, prior the mean of that for the reference (R, K).
    """
    prior = reference.double().mean(0).clamp(min=1e-9)
    proportions = prior
    for _ in range(EM_STEPS):
        weighted = probs.double() * (proportions / prior)
        proportions = (weighted / weighted.sum(1, keepdim=True)).mean(0)
    return proportions


def class_weights(reference: Tensor, proportions: Tensor) -> Tensor:
    """Weigh reference inputs (R, K) to have classes in proportions (K,): w_i ~ sum_k proportion_k / prior_k p_ik."""
    probs = reference.double()
    weights = probs @ (proportions / probs.mean(0).clamp(min=1e-9))
    return weights / weights.sum()
