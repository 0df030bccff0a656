"""Prediction and fit on a real cluster of several nodes: the results of one process, whatever is killed."""

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset
from typer.testing import CliRunner

import mcbn
import mcbn.ray
from inputs import by_row, classifier, darker, regressor, rows, spoil, write_images, write_tables
from mcbn import MCBNError, scale
from mcbn.cli import app
from mcbn.scale import read_results
from mcbn_benchmarks import ray as benchmark
from test_batching_shares import T, equal, small
from workplace import command, environment, furnish

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'mcbn[ray]'")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings(r"ignore::DeprecationWarning:ray\.data\.context"),  # Ray's own defaults
]
MEMORY = 100 * 2**20
NAMES = (b"ray::MapWorker",)  # of the actors' processes
BAYES = regressor(n_samples=200)
OPTIONS: dict[str, Any] = {"key": "id", "batch_size": 512, "part_rows": 1024}
COUNTS = (9000, 5000, 1, 4000)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A head and a second node, one CPU each."""
    from ray.cluster_utils import Cluster

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    head = {"num_cpus": 1, "object_store_memory": MEMORY, "include_dashboard": False}
    made = Cluster(initialize_head=True, head_node_args=head)
    try:
        made.add_node(num_cpus=1, object_store_memory=MEMORY)
        ray.init(address=made.address, log_to_driver=False, logging_level="error")
        yield made
    finally:
        ray.shutdown()
        made.shutdown()
        del os.environ["RAY_USAGE_STATS_ENABLED"]


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tables")
    write_tables(folder, COUNTS)
    return folder


@pytest.fixture(scope="module")
def undisturbed(tables: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[Any, Any]:
    """What one process gives, by row."""
    out = tmp_path_factory.mktemp("alone") / "out"
    scale.predict(tables, BAYES, out=out, **OPTIONS)
    return by_row(read_results(out))


def processes(cluster: Any, names: tuple[bytes, ...] = NAMES) -> list[int]:
    """List the processes of the cluster that work on parts, or that have other names."""
    nodes = {p.process.pid for node in cluster.list_all_nodes() for p in node.all_processes.get("raylet", [])}
    found = []
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and (folder / "cmdline").read_bytes().startswith(names):
                parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
                found += [int(folder.name)] if parent in nodes else []
        except OSError:
            continue
    return sorted(found)


def test_workers_give_the_bits_of_one_process(cluster, tables, undisturbed, tmp_path):
    summary = mcbn.ray.predict(tables, BAYES, out=tmp_path / "out", workers=2, **OPTIONS)
    assert (summary.rows, summary.bad_files) == (sum(COUNTS), ())
    assert by_row(read_results(tmp_path / "out")) == undisturbed


def test_killed_workers_and_a_lost_node_change_nothing(cluster, tables, undisturbed, tmp_path):
    seen: list[str] = []
    killed: list[int] = []
    lost = next(node for node in cluster.list_all_nodes() if node is not cluster.head_node)

    def disturb(outcome: Any) -> None:
        seen.append(outcome.part)
        if len(seen) == 2:
            killed.extend(processes(cluster)[:1])
            os.kill(killed[0], signal.SIGKILL)
        if len(seen) == 5:
            cluster.remove_node(lost, allow_graceful=False)

    try:
        summary = mcbn.ray.predict(tables, BAYES, out=tmp_path / "out", workers=2, on_part=disturb, **OPTIONS)
    finally:
        cluster.add_node(num_cpus=1, object_store_memory=MEMORY)
    assert killed
    assert len(seen) == len(set(seen)) == summary.parts
    assert by_row(read_results(tmp_path / "out")) == undisturbed


MODULE = "nets_of_the_driver"


def test_a_killed_driver_goes_on_with_every_row_once(cluster, tmp_path, monkeypatch):
    """The command, one of its input files broken, killed once some parts are there; then again with --resume."""
    furnish(tmp_path, MODULE)
    monkeypatch.chdir(tmp_path)
    model = ["--model", f"{MODULE}:make", "--weights", "make.pt"]
    data = [
        "--data",
        "train.csv",
        "--target",
        "price",
        "--task",
        "regression",
        "--batch-size",
        "16",
        "--samples",
        "400",
        "--out",
        "net.mcbn",
    ]
    assert CliRunner().invoke(app, ["fit", *model, *data]).exit_code == 0
    write_tables(tmp_path / "in", (8192 + 900,) * 6)
    spoil(tmp_path / "in" / "table4.parquet")
    arguments = ["predict", "--posterior", "net.mcbn", *model, "--data", "in", "--key", "id"]
    driver = [*arguments, "--engine", "ray", "--address", cluster.address, "--workers", "2", "--out", "out"]
    process = subprocess.Popen(command(*driver), env=environment(), cwd=tmp_path)
    try:
        wait_for(lambda: process.poll() is not None or list((tmp_path / "out").glob("*.parquet")))
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()
    done = len(list((tmp_path / "out").glob("*.parquet")))
    assert 0 < done < 5
    result = CliRunner().invoke(app, [*driver, "--resume"])
    assert result.exit_code == 1
    assert "out: 45460 predictions in 5 files" in result.stdout
    assert "1 inputs left out, listed in out/bad_files.jsonl" in result.stderr
    bad = [json.loads(line)["file"] for line in Path("out/bad_files.jsonl").read_text().splitlines()]
    assert bad == ["table4.parquet"]
    assert CliRunner().invoke(app, [*arguments, "--out", "local"]).exit_code == 1
    assert by_row(read_results("out")) == by_row(read_results("local"))


def wait_for(condition: Any, seconds: float = 100) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_corrupt_file_among_a_thousand(cluster, tmp_path):
    write_tables(tmp_path / "in", (3,) * 1000, suffix=".csv")
    (tmp_path / "in" / "table500.csv").write_text("id,age,height,weight\na,1,2\n")
    summary = mcbn.ray.predict(tmp_path / "in", BAYES, out=tmp_path / "out", key="id", workers=2)
    assert (summary.rows, summary.parts) == (999 * 3, 999)
    bad = [json.loads(line) for line in (tmp_path / "out" / "bad_files.jsonl").read_text().splitlines()]
    assert [entry["file"] for entry in bad] == ["table500.csv"]
    found = by_row(read_results(tmp_path / "out"))
    assert {file for file, _ in found} == {f"table{i}.csv" for i in range(1000) if i != 500}
    x, ids = rows(3, 999)
    mean = BAYES.predict(x).mean[:, 0].tolist()
    assert [found["table999.csv", i][:2] for i in range(3)] == list(zip(ids, mean, strict=True))


def test_each_actor_takes_a_gpu_where_the_cluster_has_some(cluster, tables, undisturbed, tmp_path):
    """The GPU is a promise of the node alone: the actor finds no CUDA there and computes on its CPU."""
    node = cluster.add_node(num_cpus=1, num_gpus=1, object_store_memory=MEMORY)
    free: list[float] = []
    try:
        wait_for(lambda: ray.cluster_resources().get("GPU") == 1)
        on_part = lambda _: free.append(ray.available_resources().get("GPU", 0.0))  # noqa: E731
        mcbn.ray.predict(tables, BAYES, out=tmp_path / "out", on_part=on_part, **OPTIONS)
    finally:
        cluster.remove_node(node)
    wait_for(lambda: "GPU" not in ray.cluster_resources())
    assert 0.0 in free
    assert by_row(read_results(tmp_path / "out")) == undisturbed


def test_images_with_a_broken_one_among_them(cluster, tmp_path):
    write_images(tmp_path / "in")
    spoil(tmp_path / "in" / "class0" / "004.png")
    options: dict[str, Any] = {"batch_size": 5, "part_rows": 10, "transform": darker}
    summary = mcbn.ray.predict(tmp_path / "in", classifier(pooled=True), out=tmp_path / "out", **options)
    assert (summary.rows, [entry["file"] for entry in summary.bad_files]) == (22, ["class0/004.png"])
    scale.predict(tmp_path / "in", classifier(pooled=True), out=tmp_path / "alone", **options)
    assert read_results(tmp_path / "out").equals(read_results(tmp_path / "alone"))


def test_a_ray_data_set_keeps_its_keys(cluster, tmp_path):
    import ray.data

    x, ids = rows(300, 7)
    records = [{"id": i, "height": h, "age": a, "weight": w} for i, (a, h, w) in zip(ids, x.tolist(), strict=True)]
    data = ray.data.from_items(records, override_num_blocks=7)
    options: dict[str, Any] = {"key": "id", "batch_size": 64, "part_rows": 128}
    with pytest.raises(
        MCBNError, match=r"lacks the input column\(s\) 'salary', named by columns= or at the fit; it has"
    ):
        mcbn.ray.predict(data, BAYES, out=tmp_path / "out", columns=["age", "salary"], **options)
    with pytest.raises(MCBNError, match="key="):
        mcbn.ray.predict(data, BAYES, out=tmp_path / "out")
    mcbn.ray.predict(data, BAYES, out=tmp_path / "out", columns=["age", "height", "weight"], **options)
    table = read_results(tmp_path / "out")
    assert table["id"].to_pylist() == ids
    expected = torch.cat([BAYES.predict(x[i : i + 64]).mean for i in (0, 64)])[:, 0]
    assert torch.equal(torch.from_numpy(table["mean"].to_numpy()[:128].copy()), expected)
    assert not (tmp_path / "out" / ".input").exists()
    with pytest.raises(MCBNError, match="is not empty"):
        mcbn.ray.predict(data, BAYES, out=tmp_path / "out", **options)


def test_a_full_disk_stops_the_cluster_and_is_resumed(cluster, tables, undisturbed, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(out)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("this user may not mount a small file system")
    try:
        with pytest.raises(MCBNError, match=r"No space left on device.*go on with resume=True"):
            mcbn.ray.predict(tables, BAYES, out=out, workers=1, **OPTIONS)
        assert not list(out.glob(".*.tmp"))
        subprocess.run(["mount", "-o", "remount,size=8m", str(out)], check=True)
        summary = mcbn.ray.predict(tables, BAYES, out=out, workers=2, resume=True, **OPTIONS)
        assert summary.resumed > 0
        assert by_row(read_results(out)) == undisturbed
    finally:
        subprocess.run(["umount", "--lazy", str(out)], check=True)


def test_tasks_draw_the_posterior_of_one_process(cluster):
    network, x = small()
    whole = mcbn.MCBN(network, "regression").fit(x, n_samples=T, batch_size=16, seed=4)
    bayes = mcbn.MCBN(network, "regression")
    mcbn.ray.fit(bayes, DataLoader(TensorDataset(x), batch_size=16), n_samples=T, seed=4, workers=2)
    assert equal(bayes.posterior, whole.posterior)
    assert torch.equal(bayes.predict(x).mean, whole.predict(x).mean)
    gaussian = mcbn.ray.fit(bayes, x, n_samples=T, batch_size=16, seed=4, posterior="gaussian").posterior
    assert gaussian.family == "gaussian"
    centred = mcbn.ray.fit(bayes, x, n_samples=T, batch_size=16, seed=4, centre="running").posterior
    expected = whole.fit(x, n_samples=T, batch_size=16, seed=4, centre="running").posterior
    torch.testing.assert_close(centred.mean["1"], expected.mean["1"], rtol=1e-5, atol=1e-5)
    with pytest.raises(MCBNError, match=r"a share could not be drawn.*non-finite"):
        mcbn.ray.fit(bayes, torch.full_like(x, torch.nan), n_samples=T, batch_size=16)


def test_the_benchmark_counts_every_row(cluster):
    (found,) = benchmark.ray(rows=40_000, samples=4, workers=2, rounds=1)
    assert found["parts"] == 3  # five batches of 8,192 rows, two a part
    assert found["ratio_whole"] == found["whole_rows_per_second"] / found["plain_rows_per_second"]
    assert 0 < found["ratio_alone"] < found["ratio_whole"] < found["ratio_steady"]


@contextmanager
def one_killed(cluster: Any, name: bytes) -> Iterator[None]:
    """Kill the first process of that name that comes up meanwhile."""
    killed: list[int] = []

    def kill() -> None:
        wait_for(lambda: processes(cluster, (name,)))
        killed.extend(processes(cluster, (name,))[:1])
        os.kill(killed[0], signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    yield
    killer.join()
    assert killed


def test_a_fit_whose_worker_is_killed_loses_no_draw(cluster):
    network, x = small()
    whole = mcbn.MCBN(network, "regression").fit(x, n_samples=T, batch_size=16, seed=4)
    bayes = mcbn.MCBN(network, "regression")
    with one_killed(cluster, b"ray::_draw"):
        mcbn.ray.fit(bayes, x, n_samples=T, batch_size=16, seed=4, workers=2)
    assert equal(bayes.posterior, whole.posterior)
