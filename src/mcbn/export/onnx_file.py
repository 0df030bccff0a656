"""Programs as ONNX files: converted, cleaned, checked by a run, written whole or not at all."""

import importlib
import importlib.util
import logging
import os
import re
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mcbn.errors import MCBNError

PACKAGES = ("onnx", "onnxscript", "onnxruntime")
LOGGERS = ("torch.onnx", "torch.export", "onnxscript", "onnx_ir")
OPSET = 20
MOST_BYTES = 2**31 - 2**20  # of one protobuf file


def require_extra() -> None:
    """Name the extra where a package it brings is missing."""
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise MCBNError(f"exporting to ONNX needs {', '.join(missing)}; pip install 'mcbn[export]'")


def require_place(path: Path) -> None:
    """Refuse a path that no file can be written to."""
    if not path.parent.is_dir():
        raise MCBNError(f"cannot export {path.name}: the folder {path.parent} does not exist")
    if path.is_dir():
        raise MCBNError(f"cannot export to {path}: it is a folder; give the name of a file in it")


@contextmanager
def quiet() -> Iterator[None]:
    """Keep the exporters' notes about themselves from the user."""
    loggers = [logging.getLogger(name) for name in LOGGERS]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*LeafSpec.* is deprecated", category=FutureWarning)
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def convert(
    program: torch.export.ExportedProgram, inputs: Sequence[str], outputs: Sequence[str], metadata: Mapping[str, str]
) -> bytes:
    """Return a program as the content of an ONNX file."""
    try:
        with quiet():
            made = torch.onnx.export(
                program, dynamo=True, opset_version=OPSET, input_names=list(inputs), optimize=False, verbose=False
            )  # runtimes optimise a graph themselves when they load it
    except Exception as error:
        raise MCBNError(_refusal(error, metadata.get("method"))) from error
    if made is None:
        raise MCBNError("torch.onnx gave no program")
    _rename(made.model, outputs)
    size = sum(value.const_value.nbytes for value in made.model.graph.initializers.values() if value.const_value)
    if size > MOST_BYTES:
        raise MCBNError(
            f"the constants take {size:,} bytes and one ONNX file holds {MOST_BYTES:,}; give fewer draws (n_samples=)"
        )
    made.model.metadata_props.update(metadata)
    model = made.model_proto
    del model.graph.value_info[:]
    for value in (*model.graph.input, *model.graph.output):
        for axis in value.type.tensor_type.shape.dim:
            if axis.dim_param:
                axis.dim_param = "batch"  # no other axis is open
    return bytes(model.SerializeToString())


def _refusal(error: Exception, method: str | None) -> str:
    """Name the operation that has no counterpart."""
    text = str(error)
    found = re.search(r"target=torch\.ops\.([\w.]+)", text)
    what = found[1].removesuffix(".default") if found else text.strip().split("\n")[0]
    hint = "method='linear' needs it; use method='sample'" if method == "linear" else "replace that layer"
    return f"ONNX has no operator for {what}: {hint}"


def _rename(model: Any, outputs: Sequence[str]) -> None:
    """Name the results, and drop what the exporter notes of the code it saw: paths of this machine among it."""
    graphs = [model.graph, *model.graph.subgraphs()]
    for node in model.graph.all_nodes():
        node.metadata_props.clear()
        node.doc_string = None
        for value in node.outputs:
            value.metadata_props.clear()
            if value.name in outputs:
                value.name = f"{value.name}_inside"
    for graph in graphs:
        graph.metadata_props.clear()
        graph.doc_string = None
        for value in (*graph.inputs, *graph.initializers.values()):
            value.metadata_props.clear()
        for name in [name for name, value in graph.initializers.items() if not value.uses()]:
            del graph.initializers[name]
    for value, name in zip(model.graph.outputs, outputs, strict=True):
        value.name = name


def run(content: bytes, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Run a file's content on the CPU."""
    onnxruntime = importlib.import_module("onnxruntime")
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    try:
        session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
        arrays = {name: tensor.detach().cpu().numpy() for name, tensor in inputs.items()}
        results = session.run(None, arrays)
    except Exception as error:
        raise MCBNError(f"onnxruntime cannot run the exported network: {error}") from error
    names = [output.name for output in session.get_outputs()]
    return {name: torch.from_numpy(result) for name, result in zip(names, results, strict=True)}


def write(path: Path, content: bytes) -> None:
    """Write a file whole or not at all."""
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
        try:
            file.write(content)
            file.close()
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise
