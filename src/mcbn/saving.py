"""A posterior, and whatever else is kept so, as one safetensors file: plain tensors plus text, no pickle."""

import hashlib
import json
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from mcbn.batch_norm import layer_of
from mcbn.batches import tensors_of
from mcbn.errors import MCBNError, require_choice
from mcbn.files import replacing, require_folder
from mcbn.gaussian import Gaussian, block_sizes
from mcbn.network import bare_name, structure, unwrap
from mcbn.noise import require_tau
from mcbn.posterior import FAMILIES, Posterior

FORMAT = "mcbn posterior"
FORMAT_VERSION = 3  # 1 knew drawn statistics only, 2 no checksums
READABLE = ("1", "2", "3")
CHECKSUMS = "checksums"  # in the text of a file: one of every tensor, and under "" one of the rest of the text
MOST_DRAWN = 2**30  # statistics that the Gaussian of a file may ask for: 8 GB
KINDS = ("mean", "var")  # of statistics
METADATA, TAU = "metadata", "tau"  # keys of a state dict
OPTIONAL = ("inputs", "output", "calibration", CHECKSUMS)  # text that not every file has
B = TypeVar("B", bound=Any)  # an MCBN


def write_tensors(path: str | Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write tensors by name, and text, with checksums, as one safetensors file, whole or not at all."""
    from safetensors.torch import save

    with replacing(Path(path)) as temporary:
        plain = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
        temporary.write_bytes(save(plain, {**metadata, CHECKSUMS: json.dumps(checksums(plain, metadata))}))


def checksums(tensors: Mapping[str, Tensor], text: Mapping[str, str]) -> dict[str, str]:
    """Return a checksum of every tensor with its dtype and shape, and under "" one of the text."""
    kinds = {name: f"{value.dtype} {tuple(value.shape)}".encode() for name, value in tensors.items()}
    sums = {n: hashlib.blake2b(bytes_of(value), key=kinds[n][:64], digest_size=16) for n, value in tensors.items()}
    sums[""] = hashlib.blake2b(json.dumps(sorted(text.items())).encode(), digest_size=16)
    return {name: checksum.hexdigest() for name, checksum in sums.items()}


def read_tensors(path: str | Path, *, hint: str = "") -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read the tensors of a safetensors file by name, on the CPU, and its text; an MCBNError ends in the hint."""
    from safetensors import safe_open

    advice = f"; {hint}" if hint else ""
    try:
        with safe_open(path, framework="pt") as file:
            tensors, text = {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except FileNotFoundError as error:
        raise MCBNError(f"there is no file {path}{advice}") from error
    except Exception as error:  # of safetensors, of the system, and of torch about dtypes and sizes
        raise MCBNError(f"{path} is not a whole safetensors file ({error}), or of another kind{advice}") from error
    misnamed = any('"": "' in value for value in text.values())  # that of the text, which older formats do not have
    checked = CHECKSUMS in text or misnamed or text.get("format_version") == str(FORMAT_VERSION)
    with damage_told(path):
        written: dict[str, str] = dict(json.loads(text.pop(CHECKSUMS, "{}")))
    for name, checksum in checksums(tensors, text).items() if checked else ():
        if written.get(name) != checksum:
            what = f"tensor {name!r}" if name else "its header"
            raise MCBNError(f"{path} is damaged: {what} is not as it was written; take another copy{advice}")
    return tensors, text


@contextmanager
def damage_told(path: str | Path) -> Iterator[None]:
    """Say of which file an entry cannot be read."""
    try:
        yield
    except MCBNError as error:
        raise error if str(path) in str(error) else MCBNError(f"{path}: {error}") from error
    except Exception as error:  # json, numbers, missing keys: whatever a damaged header leads to
        raise MCBNError(f"{path} is damaged: its header cannot be read ({error!r}); take another copy") from error


def save(path: str | Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write what `pack` gave, in a folder that exists."""
    require_folder(Path(path))
    write_tensors(path, tensors, metadata)


def is_posterior(path: Path) -> bool:
    """Tell whether a file is one that `save` wrote."""
    with suppress(MCBNError):
        return read_tensors(path)[1].get("format") == FORMAT
    return False


def fingerprint(model: nn.Module) -> dict[str, str]:
    """Identify a network: its structure in full, to name a difference, and a hash of its weights."""
    digest = hashlib.sha256()
    entries = sorted((bare_name(name), value) for name, value in unwrap(model).state_dict().items())
    for tensor in tensors_of([value for name, value in entries if not name.endswith("num_batches_tracked")]):
        digest.update(bytes_of(tensor))
    dtypes = ",".join(sorted({str(p.dtype) for p in unwrap(model).parameters()}))
    return {"structure": json.dumps(structure(model)), "weights": digest.hexdigest(), "weights_dtype": dtypes}


def bytes_of(tensor: Tensor) -> bytes:
    """Return the numbers of a tensor as bytes, whatever its layout."""
    plain = tensor.dequantize() if tensor.is_quantized else tensor.to_dense()
    return plain.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def pack(bayes: Any) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Describe an MCBN by tensors and text: its draws, or the moments these come from, the network and all settings."""
    posterior, moments = bayes.posterior, bayes.posterior.gaussian
    if moments is None:
        tensors = {f"{kind}.{name}": value for kind in KINDS for name, value in getattr(posterior, kind).items()}
    else:
        tensors = {"gaussian.location": moments.location, "gaussian.diagonal": moments.diagonal}
        tensors |= {f"gaussian.factor.{number}": factor for number, factor in enumerate(moments.factors)}
    pickers = {"inputs": bayes.inputs, "output": bayes.output}.items()
    plain_names = all(isinstance(name, str | int) for name in bayes.engine.network.columns)
    more, promise = bayes.calibration.pack() if bayes.calibration is not None else ({}, {})
    text = {
        "format": FORMAT,
        "format_version": str(FORMAT_VERSION),
        "family": posterior.family,
        "seed": str(posterior.seed),
        "batch_size": str(posterior.batch_size),
        "fitted_batch_size": str(posterior.fitted_batch_size or posterior.batch_size),
        "layers": json.dumps([[name, list(value.shape)] for name, value in posterior.mean.items()]),
        "numbers": json.dumps(posterior.numbers),
        **fingerprint(bayes.engine.network.module),
        "task": bayes.task,
        "tau": json.dumps(bayes.noise_precision.tolist()),
        "noise": bayes.noise,
        "outputs": bayes.reads,
        "tau_at_bound": json.dumps(bayes.tau_at_bound),
        "moved": json.dumps(bayes.moved_before or (bayes.adaptation is not None and bayes.adaptation.moved)),
        **{name: json.dumps(value) for name, value in pickers if value is not None and not callable(value)},
        "columns": json.dumps(bayes.engine.network.columns if plain_names else []),
        **promise,
    }
    return {name: value.detach().cpu().contiguous() for name, value in (tensors | more).items()}, text


def restore(bayes: B, drawn: Posterior, tau: Any, tensors: Mapping[str, Tensor], text: Mapping[str, str]) -> B:
    """Give an MCBN the posterior and tau that were kept, and its calibration."""
    precision = require_tau(tau)
    with torch.inference_mode(False):
        network = bayes.copy_network()
        network.columns = list(json.loads(text.get("columns", "[]")))
        bayes.adopt(network, drawn.to(network.device))
    bayes.layers, bayes.noise_precision = list(dict.fromkeys(map(layer_of, drawn.layers))), precision
    bayes.calibration = bayes.adaptation = None
    bayes.tau_at_bound, bayes.moved_before = (json.loads(text.get(name, "false")) for name in ("tau_at_bound", "moved"))
    if "calibration" in text:
        from mcbn.conformal import Calibration

        bayes.calibration = Calibration.unpack(tensors, text)
    return bayes


def unpack(path: str | Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str], model: nn.Module) -> Posterior:
    """Put together the posterior of this network that `path`, as errors call it, holds, or say how it differs."""
    _require_readable(path, metadata)
    current = fingerprint(model)
    with damage_told(path):
        require_same_structure(path, json.loads(metadata["structure"]), structure(model))
    if metadata.get("weights_dtype") == current["weights_dtype"] and metadata.get("weights") != current["weights"]:
        what = f"{path} was fitted on other weights than this network now has"
        warnings.warn(f"mcbn: {what}: load the fitted weights first, or fit again", stacklevel=3)
    with damage_told(path):
        return _posterior(path, tensors, metadata).require_valid(f"{path} is damaged: it")


def _posterior(path: str | Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> Posterior:
    layers = {name: (int(T), int(C)) for name, (T, C) in json.loads(metadata["layers"])}
    family, batch_size, seed = metadata.get("family", "sample"), int(metadata["batch_size"]), metadata.get("seed", 0)
    require_choice("posterior", family, FAMILIES)
    if family == "sample":
        mean, var = ({n: _stored(path, tensors, f"{kind}.{n}", shape) for n, shape in layers.items()} for kind in KINDS)
        numbers = json.loads(metadata.get("numbers", "null"))
        posterior = Posterior(mean, var, batch_size, seed=int(seed), numbers=tuple(numbers) if numbers else None)
    else:
        channels = {name: C for name, (_, C) in layers.items()}
        T, P, blocks = next(iter(layers.values()))[0], 2 * sum(channels.values()), block_sizes(family, channels)
        if not 0 < T <= MOST_DRAWN // P:
            raise MCBNError(f"{path} declares {T} draws of {P} statistics; fit fewer")
        location, diagonal = (_stored(path, tensors, f"gaussian.{name}", (P,)) for name in ("location", "diagonal"))
        factors = [_stored(path, tensors, f"gaussian.factor.{i}", (None, size)) for i, size in enumerate(blocks)]
        moments = Gaussian(family, channels, location, tuple(factors), diagonal)
        posterior = Posterior(*moments.statistics(T, int(seed)), batch_size, moments, int(seed))
    return replace(posterior, fitted_batch_size=int(metadata.get("fitted_batch_size", batch_size)))


def _stored(path: str | Path, tensors: Mapping[str, Tensor], name: str, shape: tuple[int | None, ...]) -> Tensor:
    """Return a stored tensor, or say how it differs from what the file promises; None: a size of any kind."""
    stored = tensors.get(name)
    sizes = () if stored is None else stored.shape
    if len(sizes) != len(shape) or any(size not in (None, other) for size, other in zip(shape, sizes, strict=True)):
        found = "nothing" if stored is None else f"shape {tuple(sizes)}"
        raise MCBNError(f"{path} is damaged: {name} should be {shape}, found {found}; fit and save again")
    return tensors[name]


def _require_readable(path: str | Path, metadata: Mapping[str, str]) -> None:
    if metadata.get("format") != FORMAT:
        cure = f"; MCBN.load takes a list of {metadata['members']} networks for it" if "members" in metadata else ""
        raise MCBNError(f"{path} is a safetensors file but not the posterior of one network by MCBN.save{cure}")
    if (version := metadata.get("format_version")) not in READABLE:
        raise MCBNError(f"{path} has posterior format {version}, this mcbn reads {FORMAT_VERSION} or less; fit again")
    if version != str(FORMAT_VERSION):
        message = f"{path} has posterior format {version}, without checksums: damage may go unnoticed; save it again"
        warnings.warn(f"mcbn: {message}", stacklevel=4)


def require_same_structure(path: str | Path, there: list[str], here: list[str]) -> None:
    """Refuse a file of another network: say where the structure there and that here part."""
    for one, other in zip_longest(there, here, fillvalue="nothing more"):
        if one != other:
            raise MCBNError(f"{path} was fitted on another network: there '{one}', here '{other}'")


def to_state(tensors: Mapping[str, Tensor], metadata: Mapping[str, str], tau: Tensor) -> dict[str, Tensor]:
    """Join what `pack` gave into tensors alone: the text is JSON as bytes, since every checkpoint keeps tensors."""
    text = torch.frombuffer(bytearray(json.dumps(metadata).encode()), dtype=torch.uint8)
    return {**{name: value.clone() for name, value in tensors.items()}, TAU: tau.clone(), METADATA: text}


def from_state(state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str], Tensor]:
    """Take apart what `to_state` joined: tensors, text and tau."""
    if missing := [key for key in (METADATA, TAU) if not isinstance(state.get(key), Tensor)]:
        raise MCBNError(f"not a state_dict of an MCBN: {missing[0]!r} is missing; it has {sorted(state)[:5]}")
    with damage_told("the state_dict"):
        metadata: dict[str, str] = {"task": "", **json.loads(bytes(state[METADATA].cpu().tolist()))}
    return {name: value for name, value in state.items() if name not in (METADATA, TAU)}, metadata, state[TAU]
