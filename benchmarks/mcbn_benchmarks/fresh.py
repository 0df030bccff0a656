"""What a user pays in a fresh process: time of the first `fit` and the first `predict`, peak memory of `fit`.

Beside them, each in a process of its own too, a plain loop over as many training batches, or T plain passes. Where time
is taken the network has run once before the clock starts, so that PyTorch's own start is nobody's. Memory may not grow
with T: statistics kept where they were made hold apart the memory of the passes between them.
"""

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from importlib import import_module

import torch

from mcbn import MCBN, algorithm
from mcbn_benchmarks.commands import Device, Only
from mcbn_benchmarks.speed import cases
from mcbn_benchmarks.speed.cases import BATCH_SIZE, MLP, RESNET32, UNET, Case, apart, fitted, forwards, prepare
from mcbn_benchmarks.zoo.standin import standing_in
from mcbn_study.journal import Record
from mcbn_study.machine import timed

TIMED = (
    *(replace(case, n_samples=T) for case, draws in ((MLP, (20, 100, 500)), (RESNET32, (20, 128))) for T in draws),
    replace(UNET, recorded=None),
)
WAYS = (("predict", "plain"), ("fit", "loop"))  # ours, then what it is held against
FEW, MANY = 5, 100  # draws, where memory is measured
WEIGHED = (("resnet18", 224, 32), ("efficientnet_b0", 96, 16), ("unet", 48, 8))  # network, pixels, M


def first(device: Device = "auto", only: Only = "") -> Iterator[Record]:
    """Time the first `fit` and `predict` of fresh processes against training forwards and T plain passes."""
    works = [(case, ways) for case in TIMED for ways in WAYS]
    works += [(case, WAYS[0]) for case in cases.PRECISION if device == "cuda" and case.n < 256]
    for case, (ours, theirs) in works:
        if only in f"{case.title} T={case.n_samples} {ours}":
            about = {"case": f"first {ours}, {case.name}", "n": case.n, "T": case.n_samples, "against": theirs}
            clock, cpu = zip(*(apart(_seconds, way, case, device) for way in (ours, theirs)), strict=True)
            yield about | {"seconds": clock, "cpu_seconds": cpu, "load": os.getloadavg()[0]}


def _seconds(way: str, case: Case, device: str) -> tuple[float, float]:
    """Return wall and CPU seconds of one way of a case, the first work of this process."""
    torch.set_num_threads(1)
    ready, T = prepare(case, device), case.n_samples
    work: Callable[[], object]
    if way in ("fit", "loop"):
        loop, network, inputs = cases.Algorithm1(*ready), ready.network, ready.train[:BATCH_SIZE]
        record = torch.no_grad()(lambda: [network.train()(loop.batch()) for _ in range(T)])
        work = partial(fitted, case, ready) if way == "fit" else record
    else:
        bayes, network = fitted(case, ready).to(case.dtype), ready.network.to(case.dtype)
        inputs = ready.query.to(case.dtype)
        work = partial(bayes.predict, inputs) if way == "predict" else partial(forwards, network, inputs, T)
    forwards(network, inputs, 1)
    started = time.process_time()
    return timed(work)[1], time.process_time() - started


def memory(only: Only = "") -> Iterator[Record]:
    """Measure the peak memory of `fit` at few and many draws against a plain loop; needs timm and smp."""
    for name, pixels, M in (case for case in WEIGHED if only in case[0]):
        ways = (("fit", FEW), ("fit", MANY), ("loop", MANY))
        few, many, loop = (apart(_peak, way, name, pixels, M, T) for way, T in ways)
        ratios = {"ratio_few": many / few, "ratio_loop": many / loop}
        peaks = {"fit_few_mb": few, "fit_many_mb": many, "loop_many_mb": loop}
        yield {"case": f"memory of fit, {name}", "pixels": pixels, "M": M, "T": [FEW, MANY], **peaks, **ratios}


def _peak(way: str, name: str, pixels: int, M: int, T: int) -> float:
    """Return the most memory this process ever had, in MB, after T batches of M pictures."""
    torch.set_num_threads(1)
    with standing_in():
        if name == "unet":
            network = import_module("segmentation_models_pytorch").Unet("tu-resnet18", encoder_weights=None, classes=5)
        else:
            network = import_module("timm").create_model(name, num_classes=10)
    network.eval()
    x = torch.randn(2 * M, 3, pixels, pixels, generator=torch.Generator().manual_seed(0))
    if way == "fit":
        MCBN(network, "classification").fit(x, n_samples=T, batch_size=M)
    else:
        for _ in range(T):  # as Algorithm 1 does, and nothing is kept
            algorithm.record(network, x[torch.randperm(len(x))[:M]])
    return cases.peak_resident() / 2**20
