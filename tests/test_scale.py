"""Prediction of many files in one process: batches by place in the file, every row once, resumed, nothing dropped."""

import errno
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import mcbn
from inputs import COLUMNS, by_row, classifier, regressor, rows, spoil, write_images, write_tables
from mcbn import MCBNError, scale
from mcbn.scale import read_results
from mcbn.tables.formats import ParquetTable

BAYES = regressor()
OPTIONS = {"key": "id", "batch_size": 16, "part_rows": 32}


@pytest.fixture
def tables(tmp_path: Path) -> Path:
    write_tables(tmp_path / "in")
    return tmp_path / "in"


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("start", [0, 16, 48, 96])
@pytest.mark.parametrize("stop", [48, 100, None])
def test_a_slice_of_a_parquet_file_is_that_slice_of_its_batches(tmp_path, start, stop):
    pq.write_table(pa.table({"a": np.arange(100.0), "k": list(range(100))}), tmp_path / "x.parquet", row_group_size=23)
    blocks = list(ParquetTable(tmp_path / "x.parquet").blocks([0], 16, [1], start, stop))
    expected = range(start, 100 if stop is None else stop)
    assert [int(v) for block in blocks for v in block.numbers[:, 0]] == list(expected)
    assert [k for block in blocks for k in block.keys[1].to_pylist()] == list(expected)
    assert [block.first for block in blocks] == list(range(start, expected.stop, 16))


def test_results_are_those_of_the_batches_of_each_file(tables, tmp_path):
    summary = scale.predict(tables, BAYES, out=tmp_path / "out", **OPTIONS)
    assert (summary.rows, summary.bad_files) == (185, ())
    found = by_row(read_results(tmp_path / "out"))
    for number, count in enumerate((50, 70, 1, 64)):
        x, ids = rows(count, number)
        for first in range(0, count, 16):
            pred = BAYES.predict(x[first : first + 16])
            low, high = pred.interval(0.95)
            for i in range(len(pred.mean)):
                values = (pred.mean[i], pred.std[i], low[i], high[i])
                expected = (ids[first + i], *(float(v) for v in values))
                assert found[f"table{number}.parquet", first + i] == expected


def test_parts_do_not_change_a_bit(tables, tmp_path):
    whole = scale.predict(tables, BAYES, out=tmp_path / "a", key="id", batch_size=16)
    cut = scale.predict(tables, BAYES, out=tmp_path / "b", key="id", batch_size=16, part_rows=20)
    assert (whole.parts, cut.parts) == (4, 2 + 3 + 1 + 2)
    assert read_results(tmp_path / "a").equals(read_results(tmp_path / "b"))


def test_parts_are_enough_to_share_out_and_depend_on_the_inputs_alone(tables, tmp_path, monkeypatch):
    monkeypatch.setattr(scale.job, "SPLIT_BYTES", 0)
    monkeypatch.setattr(scale.job, "PARTS", 5)  # of 185 rows: 37, which is three batches of 16
    files = scale.job.list_files([tables])
    cut = scale.job.cut(files, 16, None)
    assert [(part.start, part.stop) for part in cut] == [
        (0, 48),
        (48, 50),
        (0, 48),
        (48, 70),
        (0, 1),
        (0, 48),
        (48, 64),
    ]
    monkeypatch.setattr(scale.job, "PART_ROWS", 20)
    assert len(scale.job.cut(files, 16, None)) == 2 + 3 + 1 + 2  # 32 rows at most
    images = {f"{i}.png": tmp_path / f"{i}.png" for i in range(23)}
    assert [len(part.files) for part in scale.job.cut(images, 2, None)] == [6, 6, 6, 5]
    assert scale.predict(tables, BAYES, out=tmp_path / "a", key="id", batch_size=16).parts == 8
    monkeypatch.undo()
    scale.predict(tables, BAYES, out=tmp_path / "b", key="id", batch_size=16)
    assert read_results(tmp_path / "a").equals(read_results(tmp_path / "b"))


def test_a_csv_file_gives_what_the_same_parquet_file_gives(tables, tmp_path):
    write_tables(tmp_path / "csv", suffix=".csv")
    scale.predict(tables, BAYES, out=tmp_path / "a", **OPTIONS)
    scale.predict(tmp_path / "csv", BAYES, out=tmp_path / "b", **OPTIONS)
    a, b = (by_row(read_results(tmp_path / name)) for name in "ab")
    assert {(Path(file).stem, row): values for (file, row), values in a.items()} == {
        (Path(file).stem, row): values for (file, row), values in b.items()
    }


