"""Moments of class probabilities in one kernel against the operations it stands for."""

import pytest
import torch
from torch import Tensor

from mcbn import moments as streaming
from mcbn.engine import kernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(params=["channels first", "channels last"])
def draws(request: pytest.FixtureRequest) -> Tensor:
    """Logits of 5 draws, 2 images and 11 classes."""
    layout = torch.channels_last if request.param == "channels last" else torch.contiguous_format
    logits = 3 * torch.randn(10, 11, 7, 9, device=DEVICE)
    return logits.contiguous(memory_format=layout).unflatten(0, (5, 2))


def both(monkeypatch: pytest.MonkeyPatch, chunks: list[Tensor], tau: float) -> list[list[Tensor]]:
    """Return prediction and moments by the kernel and by single operations."""
    found = []
    for taken in (True, False):
        monkeypatch.setattr(streaming, "suits_kernel", lambda *_, own=taken: own)
        made = streaming.classification(iter(chunks), torch.tensor(tau, dtype=torch.float64))
        found.append([made.probs, made.variance, made.expected_entropy, made.mutual_information])
    return found


@pytest.mark.slow
@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("sizes", [(5,), (1, 4), (2, 2, 1)])
def test_chunks_of_draws_give_the_numbers_of_single_operations(monkeypatch, draws: Tensor, sizes) -> None:
    chunks = list(torch.split(draws, sizes))
    for found, expected in zip(*both(monkeypatch, chunks, 0.7), strict=True):
        assert found.shape == expected.shape
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.usefixtures("kernel")
def test_equal_draws_have_no_variance_and_odd_logits_are_kept(monkeypatch, draws: Tensor) -> None:
    first = draws[:1].clone()
    first[0, 0, 0, 0, 0], first[0, 0, 1, 0, 1], first[0, 1, 2, 3, 3] = -torch.inf, torch.nan, torch.inf
    found, expected = both(monkeypatch, [first.expand(5, -1, -1, -1, -1)], 1.0)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6, equal_nan=True)
    assert (found[1].nan_to_num() == 0).all()
    assert found[0][0, 0, 0, 0] == 0
    assert found[0][0, :, 0, 1].isnan().all()


@pytest.mark.slow
@pytest.mark.usefixtures("kernel")
def test_draws_that_are_sure_of_different_classes_give_finite_numbers(monkeypatch, draws: Tensor) -> None:
    sure = draws.clone()
    sure[0, :, 0] += 40  # of a class that the other draws hold for nearly impossible, not quite
    sure[1:, :, 1] += 40
    for found, expected in zip(*both(monkeypatch, [sure], 1.0), strict=True):
        assert found.isfinite().all()
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)  # entropies are differences


class OnGpu(Tensor):
    """Outputs that seem to lie on a GPU."""

    @property
    def is_cuda(self) -> bool:
        return True


def test_only_dense_single_precision_outputs_on_a_gpu_are_taken(monkeypatch) -> None:
    monkeypatch.setattr(kernels, "available", lambda: True)
    tau = torch.tensor(1.0)
    assert not kernels.suits_probabilities(torch.zeros(1, 1, 2, 128, 128), tau)
    if DEVICE == "cuda":
        dense = torch.zeros(1, 1, 2, 128, 128, device=DEVICE)
        assert kernels.suits_probabilities(dense, tau)
        for other in (dense[..., :8], dense.double(), dense.repeat(1, 1, 17, 1, 1), dense.clone().requires_grad_()):
            assert not kernels.suits_probabilities(other, tau)
