"""The machine that an experiment runs on: what it is, how torch computes on it, what work costs."""

import os
import platform
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch

from mcbn.model import MCBN
from mcbn.progress import bar

P = ParamSpec("P")
R = TypeVar("R")
Item = TypeVar("Item")


@dataclass(frozen=True)
class Environment:
    """Where and from what a measurement was made."""

    device: str
    hardware: str
    torch: str
    commit: str
    date: str


def environment(device: str) -> Environment:
    """Describe this machine and checkout."""
    info = Path("/proc/cpuinfo")
    names = re.findall(r"^model name\s*:(.*)", info.read_text() if info.exists() else "", re.MULTILINE)
    name = names[0].strip() if names else platform.processor() or platform.machine()
    cpu = f"{name}, {os.cpu_count()} cores, {torch.get_num_threads()} threads"
    hardware = torch.cuda.get_device_name() if device == "cuda" else cpu
    return Environment(device, hardware, torch.__version__, _commit(), datetime.now(UTC).isoformat(timespec="seconds"))


def _commit() -> str:
    """Name the commit measured: MCBN_COMMIT where the code runs outside its checkout, else what git says."""
    if "MCBN_COMMIT" in os.environ:
        return os.environ["MCBN_COMMIT"]
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Compute with so many threads; as many as before afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def one_thread(device: str) -> AbstractContextManager[None]:
    """Run small CPU tensors on one thread: a second one mostly waits."""
    return threads(1 if device == "cpu" else torch.get_num_threads())


# cuDNN times its kernels once for each shape and takes the fastest; they run as TF32, torch's default
fastest_convolutions = partial(torch.backends.cudnn.flags, enabled=True, benchmark=True)


def _wait() -> None:
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()


def timed(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> tuple[R, float]:
    """Return what a function returns, and the seconds until it was done, on a GPU too, which is idle when it begins."""
    _wait()
    started = time.perf_counter()
    value = function(*args, **kwargs)
    _wait()
    return value, time.perf_counter() - started


def saved_bytes(bayes: MCBN[Any]) -> int:
    """Return the size of the file that `save` writes."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "posterior.mcbn"
        bayes.save(path)
        return path.stat().st_size


def gpu_growth(function: Callable[[], object]) -> int:
    """Return by how many bytes the GPU's memory grows at its peak while a function runs."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    function()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def tracked(items: Iterable[Item], title: str, unit: str) -> Iterator[Item]:
    """Pass items on one by one under a progress bar, each counted once the caller is done with it."""
    work = list(items)
    with bar(title, len(work), unit) as tick:
        for item in work:
            yield item
            tick(1)
