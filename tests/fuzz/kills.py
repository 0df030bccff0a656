"""A process killed at a random moment of save, fit, predict or export: its file is whole, or there is none."""

import contextlib
import os
import random
import subprocess
import sys
import tempfile
import time
from functools import cache
from pathlib import Path

import command_line
from mcbn.saving import read_tensors
from workplace import environment, furnish

JOBS = {"save": "net.mcbn", "fit": "net.mcbn", "predict": "out.csv", "export": "net.onnx"}
SCRIPT = """
import sys, warnings
warnings.simplefilter("ignore")
from fuzz import kills
job, folder = sys.argv[1:]
run = kills.ready(job)
print("ready", flush=True)
while True:
    run(folder + "/" + kills.JOBS[job])
"""


def ready(job: str):
    """Return a function that does one job in this folder of a user, with the name of a file as its argument."""
    import_module()
    if job == "fit":
        return lambda out: command_line.invoke("fit", *command_line.FIT, "--tune", "val.npz", "--out", out)
    if job == "predict":
        return lambda out: command_line.predict("--data", "test.npz", "--out", out)
    bayes = command_line.by_hand()
    return bayes.save if job == "save" else lambda out: bayes.export(out, command_line.arrays("test.npz")[0][:4])


def import_module() -> None:
    sys.path.insert(0, os.getcwd())
    __import__(command_line.MODULE)


@cache
def workplace() -> tuple[tempfile.TemporaryDirectory, dict[str, bytes | str]]:  # type: ignore[type-arg]
    """Furnish a folder, fit there, and return it with what each job writes when nobody kills it."""
    home = tempfile.TemporaryDirectory()
    furnish(Path(home.name), command_line.MODULE)
    with contextlib.chdir(home.name):
        command_line.fit_all()
        for job in ("save", "predict", "export"):
            ready(job)(f"whole_{JOBS[job]}")
        written = {name: Path(f"whole_{name}").read_bytes() for name in ("out.csv", "net.onnx")}
        return home, written | {"net.mcbn": shown(Path("whole_net.mcbn"))}


def shown(path: Path) -> str:
    """Return what a posterior file holds; the order of its header is another each time."""
    tensors, text = read_tensors(path)
    return str((tensors, sorted(text.items())))


def check(seed: int) -> str:
    """Kill a process that writes a file again and again; look at the file."""
    r = random.Random(seed)
    job, (home, whole) = r.choice(["save", "fit", "fit", "predict", "predict", "export"]), workplace()
    with tempfile.TemporaryDirectory() as folder:
        paths = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        process = subprocess.Popen(
            [sys.executable, "-c", SCRIPT, job, folder],
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=home.name, env=environment() | paths,
        )  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n", "the process did not start"
        time.sleep(r.random() * (8 if job == "export" else 1))
        process.kill()
        process.wait()
        file = Path(folder) / JOBS[job]
        if not file.exists():
            return "nothing"
        content = shown(file) if file.suffix == ".mcbn" else file.read_bytes()
        assert job == "export" or content == whole[file.name], f"{job}: {file.name} is not whole"
        assert job != "export" or len(content) == len(whole[file.name]), "export: the file is not whole"
    return "whole"
