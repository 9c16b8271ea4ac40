"""Files that are replaced whole."""

import os

import pytest

from mnemos.atomic import replacing, whole_or_none, write_json, write_text


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
    assert done == [str(tmp_path / "a.json.tmp"), "replace", str(tmp_path)]
    assert (tmp_path / "a.json").read_text() == f'{{\n  "a": [\n    1,\n    "{tmp_path}"\n  ]\n}}\n'


def test_a_refusing_disk_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "a"
    write_text(path, "old")

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_text(path, "new")
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


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
