"""A fitted predictor as one graph that runs without mcbn: inputs in, moments out (`docs/serving.md`).

The T draws are constants of the graph, one scale and one shift a draw and channel: no random numbers, no training data.
Every graph is compared with `predict` before it is handed out, an ONNX file once more as onnxruntime runs it.
"""

import importlib
import importlib.util
import json
import logging
import re
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mcbn import __version__, batches
from mcbn.engine.agree import EXPORTED, agree
from mcbn.engine.run import Engine
from mcbn.errors import MCBNError, MissingExtraError
from mcbn.export import predictors
from mcbn.export.predictors import PROMISED, RESULTS, summary_of
from mcbn.export.tracing import grows, trace_open
from mcbn.field.watch import Watch
from mcbn.files import replacing, require_folder
from mcbn.linear import Gather
from mcbn.model import MCBN
from mcbn.network import Network
from mcbn.randomness import isolated_random

CHUNK_VALUES = 2**19  # of the widest result of one pass on the example: onnxruntime is fastest while it stays in cache
MOST_VALUES = 2**29  # a wider result (2 GiB in single precision) is refused
MOST_BYTES = 2**31 - 2**20  # of one protobuf file
OPSET = 20
PACKAGES = ("onnx", "onnxscript", "onnxruntime")
LOGGERS = ("torch.onnx", "torch.export", "onnxscript", "onnx_ir")


def to_torch_export(
    bayes: MCBN[Any],
    example_x: Any,
    *,
    method: str = "sample",
    n_samples: int | None = None,
    chunk_size: int | None = None,
    level: float | None = None,
) -> torch.export.ExportedProgram:
    """Return the predictor as a `torch.export` program: `program.module()(x)` gives a dict of results, for any batch.

    Its keys are mean, variance, epistemic, or probs, entropy, mutual_information; with a calibration low and high, or
    set. Arguments as for `MCBN.export`.
    """
    if bayes.noise == "head":
        raise MCBNError('a network with noise="head" is not exported; export one that gives means alone')
    engine, T = bayes.engine_for(n_samples, chunk_size)
    inputs = engine.network.prepare(example_x)
    engine.network.settle(inputs)
    if not batches.is_plain(inputs) or not batches.tensors_of(inputs):
        raise MCBNError(f"example_x must be a tensor, or a tuple or dict of them; got {batches.describe(example_x)}")
    if batches.size_of(inputs) == 0:
        raise MCBNError(f"example_x holds no inputs: {batches.describe(inputs)}; give at least one")
    inputs, level = at_least_two(inputs), _level(bayes, level)
    with isolated_random(), torch.no_grad():
        expected = bayes.predict(inputs, method=method, n_samples=T)
        with quiet(), told(engine.network, method):
            members = [_predictor(each, inputs, method, T, chunk_size) for each in getattr(bayes, "members", [bayes])]
            kept, like = expected.calibration, expected.mean if bayes.task == "regression" else expected.probs
            threshold = None if level is None else kept.thresholds(level, like)
            program = as_program(predictors.WholePredictor(members, kept, threshold), inputs)
        _compare(program.module()(inputs), expected, "the exported program", level)
    return program


def at_least_two(inputs: Any) -> Any:
    """Repeat a single input: an axis of size one would be taken for one that never grows."""
    if batches.size_of(inputs) > 1:
        return inputs
    return batches.map_tensors(lambda t: torch.cat([t, t]) if grows(t, 1) else t, inputs)


def as_program(graph: nn.Module, inputs: Any, *, fixed: bool = False) -> torch.export.ExportedProgram:
    """Export a module of prepared inputs, with their number left open unless it is fixed."""
    N, batch = batches.size_of(inputs), torch.export.Dim("batch")
    axes = batches.map_tensors(lambda t: {0: batch} if grows(t, N) and not fixed else None, inputs)
    return torch.export.export(graph, (inputs,), dynamic_shapes=(axes,), strict=False)


