"""Downloads that go on where they stopped and are checked before they count."""

import hashlib
import http.client
import os
import urllib.error
import urllib.request
from pathlib import Path

from mcbn.errors import MCBNError
from mcbn.progress import bar

BLOCK = 1 << 18
TIMEOUT = 30.0  # seconds without a byte


def download(url: str, path: Path, digest: str | None) -> Path:
    """Fetch `url` to `path`; what an earlier call left in `path`.part is kept and only the rest is asked for.

    The file appears under its name only whole and checked; one that is there already is not fetched again. digest:
    "md5:..." or "sha256:...", in hexadecimal; None where none is published, and then the caller checks the contents.
    """
    if path.is_file() and digest is not None and disagreement(path, digest) is None:
        return path
    part = path.with_name(f"{path.name}.part")
    path.parent.mkdir(parents=True, exist_ok=True)
    resumed = part.exists()
    try:
        _fetch(url, part)
        wrong = disagreement(part, digest)
    except urllib.error.HTTPError as error:
        wrong = f"{url} answers {error.code} {error.reason}"
        if not resumed or error.code != http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
            raise MCBNError(wrong) from error
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None) or error
        raise MCBNError(f"the download of {url} failed: {reason}; the same command goes on from there") from error
    if wrong:
        part.unlink()
        if resumed:  # the start may be of another version of the file
            return download(url, path, digest)
        raise MCBNError(f"{url} is not the published file: {wrong}; nothing was kept of it")
    os.replace(part, path)
    return path


def disagreement(path: Path, digest: str | None) -> str | None:
    """Say how a file differs from its digest, "md5:..." or "sha256:..."; None where it agrees."""
    if digest is None:
        return None
    kind, expected = digest.split(":")
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, lambda: hashlib.new(kind, usedforsecurity=False)).hexdigest()
    return None if digest == expected else f"expected {kind} {expected}, found {digest}"


def _fetch(url: str, part: Path) -> None:
    """Ask for what is missing. A server that cannot send a rest sends the whole, and the part starts anew."""
    have = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {})
    with urllib.request.urlopen(request, timeout=TIMEOUT) as response:
        have = have if response.headers.get("Content-Range", "").startswith(f"bytes {have}-") else 0
        length = response.headers.get("Content-Length")
        total = have + int(length) if length else None
        with part.open("ab" if have else "wb") as file, bar(part.stem, total, "B") as tick:
            tick(have)
            while block := response.read(BLOCK):
                tick(file.write(block))
    if total is not None and part.stat().st_size < total:
        raise ConnectionError(f"the connection ended after {part.stat().st_size} of {total} bytes")
