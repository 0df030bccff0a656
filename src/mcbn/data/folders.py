"""Where data files are looked for: the folder of the user, then the cache of downloads."""

import os
from pathlib import Path

from mcbn.files import cache_folder as cache_folder


def local_folder() -> Path | None:
    """Return the folder of local copies, $MCBN_DATA_DIR; None where it is not set."""
    given = os.environ.get("MCBN_DATA_DIR")
    return Path(given).expanduser() if given else None


def places(folder: str | os.PathLike[str] | None = None) -> list[Path]:
    """Return the folders to look in, in this order: `folder` alone where given, else the local one and the cache."""
    if folder is not None:
        return [Path(folder)]
    local = local_folder()
    return [*([local] if local else []), cache_folder()]


def find(files: tuple[str, ...], folder: str | os.PathLike[str] | None = None) -> Path | None:
    """Return the first place that holds every one of these files."""
    return next((place for place in places(folder) if all((place / file).is_file() for file in files)), None)
