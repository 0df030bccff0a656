"""What is published on the image sets (sets.toml), where files are looked for, and chosen members of tar files."""

import os
import shutil
import tarfile
import tomllib
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from mcbn.errors import MCBNError
from mcbn.files import cache_folder, local_folder, require_sane
from mcbn.progress import bar

SETS: dict[str, dict[str, Any]] = tomllib.loads(Path(__file__).with_name("sets.toml").read_text())


def places(folder: str | os.PathLike[str] | None = None) -> list[Path]:
    """Return the folders to look in, in this order: `folder` alone where given, else the local one and the cache."""
    return [*filter(None, [local_folder()]), cache_folder()] if folder is None else [Path(folder)]


def find(files: tuple[str, ...], folder: str | os.PathLike[str] | None = None) -> Path | None:
    """Return the first place that holds every one of these files."""
    return next((place for place in places(folder) if all((place / file).is_file() for file in files)), None)


def unpack(archive: Path, place: Callable[[str], Path | None], required: Iterable[str] = ()) -> None:
    """Write each plain file of a tar file to the place its name gives, if any; all required must be there."""
    missing, size = set(required), 0
    try:
        with tarfile.open(archive) as tar, bar(f"unpacking {archive.name}", len(missing) or None, "file") as tick:
            for member in tar:
                if (path := place(member.name)) and (file := tar.extractfile(member)):
                    size += member.size
                    require_sane(archive, archive.stat().st_size, size)
                    path.parent.mkdir(parents=True, exist_ok=True)
                    with path.open("wb") as out:
                        shutil.copyfileobj(file, out)
                    missing.discard(member.name)
                    tick(1)
    except (tarfile.TarError, EOFError, zlib.error) as error:
        raise MCBNError(f"{archive} is a damaged archive: {error}") from error
    if missing:
        raise MCBNError(f"{archive} holds no {', '.join(sorted(missing)[:3])}")
