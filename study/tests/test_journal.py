"""Records: nothing half-written, nothing lost, nothing twice."""

import json
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from mcbn.errors import MCBNError
from mcbn_study import journal

FIRST = {"kind": "test", "dataset": "boston", "rmse": 2.75, "note": 'a "quoted" line\nwith an end, ±'}
SECOND = {"kind": "test", "config": {"epochs": 240, "dropout": None}, "rmse": 1e-17}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "study" / "records.jsonl"


def read_quietly(path):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "mcbn: .* cut off")
        return journal.read(path)


def test_what_was_appended_is_read_in_order(path):
    for record in (FIRST, SECOND, FIRST):
        journal.extend(path, [record])
    assert journal.read(path) == [FIRST, SECOND, FIRST]


def test_many_are_appended_as_one_by_one(path, tmp_path):
    for record in (FIRST, SECOND):
        journal.extend(path, [record])
    journal.extend(tmp_path / "other.jsonl", iter([FIRST, SECOND]))
    assert (tmp_path / "other.jsonl").read_bytes() == path.read_bytes()
    before = path.read_bytes()
    with pytest.raises(MCBNError):
        journal.extend(path, [FIRST, {"a": float("nan")}])
    assert path.read_bytes() == before


def test_every_record_is_one_line_of_json(path):
    journal.extend(path, [FIRST])
    journal.extend(path, [SECOND])
    lines = path.read_text().split("\n")
    assert [json.loads(line) for line in lines[:2]] == [FIRST, SECOND]
    assert lines[2:] == [""]


def test_a_file_that_is_not_there_holds_no_records(path):
    assert journal.read(path) == []


def test_an_empty_file_holds_no_records(path):
    path.parent.mkdir()
    path.touch()
    assert journal.read(path) == []
    journal.extend(path, [FIRST])
    assert journal.read(path) == [FIRST]


@pytest.mark.parametrize("later", [[], [SECOND]])
def test_a_write_cut_at_any_byte_loses_that_record_alone(path, later):
    journal.extend(path, [FIRST])
    before = path.read_bytes()
    journal.extend(path, [SECOND])
    whole = path.read_bytes()
    for size in range(len(before), len(whole) + 1):
        path.write_bytes(whole[:size])
        kept = [FIRST, SECOND] if size >= len(whole) - 1 else [FIRST]
        assert read_quietly(path) == kept
        for record in later:
            journal.extend(path, [record])
        assert read_quietly(path) == kept + later
        if later:
            assert journal.read(path) == kept + later  # no warning: the end was mended


def test_the_first_write_cut_at_any_byte_can_be_followed(path):
    journal.extend(path, [FIRST])
    whole = path.read_bytes()
    for size in range(len(whole) - 1):
        path.write_bytes(whole[:size])
        assert read_quietly(path) == []
        journal.extend(path, [SECOND])
        assert journal.read(path) == [SECOND]


def test_a_cut_off_last_line_is_named_in_a_warning(path):
    journal.extend(path, [FIRST])
    with path.open("ab") as file:
        file.write(b'{"kind": "te')
    with pytest.warns(UserWarning, match=r"mcbn: .*records\.jsonl ends in a line that was cut off \(12 bytes\)"):
        assert journal.read(path) == [FIRST]


def test_zeros_left_by_a_crash_count_as_cut_off(path):
    journal.extend(path, [FIRST])
    with path.open("ab") as file:
        file.write(b"\0" * 40)
    with pytest.warns(UserWarning, match="40 bytes"):
        assert journal.read(path) == [FIRST]


@pytest.mark.parametrize(
    "damaged", [b'{"kind": "te', b"[1, 2]", b"3", b'{"a": NaN}', b"\xff\xfe", b'{"a": 1}{"b": 2}', b"\0"]
)
def test_damage_elsewhere_names_the_line(path, damaged):
    journal.extend(path, [FIRST])
    with path.open("ab") as file:
        file.write(damaged + b"\n")
    journal.extend(path, [SECOND])
    with pytest.raises(MCBNError, match=r"records\.jsonl, line 2 is damaged"):
        journal.read(path)


def test_a_record_of_another_schema_is_refused_by_its_place_and_the_field(path):
    journal.extend(path, [FIRST, {"kind": "test", "commit": "0123456789abcdef"}, {"kind": "test"}])
    first, second, third = journal.read(path)
    assert first["rmse"] == 2.75
    with pytest.raises(MCBNError, match=r"records\.jsonl, line 2: the record has no 'rmse'; .*, commit 0123456789ab;"):
        second["rmse"]
    with pytest.raises(MCBNError, match=r"line 3: .*, commit unknown; use that version, or remove the line"):
        third["rmse"]
    assert third.get("rmse") is None
    assert "rmse" not in third


def test_a_damaged_last_line_that_ends_properly_is_no_cut(path):
    journal.extend(path, [FIRST])
    with path.open("ab") as file:
        file.write(b'{"kind": "te\n')
    with pytest.raises(MCBNError, match="line 2"):
        journal.read(path)


def test_blank_lines_hold_nothing_but_count(path):
    path.parent.mkdir()
    path.write_bytes(b'{"a": 1}\n\n{"b": 2}\r\n')
    assert journal.read(path) == [{"a": 1}, {"b": 2}]
    path.write_bytes(b'{"a": 1}\n\nx\n')
    with pytest.raises(MCBNError, match="line 3"):
        journal.read(path)


