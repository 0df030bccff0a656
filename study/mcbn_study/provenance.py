"""Where and from what a record was made."""

import os
import platform
import subprocess
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch


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
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return Environment(device, _hardware(device), torch.__version__, _commit(), now)


def _hardware(device: str) -> str:
    if device == "cuda":
        return torch.cuda.get_device_name()
    return f"{_cpu_name()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads"


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def _commit() -> str:
    """Name the commit measured: MCBN_COMMIT where the code runs outside its checkout, else what git says."""
    if "MCBN_COMMIT" in os.environ:
        return os.environ["MCBN_COMMIT"]
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"
