"""Time and peak memory of methods that do the same work."""

import multiprocessing
import re
import resource
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from mcbn.model import MCBN
from mcbn_benchmarks.speed.cases import Case, Method, Prepared, forwards, prepare
from mcbn_study.machine import gpu_growth, synchronize

LEAST_REPEATS, MOST_REPEATS = 3, 20
ENOUGH_SECONDS = 3.0  # of the fastest method, over its repeats
MOST_SECONDS = 30.0  # of all, once each has its least repeats
TURN_SECONDS, MOST_CALLS = 0.02, 50
CPU_DRAW_SECONDS = 1.0  # a baseline slower than that for T draws times fewer of them
LEAST_DRAWS = 8
MOST_TURN_SECONDS = 15.0  # a draw may take that long by itself (UNet): then one is timed
CUDA_WARM_UPS = 5  # graphs are captured on the way
PLAIN_MEMORY_DRAWS = 2  # plain passes free what they used: more of them need no more


class Timing(NamedTuple):
    """Least time of T draws over the repeats, since noise only adds to it; where fewer were timed, scaled to T."""

    milliseconds: float
    draws_timed: int
    seconds: float  # of all repeats


def time_interleaved(
    methods: Mapping[str, Method],
    n_samples: int,
    device: str,
    *,
    whole: frozenset[str] = frozenset(),
    most_repeats: int = MOST_REPEATS,
) -> dict[str, Timing]:
    """Time methods in turns (a, b, c, a, b, c), so that noise of the machine meets all alike; `whole` run all T."""
    draws = {name: _warm_up(run, n_samples, device, name in whole) for name, run in methods.items()}
    seconds: dict[str, list[float]] = {name: [] for name in methods}
    while not _enough(seconds, most_repeats):
        for name, run in methods.items():
            first = _seconds(run, draws[name], device)
            calls = min(MOST_CALLS, int(TURN_SECONDS / max(first, 1e-9)))  # short work repeats within its turn, warm
            seconds[name] += [_seconds(run, draws[name], device) for _ in range(calls)] or [first]
    return {
        name: Timing(1000 * min(taken) * n_samples / draws[name], draws[name], sum(taken))
        for name, taken in seconds.items()
    }


def _enough(seconds: Mapping[str, list[float]], most_repeats: int) -> bool:
    repeats = min(len(taken) for taken in seconds.values())
    if repeats < min(LEAST_REPEATS, most_repeats):
        return False
    totals = [sum(taken) for taken in seconds.values()]
    return repeats >= most_repeats or min(totals) >= ENOUGH_SECONDS or sum(totals) >= MOST_SECONDS


def _warm_up(run: Method, n_samples: int, device: str, whole: bool) -> int:
    """Run once before the clock counts; return how many draws to time."""
    if whole or device == "cuda":
        for _ in range(CUDA_WARM_UPS if whole and device == "cuda" else 1):
            run(n_samples)
        return n_samples
    run(1)
    one = _seconds(run, 1, device)
    return min(n_samples, max(LEAST_DRAWS, int(CPU_DRAW_SECONDS / one)), max(1, int(MOST_TURN_SECONDS / one)))


def _seconds(run: Method, n_samples: int, device: str) -> float:
    synchronize(device)
    started = time.perf_counter()
    run(n_samples)
    synchronize(device)
    return time.perf_counter() - started


def peak_bytes(case: Case, ready: Prepared, bayes: MCBN[Any], method: str, device: str) -> int:
    """Return by how much memory grows at its peak in the first call of `mcbn` or `plain x T`.

    On the CPU in a process of its own, which reads the fitted draws from a file: training batches must not count.
    """
    if device == "cuda":
        return gpu_growth(partial(_first_call, method, case, ready, bayes))
    with tempfile.TemporaryDirectory() as folder:
        bayes.save(Path(folder) / "fitted.mcbn")
        torch.save(ready.network.state_dict(), Path(folder) / "network.pt")
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            return pool.submit(growth, case, method, Path(folder)).result()


def growth(case: Case, method: str, folder: Path) -> int:
    """Return the growth of this process's peak memory in bytes over one call."""
    ready = prepare(replace(case, rows=0), "cpu")
    ready.network.load_state_dict(torch.load(folder / "network.pt", weights_only=True))
    bayes: MCBN[Any] = MCBN.load(folder / "fitted.mcbn", ready.network)
    with suppress(OSError):  # let the peak start at what is resident now, where the system can
        Path("/proc/self/clear_refs").write_text("5")
    before = _peak_resident()
    _first_call(method, case, ready, bayes)
    return _peak_resident() - before


def _first_call(method: str, case: Case, ready: Prepared, bayes: MCBN[Any]) -> None:
    if method == "mcbn":
        bayes.predict(ready.query, n_samples=case.n_samples)
    else:
        forwards(ready.network, ready.query, PLAIN_MEMORY_DRAWS)


def _peak_resident() -> int:
    """Peak resident bytes of this process; ru_maxrss counts the parent's too, so /proc comes first."""
    status = Path("/proc/self/status")
    peak = re.search(r"VmHWM:\s+(\d+)", status.read_text() if status.exists() else "")
    return 1024 * (int(peak[1]) if peak else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
