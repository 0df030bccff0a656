"""What is measured: speed, agreement, memory, fitting, and the sampling-free method on real data; a record each."""

import time
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import asdict, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mcbn import algorithm, data, metrics
from mcbn.engine.capture import capture
from mcbn.errors import MCBNError
from mcbn.files import write_text
from mcbn.model import MCBN
from mcbn_benchmarks.speed import cases
from mcbn_benchmarks.speed.cases import Case, Method, Prepared, fitted, peak_bytes, prepare, time_interleaved
from mcbn_benchmarks.speed.report import CRPS_DIFFERENCE, Record, table
from mcbn_study import journal, machine
from mcbn_study.machine import environment, threads, tracked

ALGORITHM_1, PLAIN, PEER, FORWARDS = "algorithm 1", "plain x T", "torch-uncertainty", "training forwards"
FOLDED, SINGLE = "folded x T", "mcbn fp32"
AGREEMENT_DRAWS = 3
PRECISION_REPEATS = 3
CPU_THREADS = 2
MEMORY_SAMPLES = (5, 500)
MEMORY_REPEATS = 3  # processes; the least counts: what the system's allocator holds back varies
LINEAR_DATA, LINEAR_SPLITS = ("boston", "concrete", "yacht", "energy"), 3


class Options(NamedTuple):
    """What the command line says about every case."""

    device: str = "cpu"
    quick: bool = False  # two cases with few draws, once each
    peer_path: Path | None = None


def run(options: Options, out: Path | None, only: str = "") -> None:
    """Measure, writing each record as it comes; print the table, and write that of the newest run of every case."""
    name = f"{options.device}-quick" if options.quick else options.device
    few = 1 if options.quick else CPU_THREADS  # a second thread waits on a busy machine
    with threads(torch.get_num_threads() if options.device == "cuda" else few):
        where, measured = environment(options.device), []
        for record in measure(options, only):
            measured.append(record)
            if out is not None:
                journal.extend(out / f"{name}.jsonl", [asdict(record) | asdict(where)])
    print(table(measured, where, quick=options.quick))
    if out is not None and measured:
        newest = table(latest(out / f"{name}.jsonl", where.hardware), where, quick=options.quick, merged=True)
        write_text(out / f"{name}.md", f"{newest}\n")


def measure(options: Options, only: str = "") -> Iterator[Record]:
    """Yield the records of every case whose title holds `only`."""
    on_gpu = options.device == "cuda"
    timed = [replace(case, n=n) for case, sizes in cases.SIZES.items() for n in sizes]
    if options.quick:
        timed = [replace(case, n_samples=cases.QUICK_SAMPLES) for case in (cases.MLP, cases.RESNET32)]
    work = [(case.title, speed(case, options)) for case in timed if on_gpu or case.name != cases.RESNET50.name]
    if not options.quick:
        work += [(case.title, precision(case, options)) for case in cases.PRECISION if on_gpu]
        work += [(case.title, memory(case, options)) for case in cases.MEMORY]
        work += [(case.title, fit(case, options)) for case in cases.FIT]
        work += [(f"linear {name}", linear(name)) for name in LINEAR_DATA if not on_gpu]
    for records in tracked([records for title, records in work if only in title], "measuring", "case"):
        yield from records


def latest(path: Path, hardware: str) -> list[Record]:
    """Read the newest finished run of every case and N on this hardware, in the order of the cases' first records.

    A case that was skipped, and so has no N, is left out once it has been measured.
    """
    names = [field.name for field in fields(Record)]
    runs: dict[tuple[str, int], dict[str, list[Record]]] = {}
    for row in journal.read(path):
        if row["hardware"] == hardware:
            by_date = runs.setdefault((row["case"], row["n"]), {})
            by_date.setdefault(row["date"], []).append(Record(**{name: row[name] for name in names}))
    newest = {key: max(by_date.items(), key=lambda run: (_done(run[1]), run[0]))[1] for key, by_date in runs.items()}
    measured = {case for (case, _), run in newest.items() if _done(run)}
    return [record for (case, n), run in newest.items() if n or case not in measured for record in run]


def _done(run: Sequence[Record]) -> bool:
    """Tell a run that measured something from one that was cut short."""
    return any(record.milliseconds is not None or record.peak_bytes is not None for record in run)


