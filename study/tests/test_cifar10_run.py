"""CIFAR-10: the study and its command."""

import dataclasses
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import mcbn
import mcbn_study.journal
from cifar import TINY
from mcbn.cli import app
from mcbn_study.cifar10 import profile, run as study
from mcbn_study.cifar10.profile import PROFILES
from mcbn_study.cifar10.train import load_network
from mcbn_study.data.cifar import Images, cifar10


def small_study(monkeypatch: pytest.MonkeyPatch) -> None:
    """CIFAR-10 of random images, enough of them for the held-out indices."""
    generator = torch.Generator().manual_seed(0)
    few = torch.randint(0, 256, (50, 3, 32, 32), dtype=torch.uint8, generator=generator)
    large = Images(few[torch.arange(50_000) % 50], torch.arange(50_000) % 10)
    monkeypatch.setattr(profile, "cifar10", lambda part: large)


STUDY = dataclasses.replace(TINY, steps=40, rates=((0, 0.05), (15, 1e-4)), n_train=40, n_validation=10, n_test=20)


@pytest.mark.slow
def test_study_trains_measures_and_records_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_study(monkeypatch)
    path = study.run(STUDY, tmp_path, seeds=[1, 2])
    files = sorted(p.name for p in (tmp_path / "networks").iterdir())
    assert files == ["resnet8-seed1.safetensors", "resnet8-seed2.safetensors"]
    found = mcbn_study.journal.read(path)
    assert [r["seed"] for r in found if r["kind"] == study.TRAINING] == [1, 2]
    assert len([r for r in found if r["kind"] == study.KIND]) == 28
    assert all({"config_hash", "commit", "device", "hardware", "seconds", "seed"} <= r.keys() for r in found[1:15])
    study.run(STUDY, tmp_path, seeds=[1, 2])
    assert mcbn_study.journal.read(path) == found
    elsewhere = tmp_path / "elsewhere"
    study.run(STUDY, elsewhere, seeds=[1], networks=tmp_path / "networks")
    assert not (elsewhere / "networks").exists()
    assert [r["scores"] for r in mcbn_study.journal.read(elsewhere / "records.jsonl")[1:]] == [
        r["scores"] for r in found[1:15]
    ]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:mcbn. drawn batch statistics disagree")  # trained for three steps
def test_a_profile_of_its_own_trains_on_all_images_beside_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_study(monkeypatch)
    every, small = PROFILES["all"], {"depth": 8, "steps": 3, "n_test": 20, "n_samples": (1, 2), "n_draws": 4}
    assert not every.batch_sizes  # no sweep: there is nothing to choose M by
    parts = every.load()
    assert (len(parts.train.y), len(parts.validation.y)) == (50_000, 0)
    rows = mcbn_study.journal.read(study.run(dataclasses.replace(every, **small), tmp_path, seeds=[1]))
    assert [p.name for p in (tmp_path / "networks" / "all").iterdir()] == ["resnet8-all-seed1.safetensors"]
    assert {r["network"] for r in rows} == {"resnet8-all"}
    assert {(r["method"], r["part"], r["n_samples"]) for r in rows[1:]} == {
        ("plain", "test", None),
        ("mcbn", "test", 1),
        ("mcbn", "test", 2),
    }


def test_study_with_dropout_trains_and_leaves_measuring_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_study(monkeypatch)
    path = study.run(STUDY, tmp_path, seeds=[1], dropout=0.1)
    assert load_network(tmp_path / "networks" / "resnet8-dropout-seed1.safetensors")[0].dropout == 0.1
    assert [r["kind"] for r in mcbn_study.journal.read(path)] == [study.TRAINING]


def test_study_refuses_networks_of_other_settings_and_impossible_seeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_study(monkeypatch)
    study.run(STUDY, tmp_path, seeds=[1], dropout=0.1)
    with pytest.raises(mcbn.MCBNError, match="other settings"):
        study.run(dataclasses.replace(STUDY, steps=3), tmp_path, seeds=[1], dropout=0.1)
    for seeds in ([], [1, 1], [-1]):
        with pytest.raises(mcbn.MCBNError, match="seeds must be"):
            study.run(STUDY, tmp_path, seeds=seeds)
    answer = CliRunner().invoke(app, ["reproduce", "cifar10", "--profile", "slow"])
    assert answer.exit_code == 2
    assert f"profile must be one of {list(PROFILES)}, got 'slow'" in answer.output


@pytest.mark.slow
def test_quick_profile_runs_from_the_command_line(tmp_path: Path) -> None:
    try:
        cifar10("test")
    except mcbn.MCBNError:
        pytest.skip("CIFAR-10 is not here; `mcbn data cifar10` fetches it")
    arguments = ["reproduce", "cifar10", "--profile", "quick", "--seeds", "1", "--out", str(tmp_path)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "networks",
        "records.jsonl",
        "resnet8-pll.png",
        "summary.csv",
        "table.md",
    ]
    rows = [r for r in mcbn_study.journal.read(tmp_path / "records.jsonl") if r["kind"] == study.KIND]
    plain = next(r for r in rows if (r["method"], r["part"]) == ("plain", "test"))
    assert plain["scores"]["accuracy"] > 0.2  # chance is 0.1


def test_the_command_line_refuses_seeds_that_are_no_numbers(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from mcbn.cli import app

    result = CliRunner().invoke(app, ["reproduce", "cifar10", "--seeds", "one", "--out", str(tmp_path / "x")])
    assert result.exit_code == 2
    assert "seeds are whole numbers" in result.output
    assert not (tmp_path / "x").exists()
