"""The table of networks that somebody else trained, from the records of `examples/foreign_network.py`."""

from pathlib import Path

from mcbn.files import write_text
from mcbn_study.journal import RECORDS, latest, read
from mcbn_study.tables import render

NETWORKS = ("resnet20", "resnet32", "efficientnet")


def write(out: Path) -> Path:
    """Write table.md: of each network and method in a folder the last record of the most images, and its warnings."""
    last = latest(sorted(read(out / RECORDS), key=lambda r: int(r["n"])), ("network", "method"))
    last.sort(key=lambda r: NETWORKS.index(r["network"]))
    devices, hardware = (sorted({r[name] for r in last}) for name in ("device", "hardware"))
    return write_text(out / "table.md", render(__package__, last=last, devices=devices, hardware=hardware))
