"""The measurements: speed, agreement, memory, fitting, and the sampling-free method on real data."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mcbn import data, metrics
from mcbn.engine.run import Engine
from mcbn.errors import MCBNError
from mcbn.model import MCBN
from mcbn_benchmarks.speed.cases import (
    BATCH_SIZE,
    MEMORY_SAMPLES,
    Algorithm1,
    Case,
    Fit,
    Ours,
    Plain,
    Prepared,
    TrainingForwards,
    fitted,
    prepare,
)
from mcbn_benchmarks.speed.peer import Peer, reason_against
from mcbn_benchmarks.speed.records import Record
from mcbn_benchmarks.speed.targets import ALGORITHM_1, CRPS_DIFFERENCE, FORWARDS, LINEAR_DATA, PEER, PLAIN
from mcbn_benchmarks.speed.timing import MOST_REPEATS, Method, peak_bytes, time_interleaved

AGREEMENT_DRAWS = 3
MEMORY_REPEATS = 3  # processes; the least counts: what the system's allocator holds back varies
OURS = ("mcbn", "mcbn compiled")
LINEAR_SPLITS = 3


@dataclass(frozen=True)
class Options:
    """What the command line says about every case."""

    device: str = "cpu"
    compile: bool = False
    memory: bool = True
    peer_path: Path | None = None
    most_repeats: int = MOST_REPEATS


def speed(case: Case, options: Options) -> Iterator[Record]:
    """Time all methods on one case, side by side, with agreement and peak memory."""
    ready = prepare(case, options.device)
    bayes = fitted(case, ready)
    yield agreement(case, ready, bayes)
    peaks = _peaks(case, ready, bayes, options)
    reason = reason_against(ready, options.peer_path)
    if reason:
        yield Record(case.name, case.n, case.n_samples, PEER, note=reason)
    methods = _methods(ready, bayes, options)
    if not reason:
        methods[PEER] = Peer(case, ready, options.peer_path)
    yield from _timed(case, methods, options, peaks, whole=frozenset(OURS))


def _methods(ready: Prepared, bayes: MCBN[Any], options: Options) -> dict[str, Method]:
    methods: dict[str, Method] = {
        ALGORITHM_1: Algorithm1(ready.network, ready.train, ready.query),
        PLAIN: Plain(ready.network, ready.query),
        "mcbn": Ours(bayes, ready.query),
    }
    if options.compile:
        methods["mcbn compiled"] = Ours(bayes, ready.query, compile=True)
    return methods


def _timed(
    case: Case, methods: dict[str, Method], options: Options, peaks: dict[str, int], whole: frozenset[str]
) -> Iterator[Record]:
    timings = time_interleaved(methods, case.n_samples, options.device, whole=whole, most_repeats=options.most_repeats)
    for name, (milliseconds, draws_timed, seconds) in timings.items():
        sizes, note = (case.name, case.n, case.n_samples), _repeated(case) if name in OURS else ""
        yield Record(*sizes, name, milliseconds, draws_timed, peaks.get(name), note=note, seconds=seconds)


def _repeated(case: Case) -> str:
    few = case.recorded or case.n_samples
    return f"statistics of {few} batches, repeated" if few < case.n_samples else ""


def _peaks(case: Case, ready: Prepared, bayes: MCBN[Any], options: Options) -> dict[str, int]:
    if not options.memory:
        return {}
    return {name: peak_bytes(case, ready, bayes, name, options.device) for name in ("mcbn", PLAIN)}


def agreement(case: Case, ready: Prepared, bayes: MCBN[Any]) -> Record:
    """Compare a few draws with the network's own code under the same statistics, TF32 off: max |error| / max |f|."""
    started = time.perf_counter()
    engine = Engine(bayes.engine.network, bayes.posterior)  # its own: graphs captured here have TF32 off
    inputs, draws = engine.network.prepare(ready.query), min(AGREEMENT_DRAWS, case.n_samples)
    with torch.no_grad(), torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        found = torch.cat(list(engine.outputs(inputs, draws)))  # (t, N, ...)
        expected = torch.stack([engine._replay(inputs, t) for t in range(draws)])  # (t, N, ...)
    error = ((found - expected).abs().max() / expected.abs().max()).item()
    seconds = time.perf_counter() - started
    return Record(case.name, case.n, draws, "agreement", value=error, note="relative to the largest", seconds=seconds)


