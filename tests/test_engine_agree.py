"""Same numbers: what agrees, relative to what, and that no other place of the library decides it."""

import ast
from pathlib import Path

import pytest
import torch

import mcbn
from mcbn.engine import agree as agreement
from mcbn.engine.agree import EXPORTED, GRADIENTS, MEANS, SAMPLES, VARIANCES, Precision, agree

NAMED = (SAMPLES, GRADIENTS, EXPORTED, MEANS, VARIANCES)


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
    assert not agree(expected + 0.05, expected)
    monkeypatch.setattr(agreement, "is_tf32", lambda _: True)
    assert agree(expected + 0.05, expected)


def test_a_scale_of_its_own_holds_value_by_value() -> None:
    expected, scale = torch.tensor([1.0, 1000.0]), torch.tensor([1.0, 1000.0])
    assert agree(expected + torch.tensor([0.5e-3, 0.5]), expected, scale=scale)
    assert not agree(expected + torch.tensor([0.5, 0.5]), expected, scale=scale)
    assert agree(expected + torch.tensor([0.5, 0.5]), expected)


@pytest.mark.parametrize("values", [torch.full((2,), torch.nan), torch.zeros(3), torch.full((2,), torch.inf)])
def test_other_shapes_and_what_is_no_number_never_agree(values: torch.Tensor) -> None:
    assert not agree(values, torch.zeros(2))


def test_nothing_agrees_with_nothing_and_zeros_agree_with_zeros() -> None:
    assert not agree(torch.zeros(0), torch.zeros(0))
    assert agree(torch.zeros(2), torch.zeros(2))


def test_no_other_module_of_the_library_compares_by_a_tolerance() -> None:
    def called(path: Path) -> set[str]:
        return {node.attr for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)}

    others = [path for path in Path(mcbn.__file__).parent.rglob("*.py") if path.name != "agree.py"]
    assert not [path for path in others if {"allclose", "isclose", "assert_close"} & called(path)]
