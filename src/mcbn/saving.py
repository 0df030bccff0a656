"""A posterior as one safetensors file: plain tensors plus text metadata, no pickle.

`read_tensors` and `write_tensors` serve whatever else is kept so.
"""

import hashlib
import json
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from mcbn.errors import MCBNError
from mcbn.files import replacing, require_folder
from mcbn.gaussian import Gaussian, block_sizes
from mcbn.network import bare_name, structure, unwrap
from mcbn.posterior import FAMILIES, Posterior

FORMAT = "mcbn posterior"
FORMAT_VERSION = 2  # 1 knew drawn statistics only
READABLE = ("1", "2")
KINDS = ("mean", "var")  # of statistics
METADATA, TAU = "metadata", "tau"  # keys of a state dict


def write_tensors(path: str | Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write tensors by name, and text, as one safetensors file, whole or not at all; its folder is made."""
    from safetensors.torch import save_file

    with replacing(Path(path)) as temporary:
        plain = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
        save_file(plain, temporary, dict(metadata))


def read_tensors(path: str | Path, *, hint: str = "") -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read a safetensors file: its tensors by name, on the CPU, and its text.

    One that is missing, truncated or of another kind is an MCBNError; `hint`, at its end, says what to do about it.
    """
    from safetensors import SafetensorError, safe_open

    advice = f"; {hint}" if hint else ""
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except FileNotFoundError as error:
        raise MCBNError(f"there is no file {path}{advice}") from error
    except (SafetensorError, OSError) as error:
        raise MCBNError(
            f"{path} is not a whole safetensors file ({error}); it is truncated or of another kind{advice}"
        ) from error


def save(path: str | Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write what `pack` gave, in a folder that exists."""
    require_folder(Path(path))
    write_tensors(path, tensors, metadata)


def fingerprint(model: nn.Module) -> dict[str, str]:
    """Identify a network: its structure in full, to name a difference, and a hash of its weights."""
    digest = hashlib.sha256()
    tensors = {bare_name(name): tensor for name, tensor in unwrap(model).state_dict().items()}
    for name, tensor in sorted(tensors.items()):
        if not name.endswith("num_batches_tracked"):
            digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    dtypes = ",".join(sorted({str(p.dtype) for p in unwrap(model).parameters()}))
    return {"structure": json.dumps(structure(model)), "weights": digest.hexdigest(), "weights_dtype": dtypes}


def pack(
    posterior: Posterior, model: nn.Module, settings: Mapping[str, str]
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Describe a posterior, the network it belongs to and its settings by tensors on the CPU and text."""
    tensors = {name: value.detach().cpu().contiguous() for name, value in _tensors(posterior).items()}
    metadata = {
        "format": FORMAT,
        "format_version": str(FORMAT_VERSION),
        "family": posterior.family,
        "seed": str(posterior.seed),
        "batch_size": str(posterior.batch_size),
        "fitted_batch_size": str(posterior.fitted_batch_size or posterior.batch_size),
        "layers": json.dumps([[name, list(value.shape)] for name, value in posterior.mean.items()]),
        "numbers": json.dumps(posterior.numbers),
        **fingerprint(model),
        **settings,
    }
    return tensors, metadata


def _tensors(posterior: Posterior) -> dict[str, Tensor]:
    """Name what is stored: the draws of training batches, or the moments that a Gaussian's draws come from."""
    if posterior.gaussian is None:
        return {f"{kind}.{name}": value for kind in KINDS for name, value in getattr(posterior, kind).items()}
    moments = posterior.gaussian
    factors = {f"gaussian.factor.{number}": factor for number, factor in enumerate(moments.factors)}
    return {"gaussian.location": moments.location, "gaussian.diagonal": moments.diagonal, **factors}


def unpack(path: str | Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str], model: nn.Module) -> Posterior:
    """Put together the posterior of this network that `path`, as errors call it, holds, or say how it differs."""
    _require_readable(path, metadata)
    require_same_structure(path, json.loads(metadata["structure"]), structure(model))
    current = fingerprint(model)
    same_dtype = metadata["weights_dtype"] == current["weights_dtype"]
    if same_dtype and metadata["weights"] != current["weights"]:
        warnings.warn(
            f"mcbn: {path} was fitted on other weights than this network now has; its statistics do not belong to "
            "them: load the fitted weights first, or fit again",
            stacklevel=3,
        )
    layers = {name: (int(T), int(C)) for name, (T, C) in json.loads(metadata["layers"])}
    family, batch_size = metadata.get("family", "sample"), int(metadata["batch_size"])
    if family == "sample":
        mean, var = ({n: _stored(path, tensors, kind, n, shape) for n, shape in layers.items()} for kind in KINDS)
        numbers = json.loads(metadata.get("numbers", "null"))
        seed = int(metadata.get("seed", 0))
        posterior = Posterior(mean, var, batch_size, seed=seed, numbers=tuple(numbers) if numbers else None)
    else:
        moments = _gaussian(path, tensors, family, {name: C for name, (_, C) in layers.items()})
        n_samples = next(iter(layers.values()))[0]
        posterior = Posterior.from_gaussian(moments, n_samples, batch_size, seed=int(metadata["seed"]))
    fitted = int(metadata.get("fitted_batch_size", batch_size))
    return replace(posterior, fitted_batch_size=fitted)


def _stored(path: str | Path, tensors: Mapping[str, Tensor], kind: str, name: str, shape: tuple[int, ...]) -> Tensor:
    """Return a stored tensor, or say how it differs from what the file promises."""
    stored = tensors.get(f"{kind}.{name}")
    if stored is None or stored.shape != shape:
        found = "nothing" if stored is None else f"shape {tuple(stored.shape)}"
        raise MCBNError(f"{path} is damaged: {kind} of layer {name!r} should be {shape}, found {found}")
    return stored


def _gaussian(path: str | Path, tensors: Mapping[str, Tensor], family: str, channels: Mapping[str, int]) -> Gaussian:
    """Put the moments of a Gaussian together; its blocks must cover all statistics of the layers."""
    P, sizes = 2 * sum(channels.values()), block_sizes(family, channels)
    moments = [tensors.get("gaussian.location"), tensors.get("gaussian.diagonal")]
    factors = [tensors.get(f"gaussian.factor.{number}") for number in range(len(sizes))]
    whole = all(moment is not None and moment.shape == (P,) for moment in moments)
    fits = all(f is not None and f.ndim == 2 and f.shape[1] == size for f, size in zip(factors, sizes, strict=True))
    if not whole or not fits or family not in FAMILIES:
        shapes = {name: tuple(value.shape) for name, value in tensors.items()}
        raise MCBNError(
            f"{path} is damaged: posterior {family!r} of {P} statistics, found {shapes}; fit and save again"
        )
    location, diagonal = (moment for moment in moments if moment is not None)
    return Gaussian(family, channels, location, tuple(f for f in factors if f is not None), diagonal)


def _require_readable(path: str | Path, metadata: Mapping[str, str]) -> None:
    """Refuse what is no posterior, or one of a later format."""
    if metadata.get("format") != FORMAT:
        raise MCBNError(f"{path} is a safetensors file but not an mcbn posterior; write one with MCBN.save")
    if metadata.get("format_version") not in READABLE:
        raise MCBNError(
            f"{path} has posterior format {metadata.get('format_version')}, this mcbn reads {FORMAT_VERSION} and 1; "
            "fit and save again"
        )


def require_same_structure(path: str | Path, there: list[str], here: list[str]) -> None:
    """Refuse a file of another network: say where the structure there and that here part."""
    for one, other in zip(there, here, strict=False):
        if one != other:
            raise MCBNError(f"{path} was fitted on another network: there '{one}', here '{other}'")
    if len(there) != len(here):
        longer, where = (there, "only there") if len(there) > len(here) else (here, "only here")
        raise MCBNError(f"{path} was fitted on another network: '{longer[min(len(there), len(here))]}' is {where}")


def to_state(tensors: Mapping[str, Tensor], metadata: Mapping[str, str], tau: Tensor) -> dict[str, Tensor]:
    """Join what `pack` gave into tensors alone: the text is JSON as bytes, since every checkpoint keeps tensors."""
    text = torch.frombuffer(bytearray(json.dumps(metadata).encode()), dtype=torch.uint8)
    return {**{name: value.clone() for name, value in tensors.items()}, TAU: tau.clone(), METADATA: text}


def from_state(state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str], Tensor]:
    """Take apart what `to_state` joined: tensors, text and tau."""
    missing = [key for key in (METADATA, TAU) if not isinstance(state.get(key), Tensor)]
    if missing:
        raise MCBNError(f"not a state_dict of an MCBN: {missing[0]!r} is missing; it has {sorted(state)[:5]}")
    try:
        metadata: dict[str, str] = json.loads(bytes(state[METADATA].cpu().tolist()))
    except (ValueError, TypeError) as error:
        raise MCBNError(f"the state_dict is damaged: its metadata cannot be read ({error})") from error
    return {name: value for name, value in state.items() if name not in (METADATA, TAU)}, metadata, state[TAU]
