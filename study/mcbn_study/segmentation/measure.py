"""Ways to segment: the plain network, draws shared by all images, and the paper's, each image in its own batch."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from mcbn import batch_norm as statistics
from mcbn import moments as streaming
from mcbn import prediction
from mcbn.errors import MCBNError
from mcbn.layers import stochastic_layers
from mcbn.model import MCBN
from mcbn.network import Network
from mcbn.prediction import ClassificationPrediction
from mcbn_study.segmentation.augmentation import normalize

PAPER_LAYERS = 2  # "the first 2 blocks only": Teye et al. 2018, Section 4.5


class Segmented(NamedTuple):
    """Probabilities (N, K, H, W) and uncertainty maps (N, H, W) by name."""

    probs: Tensor
    maps: dict[str, Tensor]


Estimator = Callable[[Tensor], Segmented]  # of byte images (N, 3, H, W)


def plain(network: nn.Module) -> Estimator:
    """The network in eval mode; its map is the entropy of the softmax."""

    @torch.no_grad()
    def predict(x: Tensor) -> Segmented:
        probs = torch.softmax(network(normalize(x)), 1)
        return Segmented(probs, {"entropy": prediction.entropy(probs, 1)})

    return predict


def shared_draws(bayes: MCBN[ClassificationPrediction], n_samples: int) -> Estimator:
    """MCBN: statistics of training batches alone, the same T draws for every image."""
    return lambda x: with_maps(bayes.predict(normalize(x), n_samples=n_samples))


def query_inside(network: nn.Module, pool: Tensor, *, batch_size: int, n_samples: int, seed: int = 0) -> Estimator:
    """The paper's: for each image and pass a batch of the image itself and M - 1 training images.

    Training images (byte, (N, 3, H, W)) are drawn with replacement; the first 2 batch norm layers take the statistics
    of that batch, the others their running ones (Teye et al. 2018, Section 4.5, and the authors' code).
    """
    if batch_size < 2:
        raise MCBNError(f"a batch holds the image and at least one training image; got batch_size={batch_size}")
    inner = Network(network, None)
    statistics.watch(inner.module)
    generator, dtype = torch.Generator().manual_seed(seed), next(network.parameters()).dtype
    chosen = stochastic_layers(inner, normalize(pool[:1]).to(dtype), PAPER_LAYERS)

    def passes(image: Tensor) -> Iterator[Tensor]:
        rows = torch.randint(len(pool), (n_samples, batch_size - 1), generator=generator).to(pool.device)
        for companions in rows:
            with QueryInside(chosen):
                logits = inner(normalize(torch.cat([image, pool[companions]])).to(dtype))  # (1, K, H, W)
            yield logits.unsqueeze(0)

    @torch.no_grad()
    def predict(x: Tensor) -> Segmented:
        tau = torch.ones(())
        return with_maps(prediction.join([streaming.classification(passes(image), tau) for image in torch.split(x, 1)]))

    return predict


class QueryInside(statistics.Record):
    """Normalise the chosen layers by the batch; after the last of them only the first image, the query, goes on.

    Exact where nothing goes around the chosen layers and all that follows treats images one by one, as in SegNet,
    whose first two lie before the first pooling.
    """

    def answer(self, call: statistics.BatchNormCall) -> Tensor:
        """Normalise this call, and drop the companions when they are needed no more."""
        output = super().answer(call)
        done = call.layer in self.chosen and len(self.mean) == len(self.chosen)
        return output[:1] if done else output


def with_maps(pred: ClassificationPrediction) -> Segmented:
    """Add the maps: variance of the softmax averaged over classes (the paper's), mutual information, entropy."""
    maps = {
        "variance": pred.variance.mean(1),
        "mutual_information": pred.mutual_information,
        "entropy": pred.entropy,
    }
    return Segmented(pred.probs, maps)
