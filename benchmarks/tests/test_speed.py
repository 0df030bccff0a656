"""The benchmark: its loop is Algorithm 1, its ratios are right, its records are kept."""

import json
from dataclasses import asdict, replace
from itertools import groupby
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from mcbn import algorithm, data, demo
from mcbn.errors import MCBNError
from mcbn_benchmarks.__main__ import app
from mcbn_benchmarks.speed import cases, measures
from mcbn_benchmarks.speed.measures import latest
from mcbn_benchmarks.speed.report import Record, Target, compare, table, targets
from mcbn_study import journal
from mcbn_study.machine import Environment, environment

WHERE = Environment("cpu", "a machine", "2", "c0ffee", "today")
SMALL = replace(cases.MLP, rows=64, n=3, n_samples=4)


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("bench") / "new"
    for more in ([], ["--only", "mlp"]):
        result = CliRunner().invoke(app, ["speed", "--quick", "--out", str(folder), "--device", "cpu", *more])
        assert result.exit_code == 0, result.output
    return folder


def read(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / "cpu-quick.jsonl").read_text().splitlines()]


def test_quick_records_hold_every_field_and_method(quick: Path) -> None:
    records = read(quick)
    fields = {*asdict(Record("", 0, 0, "")), *asdict(WHERE)}
    assert all(set(record) == fields for record in records)
    for name in ("mlp", "resnet32"):
        timed = {r["method"]: r for r in records if r["case"] == name and r["milliseconds"]}
        assert {"algorithm 1", "plain x T", "mcbn"} <= set(timed)
        assert timed["mcbn"]["draws_timed"] == timed["mcbn"]["n_samples"]


def test_records_of_a_second_run_follow_those_of_the_first(quick: Path) -> None:
    order = [record["case"] for record in read(quick)]
    again = len(order) - order[::-1].index("resnet32")
    assert order[0] == "mlp"
    assert set(order[again:]) == {"mlp"}


def test_agreement_with_the_replay_is_rounding(quick: Path) -> None:
    errors = [record["value"] for record in read(quick) if record["method"] == "agreement"]
    assert len(errors) == 3
    assert all(isinstance(error, float) for error in errors)
    assert 0 < max(errors) < 1e-4  # equal to the bit: the fast way did not run


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_table_mentions_every_target(device: str) -> None:
    lines = table([], replace(WHERE, device=device)).splitlines()
    rows = [tuple(cell.strip() for cell in line.split("|")[1:-1]) for line in lines if line.startswith("| ")]
    for goal in targets(device):
        size = "" if goal.n is None else f"{goal.n:,}"
        assert (goal.case, size, "", "", goal.against, "", "", goal.text, "not measured") in rows
    assert len(rows) == 1 + len(targets(device))


def test_ratio_is_their_time_over_ours() -> None:
    records = [
        Record("mlp", 1, 500, "algorithm 1", 900.0),
        Record("mlp", 1, 500, "plain x T", 30.0),
        Record("mlp", 1, 500, "mcbn", 2.0),
        Record("mlp", 1, 500, "torch-uncertainty", note="not here"),
    ]
    ratios = {row.against: row.ratio for row in compare(records)}
    assert ratios == {"algorithm 1": 450.0, "plain x T": 15.0, "torch-uncertainty": None}
    text = table(records, WHERE)
    for words in ("450x", "reached", "at least 50x", "short by 70%", "not here"):
        assert words in text


def test_memory_ratio_is_many_draws_over_few() -> None:
    records = [Record("memory mlp", 2000, T, "mcbn", peak_bytes=size) for T, size in ((5, 100), (500, 130))]
    (row,) = compare(records)
    assert row.ratio == pytest.approx(1.3)
    assert "1.3x" in table(records, WHERE)


def test_missed_targets_are_listed_with_what_was_reached() -> None:
    records = [
        Record("mlp", 1, 500, "algorithm 1", 900.0, 40),
        Record("mlp", 1, 500, "plain x T", 30.0, 500),
        Record("mlp", 1, 500, "mcbn", 2.0, 500),
        Record("memory mlp", 2000, 5, "mcbn", peak_bytes=100),
        Record("memory mlp", 2000, 500, "mcbn", peak_bytes=300),
    ]
    text = table(records, WHERE)
    assert f"Targets: 1 reached, 2 missed, {len(targets('cpu')) - 3} not measured." in text
    assert "- mlp N=1 against plain x T: 15x, target at least 50x: short by 70%" in text
    assert "- memory mlp N=2,000 against T=5: 3x, target at most 1.5x: over by 100%" in text
    assert "reached; theirs scaled from 40 draws" in text


def append(path: Path, records: list[Record], where: Environment) -> None:
    journal.extend(path, [asdict(record) | asdict(where) for record in records])


