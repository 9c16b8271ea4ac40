"""`save_state`: a state as one file with a fingerprint of its model, exact or with fewer bits.

The file is a nested value of `tree_file`: the fingerprint, the structure of the state, and its parts.
"""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from . import tree_file
from ._compat import parts_of, pytree, write_count
from .config import to_dict
from .errors import InputError
from .modes import plain_module
from .tree_file import digest
from .types import Recurrent, State, unshare

SMALLER = ("bfloat16", "int8")  # what `dtype` may be


def save_state(
    state: State,
    file: str | Path,
    model: nn.Module | None = None,
    dtype: str | torch.dtype | None = None,
    kind: str = "state",
) -> None:
    """Write a state, a pytree of tensors [B, …], as one safetensors file; `load_state` reads it. Atomic.

    A `Stream` has its last token beside the state: `Stream.save` writes both, and `Stream.restore` reads them.

    model: the file then holds a fingerprint of it, a hash of its weights and its configuration, so that no other model
    reads the state: save before the weights change. Cost: reading all weights once, at about a gigabyte per second.

    dtype: None, bit for bit. "bfloat16" (or torch.bfloat16): numbers of a floating type in 16 bits. "int8" (or
    torch.int8): in 8 bits with a float32 scale for each vector along the last axis, and the error of this rounding in
    4 bits, which is added when the state is read; numbers are then right to 1/2,000 of the largest of their vector.
    Vectors of zeros stay zeros, so a new row stays one; integers, booleans and tensors with one axis, or with numbers
    that are not finite or out of the smaller type's range, are exact.

    kind: what the file says that it holds. Two processes may write the same file: one of both is there.
    Raises InputError for parts of a state that are neither tensors nor numbers, for a stream, for a wrapped model
    (DataParallel, ...), and for a folder that does not exist.
    """
    if not isinstance(file, str | Path):
        raise InputError(
            f"save_state: expected a file second, found {type(file).__name__}; call save_state(state, file, model)"
        )
    file, dtype = Path(file), str(dtype).removeprefix("torch.") if isinstance(dtype, torch.dtype) else dtype
    if dtype not in (None, *SMALLER):
        raise InputError(f"save_state: expected a dtype of {', '.join(SMALLER)} or None, found {dtype!r}")
    if not file.parent.is_dir():
        raise InputError(f"{file}: expected a folder {file.parent} to write in, found none; make it first")
    parts, structure = pytree.tree_flatten(unshare(state))
    for part in parts:
        if not isinstance(part, Tensor) and part is not None and type(part) not in (bool, int, float, str):
            fix = "register its class as a pytree"
            fix = "give stream.state, or call stream.save(file)" if type(part).__name__ == "Stream" else fix
            raise InputError(
                f"save_state: expected tensors and numbers, found {type(part).__name__} in the state; {fix}"
            )
    encoded = [_encode(part.detach().cpu(), dtype) if isinstance(part, Tensor) else part for part in parts]
    value = {**fingerprint(model), "structure": _outline(structure), "parts": encoded}
    tree_file.write(file, value, f"mnemos {kind} 3")


