"""Nothing of the user's is overwritten, nothing is left behind, and results can be read by whom the umask allows."""

import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from command_line import CLASSES, FIT, MODEL, MODULE, assert_refused, invoke, predict
from test_cli_process import begun, write_large
from workplace import command, environment

pytestmark = pytest.mark.usefixtures("at_work")

PREDICT = ("predict", "--posterior", "net.mcbn", *MODEL, "--data", "test.npz")
TABLE = ("--posterior", "csv.mcbn", *MODEL, "--data", "test.csv")
REPORT = ("report", *TABLE)
EXPORT = ("export", "--posterior", "net.mcbn", *MODEL, "--data", "test.npz")


@pytest.mark.parametrize(
    ("arguments", "out"),
    [
        (("predict", *TABLE), "test.csv"),
        (PREDICT, "test.npz"),
        (("predict", *TABLE), "soft.csv"),
        (("predict", *TABLE), "hard.csv"),
        (("fit", *FIT), "train.npz"),
        (("fit", *FIT, "--tune", "val.csv", "--data", "train.csv", "--target", "price"), "val.csv"),
        (("fit", *FIT), "make.pt"),
        (("fit", *FIT), f"{MODULE}.py"),
        (("fit", *FIT), "weights.safetensors"),
        (("predict", *TABLE), "mine.csv"),
        (REPORT, "mine.html"),
        (EXPORT, "mine.onnx"),
    ],
)
@pytest.mark.parametrize("flag", [(), ("--overwrite",)])
def test_inputs_and_files_of_another_kind_are_never_replaced(
    arguments: tuple[str, ...], out: str, flag: tuple[str, ...]
) -> None:
    from safetensors.torch import save_file

    save_file({"a": torch.zeros(2)}, "weights.safetensors")
    os.symlink("test.csv", "soft.csv")
    os.link("test.csv", "hard.csv")
    for name in ("mine.csv", "mine.html", "mine.onnx"):
        Path(name).write_text("a,mean\n1,2\n")
    before = {name: Path(name).read_bytes() for name in os.listdir() if Path(name).is_file()}
    assert_refused(invoke(*arguments, "--out", out, *flag), out, "name another file")
    assert {name: Path(name).read_bytes() for name in before} == before


@pytest.mark.parametrize(
    ("arguments", "out"),
    [
        (("fit", *FIT), "new.mcbn"),
        (PREDICT, "new.npz"),
        (PREDICT, "new.csv"),
        (("predict", *CLASSES, "--data", "test_x.npy"), "classes.csv"),
        (("predict", *CLASSES, "--data", "test_x.npy"), "classes.npz"),
        (REPORT, "new.html"),
    ],
)
def test_an_old_result_is_replaced_where_that_is_asked_for(arguments: tuple[str, ...], out: str) -> None:
    assert invoke(*arguments, "--out", out).exit_code == 0
    first = Path(out).stat().st_ino, Path(out).read_bytes()
    assert_refused(invoke(*arguments, "--out", out), "is there already", "--overwrite")
    assert (Path(out).stat().st_ino, Path(out).read_bytes()) == first
    done = invoke(*arguments, "--out", out, "--overwrite")
    assert done.exit_code == 0, done.output
    assert Path(out).stat().st_ino != first[0]


def test_a_network_without_weights_is_refused_unless_asked_for() -> None:
    plain = ("--model", f"{MODULE}:make", "--data", "test.npz")
    for arguments in (
        ("predict", "--posterior", "net.mcbn", *plain, "--out", "p.csv"),
        ("evaluate", "--posterior", "net.mcbn", *plain),
        ("report", "--posterior", "net.mcbn", *plain, "--out", "p.html"),
        ("fit", *plain, "--task", "regression", "--batch-size", "16", "--out", "p.mcbn"),
    ):
        assert_refused(invoke(*arguments), "without --weights", "--own-weights")
        assert invoke(*arguments, "--own-weights").exit_code == 0


@pytest.mark.parametrize("umask", [0o022, 0o007])
def test_files_can_be_read_by_whom_the_umask_allows(umask: int) -> None:
    before = os.umask(umask)
    try:
        for arguments, out in (
            (("fit", *FIT), "new.mcbn"),
            (PREDICT, "new.csv"),
            (PREDICT, "new.npz"),
            (REPORT, "n.html"),
        ):
            assert invoke(*arguments, "--out", out).exit_code == 0
            assert stat.S_IMODE(Path(out).stat().st_mode) == 0o666 & ~umask, out
    finally:
        os.umask(before)


@pytest.mark.slow
@pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGKILL])
def test_a_process_told_to_end_leaves_nothing_and_the_next_run_clears_up_after_a_killed_one(
    fitted_folder: Path, sign: signal.Signals
) -> None:
    write_large(fitted_folder / "large.csv", 200_000)
    before = sorted(os.listdir(fitted_folder))
    arguments = ("predict", "--posterior", "csv.mcbn", *MODEL, "--data", "large.csv", "--out", "stopped.csv")
    with subprocess.Popen(
        command(*arguments), cwd=fitted_folder, env=environment(), stderr=subprocess.PIPE, text=True
    ) as process:
        deadline = time.monotonic() + 100
        while not begun(fitted_folder) and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        process.send_signal(sign)
        _, errors = process.communicate(timeout=60)
    if sign == signal.SIGTERM:
        assert (process.returncode, errors) == (143, "mcbn: terminated\n")
    else:
        assert sorted(os.listdir(fitted_folder)) != before
        assert invoke("predict", *TABLE, "--out", "stopped.csv").exit_code == 0
        os.unlink("stopped.csv")
    assert sorted(os.listdir(fitted_folder)) == before


@pytest.mark.slow
def test_the_module_runs_and_says_its_version(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mcbn", "--version"], env=environment(), capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("mcbn 0.")


def test_an_export_gives_the_numbers_of_predict() -> None:
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    done = invoke(*EXPORT, "--out", "net.onnx", "--inputs", "4")
    assert done.exit_code == 0, done.output
    assert predict("--data", "test_x.npy", "--out", "pred.npz").exit_code == 0
    x = np.load("test_x.npy")
    mean, variance, _ = runtime.InferenceSession("net.onnx").run(["mean", "variance", "epistemic"], {"x": x})
    with np.load("pred.npz") as file:
        np.testing.assert_allclose(mean.reshape(-1), file["mean"].reshape(-1), rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(variance.reshape(-1) ** 0.5, file["std"].reshape(-1), rtol=1e-4)
    assert_refused(invoke(*EXPORT, "--out", "net.onnx"), "--overwrite")
    assert_refused(invoke(*EXPORT, "--out", "net.pb"), "must end in .onnx")


@pytest.mark.parametrize("arguments", [("demo", "--splits", "1", "--epochs", "1"), ("report", "results")])
def test_folders_of_something_else_are_refused(arguments: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "toy.png").write_text("mine")
    (tmp_path / "index.html").write_text("my page")
    assert_refused(invoke(*arguments, "--out", str(tmp_path)), "is not empty", "name another folder")
    assert (tmp_path / "toy.png").read_text() == "mine"
