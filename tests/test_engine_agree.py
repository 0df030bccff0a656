"""Same numbers: what agrees, relative to what, and that no other place of the library decides it."""

import ast
from pathlib import Path

import pytest
import torch
from torch import Tensor

import mcbn
from mcbn.engine import agree as agreement
from mcbn.engine.agree import (
    EXPORTED,
    FRACTION,
    GRADIENTS,
    MEANS,
    TIMES,
    TYPICAL,
    VARIANCES,
    Precision,
    agree,
    tolerance,
    within,
)

NAMED = (GRADIENTS, EXPORTED, MEANS, VARIANCES)


@pytest.mark.parametrize("precision", NAMED)
@pytest.mark.parametrize(
    ("dtype", "kind"), [(torch.float64, "double"), (torch.float32, "single"), (torch.bfloat16, "coarse")]
)
def test_bounds_follow_what_the_numbers_were_computed_in(precision: Precision, dtype: torch.dtype, kind: str) -> None:
    expected = torch.tensor([-100.0, 0.0, 1.0], dtype=dtype)  # the largest sets the scale
    bound = 100 * getattr(precision, kind)
    assert agree(expected + torch.tensor([0.0, 0.9 * bound, 0.0], dtype=dtype), expected, precision)
    assert not agree(expected + torch.tensor([0.0, 1.2 * bound, 0.0], dtype=dtype), expected, precision)


