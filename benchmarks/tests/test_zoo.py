"""The zoo: its checks see mistakes, its records are kept, its tables are made of them alone."""

import json
import sys
from pathlib import Path

import imitations
import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

from mcbn import algorithm
from mcbn_benchmarks.__main__ import app
from mcbn_benchmarks.zoo import checks, entries, table
from mcbn_benchmarks.zoo.entries import Entry, Specimen
from mcbn_benchmarks.zoo.standin import NAMES, standing_in
from mcbn_study import journal
from mcbn_study.journal import RECORDS, Record

ROOT = Path(__file__).parents[2]
COMMITTED = journal.read(ROOT / "results" / "zoo" / RECORDS)


def examine(model: nn.Module, x: Tensor, **options: object) -> Record:
    return checks.examine(Entry("mcbn", "test", "net", lambda: Specimen(model, x, **options)))  # type: ignore[arg-type]


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 6), nn.BatchNorm1d(6))


def run_zoo(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["zoo", *arguments])
    return result.output if result.exit_code == 0 else f"failed: {result.output}"


@pytest.fixture
def imitated(monkeypatch: pytest.MonkeyPatch) -> None:
    """A zoo of imitations, which need no package."""
    monkeypatch.setattr(checks, "all_entries", lambda: imitations.ENTRIES)


@pytest.mark.slow
@pytest.mark.usefixtures("imitated")
def test_imitations_run_as_a_user_runs_the_zoo(tmp_path: Path) -> None:
    run_zoo("--out", str(tmp_path), "--only", "mcbn/")
    kept = journal.read(tmp_path / RECORDS)
    assert len(kept) == 5
    assert all(r["outcome"] == "exact" and r["untouched"] and r["fast_error"] <= 1e-4 for r in kept)
    run_zoo("--out", str(tmp_path), "--only", "mcbn/")  # resumes: nothing is run again
    assert journal.read(tmp_path / RECORDS) == kept
    run_zoo("--out", str(tmp_path), "--only", "mcbn/volume", "--again")
    assert len(journal.read(tmp_path / RECORDS)) == 6
    counted = "Of 5 networks with batch norm 5 are exact (100.0 %), and 5 were left untouched"
    assert counted in (tmp_path / "table.md").read_text()


@pytest.mark.usefixtures("imitated")
def test_inexact_network_makes_the_run_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "TOLERANCE", dict.fromkeys(checks.TOLERANCE, -1.0))
    said = run_zoo("--only", "mcbn/volume", "--out", str(tmp_path))
    assert said.startswith("failed")
    assert "not exact, or not left untouched: mcbn/volume" in said
    (record,) = journal.read(tmp_path / "records.jsonl")
    assert record["commit"]
    assert record["hardware"]


def test_package_that_is_missing_is_skipped_with_a_reason() -> None:
    def build() -> Specimen:
        raise AssertionError("must not be built")

    found = checks.examine(Entry("no_such_package", "test", "net", build))
    assert (found["outcome"], found["reason"]) == ("skipped", "no_such_package is not installed")
    found = checks.examine(Entry("mcbn", "test", "net", build), absent=["mcbn"])
    assert found["outcome"] == "skipped"


def test_network_that_fails_by_itself_is_skipped_with_its_own_words() -> None:
    found = examine(mlp(), torch.randn(12, 4))
    assert found["outcome"] == "skipped"
    assert "cannot be built or run: RuntimeError: mat1 and mat2 shapes" in found["reason"]


def test_only_batch_norm_trains_in_a_training_pass() -> None:
    model, x = nn.Sequential(*mlp(), nn.Dropout(0.5)), torch.randn(12, 5)
    output = checks.call(checks.norms_in_training(model), x)
    assert [module.training for module in model] == [isinstance(m, nn.BatchNorm1d) for m in model]
    torch.testing.assert_close(output.mean(0), torch.zeros(6), atol=1e-6, rtol=0)


def test_inexact_statistics_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = algorithm.record

    def unbiased(network: nn.Module, batch: Tensor) -> algorithm.Draw:
        M = len(batch)
        return [(mean, var * M / (M - 1)) for mean, var in honest(network, batch)]  # type: ignore[misc]

    monkeypatch.setattr(algorithm, "record", unbiased)
    found = examine(mlp(), torch.randn(12, 5))
    assert found["outcome"] == "inexact"
    assert found["dtype"] == "float64"  # looked at again in double precision
    assert found["statistics_error"] == pytest.approx(0.25)


