import json
import warnings

import pytest

from mcbn.errors import MCBNError
from mcbn_study import records

FIRST = {"kind": "test", "dataset": "boston", "rmse": 2.75, "note": 'a "quoted" line\nwith an end, ±'}
SECOND = {"kind": "test", "config": {"epochs": 240, "dropout": None}, "rmse": 1e-17}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "study" / "records.jsonl"


def read_quietly(path):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "mcbn: .* cut off")
        return records.read(path)


def test_what_was_appended_is_read_in_order(path):
    for record in (FIRST, SECOND, FIRST):
        records.append(path, record)
    assert records.read(path) == [FIRST, SECOND, FIRST]


def test_many_are_appended_as_one_by_one(path, tmp_path):
    for record in (FIRST, SECOND):
        records.append(path, record)
    records.extend(tmp_path / "other.jsonl", iter([FIRST, SECOND]))
    assert (tmp_path / "other.jsonl").read_bytes() == path.read_bytes()
    before = path.read_bytes()
    with pytest.raises(MCBNError):
        records.extend(path, [FIRST, {"a": float("nan")}])
    assert path.read_bytes() == before


def test_every_record_is_one_line_of_json(path):
    records.append(path, FIRST)
    records.append(path, SECOND)
    lines = path.read_text().split("\n")
    assert [json.loads(line) for line in lines[:2]] == [FIRST, SECOND]
    assert lines[2:] == [""]


def test_a_file_that_is_not_there_holds_no_records(path):
    assert records.read(path) == []


def test_an_empty_file_holds_no_records(path):
    path.parent.mkdir()
    path.touch()
    assert records.read(path) == []
    records.append(path, FIRST)
    assert records.read(path) == [FIRST]


@pytest.mark.parametrize("later", [[], [SECOND]])
def test_a_write_cut_at_any_byte_loses_that_record_alone(path, later):
    records.append(path, FIRST)
    before = path.read_bytes()
    records.append(path, SECOND)
    whole = path.read_bytes()
    for size in range(len(before), len(whole) + 1):
        path.write_bytes(whole[:size])
        kept = [FIRST, SECOND] if size >= len(whole) - 1 else [FIRST]
        assert read_quietly(path) == kept
        for record in later:
            records.append(path, record)
        assert read_quietly(path) == kept + later
        if later:
            assert records.read(path) == kept + later  # no warning: the end was mended


def test_the_first_write_cut_at_any_byte_can_be_followed(path):
    records.append(path, FIRST)
    whole = path.read_bytes()
    for size in range(len(whole) - 1):
        path.write_bytes(whole[:size])
        assert read_quietly(path) == []
        records.append(path, SECOND)
        assert records.read(path) == [SECOND]


def test_a_cut_off_last_line_is_named_in_a_warning(path):
    records.append(path, FIRST)
    with path.open("ab") as file:
        file.write(b'{"kind": "te')
    with pytest.warns(UserWarning, match=r"mcbn: .*records\.jsonl ends in a line that was cut off \(12 bytes\)"):
        assert records.read(path) == [FIRST]


def test_zeros_left_by_a_crash_count_as_cut_off(path):
    records.append(path, FIRST)
    with path.open("ab") as file:
        file.write(b"\0" * 40)
    with pytest.warns(UserWarning, match="40 bytes"):
        assert records.read(path) == [FIRST]


@pytest.mark.parametrize(
    "damaged", [b'{"kind": "te', b"[1, 2]", b"3", b'{"a": NaN}', b"\xff\xfe", b'{"a": 1}{"b": 2}', b"\0"]
)
def test_damage_elsewhere_names_the_line(path, damaged):
    records.append(path, FIRST)
    with path.open("ab") as file:
        file.write(damaged + b"\n")
    records.append(path, SECOND)
    with pytest.raises(MCBNError, match=r"records\.jsonl, line 2 is damaged"):
        records.read(path)


def test_a_damaged_last_line_that_ends_properly_is_no_cut(path):
    records.append(path, FIRST)
    with path.open("ab") as file:
        file.write(b'{"kind": "te\n')
    with pytest.raises(MCBNError, match="line 2"):
        records.read(path)


def test_blank_lines_hold_nothing_but_count(path):
    path.parent.mkdir()
    path.write_bytes(b'{"a": 1}\n\n{"b": 2}\r\n')
    assert records.read(path) == [{"a": 1}, {"b": 2}]
    path.write_bytes(b'{"a": 1}\n\nx\n')
    with pytest.raises(MCBNError, match="line 3"):
        records.read(path)


@pytest.mark.parametrize("bad", [{"a": float("nan")}, {"a": {"b": float("inf")}}, {"a": {1, 2}}, [("a", 1)]])
def test_what_is_no_json_is_refused_and_nothing_is_written(path, bad):
    records.append(path, FIRST)
    before = path.read_bytes()
    with pytest.raises(MCBNError):
        records.append(path, bad)
    assert path.read_bytes() == before


def test_records_reach_the_disk_before_append_returns(path, monkeypatch):
    synced = []
    monkeypatch.setattr(records.os, "fsync", lambda descriptor: synced.append(path.read_bytes()))
    records.append(path, FIRST)
    assert [json.loads(content) for content in synced] == [FIRST]