def speed(case: Case, options: Options) -> Iterator[Record]:
    """Time all methods on one case, side by side, with agreement and peak memory."""
    ready = prepare(case, options.device)
    bayes = fitted(case, ready)
    yield agreement(case, ready, bayes)
    measured = () if options.quick else ("mcbn", PLAIN)
    peaks = {name: peak_bytes(case, ready, bayes, name, options.device) for name in measured}
    methods: dict[str, Method] = {
        ALGORITHM_1: cases.Algorithm1(ready.network, ready.train, ready.query),
        PLAIN: partial(cases.forwards, ready.network, ready.query),
        "mcbn": lambda T: bayes.predict(ready.query, n_samples=T),
    }
    try:
        methods[PEER] = cases.fit_peer(case, ready, options.peer_path)
    except Exception as error:  # a foreign package may fail in any way
        yield Record(case.name, case.n, case.n_samples, PEER, note=f"cannot run: {error}")
    for record in _timed(case, methods, options):
        yield replace(record, peak_bytes=peaks.get(record.method))


def precision(case: Case, options: Options) -> Iterator[Record]:
    """Time one precision against plain passes in it, an expert's limit, and ours in single precision."""
    ready = prepare(case, options.device)
    single = fitted(case, ready)
    bayes, query = single.with_posterior(single.posterior).to(case.dtype), ready.query.to(case.dtype)
    network = deepcopy(ready.network).to(case.dtype)
    _, seconds = machine.timed(bayes.predict, query)
    laid_out = query.contiguous(memory_format=torch.channels_last)
    limit = capture(partial(cases.forwards, cases.folded(network), laid_out, case.n_samples), warm_ups=1)  # an expert's
    yield Record(case.name, case.n, case.n_samples, "first call", value=seconds, note="seconds")
    yield nearness(case, ready.query, single, bayes)
    methods: dict[str, Method] = {
        PLAIN: partial(cases.forwards, network, query),
        FOLDED: lambda T: limit(),  # T passes of the folded network in one CUDA graph, the same weights, no moments
        "mcbn": lambda T: bayes.predict(query, n_samples=T),
    }
    if case.dtype != torch.float32:
        methods[SINGLE] = lambda T: single.predict(ready.query, n_samples=T)
    yield from _timed(case, methods, options, PRECISION_REPEATS)


def nearness(case: Case, query: Tensor, single: MCBN[Any], bayes: MCBN[Any]) -> Record:
    """Compare with single precision, TF32 off: root mean square error of ours over that of the network's own code."""
    T, engine = AGREEMENT_DRAWS, bayes.engine
    with torch.no_grad(), torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        exact = torch.stack([single.engine.replay(query, t) for t in range(T)])
    with torch.no_grad():
        own = torch.stack([engine.replay(engine.network.prepare(query), t) for t in range(T)])
    errors = [(s - exact).double().square().mean().sqrt().item() for s in (bayes.sample(query, n_samples=T), own)]
    ratio, how = errors[0] / errors[1], bayes.explain(query)
    return Record(case.name, case.n, T, "error over that of its own code", value=ratio, note=how)


def _timed(
    case: Case, methods: dict[str, Method], options: Options, most_repeats: int = cases.MOST_REPEATS
) -> Iterator[Record]:
    timings = time_interleaved(methods, case.n_samples, options.device, 1 if options.quick else most_repeats)
    for name, (milliseconds, draws_timed, seconds) in timings.items():
        sizes, note = (case.name, case.n, case.n_samples), _repeated(case) if name.split()[0] in cases.WHOLE else ""
        yield Record(*sizes, name, milliseconds, draws_timed, note=note, seconds=seconds)


def _repeated(case: Case) -> str:
    few = case.recorded or case.n_samples
    return f"statistics of {few} batches, repeated" if few < case.n_samples else ""


def agreement(case: Case, ready: Prepared, bayes: MCBN[Any]) -> Record:
    """Compare a few draws with Algorithm 1 as printed under the same statistics, TF32 off: max |error| / max |f|."""
    started = time.perf_counter()
    draws, fresh = min(AGREEMENT_DRAWS, case.n_samples), bayes.with_posterior(bayes.posterior)
    with torch.no_grad(), torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        fresh.explain(ready.query)  # finds the fast way, which so few draws would not
        samples = fresh.sample(ready.query, n_samples=draws)  # (t, N, ...); its graphs have TF32 off, others on
        statistics = [bayes.posterior.draw(t) for t in range(draws)]
        pairs = [[(mean[name], var[name]) for name in mean] for mean, var in statistics]
        expected = torch.stack([algorithm.replay(ready.network, [*draw], ready.query) for draw in pairs])
    error = ((samples - expected).abs().max() / expected.abs().max()).item()
    seconds = time.perf_counter() - started
    return Record(case.name, case.n, draws, "agreement", value=error, note="relative to the largest", seconds=seconds)