@pytest.mark.parametrize("bad", [{"a": float("nan")}, {"a": {"b": float("inf")}}, {"a": {1, 2}}])
def test_what_is_no_json_is_refused_and_nothing_is_written(path, bad):
    journal.extend(path, [FIRST])
    before = path.read_bytes()
    with pytest.raises(MCBNError):
        journal.extend(path, [bad])
    assert path.read_bytes() == before


def test_runs_that_share_a_folder_lose_nothing(tmp_path):
    def add(number):
        mine = journal.Journal(tmp_path)
        for count in range(20):
            mine.append([{"number": number, "count": count, "filler": "x" * 200_000}])

    with ThreadPoolExecutor() as pool:
        list(pool.map(add, range(4)))
    assert len({(record["number"], record["count"]) for record in journal.read(tmp_path / journal.RECORDS)}) == 80


def test_records_reach_the_disk_before_append_returns(path, monkeypatch):
    synced = []
    monkeypatch.setattr(journal.os, "fsync", lambda descriptor: synced.append(path.read_bytes()))
    journal.extend(path, [FIRST])
    assert [json.loads(content) for content in synced] == [FIRST]


def test_what_is_on_record_is_told_by_fields_and_configuration(tmp_path):
    kept = journal.Journal(tmp_path, {"n": 1})
    kept.add([{"family": "plain", "rmse": 1.0}])
    for again in (kept, journal.Journal(tmp_path, {"n": 1})):
        assert again.has(family="plain")
        assert not again.has(family="linear")
    assert not journal.Journal(tmp_path, {"n": 2}).has(family="plain")
    assert not journal.Journal(tmp_path, {"n": 1}, name="other.jsonl").records
    (record,) = journal.read(tmp_path / "records.jsonl")
    assert list(record) == ["family", "rmse", "config", "config_hash", "device", "hardware", "torch", "commit", "date"]


def test_the_newest_of_a_key_counts():
    old, other, new = {"a": 1, "b": 1}, {"a": 2, "b": 1}, {"a": 1, "b": 2}
    assert journal.latest([old, other, new], ("a",)) == [new, other]


SETTINGS = {"name": "toy", "folds": 5}


def record(split, **more):
    return {
        "kind": "test",
        "dataset": "boston",
        "method": "mcbn",
        "split": split,
        "seed": 1,
        "config_hash": journal.digest(SETTINGS),
        **more,
    }


def test_records_are_appended_once(tmp_path):
    study = journal.CellJournal(tmp_path, SETTINGS)
    study.append([record(1, rmse=2.0)])
    before = study.path.read_bytes()
    study.append([record(1, rmse=3.0), record(2)])
    assert study.path.read_bytes().startswith(before)
    assert [r["split"] for r in journal.read(study.path)] == [1, 2]
    assert study.has(**record(1))
    assert study.has(**record(2))
    assert not study.has(**record(3))
    assert study.find(split=1)[0]["rmse"] == 2.0


def test_a_cut_off_line_is_dropped_with_a_warning_and_nothing_else(tmp_path):
    study = journal.CellJournal(tmp_path, SETTINGS)
    study.append([record(1), record(2), record(3)])
    study.path.write_bytes(study.path.read_bytes()[:-10])
    with pytest.warns(UserWarning, match="ends in a line that was cut off"):
        assert [r["split"] for r in journal.read(study.path)] == [1, 2]
    with pytest.warns(UserWarning, match="was cut off"):
        again = journal.CellJournal(tmp_path, SETTINGS)
    again.append([record(4)])
    assert [r["split"] for r in journal.read(study.path)] == [1, 2, 4]


def test_another_configuration_is_refused_by_name(tmp_path):
    journal.CellJournal(tmp_path, SETTINGS)
    with pytest.raises(MCBNError, match=r"folds is 5 there, 3 now.*--out"):
        journal.CellJournal(tmp_path, SETTINGS | {"folds": 3})
    with pytest.raises(MCBNError, match="seeds is None there, 2 now"):
        journal.CellJournal(tmp_path, SETTINGS | {"seeds": 2})


def test_records_without_settings_are_refused(tmp_path):
    (tmp_path / "records.jsonl").write_text(json.dumps(record(1)) + "\n")
    with pytest.raises(MCBNError, match=r"no settings.json.*--out"):
        journal.CellJournal(tmp_path, SETTINGS)


def test_a_cell_comes_back_with_the_records_it_owes(tmp_path, monkeypatch):
    study = journal.CellJournal(tmp_path, SETTINGS)
    monkeypatch.setattr(journal.CellJournal, "append", lambda self, records: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        study.finish("cell", {"a": torch.arange(3)}, [record(1)])
    monkeypatch.undo()
    again = journal.CellJournal(tmp_path, SETTINGS)
    assert again.records == []
    assert again.load("cell")["a"].tolist() == [0, 1, 2]
    assert again.has(**record(1))
    assert again.load("other") is None


def test_infinite_scores_are_refused(tmp_path):
    with pytest.raises(ValueError, match="JSON"):
        journal.CellJournal(tmp_path, SETTINGS).append([record(1, rmse=float("inf"))])


def test_every_kind_of_record_has_a_key():
    assert set(journal.KEYS) == {"test", "selection", "sensitivity", "posterior"}


def test_two_runs_into_one_folder_leave_each_record_once(tmp_path):
    first, second = (journal.CellJournal(tmp_path, SETTINGS) for _ in range(2))
    first.append([record(1)])
    second.append([record(1), record(2)])  # both have done split 1 meanwhile
    assert [r["split"] for r in journal.read(first.path)] == [1, 2]
    plain, other = (journal.Journal(tmp_path, name="plain.jsonl") for _ in range(2))
    plain.add([{"split": 1}])
    assert other.has(split=1)
