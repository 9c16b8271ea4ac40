"""The direction of the arrows: a room imports only what stands above it. The package's own `__init__.py` alone may."""

import ast
import importlib.util
import inspect
import pkgutil
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from sources import SOURCE, imports

import mnemos
from mnemos.face import read_face

ROOT = SOURCE.parents[1]

# From the top of the house to its door: the library, then its laboratory, whose rooms are those of mnemos/lab/. The
# registry reads source files and imports nothing, so it is near the top.
LIBRARY = "errors face _compat modes types atomic tree_file generators schedule libraries registry config state_file"
LIBRARY += " memory_replay native ops memory testing attention models generate hosts hugging_face programs trainers"
LABORATORY = "errors hosted tasks measure evaluate vision translation speech run linearised compare report look recipes"
LABORATORY += " papers bench cli"
ROOMS = [*LIBRARY.split(), "lab", *(f"lab.{name}" for name in LABORATORY.split()), "__main__"]
FILES = sorted(p for p in SOURCE.rglob("*.py") if p != SOURCE / "__init__.py")
PUBLIC = {name for name, module in read_face("mnemos").items() if module.startswith("mnemos.lab.")}  # of the laboratory


def room(parts: Sequence[str]) -> str:
    """The room of a module with these names below mnemos."""
    names = [part.removesuffix(".py") for part in parts if part != "__init__.py"]
    return ".".join(names[:2]) if names[0] == "lab" else names[0]


def imported(path: Path) -> set[str]:
    """The rooms a file imports, whether at its top or inside a function."""
    here = ("mnemos", *path.relative_to(SOURCE).with_suffix("").parts)
    found = set()
    for node in imports(path):
        names = [alias.name for alias in node.names]
        if isinstance(node, ast.ImportFrom):
            base = ".".join(here[: len(here) - node.level]) if node.level else ""
            module = ".".join(part for part in (base, node.module) if part)
            names = [f"{module}.{name}" for name in names]
        found |= {room(name.split(".")[1:]) for name in names if name.startswith("mnemos.")}
        found |= {"lab" for name in names if name.removeprefix("mnemos.") in PUBLIC}
    return found & set(ROOMS)


def test_every_room_is_known_and_arrows_point_one_way():
    assert {room(path.relative_to(SOURCE).parts) for path in FILES} <= set(ROOMS)
    wrong = [
        f"{path.relative_to(SOURCE)} imports {other}, which stands below it"
        for path in FILES
        for other in imported(path)
        if ROOMS.index(other) > ROOMS.index(room(path.relative_to(SOURCE).parts))
    ]
    assert not wrong


def test_no_function_has_the_name_of_a_module():
    """`from mnemos.package import name` must mean one thing, whichever of its modules were imported before."""
    packages = [p.name for p in pkgutil.walk_packages(mnemos.__path__, "mnemos.") if p.ispkg]
    assert len(packages) > 10
    for package in (mnemos, *map(importlib.import_module, packages)):
        modules = {m.name for m in pkgutil.iter_modules(package.__path__)} - {"__main__"}
        for name in modules & {*dir(package), *getattr(package, "__all__", ())}:
            assert inspect.ismodule(getattr(package, name)), f"{package.__name__}.{name}"


def test_a_reference_shares_nothing_with_what_it_judges():
    for path in SOURCE.rglob("reference.py"):
        for node in imports(path):
            names = [node.module or "."] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names]
            assert not getattr(node, "level", 0), path
            assert {name.split(".")[0] for name in names} <= {"torch", "math", "collections", "typing"}, path


@pytest.mark.slow
def test_importing_mnemos_and_what_names_things_import_no_heavy_library():
    out = subprocess.run([sys.executable, "-c", LIGHT], capture_output=True, text=True, check=True)
    told = re.findall(r"^\w+ \[.*\]$", out.stdout, re.MULTILINE)
    names = "imported names mnemos models trainers figures training"
    assert told == [f"{name} []" for name in names.split()]