def test_newest_run_of_every_case_makes_the_table(tmp_path: Path) -> None:
    path = tmp_path / "cpu.jsonl"
    old, new, cut = (replace(WHERE, date=date) for date in ("2026-01-01", "2026-01-02", "2026-01-03"))
    append(path, [Record("mlp", 1, 5, "mcbn", 3.0), Record("unet", 1, 5, "mcbn", 7.0)], old)
    append(path, [Record("mlp", 1, 5, "mcbn", 2.0)], new)
    append(path, [Record("unet", 1, 3, "agreement", value=0.1)], cut)
    append(path, [Record("mlp", 0, 0, "mcbn", note="skipped"), Record("linear", 0, 0, "mcbn", note="skipped")], cut)
    append(path, [Record("mlp", 1, 5, "mcbn", 9.0)], replace(cut, hardware="another machine"))
    found = latest(path, new.hardware)
    expected = [("mlp", 2.0), ("unet", 7.0), ("linear", None)]  # what was skipped is told of until it is measured
    assert [(record.case, record.milliseconds) for record in found] == expected


def test_few_recorded_batches_stand_for_all_draws() -> None:
    case = replace(SMALL, n_samples=7, recorded=3)
    posterior = cases.fitted(case, cases.prepare(case, "cpu")).posterior
    assert posterior.n_samples == 7
    for part in (posterior.mean["1"], posterior.var["1"]):
        assert torch.equal(part[3:6], part[:3])
        assert not torch.equal(part[0], part[1])
    records = list(measures._timed(case, {"mcbn": lambda T: None}, measures.Options(quick=True)))
    assert records[0].note == "statistics of 3 batches, repeated"


@pytest.mark.parametrize(
    "command", ["speed", "zoo", "chunks", "constants", "narrow", "trainer", "ray", "costs", "sweep"]
)
def test_every_command_has_its_help(command: str) -> None:
    result = CliRunner().invoke(app, [command, "--help"], prog_name="python -m mcbn_benchmarks")
    assert result.exit_code == 0
    assert f"Usage: python -m mcbn_benchmarks {command}" in result.output


def test_score_difference_is_averaged_over_splits_and_lists_each() -> None:
    records = [Record("linear boston", 51, 500, "CRPS difference", value=value) for value in (0.004, -0.001)]
    (row,) = compare(records)
    assert row.ratio == pytest.approx(0.0015)
    assert "+0.40%, -0.10%" in row.note


@pytest.mark.parametrize(
    ("bound", "ratio", "words"),
    [
        ("at least", 2.0, "reached"),
        ("at least", 1.5, "short by 25%"),
        ("at most", 3.0, "over by 50%"),
        ("at least", 1.996, "short by 0.2%"),
    ],
)
def test_verdict_says_how_far(bound: str, ratio: float, words: str) -> None:
    assert Target("mlp", 1, "plain x T", bound, 2.0).verdict(ratio) == words


def test_a_quick_run_is_held_against_no_target() -> None:
    records = [Record("mlp", 1, 4, name, 2.0) for name in ("mcbn", "plain x T")]
    text = table(records, WHERE, quick=True)
    assert "| 1x " in text
    assert "at least" not in text


def test_loop_gives_the_moments_of_algorithm_1_as_printed() -> None:
    ready = cases.prepare(SMALL, "cpu")
    loop, again = (cases.Algorithm1(ready.network, ready.train, ready.query) for _ in range(2))
    mean, variance = loop(6)  # (N, 1) each
    with torch.no_grad():
        draws = [algorithm.record(ready.network, again.batch()) for _ in range(6)]
        unbiased = [[(mu, var * 32 / 31) for mu, var in draw] for draw in draws]  # type: ignore[misc]
        samples = torch.stack([algorithm.replay(ready.network, draw, ready.query) for draw in unbiased])
    expected = algorithm.moments(samples)
    torch.testing.assert_close(mean, expected[0])
    torch.testing.assert_close(variance, expected[1], rtol=1e-3, atol=1e-6)
    assert not any(module.training for module in loop.network.modules())


