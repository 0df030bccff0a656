import dataclasses
import functools
import hashlib
import os
import socket
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from mcbn import data
from mcbn.data import regression
from mcbn.errors import MCBNError

ROWS = "1 2 3\n4 5 6\n\n"  # a published file in miniature, blank last line included


@pytest.fixture
def published(monkeypatch):
    """The folder of the published files, MCBN_DATA_DIR pointing at it."""
    beside = Path(__file__).resolve().parents[2] / "shared" / "data"
    folder = Path(os.environ.get("MCBN_DATA_DIR") or beside)
    if not (folder / "uci").is_dir():
        pytest.skip("published UCI files not found: set MCBN_DATA_DIR to the folder that holds uci/")
    monkeypatch.setenv("MCBN_DATA_DIR", str(folder))
    return folder / "uci"


@pytest.fixture
def tiny(monkeypatch):
    """`load("yacht")` expects the two rows of ROWS, from no folder and no cache of this machine."""
    sha256 = hashlib.sha256(ROWS.encode()).hexdigest()
    dataset = dataclasses.replace(data.describe("yacht"), n=2, q=2, sha256=sha256)
    monkeypatch.setattr(regression, "describe", lambda name: dataset)
    monkeypatch.delenv("MCBN_DATA_DIR", raising=False)
    monkeypatch.delenv("MCBN_CACHE_DIR", raising=False)
    return dataset


class RecordingHandler(SimpleHTTPRequestHandler):
    """Serve a folder and remember what was asked for."""

    def do_GET(self):
        self.server.requested.append(self.path)
        super().do_GET()

    def log_message(self, *args):
        pass


@pytest.fixture
def server(tmp_path, monkeypatch):
    """A web server on this machine in the place of GitHub; `.root` is what it serves."""
    root = tmp_path / "served"
    (root / "yacht" / "data").mkdir(parents=True)
    handler = functools.partial(RecordingHandler, directory=str(root))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as httpd:
        httpd.root, httpd.requested = root, []
        thread = threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        monkeypatch.setattr(regression, "BASE_URL", f"http://127.0.0.1:{httpd.server_port}")
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        yield httpd
        httpd.shutdown()
        thread.join()


def publish(server, text):
    (server.root / "yacht" / "data" / "data.txt").write_bytes(text.encode())


def assert_is_tiny(result):
    assert torch.equal(result.x, torch.tensor([[1.0, 2.0], [4.0, 5.0]], dtype=torch.float64))
    assert torch.equal(result.y, torch.tensor([3.0, 6.0], dtype=torch.float64))


def assert_partition(parts, whole):
    assert torch.equal(torch.cat(list(parts)).sort().values, whole.sort().values)


# --- catalogue ---------------------------------------------------------------------------------------------


def test_names_are_the_papers_eight_in_order():
    assert data.NAMES == ("boston", "concrete", "energy", "kin8nm", "power", "protein", "wine", "yacht")


def test_only_protein_has_100_hidden_units():
    assert {name: data.describe(name).hidden_units for name in data.NAMES} == {
        name: 100 if name == "protein" else 50 for name in data.NAMES
    }


@pytest.mark.parametrize("call", [data.load, data.describe])
@pytest.mark.parametrize("name", ["Boston", "", None, ["boston"]])
def test_unknown_name_lists_the_names(call, name):
    with pytest.raises(MCBNError, match=r"choose one of boston, concrete, .*yacht"):
        call(name)


def test_description_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        data.describe("boston").n = 1


# --- embedded data -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["boston", "concrete"])
def test_embedded_file_has_the_recorded_sha256(name):
    folder = resources.files("mcbn.data") / "embedded"
    digest = hashlib.sha256((folder / f"{name}.csv").read_bytes()).hexdigest()
    section = (folder / "PROVENANCE.md").read_text().split(f"## {name}.csv")[1].split("##")[0]
    assert f"ours: `{digest}`" in section


@pytest.mark.parametrize("name", ["boston", "concrete"])
def test_embedded_needs_neither_folder_nor_network(name, monkeypatch, tmp_path):
    monkeypatch.setenv("MCBN_DATA_DIR", str(tmp_path))
    monkeypatch.setattr(regression, "_download", None)
    dataset, (x, y) = data.describe(name), data.load(name)
    assert x.shape == (dataset.n, dataset.q)
    assert y.shape == (dataset.n,)
    assert x.dtype == y.dtype == torch.float64


@pytest.mark.parametrize("name", ["boston", "concrete"])
def test_embedded_equals_published_file_value_for_value(name, published):
    dataset = data.describe(name)
    path = published / dataset.file
    assert hashlib.sha256(path.read_bytes()).hexdigest() == dataset.sha256
    x, y = data.load(name)
    assert np.array_equal(np.column_stack([x.numpy(), y.numpy()]), np.loadtxt(path))