def load_state(file: str | Path, model: nn.Module | None = None, like: State = None, kind: str = "state") -> State:
    """Read a state that `save_state` wrote, on the device of `like`, or of the model.

    model: a model or layer with `initial_state`, whose fingerprint the file must have if it has one. like: a state of
    the same model, with any number of rows, and of tokens in keys and values (also those of a source), for layers
    without `initial_state`; one of both is needed. Other tensors that grow have length 0 along axis 1. Raises
    InputError for a missing or damaged file, and for a state of another structure, of other shapes or types, or of a
    model of another configuration or other weights.
    """
    file = Path(file)
    if file.is_dir():
        raise InputError(f"{file}: expected a saved {kind}, found a folder; name a file in it")

    # --- the state of the same model, to compare with ---
    if like is None:
        if not isinstance(model, Recurrent):
            raise InputError(
                "load_state: expected a model with initial_state, or like= a state of the same structure, found "
                f"{type(model).__name__}; give like="
            )
        weight = next((x for x in model.parameters() if x.is_floating_point()), None)
        like = model.initial_state(1, **({} if weight is None else {"device": weight.device, "dtype": weight.dtype}))
    grows: Any = lambda x: hasattr(x, "last")  # noqa: E731
    like = pytree.tree_map(lambda x: x.last(0) if grows(x) else x, like, is_leaf=grows)
    expected, structure = pytree.tree_flatten(unshare(like))

    # --- a file of this model; one without a fingerprint is read as well where it is a state ---
    value = tree_file.read(file, f"mnemos {kind} 3", "save it again")
    value = value if isinstance(value, dict) else {}
    own = model is not None and ("weights" in value or kind != "state")
    for name, found in fingerprint(model).items() if own else ():
        if value.get(name) != found:
            other = "another configuration" if name == "model" else "other weights"
            raise InputError(f"{file}: expected a saved {kind} of this model, found one of {other}; load its own model")

    # --- its parts are those of the model's state ---
    try:
        parts = [_decode(part) for part in value["parts"]]
    except (KeyError, ValueError, TypeError, AttributeError, RuntimeError) as error:
        raise InputError(
            f"{file}: expected a saved {kind}, found parts that do not fit ({error!r:.60}); save it again"
        ) from None
    if value.get("structure") != _outline(structure) or len(parts) != len(expected):
        raise InputError(
            f"{file}: expected a state of {len(expected)} parts, named and ordered as the model's, found another of "
            f"{len(parts)}; load it with its own model"
        )
    # Any number of rows, where all tensors lead with them.
    heads = [{x.shape[:1] for x in leaves if isinstance(x, Tensor)} for leaves in (expected, parts)]
    shared = len(heads[0]) == len(heads[1]) == 1
    for i, (wanted, part) in enumerate(zip(expected, parts, strict=True)):
        if not _fits(wanted, part, int(shared), own):
            raise InputError(
                f"{file}: expected part {i} of the state as {_shown(wanted)}, found {_shown(part)}; load it with its "
                "own model"
            )
        if isinstance(part, Tensor):
            parts[i] = part.to(wanted.device)
    return pytree.tree_unflatten(parts, structure)


def fingerprint(model: nn.Module | None) -> dict[str, str]:
    """What a file says of a model: its configuration, or class, and a hash of its weights and buffers."""
    if model is None:
        return {}
    model = plain_module(model, "a saved state")
    # An extra state, which a module may have, need not be a tensor; packed ones of quantised layers are in tuples.
    parts = [(name, pytree.tree_leaves(x)) for name, x in model.state_dict().items()]
    weights = [(f"{name}.{i}", x) for name, xs in parts for i, x in enumerate(xs) if isinstance(x, Tensor)]
    if away := next((name for name, x in weights if x.is_meta), None):
        raise InputError(f"a saved state: expected weights in memory to hash, found none of {away}; load them first")
    weights = [(name, x.dequantize() if x.is_quantized else x) for name, x in weights]
    config: Any = getattr(model, "config", None)
    # The backend is left out: the state is the same for all, so a stream may go on where another backend runs.
    about = type(model).__qualname__ if config is None else json.dumps(_without_backend(to_dict(config)), default=str)
    return {"model": about, "weights": digest(dict(weights), "")}


class WeightsMark:
    """The weights that a model has at this moment."""

    def __init__(self, model: nn.Module) -> None:
        self.numbers: tuple[object, ...] = weights_mark(model)
        self._counted = [x for x in model.parameters() if not x.is_inference()]
        self.writes: tuple[object, ...] = self._count()

    def _count(self) -> tuple[object, ...]:
        return tuple([(x.data_ptr(), write_count(x)) for x in self._counted])

    def is_of(self, model: nn.Module, one_token: bool = False) -> bool:
        """Whether the model still has them. one_token: look, in microseconds, for the writes alone that PyTorch counts:
        not those of optimisers with `fused=True`, of `.data`, nor for other parameters in the place of these."""
        return self._count() == self.writes if one_token else self.numbers == weights_mark(model)


