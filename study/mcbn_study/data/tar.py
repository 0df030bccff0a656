"""Chosen members of tar files; nothing else of an archive touches the disk."""

import shutil
import tarfile
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path

from mcbn.errors import MCBNError
from mcbn.progress import bar


def unpack(archive: Path, place: Callable[[str], Path | None], required: Iterable[str] = ()) -> None:
    """Write each plain file of a tar file to the place its name gives, where there is one; all required must be there.

    A damaged archive, or one without a required member, raises MCBNError.
    """
    missing = set(required)
    try:
        with tarfile.open(archive) as tar, bar(f"unpacking {archive.name}", len(missing) or None, "file") as tick:
            for member in tar:
                if (path := place(member.name)) and (file := tar.extractfile(member)):
                    path.parent.mkdir(parents=True, exist_ok=True)
                    with path.open("wb") as out:
                        shutil.copyfileobj(file, out)
                    missing.discard(member.name)
                    tick(1)
    except (tarfile.TarError, EOFError, zlib.error) as error:
        raise MCBNError(f"{archive} is a damaged archive: {error}") from error
    if missing:
        raise MCBNError(f"{archive} holds no {', '.join(sorted(missing)[:3])}")
