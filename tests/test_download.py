"""Downloads against a server of our own: cut, wrong, missing, resumed."""

import hashlib
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from mcbn.data.download import disagreement, download
from mcbn.errors import MCBNError
from serving import Served, serving

BODY = bytes(range(256)) * 5000  # 1.28 MB
MD5 = f"md5:{hashlib.md5(BODY).hexdigest()}"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with serving() as server:
        server.files["/a.bin"] = BODY
        yield server


def get(server: Served, folder: Path, digest: str | None = MD5) -> Path:
    return download(f"{server.url}/a.bin", folder / "new" / "a.bin", digest)


def test_whole_file_arrives_under_its_name_alone(server: Served, tmp_path: Path) -> None:
    path = get(server, tmp_path)
    assert path.read_bytes() == BODY
    assert [file.name for file in path.parent.iterdir()] == ["a.bin"]


def test_present_file_is_not_fetched_again(server: Served, tmp_path: Path) -> None:
    get(server, tmp_path)
    get(server, tmp_path)
    assert len(server.asked) == 1


def test_damaged_present_file_is_replaced(server: Served, tmp_path: Path) -> None:
    get(server, tmp_path).write_bytes(BODY[:-1])
    assert get(server, tmp_path).read_bytes() == BODY


def get_in_spite_of_cuts(server: Served, folder: Path, digest: str | None = MD5) -> Path:
    for _ in server.cuts.copy():
        with pytest.raises(MCBNError, match=r"ended after \d+ of \d+ bytes; the same command goes on") as caught:
            get(server, folder, digest)
        assert server.url in str(caught.value)
        assert [file.name for file in (folder / "new").iterdir()] == ["a.bin.part"]  # never under its name
    return get(server, folder, digest)


def test_a_later_call_goes_on_where_an_earlier_one_was_cut(server: Served, tmp_path: Path) -> None:
    server.cuts = [300_000, 400_000]
    assert get_in_spite_of_cuts(server, tmp_path).read_bytes() == BODY
    assert [asked for _, asked in server.asked] == [None, "bytes=300000-", "bytes=700000-"]


def test_server_without_ranges_starts_anew(server: Served, tmp_path: Path) -> None:
    server.ranges, server.cuts = False, [300_000]
    assert get_in_spite_of_cuts(server, tmp_path).read_bytes() == BODY


@pytest.mark.parametrize("start", [b"from another version", BODY, BODY + b"too long"])
def test_part_of_another_file_is_dropped_and_the_whole_fetched(server: Served, tmp_path: Path, start: bytes) -> None:
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "a.bin.part").write_bytes(start)
    assert get(server, tmp_path).read_bytes() == BODY
    assert server.asked[-1] == ("/a.bin", None)


def test_wrong_bytes_are_refused_and_not_kept(server: Served, tmp_path: Path) -> None:
    server.files["/a.bin"] = b"x" + BODY[1:]
    digest = hashlib.md5(server.files["/a.bin"]).hexdigest()
    with pytest.raises(MCBNError, match=f"expected md5 {MD5[4:]}, found {digest}; nothing was kept"):
        get(server, tmp_path)
    assert list((tmp_path / "new").iterdir()) == []


def test_missing_page_is_said(server: Served, tmp_path: Path) -> None:
    with pytest.raises(MCBNError, match=r"/b\.bin answers 404"):
        download(f"{server.url}/b.bin", tmp_path / "b.bin", MD5)
    assert list(tmp_path.iterdir()) == []


def test_nobody_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    with pytest.raises(MCBNError, match=r"failed: .*refused"):
        download(f"http://127.0.0.1:{port}/a", tmp_path / "a", None)


def test_without_a_digest_the_file_is_taken_whole(server: Served, tmp_path: Path) -> None:
    server.cuts = [10]
    assert get_in_spite_of_cuts(server, tmp_path, None).read_bytes() == BODY


def test_disagreement_names_both(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"a")
    right = hashlib.sha256(b"a").hexdigest()
    assert disagreement(tmp_path / "a", f"sha256:{right}") is None
    assert disagreement(tmp_path / "a", "sha256:00") == f"expected sha256 00, found {right}"