def weights_mark(model: nn.Module) -> tuple[object, ...]:
    """What changes with a model's weights, at a fraction of the cost of a hash of them all.

    A few numbers of each tensor; and of parameters where they lie and the writes that PyTorch counts, which are not
    those of optimisers with `fused=True`. A forward may write a buffer without changing it.
    """
    few: dict[object, list[Tensor]] = {}
    counts = []
    for x in model.state_dict(keep_vars=True).values():
        if isinstance(x, nn.Parameter):
            counts.append((x.data_ptr(), None if x.is_inference() else write_count(x)))
        if isinstance(x, Tensor) and not x.is_meta:
            own: Any = x.to_local() if hasattr(x, "to_local") else x  # of a shard, this process's part
            few.setdefault((x.device, x.dtype), []).append(own.detach().flatten()[:: max(1, own.numel() // 16)])
    return *(torch.cat(some).view(torch.uint8).cpu().numpy().tobytes() for some in few.values()), *counts


def _outline(structure: Any) -> str:
    """The classes, names and order of a state's parts, as JSON."""

    def of(spec: Any) -> object:
        return [spec.type.__name__, spec.context, *map(of, parts_of(spec))] if parts_of(spec) or spec.type else "*"

    # The context of a named tuple is its class.
    return json.dumps(of(structure), default=lambda x: [getattr(x, "__name__", repr(x)), *getattr(x, "_fields", ())])


def _fits(like: object, part: object, first: int, own: bool) -> bool:
    """Whether a part has the type of another and, from axis `first` on, its shape but for tokens: a new state has none.

    own: the file is known to be of this model, whose numbers may be those of autocast.
    """
    if not isinstance(like, Tensor) or not isinstance(part, Tensor):
        return type(like) is type(part)
    floats = own and like.is_floating_point() and part.is_floating_point()
    wanted, found = (list(x.shape[first:]) for x in (like, part))
    if like.dim() > 1 and part.dim() > 1 and not like.shape[1]:
        found[1 - first] = 0
    return wanted == found and (like.dtype == part.dtype or floats)


def _shown(part: object) -> str:
    if isinstance(part, Tensor):
        return f"{str(part.dtype).removeprefix('torch.')} {list(part.shape)}"
    return type(part).__name__


def _encode(x: Tensor, dtype: str | None) -> Tensor | dict[str, Any]:
    """A copy of a tensor, or the same with fewer bits: a value of `tree_file`."""
    exact = x.clone(memory_format=torch.contiguous_format)  # what lies in one memory here does not when it is read
    if dtype is None or not x.is_floating_point() or x.dim() < 2 or not x.numel() or not x.isfinite().all():
        return exact
    smaller: dict[str, Any] = {"dtype": str(x.dtype).removeprefix("torch.")}
    if dtype == "bfloat16":
        smaller["values"], bound = x.bfloat16(), torch.finfo(torch.bfloat16).eps
    else:
        scale = x.abs().amax(-1, keepdim=True).float() / 127
        steps = x.float() / torch.where(scale > 0, scale, 1)
        whole = steps.round().clamp(-127, 127)
        error = ((steps - whole) * 16).round().clamp(-8, 7).to(torch.int8)
        low, high = torch.nn.functional.pad(error, (0, x.shape[-1] % 2)).unflatten(-1, (-1, 2)).unbind(-1)
        packed = (low + 8).to(torch.uint8) | ((high + 8).to(torch.uint8) << 4)
        smaller |= {"values": whole.to(torch.int8), "scale": scale, "error": packed}
        bound = 1 / 2000
    # Near the ends of a type's range a smaller type has infinity, or zero for what is no new row.
    off = (_decode(smaller).double() - x.double()).abs()
    within = off <= (bound + torch.finfo(x.dtype).eps) * x.double().abs().amax(-1, keepdim=True)
    return smaller if within.all() else exact


def _decode(part: Any) -> Any:
    """The inverse of `_encode`. ValueError for tensors that do not fit."""
    if not isinstance(part, dict):
        return part
    x, dtype = part["values"], getattr(torch, part["dtype"])
    if x.dtype == torch.bfloat16:
        return x.to(dtype)
    scale, packed = part["scale"], part["error"]
    *rows, width = x.shape
    if scale.shape != (*rows, 1) or packed.shape != (*rows, (width + 1) // 2) or packed.dtype != torch.uint8:
        raise ValueError("scales of other shapes")
    error = torch.stack([packed & 15, packed >> 4], -1).flatten(-2)[..., :width].float() - 8
    return ((x.float() + error / 16) * scale).to(dtype)


def _without_backend(value: object) -> object:
    if isinstance(value, dict):
        return {name: _without_backend(part) for name, part in value.items() if name != "backend"}
    return [_without_backend(part) for part in value] if isinstance(value, list) else value
