"""Prediction, fit and the study on a real cluster of several nodes: the results of one process, whatever is killed."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset
from typer.testing import CliRunner

import kinds
import mcbn
from inputs import COLUMNS, by_row, classifier, regressor, rows, spoil, write_images, write_tables
from mcbn import MCBNError, Posterior, scale
from mcbn.cli import app
from mcbn.scale.folder import read_results
from workplace import environment

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'mcbn[ray]'")
import mcbn.ray  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning:ray"),
    pytest.mark.filterwarnings("ignore::FutureWarning:ray"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
MEMORY = 100 * 2**20
BAYES = regressor(n_samples=200)
OPTIONS: dict[str, Any] = {"key": "id", "batch_size": 512, "part_rows": 1024}
COUNTS = (9000, 5000, 1, 4000)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A head and a second node, one CPU each."""
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 1, "object_store_memory": MEMORY, "include_dashboard": False}
    made = Cluster(initialize_head=True, head_node_args=head)
    try:
        made.add_node(num_cpus=1, object_store_memory=MEMORY)
        ray.init(address=made.address, log_to_driver=False, logging_level="error")
        yield made
    finally:
        ray.shutdown()
        made.shutdown()


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


def actors(cluster: Any) -> list[int]:
    """List the processes of the cluster that work on parts."""
    nodes = {p.process.pid for node in cluster.list_all_nodes() for p in node.all_processes.get("raylet", [])}
    found = []
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and (folder / "cmdline").read_bytes().startswith(b"ray::MapWorker"):
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
            killed.extend(actors(cluster)[:1])
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
