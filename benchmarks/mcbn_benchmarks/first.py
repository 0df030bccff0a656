"""What a user pays who predicts once: the first `fit` and the first `predict`, each in a fresh process.

Beside them, also in fresh processes, the loop over as many training batches and T plain passes. The network has run
once before the clock starts, so that PyTorch's own start is nobody's.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from mcbn_benchmarks.speed.cases import BATCH_SIZE, MLP, RESNET32, UNET, Algorithm1, fitted, forwards, prepare
from mcbn_study.machine import timed

CASES = [
    *(replace(case, n_samples=T) for case, draws in ((MLP, (20, 100, 500)), (RESNET32, (20, 128))) for T in draws),
    replace(UNET, recorded=None),
]
PREDICT, FIT = ("predict", "plain"), ("fit", "loop")  # ours, then what it is held against


def _train_forwards(network: nn.Module, batch: Callable[[], torch.Tensor], T: int) -> None:
    with torch.no_grad():
        for _ in range(T):
            network.train()(batch())


def seconds(way: str, index: int, device: str) -> tuple[float, float]:
    """Return wall and CPU seconds of one way of a case, the first work of this process."""
    torch.set_num_threads(1)
    case = CASES[index]
    ready, T = prepare(case, device), case.n_samples
    works: dict[str, Callable[[], object]] = {
        "fit": partial(fitted, case, ready),
        "loop": partial(_train_forwards, ready.network, Algorithm1(ready.network, ready.train, ready.query).batch, T),
        "plain": partial(forwards, ready.network, ready.query, T),
    }
    if way == "predict":
        works[way] = partial(fitted(case, ready).predict, ready.query)
    forwards(ready.network, ready.query if way in PREDICT else ready.train[:BATCH_SIZE], 1)
    started = time.process_time()
    return timed(works[way])[1], time.process_time() - started


def measure(device: str, only: str) -> Iterator[dict[str, Any]]:
    """Yield a record for each case: seconds of ours, of what it is held against, and each in a process of its own."""
    for (index, case), (ours, theirs) in ((each, ways) for each in enumerate(CASES) for ways in (PREDICT, FIT)):
        if only in f"{case.title} T={case.n_samples} {ours}":
            about = {"case": f"first {ours}, {case.name}", "n": case.n, "T": case.n_samples, "against": theirs}
            clock, cpu = zip(*(_apart(way, index, device) for way in (ours, theirs)), strict=True)
            yield about | {"seconds": clock, "cpu_seconds": cpu, "load": os.getloadavg()[0]}


def _apart(*arguments: Any) -> list[float]:
    code = f"from mcbn_benchmarks.first import seconds; print(list(seconds(*{json.dumps(arguments)})))"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)  # type: ignore[no-any-return]
