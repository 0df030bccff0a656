"""A process killed at a random moment of fit, save, predict or export: files are whole, the old or the new."""

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from functools import cache
from pathlib import Path

from workplace import environment

SCRIPT = """
import sys, time, warnings
warnings.simplefilter("ignore")
import torch, mcbn
from kinds import make
model, x = make("1d")
bayes = mcbn.MCBN(model, "regression").fit(x, n_samples=40, batch_size=8)
bayes.tau = 1.0
folder, job = sys.argv[1:]
print("ready", flush=True)
while True:
    if job == "save":
        bayes.save(folder + "/net.mcbn")
    elif job == "fit":
        mcbn.MCBN(model, "regression").fit(x, n_samples=40, batch_size=8).save(folder + "/net.mcbn")
    elif job == "predict":
        from mcbn.files import write_text
        from pathlib import Path
        write_text(Path(folder) / "net.csv", "\\n".join(map(str, bayes.predict(x).mean[:, 0].tolist())) + "\\n")
    else:
        bayes.export(folder + "/net.onnx", x[:4])
"""


@cache
def expected() -> tuple[str, object, object]:
    import mcbn
    from kinds import make

    model, x = make("1d")
    bayes = mcbn.MCBN(model, "regression").fit(x, n_samples=40, batch_size=8)
    return "\n".join(map(str, bayes.predict(x).mean[:, 0].tolist())) + "\n", model, bayes.sample(x)


def check(seed: int) -> str:
    """Kill a process that writes a file again and again; look at the file."""
    r = random.Random(seed)
    job = r.choice(["save", "save", "fit", "fit", "predict", "predict", "export"])
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(
            [sys.executable, "-c", SCRIPT, folder, job],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment() | {"PYTHONPATH": os.pathsep.join(sys.path)},
        )
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        time.sleep(r.random() * (8 if job == "export" else 0.5))
        process.send_signal(signal.SIGKILL)
        process.wait()
        return look(Path(folder), job)


def look(folder: Path, job: str) -> str:
    """Read what was written, if anything was."""
    files = [path for path in folder.iterdir() if path.is_file()]
    if not files:
        return "nothing"
    text, model, samples = expected()
    if job == "predict":
        assert files[0].read_text() == text, "a file of predictions is not whole"
    elif job == "export":
        import onnx

        onnx.checker.check_model(onnx.load(files[0]))
    else:
        import torch

        import mcbn
        from kinds import make

        assert torch.equal(mcbn.MCBN.load(files[0], model).sample(make("1d")[1]), samples), "other numbers"
    return "whole"