def test_columns_are_found_by_name_and_others_left_out(tmp_path):
    x, ids = rows(20, 0)
    age, height, weight = x.T.numpy()
    columns = {"weight": weight, "note": ids, "age": age, "height": height, "id": list(range(20))}
    pq.write_table(pa.table(columns), tmp_path / "x.parquet")
    scale.predict(tmp_path / "x.parquet", BAYES, out=tmp_path / "out", key=["note", "id"], columns=COLUMNS)
    table = read_results(tmp_path / "out")
    assert table.column_names == ["file", "row", "note", "id", "mean", "std", "low", "high"]
    assert table["id"].to_pylist() == list(range(20))
    assert np.array_equal(table["mean"].to_numpy(), BAYES.predict(x).mean[:, 0].numpy())


def test_images_without_pillow_name_the_extra(tmp_path, monkeypatch):
    write_images(tmp_path / "in")
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(MCBNError, match=r"images need Pillow: pip install 'mcbn\[ray\]'"):
        scale.predict(tmp_path / "in", classifier(), out=tmp_path / "out")


def test_images_are_predicted_in_the_order_of_their_names(tmp_path):
    write_images(tmp_path / "in")
    bayes = classifier()
    summary = scale.predict(tmp_path / "in", bayes, out=tmp_path / "out", batch_size=5, part_rows=10)
    assert (summary.rows, summary.parts) == (23, 3)
    table = read_results(tmp_path / "out")
    labels = sorted(p.relative_to(tmp_path / "in").as_posix() for p in (tmp_path / "in").rglob("*.png"))
    assert table["file"].to_pylist() == labels
    assert table["row"].to_pylist() == list(range(23))
    from PIL import Image

    images = [torch.from_numpy(np.array(Image.open(tmp_path / "in" / label))) for label in labels[5:10]]
    probs = bayes.predict(torch.stack(images).permute(0, 3, 1, 2).float() / 255).probs
    assert np.array_equal(table["prob_2"].to_numpy()[5:10], probs[:, 2].numpy())


def test_filters_of_warnings_do_not_change_a_bit(tmp_path):
    write_images(tmp_path / "in")
    for action in ("error", "ignore"):
        with warnings.catch_warnings():
            warnings.simplefilter(action)
            scale.predict(tmp_path / "in", classifier(pooled=True), out=tmp_path / action, batch_size=5)
    assert read_results(tmp_path / "error").equals(read_results(tmp_path / "ignore"))


def test_a_tau_that_was_never_tuned_is_said_once(tables, tmp_path):
    bayes = regressor()
    bayes.tau = float("inf")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        summary = scale.predict(tables, bayes, out=tmp_path / "out", key="id", batch_size=16)
    assert summary.rows > 3 * 16
    assert sum("the noise was never tuned" in str(warning.message) for warning in said) == 1


def test_corrupt_files_are_listed_and_the_others_predicted(tables, tmp_path):
    spoil(tables / "table1.parquet")
    pq.write_table(pa.table({"id": ["a"], "age": [1.0]}), tables / "narrow.parquet")
    pq.write_table(pa.table({"id": ["a"], **{name: [float("nan")] for name in COLUMNS}}), tables / "nan.parquet")
    summary = scale.predict(tables, BAYES, out=tmp_path / "out", **OPTIONS)
    assert summary.rows == 50 + 1 + 64
    bad = lines(tmp_path / "out" / "bad_files.jsonl")
    assert tuple(bad) == summary.bad_files
    reasons = {entry["file"]: entry["reason"] for entry in bad}
    assert list(reasons) == ["nan.parquet", "narrow.parquet", "table1.parquet"]
    assert "row 1, column 'age' is nan" in reasons["nan.parquet"]
    assert "lacks the input column(s) 'height', 'weight'" in reasons["narrow.parquet"]
    assert "not a parquet file" in reasons["table1.parquet"]
    assert {file for file, _ in by_row(read_results(tmp_path / "out"))} == {f"table{i}.parquet" for i in (0, 2, 3)}


