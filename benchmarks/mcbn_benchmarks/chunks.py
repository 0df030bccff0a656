"""How many values of a pass keep a GPU busy: time and memory of `predict` by the bound on a chunk of draws.

`mcbn.engine.plan.GPU_CHUNK`, and `GPU_CHUNK_FLAT` without convolutions, should be the least that cost no time.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

from mcbn.engine import plan as plans
from mcbn.model import MCBN
from mcbn_benchmarks.speed.cases import MLP, RESNET32, RESNET50, UNET, Case, Ours, fitted, prepare
from mcbn_benchmarks.speed.timing import peak_bytes, time_interleaved

EXPONENTS = (20, 22, 23, 24, 25, 27)
CASES = (
    *(replace(MLP, n=n) for n in (100, 2000, 20_000)),
    *(replace(RESNET32, n=n, recorded=4) for n in (1, 32, 256)),
    *(replace(UNET, n=n) for n in (1, 8)),
    *(replace(RESNET50, n=n, recorded=4) for n in (1, 32)),
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print one line a case and bound."""
    parser = argparse.ArgumentParser(prog="python -m mcbn_benchmarks.chunks", description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda", help="cpu: to see that it runs")
    parser.add_argument("--only", default="", help="cases whose title holds this")
    chosen = parser.parse_args(arguments)
    for case in CASES:
        if chosen.only in case.title:
            for line in sweep(case, chosen.device):
                print(line, flush=True)


def sweep(case: Case, device: str) -> Iterator[str]:
    """Time one case at every bound."""
    ready = prepare(case, device)
    drawn = fitted(case, ready)
    names = ("GPU_CHUNK", "GPU_CHUNK_FLAT") if device == "cuda" else ("CPU_CHUNK",)
    for exponent in EXPONENTS:
        with mock.patch.multiple(plans, **dict.fromkeys(names, 2**exponent)):
            bayes: MCBN[Any] = MCBN(ready.network, case.task).fit(ready.train, n_samples=2, batch_size=2)
            bayes.posterior = drawn.posterior  # plans are made anew for each bound
            peak = peak_bytes(case, ready, bayes, "mcbn", device)
            timing = time_interleaved(
                {"mcbn": Ours(bayes, ready.query)}, case.n_samples, device, whole=frozenset({"mcbn"})
            )
        taken = timing["mcbn"].milliseconds
        yield f"{case.title} T={case.n_samples} 2^{exponent}: {taken:.3f} ms, {peak / 2**20:.1f} MiB"


if __name__ == "__main__":
    main()
