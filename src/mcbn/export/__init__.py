"""A fitted predictor as one graph that runs without mcbn: inputs in, moments out (`docs/serving.md`).

The T draws are constants of the graph, one scale and one shift a draw and channel: no random numbers, no training data.
Every graph is compared with `predict` before it is handed out, an ONNX file once more as onnxruntime runs it.
"""

import json
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mcbn import batches
from mcbn.engine.agree import EXPORTED, agree
from mcbn.engine.run import Engine
from mcbn.errors import MCBNError
from mcbn.export import gradients, onnx_file, passes
from mcbn.export.predictors import Classification, LinearPredictor, Regression, SamplePredictor, Summary
from mcbn.linear import Gather
from mcbn.outputs import as_float, spread
from mcbn.randomness import isolated_random

if TYPE_CHECKING:
    from mcbn.model import MCBN

CHUNK_VALUES = 2**19  # of the widest result of one pass on the example: onnxruntime is fastest while it stays in cache
MOST_VALUES = 2**29  # a wider result (2 GiB in single precision) is refused


def to_onnx(
    bayes: "MCBN[Any]",
    path: str | Path,
    example_x: Any,
    *,
    method: str = "sample",
    n_samples: int | None = None,
    chunk_size: int | None = None,
) -> None:
    """Write the predictor as one ONNX file, whole or not at all; `MCBN.export` documents the arguments."""
    path = Path(path)
    onnx_file.require_extra()
    onnx_file.require_place(path)
    program = to_torch_export(bayes, example_x, method=method, n_samples=n_samples, chunk_size=chunk_size)
    engine, T = bayes.engine_for(n_samples, chunk_size)
    inputs = engine.network.prepare(example_x)
    content = onnx_file.convert(program, input_names(inputs), _names(bayes.task), _metadata(bayes, method, T))
    arrays = dict(zip(input_names(inputs), batches.tensors_of(inputs), strict=True))
    expected = bayes.predict(inputs, method=method, n_samples=T)
    _compare(onnx_file.run(content, arrays), expected, "the file as onnxruntime runs it")
    onnx_file.write(path, content)


def to_torch_export(
    bayes: "MCBN[Any]",
    example_x: Any,
    *,
    method: str = "sample",
    n_samples: int | None = None,
    chunk_size: int | None = None,
) -> torch.export.ExportedProgram:
    """Return the predictor as a `torch.export` program: `program.module()(x)` gives a dict of results, for any batch.

    Its keys are mean, variance, epistemic, or probs, entropy, mutual_information. Arguments as for `MCBN.export`.
    """
    engine, T = bayes.engine_for(n_samples, chunk_size)
    inputs = engine.network.prepare(example_x)
    if not batches.is_plain(inputs) or not batches.tensors_of(inputs):
        raise MCBNError(f"example_x must be a tensor, or a tuple or dict of them; got {batches.describe(example_x)}")
    inputs = _at_least_two(inputs)
    with isolated_random(), torch.no_grad():
        expected = bayes.predict(inputs, method=method, n_samples=T)
        with onnx_file.quiet(), _told(engine, method):
            predictor = _predictor(bayes, engine, inputs, method, T, chunk_size)
            program = _exported(predictor, inputs)
        _compare(program.module()(inputs), expected, "the exported program")
    return program


def input_names(inputs: Any) -> list[str]:
    """Name the inputs of the graph: x, the keys of a dict, or x0, x1, ..."""
    if isinstance(inputs, Tensor):
        return ["x"]
    if isinstance(inputs, Mapping) and all(isinstance(value, Tensor) for value in inputs.values()):
        return [f"input_{key}" if key in (*Regression.names, *Classification.names) else str(key) for key in inputs]
    return [f"x{number}" for number, _ in enumerate(batches.tensors_of(inputs))]


def _names(task: str) -> tuple[str, ...]:
    return Regression.names if task == "regression" else Classification.names


def _metadata(bayes: "MCBN[Any]", method: str, T: int) -> dict[str, str]:
    from mcbn import __version__

    drawn = bayes.posterior
    return {
        "mcbn_version": __version__,
        "task": bayes.task,
        "method": method,
        "tau": json.dumps(bayes.noise_precision.tolist()),
        "n_samples": str(T),
        "batch_size": str(drawn.batch_size),
        "posterior": drawn.family,
    }


def _at_least_two(inputs: Any) -> Any:
    """Repeat a single input: an axis of size one would be taken for one that never grows."""
    N = batches.size_of(inputs)
    if N == 0:
        raise MCBNError(f"example_x holds no inputs: {batches.describe(inputs)}; give at least one")
    return inputs if N > 1 else batches.map_tensors(lambda t: torch.cat([t, t]) if passes.grows(t, 1) else t, inputs)