def to_onnx(bayes: MCBN[Any], path: str | Path, example_x: Any, *, method: str = "sample", **how: Any) -> None:
    """Write the predictor as one ONNX file, whole or not at all; `MCBN.export` documents the arguments."""
    path = require_exportable(path)
    program, level = to_torch_export(bayes, example_x, method=method, **how), _level(bayes, how.get("level"))
    engine, T = bayes.engine_for(how.get("n_samples"))
    inputs = engine.network.prepare(example_x)
    outputs = RESULTS[bayes.task] + (() if level is None else PROMISED[bayes.task])
    metadata = {"mcbn_version": __version__, "task": bayes.task, "method": method, "n_samples": str(T)}
    metadata |= {"batch_size": str(bayes.posterior.batch_size), "posterior": bayes.posterior.family}
    metadata |= {"tau": json.dumps(bayes.noise_precision.tolist())}
    metadata |= {} if level is None else {"level": json.dumps(level)}
    content, results = convert(program, inputs, outputs, metadata)
    _compare(results, bayes.predict(inputs, method=method, n_samples=T), "the file as onnxruntime runs it", level)
    with replacing(path) as temporary:
        temporary.write_bytes(content)


def watch_to_onnx(watch: Watch, path: str | Path, example_x: Any, *, each: bool) -> None:
    """Write a watch as an ONNX file, whole or not at all; `Watch.export` documents the arguments."""
    path = require_exportable(path)
    watch.require_inputs(example_x)
    inputs = watch.network.prepare(example_x)
    inputs = at_least_two(inputs) if each else inputs
    with torch.inference_mode(False), torch.no_grad(), quiet(), told(watch.network, "watch"):
        program = as_program(predictors.Watcher(watch, inputs, each).eval(), inputs, fixed=not each)
    metadata = {"mcbn_version": __version__, "false_alarms": str(watch.false_alarms)}
    content, results = convert(program, inputs, ("distance", "p_value"), metadata)
    expected = watch.novelty(inputs).distance if each else torch.tensor([watch(inputs).distance])
    if not agree(results["distance"].float(), expected.cpu().float(), EXPORTED):
        raise MCBNError("the file as onnxruntime runs it gives another distance than the watch; nothing was exported")
    with replacing(path) as temporary:
        temporary.write_bytes(content)


def require_exportable(path: str | Path) -> Path:
    """Refuse a place where no ONNX file can be written, or missing packages."""
    if missing := [name for name in PACKAGES if importlib.util.find_spec(name) is None]:
        raise MissingExtraError(f"exporting to ONNX needs {', '.join(missing)}; pip install 'mcbn[export]'")
    require_folder(Path(path))
    if Path(path).is_dir():
        raise MCBNError(f"cannot export to {path}: it is a folder; give the name of a file in it")
    return Path(path)


def input_names(inputs: Any) -> list[str]:
    """Name the inputs of the graph: x, the keys of a dict, or x0, x1, ..."""
    if isinstance(inputs, Tensor):
        return ["x"]
    if isinstance(inputs, Mapping) and all(isinstance(value, Tensor) for value in inputs.values()):
        taken = [name for names in (*RESULTS.values(), *PROMISED.values()) for name in names]
        return [f"input_{key}" if key in taken else str(key) for key in inputs]
    return [f"x{number}" for number, _ in enumerate(batches.tensors_of(inputs))]


def _level(bayes: MCBN[Any], level: float | None) -> float | None:
    """Choose the level of the intervals or sets to export; None where there is no calibration."""
    kept = bayes.calibration
    if kept is not None and kept.score != "quantile" and kept.by != "group" and not kept.randomized:
        return kept.level if level is None else level
    if level is None:
        return None
    if kept is None:
        raise MCBNError(f"level={level} needs a calibration to promise it; call calibrate(held_out_data) before")
    fault = "one graph cannot hold this calibration: each call needs all draws (quantile), group numbers or random ones"
    raise MCBNError(f'{fault}; calibrate with "std", "absolute", "aps", "raps" or "lac", or export without level=')


