"""A process killed at a random moment of save, fit, predict, export or a study: its file is whole, or there is none."""

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
from mcbn_study import regularizer
from mcbn_study.journal import read
from workplace import environment, furnish

JOBS = {"save": "net.mcbn", "fit": "net.mcbn", "predict": "out.csv", "export": "net.onnx", "study": "records.jsonl"}
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
    if job == "study":
        return lambda out: regularizer.objective(Path(out).parent, dataset="boston", sizes=[64], steps=2)
    bayes = command_line.by_hand()
    return bayes.save if job == "save" else lambda out: bayes.export(out, command_line.arrays("test.npz")[0][:4])


def import_module() -> None:
    sys.path.insert(0, os.getcwd())
    __import__(command_line.MODULE)


@cache
def workplace() -> tempfile.TemporaryDirectory:  # type: ignore[type-arg]
    """Furnish a folder, fit there, and write what each job writes when nobody kills it."""
    home = tempfile.TemporaryDirectory()
    furnish(Path(home.name), command_line.MODULE)
    with contextlib.chdir(home.name):
        command_line.fit_all()
        for job in ("save", "predict", "export", "study"):
            ready(job)(f"whole_{JOBS[job]}")
    return home


def size(path: Path) -> object:
    """Return the shapes of a posterior, the lines of a table, the fields of records, the bytes of a graph."""
    if path.suffix == ".jsonl":
        ready("study")(path)  # goes on where the other process was killed
        return {frozenset(record) for record in read(path)}
    if path.suffix == ".mcbn":
        return {name: tensor.shape for name, tensor in read_tensors(path)[0].items()}
    content = path.read_bytes()
    return [line.count(b",") for line in content.split(b"\n")] if path.suffix == ".csv" else len(content)


def check(seed: int) -> str:
    """Kill a process that writes a file again and again; look at the file."""
    r = random.Random(seed)
    job, home = r.choice(["save", "fit", "predict", "predict", "export", "study"]), workplace()
    with tempfile.TemporaryDirectory() as folder:
        paths = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        process = subprocess.Popen(
            [sys.executable, "-c", SCRIPT, job, folder],
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=home.name, env=environment() | paths,
        )  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n", "the process did not start"
        time.sleep(r.random() * (8 if job in ("export", "study") else 1))
        process.kill()
        process.communicate()
        file = Path(folder) / JOBS[job]
        if not file.exists():
            return "nothing"
        whole = file.name if job == "study" else f"whole_{file.name}"
        assert size(file) == size(Path(home.name) / whole), f"{job}: {file.name} is not whole"
    return "whole"
