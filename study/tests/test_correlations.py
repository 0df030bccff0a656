"""Correlations of batch statistics: known ones are found, chance is chance, tables come from records."""

from pathlib import Path

import pytest
import torch
from scipy import stats
from torch import Tensor

from mcbn_study.journal import read
from mcbn_study.statistics import correlate, report_correlations


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_independent_gaussians_are_correlated_by_chance_alone() -> None:
    numbers = correlate(normal(500, 200), 3 + normal(500, 200, seed=1))
    assert numbers["units_beyond_chance"] == pytest.approx(0.05, abs=0.01)
    assert numbers["pair_beyond_chance"] == pytest.approx(0.05, abs=0.05)
    assert numbers["jointly_gaussian"] > 0.9


def test_the_correlation_of_a_unit_is_that_of_its_pairs() -> None:
    mean = normal(300, 1)
    mean = torch.cat([mean, mean + normal(300, 1, seed=2)], 1)
    std = 0.6 * mean + 0.8 * normal(300, 2, seed=1)
    numbers = correlate(mean, std)
    pairs = sorted(abs(stats.pearsonr(mean[:, c], std[:, c]).statistic) for c in range(2))
    assert numbers["pair"] == pytest.approx(pairs[0], abs=1e-4)  # torch's median of two is the lower
    assert numbers["units"] == pytest.approx(abs(stats.pearsonr(mean[:, 0], mean[:, 1]).statistic), abs=1e-4)


def test_units_that_are_not_gaussian_together_fail_and_constant_ones_are_left_out() -> None:
    mean = normal(500, 3)
    numbers = correlate(torch.cat([mean, torch.ones(500, 1)], 1), torch.cat([mean.abs(), torch.ones(500, 1)], 1))
    assert numbers["jointly_gaussian"] == 0
    assert numbers["constant"] == 1


def test_the_table_on_record_is_that_of_its_records(tmp_path: Path) -> None:
    kept = Path(__file__).parents[2] / "results" / "correlations"
    (tmp_path / "records.jsonl").write_bytes((kept / "records.jsonl").read_bytes())
    report_correlations(tmp_path)
    assert (tmp_path / "table.md").read_text() == (kept / "table.md").read_text()
    assert len({r["dataset"] for r in read(kept / "records.jsonl")}) == 8
