"""Files appear whole or not at all."""

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
