"""Examine one network: are draws exact, is the fast path the plain loop, is the network as it was?

Exact means: a draw recorded by mcbn holds the statistics, and predicting its own batch with it gives the outputs, of a
hand-made training pass, which knows nothing of mcbn: a copy of the network, its batch norm modules alone in train
mode, run on that batch, the mean and biased variance of every module's input taken beside it.
"""

import copy
import importlib.metadata
import importlib.util
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from mcbn.batching import rows_of_draw
from mcbn.errors import MCBNError
from mcbn.model import MCBN
from mcbn_benchmarks.zoo.by_hand import batch, call, first_tensor, hand_made, plain_loop, settle
from mcbn_benchmarks.zoo.entries import Case, Entry

DRAWS = 2
QUERIES = 2  # inputs the fast path is compared on
TOLERANCE = {"float64": 1e-9, "float32": 1e-4}  # relative to the largest value; single is tried first


@dataclass(frozen=True)
class Finding:
    """What was found of one network; errors relative to the largest value."""

    package: str
    version: str
    domain: str
    name: str
    outcome: str  # "exact", "inexact", "refused" (an MCBNError), "no batch norm", "skipped"
    reason: str = ""
    dtype: str = ""
    layers: int = 0  # batch norm calls of one pass
    statistics_error: float | None = None  # recorded against hand-made
    output_error: float | None = None
    fast_error: float | None = None  # as `sample` runs it against the plain loop
    way: str = ""  # how `sample` runs it
    untouched: bool = True
    seconds: float = 0.0


def examine(entry: Entry, *, absent: Sequence[str] = ()) -> Finding:
    """Build a network and check it; whatever goes wrong is part of the finding. `absent`: packages stood in for."""
    about: dict[str, Any] = {
        "package": entry.package,
        "version": version(entry.package),
        "domain": entry.domain,
        "name": entry.name,
    }
    if entry.package in absent or importlib.util.find_spec(entry.package) is None:
        return Finding(**about, outcome="skipped", reason=f"{entry.package} is not installed")
    start = time.perf_counter()
    with warnings.catch_warnings(), torch.random.fork_rng():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        try:
            case = entry.build()
            settle(case)
        except Exception as error:  # the package's own trouble, before mcbn has a part in it
            return Finding(**about, outcome="skipped", reason=f"cannot be built or run: {_short(error)}")
        found = _examine(case)
        if found["outcome"] == "inexact" and "reason" not in found:
            found = _examine_double(case, found)
    return Finding(**about, **found, seconds=round(time.perf_counter() - start, 2))


def _examine_double(case: Case, single: dict[str, Any]) -> dict[str, Any]:
    """Examine again in double precision: is it rounding, which untrained networks amplify, or a mistake?"""
    try:
        double = _double(case)
        call(double.model, batch(double, range(QUERIES)))
    except Exception as error:
        return single | {"reason": f"cannot run in double precision: {_short(error)}"}
    found = _examine(double)
    return {"reason": "beyond rounding" if found["outcome"] == "inexact" else ""} | found


def version(package: str) -> str:
    """Return the version of a package, "" where it is not installed."""
    names = importlib.metadata.packages_distributions().get(package, [])
    return importlib.metadata.version(names[0]) if names else ""


def _double(case: Case) -> Case:
    """Bring a network and its examples to double precision."""
    x = case.x.double() if isinstance(case.x, Tensor) else [example.clone().apply(_double_one) for example in case.x]
    return Case(copy.deepcopy(case.model).double(), x, case.batch_size, case.collate)


def _double_one(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def _examine(case: Case) -> dict[str, Any]:
    before = state(case.model)
    try:
        found = compare(case)
    except MCBNError as error:
        none = not any(isinstance(module, _BatchNorm) for module in case.model.modules())
        found = {"outcome": "no batch norm" if none else "refused", "reason": _short(error)}
    except Exception as error:
        found = {"outcome": "inexact", "reason": f"{type(error).__name__}: {_short(error)}"}
    untouched = state(case.model) == before
    return found | {"untouched": untouched}


def compare(case: Case) -> dict[str, Any]:
    """Compare draws with hand-made training passes, and the way `sample` takes with the plain loop."""
    data = case.x if case.collate is None else _loader(case)
    inputs = None if case.collate is None else _whole
    bayes: MCBN[Any] = MCBN(case.model, "classification", output=first_tensor, inputs=inputs)
    bayes.fit(data, n_samples=DRAWS, batch_size=case.batch_size)
    by_hand = [hand_made(case, rows_of_draw(len(case.x), case.batch_size, 0, t)) for t in range(DRAWS)]
    with torch.no_grad():
        outputs = [bayes.sample(b, chunk_size=1)[t] for t, (b, _, _) in enumerate(by_hand)]
        query = batch(case, range(QUERIES))
        fast, loop = bayes.sample(query), plain_loop(bayes, query)
    drawn = [bayes.posterior.draw(t) for t in range(DRAWS)]
    errors = {
        "statistics_error": max(_statistics_error(*own, hand[1]) for own, hand in zip(drawn, by_hand, strict=True)),
        "output_error": max(relative(found, hand[2]) for found, hand in zip(outputs, by_hand, strict=True)),
        "fast_error": relative(fast, loop),
    }
    dtype = str(loop.dtype).removeprefix("torch.")
    exact = all(error <= TOLERANCE[dtype] for error in errors.values())
    return errors | {
        "outcome": "exact" if exact else "inexact",
        "dtype": dtype,
        "layers": len(bayes.posterior.layers),
        "way": _way(bayes.explain(query)),
    }


def _statistics_error(mean: dict[str, Tensor], var: dict[str, Tensor], hand: dict[str, tuple[Tensor, Tensor]]) -> float:
    """Return the largest error of recorded statistics; every call seen by hand must have been recorded."""
    if set(mean) != set(hand):
        raise AssertionError(f"recorded calls differ from those made: {sorted(set(mean) ^ set(hand))[:3]}")
    means = max(float((mean[n] - m).abs().max() / v.sqrt().max().clamp(min=1e-6)) for n, (m, v) in hand.items())
    return max(means, *(relative(var[n], v) for n, (_, v) in hand.items()))


def relative(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference relative to the largest value; infinite where shapes or NaN differ."""
    if found.shape != expected.shape:
        return float("inf")
    error = float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-12))
    return error if error == error else float("inf")


def state(model: nn.Module) -> list[Any]:
    """Collect what must be bit-identical afterwards: tensors, modes, hooks, attributes."""
    tensors = [
        (n, t.data_ptr(), t.detach().cpu().numpy().tobytes()) for n, t in model.state_dict(keep_vars=True).items()
    ]
    modules = [
        (name, module.training, len(module._forward_hooks), len(module._forward_pre_hooks), sorted(vars(module)))
        for name, module in model.named_modules()
    ]
    return [tensors, modules]


def _loader(case: Case) -> torch.utils.data.DataLoader[Any]:
    return torch.utils.data.DataLoader(case.x, batch_size=case.batch_size, collate_fn=case.collate)


def _whole(batch: Any) -> Any:
    return batch


def _way(sentence: str) -> str:
    """Shorten what `explain` says to how the draws run."""
    if "because " in sentence:
        return "loop: " + sentence.split("because ", 1)[1].rstrip(".")
    return sentence.split(": ", 1)[1].split(";")[0]


def _short(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) < 240 else text[:237] + "..."
