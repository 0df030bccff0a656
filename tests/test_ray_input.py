"""What is refused before any cluster is at work; none of this needs Ray to be installed."""

import importlib
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import mcbn
import mcbn.ray
from inputs import regressor, write_tables
from mcbn import MCBNError
from mcbn.cli import app
from workplace import furnish

BAYES = regressor()
MODULE = "nets_of_the_cluster"


@pytest.fixture
def without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)


@pytest.fixture
def stranger() -> Iterator[str]:
    """A port where something listens that is not Ray, and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def test_without_ray_the_extra_is_named(without_ray, tmp_path):
    write_tables(tmp_path / "in", (3,))
    with pytest.raises(MCBNError, match=r"needs Ray: pip install 'mcbn\[ray\]'"):
        mcbn.ray.predict(tmp_path / "in", BAYES, out=tmp_path / "out")
    with pytest.raises(MCBNError, match=r"pip install 'mcbn\[ray\]'"):
        mcbn.ray.fit(mcbn.MCBN(BAYES.model, "regression"), torch.randn(50, 3), n_samples=4, batch_size=8)


@pytest.fixture
def has_ray() -> None:
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'mcbn[ray]'")


@pytest.mark.usefixtures("has_ray")
def test_nobody_at_the_address(tmp_path):
    write_tables(tmp_path / "in", (3,))
    with socket.create_server(("127.0.0.1", 0)) as server:
        free = server.getsockname()[1]
    begun = time.monotonic()
    with pytest.raises(MCBNError, match=rf"no Ray cluster answers at 127\.0\.0\.1:{free} within 10 seconds"):
        mcbn.ray.predict(tmp_path / "in", BAYES, out=tmp_path / "out", address=f"127.0.0.1:{free}")
    assert time.monotonic() - begun < 12
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("has_ray")
def test_a_stranger_at_the_address_costs_the_time_limit_and_no_more(stranger, monkeypatch, tmp_path):
    monkeypatch.setattr(mcbn.ray, "CONNECT_SECONDS", 0.5)
    write_tables(tmp_path / "in", (3,))
    begun = time.monotonic()
    with pytest.raises(MCBNError, match="no Ray cluster answers"):
        mcbn.ray.predict(tmp_path / "in", BAYES, out=tmp_path / "out", address=f"ray://{stranger}")
    assert time.monotonic() - begun < 5


@pytest.mark.usefixtures("has_ray")
def test_a_web_server_is_not_a_cluster():
    def answer(server: socket.socket) -> None:
        connection, _ = server.accept()
        connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        connection.close()

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=answer, args=(server,))
        thread.start()
        with (
            pytest.raises(MCBNError, match="not Ray"),
            mcbn.ray.connected(f"127.0.0.1:{server.getsockname()[1]}"),
        ):
            pass
        thread.join()


@pytest.mark.usefixtures("has_ray")
@pytest.mark.parametrize("address", ["nowhere", "host:port", "http://"])
def test_what_is_no_address_is_refused(address, tmp_path):
    write_tables(tmp_path / "in", (3,))
    with pytest.raises(MCBNError, match="reads host:port"):
        mcbn.ray.predict(tmp_path / "in", BAYES, out=tmp_path / "out", address=address)


@pytest.mark.usefixtures("has_ray")
def test_inputs_and_folder_are_looked_at_before_any_cluster(tmp_path, monkeypatch):
    def never(*_: object) -> None:
        raise AssertionError("connected")

    monkeypatch.setattr(mcbn.ray, "connected", never)
    write_tables(tmp_path / "in", (3,))
    with pytest.raises(MCBNError, match=r"lacks the input column\(s\) 'salary'"):
        mcbn.ray.predict(tmp_path / "in", BAYES, out=tmp_path / "out", key="id", columns=["age", "salary"])
    with pytest.raises(MCBNError, match="does not take the 2 input columns"):
        mcbn.ray.predict(tmp_path / "in", BAYES, out=tmp_path / "out", key="id", columns=["age", "weight"])
    with pytest.raises(MCBNError, match="is not empty"):
        mcbn.ray.predict(tmp_path / "in", BAYES, out=tmp_path / "in", key="id")


def test_an_unfitted_network_and_bad_numbers_are_refused(tmp_path):
    with pytest.raises(MCBNError, match="not fitted"):
        mcbn.ray.predict(tmp_path, mcbn.MCBN(BAYES.model, "regression"), out=tmp_path / "out")
    for option in ("workers", "threads"):
        with pytest.raises(MCBNError, match=f"{option} must be a whole number"):
            mcbn.ray.predict(tmp_path, BAYES, out=tmp_path / "out", **{option: 0})


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    furnish(tmp_path, MODULE)
    monkeypatch.chdir(tmp_path)
    data = "--data train.csv --target price --task regression --batch-size 16 --samples 20 --out net.mcbn"
    result = CliRunner().invoke(app, f"fit --model {MODULE}:make --weights make.pt {data}".split())
    assert result.exit_code == 0
    return tmp_path


def refused(*arguments: str) -> str:
    fixed = ("predict", "--posterior", "net.mcbn", "--weights", "make.pt")
    result = CliRunner().invoke(app, [*fixed, *arguments])
    assert result.exit_code == 2
    return result.stderr


def test_the_command_says_in_one_line_what_is_wrong(folder):
    model = ("--model", f"{MODULE}:make", "--data", "test.csv", "--out", "there")
    (folder / "there").mkdir()
    (folder / "there" / "old.parquet").write_text("")
    assert "--engine must be one of ['local', 'ray']" in refused(*model, "--engine", "spark")
    assert "must be a folder" in refused(*model[:-1], "x.parquet", "--resume")
    assert "no job.json" in refused(*model, "--resume")
    (folder / "in").mkdir()
    (folder / "in" / "x.csv").write_text("age,weight\n1,2\n")
    where = ("--data", "in", "--out", "fresh")
    assert "lacks the input column(s) 'height', named by columns= or at the fit; it has" in refused(
        "--model", f"{MODULE}:make", *where
    )
    other = ("--posterior", "net.mcbn", "--model", f"{MODULE}:classes", "--weights", "classes.pt", *where)
    result = CliRunner().invoke(app, ["predict", *other])
    assert result.exit_code == 2
    assert "was fitted on another network" in result.stderr


def test_the_commands_name_the_extra_without_ray(folder, without_ray):
    where = ("--data", "test.csv", "--out", "fresh", "--engine", "ray")
    assert "pip install 'mcbn[ray]'" in refused("--model", f"{MODULE}:make", *where)
    assert not (folder / "fresh").exists()


def test_a_folder_is_predicted_as_its_files_one_by_one(folder):
    import pyarrow.parquet as pq

    from mcbn.scale import read_results

    (folder / "in").mkdir()
    for name in ("val", "test"):
        (folder / "in" / f"{name}.csv").write_bytes((folder / f"{name}.csv").read_bytes())
    fixed = ("predict", "--posterior", "net.mcbn", "--model", f"{MODULE}:make", "--weights", "make.pt")
    assert CliRunner().invoke(app, [*fixed, "--data", "in", "--out", "many"]).exit_code == 0
    many = read_results("many")
    for name in ("val", "test"):
        assert CliRunner().invoke(app, [*fixed, "--data", f"{name}.csv", "--out", f"{name}.parquet"]).exit_code == 0
        alone = pq.read_table(f"{name}.parquet")
        own = many.filter(importlib.import_module("pyarrow.compute").equal(many["file"].cast("string"), f"{name}.csv"))
        assert own.select(alone.column_names).equals(alone)
