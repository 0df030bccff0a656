"""What constants and kernels of the engine rest on: work at several values of each, and narrow convolutions."""

import tomllib
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F

from mcbn.engine import constants as engine, kernels
from mcbn_benchmarks.commands import Device, Only
from mcbn_benchmarks.speed import cases
from mcbn_benchmarks.speed.cases import Case, Method, fitted, prepare, time_interleaved
from mcbn_study.journal import Record
from mcbn_study.machine import gpu_growth

TRIED = tomllib.loads(Path(__file__).with_name("constants.toml").read_text("utf-8"))
CASES = {case.name: case for case in (*cases.SIZES, *cases.PRECISION)}
prepared, fitted_once = cache(prepare), cache(fitted)  # constants share cases
SIZES = (  # C, D, height, stride, images of each draw: of ResNet-32, and of a UNet
    *((16, 16, 32, 1, 128), (32, 32, 16, 1, 128), (64, 64, 8, 1, 128), (16, 32, 32, 2, 128), (32, 64, 16, 2, 128)),
    *((16, 16, 256, 1, 1), (48, 16, 256, 1, 1), (96, 32, 128, 1, 1), (192, 64, 64, 1, 1)),
)
DRAWS, CALLS, CHECKED = 32, 50, 8  # CHECKED: images of the first draw, at most, compared with double precision


def constants(device: Device = "auto", only: Only = "", repeats: int = cases.MOST_REPEATS) -> Iterator[Record]:
    """Time work at several values of each constant, in turns; --only takes parts of names, with commas between them."""
    for name, (values, works) in TRIED[device].items():
        for work, network, n, T in works if any(part in name for part in only.split(",")) else ():
            case = replace(CASES[network], n=n, n_samples=T, recorded=None if work == "fit" else 4)
            yield from _at_values(name, values, work, case, device, repeats)


def _at_values(name: str, values: list[Any], work: str, case: Case, device: str, repeats: int) -> Iterator[Record]:
    ready, methods = prepared(case, device), dict[str, Method]()
    bayes, query = fitted_once(case, ready).to(case.dtype), ready.query.to(case.dtype)
    for value in values:
        twin = bayes.with_posterior(bayes.posterior)  # plans are made anew for each value
        first = lambda: bayes.with_posterior(bayes.posterior).predict(query)  # noqa: E731 - and here for each call
        runs: dict[str, Callable[[], object]] = {"predict": partial(twin.predict, query), "first": first}
        methods[f"{work} {value}"] = with_value(name, value, runs.get(work) or partial(fitted, case, ready))
    calls = engine.CALLS_WITHOUT_KERNELS + 1 if device == "cuda" else 0  # in turns: all compile beside each other
    grown = [[gpu_growth(partial(run, 0)) for run in methods.values()] for _ in range(calls)]
    about = {"constant": name, "work": work, "case": case.title, "n_samples": case.n_samples}
    taken = [timing.milliseconds for timing in time_interleaved(methods, case.n_samples, device, repeats).values()]
    for value, milliseconds, *peaks in zip(values, taken, *grown, strict=True):
        yield about | {"value": value, "milliseconds": milliseconds, "peak_bytes": max(peaks, default=None)}


def with_value(name: str, value: Any, run: Callable[[], object]) -> Method:
    """Give a run under another value of a constant of the engine; a list stands for a tuple."""
    constant = tuple(value) if isinstance(value, list) else value
    return mock.patch.object(engine, name, constant)(lambda _: run())


def chunks(device: Device = "cuda", only: Only = "") -> Iterator[Record]:
    """Time `predict`, and its memory, by the bound on a chunk of draws: how many values keep a GPU busy."""
    return (row for row in constants(device, "_CHUNK") if only in row["case"])


@torch.no_grad()
def narrow(device: Device = "cuda") -> Iterator[str]:
    """Time the kernel, all behind it included, beside PyTorch's convolution alone; their distance from float64."""
    normal = partial(torch.randn, generator=torch.Generator(device).manual_seed(0), device=device)
    for C, D, size, stride, images in SIZES:
        x = normal(DRAWS * images, C, size, size).relu_().contiguous(memory_format=torch.channels_last)
        weight = (normal(D, C, 3, 3) / (3 * C**0.5)).contiguous(memory_format=torch.channels_last)
        scale, shift = normal(2, DRAWS, D)
        shortcut = normal(F.conv2d(x, weight, None, stride, 1).shape).contiguous(memory_format=torch.channels_last)
        laid_out, plainly = kernels.packed(weight), partial(F.conv2d, x, weight, None, stride, 1)
        kernel = partial(kernels.narrow, x, None, 0, laid_out, None, scale, shift, slope=0.0, stride=stride, padding=1)
        runs = {"convolution": plainly, "kernel": partial(kernel, shortcut), "without shortcut": partial(kernel, None)}
        repeated = {name: lambda times, run=run: [run() for _ in range(times)] for name, run in runs.items()}
        taken = time_interleaved(repeated, CALLS, device)
        n = min(images, CHECKED)
        exact = F.conv2d(x[:n].double(), weight.double(), None, stride, 1)
        scale, shift = (table[0, :, None, None] for table in (scale, shift))
        plain, exact = (torch.relu(y * scale + shift + shortcut[:n]) for y in (plainly()[:n], exact))
        times = ", ".join(f"{name} {1000 * timing.milliseconds / CALLS:.0f} us" for name, timing in taken.items())
        errors = [float((values - exact).abs().max() / exact.abs().max()) for values in (plain, runs["kernel"]()[:n])]
        title = f"{C} -> {D} channels, {size} x {size}, stride {stride}"
        yield f"{title}: {times}; from float64 {errors[0]:.1e}, {errors[1]:.1e}"
