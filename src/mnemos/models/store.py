"""A model on disk: safetensors and a configuration in JSON, without pickle."""

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from mnemos.atomic import read_text, replacing, sort_metadata, write_json
from mnemos.config import ModelConfig, from_dict, to_dict
from mnemos.json_text import parse
from mnemos.modes import plain_module
from mnemos.types import InputError

from .skeleton import skeleton

RUN_MODEL = "model"  # the folder of a finished run that holds its model
LONGEST_CONFIG = 2**24  # bytes
_DTYPES = {  # by the names of safetensors
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "BOOL": torch.bool,
}


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
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder}: expected a folder to save in, found a file; name another")
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
    from safetensors.torch import load_model

    folder = Path(folder)
    if (folder / "recipe.json").is_file() and not (folder / "config.json").is_file():
        if _trained_by_fit(folder / "recipe.json"):
            raise InputError(
                f"{folder}: expected a run that stores its model, found one of mnemos.fit, which stores the weights of "
                "your own model only; call the model itself, with its weights again by mnemos.fit(..., resume=True)"
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
            raise InputError(f"{folder}: expected the folder of a run or of a model, found no such folder")
        raise InputError(f"{folder}: expected config.json and model.safetensors, as mnemos.save writes them")
    config, digest = _read_config(folder / "config.json")
    weights = folder / "model.safetensors"
    if _digest(weights) != digest:
        raise InputError(f"{weights}: expected the bytes that were saved, found others; save the model again")
    saved = _read_header(weights)
    try:
        model = build_within(config, len(saved), sum(one.values for one in saved.values()))
    except InputError as error:
        raise InputError(f"{folder / 'config.json'}: {error}; save the model again") from error.__cause__
    _match(model, saved, weights)
    try:
        load_model(model, str(weights))
    except (SafetensorError, RuntimeError, OSError) as error:
        raise _other_weights(weights, " ".join(str(error).split())[:200]) from None
    return model.eval()


class _Budget(TorchFunctionMode):
    """Refuses tensors before they are made: the configuration may come from a stranger and ask for terabytes."""

    def __init__(self, tensors: int, values: int) -> None:
        super().__init__()
        self.own, self.made = (tensors, values), (0, 0)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given, name = kwargs or {}, getattr(func, "__name__", "")
        if name in ("empty", "zeros", "ones", "rand", "randn", "arange"):
            sizes = [n for one in (*args, given.get("size", ())) for n in (one if isinstance(one, Sequence) else [one])]
            tensors, values = (
                self.made[0] + 1,
                self.made[1] + (max(sizes, default=0) if name == "arange" else math.prod(sizes)),
            )
            self.made = tensors, values
            # What a model needs beyond its saved tensors: weights that are drawn and then tied, and tables.
            if tensors > 4 * self.own[0] + 200 or values > max(2**26, 4 * self.own[1]):
                raise InputError(
                    f"expected a model of {self.own[0]:,} tensors with {self.own[1]:,} values, as its weights have, "
                    f"found settings that need {tensors:,} tensors with {values:,} values, or more"
                )
        return func(*args, **given)


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
        problem = " ".join(str(error).split())[:200] or "no reason given"
        raise InputError(
            f"expected the settings of a model, found ones that cannot be built ({type(error).__name__}: {problem})"
        ) from error
    return model


def _trained_by_fit(recipe: Path) -> bool:
    try:
        return bool(parse(read_text(recipe, LONGEST_CONFIG))["model"]["is"] == "own")
    except (OSError, ValueError, LookupError, TypeError):
        return False


class _Saved(NamedTuple):
    """What a file says of a tensor, before it is read."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def values(self) -> int:
        """How many values it has."""
        return math.prod(self.shape)


def _read_config(path: Path) -> tuple[ModelConfig, str]:
    """The configuration of a model, and the SHA-256 of its weights."""
    try:
        about = parse(read_text(path, LONGEST_CONFIG))
        if not isinstance(about, dict) or not {"model", "sha256"} <= about.keys():
            raise InputError("expected a model and its sha256, as mnemos.save writes them")
        return from_dict(ModelConfig, about["model"], "model"), about["sha256"]
    except (InputError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: {error}; save again") from None
    except json.JSONDecodeError as error:
        raise InputError(f"{path}: line {error.lineno}: not JSON ({error.msg}); save the model again") from None
    except OSError as error:
        raise InputError(f"{path}: expected settings, found an error ({error}); save again") from None


def _read_header(weights: Path) -> dict[str, _Saved]:
    """The shape and dtype of each tensor of a file, from its header alone."""
    from safetensors import SafetensorError, safe_open

    saved = {}
    try:
        with safe_open(str(weights), "pt") as file:
            for name in file.keys():  # noqa: SIM118 - it is no dict
                one = file.get_slice(name)
                if one.get_dtype() not in _DTYPES:
                    known = ", ".join(_DTYPES)
                    raise InputError(
                        f"{weights}: {name}: expected one of the dtypes {known}, found {one.get_dtype()}; save again"
                    )
                saved[name] = _Saved(tuple(one.get_shape()), _DTYPES[one.get_dtype()])
    except (SafetensorError, OSError) as error:
        raise _other_weights(weights, str(error).splitlines()[0]) from None
    return saved


def _match(model: nn.Module, saved: dict[str, _Saved], weights: Path) -> None:
    """Give the model the dtypes of the saved tensors.

    Raises InputError for a tensor of another shape or kind of number, and for one that the model lacks. (Of tensors
    that share memory, one is saved; `load_model` checks that no other is missing.)
    """
    own = model.state_dict(keep_vars=True)
    for name, one in saved.items():
        if name not in own:
            raise _other_weights(weights, f"the model has no {name}")
        shape, dtype = tuple(own[name].shape), own[name].dtype
        if shape != one.shape:
            raise _other_weights(weights, f"{name} has shape {one.shape} in the file and {shape} in the model")
        if dtype != one.dtype and not (dtype.is_floating_point and one.dtype.is_floating_point):
            raise _other_weights(weights, f"{name} has dtype {one.dtype} in the file and {dtype} in the model")
    floating = {one.dtype for one in saved.values() if one.dtype.is_floating_point}
    if len(floating) == 1:  # moved as a whole, so that the buffers that are not saved follow
        wanted = floating.pop()
        if any(own[name].dtype != wanted for name in saved if own[name].is_floating_point()):
            model.to(wanted)
    for name, value in model.state_dict(keep_vars=True).items():
        if name in saved and value.dtype != saved[name].dtype:
            value.data = value.data.to(saved[name].dtype)


def _other_weights(weights: Path, problem: str) -> InputError:
    return InputError(f"{weights}: expected this model's weights, found others ({problem}); save it again")