def test_few_draws_are_scaled_to_all(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    monkeypatch.setattr(cases, "timed", lambda run, draws: (None, 0.5 * draws))
    found = cases.time_interleaved({"a": seen.append, "mcbn": seen.append}, 100, "cpu")
    assert (found["a"].draws_timed, found["mcbn"].draws_timed) == (8, 100)
    assert found["a"].milliseconds == found["mcbn"].milliseconds == 50_000
    assert seen == [1, 100]


def test_methods_are_timed_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr(cases, "WHOLE", set("abc"))
    methods = {name: lambda draws, name=name: seen.append(name) for name in "abc"}
    cases.time_interleaved(methods, 2, "cpu", most_repeats=2)
    assert [name for name, _ in groupby(seen)] == list("abcabc")  # short work repeats within its turn
    seen.clear()
    monkeypatch.setattr(cases, "MOST_CALLS", 0)
    cases.time_interleaved(methods, 2, "cpu", most_repeats=2)
    assert seen == list("abcabcabc")


@pytest.mark.slow
def test_fit_is_timed_against_training_forwards() -> None:
    records = list(measures.fit(SMALL, measures.Options(quick=True)))
    assert [record.method for record in records] == ["fit", "training forwards"]
    assert compare(records)[0].against == "training forwards"


@pytest.mark.slow
def test_linear_is_scored_and_timed_on_a_split(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measures, "LINEAR_SPLITS", 1)
    monkeypatch.setitem(demo.SETTINGS, "boston", replace(demo.SETTINGS["boston"], epochs=20))
    records = {record.method: record for record in measures.linear("boston")}
    assert records["linear"].milliseconds
    assert records["algorithm 1"].milliseconds
    assert abs(records["CRPS difference"].value or 0) < 0.5
    assert (records["correlation of epistemic std"].value or 0) > 0.5


def test_linear_says_why_a_data_set_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise MCBNError("no such file")

    monkeypatch.setattr(data, "load", absent)
    (record,) = measures.linear("yacht")
    assert record.note == "skipped: no such file"
    assert "skipped: no such file" in table([record], WHERE)


def test_peer_says_in_words_why_it_cannot_run(tmp_path: Path) -> None:
    ready = cases.prepare(SMALL, "cpu")
    records = measures.speed(SMALL, measures.Options(quick=True, peer_path=tmp_path))
    assert "cannot run: it knows 2-d batch norm only" in [record.note for record in records]
    images = cases.Prepared(torch.nn.BatchNorm2d(3), ready.train, ready.query)
    with pytest.raises(MCBNError, match=r"--peer-path .* does not hold it; pip install it"):
        cases.fit_peer(SMALL, images, tmp_path)


def test_growth_of_memory_counts_the_call_alone(tmp_path: Path) -> None:
    ready = cases.prepare(SMALL, "cpu")
    bayes = cases.fitted(SMALL, ready)
    bayes.save(tmp_path / "fitted.mcbn")
    torch.save(ready.network.state_dict(), tmp_path / "network.pt")
    for method in ("mcbn", "plain x T"):
        assert 0 <= cases.growth(SMALL, method, tmp_path) < 2**30


@pytest.mark.slow
def test_memory_is_measured_in_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measures, "MEMORY_SAMPLES", (2, 4))
    records = list(measures.memory(replace(SMALL, name="memory mlp"), measures.Options()))
    assert [record.n_samples for record in records] == [2, 4]
    assert all(record.peak_bytes is not None and record.peak_bytes >= 0 for record in records)


def test_cuda_without_a_gpu_is_refused() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    result = CliRunner().invoke(app, ["speed", "--device", "cuda"])
    assert result.exit_code == 2
    assert "--device cuda cannot be used here" in result.output


def test_environment_names_machine_and_commit() -> None:
    found = environment("cpu")
    assert "threads" in found.hardware
    assert found.torch == torch.__version__
    assert found.commit


def test_precisions_are_timed_against_plain_passes_and_an_experts_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measures, "capture", lambda function, **_: function)  # no CUDA graph here
    case = replace(cases.RESNET32, name="resnet32 bf16", rows=64, n=2, n_samples=4, recorded=2, dtype=torch.bfloat16)
    records = {record.method: record for record in measures.precision(case, measures.Options(quick=True))}
    assert {"plain x T", "folded x T", "mcbn", "mcbn fp32"} <= set(records)
    assert records["error over that of its own code"].value < 1.5
    ratios = {row.against for row in compare([*records.values()])}
    assert {"plain x T", "folded x T", "mcbn fp32"} <= ratios
    assert {target.case for target in targets("cuda")} >= {case.name for case in cases.PRECISION}


@pytest.mark.parametrize("case", [cases.RESNET32, cases.UNET], ids=lambda case: case.name)
def test_folded_networks_give_the_same_numbers_without_batch_norm(case: cases.Case) -> None:
    ready = cases.prepare(replace(case, shape=(3, 32, 32), rows=16, n=2), "cpu")
    folded = cases.folded(ready.network)
    assert not any(isinstance(module, torch.nn.BatchNorm2d) for module in folded.modules())
    with torch.no_grad():
        torch.testing.assert_close(folded(ready.query), ready.network(ready.query), rtol=1e-3, atol=1e-4)


def test_the_estimator_is_timed_and_recorded(tmp_path: Path) -> None:
    options = ["estimator", "--rows", "300", "--columns", "3", "--epochs", "2", "--out", str(tmp_path / "e.jsonl")]
    result = CliRunner().invoke(app, options)
    assert result.exit_code == 0, result.output
    record = json.loads((tmp_path / "e.jsonl").read_text())
    assert (record["n"], record["epochs"]) == (300, 2)
    assert record["commit"]
    assert record["fit_cpu_seconds"] > 0 < record["predict_seconds"]


@pytest.mark.slow
def test_the_first_calls_of_fresh_processes_are_timed(tmp_path: Path) -> None:
    out = tmp_path / "first.jsonl"
    done = CliRunner().invoke(app, ["first", "--device", "cpu", "--only", "mlp N=1 T=20", "--out", str(out)])
    assert done.exit_code == 0, done.output
    predict, fit = journal.read(out)
    assert (predict["case"], fit["case"]) == ("first predict, mlp", "first fit, mlp")
    assert all(second > 0 for record in (predict, fit) for second in (*record["seconds"], *record["cpu_seconds"]))
