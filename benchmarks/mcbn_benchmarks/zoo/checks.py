"""Examine one network: are draws exact, is the fast path the plain loop, is the network as it was?

Exact means: a draw recorded by mcbn holds the statistics that Algorithm 1 as printed (`mcbn.algorithm`) records of its
batch; predicting that batch with it gives the outputs of a training pass made by hand, a copy of the network with its
batch norm modules alone in train mode; and the way `sample` takes gives what Algorithm 1 gives, draw by draw.
"""

import copy
import importlib.metadata
import importlib.util
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from mcbn import algorithm, batches
from mcbn.batching import Generators
from mcbn.errors import MCBNError, one_line
from mcbn.model import MCBN
from mcbn.private_torch import AnyBatchNorm, hooks_of
from mcbn_benchmarks.zoo.entries import Entry, Specimen, all_entries
from mcbn_benchmarks.zoo.standin import standing_in
from mcbn_study.journal import Journal, Record
from mcbn_study.machine import environment, one_thread

SETTLING = 2  # training passes before the check, so that running statistics are not those of no data
DRAWS = 2
QUERIES = 2  # inputs the fast path is compared on
TOLERANCE = {"float64": 1e-9, "float32": 1e-4}  # relative to the largest value; single is tried first


# What a record says of a network until it was examined. Then its outcome is "exact", "inexact", "refused" (by an error
# of mcbn) or "no batch norm"; layers: batch norm calls of one pass; way: how `sample` runs it.
UNSEEN: Record = {"outcome": "skipped", "reason": "", "dtype": "", "layers": 0}
UNSEEN |= dict.fromkeys(("statistics_error", "output_error", "fast_error"))
UNSEEN |= {"way": "", "untouched": True, "seconds": 0.0}


def run(out: Path, *, only: str = "", again: bool = False) -> None:
    """Examine every entry whose title holds `only`, one record each; what is on record is not run again."""
    journal = Journal(out)
    known = {(r["package"], r["version"], r["name"]) for r in journal.records if r["outcome"] != "skipped"}
    with one_thread("cpu"), standing_in() as stood_in:
        where = asdict(environment("cpu"))
        for entry in all_entries():
            if only in entry.title and (again or (entry.package, version(entry.package), entry.name) not in known):
                found = examine(entry, absent=stood_in)
                journal.append([found | {"stand_ins": stood_in} | where])
                print(f"{entry.title}: {found['outcome']} {found['reason']} {found['seconds']} s", flush=True)


def examine(entry: Entry, *, absent: Sequence[str] = ()) -> Record:
    """Build a network and check it; whatever goes wrong is part of the record. `absent`: packages stood in for."""
    about = {"package": entry.package, "version": version(entry.package), "domain": entry.domain, "name": entry.name}
    found = about | UNSEEN
    if entry.package in absent or importlib.util.find_spec(entry.package) is None:
        return found | {"reason": f"{entry.package} is not installed"}
    start = time.perf_counter()
    with warnings.catch_warnings(action="ignore"), torch.random.fork_rng():
        torch.manual_seed(0)
        try:
            specimen = entry.build()
            settle(specimen)
        except Exception as error:  # the package's own trouble, before mcbn has a part in it
            return found | {"reason": f"cannot be built or run: {one_line(error)[:240]}"}
        result = _examine(specimen)
        if result["outcome"] == "inexact" and "reason" not in result:
            result = _examine_double(specimen, result)
    return found | result | {"seconds": round(time.perf_counter() - start, 2)}


def settle(specimen: Specimen) -> None:
    """Run batches with batch norm in train mode, so that running statistics fit the examples; end in eval mode."""
    with torch.no_grad():
        for t in range(SETTLING):
            rows = Generators(1).rows(len(specimen.x), specimen.batch_size, t)
            call(norms_in_training(specimen.model), batch(specimen, rows))
    specimen.model.eval()


def norms_in_training(model: nn.Module) -> nn.Module:
    """Put batch norm modules alone into train mode."""
    model.eval()
    for module in model.modules():
        if isinstance(module, AnyBatchNorm):
            module.training = True
    return model


def batch(specimen: Specimen, rows: Any) -> Any:
    """Take examples by number: one tensor, or what their collate makes of them."""
    x, collate = specimen.x, specimen.collate
    return x[rows] if collate is None else collate([x[int(row)] for row in rows])


def call(model: nn.Module, inputs: Any) -> Tensor:
    """Run a network as its author does, on a copy of the inputs; its first tensor is its output."""
    inputs = batches.map_tensors(torch.clone, inputs)
    return _first(model(*inputs) if isinstance(inputs, tuple) else model(inputs))


def _first(outputs: Any) -> Tensor:
    return batches.tensors_of(outputs)[0]