def test_corrupt_images_are_listed_one_by_one(tmp_path):
    from PIL import Image

    write_images(tmp_path / "in")
    spoil(tmp_path / "in" / "class0" / "004.png")
    Image.new("RGB", (9, 8)).save(tmp_path / "in" / "class1" / "007.png")
    (tmp_path / "in" / "class1" / "009.png").write_text("no image")
    summary = scale.predict(tmp_path / "in", classifier(), out=tmp_path / "out", batch_size=5, part_rows=10)
    assert summary.rows == 20
    assert [entry["file"] for entry in summary.bad_files] == ["class0/004.png", "class1/007.png", "class1/009.png"]
    assert "shape is (3, 8, 9)" in summary.bad_files[1]["reason"]


def test_a_mended_file_is_taken_in_on_resume_only_as_the_same_job(tables, tmp_path):
    content = (tables / "table1.parquet").read_bytes()
    (tables / "table1.parquet").write_bytes(b"x" * len(content))
    scale.predict(tables, BAYES, out=tmp_path / "out", key="id")
    (tables / "table1.parquet").write_bytes(content)
    summary = scale.predict(tables, BAYES, out=tmp_path / "out", key="id", resume=True)
    assert (summary.rows, summary.resumed, summary.bad_files) == (185, 3, ())
    assert lines(tmp_path / "out" / "bad_files.jsonl") == []


def test_an_interrupted_job_goes_on_and_repeats_nothing(tables, tmp_path, monkeypatch):
    whole = scale.predict(tables, BAYES, out=tmp_path / "whole", **OPTIONS)
    done = []

    def interrupt(outcome):
        done.append(outcome.part)
        if len(done) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        scale.predict(tables, BAYES, out=tmp_path / "out", on_part=interrupt, **OPTIONS)
    (tmp_path / "out" / ".part-000001-00000.parquet.mcbn-dead").mkdir()  # of a killed worker
    with pytest.raises(MCBNError, match="no finished job"):
        read_results(tmp_path / "out")
    again = []
    summary = scale.predict(tables, BAYES, out=tmp_path / "out", resume=True, on_part=again.append, **OPTIONS)
    assert (summary.resumed, len(again)) == (3, whole.parts - 3)
    assert not set(done) & {outcome.part for outcome in again}
    assert read_results(tmp_path / "out").equals(read_results(tmp_path / "whole"))
    assert not list((tmp_path / "out").glob(".*"))


def test_a_full_disk_stops_the_job_which_then_goes_on(tables, tmp_path, monkeypatch):
    whole = scale.predict(tables, BAYES, out=tmp_path / "whole", **OPTIONS)
    plain, written = pq.write_table, []

    def full(table, path, *args, **kwargs):
        plain(table, path, *args, **kwargs)
        written.append(path)
        if len(written) == 3:
            raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(pq, "write_table", full)
        with pytest.raises(MCBNError, match=r"No space left on device.*make room and go on"):
            scale.predict(tables, BAYES, out=tmp_path / "out", **OPTIONS)
    assert len(list((tmp_path / "out").glob("*.parquet"))) == 2
    assert not list((tmp_path / "out").glob(".*"))
    assert scale.predict(tables, BAYES, out=tmp_path / "out", resume=True, **OPTIONS).rows == whole.rows
    assert read_results(tmp_path / "out").equals(read_results(tmp_path / "whole"))


