"""Pixel scores of the segmentation study against loops."""

import math

import pytest
import torch
from torch import Tensor

from mcbn import MCBNError, metrics
from mcbn_study.segmentation import scores

K, VOID = 4, 9


def random_case(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Probabilities (N, K, H, W), an uncertainty of few bits, so that no histogram can blur it, and the truth."""
    generator = torch.Generator().manual_seed(seed)
    probs = torch.softmax(2 * torch.randn(3, K, 11, 13, generator=generator), 1)
    uncertainty = torch.randint(0, 40, (3, 11, 13), generator=generator) / 64
    y = torch.randint(0, K, (3, 3, 4), generator=generator).repeat_interleave(4, 1).repeat_interleave(4, 2)[:, :11, :13]
    y = torch.cat([y, y[:, :, :1].expand(-1, -1, 13 - y.shape[2])], 2)
    y[0, :3, :5] = VOID
    return probs, uncertainty, y.byte()


def scored(*cases: tuple[Tensor, Tensor, Tensor]) -> dict[str, float]:
    found = scores.PixelScores([f"c{k}" for k in range(K)], VOID)
    for probs, uncertainty, y in cases:
        found.add(probs, {"map": uncertainty}, y)
    return found.result()


def test_iou_and_accuracy_are_those_of_a_loop() -> None:
    probs, uncertainty, y = random_case()
    found = scored((probs, uncertainty, y))
    label = probs.argmax(1)
    expected, hits, n = [], 0, 0
    for k in range(K):
        both = either = 0
        for a, b in zip(label.flatten().tolist(), y.flatten().tolist(), strict=True):
            if b != VOID:
                both += a == k and b == k
                either += a == k or b == k
        expected.append(100 * both / either)
        assert found[f"iou_c{k}"] == pytest.approx(expected[-1])
    for a, b in zip(label.flatten().tolist(), y.flatten().tolist(), strict=True):
        hits, n = hits + (b != VOID and a == b), n + (b != VOID)
    assert found["miou"] == pytest.approx(sum(expected) / K)
    assert found["pixel_accuracy"] == pytest.approx(100 * hits / n)


def test_a_class_that_never_occurs_does_not_count() -> None:
    counts = torch.tensor([[3, 1, 0], [0, 4, 0], [0, 0, 0]])
    assert math.isnan(scores.iou(counts)[2])
    assert scores.iou(counts).nanmean().item() == pytest.approx((75 + 80) / 2)


def test_nll_ece_and_auroc_are_those_of_the_metrics_on_valid_pixels() -> None:
    probs, uncertainty, y = random_case()
    found = scored((probs, uncertainty, y))
    valid = y != VOID
    rows = probs.movedim(1, -1)[valid].double()  # (n, K)
    truth = y[valid].long()
    wrong = rows.argmax(1) != truth
    assert found["nll"] == pytest.approx(metrics.nll(rows, truth).item(), rel=1e-6)
    assert found["ece"] == pytest.approx(metrics.ece(rows, truth).item(), rel=1e-5)
    assert found["error_auroc_map"] == pytest.approx(metrics.auroc(uncertainty[valid].double(), wrong).item())


def test_refusal_is_that_of_sorting_with_ties_shared() -> None:
    probs, uncertainty, y = random_case()
    found = scored((probs, uncertainty, y))
    valid = y != VOID
    right = (probs.argmax(1) == y)[valid].double()
    values = uncertainty[valid]
    n = len(values)
    assert found["accuracy_refused_0_map"] == pytest.approx(found["pixel_accuracy"])
    for percent in scores.REFUSED:
        left, hits = (1 - percent / 100) * n, 0.0
        for value in values.unique().tolist():  # ascending
            own = right[values == value]
            taken = min(left, len(own))
            hits, left = hits + taken * own.mean().item(), left - taken
        assert found[f"accuracy_refused_{percent}_map"] == pytest.approx(100 * hits / ((1 - percent / 100) * n))


def test_boundary_is_that_of_a_loop_and_gives_the_ratio() -> None:
    probs, uncertainty, y = random_case()
    N, H, W = y.shape
    expected = torch.zeros_like(y, dtype=torch.bool)
    for n in range(N):
        for i in range(H):
            for j in range(W):
                window = y[n, max(0, i - 2) : i + 3, max(0, j - 2) : j + 3]
                expected[n, i, j] = bool((window != y[n, i, j]).any())
    near = scores.boundary(y)
    assert torch.equal(near, expected)
    valid = y != VOID
    ratio = uncertainty[near & valid].mean() / uncertainty[~near & valid].mean()
    assert scored((probs, uncertainty, y))["boundary_ratio_map"] == pytest.approx(ratio.item(), rel=1e-5)


def test_images_added_one_by_one_score_like_all_at_once() -> None:
    probs, uncertainty, y = random_case()
    parts = [(probs[i : i + 1], uncertainty[i : i + 1], y[i : i + 1]) for i in range(len(y))]
    assert scored(*parts) == pytest.approx(scored((probs, uncertainty, y)))


def test_histograms_keep_the_order_of_any_positive_numbers() -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.exp(40 * torch.rand(1, 60, 60, generator=generator) - 35)  # 1e-15 to 1e2
    values[0, 0, :3] = torch.tensor([0.0, -0.0, 1e-40])
    probs = torch.softmax(torch.randn(1, K, 60, 60, generator=generator), 1)
    y = torch.randint(0, K, (1, 60, 60), generator=generator).byte()
    exact = metrics.auroc(values.double(), probs.argmax(1) != y).item()
    assert scored((probs, values, y))["error_auroc_map"] == pytest.approx(exact, abs=1e-3)


def test_scores_that_do_not_exist_are_nan() -> None:
    probs, uncertainty, _ = random_case()
    found = scored((probs, uncertainty, probs.argmax(1).fill_(2)))  # one label: no boundary
    assert math.isnan(found["boundary_ratio_map"])
    found = scored((probs, uncertainty, probs.argmax(1)))  # no error
    assert math.isnan(found["error_auroc_map"])
    assert found["miou"] == 100


def test_a_map_that_is_not_finite_is_refused() -> None:
    probs, uncertainty, y = random_case()
    uncertainty[0, 0, 0] = math.nan
    with pytest.raises(MCBNError, match="map 'map' is not finite"):
        scored((probs, uncertainty, y))
