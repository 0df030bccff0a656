"""What one would use instead: tests of a batch, scores of single inputs, repairs by the inputs' own statistics."""

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

from mcbn.batch_norm import BatchNormCall, BatchNormMode, normalize, scale_and_shift
from mcbn.prediction import entropy
from mcbn_study.shift.train import Features

SAMPLE = 1000  # reference inputs that batches are compared with
NEIGHBOURS = 50  # k of KNN (Sun et al. 2022: 50 for CIFAR-10)
TENT_RATE, TENT_BATCH = 1e-3, 200  # Adam; Wang et al. 2021, section 4


def batch_tests(reference: Features) -> Callable[[Features], dict[str, Tensor]]:
    """Make tests of batches (B, M, ...) against reference inputs: numbers (B,), large where a batch is shifted."""
    home, hidden = reference.logits.softmax(-1), reference.hidden[:SAMPLE]
    width = torch.cdist(hidden, hidden).median()  # the median heuristic

    def test(batch: Features) -> dict[str, Tensor]:
        probs, (B, M, _) = batch.logits.softmax(-1), batch.hidden.shape
        across = torch.cdist(batch.hidden, hidden.expand(B, -1, -1))  # (B, M, SAMPLE)
        within = torch.cdist(batch.hidden, batch.hidden)  # (B, M, M)
        pairs = max(1, M * (M - 1))
        near = [torch.exp(-0.5 * (distance / width).square()) for distance in (within, across)]
        return {
            "bbsd": largest_ks(home, probs),
            "mmd": (near[0].sum((1, 2)) - M) / pairs - 2 * near[1].mean((1, 2)),
            "energy": 2 * across.mean((1, 2)) - within.sum((1, 2)) / pairs,
            "entropy": (entropy(probs, 2).mean(1) - entropy(home, 1).mean()).abs(),
        }

    return test


def largest_ks(home: Tensor, probs: Tensor) -> Tensor:
    """BBSD (Rabanser et al. 2019): the largest Kolmogorov-Smirnov distance of any class's probabilities."""
    (n, K), (B, M, _) = home.shape, probs.shape
    ordered = probs.permute(2, 0, 1).contiguous().sort().values.reshape(K, -1)  # (K, B M)
    below = torch.searchsorted(home.T.contiguous().sort().values, ordered).reshape(K, B, M)
    share = below / n - torch.arange(M, device=probs.device) / M  # F(x_i) - (i - 1) / M
    return torch.maximum(share, 1 / M - share).amax((0, 2))


def input_scores(train: Features, y: Tensor) -> Callable[[Features], dict[str, Tensor]]:
    """Make scores of single inputs, large where strange, from the training images' features and classes y (N,)."""
    classes = torch.unique(y)
    means = torch.stack([train.hidden[y == k].mean(0) for k in classes])  # (K, F)
    centred = train.hidden - means[torch.searchsorted(classes, y)]
    precision = torch.linalg.pinv(centred.T @ centred / len(y), hermitian=True)
    unit = torch.nn.functional.normalize(train.hidden, dim=1)
    k = min(NEIGHBOURS, len(unit))

    def score(seen: Features) -> dict[str, Tensor]:
        probs, offset = seen.logits.softmax(1), seen.hidden[:, None] - means  # (n, K, F)
        nearest = torch.cdist(torch.nn.functional.normalize(seen.hidden, dim=1), unit).kthvalue(k, 1).values
        return {
            "softmax": 1 - probs.amax(1),
            "entropy": entropy(probs, 1),
            "energy": -seen.logits.logsumexp(1),
            "mahalanobis": torch.einsum("nkf,fg,nkg->nk", offset, precision, offset).amin(1),  # Lee et al. 2018
            "knn": nearest,
        }

    return score


class BlendedStatistics(BatchNormMode):
    """Normalise by a share of the statistics of the inputs themselves and the rest of the running ones.

    share = n / (n + N) (Schneider et al. 2020), 1: prediction-time batch norm (Nado et al. 2020).
    """

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share

    def answer(self, call: BatchNormCall) -> Tensor:
        """Normalise by the blend."""
        assert call.running_mean is not None
        assert call.running_var is not None
        var, mean = torch.var_mean(call.x, [0, *range(2, call.x.ndim)], correction=0)
        mean, var = torch.lerp(call.running_mean, mean, self.share), torch.lerp(call.running_var, var, self.share)
        return normalize(call.x, *scale_and_shift(mean, var, call.weight, call.bias, call.eps))


@torch.no_grad()
def blended(network: nn.Module, x: Tensor, batch: int, share: float) -> Tensor:
    """Return logits (N, K) of batches that are normalised by a blend of their own statistics."""
    with BlendedStatistics(share):
        return torch.cat([network(some) for some in torch.split(x, batch)])


def tent(network: nn.Module, x: Tensor) -> Tensor:
    """Return logits of TENT (Wang et al. 2021): after each batch, a step of gamma and beta on its entropy."""
    student = copy.deepcopy(network).requires_grad_(False).train()
    affine = [p.requires_grad_() for m in student.modules() if isinstance(m, nn.BatchNorm2d) for p in m.parameters()]
    optimizer, logits = torch.optim.Adam(affine, TENT_RATE), []
    with torch.enable_grad():
        for some in torch.split(x, TENT_BATCH):  # in train mode batch norm takes the statistics of the batch
            output = student(some)
            loss = -(output.softmax(1) * output.log_softmax(1)).sum(1).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            logits.append(output.detach())
    return torch.cat(logits)
