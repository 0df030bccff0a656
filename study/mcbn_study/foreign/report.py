"""The table of networks that somebody else trained, from the records of `examples/foreign_network.py`."""

from collections.abc import Sequence
from pathlib import Path

from mcbn.files import write_text
from mcbn_study.journal import RECORDS, Record, latest, read
from mcbn_study.tables import render

NETWORKS = ("resnet20", "resnet32", "efficientnet")


def write(out: Path) -> Path:
    """Write table.md of the records in a folder."""
    return write_text(out / "table.md", table(read(out / RECORDS)))


def table(records: Sequence[Record]) -> str:
    """Lay out, of each network and method, the last record of the most images; and what mcbn warned of."""
    last = latest(sorted(records, key=lambda r: int(r["n"])), ("network", "method"))
    mixed = len({r["device"] for r in last}) > 1
    ordered = sorted(last, key=lambda r: NETWORKS.index(r["network"]))
    rows = [_cells(r, f" ({r['device']})" if mixed else "") for r in ordered]
    return render(__package__, rows=rows, last=last, hardware=sorted({r["hardware"] for r in last}))


def _cells(r: Record, place: str) -> list[str]:
    numbers = [f"{r['pll']:.4f} ± {r['pll_error']:.4f}", f"{100 * r['accuracy']:.2f}", f"{100 * r['ece']:.2f}"]
    auroc = "-" if r["error_auroc"] is None else f"{r['error_auroc']:.3f}"
    sizes = [str(r["n"]), "1" if r["method"].startswith("plain") else str(r["config"]["n_samples"])]
    return [r["network"], r["method"], *sizes, *numbers, f"{r['brier']:.4f}", auroc, f"{r['seconds']:.1f}{place}"]
