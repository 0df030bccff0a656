"""Time MCBN against the loop of Algorithm 1, T plain passes and torch-uncertainty; print ratios and targets."""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from mcbn.bench import measures
from mcbn.bench.cases import FIT, MEMORY, speed_cases
from mcbn.bench.measures import Options
from mcbn.bench.records import Record, append, environment, latest
from mcbn.bench.report import table
from mcbn.bench.timing import MOST_REPEATS
from mcbn.errors import MCBNError

CPU_THREADS = 2
QUICK_REPEATS = 1
MERGED = (
    "The newest run of every case in the file beside this one, ratios within that run; the heading is the last run's."
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark and print its table."""
    chosen = _parser().parse_args(arguments)
    if chosen.device == "cuda" and not torch.cuda.is_available():
        raise MCBNError("--device cuda asked, but torch sees no GPU; run with --device cpu")
    repeats = QUICK_REPEATS if chosen.quick else MOST_REPEATS
    options = Options(chosen.device, chosen.compile, not chosen.quick, chosen.peer_path, repeats)
    threads = torch.get_num_threads()
    try:
        if chosen.device == "cpu":
            torch.set_num_threads(1 if chosen.quick else CPU_THREADS)  # a second thread waits on a busy machine
        run(options, chosen.out, quick=chosen.quick, only=chosen.only)
    finally:
        torch.set_num_threads(threads)


def run(options: Options, out: Path | None, *, quick: bool = False, only: str = "") -> list[Record]:
    """Measure, writing each record as it comes; print the table, and write that of the newest run of every case."""
    where, records = environment(options.device), []
    name = f"{options.device}-quick" if quick else options.device
    for record in measure(options, quick=quick, only=only):
        records.append(record)
        if out is not None:
            append(out / f"{name}.jsonl", [record], where)
    print(table(records, where))
    if out is not None and records:
        newest = table(latest(out / f"{name}.jsonl", where), where)
        (out / f"{name}.md").write_text(f"{MERGED}\n\n{newest}\n")
    return records


def measure(options: Options, *, quick: bool = False, only: str = "") -> Iterator[Record]:
    """Yield the records of every case whose title holds `only`."""
    for case in speed_cases(options.device, quick=quick):
        if only in case.title:
            yield from measures.speed(case, options)
    if quick:
        return
    for case in MEMORY:
        if only in case.title:
            yield from measures.memory(case, options)
    for case in FIT:
        if only in case.title:
            yield from measures.fit(case, options)
    for title, name in measures.LINEAR.items():
        if only in title and options.device == "cpu":
            yield from measures.linear(name)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="mcbn bench", description=__doc__)
    parser.add_argument(
        "--out", type=Path, help="folder for <device>.jsonl (appended to) and <device>.md (newest run of each case)"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where to run (default: cpu)")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="two cases with few draws, to see that it runs; files are called <device>-quick",
    )
    parser.add_argument(
        "--only", default="", help='cases whose title holds this, such as "mlp", "unet N=8", "memory", "fit", "linear"'
    )
    parser.add_argument("--compile", action="store_true", help="time predict(compile=True) too")
    parser.add_argument("--peer-path", type=Path, help="folder that torch-uncertainty was installed into")
    return parser


if __name__ == "__main__":
    main()
