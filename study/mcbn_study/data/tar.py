"""Chosen members of tar files; nothing else of an archive touches the disk."""

import shutil
import tarfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mcbn.errors import MCBNError
from mcbn.progress import bar


def list_members(archive: Path) -> list[str]:
    """Return the names of the plain files in a tar file."""
    with _opened(archive) as tar:
        return [member.name for member in tar if member.isfile()]


def unpack(archive: Path, members: dict[str, Path]) -> None:
    """Write members of a tar file, by name, to the places given."""
    missing = dict(members)
    with _opened(archive) as tar, bar(f"unpacking {archive.name}", len(members), "file") as tick:
        for member in tar:
            if (place := missing.get(member.name)) and (file := tar.extractfile(member)):
                place.parent.mkdir(parents=True, exist_ok=True)
                with place.open("wb") as out:
                    shutil.copyfileobj(file, out)
                del missing[member.name]
                tick(1)
    if missing:
        raise MCBNError(f"{archive} holds no {', '.join(sorted(missing)[:3])}")


@contextmanager
def _opened(archive: Path) -> Iterator[tarfile.TarFile]:
    try:
        with tarfile.open(archive) as tar:
            yield tar
    except (tarfile.TarError, EOFError, zlib.error) as error:
        raise MCBNError(f"{archive} is a damaged archive: {error}") from error
