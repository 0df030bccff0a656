"""Records of the zoo as tables: every network, and the README's matrix of what works."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from mcbn.files import write_text
from mcbn_study import journal
from mcbn_study.journal import Journal, Record
from mcbn_study.tables import render


def write(folder: Path) -> list[str]:
    """Write and print the table of the folder's records; return the networks that are not exact, or were touched."""
    records = latest(Journal(folder).records)
    text = table(records)
    write_text(folder / "table.md", text)
    print(text)
    return [f"{r['package']}/{r['name']}" for r in ran(records) if r["outcome"] == "inexact" or not r["untouched"]]


def latest(records: Iterable[Record]) -> list[Record]:
    """Keep the last record of each network, in the order they first came; a skip does not replace a run."""
    records = list(records)
    runs = [record for record in records if record["outcome"] != "skipped"]
    return journal.latest([*records, *runs], ("package", "name"))


def ran(records: Iterable[Record]) -> list[Record]:
    """Leave out what could not run for reasons of its own, and networks without batch norm."""
    return [r for r in records if r["outcome"] in ("exact", "inexact", "refused")]


def summary(records: Sequence[Record]) -> str:
    """Count in a sentence."""
    runs = ran(records)
    exact, kept = sum(r["outcome"] == "exact" for r in runs), sum(bool(r["untouched"]) for r in runs)
    share = 100 * exact / max(len(runs), 1)
    return f"Of {len(runs)} networks with batch norm {exact} are exact ({share:.1f} %), and {kept} were left untouched"


def matrix(records: Sequence[Record]) -> str:
    """Lay out one row a package and domain: networks, batch norm calls, exact, how draws run."""
    groups: dict[tuple[str, str], list[Record]] = {}
    for record in ran(records):
        groups.setdefault((record["package"], record["domain"]), []).append(record)
    return render(__package__, "matrix.md.j2", groups=groups)


def table(records: Sequence[Record]) -> str:
    """Lay out every network, then what was refused, has no batch norm or could not run, with the reason."""
    versions = ", ".join(dict.fromkeys(r["torch"] for r in ran(records)))
    shown = {"summary": summary(records), "matrix": matrix(records), "torch": versions}
    return render(__package__, records=records, **shown)


def readme_matrix(records: Iterable[Record]) -> str:
    """Lay out the matrix of the networks of others alone, as the README has it."""
    records = [r for r in records if r["package"] != "mcbn"]
    refused = [r for r in ran(records) if r["outcome"] != "exact"]
    missing = {r["package"] for r in records} - {r["package"] for r in ran(records)}
    shown = {"summary": summary(records), "matrix": matrix(records), "refused": refused, "missing": sorted(missing)}
    return render(__package__, "readme.md.j2", **shown)
