"""Scores over tau: each is that of the tau it names, and the table comes from records."""

import math
from pathlib import Path
from statistics import fmean

import pytest

from mcbn_study import paper, sensitivity
from mcbn_study.estimates import estimate
from mcbn_study.journal import read

NETWORKS = Path(__file__).parents[2] / "results" / "regression"


@pytest.mark.slow
def test_scores_at_the_chosen_tau_are_those_on_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "regression" / "networks"
    folder.mkdir(parents=True)
    for end in ("", "_folds"):
        (folder / f"yacht{end}.safetensors").symlink_to(NETWORKS / "networks" / f"yacht{end}.safetensors")
    monkeypatch.setattr(sensitivity, "PRECISION", {"n_samples": 200, "factors": [1, 100]})
    sensitivity.precision(tmp_path / "out", regression=tmp_path / "regression")
    chosen, far = read(tmp_path / "out" / "records.jsonl")
    assert [chosen["factor"], far["factor"], len(far["pll"])] == [1, 100, 25]
    kept = [r for r in read(NETWORKS / "records.jsonl") if r.get("method") == "mcbn" and r["dataset"] == "yacht"]
    for metric in ("crps", "pll"):
        assert fmean(chosen[metric]) == pytest.approx(fmean(r[metric] for r in kept), rel=0.1)
    assert fmean(far["pll"]) < fmean(chosen["pll"])  # narrow components miss
    lines = (tmp_path / "out" / "table.md").read_text().splitlines()
    assert [line.split("|")[2].strip() for line in lines if line.startswith("|")][2:] == ["1", "100", "paper"]
    sensitivity.precision(tmp_path / "out", regression=tmp_path / "regression")  # nothing is done twice
    assert len((tmp_path / "out" / "records.jsonl").read_text().splitlines()) == 2


def test_what_is_said_of_tau_is_what_the_records_hold() -> None:
    path = NETWORKS.parent / "precision" / "records.jsonl"
    if not path.exists():
        pytest.skip("no results beside these tests")
    found = {(r["dataset"], r["factor"]): r for r in read(path)}
    moved = [abs(fmean(r["crps"]) / fmean(found[d, 1]["crps"]) - 1) for (d, _), r in found.items()]
    assert 0.05 < max(moved) < 0.06  # "moves by 6 % at most"
    for factor, agrees in ((1, [True, False]), (3, [True, True])):  # CRPS, PLL of Concrete
        for metric, near in zip(("crps", "pll"), agrees, strict=True):
            ours, printed = estimate(found["concrete", factor][metric]), paper.find("concrete", "mcbn", metric)
            apart = abs(ours.mean - printed.mean) / math.hypot(ours.standard_error, printed.standard_error)
            assert (apart < 2) == near