def memory(case: Case, options: Options) -> Iterator[Record]:
    """Measure peak memory of mcbn at few draws and at many."""
    for n_samples in MEMORY_SAMPLES:
        started = time.perf_counter()
        sized = replace(case, n_samples=n_samples)
        ready = prepare(sized, options.device)
        bayes, repeats = fitted(sized, ready), MEMORY_REPEATS if options.device == "cpu" else 1
        peak = min(peak_bytes(sized, ready, bayes, "mcbn", options.device) for _ in range(repeats))
        seconds = time.perf_counter() - started
        yield Record(case.name, case.n, n_samples, "mcbn", peak_bytes=peak, note=_repeated(sized), seconds=seconds)


def fit(case: Case, options: Options) -> Iterator[Record]:
    """Time fitting against as many forward passes in train mode, the least that fitting could cost."""
    ready = prepare(case, options.device)
    bayes: MCBN[Any] = MCBN(ready.network, case.task)
    methods: dict[str, Method] = {
        "fit": lambda T: bayes.fit(ready.train, n_samples=T, batch_size=cases.BATCH_SIZE),
        FORWARDS: partial(cases.forwards, deepcopy(ready.network).train(), ready.train[: cases.BATCH_SIZE]),
    }
    yield from _timed(replace(case, n=cases.BATCH_SIZE), methods, options)


def linear(name: str) -> Iterator[Record]:
    """Compare the sampling-free method with sampling on test parts of a data set; time it against the loop."""
    try:
        x, y = (values.float() for values in data.load(name))
    except MCBNError as error:
        yield Record(f"linear {name}", 0, 0, "linear", note=f"skipped: {error}")
        return
    for number in range(1, LINEAR_SPLITS + 1):
        yield from _linear_split(name, x, y, number)


def _linear_split(name: str, x: Tensor, y: Tensor, number: int) -> Iterator[Record]:
    from mcbn import demo  # here: it needs matplotlib, which a GPU machine may lack

    started = time.perf_counter()
    setting = demo.SETTINGS.get(name, demo.Setting(32, 1e-5, 400))
    split = data.split(len(x), number)
    fold = data.folds(split.train)[0]
    bayes = demo.train_and_fit(x[fold.train], y[fold.train], setting, number, lambda count: None)
    bayes.tune((x[fold.validation], y[fold.validation]))
    scores = _linear_scores(bayes, x[split.test], y[split.test])
    methods: dict[str, Method] = {
        "linear": lambda T: bayes.predict(x[split.test], method="linear", n_samples=T),
        ALGORITHM_1: cases.Algorithm1(bayes.model, x[fold.train], x[split.test], setting.batch_size),
    }
    timings = time_interleaved(methods, demo.T, "cpu")
    record = partial(Record, f"linear {name}", len(split.test), demo.T, note=f"split {number}")
    seconds = time.perf_counter() - started
    yield from (record(method, value=value, seconds=seconds) for method, value in scores.items())
    for method, timing in timings.items():
        yield record(method, timing.milliseconds, timing.draws_timed, seconds=timing.seconds)


def _linear_scores(bayes: MCBN[Any], x: Tensor, y: Tensor) -> dict[str, float]:
    """Return (CRPS linear - CRPS sample) / CRPS sample, and how the epistemic standard deviations compare."""
    sample, expanded = bayes.predict(x), bayes.predict(x, method="linear")
    crps, other = (metrics.crps_gaussian(p.mean, p.variance, y).mean().item() for p in (sample, expanded))
    stds = torch.stack([sample.epistemic.sqrt(), expanded.epistemic.sqrt()])  # (2, N)
    return {
        CRPS_DIFFERENCE: (other - crps) / crps,
        "correlation of epistemic std": torch.corrcoef(stds)[0, 1].item(),
        "median ratio of epistemic std": (stds[1] / stds[0]).median().item(),
    }