def test_products_rounded_to_tf32_are_coarse(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = torch.ones(3)
    assert not agree(expected + 0.01, expected, MEANS)
    monkeypatch.setattr(agreement, "is_tf32", lambda _: True)
    assert agree(expected + 0.01, expected, MEANS)


def test_a_scale_of_its_own_holds_value_by_value() -> None:
    expected, scale = torch.tensor([1.0, 1000.0]), torch.tensor([1.0, 1000.0])
    assert agree(expected + torch.tensor([0.5e-3, 0.5]), expected, scale=scale)
    assert not agree(expected + torch.tensor([0.5, 0.5]), expected, scale=scale)
    assert agree(expected + torch.tensor([0.5, 0.5]), expected)  # one output of two inputs: the larger is the scale


@pytest.mark.parametrize("values", [torch.full((2,), torch.nan), torch.zeros(3), torch.full((2,), torch.inf)])
def test_other_shapes_and_what_is_no_number_never_agree(values: Tensor) -> None:
    assert not agree(values, torch.zeros(2))


def test_nothing_agrees_with_nothing_and_zeros_agree_with_zeros() -> None:
    assert not agree(torch.zeros(0), torch.zeros(0))
    assert agree(torch.zeros(2), torch.zeros(2))
    assert within(tolerance(torch.zeros(4, 3, 2)), torch.zeros(3, 2), torch.zeros(3, 2))


# ---------------------------------------------------------------- the bound of samples


def samples(*shape: int, spread: float, seed: int = 0) -> Tensor:
    """Draw four samples of outputs about 1, in single precision: (4, N, ...)."""
    generator = torch.Generator().manual_seed(seed)
    centre = 1 + torch.rand(1, *shape, generator=generator)
    return centre + spread * torch.randn(4, *shape, generator=generator)


def naive(own: Tensor, error: Tensor) -> list[float]:
    """Work out the tolerance of every output of samples (t, N, D) by its equation, one at a time."""
    t, N, D = own.shape
    size = [max(abs(float(own[i, n, d])) for i in range(t) for n in range(N)) for d in range(D)]
    variance = [sum(float(own[:, n, d].double().var()) for n in range(N)) / N for d in range(D)]
    spread = [value**0.5 for value in variance]
    measured = [(sum(float(error[n, d]) ** 2 for n in range(len(error))) / len(error)) ** 0.5 for d in range(D)]
    digit = [max(torch.finfo(own.dtype).eps * s, torch.finfo(own.dtype).eps * 1e-6 * max(size)) for s in size]
    units = [max(spread[d], digit[d]) for d in range(D)]
    typical = sorted(measured[d] / units[d] for d in range(D))[(D - 1) // 2]
    roundings = [max(digit[d], measured[d], typical * units[d]) for d in range(D)]
    return [FRACTION * spread[d] + TIMES * roundings[d] for d in range(D)]


def test_the_bound_is_its_equation() -> None:
    own, error = samples(6, 5, spread=0.1), 1e-5 * torch.randn(6, 5, generator=torch.Generator().manual_seed(1))
    expected = torch.tensor(naive(own, error), dtype=torch.float64)
    torch.testing.assert_close(tolerance(own, error)[0], expected)


@pytest.mark.parametrize("shape", [(40, 3), (40,), (5, 3, 4, 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_plans_pass_up_to_a_few_roundings_and_no_further(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    own = samples(*shape, spread=0.0).to(dtype)
    rounding = 8 * torch.finfo(dtype).eps
    error = torch.full(shape, rounding)
    bound, exact = tolerance(own, error), own[0].double()
    one, n = torch.zeros_like(exact), exact.numel()
    one.view(-1)[3] = TIMES * rounding
    assert within(bound, exact + 0.9 * one, exact)
    assert not within(bound, exact + 1.1 * one, exact)
    typical = (TYPICAL + (1 - TYPICAL) / n**0.5) * TIMES * rounding
    assert within(bound, exact + 0.9 * typical, exact)
    assert not within(bound, exact + 1.1 * typical, exact)


def test_plans_pass_within_a_fraction_of_the_spread_and_no_further() -> None:
    own = samples(2000, 1, spread=0.3)
    bound = tolerance(own)
    one = torch.zeros(2000, 1)
    one[7] = FRACTION * 0.3
    assert within(bound, own[0] + 0.9 * one, own[0])
    assert not within(bound, own[0] + 1.1 * one, own[0])
    assert not within(bound, own[0] + 1.3 * TYPICAL * FRACTION * 0.3, own[0])


@pytest.mark.parametrize("factor", [1e-5, 1e6])
def test_the_scale_of_one_output_is_nothing_to_the_others(factor: float) -> None:
    own, error = samples(30, 2, spread=0.1), torch.full((8, 2), 1e-6)
    scaled = torch.tensor([1.0, factor])
    bound, other = tolerance(own, error), tolerance(own * scaled, error * scaled)
    torch.testing.assert_close(other, bound * scaled)


@pytest.mark.parametrize("shape", [(20, 2), (1, 2), (4, 7, 2), (4, 2, 6, 6), (3, 6, 6, 2)])
def test_a_wrong_1_beside_a_million_is_refused(shape: tuple[int, ...]) -> None:
    axis = shape.index(2, 1)
    sizes = torch.tensor([1e6, 1.0]).view([2 if a == axis else 1 for a in range(len(shape))])
    own = samples(*shape, spread=0.02) * sizes
    allowed = tolerance(own, 1e-7 * own[0])
    wrong = own[0].clone()
    wrong.select(axis, 1)[...] *= 1.2
    assert within(allowed, own[0] * (1 + 1e-7), own[0])
    assert not within(allowed, wrong, own[0])
    assert not within(allowed, torch.full_like(own[0], 500.0).where(sizes < 2, own[0]), own[0])


def test_without_spread_rounding_alone_counts_and_is_one_digit_at_least() -> None:
    own = samples(10, 3, spread=0.0)
    allowed, digit = tolerance(own), torch.finfo(torch.float32).eps
    torch.testing.assert_close(allowed, TIMES * digit * own[0].amax(0, keepdim=True).double())
    assert torch.equal(tolerance(own[:1]), allowed)  # of one draw no spread is known


def test_one_output_that_rounds_badly_does_not_loosen_the_others() -> None:
    own, error = samples(30, 5, spread=0.1), torch.full((8, 5), 1e-7)
    error[:, 0] = 1e-2
    assert bool((tolerance(own, error)[0, 1:] < 2e-3).all())
    assert tolerance(own, error)[0, 0] > 1e-2 / 2


def test_another_result_in_double_precision_is_not_taken_for_rounding() -> None:
    own = samples(30, 5, spread=0.1)
    other = tolerance(own, torch.full((8, 5), 100.0))
    assert bool((other < 0.6).all())


def test_what_convolutions_may_round_to_is_no_error() -> None:
    own = samples(30, 5, spread=0.1)
    assert not within(tolerance(own), own * (1 + 3e-4), own)
    assert within(tolerance(own, digit=agreement.TF32_DIGIT), own * (1 + 3e-4), own)


def test_no_other_module_of_the_library_compares_by_a_tolerance() -> None:
    def called(path: Path) -> set[str]:
        return {node.attr for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)}

    known = ("agree.py", "rows.py")  # the latter of one operation, to see which inputs its results are of
    others = [path for path in Path(mcbn.__file__).parent.rglob("*.py") if path.name not in known]
    assert not [path for path in others if {"allclose", "isclose", "assert_close"} & called(path)]
