"""`save_state`: a state as one safetensors file with a fingerprint of its model, exact or with fewer bits."""

import hashlib
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ._compat import pytree
from .atomic import replacing, sort_metadata
from .config import to_dict
from .errors import InputError
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
    reads the state. Cost: reading all weights once, at about a gigabyte per second.

    dtype: None, bit for bit. "bfloat16" (or torch.bfloat16): numbers of a floating type in 16 bits. "int8" (or
    torch.int8): in 8 bits with a float32 scale for each vector along the last axis, and the error of this rounding in
    4 bits, which is added when the state is read; numbers are then right to 1/2,000 of the largest of their vector.
    Vectors of zeros stay zeros, so a new row stays one; integers, booleans and tensors with one axis, or with numbers
    that are not finite, are exact.

    kind: what the file says that it holds. Two processes may write the same file: one of both is there.
    Raises InputError for parts of a state that are neither tensors nor numbers, for a stream, and for a folder that
    does not exist.
    """
    write_state(state, file, fingerprint(model), dtype, kind)


def load_state(file: str | Path, model: nn.Module | None = None, like: State = None, kind: str = "state") -> State:
    """Read a state that `save_state` wrote, on the device of `like`, or of the model.

    model: a model or layer with `initial_state`, whose fingerprint the file must have if it has one. like: a state of
    the same model, with any number of rows and tokens, for layers without `initial_state`; one of both is needed.
    Raises InputError for a missing or damaged file, and for a state of another structure, of other shapes or types,
    or of a model of another configuration or other weights.
    """
    if like is None and not isinstance(model, Recurrent):
        raise InputError(
            "load_state: expected a model with initial_state, or like= a state of the same structure, found "
            f"{type(model).__name__}; give like="
        )
    said = None if model is None else fingerprint(model)
    return read_state(file, lambda rows: _begin(model, rows) if like is None else like, said, kind)


def _begin(model: Any, rows: int) -> State:
    weight = next((x for x in model.parameters() if x.is_floating_point()), None)
    made = {} if weight is None else {"device": weight.device, "dtype": weight.dtype}
    return model.initial_state(rows, **made)


def fingerprint(model: nn.Module | None) -> dict[str, str]:
    """What a file says of a model: its configuration, or class, and a hash of its weights and buffers."""
    return {} if model is None else {"model": signature_of(model), "weights": weights_of(model)}


def write_state(state: State, file: str | Path, of: dict[str, str], dtype: str | torch.dtype | None, kind: str) -> None:
    """`save_state` with a fingerprint that was made before."""
    from safetensors.torch import save_file

    if not isinstance(file, str | Path):
        raise InputError(
            f"save_state: expected a file second, found {type(file).__name__}; call save_state(state, file, model)"
        )
    file, dtype = Path(file), str(dtype).removeprefix("torch.") if isinstance(dtype, torch.dtype) else dtype
    if dtype not in (None, *SMALLER):
        raise InputError(f"save_state: expected a dtype of {', '.join(SMALLER)} or None, found {dtype!r}")
    if not file.parent.is_dir():
        raise InputError(f"{file}: expected a folder {file.parent} to write in, found none; make it first")
    tensors: dict[str, Tensor] = {}
    parts: list[object] = []
    for i, leaf in enumerate(pytree.tree_leaves(unshare(state))):
        if isinstance(leaf, Tensor):
            stored, about = _encode(leaf.detach().cpu(), dtype)
            # Copies: the tensors of a file may not share memory, and those of a state may.
            tensors |= {f"{i}{end}": x.clone(memory_format=torch.contiguous_format) for end, x in stored.items()}
            parts.append(about)
        elif leaf is None or type(leaf) in (bool, int, float, str):
            parts.append({"value": leaf})
        else:
            fix = "register its class as a pytree"
            fix = "give stream.state, or call stream.save(file)" if type(leaf).__name__ == "Stream" else fix
            raise InputError(
                f"save_state: expected tensors and numbers, found {type(leaf).__name__} in the state; {fix}"
            )
    about = {"format": f"mnemos {kind} 1", **of, "parts": json.dumps(parts), "tensors": _hash(sorted(tensors.items()))}
    with replacing(file) as temporary:
        save_file(tensors, str(temporary), about)
        sort_metadata(temporary)


def read_state(file: str | Path, begin: Callable[[int], State], of: dict[str, str] | None, kind: str) -> State:
    """`load_state` with a function of the number of rows that makes a state of the same structure.

    of: the fingerprint that the file must have; None: any. Files without one are read as well where `kind` is "state".
    """
    from safetensors import SafetensorError, safe_open

    file, what = Path(file), f"a saved {kind}"
    if not file.is_file():
        missing = "a folder; name a file in it" if file.is_dir() else "no such file; write one first"
        raise InputError(f"{file}: expected {what}, found {missing}")
    try:
        with safe_open(str(file), "pt") as opened:
            said = opened.metadata() or {}
            tensors = {name: opened.get_tensor(name).clone() for name in opened.keys()}  # noqa: SIM118 - no mapping
    except (SafetensorError, OSError) as error:
        raise InputError(
            f"{file}: expected {what}, found a file that cannot be read ({error}); save it again"
        ) from None
    if said.get("format") != f"mnemos {kind} 1" or not {"parts", "tensors"} <= said.keys():
        for other, reader in (("stream", "mnemos.Stream.restore"), ("state", "mnemos.load_state")):
            if other != kind and said.get("format") == f"mnemos {other} 1":
                raise InputError(f"{file}: expected {what}, found a saved {other}; {reader} reads it")
        raise InputError(f"{file}: expected {what}, found another file ({said.get('format', 'no format')}); save one")
    if of and ("weights" in said or kind != "state"):
        for name, other in (("model", "another configuration"), ("weights", "other weights")):
            if said.get(name) != of[name]:
                raise InputError(f"{file}: expected {what} of this model, found one of {other}; load its own model")
    if said["tensors"] != _hash(sorted(tensors.items())):
        raise InputError(f"{file}: expected the tensors that were saved, found others; save it again")
    try:
        found = [_decode(about, i, tensors) for i, about in enumerate(json.loads(said["parts"]))]
    except (KeyError, ValueError, TypeError, AttributeError, RuntimeError) as error:
        raise InputError(
            f"{file}: expected {what}, found parts that do not fit ({error!r:.60}); save it again"
        ) from None
    rows = next((len(x) for x in found if isinstance(x, Tensor)), 1)
    expected, structure = pytree.tree_flatten(begin(rows))
    if len(expected) != len(found):
        raise InputError(
            f"{file}: expected a state of {len(expected)} parts, found {len(found)}; load it with its own model"
        )
    for i, (like, part) in enumerate(zip(expected, found, strict=True)):
        if not _fits(like, part):
            raise InputError(
                f"{file}: expected part {i} of the state as {_shown(like)}, found {_shown(part)}; load it with its own "
                "model"
            )
    placed = [
        part.to(like.device) if isinstance(like, Tensor) and isinstance(part, Tensor) else part
        for like, part in zip(expected, found, strict=True)
    ]
    return pytree.tree_unflatten(placed, structure)


def _fits(like: object, part: object) -> bool:
    """Whether a part has the type and, but for rows and tokens (axes 0 and 1), the shape of another."""
    if not isinstance(like, Tensor) or not isinstance(part, Tensor):
        return type(like) is type(part)
    alike = like.dtype == part.dtype or (like.is_floating_point() and part.is_floating_point())
    return alike and like.dim() == part.dim() and like.shape[2:] == part.shape[2:]


def _shown(part: object) -> str:
    if isinstance(part, Tensor):
        axes = ["B", "N", *map(str, part.shape[2:])][: part.dim()]
        return f"{str(part.dtype).removeprefix('torch.')} [{', '.join(axes)}]"
    return type(part).__name__


def _encode(x: Tensor, dtype: str | None) -> tuple[dict[str, Tensor], dict[str, str]]:
    """A tensor as those of the file, by the ends of their names, and what is to be known to read them."""
    about = {"dtype": str(x.dtype).removeprefix("torch.")}
    if dtype is None or not x.is_floating_point() or x.dim() < 2 or not x.numel() or not x.isfinite().all():
        return {"": x}, about
    if dtype == "bfloat16":
        return {"": x.bfloat16()}, about | {"as": dtype}
    scale = x.abs().amax(-1, keepdim=True).float() / 127
    steps = x.float() / torch.where(scale > 0, scale, 1)
    whole = steps.round().clamp(-127, 127)
    error = ((steps - whole) * 16).round().clamp(-8, 7).to(torch.int8)
    low, high = torch.nn.functional.pad(error, (0, x.shape[-1] % 2)).unflatten(-1, (-1, 2)).unbind(-1)
    packed = (low + 8).to(torch.uint8) | ((high + 8).to(torch.uint8) << 4)
    return {"": whole.to(torch.int8), ".scale": scale, ".error": packed}, about | {"as": dtype}


def _decode(about: dict[str, Any], i: int, tensors: dict[str, Tensor]) -> object:
    """The inverse of `_encode`, of part i of a state."""
    if "value" in about:
        return about["value"]
    x, dtype = tensors[str(i)], getattr(torch, about["dtype"])
    if about.get("as") != "int8":
        return x.to(dtype)
    packed = tensors[f"{i}.error"]
    error = torch.stack([packed & 15, packed >> 4], -1).flatten(-2)[..., : x.shape[-1]].float() - 8
    return ((x.float() + error / 16) * tensors[f"{i}.scale"]).to(dtype)


def weights_of(model: nn.Module) -> str:
    """A hash of a model's weights and buffers. An extra state, which a module may have, need not be a tensor."""
    return _hash((name, x) for name, x in model.state_dict().items() if isinstance(x, Tensor))


def _hash(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """A hash of names, types, shapes and bytes. Cost: reading the tensors once, at about a gigabyte per second."""
    found = hashlib.sha256()
    for name, x in tensors:
        found.update(repr((name, x.dtype, tuple(x.shape))).encode())
        # Contiguous, because equal numbers may lie in memory in any order.
        found.update(x.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return found.hexdigest()


def signature_of(model: nn.Module) -> str:
    """What a state's file records of its model: its configuration, or its class if it has none.

    The backend is left out: the state is the same for all, so a stream may go on where another backend runs.
    """
    config: Any = getattr(model, "config", None)
    if config is None:
        return type(model).__qualname__
    found = to_dict(config)
    return json.dumps(_without_backend(found), default=str)


def _without_backend(value: object) -> object:
    if isinstance(value, dict):
        return {name: _without_backend(part) for name, part in value.items() if name != "backend"}
    return [_without_backend(part) for part in value] if isinstance(value, list) else value
