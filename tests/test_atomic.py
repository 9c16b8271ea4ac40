"""Files that are replaced whole, and what is read by its name."""

import os
import stat
from pathlib import Path

import pytest

from mnemos import atomic
from mnemos.atomic import (
    append,
    open_to_append,
    read_bytes,
    read_text,
    replacing,
    whole_or_none,
    write_json,
    write_text,
)
from mnemos.errors import InputError


def test_an_error_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "a.txt"
    write_text(path, "old\n")

    def interrupted():
        with replacing(path) as temporary:
            temporary.write_text("half")
            assert path.read_text() == "old\n"
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert path.read_text() == "old\n"
    assert [p.name for p in tmp_path.iterdir()] == ["a.txt"]


def test_the_bytes_are_on_the_disk_before_the_name_and_the_name_before_the_return(tmp_path, monkeypatch):
    done = []
    sync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda d: (done.append(os.path.realpath(f"/proc/self/fd/{d}")), sync(d)))
    monkeypatch.setattr(os, "replace", lambda a, b: (done.append("replace"), replace(a, b)))
    write_json(tmp_path / "a.json", {"a": [1, tmp_path]})
    assert atomic.is_temporary(Path(done[0]))
    assert done[1:] == ["replace", str(tmp_path)]
    assert (tmp_path / "a.json").read_text() == f'{{\n  "a": [\n    1,\n    "{tmp_path}"\n  ]\n}}\n'


def test_an_error_removes_what_was_added_to_a_folder_and_nothing_else(tmp_path):
    def interrupted():
        with whole_or_none(tmp_path):
            (tmp_path / "new").mkdir()
            (tmp_path / "new" / "b").write_text("half")
            raise KeyboardInterrupt

    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "a").write_text("kept")
    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["a", "old"]


def test_a_writer_follows_no_link(tmp_path):
    other = tmp_path / "mine"
    other.write_text("mine")
    for name in ("a", "a.tmp"):  # the file itself, and a name that a temporary file might have
        (tmp_path / name).symlink_to(other)
    write_text(tmp_path / "a", "new")
    assert other.read_text() == "mine"
    assert not (tmp_path / "a").is_symlink()
    assert (tmp_path / "a").read_text() == "new"
    (tmp_path / "b").symlink_to(other)
    with pytest.raises(OSError, match="symbolic link"):
        open_to_append(tmp_path / "b")
    with open_to_append(tmp_path / "c") as file:
        append(file.fileno(), b"line")
    assert ((tmp_path / "c").read_text(), other.read_text()) == ("line", "mine")


def test_a_temporary_file_is_new_and_has_the_usual_mode(tmp_path):
    names = []
    for _ in range(2):
        with replacing(tmp_path / "a") as temporary:
            assert temporary.read_bytes() == b""
            names.append(temporary)
    assert names[0] != names[1]
    (tmp_path / "usual").touch()
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == stat.S_IMODE((tmp_path / "usual").stat().st_mode)
    for name in (names[0].name, "mine.tmp"):
        (tmp_path / name).touch()
    atomic.remove_temporary(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "mine.tmp", "usual"]


@pytest.mark.parametrize("kind", ["pipe", "link to a pipe", "folder", "link to a folder", "device"])
def test_what_is_no_file_is_neither_replaced_nor_read(kind, tmp_path):
    path = {"device": Path("/dev/null")}.get(kind, tmp_path / "here")
    if "link" in kind:
        path.symlink_to(tmp_path / "there")
    if "folder" in kind:
        (tmp_path / "there" if "link" in kind else path).mkdir()
    elif "pipe" in kind:
        os.mkfifo(tmp_path / "there" if "link" in kind else path)
    before = path.lstat()
    with pytest.raises(InputError):
        write_text(path, "new")
    assert path.lstat().st_ino == before.st_ino
    for read in (read_bytes, read_text, open_to_append):
        with pytest.raises(InputError if "folder" not in kind else OSError):
            read(path)
