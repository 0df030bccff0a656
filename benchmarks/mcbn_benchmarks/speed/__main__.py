"""Time MCBN against the loop of Algorithm 1, T plain passes and torch-uncertainty; print ratios and targets."""

import argparse
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import torch

from mcbn.errors import MCBNError
from mcbn.files import write_text
from mcbn.progress import tracked
from mcbn_benchmarks.speed import measures
from mcbn_benchmarks.speed.cases import FIT, MEMORY, speed_cases
from mcbn_benchmarks.speed.measures import Options
from mcbn_benchmarks.speed.records import Record, append, latest
from mcbn_benchmarks.speed.report import table
from mcbn_benchmarks.speed.timing import MOST_REPEATS
from mcbn_study.machine import environment

CPU_THREADS = 2
QUICK_REPEATS = 1
DEVICES = ("auto", "cpu", "cuda")
MERGED = (
    "The newest run of every case in the file beside this one, ratios within that run; the heading is the last run's."
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark and print its table."""
    bench(**vars(_parser().parse_args(arguments)))


def bench(
    *,
    out: Path | None = None,
    device: str = "auto",
    quick: bool = False,
    only: str = "",
    compile: bool = False,
    peer_path: Path | None = None,
) -> None:
    """Measure on the device asked for, or on a GPU where there is one, and print the table."""
    if device not in DEVICES:
        raise MCBNError(f"--device must be one of {', '.join(DEVICES)}; got {device!r}")
    if device == "cuda" and not torch.cuda.is_available():
        raise MCBNError("--device cuda asked, but torch sees no GPU; run with --device cpu")
    device = "cuda" if device != "cpu" and torch.cuda.is_available() else "cpu"
    options = Options(device, compile, not quick, peer_path, QUICK_REPEATS if quick else MOST_REPEATS)
    threads = torch.get_num_threads()
    try:
        if device == "cpu":
            torch.set_num_threads(1 if quick else CPU_THREADS)  # a second thread waits on a busy machine
        run(options, out, quick=quick, only=only)
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
        write_text(out / f"{name}.md", f"{MERGED}\n\n{newest}\n")
    return records


def measure(options: Options, *, quick: bool = False, only: str = "") -> Iterator[Record]:
    """Yield the records of every case whose title holds `only`."""
    work: list[tuple[str, Callable[[], Iterator[Record]]]] = [
        (case.title, partial(measures.speed, case, options)) for case in speed_cases(options.device, quick=quick)
    ]
    if not quick:
        work += [(case.title, partial(measures.memory, case, options)) for case in MEMORY]
        work += [(case.title, partial(measures.fit, case, options)) for case in FIT]
    if not quick and options.device == "cpu":
        work += [(title, partial(measures.linear, name)) for title, name in measures.LINEAR.items()]
    for make in tracked([make for title, make in work if only in title], "measuring", "case"):
        yield from make()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m mcbn_benchmarks.speed", description=__doc__)
    parser.add_argument(
        "--out", type=Path, help="folder for <device>.jsonl (appended to) and <device>.md (newest run of each case)"
    )
    parser.add_argument("--device", choices=DEVICES, default="auto", help="auto: a GPU if there is one")
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
