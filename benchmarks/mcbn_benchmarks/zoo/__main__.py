"""Run mcbn over networks that others wrote; one record each, a table, and the matrix of the README."""

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from mcbn.files import write_text
from mcbn_benchmarks.zoo.checks import examine, version
from mcbn_benchmarks.zoo.entries import all_entries
from mcbn_benchmarks.zoo.standin import standing_in
from mcbn_benchmarks.zoo.table import latest, ran, table, write_readme
from mcbn_study import journal
from mcbn_study.machine import environment

RECORDS = "records.jsonl"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the zoo and print its table; an inexact or touched network makes it fail."""
    chosen = _parser().parse_args(arguments)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        run(chosen.out, only=chosen.only, again=chosen.again)
    finally:
        torch.set_num_threads(threads)
    found = latest(journal.read(chosen.out / RECORDS))
    write_text(chosen.out / "table.md", table(found))
    if chosen.readme:
        write_readme(chosen.readme, found)
    print(table(found))
    failed = [f"{r['package']}/{r['name']}" for r in ran(found) if r["outcome"] == "inexact" or not r["untouched"]]
    if failed:
        raise SystemExit(f"not exact, or not left untouched: {', '.join(failed)}")


def run(out: Path, *, only: str = "", again: bool = False) -> None:
    """Examine every entry whose title holds `only`, one record each; what is on record is not run again."""
    known = {(r["package"], r["version"], r["name"]) for r in journal.read(out / RECORDS) if r["outcome"] != "skipped"}
    where = environment("cpu")
    with standing_in() as stood_in:
        for entry in all_entries():
            if only not in entry.title or ((entry.package, version(entry.package), entry.name) in known and not again):
                continue
            found = asdict(examine(entry, absent=stood_in))
            journal.append(out / RECORDS, found | {"stand_ins": stood_in} | asdict(where))
            print(f"{entry.title}: {found['outcome']} {found['reason']} {found['seconds']} s", flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m mcbn_benchmarks.zoo", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("results/zoo"), help="folder of records.jsonl and table.md")
    parser.add_argument("--only", default="", help='entries whose title holds this, such as "timm" or "monai/UNet"')
    parser.add_argument("--again", action="store_true", help="run also what is on record already")
    parser.add_argument("--readme", type=Path, help="write the matrix of what works into this README")
    return parser


if __name__ == "__main__":
    main()