def _examine_double(specimen: Specimen, single: Record) -> Record:
    """Examine again in double precision: is it rounding, which untrained networks amplify, or a mistake?"""
    x, widened = specimen.x, lambda tensor: tensor.double() if tensor.is_floating_point() else tensor
    try:
        x = x.double() if isinstance(x, Tensor) else [example.clone().apply(widened) for example in x]
        double = specimen._replace(model=copy.deepcopy(specimen.model).double(), x=x)
        call(double.model, batch(double, range(QUERIES)))
    except Exception as error:
        return single | {"reason": f"cannot run in double precision: {one_line(error)[:240]}"}
    result = _examine(double)
    return {"reason": "beyond rounding" if result["outcome"] == "inexact" else ""} | result


def version(package: str) -> str:
    """Return the version of a package, "" where it is not installed."""
    names = importlib.metadata.packages_distributions().get(package, [])
    return importlib.metadata.version(names[0]) if names else ""


def _examine(specimen: Specimen) -> Record:
    before = state(specimen.model)
    try:
        result = compare(specimen)
    except MCBNError as error:
        none = not any(isinstance(module, AnyBatchNorm) for module in specimen.model.modules())
        result = {"outcome": "no batch norm" if none else "refused", "reason": one_line(error)[:240]}
    except Exception as error:
        result = {"outcome": "inexact", "reason": one_line(error)[:240]}
    return result | {"untouched": state(specimen.model) == before}


def compare(specimen: Specimen) -> Record:
    """Compare draws with Algorithm 1 and with training passes, and the way `sample` takes with Algorithm 1."""
    x, M, collate = specimen.x, specimen.batch_size, specimen.collate
    bayes: MCBN[Any] = MCBN(specimen.model, "classification", output=_first, inputs=collate and (lambda batch: batch))
    bayes.fit(DataLoader(x, batch_size=M, collate_fn=collate) if collate else x, n_samples=DRAWS, batch_size=M)
    query = batch(specimen, range(QUERIES))
    with torch.no_grad():
        statistics, outputs, loop = zip(*(_check_draw(specimen, bayes, t, query) for t in range(DRAWS)), strict=True)
        how, _, why = bayes.explain(query).partition("because ")  # finds the fast way, which so few draws would not
        fast = relative(bayes.sample(query), torch.stack(loop))
    way = f"loop: {why.rstrip('.')}" if why else how.split(": ", 1)[1].split(";")[0]
    dtype = str(loop[0].dtype).removeprefix("torch.")
    errors = {"statistics_error": max(statistics), "output_error": max(outputs), "fast_error": fast}
    outcome = "exact" if max(errors.values()) <= TOLERANCE[dtype] else "inexact"
    return {"outcome": outcome, "dtype": dtype, "layers": len(bayes.posterior.layers), **errors, "way": way}


def _check_draw(specimen: Specimen, bayes: MCBN[Any], t: int, query: Any) -> tuple[float, float, Tensor]:
    """Return the errors of a draw's statistics and of its batch's outputs, and the query's by Algorithm 1, (N, ...)."""
    network: Any = partial(call, copy.deepcopy(specimen.model))  # its own code may change its weights
    inputs = batch(specimen, Generators(0).rows(len(specimen.x), specimen.batch_size, t))
    expected = algorithm.record(network, inputs)
    (mean, var), calls = bayes.posterior.draw(t), sum(statistics is not None for statistics in expected)
    if len(mean) != calls:
        raise AssertionError(f"recorded calls differ from those made: {len(mean)} of {calls}, {list(mean)[:3]}")
    recorded = zip(mean.values(), var.values(), strict=True)
    draw = [None if statistics is None else next(recorded) for statistics in expected]  # in the order of the calls
    training = call(norms_in_training(copy.deepcopy(specimen.model)), inputs)
    output_error = relative(bayes.sample(inputs, chunk_size=1)[t], training)
    pairs = [(*a, *b) for a, b in zip(draw, expected, strict=True) if a is not None and b is not None]
    means = [float((mean - m).abs().max() / v.sqrt().max().clamp(min=1e-6)) for mean, _, m, v in pairs]  # in stds
    statistics_error = max(*means, *(relative(var, v) for _, var, _, v in pairs))
    return statistics_error, output_error, algorithm.replay(network, draw, query)


def relative(values: Tensor, expected: Tensor) -> float:
    """Return the largest difference relative to the largest value; infinite where shapes or NaN differ."""
    if values.shape != expected.shape:
        return float("inf")
    error = float((values - expected).abs().max() / expected.abs().max().clamp(min=1e-12))
    return error if error == error else float("inf")


def state(model: nn.Module) -> list[Any]:
    """Collect what must be bit-identical afterwards: tensors, modes, hooks, attributes."""
    held, modules = model.state_dict(keep_vars=True).items(), model.named_modules()
    tensors = [(name, tensor.data_ptr(), tensor.detach().cpu().numpy().tobytes()) for name, tensor in held]
    return [tensors, [(name, m.training, sorted(vars(m)), len(hooks_of(m))) for name, m in modules]]
