"""A posterior as one safetensors file: plain tensors plus text metadata, no pickle."""

import hashlib
import json
import os
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from mcbn.errors import MCBNError
from mcbn.network import bare_name, structure, unwrap
from mcbn.posterior import Posterior

FORMAT = "mcbn posterior"
FORMAT_VERSION = 1


def fingerprint(model: nn.Module) -> dict[str, str]:
    """Identify a network: its structure in full, to name a difference, and a hash of its weights."""
    digest = hashlib.sha256()
    tensors = {bare_name(name): tensor for name, tensor in unwrap(model).state_dict().items()}
    for name, tensor in sorted(tensors.items()):
        if not name.endswith("num_batches_tracked"):
            digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    dtypes = sorted({str(p.dtype) for p in unwrap(model).parameters()})
    return {
        "structure": json.dumps(structure(model)),
        "weights": digest.hexdigest(),
        "weights_dtype": ",".join(dtypes),
    }


def save(path: str | Path, posterior: Posterior, model: nn.Module, settings: Mapping[str, str]) -> None:
    """Write a posterior and its settings as one safetensors file, whole or not at all."""
    from safetensors.torch import save as serialise

    tensors = {f"mean.{n}": v.cpu().contiguous() for n, v in posterior.mean.items()}
    tensors |= {f"var.{n}": v.cpu().contiguous() for n, v in posterior.var.items()}
    metadata = {
        "format": FORMAT,
        "format_version": str(FORMAT_VERSION),
        "batch_size": str(posterior.batch_size),
        "layers": json.dumps([[name, list(value.shape)] for name, value in posterior.mean.items()]),
        **fingerprint(model),
        **settings,
    }
    path = Path(path)
    if not path.parent.is_dir():
        raise MCBNError(f"cannot save {path.name}: the folder {path.parent} does not exist")
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
        try:
            file.write(serialise(tensors, metadata))
            file.close()
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise


def load(path: str | Path, model: nn.Module) -> tuple[Posterior, dict[str, str]]:
    """Read a posterior file for this network, or say in what it first differs."""
    tensors, metadata = _read(Path(path))
    _require_same_structure(path, json.loads(metadata["structure"]), structure(model))
    current = fingerprint(model)
    same_dtype = metadata["weights_dtype"] == current["weights_dtype"]
    if same_dtype and metadata["weights"] != current["weights"]:
        warnings.warn(
            f"mcbn: {path} was fitted on other weights than this network now has; its statistics do not belong to "
            "them: load the fitted weights first, or fit again",
            stacklevel=3,
        )
    mean: dict[str, Tensor] = {}
    var: dict[str, Tensor] = {}
    for name, shape in json.loads(metadata["layers"]):
        for part, prefix in ((mean, "mean"), (var, "var")):
            found = tensors.get(f"{prefix}.{name}")
            if found is None or list(found.shape) != shape:
                got = "nothing" if found is None else f"shape {tuple(found.shape)}"
                raise MCBNError(f"{path} is damaged: {prefix} of layer {name!r} should be {tuple(shape)}, found {got}")
            part[name] = found
    return Posterior(mean, var, int(metadata["batch_size"])), metadata


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    except FileNotFoundError as error:
        raise MCBNError(f"there is no file {path}") from error
    except (SafetensorError, OSError) as error:
        raise MCBNError(
            f"{path} is not a whole safetensors file ({error}); it is truncated or of another kind"
        ) from error
    if metadata.get("format") != FORMAT:
        raise MCBNError(f"{path} is a safetensors file but not an mcbn posterior; write one with MCBN.save")
    if metadata.get("format_version") != str(FORMAT_VERSION):
        raise MCBNError(
            f"{path} has posterior format {metadata.get('format_version')}, this mcbn reads {FORMAT_VERSION}; "
            "fit and save again"
        )
    return tensors, metadata


def _require_same_structure(path: str | Path, saved: list[str], found: list[str]) -> None:
    for before, now in zip(saved, found, strict=False):
        if before != now:
            raise MCBNError(f"{path} was fitted on another network: there '{before}', here '{now}'")
    if len(saved) != len(found):
        longer, where = (saved, "only there") if len(saved) > len(found) else (found, "only here")
        raise MCBNError(f"{path} was fitted on another network: '{longer[min(len(saved), len(found))]}' is {where}")
