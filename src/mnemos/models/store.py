"""A model on disk, safetensors and a configuration in JSON, without pickle; and a model without values, a skeleton.

From top to bottom: `save` and `load`; `build_within`, which builds what a stranger's configuration asks for within the
sizes of its weights; `skeleton`, the modules, names and shapes of a configuration at no cost of initialisation.
"""

import hashlib
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from mnemos import generators, registry
from mnemos.atomic import check_output_folder, parse, read_text, replacing, sort_metadata, write_json
from mnemos.config import ModelConfig, from_dict, to_dict
from mnemos.errors import one_line
from mnemos.modes import plain_module
from mnemos.types import InputError

RUN_MODEL = "model"  # the folder of a finished run that holds its model


def save(model: nn.Module, folder: str | Path) -> None:
    """Write `model.safetensors` and `config.json`, each completely or not at all.

    A compiled model is saved as the model itself. Raises InputError unless the model has a `config` of this library
    and the tensors that this builds, and for a folder that is a file.
    """
    from safetensors.torch import save_model

    model = plain_module(model, "save")
    config = getattr(model, "config", None)
    if not isinstance(config, ModelConfig):
        raise InputError(
            f"save: expected a model of this library, found {type(model).__name__}; save its state_dict instead"
        )
    check_built_as(model, skeleton(config), "save")
    folder = Path(folder)
    check_output_folder(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with replacing(folder / "model.safetensors") as temporary:
        save_model(model, str(temporary))
        sort_metadata(temporary)
        about = {"model": to_dict(config), "sha256": _digest(temporary)}
    write_json(folder / "config.json", about)


def check_built_as(model: nn.Module, built: nn.Module, verb: str) -> None:
    """Raise InputError unless a model has the tensors of the one that its configuration builds: none could read it."""
    own, wanted = (
        {name: tuple(x.shape) if isinstance(x, torch.Tensor) else () for name, x in m.state_dict().items()}
        for m in (model, built)
    )
    if others := sorted(own.items() ^ wanted.items()):
        raise InputError(
            f"{verb}: expected the tensors that the model's config builds, found others, as in {others[0][0]!r}; undo "
            "what changed its modules, or save its state_dict"
        )


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def load(folder: str | Path) -> Any:
    """The model that `save` wrote, in eval mode. folder: what `save` wrote, or a finished run, whose model it has.

    Each tensor has the dtype that it was saved with. The folder need not be trusted: nothing in it is executed, and
    the model is built within the sizes of its weights (`build_within`), so that settings of another size end in an
    error before memory is allocated for them.
    Raises InputError for a missing, damaged or other folder, for settings and weights that do not fit together, and
    for a run that is not finished.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file, load_model

    folder = _folder_of_model(Path(folder))
    settings, weights = folder / "config.json", folder / "model.safetensors"

    def other(problem: object) -> InputError:
        return InputError(
            f"{weights}: expected this model's weights, found others ({one_line(problem)}); save it again"
        )

    # --- the configuration, and whether the weights are those beside which it was written ---
    try:
        about = parse(read_text(settings))
        if not isinstance(about, dict) or not {"model", "sha256"} <= about.keys():
            raise InputError("expected a model and its sha256, as mnemos.save writes them")
        config = from_dict(ModelConfig, about["model"], "model")
    except json.JSONDecodeError as error:
        raise InputError(f"{settings}: line {error.lineno}: not JSON ({error.msg}); save the model again") from None
    except (InputError, UnicodeDecodeError, OSError) as error:
        fix = "" if "plug-in" in str(error) else "; save the model again"  # that error says what to do
        raise InputError(f"{settings}: {error}{fix}") from None
    if _digest(weights) != about["sha256"]:
        raise InputError(f"{weights}: expected the bytes that were saved, found others; save the model again")
    try:
        saved = load_file(weights)  # mapped into memory: no value is read before the model is built
    except (SafetensorError, OSError) as error:
        raise other(error) from None
    # --- the model, within these sizes ---
    try:
        model = build_within(config, len(saved), sum(x.numel() for x in saved.values()))
    except InputError as error:
        raise InputError(f"{settings}: {error}; save the model again") from error.__cause__
    # --- its dtypes; of tensors that share memory one is saved, and `load_model` checks that no other is missing ---
    own = model.state_dict(keep_vars=True)
    for name, x in saved.items():
        mine = own.get(name)
        alike = mine is not None and (x.dtype == mine.dtype or (x.is_floating_point() and mine.is_floating_point()))
        if mine is None or not alike or x.shape != mine.shape:
            wanted = "none in the model" if mine is None else f"{mine.dtype} {tuple(mine.shape)} in the model"
            raise other(f"{name}: {x.dtype} {tuple(x.shape)} in the file, {wanted}")
    others = {x.dtype for name, x in saved.items() if x.dtype != own[name].dtype}
    if len(others) == 1 and others == {x.dtype for x in saved.values() if x.is_floating_point()}:
        model.to(others.pop())  # as a whole, so that the buffers that are not saved follow
    for name, value in model.state_dict(keep_vars=True).items():
        if name in saved and value.dtype != saved[name].dtype:
            value.data = value.data.to(saved[name].dtype)
    # --- its values ---
    try:
        load_model(model, str(weights))
    except (SafetensorError, RuntimeError, OSError) as error:
        raise other(error) from None
    return model.eval()


def _folder_of_model(folder: Path) -> Path:
    """Where config.json and model.safetensors are: the folder itself, or that of a finished run."""
    recipe = folder / "recipe.json"
    if recipe.is_file() and not (folder / "config.json").is_file():
        try:
            trained_by_fit = parse(read_text(recipe))["model"]["is"] == "own"
        except (OSError, ValueError, LookupError, TypeError):
            trained_by_fit = False
        if trained_by_fit and not (
            (folder / RUN_MODEL / "config.json").is_file() and (folder / "result.json").exists()
        ):
            raise InputError(
                f"{folder}: expected a finished run with a model of this library, found one of mnemos.fit that is of "
                "your own class, or not finished; mnemos.fit(..., resume=True) reads its weights into the model"
            )
        missing = next((name for name in (RUN_MODEL, "result.json") if not (folder / name).exists()), None)
        if missing is not None:  # a run that is being trained for longer has the model of its earlier end
            raise InputError(
                f"{folder}: expected a finished run, found no {missing} in it; continue the run with "
                "mnemos train --resume"
            )
        folder = folder / RUN_MODEL
    if not (folder / "config.json").is_file() or not (folder / "model.safetensors").is_file():
        if not folder.exists():
            raise InputError(
                f"{folder}: expected the folder of a run or of a model, found {registry.missing_folder(folder)}"
            )
        raise InputError(
            f"{folder}: expected a run, with recipe.json, or a model of mnemos.save, with config.json and "
            "model.safetensors, found a folder without these; check the path"
        )
    return folder


def build_within(config: ModelConfig, tensors: int, values: int) -> nn.Module:
    """The model of a configuration whose weights are `tensors` tensors with `values` values in total.

    Raises InputError for one that makes clearly more tensors or values, and for one that cannot be built.
    """
    try:
        with _Budget(tensors, values):
            model: nn.Module = config.build()
    except InputError:
        raise
    except Exception as error:  # sizes that no library expects end in its internal errors
        raise InputError(
            "expected the settings of a model, found ones that cannot be built "
            f"({type(error).__name__}: {one_line(error)})"
        ) from error
    return model


class _Budget(TorchFunctionMode):
    """Refuses tensors before they are made: the configuration may come from a stranger and ask for terabytes."""

    def __init__(self, tensors: int, values: int) -> None:
        super().__init__()
        self.saved, self.tensors, self.values = (tensors, values), 0, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named, name = kwargs or {}, getattr(func, "__name__", "")
        if name in ("empty", "zeros", "ones", "rand", "randn", "arange"):
            sizes = [n for one in (*args, named.get("size", ())) for n in (one if isinstance(one, Sequence) else [one])]
            self.tensors += 1
            self.values += max(sizes, default=0) if name == "arange" else math.prod(sizes)
            # What a model needs beyond its saved tensors: weights that are drawn and then tied, and tables.
            if self.tensors > 4 * self.saved[0] + 200 or self.values > max(2**26, 4 * self.saved[1]):
                raise InputError(
                    f"expected a model of {self.saved[0]:,} tensors with {self.saved[1]:,} values, as its weights "
                    f"have, found settings that need {self.tensors:,} tensors with {self.values:,} values, or more"
                )
        return func(*args, **named)


def skeleton(config: ModelConfig) -> nn.Module:
    """The model that a configuration describes, on the CPU, with arbitrary values in its parameters.

    The parameters are never written, so the system gives them no memory, and random generators stay as they are. The
    meta device would do the same, but the first operation on it imports PyTorch's compiler, which takes seconds.
    """
    with generators.preserve(), _WithoutValues():
        model: nn.Module = config.build()
    return model


class _WithoutValues(TorchFunctionMode):
    """A mode in which operations that write into a parameter, such as those of `torch.nn.init`, do nothing."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named, name = kwargs or {}, getattr(func, "__name__", "")
        target = args[0] if args else named.get("tensor")
        writes = name.endswith("_") and not name.endswith("__") and name != "requires_grad_"
        return target if writes and isinstance(target, nn.Parameter) else func(*args, **named)
