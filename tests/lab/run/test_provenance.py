"""Where a number comes from: the commit that trained each run, what counts as changed, and the exact data."""

import dataclasses
import hashlib
import json
import os
import subprocess
from pathlib import Path

import pytest
from test_photos import photos

from mnemos.config import to_dict
from mnemos.lab.run import provenance as module
from mnemos.lab.run.provenance import data_read, shared, source, trained
from mnemos.lab.tasks.photos import PhotosConfig
from mnemos.lab.tasks.recall import RecallConfig
from mnemos.lab.tasks.task import DataConfig
from mnemos.lab.tasks.text import TextConfig


@pytest.fixture
def checkout(tmp_path, monkeypatch) -> Path:
    """A repository with a package, that mnemos is taken to run from."""
    package = tmp_path / "repository" / "src" / "package"
    package.mkdir(parents=True)
    for path in (package / "__init__.py", package.parents[1] / "results.json"):
        path.write_text("first\n")
    for command in (("init", "-q"), ("add", "-A"), ("commit", "-qm", "first")):
        who = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", *who, *command], cwd=package.parents[1], check=True)
    monkeypatch.setattr(module.mnemos, "__file__", str(package / "__init__.py"))
    monkeypatch.setattr(module, "_git", module._git.__wrapped__)  # its answers change
    return package


def test_other_names_and_contents_of_the_source_have_other_hashes(checkout):
    def hashed(name: str, text: str) -> str:
        (checkout / name).write_text(text)
        found = module.source_hash.__wrapped__()  # the function itself keeps its first answer
        (checkout / name).unlink()
        return found

    files = [("a.py", "x"), ("b.py", "x"), ("a.py", "y"), ("a.cpp", "x"), ("a.h", "x"), ("a.txt", "x"), ("b.txt", "x")]
    hashes = [hashed(*one) for one in files]
    assert len({*hashes}) == 6
    assert hashes[-1] == hashes[-2] == module.source_hash.__wrapped__()
    assert hashed("a.py", "x") == hashes[0]


def test_only_the_source_of_the_package_makes_a_run_dirty(checkout):
    clean = source()
    assert len(clean["commit"]) == 40
    assert clean["dirty"] is False
    (checkout / "notes.txt").write_text("untracked\n")
    (checkout.parents[1] / "script.py").write_text("outside\n")
    (checkout.parents[1] / "results.json").write_text("new numbers\n")
    assert source() == clean
    recipe = checkout / "recipes" / "mine.py"  # the registry reads it, tracked or not
    recipe.parent.mkdir()
    recipe.write_text("untracked\n")
    assert source() == {**clean, "dirty": True}
    recipe.unlink()
    (checkout / "__init__.py").write_text("second\n")
    assert source() == {**clean, "dirty": True}


def test_a_source_without_git_has_no_commit(monkeypatch, tmp_path):
    monkeypatch.setattr(module.mnemos, "__file__", str(tmp_path / "__init__.py"))
    assert source() == {"commit": None, "dirty": None}


def test_files_are_named_sized_and_hashed(tmp_path):
    (tmp_path / "b").mkdir()
    for name, text in (("b/two.txt", "two"), ("one.txt", "one!")):
        (tmp_path / name).write_text(text)
    found = data_read(TextConfig(path=str(tmp_path)))
    digest = lambda text: hashlib.sha256(text.encode()).hexdigest()  # noqa: E731
    files = [
        {"name": name, "bytes": len(text), "sha256": digest(text)}
        for name, text in (("b/two.txt", "two"), ("one.txt", "one!"))
    ]
    total = digest("".join(f"{f['name']}\t{f['bytes']}\t{f['sha256']}\n" for f in files))
    assert found == {"count": 2, "bytes": 7, "sha256": total, "hashed": 2, "files": files}
    (tmp_path / "one.txt").write_text("ONE!")  # as long as before
    os.utime(tmp_path / "one.txt", ns=(1, 1))
    assert data_read(TextConfig(path=str(tmp_path)))["sha256"] != total


def test_generated_data_are_their_settings_and_what_says_nothing_is_not_taken_for_generated():
    assert data_read(RecallConfig()) == {"generated": {"settings": to_dict(RecallConfig()), "version": 1}}
    assert data_read(DataConfig()) == {"files": None}


def _photos(folder: Path) -> DataConfig:
    for split in ("train", "test"):
        photos(folder / split, ("cat", "dog"))
    (folder / "train" / "cat" / ".hidden.png").write_bytes(b"")
    return PhotosConfig(folder=str(folder), size=8)


def _text(folder: Path) -> DataConfig:
    folder.mkdir()
    for i in range(4):
        (folder / f"{i}.txt").write_text(f"text {i} " * 200)
    (folder / ".hidden").write_text("not read")
    return TextConfig(path=str(folder), segment=16)


@pytest.mark.parametrize("make", [_photos, _text])
def test_the_listed_files_are_all_that_a_task_reads(make, tmp_path):
    config = make(tmp_path / "whole")
    field = "folder" if hasattr(config, "folder") else "path"
    files = data_read(config)["files"]
    assert [one["name"] for one in files] == sorted(
        str(path.relative_to(tmp_path / "whole"))
        for path in (tmp_path / "whole").rglob("*")
        if path.is_file() and not path.name.startswith((".", "notes", "readme"))
    )
    for one in files:
        copied = tmp_path / "listed" / one["name"]
        copied.parent.mkdir(parents=True, exist_ok=True)
        copied.write_bytes((tmp_path / "whole" / one["name"]).read_bytes())
    other = dataclasses.replace(config, **{field: str(tmp_path / "listed")})
    a, b = (each.build().train_batch(0, 2, 0) for each in (config, other))
    assert a.inputs.equal(b.inputs)
    assert a.targets.equal(b.targets)


def test_a_comparison_says_which_commit_trained_each_run_and_what_all_share(tmp_path):
    data = {"count": 21, "bytes": 2, "sha256": "c", "hashed": 21, "files": [{"name": str(i)} for i in range(21)]}
    same = {"device": "cpu", "data": data, "finished": "2026-01-02", "command": ["mnemos", "train"]}
    runs = {
        "a": {"seed": 0, "commit": "old", "dirty": True, "started": "2026-01-02", "resumed": []},
        "b": {"seed": 1, "commit": "new", "dirty": False, "started": "2026-01-01"},
    }
    runs["b"]["resumed"] = [{"step": 3, "at": "2026-01-01", "commit": "newer", "dirty": False, "command": []}]
    for name, about in runs.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").write_text(json.dumps(same | about))
    assert [trained(tmp_path / name, name) for name in runs] == [
        {"folder": "a", "seed": 0, "commit": "old", "dirty": True},
        {"folder": "b", "seed": 1, "commit": "new", "dirty": False, "resumed": [{"commit": "newer", "dirty": False}]},
    ]
    found = shared([tmp_path / name for name in runs])
    assert {"commit", "dirty", "seed", "resumed"}.isdisjoint(found)
    assert found["reported"] == source()
    assert found["data"] == {key: value for key, value in data.items() if key != "files"}
    assert (found["device"], found["started"], found["finished"]) == ("cpu", "2026-01-01", "2026-01-02")