def _predictor(
    bayes: "MCBN[Any]", engine: Engine, inputs: Any, method: str, T: int, chunk_size: int | None
) -> nn.Module:
    """Put network, draws and moments together."""
    with Gather(engine.posterior) as mode:
        output = engine.network.run_copy(inputs)  # (N, ...)
    if output.shape[:1] != (batches.size_of(inputs),):
        raise MCBNError(f"the network gives {tuple(output.shape)} for {batches.describe(inputs)}: not one row an input")
    summary = _summary(bayes, output)
    if method == "linear":
        return _linear(bayes, engine, inputs, T, output, summary)
    parts = [part[:T] for pair in mode.drawn.values() for part in pair]  # (T, C) each
    first = [part[0] for part in parts]
    written = passes.write_down(engine.network, inputs, list(mode.drawn), first)
    chunk = _chunk(T, written.width * len(output), chunk_size)
    return SamplePredictor(written, parts, summary, chunk=chunk, output=output.shape[1:])


def _summary(bayes: "MCBN[Any]", output: Tensor) -> Summary:
    values = as_float(output)
    return (
        Regression(1 / spread(bayes.noise_precision, values))
        if bayes.task == "regression"
        else Classification(bayes.noise_precision.to(values))
    )


def _chunk(T: int, width: int, chunk_size: int | None) -> int:
    """Choose how many draws go through in one pass: a divisor of T, all of them where they are small enough."""
    if chunk_size is not None and min(chunk_size, T) * width > MOST_VALUES:
        raise MCBNError(
            f"{min(chunk_size, T)} draws in one pass make a result of {min(chunk_size, T) * width:,} values for the "
            f"example ({width:,} a draw); give a smaller chunk_size, which loops over the draws, or method='linear'"
        )
    most = chunk_size or max(1, CHUNK_VALUES // width)
    return max(size for size in range(1, min(most, T) + 1) if T % size == 0)


def _linear(
    bayes: "MCBN[Any]", engine: Engine, inputs: Any, T: int, output: Tensor, summary: Summary
) -> LinearPredictor:
    """Write down the pass and its gradient at the average statistics."""
    linearise = bayes.linearizer
    linearise(inputs, T)  # refuses what has no gradient per input
    expansion = linearise.expansion(inputs, T)
    names, points = list(expansion.centres), expansion.differentiate.points
    if missing := [name for name in names if name not in points]:
        raise MCBNError(f"example_x does not reach the layers {missing}, so they have no gradient; use method='sample'")
    centres = [part for name in names for part in (points[name].scale, points[name].shift)]  # (C,) each
    written = passes.write_down(engine.network, inputs, names, centres)
    N, D = len(output), output[0].numel()
    if max(D, expansion.chosen.n_samples) * N * written.width > MOST_VALUES:
        raise MCBNError(f"method='linear' takes {D} gradients of {N} inputs at once, too many; use method='sample'")
    crossing = written.cross(batches.tensors_of(inputs), D)
    rows = [part.expand(D * N, -1).contiguous() for part in centres]
    jacobian = gradients.write_down_gradient(written, crossing, rows)
    with Gather(expansion.chosen) as mode:
        engine.network.run_copy(inputs)
    chosen = [part for name in names for part in mode.drawn[name]]  # (K, C) each
    return LinearPredictor(written, jacobian, expansion, chosen, summary, n_outputs=D)


def _exported(predictor: nn.Module, inputs: Any) -> torch.export.ExportedProgram:
    N, batch = batches.size_of(inputs), torch.export.Dim("batch")
    axes = batches.map_tensors(lambda t: {0: batch} if passes.grows(t, N) else None, inputs)
    return torch.export.export(predictor, (inputs,), dynamic_shapes=(axes,), strict=False)


@contextmanager
def _told(engine: Engine, method: str) -> Iterator[None]:
    """Say of a network that cannot be written down where its own code stands in the way."""
    try:
        yield
    except MCBNError:
        raise
    except Exception as error:
        name = type(engine.network.module).__name__
        reason = str(error).strip().split("\n")[0]
        by_values = "data-dependent" in str(error) or "DataDependent" in type(error).__name__
        what = "its control flow depends on the values of its inputs" if by_values else reason
        hint = "" if method == "sample" else "; method='sample' may still work"
        raise MCBNError(f"{name} cannot be exported as one graph{_place(error)}: {what}{hint}") from error


def _place(error: Exception) -> str:
    """Find the last line of foreign code that led to an error."""
    own = (str(Path(__file__).parents[1]), str(Path(torch.__file__).parent), "<")
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(own)]
    frames = [frame for frame in frames if "contextlib" not in frame.filename]
    if not frames:
        return ""
    last = frames[-1]
    return f" (line {last.lineno} of {last.filename}, `{last.line}`)"


def _compare(values: Mapping[str, Tensor], expected: Any, what: str) -> None:
    """Refuse a graph whose numbers are not those of `predict`."""
    for name, value in values.items():
        scale = expected.entropy.abs().max() if name == "mutual_information" else None  # a difference of entropies
        if not agree(value, getattr(expected, name), EXPORTED, scale=scale):
            raise MCBNError(
                f"{what} gives another {name} than predict, so nothing was exported; a network whose outputs depend on "
                "which inputs run beside them may still work with chunk_size=1"
            )
