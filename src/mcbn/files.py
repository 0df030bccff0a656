"""Files that appear whole or not at all and take no other's place; the folders of data and of what can be had again."""

import glob
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from mcbn.errors import MCBNError

LEFT = ".mcbn-"  # in the names of folders that nobody should see after a run
MOST_RATIO, LEAST_SUSPECT = 200, 2**30  # an archive that grows beyond both, in bytes, is taken for a trap


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a temporary path; left without an error it takes the place of `path`, on disk and as the umask allows."""
    path = Path(os.path.realpath(path))  # a link stays one
    if path.exists() and not path.is_file():
        raise MCBNError(f"{path} is no plain file, so nothing can take its place; name another")
    path.parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers(path.parent, path.name)
    with TemporaryDirectory(dir=path.parent, prefix=f".{path.name}{LEFT}") as name, held(Path(name), wait=True):
        temporary = Path(name) / path.name
        temporary.touch()
        mode = temporary.stat().st_mode & 0o777  # what the umask leaves; some writers choose their own
        temporary.unlink()
        yield temporary
        temporary.chmod(mode)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())  # a name without content on disk would count as finished
        os.replace(temporary, path)


def remove_leftovers(folder: Path, name: str = "") -> None:
    """Remove what killed runs left in a folder of one file, or of any; what a process still holds stays."""
    for left in folder.glob(f".{glob.escape(name) or '*'}{LEFT}*"):
        with suppress(OSError), held(left) as is_ours:
            if is_ours and (not name or any(left.iterdir())):  # an empty one is about to be held by its writer
                shutil.rmtree(left, ignore_errors=True)


@contextmanager
def held(folder: Path, *, wait: bool = False) -> Iterator[bool | None]:
    """Hold a folder against others, in this process too: give True, False where another holds it, None if unknown."""
    if sys.platform == "win32":
        yield None
        return
    import fcntl

    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        is_ours: bool | None = True
    except BlockingIOError:
        is_ours = False
    except OSError:  # a file system without locks
        is_ours = None
    try:
        yield is_ours
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str) -> Path:
    """Write UTF-8 text with \\n line ends, whole or not at all."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8", newline="\n")
    return path


def to_json(value: Any) -> str:
    """Write plain values as one line of JSON; what is not finite becomes null."""
    finite = json.loads(json.dumps(value), parse_constant=lambda _: None)
    return json.dumps(finite, separators=(",", ":"), allow_nan=False)


def require_folder(path: Path) -> None:
    """Refuse to save where there is no folder: more likely a slip than a wish for one."""
    if path.is_dir() or not path.parent.is_dir():
        told = "it is a folder; name a file" if path.is_dir() else f"the folder {path.parent} does not exist"
        raise MCBNError(f"cannot save {path.name}: {told}")


def require_output(
    path: Path, inputs: Mapping[str, Any], is_result: Callable[[Path], bool], *, overwrite: bool
) -> Path:
    """Refuse to write where something of the user's is, before any work is done for it.

    inputs: what the command reads, by option; links are found out. `is_result`: an old result, which may be replaced.
    """
    if path.is_dir():
        raise MCBNError(f"--out {path} is a folder; name a file")
    if not path.parent.is_dir():
        raise MCBNError(f"cannot write {path}: the folder {path.parent} does not exist")
    if not path.exists():
        return path
    for option, source in inputs.items():
        if source is not None and os.path.exists(source) and os.path.samefile(source, path):
            raise MCBNError(f"--out {path} is {option} {source} itself; name another file")
    if not is_result(path):
        raise MCBNError(f"--out {path} is there and no old result of this command; name another file")
    if not overwrite:
        raise MCBNError(f"--out {path} is there already; --overwrite replaces it")
    return path


def require_own_folder(path: Path, page: str) -> None:
    """Refuse a folder that holds something, unless one of it is the page that a command left there before."""
    left = (path / page).read_bytes() if (path / page).is_file() else b""
    if path.is_dir() and any(path.iterdir()) and b"mcbn" not in left:
        raise MCBNError(f"--out {path} is not empty and holds no {page} of mcbn's; name another folder")


def require_sane(archive: object, packed: int, unpacked: int) -> None:
    """Refuse an archive that grows beyond all proportion: a small file must not fill memory or disk."""
    if unpacked > max(LEAST_SUSPECT, MOST_RATIO * packed):
        growth = f"unpacks from {packed:,} to {unpacked:,} bytes, more than {MOST_RATIO} times as many"
        raise MCBNError(f"{archive} {growth}; if that is meant, unpack it yourself or write it without compression")


def printable(name: str | Path) -> str:
    """Write a name that need not be UTF-8 as text that can be shown and stored."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")


def cache_folder() -> Path:
    """Return where downloads and compiled kernels are kept: $MCBN_CACHE_DIR, else mcbn in the user's cache folder."""
    named, base = os.environ.get("MCBN_CACHE_DIR"), os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(named).expanduser() if named else Path(base) / "mcbn"


def local_folder() -> Path | None:
    """Return the folder of local copies of data, $MCBN_DATA_DIR; None where it is not set."""
    named = os.environ.get("MCBN_DATA_DIR")
    return Path(named).expanduser() if named else None
