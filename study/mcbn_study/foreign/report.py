"""The table of networks that somebody else trained, from the records of `examples/foreign_network.py`."""

from collections.abc import Sequence
from pathlib import Path

from mcbn.files import write_text
from mcbn_study.journal import RECORDS, Record, latest, read
from mcbn_study.tables import markdown

NETWORKS = ("resnet20", "resnet32", "efficientnet")
HEAD = ("network", "method", "images", "T", "PLL", "accuracy (%)", "ECE (%)", "Brier", "error AUROC", "seconds")
STAND_IN = (
    "efficientnet: scores are over five animals, and statistics come from photographs of animals, for want of"
    " ImageNet's training images. Where MCBN loses accuracy against the plain network, its draws are not those of"
    " training and must not be used. Recentred: the spread of the same draws about the network's running statistics."
)


def write(out: Path) -> Path:
    """Write table.md of the records in a folder."""
    return write_text(out / "table.md", table(read(out / RECORDS)))


def table(records: Sequence[Record]) -> str:
    """Lay out, of each network and method, the last record of the most images; and what mcbn warned of."""
    last = latest(sorted(records, key=lambda r: int(r["n"])), ("network", "method"))
    mixed = len({r["device"] for r in last}) > 1
    ordered = sorted(last, key=lambda r: NETWORKS.index(r["network"]))
    rows = [_cells(r, f" ({r['device']})" if mixed else "") for r in ordered]
    notes = [f"- {r['network']}, {r['method']}: {r['warning']}" for r in last if r.get("warning")]
    devices = ", ".join(sorted({r["hardware"] for r in last}))
    lines = ["# Networks that somebody else trained", "", markdown(HEAD, rows), f"Measured on {devices}.", "", STAND_IN]
    return "\n".join([*lines, "", "What mcbn warned of while fitting:", "", *(notes or ["- nothing"]), ""])


def _cells(r: Record, place: str) -> list[str]:
    numbers = [f"{r['pll']:.4f} ± {r['pll_error']:.4f}", f"{100 * r['accuracy']:.2f}", f"{100 * r['ece']:.2f}"]
    auroc = "-" if r["error_auroc"] is None else f"{r['error_auroc']:.3f}"
    sizes = [str(r["n"]), "1" if r["method"].startswith("plain") else str(r["config"]["n_samples"])]
    return [r["network"], r["method"], *sizes, *numbers, f"{r['brier']:.4f}", auroc, f"{r['seconds']:.1f}{place}"]