def test_a_small_disk_that_is_really_full(tables, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=32k", "tmpfs", str(out)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("this user may not mount a file system of a few pages")
    try:
        with pytest.raises(MCBNError, match=r"No space left on device.*make room and go on"):
            scale.predict(tables, BAYES, out=out, **OPTIONS)
        subprocess.run(["mount", "-o", "remount,size=1m", str(out)], check=True)
        assert scale.predict(tables, BAYES, out=out, resume=True, **OPTIONS).rows == 185
        assert len(by_row(read_results(out))) == 185
    finally:
        subprocess.run(["umount", "--lazy", str(out)], check=True)


def test_a_folder_with_something_in_it_is_refused(tables, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine.txt").write_text("keep")
    with pytest.raises(MCBNError, match=r"is not empty \(it holds mine.txt\).*resume"):
        scale.predict(tables, BAYES, out=out)
    with pytest.raises(MCBNError, match=r"no job\.json"):
        scale.predict(tables, BAYES, out=out, resume=True)
    with pytest.raises(MCBNError, match="is a file"):
        scale.predict(tables, BAYES, out=out / "mine.txt")
    assert (out / "mine.txt").read_text() == "keep"


def test_another_job_is_not_gone_on_with(tables, tmp_path):
    scale.predict(tables, BAYES, out=tmp_path / "out", key="id")
    other = regressor(1)
    for message, call in {
        "network and posterior": lambda: scale.predict(tables, other, out=tmp_path / "out", key="id", resume=True),
        "options": lambda: scale.predict(tables, BAYES, out=tmp_path / "out", key="id", resume=True, n_samples=3),
        "reading": lambda: scale.predict(tables, BAYES, out=tmp_path / "out", key="id", resume=True, batch_size=7),
    }.items():
        with pytest.raises(MCBNError, match=f"belongs to another job: its {message}"):
            call()


@pytest.mark.parametrize(
    ("message", "options"),
    [
        (r"lacks the key column\(s\) 'name'", {"key": "name"}),
        (r"lacks the input column\(s\) 'salary'", {"key": "id", "columns": ["age", "salary"]}),
        ("method must be one of", {"method": "magic"}),
        ("coverage must lie", {"coverage": 1.5}),
        ("batch_size must be", {"batch_size": 0}),
        ("n_samples=99 asked", {"n_samples": 99}),
    ],
)
def test_what_no_worker_could_do_is_refused_at_once(tables, tmp_path, message, options):
    with pytest.raises(MCBNError, match=message):
        scale.predict(tables, BAYES, out=tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_inputs_that_are_not_there_are_refused(tables, tmp_path):
    (tmp_path / "empty").mkdir()
    for message, inputs in {
        "there is no file or folder": tmp_path / "nowhere",
        "there are no tables": tmp_path / "empty",
        "must end in": tmp_path / "x.txt",
        "two input files are called": [tables, tmp_path / "twin"],
        "both tables and images": [tables, tmp_path / "pictures"],
    }.items():
        (tmp_path / "x.txt").write_text("")
        write_tables(tmp_path / "twin", (3,))
        write_images(tmp_path / "pictures", 1)
        with pytest.raises(MCBNError, match=message):
            scale.predict(inputs, BAYES, out=tmp_path / "out")
    for path in tables.iterdir():
        spoil(path)
    with pytest.raises(MCBNError, match="not one of 4 input files can be read"):
        scale.predict(tables, BAYES, out=tmp_path / "out")
    with pytest.raises(MCBNError, match="not fitted"):
        scale.predict(tables, mcbn.MCBN(BAYES.model, "regression"), out=tmp_path / "out")


def test_inputs_the_network_cannot_take_are_refused_at_once(tables, tmp_path):
    with pytest.raises(MCBNError, match="does not take the 2 input columns of table0"):
        scale.predict(tables, BAYES, out=tmp_path / "out", key="id", columns=["age", "height"])
    assert not (tmp_path / "out").exists()


def test_an_error_of_the_network_is_no_bad_file(tables, tmp_path, monkeypatch):
    def broken(*_: object, **__: object) -> None:
        raise MCBNError("the network is broken")

    monkeypatch.setattr(mcbn.MCBN, "predict", broken)
    with pytest.raises(MCBNError, match="the network is broken"):
        scale.predict(tables, BAYES, out=tmp_path / "out", key="id")
    assert not list((tmp_path / "out").glob("*.parquet"))


def test_a_foreign_file_under_a_parts_name_is_refused(tables, tmp_path):
    scale.predict(tables, BAYES, out=tmp_path / "out", key="id")
    pq.write_table(pa.table({"a": [1]}), tmp_path / "out" / "part-000000-00000.parquet")
    with pytest.raises(MCBNError, match="not a result of this job"):
        scale.predict(tables, BAYES, out=tmp_path / "out", key="id", resume=True)


@pytest.mark.parametrize("name", ["file", "row", "mean", "std"])
def test_keys_called_like_results_are_refused(tables, tmp_path, name):
    with pytest.raises(MCBNError, match=f"'{name}' is called like a result"):
        scale.predict(tables, BAYES, out=tmp_path / "out", key=["id", name])


def test_a_resumed_job_predicts_an_input_that_changed_at_the_same_size_again(tmp_path):
    write_tables(tmp_path / "in", suffix=".csv")
    scale.predict(tmp_path / "in", BAYES, out=tmp_path / "out", key="id")
    path = tmp_path / "in" / "table1.csv"
    header, *content = path.read_text().splitlines(keepends=True)
    path.write_text(header + "".join(content[::-1]))
    summary = scale.predict(tmp_path / "in", BAYES, out=tmp_path / "out", key="id", resume=True)
    assert (summary.resumed, summary.parts) == (3, 4)
    scale.predict(tmp_path / "in", BAYES, out=tmp_path / "fresh", key="id")
    assert read_results(tmp_path / "out").equals(read_results(tmp_path / "fresh"))


def test_a_job_is_not_gone_on_with_after_another_calibration(tables, tmp_path):
    x, y = torch.randn(60, 3), torch.randn(60)
    first, second = (regressor(0).calibrate((x, size * y)) for size in (1.0, 9.0))
    scale.predict(tables, first, out=tmp_path / "out", **OPTIONS)
    scale.predict(tables, first, out=tmp_path / "out", resume=True, **OPTIONS)
    with pytest.raises(MCBNError, match="belongs to another job: its network and posterior"):
        scale.predict(tables, second, out=tmp_path / "out", resume=True, **OPTIONS)


def test_a_part_that_an_older_version_wrote_counts_as_finished(tmp_path):
    write_tables(tmp_path / "in", suffix=".csv")
    first = scale.predict(tmp_path / "in", BAYES, out=tmp_path / "out", key="id")
    for path in (tmp_path / "out").glob("*.parquet"):
        table = pq.read_table(path)
        mark = json.loads(table.schema.metadata[scale.MARK])
        timings = {"batches": 1, "seconds": 0.5, "predicting": 0.25, "waited": 0.0}
        mark["outcome"] = json.dumps(json.loads(mark["outcome"]) | timings)
        pq.write_table(table.replace_schema_metadata({scale.MARK: json.dumps(mark)}), path)
    again = scale.predict(tmp_path / "in", BAYES, out=tmp_path / "out", key="id", resume=True)
    assert (again.resumed, again.rows) == (4, first.rows)


def test_links_keep_the_kind_that_their_names_say(tables, tmp_path):
    (tmp_path / "blobs").mkdir()
    for number, path in enumerate(sorted(tables.iterdir())):
        path.rename(tmp_path / "blobs" / str(number))  # as caches of data sets have them
        path.symlink_to(tmp_path / "blobs" / str(number))
    summary = scale.predict(tables, BAYES, out=tmp_path / "out", **OPTIONS)
    assert (summary.rows, summary.bad_files) == (185, ())


def test_names_that_are_not_utf_8_end_no_job(tables, tmp_path):
    (tables / "table1.parquet").rename(tables / os.fsdecode(b"caf\xe9.parquet"))
    spoil(tables / "table2.parquet")
    summary = scale.predict(tables, BAYES, out=tmp_path / "out", **OPTIONS)
    assert summary.rows == 184
    assert "caf\\xe9.parquet" in {file for file, _ in by_row(read_results(tmp_path / "out"))}


def test_one_run_at_a_time_works_in_a_folder(tables, tmp_path):
    def second(_):
        with pytest.raises(MCBNError, match="another run works in"):
            scale.predict(tables, BAYES, out=tmp_path / "out", resume=True, **OPTIONS)

    summary = scale.predict(tables, BAYES, out=tmp_path / "out", on_part=second, **OPTIONS)
    assert len(by_row(read_results(tmp_path / "out"))) == summary.rows


def test_an_old_job_is_replaced_where_that_is_asked_for(tables, tmp_path):
    out = tmp_path / "out"
    scale.predict(tables, BAYES, out=out, **OPTIONS)
    (out / "mine.txt").write_text("keep")
    with pytest.raises(MCBNError, match="--overwrite"):
        scale.predict(tables, regressor(1), out=out, key="id")
    scale.predict(tables, regressor(1), out=out, key="id", overwrite=True)
    scale.predict(tables, regressor(1), out=tmp_path / "fresh", key="id")
    assert read_results(out).equals(read_results(tmp_path / "fresh"))
    assert {path.name for path in out.iterdir()} == {"mine.txt", *(p.name for p in (tmp_path / "fresh").iterdir())}


def test_results_do_not_go_among_the_inputs(tables):
    with pytest.raises(MCBNError, match="lies among the inputs"):
        scale.predict(tables, BAYES, out=tables / "out", key="id")


def test_rows_without_a_finite_result_are_listed(tables, tmp_path):
    pq.write_table(pa.table({"id": ["a"], **{name: [3e38] for name in COLUMNS}}), tables / "huge.parquet")
    summary = scale.predict(tables, BAYES, out=tmp_path / "out", **OPTIONS)
    assert summary.rows == 185
    assert "no finite" in summary.bad_files[0]["reason"]
