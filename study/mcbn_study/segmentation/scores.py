"""Scores of segmentations with uncertainty maps, streamed over images: memory does not grow with their number.

Rankings by uncertainty (error AUROC, accuracy after refusal) come from histograms over the upper 20 bits of the map as
float32: uncertainties closer than 2^-12 of their size count as equal, ties count half. Nothing is subsampled.
"""

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from mcbn.errors import MCBNError

REFUSED = (0, 5, 10, 20, 30, 50)  # percent of the pixels
BOUNDARY = 2  # pixels
N_BINS = 15  # of the calibration error
DROPPED = 11  # lower bits of the fraction
LEVELS = 2 ** (31 - DROPPED)  # of an uncertainty: float32 without its sign and these bits


def confusion(label: Tensor, y: Tensor, n_classes: int, void: int) -> Tensor:
    """Count the pixels of each true class (rows) given each label (columns), (K, K), void pixels left out."""
    index = torch.where(y == void, n_classes**2, y.long() * n_classes + label.long())
    return torch.bincount(index.flatten(), minlength=n_classes**2 + 1)[:-1].view(n_classes, n_classes)


def iou(counts: Tensor) -> Tensor:
    """Intersection over union of every class, in percent, (K,); NaN for a class neither shown nor given."""
    hits = counts.diagonal().double()
    return 100 * hits / (counts.sum(0) + counts.sum(1) - hits)


def boundary(y: Tensor) -> Tensor:
    """Mark pixels (N, H, W) with another label within two rows and columns; void counts as a label here."""
    label = y.unsqueeze(1).float()
    most, least = (sign * F.max_pool2d(sign * label, 2 * BOUNDARY + 1, 1, BOUNDARY) for sign in (1, -1))
    return (most != least).squeeze(1)


def error_auroc(histogram: Tensor) -> float:
    """P(a wrong pixel is more uncertain than a right one), ties half: sum_b w_b (sum_{a<b} r_a + r_b / 2) / (R W)."""
    right, wrong = histogram.double()  # (L,) each
    return float((wrong * (right.cumsum(0) - right / 2)).sum() / (right.sum() * wrong.sum()))


def accuracy_after_refusal(histogram: Tensor, percent: float) -> float:
    """Accuracy in percent of what is left when the most uncertain pixels are refused; of equal ones an even share."""
    right, kept = histogram[0].double(), (1 - percent / 100) * (total := histogram.sum(0).double()).sum()  # (L,), ()
    taken = (kept - (total.cumsum(0) - total)).clamp(min=0).minimum(total)
    return (100 * (taken * right / total.clamp(min=1)).sum() / kept).item()


class PixelScores:
    """Accumulates predictions of successive images; `result` gives the scores."""

    def __init__(self, classes: Sequence[str], void: int) -> None:
        self.classes, self.void = tuple(classes), void
        K = len(self.classes)
        self.counts = torch.zeros(K, K, dtype=torch.int64)
        self.gap = torch.zeros(N_BINS, dtype=torch.float64)  # hits minus confidence in each bin
        self.log_loss = 0.0
        self.histograms: dict[str, Tensor] = {}  # map -> (2, LEVELS), right and wrong
        self.sums: dict[str, Tensor] = {}  # map -> (2, 2), interior and boundary: sum and pixels

    def add(self, probs: Tensor, maps: Mapping[str, Tensor], y: Tensor) -> None:
        """Take in probabilities (N, K, H, W), uncertainty maps (N, H, W) and the truth (N, H, W)."""
        confidence, label = probs.max(1)  # (N, H, W)
        valid = y != self.void
        right = label == y
        self.counts += confusion(label, y, len(self.classes), self.void).cpu()
        truth = probs.gather(1, y.long().masked_fill(~valid, 0).unsqueeze(1)).squeeze(1)
        self.log_loss -= (truth.double().clamp(min=1e-38).log() * valid).sum().item()
        bins = torch.bucketize(confidence, torch.linspace(0, 1, N_BINS + 1, device=y.device)[1:-1])
        gap = (right.double() - confidence.double()) * valid
        self.gap += torch.bincount(bins.flatten(), gap.flatten(), N_BINS).cpu()
        near = boundary(y)
        for name, values in maps.items():
            if not bool(torch.isfinite(values).all()):
                raise MCBNError(f"the uncertainty map {name!r} is not finite; the network overflows on these images")
            values = values.float().clamp(min=0).abs()  # abs: -0.0 has a sign bit
            level = values.contiguous().view(torch.int32) >> DROPPED  # order of the bits is that of the numbers
            index = torch.where(valid, level + LEVELS * (~right), 2 * LEVELS)
            histogram = torch.bincount(index.flatten(), minlength=2 * LEVELS + 1)[:-1].view(2, LEVELS)
            self.histograms[name] = self.histograms.get(name, 0) + histogram
            places = valid & ~near, valid & near
            by_place = [torch.stack([(values * where).double().sum(), where.sum().double()]) for where in places]
            self.sums[name] = self.sums.get(name, 0) + torch.stack(by_place).cpu()

    def result(self) -> dict[str, float]:
        """Return every score: shares of pixels and IoU in percent, the others as they are; NaN where undefined."""
        n = int(self.counts.sum())
        values = {
            "miou": iou(self.counts).nanmean().item(),  # over the classes that occur
            "pixel_accuracy": 100 * int(self.counts.diagonal().sum()) / n,
            "nll": self.log_loss / n,
            "ece": (self.gap.abs().sum() / n).item(),
        }
        for name, histogram in self.histograms.items():
            inside, at = self.sums[name][:, 0] / self.sums[name][:, 1]
            values[f"error_auroc_{name}"] = error_auroc(histogram)
            values[f"boundary_ratio_{name}"] = (at / inside).item()
            for percent in REFUSED:
                values[f"accuracy_refused_{percent}_{name}"] = accuracy_after_refusal(histogram, percent)
        by_class = zip(self.classes, iou(self.counts).tolist(), strict=True)
        return values | {f"iou_{name}": value for name, value in by_class}
