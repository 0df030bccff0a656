"""Tables and arrays read in blocks, models by name, results written in blocks."""

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch

from mcbn import MCBNError
from mcbn.tables import Layout, open_examples, results, specs
from mcbn.tables.formats import CsvTable, StoredArray

VALUES = [[1.5, -2.0, 3e-7], [4.0, 5.25, 6.0]]


@pytest.mark.parametrize(
    "text",
    [
        "a,b,c\n1.5,-2,3e-7\n4,5.25,6\n",
        "a;b;c\r\n1.5;-2;3e-7\r\n4;5.25;6\r\n",
        "a\tb\tc\n1.5\t-2\t3e-7\n\n4\t5.25\t6",  # a blank line, no line end at the end
        '\ufeff"a","b", c \n"1.5", -2 ,3e-7\n4,5.25,6\n',
    ],
)
def test_csv_of_any_common_make_holds_the_same_table(text: str, tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_bytes(text.encode())
    table = CsvTable(tmp_path / "t.csv")
    assert table.names == ("a", "b", "c")
    assert np.concatenate([block.numbers for block in table.blocks([0, 1, 2], 1)]).tolist() == VALUES
    reordered = [block.numbers for block in table.blocks([2, 0], 9)]
    assert np.concatenate(reordered).tolist() == [[row[2], row[0]] for row in VALUES]


def test_csv_without_header_begins_with_its_first_row(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("1.5,-2,3e-7\n4,5.25,6\n")
    table = CsvTable(tmp_path / "t.csv")
    assert table.names is None
    assert np.concatenate([block.numbers for block in table.blocks([0, 1, 2], 5)]).tolist() == VALUES


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "empty"),
        (b"a,a\n1,2\n", "several columns named 'a'"),
        (b"a,b\n1,\xff\n", "UTF-8"),
        (b"\xff\xfe\x00", "UTF-8"),
        (b"1,2\n3,x\n", "row 2 (line 2), column 2: 'x'"),
        (b"1,2\n3,inf\n", "row 2, column 2 is inf"),
    ],
)
def test_csv_that_is_no_table_is_refused(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_bytes(content)
    with pytest.raises(MCBNError) as caught:
        list(CsvTable(tmp_path / "t.csv").blocks([0, 1], 1))  # rows are counted over blocks
    assert message in str(caught.value)


@pytest.mark.parametrize("dtype", ["f4", ">f8", "f2", "u1", "i8", "?"])
@pytest.mark.parametrize("shape", [(11,), (11, 3), (11, 2, 3, 2)])
@pytest.mark.parametrize("order", ["C", "F"])
def test_arrays_in_blocks_equal_numpy(dtype: str, shape: tuple[int, ...], order: str, tmp_path: Path) -> None:
    array = np.asarray(np.random.default_rng(0).integers(0, 9, shape), dtype=dtype, order=order)  # type: ignore[call-overload]
    np.save(tmp_path / "a.npy", array)
    np.savez_compressed(tmp_path / "a.npz", x=array)
    for stored in (StoredArray(tmp_path / "a.npy"), StoredArray(tmp_path / "a.npz", "x")):
        blocks = list(stored.arrays(4))
        assert [len(block) for block in blocks] == [4, 4, 3]
        assert (np.concatenate(blocks) == array).all()
        assert torch.as_tensor(blocks[0]).shape == (4, *shape[1:])  # in the machine's own byte order


def test_a_truncated_array_is_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.zeros((100, 3)))
    (tmp_path / "a.npy").write_bytes((tmp_path / "a.npy").read_bytes()[:-10])
    with pytest.raises(MCBNError, match="damaged"):
        list(StoredArray(tmp_path / "a.npy").arrays(30))


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.array([{}], dtype=object), "not an array of numbers"),
        (np.array(3.0), "single number"),
        (np.array([[0.0, 1], [np.nan, 1]]), r"row 2, column 1 is nan"),
        (np.array([[[0.0]], [[np.inf]]]), r"row 2 is not finite at \[0, 0\]"),
    ],
)
def test_arrays_without_usable_numbers_are_refused(array: np.ndarray, message: str, tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", array, allow_pickle=True)
    with pytest.raises(MCBNError, match=message):
        list(StoredArray(tmp_path / "a.npy").arrays(30))


def test_inputs_and_targets_of_different_lengths_are_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.zeros((4, 2)), y=np.zeros(5))
    with pytest.raises(MCBNError, match=r"4 examples.* 5"):
        open_examples(str(tmp_path / "a.npz"))


def test_the_only_other_array_of_an_npz_holds_the_inputs(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", images=np.ones((4, 2)), label=np.arange(4))
    ((x, y, _),) = open_examples(str(tmp_path / "a.npz"), need_targets=True).blocks()
    assert x.shape == (4, 2)
    assert y is not None
    assert y.tolist() == [0, 1, 2, 3]


def test_a_layout_survives_text() -> None:
    for layout in (Layout(), Layout(["a", "b"], 2, "c")):
        assert Layout(**json.loads(json.dumps(asdict(layout)))) == layout


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("suffix", [".csv", ".npz"])
def test_results_in_blocks_read_back_exactly(dtype: type, suffix: str, tmp_path: Path) -> None:
    values = np.random.default_rng(0).normal(size=(10, 2)).astype(dtype)
    blocks = ({"mean": part, "label": np.arange(len(part))} for part in (values[:7], values[7:]))
    results.WRITERS[suffix](tmp_path / f"r{suffix}", blocks, None)
    if suffix == ".npz":
        with np.load(tmp_path / "r.npz") as stored:
            assert (stored["mean"] == values).all()
            assert stored["mean"].dtype == dtype
    else:
        header, *rows = (tmp_path / "r.csv").read_text().splitlines()
        assert header == "mean_0,mean_1,label"
        found = np.array([row.split(",")[:2] for row in rows], dtype=dtype)
        assert (found == values).all()


def test_a_factory_is_called_with_the_same_random_numbers_each_time() -> None:
    state = torch.get_rng_state()
    made = [specs.make("random:random", "--model") for _ in range(2)]
    assert made[0] == made[1]
    assert torch.equal(torch.get_rng_state(), state)
