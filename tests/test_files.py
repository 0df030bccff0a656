"""Files appear whole or not at all."""

import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from mcbn import files
from mcbn.errors import MCBNError


def test_a_reader_of_the_old_file_keeps_all_of_it(tmp_path):
    path = files.write_text(tmp_path / "a.txt", "old")
    with path.open() as reader:
        files.write_text(path, "new")
        assert (reader.read(), path.read_text()) == ("old", "new")


def test_an_error_in_the_middle_leaves_the_old_file(tmp_path):
    path = files.write_text(tmp_path / "a.txt", "old")

    def interrupted():
        with files.replacing(path) as temporary:
            temporary.write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_folders_on_the_way_are_made(tmp_path):
    path = files.write_text(tmp_path / "a" / "b.txt", "ä\n")
    assert path.read_bytes() == "ä\n".encode()
    assert list(path.parent.iterdir()) == [path]


def test_a_folder_that_must_be_there_is_named(tmp_path):
    files.require_folder(tmp_path / "a.txt")
    with pytest.raises(MCBNError, match=r"cannot save a\.txt: the folder .*gone does not exist"):
        files.require_folder(tmp_path / "gone" / "a.txt")


def test_what_a_killed_run_left_is_removed_and_what_a_live_one_holds_stays(tmp_path):
    dead, other = tmp_path / ".a.txt.mcbn-dead", tmp_path / ".b.txt.mcbn-dead"
    for folder in (dead, other):
        folder.mkdir()
        (folder / "a.txt").write_text("half")
    mine = tmp_path / ".a.txt.mine"
    mine.mkdir()
    with files.replacing(tmp_path / "a.txt") as outer:
        outer.write_text("outer")
        files.write_text(tmp_path / "a.txt", "inner")  # another run, which must not take this one for dead
        assert outer.read_text() == "outer"
    assert (tmp_path / "a.txt").read_text() == "outer"
    assert not dead.exists()
    assert other.exists()  # of another file, which its own next run removes
    assert mine.exists()
    files.remove_leftovers(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".a.txt.mine", "a.txt"]


def test_a_folder_is_held_once(tmp_path):
    with files.held(tmp_path) as first, files.held(tmp_path) as second:
        assert (first, second) == (True, False)
    with files.held(tmp_path) as again:
        assert again


def test_names_that_are_not_utf_8_can_be_shown():
    assert files.printable(os.fsdecode(b"caf\xe9 \xc3\xa9")) == "caf\\xe9 é"


def test_a_link_stays_one_and_what_is_no_file_stays_what_it_is(tmp_path):
    (tmp_path / "there").mkdir()
    link, fifo = tmp_path / "link", tmp_path / "fifo"
    link.symlink_to(tmp_path / "there" / "a.txt")
    files.write_text(link, "new")
    assert link.is_symlink()
    assert (tmp_path / "there" / "a.txt").read_text() == "new"
    os.mkfifo(fifo)
    for path in (fifo, tmp_path / "there"):
        with pytest.raises(MCBNError, match="is no plain file"):
            files.write_text(path, "new")
    assert fifo.is_fifo()


def test_writers_of_one_file_do_not_take_each_other_for_dead(tmp_path):
    def write(_):
        for _ in range(100):
            files.write_text(tmp_path / "a.txt", "whole")

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, range(4)))
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]
