"""Files that appear whole or not at all; the folders of the user's data and of what can be had again."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mcbn.errors import MCBNError


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a temporary path to write to; on leaving without an error it takes the place of `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as folder:
        temporary = Path(folder) / path.name
        yield temporary
        os.replace(temporary, path)


def write_text(path: Path, text: str) -> Path:
    """Write UTF-8 text with \\n line ends, whole or not at all."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8", newline="\n")
    return path


def require_folder(path: Path) -> None:
    """Refuse to save where there is no folder: more likely a slip than a wish for one."""
    if not path.parent.is_dir():
        raise MCBNError(f"cannot save {path.name}: the folder {path.parent} does not exist")


def cache_folder() -> Path:
    """Return where downloads and compiled kernels are kept: $MCBN_CACHE_DIR, else mcbn in the user's cache folder."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return _folder_named("MCBN_CACHE_DIR") or base / "mcbn"


def local_folder() -> Path | None:
    """Return the folder of local copies of data, $MCBN_DATA_DIR; None where it is not set."""
    return _folder_named("MCBN_DATA_DIR")


def _folder_named(variable: str) -> Path | None:
    value = os.environ.get(variable)
    return Path(value).expanduser() if value else None
