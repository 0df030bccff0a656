"""Scores over tau: each is that of the tau it names, and the table comes from records."""

from pathlib import Path
from statistics import fmean

import pytest

from mcbn_study import precision
from mcbn_study.journal import read

NETWORKS = Path(__file__).parents[2] / "results" / "regression"


@pytest.mark.slow
def test_scores_at_the_chosen_tau_are_those_on_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "regression" / "networks"
    folder.mkdir(parents=True)
    for end in ("", "_folds"):
        (folder / f"yacht{end}.safetensors").symlink_to(NETWORKS / "networks" / f"yacht{end}.safetensors")
    monkeypatch.setattr(precision, "CONFIG", {"n_samples": 200, "factors": [1, 100]})
    precision.run(tmp_path / "out", regression=tmp_path / "regression")
    chosen, far = read(tmp_path / "out" / "records.jsonl")
    assert [chosen["factor"], far["factor"], len(far["pll"])] == [1, 100, 25]
    kept = [r for r in read(NETWORKS / "records.jsonl") if r.get("method") == "mcbn" and r["dataset"] == "yacht"]
    for metric in ("crps", "pll"):
        assert fmean(chosen[metric]) == pytest.approx(fmean(r[metric] for r in kept), rel=0.1)
    assert fmean(far["pll"]) < fmean(chosen["pll"])  # narrow components miss
    lines = (tmp_path / "out" / "table.md").read_text().splitlines()
    assert [line.split("|")[2].strip() for line in lines if line.startswith("|")][2:] == ["1", "100", "paper"]
    precision.run(tmp_path / "out", regression=tmp_path / "regression")  # nothing is done twice
    assert len((tmp_path / "out" / "records.jsonl").read_text().splitlines()) == 2
