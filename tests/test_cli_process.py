"""The commands as processes: bars on a terminal, bounded memory, Ctrl-C."""

import json
import os
import pty
import re
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from command_line import FIT, MODEL, MODULE, evaluate, invoke
from workplace import NAMES, command, environment, read_csv, run

pytestmark = pytest.mark.usefixtures("at_work")


@pytest.mark.slow
def test_the_commands_run_as_processes(fitted_folder: Path) -> None:
    fit = run(
        fitted_folder, "fit", *FIT, "--tune", "val.csv", "--data", "train.csv", "--target", "price", "--out", "own.mcbn"
    )
    assert fit.returncode == 0, fit.stderr
    assert fit.stderr == ""  # no bar where nobody looks
    assert "30" in fit.stdout
    assert "noise std 0." in fit.stdout
    common = ("--posterior", "own.mcbn", *MODEL, "--data", "test.csv")
    done = run(fitted_folder, "predict", *common, "--out", "own.csv")
    assert (done.returncode, done.stderr) == (0, "")
    assert len(read_csv(fitted_folder / "own.csv")["mean"]) == 50
    scores = run(fitted_folder, "evaluate", *common, "--json")
    expected = evaluate("--posterior", "csv.mcbn", "--data", "test.csv")
    assert json.loads(scores.stdout)["mcbn"] == pytest.approx(expected["mcbn"], rel=1e-5)
    wrong = run(fitted_folder, "fit", *FIT, "--model", "nowhere:make", "--out", "other.mcbn")
    assert wrong.returncode == 2
    assert wrong.stderr.count("\n") == 1
    assert "cannot import 'nowhere'" in wrong.stderr


def write_large(path: Path, rows: int) -> None:
    """Write a table of the three inputs among ten other columns."""
    block = np.random.default_rng(0).normal(size=(1000, 13))
    lines = "\n".join(",".join(f"{value:.6f}" for value in row) for row in block.tolist()) + "\n"
    with path.open("w") as file:
        file.write(",".join([*NAMES[:3], *(f"other_{number}" for number in range(10))]) + "\n")
        for _ in range(rows // 1000):
            file.write(lines)


MEASURED = """
import resource, sys
from pathlib import Path
from mcbn import progress
from mcbn.cli import app
progress.SHOW_AFTER = 0
try:
    app(sys.argv[1:])
finally:
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    # ru_maxrss of a new process begins with its parent's; VmHWM does not
    peak = next((int(line.split()[1]) for line in lines if line.startswith("VmHWM")), None)
    print("peak", peak or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def on_a_terminal(arguments: list[str], folder: Path) -> tuple[int, str, str]:
    """Run a process whose stderr is a terminal; return its exit code, its output and what the terminal saw."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 80))
    shown = b""
    with subprocess.Popen(
        arguments, cwd=folder, env=environment(), stdout=subprocess.PIPE, stderr=theirs, text=True
    ) as process:
        os.close(theirs)
        while part := _read(ours):
            shown += part
        output, _ = process.communicate(timeout=60)
    os.close(ours)
    return process.returncode, output, shown.decode()


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 4096)
    except OSError:  # the other end is closed
        return b""


@pytest.mark.slow
def test_a_large_csv_predicts_in_bounded_memory_with_a_bar_on_a_terminal(fitted_folder: Path) -> None:
    write_large(fitted_folder / "large.csv", 200_000)
    arguments = ("predict", "--posterior", "csv.mcbn", *MODEL, "--data", "large.csv", "--out", "large_pred.csv")
    status, output, shown = on_a_terminal([sys.executable, "-c", MEASURED, *arguments], fitted_folder)
    assert status == 0, shown
    assert "200000 predictions" in output
    assert int(output.split("peak")[1]) < 1e6  # kB
    assert re.search(r"predicting: [1-9]\d+row", shown)
    with (fitted_folder / "large_pred.csv").open() as file:
        assert sum(1 for _ in file) == 200_001


@pytest.mark.parametrize("data", [f"{MODULE}:train_loader", f"{MODULE}:by_workers", "train.npz"])
def test_bars_count_batches_whichever_process_makes_them(data: str, monkeypatch: pytest.MonkeyPatch) -> None:
    counts: dict[str, tuple[int | None, list[int]]] = {}

    @contextmanager
    def bar(title: str, total: int | None, unit: str) -> Iterator[Any]:
        counts[title] = (total, [])
        yield counts[title][1].append

    for module in ("cli.model", "cli.session", "tables"):
        monkeypatch.setattr(f"mcbn.{module}.bar", bar)
    options = ("--data", data, "--tune", data, "--task", "regression", "--samples", "30", "--out", "bars.mcbn")
    options += ("--batch-size", "16") if data.endswith(".npz") else ()
    assert invoke("fit", *MODEL, *options).exit_code == 0
    read = counts.pop("reading", None)
    assert (read is None) == (data != "train.npz")  # a loader is asked for its batches by the fit
    assert {title: (total, sum(ticks)) for title, (total, ticks) in counts.items()} == {
        "drawing": (30, 30),
        "tuning": (1, 1) if data == "train.npz" else (8, 8),
        "tuning the constant twin": (1, 1) if data == "train.npz" else (8, 8),
    }


def begun(folder: Path) -> bool:
    """Tell whether the process has begun to write, in a temporary folder beside the result."""
    return any(folder.glob(".stopped.csv.*/*"))


@pytest.mark.slow
def test_ctrl_c_stops_a_process_without_a_half_file(fitted_folder: Path) -> None:
    write_large(fitted_folder / "large.csv", 200_000)
    before = sorted(os.listdir(fitted_folder))
    arguments = ("predict", "--posterior", "csv.mcbn", *MODEL, "--data", "large.csv", "--out", "stopped.csv")
    with subprocess.Popen(
        command(*arguments),
        cwd=fitted_folder,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        deadline = time.monotonic() + 100
        while not begun(fitted_folder) and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (130, "mcbn: interrupted\n")
    assert sorted(os.listdir(fitted_folder)) == before