def _predictor(bayes: MCBN[Any], inputs: Any, method: str, T: int, chunk: int | None) -> Any:
    engine, _ = bayes.engine_for(T, chunk)
    with Gather(engine.posterior) as mode:
        output = engine.network.run_copy(inputs)  # (N, ...)
    if output.shape[:1] != (batches.size_of(inputs),):
        raise MCBNError(f"the network gives {tuple(output.shape)} for {batches.describe(inputs)}: not one row an input")
    apart = engine.independent(inputs)  # copies of the inputs, one a draw or output, share the batch axis
    if not apart and (method == "linear" or (chunk is not None and chunk > 1)):
        fault = "nothing shows that this network treats each input by itself, so draws cannot share a pass in a graph"
        raise MCBNError(f'{fault}; export with method="sample" and chunk_size=1')
    if method == "linear":
        return _linear(bayes, engine, inputs, T, output)
    drawn = [rows[:T] for pair in mode.drawn.values() for rows in pair]  # (T, C) each
    program = trace_open(engine.network, inputs, list(mode.drawn), [rows[0] for rows in drawn])
    chunk = _chunk(T, program.width * len(output), chunk if apart else 1)
    summary = summary_of(bayes.task, bayes.noise_precision, output)
    return predictors.SamplePredictor(program, drawn, summary, chunk=chunk, output=output.shape[1:])