def test_damaged_package_data_is_caught_by_its_shape(monkeypatch, tmp_path):
    (tmp_path / "boston.csv").write_text("a,b\n1,2\n")
    monkeypatch.setattr(regression, "_EMBEDDED", tmp_path)
    with pytest.raises(MCBNError, match=r"shape \(506, 14\), the file has \(1, 2\)"):
        data.load("boston")


# --- local folder ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", data.NAMES)
def test_all_eight_load_from_the_published_files(name, published, monkeypatch):
    monkeypatch.setattr(regression, "_download", None)
    dataset, (x, y) = data.describe(name), data.load(name)
    assert x.shape == (dataset.n, dataset.q)
    assert y.shape == (dataset.n,)
    assert torch.isfinite(x).all()
    assert torch.isfinite(y).all()


@pytest.mark.parametrize("folder", ["", "uci"])
def test_local_file_is_found_in_either_layout(folder, tiny, tmp_path, monkeypatch):
    (tmp_path / "uci").mkdir()
    (tmp_path / folder / tiny.file).write_bytes(ROWS.encode())
    monkeypatch.setenv("MCBN_DATA_DIR", str(tmp_path))
    assert_is_tiny(data.load("yacht"))


def test_truncated_local_file_is_named_with_both_hashes(tiny, tmp_path, monkeypatch):
    cut = ROWS[:-3].encode()
    (tmp_path / tiny.file).write_bytes(cut)
    monkeypatch.setenv("MCBN_DATA_DIR", str(tmp_path))
    with pytest.raises(MCBNError) as caught:
        data.load("yacht")
    for words in (str(tmp_path / tiny.file), tiny.sha256, hashlib.sha256(cut).hexdigest()):
        assert words in str(caught.value)


# --- download ----------------------------------------------------------------------------------------------


def test_download_is_cached_and_made_once(tiny, server, tmp_path):
    publish(server, ROWS)
    for _ in range(2):
        assert_is_tiny(data.load("yacht", cache_dir=tmp_path / "cache"))
    assert server.requested == ["/yacht/data/data.txt"]
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [tiny.file]


def test_cache_folder_can_come_from_the_environment(tiny, server, tmp_path, monkeypatch):
    publish(server, ROWS)
    monkeypatch.setenv("MCBN_CACHE_DIR", str(tmp_path / "elsewhere"))
    assert_is_tiny(data.load("yacht"))
    assert (tmp_path / "elsewhere" / tiny.file).is_file()


def test_corrupt_cache_is_downloaded_anew(tiny, server, tmp_path):
    publish(server, ROWS)
    (tmp_path / tiny.file).write_bytes(b"1 2")
    assert_is_tiny(data.load("yacht", cache_dir=tmp_path))


def test_wrong_download_is_refused_and_leaves_nothing(tiny, server, tmp_path):
    publish(server, "7 8 9\n7 8 9\n")
    with pytest.raises(MCBNError) as caught:
        data.load("yacht", cache_dir=tmp_path / "cache")
    digest = hashlib.sha256(b"7 8 9\n7 8 9\n").hexdigest()
    for words in (regression.BASE_URL, tiny.sha256, digest, "set MCBN_DATA_DIR"):
        assert words in str(caught.value)
    assert list((tmp_path / "cache").iterdir()) == []


def test_missing_page_says_what_was_tried(tiny, server, tmp_path):
    with pytest.raises(MCBNError, match=r"MCBN_DATA_DIR \(not set\).*yacht/data/data.txt.*404"):
        data.load("yacht", cache_dir=tmp_path / "cache")


