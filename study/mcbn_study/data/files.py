"""What is published on the image sets (sets.toml), where files are looked for, and chosen members of tar files."""

import os
import tarfile
import tomllib
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from mcbn.errors import MCBNError
from mcbn.files import cache_folder, local_folder, require_sane
from mcbn_study.machine import tracked

SETS: dict[str, dict[str, Any]] = tomllib.loads(Path(__file__).with_name("sets.toml").read_text())


def places(folder: str | os.PathLike[str] | None = None) -> list[Path]:
    """Return the folders to look in, in this order: `folder` alone where given, else the local one and the cache."""
    return [*filter(None, [local_folder()]), cache_folder()] if folder is None else [Path(folder)]


def find(files: tuple[str, ...], folder: str | os.PathLike[str] | None = None) -> Path | None:
    """Return the first place that holds every one of these files."""
    return next((place for place in places(folder) if all((place / file).is_file() for file in files)), None)


def require(name: str, files: tuple[str, ...], folder: str | os.PathLike[str] | None = None) -> Path:
    """Return the first place that holds these files of a set, or say how to have them."""
    if (place := find(files, folder)) is None:
        parent, looked = Path(files[0]).parent, " nor ".join(map(str, places(folder)))
        get = f"run `mcbn data {name}`, or set MCBN_DATA_DIR to the folder that holds {parent}/"
        raise MCBNError(f"no {files[0]} in {looked}: {get}")
    return place


def unpack(archive: Path, folder: Path, wanted: Callable[[str], bool], required: Iterable[str] = ()) -> None:
    """Extract the members of a tar file whose names are wanted; all required must be there."""
    try:
        with tarfile.open(archive) as tar:
            members = [member for member in tar if wanted(member.name)]
            require_sane(archive, archive.stat().st_size, sum(member.size for member in members))
            tar.extractall(folder, tracked(members, f"unpacking {archive.name}", "file"), filter="data")
    except (tarfile.TarError, EOFError, zlib.error) as error:
        raise MCBNError(f"{archive} is a damaged archive: {error}") from error
    if missing := [name for name in required if not (folder / name).is_file()]:
        raise MCBNError(f"{archive} holds no {', '.join(missing[:3])}")