def test_what_is_compared_is_the_fast_way_that_the_record_names(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    for name in ("explain", "sample"):
        own = getattr(checks.MCBN, name)
        told = lambda *args, own=own, name=name, **how: (called.append(name), own(*args, **how))[1]  # noqa: E731
        monkeypatch.setattr(checks.MCBN, name, told)
    assert examine(mlp(), torch.randn(12, 5))["way"] == "2 draws in one pass"
    assert called[-2:] == ["explain", "sample"]  # so few draws alone would run by the network's own code


def test_inexact_outputs_and_a_wrong_fast_way_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "norms_in_training", nn.Module.eval)  # a pass with running statistics
    found = examine(mlp(), torch.randn(12, 5))
    assert found["outcome"] == "inexact"
    assert found["output_error"] > 1e-3 > found["fast_error"]
    monkeypatch.undo()
    honest = algorithm.replay
    monkeypatch.setattr(algorithm, "replay", lambda *arguments: 1.001 * honest(*arguments))
    found = examine(mlp(), torch.randn(12, 5))
    assert found["outcome"] == "inexact"
    assert found["fast_error"] > 1e-4 > found["output_error"]


def test_layer_that_mcbn_does_not_see_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    found = examine(mlp(), torch.randn(12, 5))
    assert (found["outcome"], found["layers"]) == ("exact", 2)
    real = checks.MCBN
    monkeypatch.setattr(checks, "MCBN", lambda *args, **options: real(*args, **options, layers=1))
    found = examine(mlp(), torch.randn(12, 5))
    assert found["outcome"] == "inexact"
    assert "recorded calls differ from those made: 1 of 2, ['1']" in found["reason"]


def test_touched_network_is_found() -> None:
    model = mlp()
    before = checks.state(model)
    assert checks.state(model) == before
    for change in (
        lambda: model[1].running_mean.add_(1e-7),
        lambda: model[4].train(False),
        lambda: model[1].register_forward_hook(print),
    ):
        change()
        assert checks.state(model) != before
        before = checks.state(model)


def test_refusal_and_no_batch_norm_are_told_apart() -> None:
    class Own(nn.BatchNorm1d):
        def forward(self, x: Tensor) -> Tensor:
            return (x - x.mean(0)) if self.training else x - self.running_mean  # type: ignore[operator]

    assert examine(nn.Sequential(nn.Linear(5, 3), nn.LayerNorm(3)), torch.randn(12, 5))["outcome"] == "no batch norm"
    found = examine(nn.Sequential(nn.Linear(5, 3), Own(3)), torch.randn(12, 5))
    assert found["outcome"] == "refused"
    assert "does its own arithmetic" in found["reason"]


def test_list_of_examples_goes_through_its_collate() -> None:
    class Sets(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bn = nn.BatchNorm1d(3)

        def forward(self, x: Tensor, owner: Tensor) -> Tensor:
            return torch.zeros(int(owner[-1]) + 1, 3, dtype=x.dtype).index_add(0, owner, self.bn(x))

    def collate(sets: list[Tensor]) -> tuple[Tensor, Tensor]:
        return torch.cat(sets), torch.cat([torch.full((len(s),), i) for i, s in enumerate(sets)])

    made = [torch.randn(2 + i % 3, 3) for i in range(12)]
    assert examine(Sets(), made, collate=collate)["outcome"] == "exact"  # type: ignore[arg-type]


def test_stand_ins_are_there_inside_and_gone_outside() -> None:
    with standing_in() as names:
        for name in names:
            module = __import__(f"{name}.ops.misc", fromlist=["Layer"])
            assert issubclass(module.Layer, nn.Module)
            assert module.Mode.NEAREST == "NEAREST"
            with pytest.raises(ImportError, match=r"Layer is of .*not installed"):
                module.Layer()
    assert not [name for name in sys.modules if name.split(".")[0] in names]
    for name in names:
        with pytest.raises(ModuleNotFoundError):
            __import__(name)
    assert set(names) <= set(NAMES)


def test_entries_have_titles_of_their_own() -> None:
    titles = [(entry.title, entry.domain) for entry in entries.all_entries()]
    assert len(set(titles)) == len(titles) > 150


def test_a_skip_does_not_replace_a_run() -> None:
    run = {"package": "p", "name": "n", "outcome": "exact"}
    skip = run | {"outcome": "skipped"}
    again = run | {"outcome": "inexact"}
    assert table.latest([run, skip]) == [run]
    assert table.latest([skip, run, again]) == [again]


def test_the_table_is_that_of_the_committed_records() -> None:
    found = table.latest(COMMITTED)
    assert (ROOT / "results" / "zoo" / "table.md").read_text() == table.table(found)


def test_at_least_95_percent_are_exact_and_the_rest_is_explained() -> None:
    ran = table.ran(table.latest(COMMITTED))
    exact = [r for r in ran if r["outcome"] == "exact"]
    assert len(exact) >= 0.95 * len(ran)
    assert all(r["untouched"] for r in ran)
    assert all(r["reason"] for r in ran if r not in exact)
    assert {r["domain"] for r in exact} >= {"segmentation", "3-D medical", "graphs", "EEG", "time series", "tabular"}
    assert json.dumps(COMMITTED)  # plain values alone
