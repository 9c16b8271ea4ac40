"""`mnemos.export`: a model's programs in a folder, with what a reader needs to run them without this library."""

from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import nn

from mnemos.atomic import whole_or_none, write_json
from mnemos.config import to_dict
from mnemos.errors import InputError
from mnemos.modes import plain_module
from mnemos.types import likelihood_of

from .onnx_graphs import onnx_graph
from .steps import ROWS, SOURCE, TOKENS, Programs, Shape, export_programs

Target = Literal["onnx", "onnxruntime", "torch"]
TARGETS: tuple[str, ...] = get_args(Target)
ABOUT = "program.json"


def export(model: nn.Module, folder: str | Path, to: Target = "onnx") -> Path:
    """Write a causal model with a state as programs that run without this library; returns the folder.

        folder = mnemos.export(model, "program")             # step.onnx, prefill.onnx, state.npz, program.json

    step: `outputs, state = step(tokens, state)` for tokens [rows, 1]; prefill: for [rows, T], any T of at least 1.
    state.npz: the state of a new row. program.json: names, types and shapes of all inputs and outputs. An
    encoder-decoder has a program encode too: the state of new rows from `source` and `valid` [rows, S].

    to: "onnx": ONNX's operators alone, for any runtime; "onnxruntime": with ONNX Runtime's own kernels, of linear
    attention (releases from 1.25.1 on), the delta rule and decayed attention (tested with 1.32); "torch":
    programs that `torch.export.load` reads. Cost: seconds to a minute; the weights are in each program.
    Raises InputError, and writes nothing, for a folder that is not empty, a model without a causal state, one whose
    weights are not float32 (or float64 with "torch": ONNX Runtime lacks kernels for it), one that is not exportable (it
    names the part), and where onnx or onnxscript is missing.
    """
    if to not in TARGETS:
        raise InputError(f"export: expected to={' or '.join(map(repr, TARGETS))}, found {to!r}")
    folder = Path(folder)
    check_new(folder)
    if not isinstance(model, nn.Module):
        raise InputError(f"export: expected a model, an nn.Module, found {type(model).__name__}; give the model itself")
    known = {torch.float32, torch.float64} if to == "torch" else {torch.float32}
    model = plain_module(model, "export")
    types = {x.dtype for x in model.parameters()} - known
    if types:
        wanted, found = (" or ".join(sorted(map(str, some))) for some in (known, types))
        raise InputError(f"export: expected weights of {wanted} for to={to!r}, found {found}; call model.float() first")
    programs = export_programs(model, "onnxruntime" if to == "onnxruntime" else "operators")
    names = [name for name in ("step", "prefill", "encode") if getattr(programs, name) is not None]
    ending = "pt2" if to == "torch" else "onnx"
    with whole_or_none(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for name in names:
            program = getattr(programs, name)
            if to == "torch":
                torch.export.save(program, folder / f"{name}.{ending}")
            else:
                _write_onnx(programs, name, folder)
        state: dict[str, Any] = {name: x.numpy() for name, x in programs.state.items()}
        np.savez_compressed(folder / "state.npz", **state)
        about = {
            "programs": {name: f"{name}.{ending}" for name in names},
            "outputs are": _outputs_are(model),
            **_interface(programs),
            "model": to_dict(model.config) if hasattr(model, "config") else type(model).__name__,
        }
        write_json(folder / ABOUT, about)
    return folder


def check_new(folder: Path) -> None:
    """Raise InputError unless a folder is new or empty."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        found = "one that has files" if folder.is_dir() else "a file"
        raise InputError(
            f"{folder}: expected a new or empty folder, found {found}; name another, as by --out, or remove it"
        )


def _write_onnx(programs: Programs, name: str, folder: Path) -> None:
    states = list(programs.state)
    if name == "encode":
        graph = onnx_graph(getattr(programs, name), ["source", "valid"], states)
    else:
        graph = onnx_graph(getattr(programs, name), ["tokens", *states], ["outputs", *map(after, states)])
    graph.save(folder / f"{name}.onnx")


def after(name: str) -> str:
    """The name of a state's tensor among the outputs of a program."""
    return f"after.{name}"


def _interface(programs: Programs) -> dict[str, Any]:
    """The inputs and outputs of the programs, in their order."""
    outputs, _ = programs.step.module()(torch.zeros(1, 1, dtype=torch.int64), programs.state)
    state = [_entry(name, x.dtype, programs.shapes[name]) for name, x in programs.state.items()]
    found = {
        "inputs": [_entry("tokens", torch.int64, (ROWS, TOKENS)), *state],
        "outputs": [
            _entry("outputs", outputs.dtype, (ROWS, TOKENS, outputs.shape[2])),
            *({**one, "name": after(one["name"])} for one in state),
        ],
    }
    if programs.encode is not None:
        size = ROWS, SOURCE
        found["inputs of encode"] = [_entry("source", torch.int64, size), _entry("valid", torch.bool, size)]
    return found


def _entry(name: str, dtype: torch.dtype, shape: Shape) -> dict[str, Any]:
    return {"name": name, "type": str(dtype).removeprefix("torch."), "shape": list(shape)}


def _outputs_are(model: nn.Module) -> str:
    likelihood = likelihood_of(model)
    if likelihood is None:
        return "logits"
    known = hasattr(likelihood, "log_prob")
    return "log-probabilities" if known else f"parameters of a {type(likelihood).__name__}"
