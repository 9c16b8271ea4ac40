"""The library needs PyTorch, NumPy and safetensors alone: it is used here where nothing else is installed."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import mnemos

ROOT = Path(__file__).parents[1]
PAGES = "".join((ROOT / name).read_text() for name in ("README.md", "docs/state.md", "docs/memformer.md"))
EXAMPLES = re.findall(r"```python\n(.*?)```\n(?:```text\n.*?```)?", PAGES, re.DOTALL)
OTHERS = "transformers|mnemos.fit|mnemos.lab|onnxruntime"  # what an example needs beside the library


def needed(name: str, known: dict) -> dict:
    """A distribution and all that it needs on this machine, by name."""
    if name not in known:
        known[name] = distribution(name)
        for text in known[name].requires or ():
            one = Requirement(text)
            if one.marker is None or one.marker.evaluate({"extra": ""}):
                needed(one.name, known)
    return known


def installed(folder: Path, names: Sequence[str]) -> Callable[..., subprocess.CompletedProcess]:
    """Runs a Python program for which mnemos, these distributions and what they need are installed, nothing else."""
    known: dict = {}
    for name in names:
        needed(name, known)
    for one in known.values():
        for file in one.files or ():
            top = file.parts[0]
            if top != ".." and not (folder / top).exists():
                (folder / top).symlink_to(Path(str(one.locate_file(top))).resolve())
    (folder / "mnemos").symlink_to(Path(mnemos.__file__).parent)

    def run(*words: str) -> subprocess.CompletedProcess:
        environment = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
        return subprocess.run([sys.executable, "-S", *words], capture_output=True, text=True, env=environment)

    return run


LIBRARY = ("torch", "numpy", "safetensors")
LABORATORY = ("lightning-fabric", "matplotlib", "rich", "scipy", "tyro")
# One process, because most of its seconds are imports. Its lines are the names of the laboratory that are imported,
# what `mnemos list` gives, and what names of the laboratory are.
PROGRAM = """
import os; os.chdir({folder!r})
for code in {examples!r}: exec(code, {{'__name__': '__main__'}})
import contextlib, io, json, sys
print(json.dumps(sorted({{'tyro', 'rich', 'scipy', 'mnemos.lab'}} & set(sys.modules))))
from mnemos.__main__ import main
sys.argv[1:] = ['list']
with contextlib.redirect_stderr(io.TextIOWrapper(io.BytesIO(), write_through=True)) as said: code = main()
print(json.dumps([code, said.buffer.getvalue().decode()]))
from mnemos import *
import mnemos
print(json.dumps(['fit' in dir(mnemos), 'lab' in mnemos.__all__, cache.__name__]))
for name in ('fit', 'Recipe', 'detect'):
    try: getattr(mnemos, name)
    except mnemos.InputError as error: print(json.dumps('tyro' in str(error)))
"""


def test_the_library_needs_three_distributions(tmp_path_factory, tmp_path):
    """The pages' examples run; the laboratory names the extra that it needs, and its names are not listed.

    help() and tools get every name of a list, so they would load the laboratory for each.
    """
    alone = installed(tmp_path_factory.mktemp("library"), LIBRARY)
    chosen = [code for code in EXAMPLES if not re.search(OTHERS, code)]
    assert len(chosen) >= 3
    done = alone("-c", PROGRAM.format(folder=str(tmp_path), examples=chosen))
    assert done.returncode == 0, done.stderr[-3000:]
    imported, (code, said), names, *named = map(json.loads, done.stdout.splitlines()[-6:])
    assert imported == []
    assert code == 2
    assert len(said.splitlines()) == 1
    assert "tyro" in said
    assert names == [False, False, "cache"]
    assert named == [True] * 3


@pytest.mark.slow
@pytest.mark.exhaustive
def test_the_laboratory_needs_its_own_extra_alone(tmp_path_factory, tmp_path):
    run = installed(tmp_path_factory.mktemp("laboratory"), (*LIBRARY, *LABORATORY))
    small = "--train.steps 1 --model.layers 1 --model.dim 8 --data.train-size 8 --data.valid-size 4 --data.test-size 4"
    done = run("-m", "mnemos", "train", "short-listops", *small.split(), "--out", str(tmp_path / "run"))
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "run" / "result.json").is_file()