LIGHT = """
import sys

def tell(what, heavy):
    print(what, [name for name in heavy.split() if name in sys.modules])

import mnemos, mnemos.lab.cli
tell("imported", "torch numpy tyro")
for words in "--help", "--version", "train --help", "compare --help", "show":
    mnemos.lab.cli.main(words.split())
tell("names", "torch numpy")  # what only names things loads no PyTorch

mnemos.Transformer, mnemos.Stream
tell("mnemos", "transformers lightning_fabric matplotlib sklearn triton torch._dynamo torch._inductor")

# PyTorch does not import its compiler to check a model.
from mnemos.attention.linear import LinearConfig
from mnemos.models.transformer import TransformerConfig
from mnemos.lab.compare.baselines import parameters
config = TransformerConfig(vocab_size=9, dim=16, layers=1, num_heads=2, attention=LinearConfig())
mnemos.fused_step(config.build().eval())
parameters(config)
tell("models", "torch._dynamo")

import mnemos.trainers  # each of them is for one of these libraries
tell("trainers", "transformers pytorch_lightning")

import mnemos.lab.report  # draw nothing until they are asked to
tell("figures", "matplotlib")

import mnemos.lab.run.run
tell("training", "transformers lightning_fabric rich")
"""


def test_every_listed_name_is_there_and_another_is_refused_with_a_name_that_is_alike():
    rooms = "attention hosts hugging_face memory memory_replay models ops testing trainers"
    for room in rooms.split():
        package = importlib.import_module(f"mnemos.{room}")
        assert set(read_face(f"mnemos.{room}")) <= set(package.__all__), room
    for name, module in read_face("mnemos").items():
        loaded = importlib.import_module(module)
        assert getattr(mnemos, name) is (loaded if module == f"mnemos.{name}" else getattr(loaded, name))
    for package, wrong, right in (
        (mnemos, "Transfomer", "Transformer"),
        (mnemos.attention, "LinearConfg", "LinearConfig"),
    ):
        with pytest.raises(AttributeError, match=f"{wrong}'; did you mean '{right}'"):
            getattr(package, wrong)
    assert not hasattr(mnemos, "nothing")


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: mnemos.GRC(lenght=8), "GRC: .* found 'lenght'; did you mean 'length'?"),
        (lambda: mnemos.GRC(scope="strem"), "GRC.scope: .* found 'strem'; did you mean 'stream'?"),
        (lambda: mnemos.GRC(length="papr"), "GRC.length: .* found 'papr'; did you mean 'paper'?"),
        (lambda: replace(mnemos.TrainConfig(), stpes=8), "TrainConfig: .* did you mean 'steps'?"),
        (lambda: mnemos.Transformer(layrs=8), "Transformer has no field 'layrs'; did you mean 'layers'?"),
        (lambda: mnemos.attention.GatedCacheAttention(16, 2, casual=True), "did you mean 'causal'?"),
        (lambda: mnemos.cache(None, lenght=8), r"cache: .* did you mean GRC\(length=...\)"),
        (lambda: mnemos.cache(None, exmaple=8), "did you mean 'example'?"),
        (lambda: mnemos.linearise(None, qqq=8), "linearise: .* it has model, "),
        (lambda: mnemos.fit(None, None, step=8), "fit: .* did you mean 'steps'?"),
        (lambda: mnemos.replay(None, [], rests=8), "replay: .* did you mean 'resets'?"),
        (lambda: mnemos.export(None, fodler="x"), "export: .* did you mean 'folder'?"),
    ],
)
def test_a_wrong_argument_is_answered_with_the_one_that_is_alike(call, words):
    with pytest.raises(mnemos.InputError, match=words):
        call()
    with pytest.raises(TypeError, match="missing 1 required"):  # another mistake is Python's to tell
        mnemos.Stream()
    assert list(inspect.signature(mnemos.GRC).parameters)[:2] == ["length", "ratio"]


# The size of files, and what the benchmarks take from the package.


def test_no_file_is_longer_than_700_lines():
    lengths = {path: len(path.read_text().splitlines()) for path in FILES}
    assert not {path.name: length for path, length in lengths.items() if length > 700}


def test_no_two_test_files_have_one_name():
    """pytest imports them as modules of one level: together they could not be collected."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))


def test_the_benchmarks_import_names_that_exist():
    for path in (ROOT / "benchmarks").glob("*.py"):
        for node in imports(path):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "mnemos":
                module = importlib.import_module(node.module)
                for name in (alias.name for alias in node.names):
                    assert hasattr(module, name) or importlib.util.find_spec(f"{node.module}.{name}"), path.name
