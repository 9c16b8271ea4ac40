"""The library needs PyTorch, NumPy and safetensors alone: it is used here where nothing else is installed."""

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


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return installed(tmp_path_factory.mktemp("library"), LIBRARY)


@pytest.mark.slow
def test_the_examples_of_the_library_run(alone, tmp_path):
    chosen = [code for code in EXAMPLES if not re.search(OTHERS, code)]
    assert len(chosen) >= 3
    code = f"import os; os.chdir({str(tmp_path)!r})\nfor code in {chosen!r}: exec(code, {{'__name__': '__main__'}})\n"
    code += "import sys; print(sorted({'tyro', 'rich', 'scipy', 'mnemos.lab'} & set(sys.modules)))"
    done = alone("-c", code)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-1] == "[]"


def test_what_needs_the_laboratory_names_the_extra(alone):
    done = alone("-m", "mnemos", "list")
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "tyro" in done.stderr


def test_names_of_the_laboratory_are_not_listed_and_name_the_extra(alone):
    """help() and tools get every name of a list, so without the laboratory its names are not listed."""
    code = "from mnemos import *\nimport mnemos\nprint('fit' in dir(mnemos), 'lab' in mnemos.__all__, cache.__name__)\n"
    code += "for name in ('fit', 'Recipe', 'detect'):\n try: getattr(mnemos, name)\n"
    code += " except mnemos.InputError as error: print('tyro' in str(error))"
    done = alone("-c", code)
    assert done.stdout.split() == ["False", "False", "cache", *["True"] * 3], done.stderr


@pytest.mark.slow
def test_the_laboratory_needs_its_own_extra_alone(tmp_path_factory, tmp_path):
    run = installed(tmp_path_factory.mktemp("laboratory"), (*LIBRARY, *LABORATORY))
    small = "--train.steps 1 --train.eval-every 1 --model.layers 1 --model.dim 8 --model.num-heads 2 --data.rows 4"
    done = run("-m", "mnemos", "train", "demo", *small.split(), "--out", str(tmp_path / "run"))
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "run" / "result.json").is_file()
