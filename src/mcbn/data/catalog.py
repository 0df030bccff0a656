"""What the eight regression sets of the paper are: names, sizes, published files and their sha256."""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from mcbn.errors import MCBNError


class Regression(NamedTuple):
    """Inputs x (N, Q) and targets y (N,), float64, in original units and published row order."""

    x: Tensor
    y: Tensor


@dataclass(frozen=True)
class Dataset:
    """One regression set: N and Q as in the appendix table "Regression dataset summary" of Teye et al. 2018.

    Attributes:
        name: what `load` takes.
        title: the paper's name for the set.
        n: number of rows N.
        q: number of inputs Q; the published file has Q + 1 columns, the target last.
        target: what y measures.
        file: name of the published file in a local data folder.
        sha256: of the published file.
        hidden_units: units of each hidden layer in the paper's networks.
        embedded: whether the values ship inside this package.
    """

    name: str
    title: str
    n: int
    q: int
    target: str
    file: str
    sha256: str
    hidden_units: int = 50
    embedded: bool = False


_DATASETS = (
    Dataset(
        name="boston",
        title="Boston Housing",
        n=506,
        q=13,
        target="median value",
        file="bostonHousing.txt",
        sha256="baadf72995725d76efe787b664e1f083388c79ba21ef9a7990d87f774184735a",
        embedded=True,
    ),
    Dataset(
        name="concrete",
        title="Concrete Compressive Strength",
        n=1_030,
        q=8,
        target="compressive strength",
        file="concrete.txt",
        sha256="43d290fd2c2a399ad7e62c45cab5337ba94ece69ebdcf5875aa668cb886243de",
        embedded=True,
    ),
    Dataset(
        name="energy",
        title="Energy Efficiency",
        n=768,
        q=8,
        target="heating load",
        file="energy.txt",
        sha256="7f8bf024cea437267d56be99b7af7bb3faebec8a7bccfbb20d06d52d9372a950",
    ),
    Dataset(
        name="kin8nm",
        title="Kinematics 8nm",
        n=8_192,
        q=8,
        target="distance",
        file="kin8nm.txt",
        sha256="a694ce0c7a21390f2bd2a205c36f2482cd974637a207038696716e22f3bbe810",
    ),
    Dataset(
        name="power",
        title="Power Plant",
        n=9_568,
        q=4,
        target="energy output",
        file="power-plant.txt",
        sha256="daebd20c408dfc5c4979604f240e891be162c3a5d00d662380aa669044a1fb31",
    ),
    Dataset(
        name="protein",
        title="Protein Tertiary Structure",
        n=45_730,
        q=9,
        target="RMSD",
        file="protein-tertiary-structure.txt",
        sha256="d35f332707e8a73f21e021039250a1e7b26e14f7dd826a0337ffa8e8e48b9727",
        hidden_units=100,
    ),
    Dataset(
        name="wine",
        title="Wine Quality (Red)",
        n=1_599,
        q=11,
        target="quality",
        file="wine-quality-red.txt",
        sha256="3ba41eaf4ab562088cf47b5c9dca2b4de2a330c3ee38a7920b4527a09574d5c1",
    ),
    Dataset(
        name="yacht",
        title="Yacht Hydrodynamics",
        n=308,
        q=6,
        target="residuary resistance",
        file="yacht.txt",
        sha256="00dfecc0fc01ddd4c90b558a3ac11b246df8ebcfea130724223475a9a67f0ea1",
    ),
)

NAMES: tuple[str, ...] = tuple(dataset.name for dataset in _DATASETS)


def describe(name: str) -> Dataset:
    """Facts about the regression set called `name`.

    >>> describe("protein").hidden_units
    100
    """
    for dataset in _DATASETS:
        if dataset.name == name:
            return dataset
    raise MCBNError(f"there is no dataset {name!r}; choose one of {', '.join(NAMES)}")
