"""A watch as one graph: inputs in, distance and p-value out, by plain operations on constants of the reference."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mcbn import __version__, batches
from mcbn.batch_norm import Record
from mcbn.engine.agree import EXPORTED, agree
from mcbn.errors import MCBNError
from mcbn.export import as_program, at_least_two, convert, quiet, require_exportable, told
from mcbn.field.distance import Metric, coordinates
from mcbn.field.novelty import PerInput
from mcbn.field.watch import Watch
from mcbn.files import replacing


class Watcher(nn.Module):
    """Distance and p-value of a batch, (1,) each, or of every input, (N,) each; what is not finite is farthest."""

    held_out: Tensor

    def __init__(self, watch: Watch, inputs: Any, each: bool) -> None:
        super().__init__()
        null = watch.input_null() if each else watch.null(batches.size_of(inputs))
        self.module, self.watch, self.each = watch.network.module, watch, each
        for name, value in {**null.metric._asdict(), "held_out": null.held_out}.items():
            self.register_buffer(name, value)

    def forward(self, inputs: Any) -> dict[str, Tensor]:
        """Map inputs to the named results."""
        N, watch = batches.tensors_of(inputs)[0].shape[0], self.watch
        with PerInput(watch.centre, N) if self.each else Record(watch.recorder.chosen) as mode:
            watch.network.call_module(batches.map_tensors(torch.clone, inputs))
        if isinstance(mode, PerInput):
            z = torch.cat(mode.coordinates, 1)
        else:
            z = coordinates({name: (mean[None], mode.var[name][None]) for name, mean in mode.mean.items()})
        distance = Metric(*(getattr(self, name) for name in Metric._fields))(z)
        distance = torch.where(torch.isfinite(distance), distance, torch.inf)
        larger = (self.held_out >= distance.unsqueeze(1)).sum(1)
        return {"distance": distance, "p_value": (1 + larger) / (1 + len(self.held_out))}


def watch_to_onnx(watch: Watch, path: str | Path, example_x: Any, *, each: bool) -> None:
    """Write a watch as an ONNX file, whole or not at all; `Watch.export` documents the arguments."""
    path = require_exportable(path)
    watch.require_inputs(example_x)
    inputs = watch.network.prepare(example_x)
    inputs = at_least_two(inputs) if each else inputs
    with torch.inference_mode(False), torch.no_grad(), quiet(), told(watch.network, "watch"):
        program = as_program(Watcher(watch, inputs, each).eval(), inputs, fixed=not each)
    metadata = {"mcbn_version": __version__, "false_alarms": str(watch.false_alarms)}
    content, results = convert(program, inputs, ("distance", "p_value"), metadata)
    expected = watch.novelty(inputs).distance if each else torch.tensor([watch(inputs).distance])
    if not agree(results["distance"].float(), expected.cpu().float(), EXPORTED):
        raise MCBNError("the file as onnxruntime runs it gives another distance than the watch; nothing was exported")
    with replacing(path) as temporary:
        temporary.write_bytes(content)
