"""The gap between the two objectives as N grows, small."""

from itertools import product
from pathlib import Path

import pytest

from mcbn_study import regularizer
from mcbn_study.journal import read
from untouched import generators


def test_the_gap_of_a_fixed_prior_falls_with_n_and_tables_are_those_of_the_records(tmp_path: Path) -> None:
    before = generators()
    regularizer.objective(tmp_path, dataset="boston", sizes=(64, 320), steps=20)
    assert generators() == before
    records = read(tmp_path / "records.jsonl")
    assert [(r["n"], r["seed"]) for r in records] == list(product((64, 320), regularizer.SEEDS))
    assert {"seconds", "device", "commit", "config_hash"} <= set(records[0])
    lines = [line.split(",") for line in (tmp_path / "table.csv").read_text().splitlines()]
    assert lines[0] == ["N", "fixed prior", "implied prior", "decay", "KL against decay"]
    for line, n in zip(lines[1:], (64, 320), strict=True):
        own = [r for r in records if r["n"] == n]
        assert float(line[1]) == pytest.approx(sum(r["fixed"]["relative"] for r in own) / 3, abs=1e-6)
        against = sum(r["implied"]["difference"] / r["implied"]["decay"] for r in own) / 3
        assert float(line[4]) == pytest.approx(against, abs=1e-6)
    assert float(lines[2][1]) < 0.4 * float(lines[1][1])
    assert (tmp_path / "table.md").read_text().count("\n|") == 4
