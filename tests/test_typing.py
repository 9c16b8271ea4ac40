"""The package's types as a program outside it sees them: mypy on a program that uses public names alone."""

import dataclasses
import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest

import mnemos

SOURCE = Path(mnemos.__file__).parents[1]

RIGHT = """
from typing import assert_type

import torch
from torch import Tensor

import mnemos
from mnemos.attention import (
    GatedCacheAttention,
    LinearAttention,
    RelativeAttention,
    SoftmaxAttention,
)
from mnemos.attention.gated import GatedState
from mnemos.attention.linear import PlacedSums
from mnemos.lab.papers.baselines.reformer.layer import ReformerAttention
from mnemos.memory import KeyValues, Segments
from mnemos.memory.key_values import BranchedKeyValues
from mnemos.models import LSTM, LSTMConfig, LSTMState, MemformerState, TransformerState
from mnemos.ops.linear import LinearState
from mnemos.types import Advances, Attention, HeadAttention, RecurrentModel

x = torch.zeros(1, 3, 8)
ids = torch.zeros(1, 3, dtype=torch.int64)

softmax = SoftmaxAttention(8, 2, causal=True)
assert_type(softmax(x), tuple[Tensor, KeyValues | BranchedKeyValues | None])
assert_type(LinearAttention(8, 2, causal=True)(x), tuple[Tensor, LinearState | PlacedSums | None])
assert_type(ReformerAttention(8, 2)(x), tuple[Tensor, KeyValues | None])
assert_type(RelativeAttention(8, 2)(x), tuple[Tensor, Segments | None])
gated = GatedCacheAttention(8, 2, softmax, mnemos.GRC(length=4), causal=True)
assert_type(gated(x), tuple[Tensor, GatedState | None])
layers: list[HeadAttention] = [softmax, gated]
attention: Attention = gated

model = mnemos.Transformer(dim=8, num_heads=2)
logits, state = model(ids)
assert_type(state, TransformerState | None)
assert_type(mnemos.Memformer()(ids), tuple[Tensor, MemformerState])
assert_type(LSTM(LSTMConfig())(ids), tuple[Tensor, LSTMState])
models: list[RecurrentModel] = [model, mnemos.Memformer(), LSTM(LSTMConfig())]
advances: Advances = mnemos.Memformer()

# A state keeps its type.
assert_type(mnemos.select(state, torch.tensor([0])), TransformerState | None)
assert_type(mnemos.reset(state, torch.tensor([True])), TransformerState | None)
assert_type(mnemos.detach(softmax(x)[1]), KeyValues | BranchedKeyValues | None)
assert_type(mnemos.join([softmax(x)[1], softmax(x)[1]]), KeyValues | BranchedKeyValues | None)

with mnemos.collect_auxiliary_losses() as found:
    mnemos.add_auxiliary_loss(x.sum())
assert_type(found[0], Tensor)

stream = mnemos.Stream(model).prefill(ids)
tokens, stream = stream.generate(3)
assert_type(tokens, Tensor)
result = mnemos.replay(lambda segment, state: (segment.sum(), state), [x, x])
assert_type(result.losses, Tensor)
"""

# Each line is wrong, and the checker says so.
WRONG = """
import torch
import mnemos
from mnemos.attention import GatedCacheAttention, SoftmaxAttention

SoftmaxAttention(8, 2)("text")
SoftmaxAttention(8, "two")
GatedCacheAttention(8, 2, torch.nn.Linear(8, 8))
mnemos.GRC(preset="papre")
mnemos.Stream(mnemos.Memformer()).generate("many")
mnemos.add_auxiliary_loss(0.5)
mnemos.no_such_name
"""


@pytest.mark.exhaustive  # and `make check`, after mypy has read PyTorch's types
def test_a_program_outside_is_type_checked(tmp_path):
    pytest.importorskip("mypy")
    for name, program in (("right.py", RIGHT), ("wrong.py", WRONG)):
        (tmp_path / name).write_text(program)
    # Settings and cache are those of `make check`.
    project = SOURCE.parent / "pyproject.toml"
    options = ["--config-file", project, "--cache-dir", SOURCE.parent / ".mypy_cache"] if project.exists() else []
    found = subprocess.run(
        [sys.executable, "-m", "mypy", *map(str, options), "right.py", "wrong.py"],
        capture_output=True,
        text=True,
        env={**os.environ, "MYPYPATH": str(SOURCE)},
        cwd=tmp_path,
        check=False,
    )
    said = found.stdout + found.stderr
    refused = {tuple(line.split(":")[:2]) for line in found.stdout.splitlines() if ": error:" in line}
    code = [n for n, line in enumerate(WRONG.splitlines(), 1) if line and not line.startswith(("import", "from"))]
    assert refused == {("wrong.py", str(n)) for n in code}, said


def test_models_have_the_signature_of_their_configurations():
    """For `help`, editors and notebooks: the configuration's fields with their defaults and meanings."""
    for model, config in ((mnemos.Transformer, mnemos.TransformerConfig), (mnemos.Memformer, mnemos.MemformerConfig)):
        names = [f.name for f in dataclasses.fields(config)]
        found = inspect.signature(model).parameters
        assert [*found] == ["config", *names]
        assert found["dim"].default == config().dim
        said = (inspect.getdoc(model) or "").partition("\nFields:\n")[2]
        assert [line.split(":")[0].strip() for line in said.splitlines() if line[4:5].strip()] == names, (
            "their meanings"
        )


def test_the_package_says_that_it_is_typed():
    """Without `py.typed` a checker takes every name of an installed package for Any."""
    pytest.importorskip("mypy")
    from mypy.modulefinder import FindModuleCache, ModuleNotFoundReason, SearchPaths
    from mypy.options import Options

    assert (SOURCE / "mnemos" / "py.typed").is_file()
    installed = SearchPaths((), (), (str(SOURCE),), ())  # as if the folder were site-packages
    found = FindModuleCache(installed, None, Options()).find_module("mnemos")
    assert not isinstance(found, ModuleNotFoundReason), found