def _chunk(T: int, width: int, chunk_size: int | None) -> int:
    """Choose how many draws go through in one pass: a divisor of T, all of them where they are small enough."""
    most = min(chunk_size or max(1, CHUNK_VALUES // width), T)
    if chunk_size is not None and most * width > MOST_VALUES:
        fault = f"{most} draws in one pass make a result of {most * width:,} values for the example ({width:,} a draw)"
        raise MCBNError(f"{fault}; give a smaller chunk_size, which loops over the draws, or method='linear'")
    return max(size for size in range(1, most + 1) if T % size == 0)


def _linear(bayes: MCBN[Any], engine: Engine, inputs: Any, T: int, output: Tensor) -> predictors.LinearPredictor:
    """Trace the pass and its gradient at the average statistics."""
    bayes.linearizer(inputs, T)  # refuses what has no gradient per input
    expansion = bayes.linearizer.expansion(inputs, T)
    names, points = list(expansion.centres), expansion.differentiate.points
    if missing := [name for name in names if name not in points]:
        raise MCBNError(f"example_x does not reach the layers {missing}, so they have no gradient; use method='sample'")
    centre = [row for name in names for row in (points[name].scale, points[name].shift)]  # (C,) each
    program = trace_open(engine.network, inputs, names, centre)
    N, D = len(output), output[0].numel()
    if max(D, expansion.chosen.n_samples) * N * program.width > MOST_VALUES:
        raise MCBNError(f"method='linear' takes {D} gradients of {N} inputs at once, too many; use method='sample'")
    with Gather(expansion.chosen) as mode:
        engine.network.run_copy(inputs)
    chosen = [rows for name in names for rows in mode.drawn[name]]  # (K, C) each
    summary = summary_of(bayes.task, bayes.noise_precision, output)
    return predictors.LinearPredictor(program, expansion, chosen, summary, n_outputs=D)


@contextmanager
def quiet() -> Iterator[None]:
    """Keep the exporters' notes about themselves from the user."""
    levels = {logger: logger.level for logger in map(logging.getLogger, LOGGERS)}
    try:
        for logger in levels:
            logger.setLevel(logging.ERROR)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*LeafSpec.* is deprecated", category=FutureWarning)
            yield
    finally:
        for logger, level in levels.items():
            logger.setLevel(level)


@contextmanager
def told(network: Network, method: str) -> Iterator[None]:
    """Say of a network that cannot be exported where its own code stands in the way."""
    try:
        yield
    except MCBNError:
        raise
    except Exception as error:
        name = type(network.module).__name__
        reason = str(error).strip().split("\n")[0]
        by_values = "data-dependent" in str(error) or "DataDependent" in type(error).__name__
        what = "its control flow depends on the values of its inputs" if by_values else reason
        hint = "; method='sample' may still work" if method == "linear" else ""
        raise MCBNError(f"{name} cannot be exported as one graph{_place(error)}: {what}{hint}") from error


def _place(error: Exception) -> str:
    """Find the last line of foreign code that led to an error."""
    ours = (str(Path(__file__).parents[1]), str(Path(torch.__file__).parent), "<")
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith(ours) and "contextlib" not in frame.filename:
            return f" (line {frame.lineno} of {frame.filename}, `{frame.line}`)"
    return ""


def _compare(results: Mapping[str, Tensor], prediction: Any, what: str, level: float | None) -> None:
    """Refuse a graph whose numbers are not those of `predict`."""
    for name, value in results.items():
        if name == "set":  # of a class at the very threshold rounding decides
            same = int((value != prediction.set(level)).sum()) <= max(1, value.numel() // 100)
        elif name in ("low", "high"):
            same = agree(value, prediction.interval(level)[name == "high"], EXPORTED)
        else:
            expected, scale = getattr(prediction, name), None
            if name == "mutual_information":  # of draws that hardly differ, what rounding leaves of their differences
                scale = expected.max() + 1e-3 * prediction.entropy.max()
            same = agree(value, expected, EXPORTED, scale=scale)
        if not same:
            fault = f"{what} gives another {name} than predict, so nothing was exported"
            cure = "a network whose outputs depend on which inputs run beside them may still work with chunk_size=1"
            raise MCBNError(f"{fault}; {cure}")


def convert(
    program: torch.export.ExportedProgram, inputs: Any, outputs: Sequence[str], metadata: Mapping[str, str]
) -> tuple[bytes, dict[str, Tensor]]:
    """Return a program as the content of an ONNX file, and what onnxruntime makes of the inputs with it."""
    names = input_names(inputs)
    try:
        with quiet():  # runtimes optimise a graph themselves when they load it
            how: Any = {"opset_version": OPSET, "input_names": names, "optimize": False, "verbose": False}
            onnx: Any = torch.onnx.export(program, dynamo=True, **how)
    except Exception as error:
        operator, text = re.search(r"target=torch\.ops\.([\w.]+)", str(error)), str(error).strip().split("\n")[0]
        what = operator[1].removesuffix(".default") if operator else text
        is_linear = metadata.get("method") == "linear"
        hint = "method='linear' needs it; use method='sample'" if is_linear else "replace that layer"
        raise MCBNError(f"ONNX has no operator for {what}: {hint}") from error
    graph = onnx.model.graph
    for value in [value for node in graph.all_nodes() for value in node.outputs if value.name in outputs]:
        value.name = f"{value.name}_inside"
    for value, name in zip(graph.outputs, outputs, strict=True):
        value.name = name
    for each in (graph, *graph.subgraphs()):
        for name in [name for name, value in each.initializers.items() if not value.uses()]:
            del each.initializers[name]
    size = sum(value.const_value.nbytes for value in graph.initializers.values() if value.const_value)
    if size > MOST_BYTES:
        raise MCBNError(f"the constants take {size:,} bytes, one ONNX file holds {MOST_BYTES:,}: lower n_samples")
    model = onnx.model_proto
    _strip(model)
    importlib.import_module("onnx.helper").set_model_props(model, dict(metadata))
    content = bytes(model.SerializeToString())
    return content, run_onnx(content, dict(zip(names, batches.tensors_of(inputs), strict=True)))


def _strip(message: Any) -> None:
    """Drop what the exporter notes of the code it saw, paths of this machine among it; only the batch is open."""
    for field, value in message.ListFields():
        if field.name in ("doc_string", "metadata_props", "value_info"):
            message.ClearField(field.name)
        elif field.name == "dim_param":
            message.dim_param = "batch"
        elif field.message_type is not None:
            for child in [value] if hasattr(value, "ListFields") else value:
                _strip(child)


def run_onnx(content: bytes, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Run a file's content on the CPU."""
    onnxruntime = importlib.import_module("onnxruntime")
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    try:
        session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
        results = session.run(None, {name: tensor.detach().cpu().numpy() for name, tensor in inputs.items()})
    except Exception as error:
        raise MCBNError(f"onnxruntime cannot run the exported network: {error}") from error
    names = [output.name for output in session.get_outputs()]
    return {name: torch.from_numpy(result) for name, result in zip(names, results, strict=True)}
