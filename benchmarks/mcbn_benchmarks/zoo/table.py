"""Records of the zoo as tables: every network, and the README's matrix of what works."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mcbn.errors import MCBNError
from mcbn.files import write_text

START, END = "<!-- zoo -->", "<!-- /zoo -->"
Record = Mapping[str, Any]


def latest(records: Sequence[Record]) -> list[Record]:
    """Keep the last record of each network, in the order they first came; a skip does not replace a run."""
    kept: dict[tuple[str, str], Record] = {}
    for record in records:
        key = record["package"], record["name"]
        if key not in kept or record["outcome"] != "skipped" or kept[key]["outcome"] == "skipped":
            kept[key] = record
    return list(kept.values())


def ran(records: Sequence[Record]) -> list[Record]:
    """Leave out what could not run for reasons of its own, and networks without batch norm."""
    return [r for r in records if r["outcome"] in ("exact", "inexact", "refused")]


def summary(records: Sequence[Record]) -> str:
    """Count in a sentence."""
    own = ran(records)
    exact = sum(r["outcome"] == "exact" for r in own)
    untouched = sum(bool(r["untouched"]) for r in own)
    share = 100 * exact / max(len(own), 1)
    return f"{exact} of {len(own)} networks with batch norm exact ({share:.1f} %), {untouched} left untouched"


def matrix(records: Sequence[Record]) -> str:
    """Lay out one row a package and domain: networks, batch norm calls, exact, how draws run."""
    lines = [
        "| package | networks | batch norm calls | exact | several draws or folded in one pass |",
        "|---|---|---|---|---|",
    ]
    groups: dict[tuple[str, str], list[Record]] = {}
    for record in ran(records):
        groups.setdefault((record["package"], record["domain"]), []).append(record)
    for (package, domain), group in groups.items():
        exact = [r for r in group if r["outcome"] == "exact"]
        fast = sum(not r["way"].startswith("loop") for r in exact)
        calls = sum(r["layers"] for r in group)
        title = f"{package} {group[-1]['version']}" if package != "mcbn" else "mcbn"
        lines.append(f"| {title}: {domain} | {len(group)} | {calls:,} | {len(exact)} | {fast} |")
    return "\n".join(lines)


def table(records: Sequence[Record]) -> str:
    """Lay out every network."""
    first = records[0] if records else {}
    heads = [
        "package",
        "network",
        "dtype",
        "calls",
        "statistics",
        "output",
        "fast path",
        "how draws run",
        "untouched",
        "s",
    ]
    lines = [
        "# Networks that others wrote",
        "",
        f"{summary(records)}. torch {first.get('torch', '')}; errors relative to the largest value, against a "
        "hand-made training pass (statistics, output) and against the plain loop (fast path); single precision where "
        "that is within 1e-4, else double within 1e-9.",
        "",
        matrix(records),
        "",
        "| " + " | ".join(heads) + " |",
        "|" + "---|" * len(heads),
        *map(_row, (r for r in records if r["outcome"] in ("exact", "inexact"))),
        "",
        *_others(records),
    ]
    return "\n".join(lines) + "\n"


def _row(record: Record) -> str:
    errors = [_error(record[name]) for name in ("statistics_error", "output_error", "fast_error")]
    name = record["name"] if record["outcome"] == "exact" else f"**{record['name']}** (not exact: {record['reason']})"
    cells = [record["package"], name, record["dtype"], str(record["layers"]), *errors, record["way"]]
    return "| " + " | ".join([*cells, "yes" if record["untouched"] else "**no**", str(record["seconds"])]) + " |"


def _error(value: float | None) -> str:
    return "" if value is None else f"{value:.0e}"


def _others(records: Sequence[Record]) -> list[str]:
    """List what was refused, has no batch norm or could not run, with the reason."""
    chosen = [r for r in records if r["outcome"] not in ("exact", "inexact")]
    return [f"- {r['package']}/{r['name']}: {r['outcome']}: {r['reason']}" for r in chosen]


def readme_block(records: Sequence[Record]) -> str:
    """Write what stands between the markers of the README: the networks of others alone."""
    records = [r for r in records if r["package"] != "mcbn"]
    refused = [f"{r['name']} ({r['package']}): {r['reason']}" for r in ran(records) if r["outcome"] != "exact"]
    missing = sorted(
        {r["package"] for r in records if "not installed" in r["reason"] and r["reason"].startswith(r["package"])}
    )
    lines = [START, f"{summary(records)}:", "", matrix(records), ""]
    lines += [f"Not exact: {'; '.join(refused)}", ""] if refused else []
    lines += [f"Not installed where this was run: {', '.join(missing)}.", ""] if missing else []
    return "\n".join([*lines, END])


def write_readme(path: Path, records: Sequence[Record]) -> None:
    """Replace what stands between the markers."""
    text = path.read_text()
    if text.count(START) != 1 or text.count(END) != 1:
        raise MCBNError(f"{path} needs one {START} and one {END}; the matrix goes between them")
    before, after = text.split(START)[0], text.split(END)[1]
    write_text(path, before + readme_block(records) + after)