def test_unreachable_host_says_what_to_do(tiny, tmp_path, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as closed:  # a port that answers no longer
        monkeypatch.setattr(regression, "BASE_URL", f"http://127.0.0.1:{closed.getsockname()[1]}")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("MCBN_DATA_DIR", str(tmp_path))
    with pytest.raises(MCBNError) as caught:
        data.load("yacht", cache_dir=tmp_path / "cache")
    for words in (str(tmp_path), regression.BASE_URL, tiny.sha256, "set MCBN_DATA_DIR"):
        assert words in str(caught.value)


# --- splits and folds --------------------------------------------------------------------------------------


def naive_split(n, number):
    np.random.seed(number)
    idx = np.arange(n)
    np.random.shuffle(idx)
    n_test = round(0.2 * n)
    return idx[n_test:], idx[:n_test]


def naive_folds(train):
    np.random.seed(1)
    train = train.tolist()
    np.random.shuffle(train)
    for validation in np.array_split(train, 5):
        rest = np.setdiff1d(train, validation)
        np.random.shuffle(rest)
        yield rest, validation


@pytest.mark.parametrize("number", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("n", [data.describe(name).n for name in data.NAMES])
def test_split_and_folds_equal_the_legacy_generator(n, number, restore_numpy):
    train, test = naive_split(n, number)
    ours = data.split(n, number)
    assert np.array_equal(ours.train.numpy(), train)
    assert np.array_equal(ours.test.numpy(), test)
    for ours_fold, fold in zip(data.folds(ours.train), naive_folds(train), strict=True):
        assert np.array_equal(ours_fold.train.numpy(), fold[0])
        assert np.array_equal(ours_fold.validation.numpy(), fold[1])


@pytest.fixture
def restore_numpy():
    state = np.random.get_state()
    yield
    np.random.set_state(state)


def test_global_generators_are_left_alone():
    numpy_before, torch_before = np.random.get_state()[1].copy(), torch.get_rng_state()
    position = np.random.get_state()[2]
    data.folds(data.split(100, 1).train)
    data.toy(10)
    assert np.array_equal(np.random.get_state()[1], numpy_before)
    assert np.random.get_state()[2] == position
    assert torch.equal(torch.get_rng_state(), torch_before)


@settings(deadline=None)
@given(n=st.integers(3, 400), number=st.integers(1, 2**32 - 1))
def test_split_is_a_partition_with_a_fifth_for_test(n, number):
    rows = data.split(n, number)
    assert_partition(rows, torch.arange(n))
    assert abs(len(rows.test) - n / 5) < 0.5
    assert rows.train.dtype == rows.test.dtype == torch.int64


@settings(deadline=None)
@given(train=st.lists(st.integers(0, 10**6), min_size=7, max_size=60, unique=True), k=st.integers(2, 7))
def test_folds_partition_the_training_rows(train, k):
    train = torch.tensor(train)
    before = train.clone()
    result = data.folds(train, k)
    assert len(result) == k
    assert_partition([fold.validation for fold in result], train)
    for fold in result:
        assert_partition(fold, train)
    sizes = [len(fold.validation) for fold in result]
    assert max(sizes) - min(sizes) <= 1
    assert torch.equal(train, before)


def test_other_number_other_split():
    assert not torch.equal(data.split(100, 1).test, data.split(100, 2).test)


def test_numpy_integers_count_as_integers():
    assert torch.equal(data.split(np.int64(100), np.int64(3)).test, data.split(100, 3).test)


@pytest.mark.parametrize("number", [0, -1, True, 1.0, "1", None, 2**32])
def test_bad_split_number_is_refused(number):
    with pytest.raises(MCBNError, match="number must be a whole number, at least 1, at most"):
        data.split(100, number)


@pytest.mark.parametrize("n", [2, 100.0, True])
def test_bad_row_count_is_refused(n):
    with pytest.raises(MCBNError, match="n must be a whole number, at least 3"):
        data.split(n, 1)


@pytest.mark.parametrize("k", [1, 11, 2.0, True])
def test_bad_fold_count_is_refused(k):
    with pytest.raises(MCBNError, match="k must be a whole number, at least 2, at most 10"):
        data.folds(torch.arange(10), k)


@pytest.mark.parametrize("train", [torch.zeros(10), torch.zeros(2, 5, dtype=torch.int64)])
def test_folds_want_a_vector_of_indices(train):
    with pytest.raises(MCBNError, match="1-D int64 tensor"):
        data.folds(train)


# --- toy set -----------------------------------------------------------------------------------------------


def test_toy_follows_its_equation_and_keeps_the_gap_empty():
    x, y = data.toy(5000, seed=1)
    assert x.shape == (5000, 1)
    assert y.shape == (5000,)
    assert x.dtype == y.dtype == torch.float64
    x = x[:, 0]
    assert ((x >= -5) & (x <= 5) & ~((x > 0.5) & (x < 2.5))).all()
    noise = y - x * torch.sin(x)
    assert abs(noise.mean()) < 4 * 0.1 / 5000**0.5
    assert abs(noise.std() - 0.1) < 4 * 0.1 / (2 * 5000) ** 0.5
    share_above_gap = (x >= 2.5).double().mean()
    assert abs(share_above_gap - 2.5 / 8) < 4 * (0.3125 * 0.6875 / 5000) ** 0.5


def test_toy_same_seed_same_points_other_seed_others():
    assert torch.equal(data.toy(20, seed=3).x, data.toy(20, seed=3).x)
    assert torch.equal(data.toy(20, seed=3).y, data.toy(20, seed=3).y)
    assert not torch.equal(data.toy(20, seed=3).x, data.toy(20, seed=4).x)


@pytest.mark.parametrize("n", [0, -1, 2.0, True])
def test_toy_refuses_a_bad_count(n):
    with pytest.raises(MCBNError, match="n must be a whole number, at least 1"):
        data.toy(n)
