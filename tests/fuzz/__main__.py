"""`python -m fuzz networks|files|kills`: try to break mcbn at random; append what came of it to a record."""

import argparse
import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from mcbn_study.machine import environment


def main() -> None:
    parser = argparse.ArgumentParser(prog="fuzz", description=__doc__)
    parser.add_argument("what", choices=["networks", "files", "kills"])
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--first", type=int, default=0, help="seed of the first")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after so long")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--no-tf32", action="store_true", help="on a GPU, round to single precision alone")
    parser.add_argument("--out", type=Path, help="a jsonl file to append one line to")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.backends.cudnn.allow_tf32 = not options.no_tf32
    start, counts, failures = time.monotonic(), dict[str, int](), list[dict[str, Any]]()
    for seed in range(options.first, options.first + options.count):
        if time.monotonic() - start > options.seconds:
            break
        try:
            came = check(options.what, seed, options.device).split(":")[0]
        except Exception as error:
            came, failures = "failed", [*failures, {"seed": seed, "error": f"{type(error).__name__}: {error}"[:500]}]
            print(f"seed {seed}: {type(error).__name__}: {error}", flush=True)
        counts[came] = counts.get(came, 0) + 1
    line = {
        "what": options.what,
        "first": options.first,
        "tf32": torch.backends.cudnn.allow_tf32,
        **counts,
        "failures": failures,
    }
    line |= {"seconds": round(time.monotonic() - start, 1), **asdict(environment(options.device))}
    print(json.dumps(line))
    if options.out is not None:
        with options.out.open("a") as record:
            record.write(json.dumps(line) + "\n")
    raise SystemExit(1 if failures else 0)


def check(what: str, seed: int, device: str) -> str:
    from fuzz import files, kills, networks

    return networks.check(seed, device) if what == "networks" else (files if what == "files" else kills).check(seed)


if __name__ == "__main__":
    main()