def memory(case: Case, options: Options) -> Iterator[Record]:
    """Measure peak memory of mcbn at few draws and at many."""
    for n_samples in MEMORY_SAMPLES:
        started = time.perf_counter()
        sized = replace(case, n_samples=n_samples)
        ready = prepare(sized, options.device)
        bayes, repeats = fitted(sized, ready), MEMORY_REPEATS if options.device == "cpu" else 1
        peak = min(peak_bytes(sized, ready, bayes, "mcbn", options.device) for _ in range(repeats))
        seconds = time.perf_counter() - started
        yield Record(case.name, case.n, n_samples, "mcbn", None, None, peak, note=_repeated(sized), seconds=seconds)


def fit(case: Case, options: Options) -> Iterator[Record]:
    """Time fitting against as many training-mode forward passes."""
    ready = prepare(case, options.device)
    methods: dict[str, Method] = {
        "fit": Fit(case, ready),
        FORWARDS: TrainingForwards(ready.network, ready.train[:BATCH_SIZE]),
    }
    yield from _timed(replace(case, n=BATCH_SIZE), methods, options, {}, whole=frozenset(methods))


def linear(name: str, *, splits: int = LINEAR_SPLITS, epochs: int | None = None) -> Iterator[Record]:
    """Compare the sampling-free method with sampling on test parts of a data set; time it against the loop."""
    try:
        x, y = (part.float() for part in data.load(name))
    except MCBNError as error:
        yield Record(f"linear {name}", 0, 0, "linear", note=f"skipped: {error}")
        return
    for number in range(1, splits + 1):
        yield from _linear_split(name, x, y, number, epochs)


def _linear_split(name: str, x: Tensor, y: Tensor, number: int, epochs: int | None) -> Iterator[Record]:
    from mcbn import demo  # here: it needs matplotlib, which a GPU machine may lack

    started = time.perf_counter()
    setting = demo.SETTINGS.get(name, demo.Setting(32, 1e-5, 400))
    setting = replace(setting, epochs=epochs or setting.epochs)
    split = data.split(len(x), number)
    fold = data.folds(split.train)[0]
    bayes = demo.train_and_fit(x[fold.train], y[fold.train], setting, number, lambda count: None)
    bayes.tune((x[fold.validation], y[fold.validation]))
    values = _linear_scores(bayes, x[split.test], y[split.test])
    case, n, note = f"linear {name}", len(split.test), f"split {number}"
    loop = Algorithm1(bayes.model, x[fold.train], x[split.test], setting.batch_size)
    methods: dict[str, Method] = {
        "linear": lambda n_samples: bayes.predict(x[split.test], method="linear", n_samples=n_samples),
        ALGORITHM_1: loop,
    }
    timings = time_interleaved(methods, demo.T, "cpu", whole=frozenset(methods))
    seconds = time.perf_counter() - started
    for method, value in values.items():
        yield Record(case, n, demo.T, method, value=value, note=note, seconds=seconds)
    for method, timing in timings.items():
        times = timing.milliseconds, timing.draws_timed
        yield Record(case, n, demo.T, method, *times, note=note, seconds=timing.seconds)


def _linear_scores(bayes: MCBN[Any], x: Tensor, y: Tensor) -> dict[str, float]:
    """Return (CRPS linear - CRPS sample) / CRPS sample, and how the epistemic standard deviations compare."""
    sample, expanded = bayes.predict(x), bayes.predict(x, method="linear")
    crps, other = (metrics.crps_gaussian(p.mean, p.variance, y).mean().item() for p in (sample, expanded))
    stds = torch.stack([sample.epistemic.sqrt(), expanded.epistemic.sqrt()])  # (2, N)
    return {
        CRPS_DIFFERENCE: (other - crps) / crps,
        "correlation of epistemic std": torch.corrcoef(stds)[0, 1].item(),
        "median ratio of epistemic std": (stds[1] / stds[0]).median().item(),
    }


LINEAR = {f"linear {name}": name for name in LINEAR_DATA}
