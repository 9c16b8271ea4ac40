"""Nested values as one safetensors file, written atomically and verified when it is read. No pickle.

A value is made of dicts, lists and tuples of numbers, strings, None and tensors. Each tensor of the value is a
tensor of the file, named by its path ("model/embedding.weight"), so any safetensors reader can open it. The rest is
JSON in the header's metadata, with a SHA-256 over the JSON and over the tensors' names, types, shapes and bytes.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .atomic import check_file, replacing, sort_metadata
from .errors import InputError

FORMAT = "mnemos checkpoint 1"


def encode(value: object) -> tuple[dict[str, Tensor], str]:
    """Convert a nested value to (tensors by path, JSON of the rest). Raises TypeError for types it cannot store."""
    tensors: dict[str, Tensor] = {}
    seen: dict[tuple[object, ...], str] = {}

    def walk(value: Any, path: str) -> object:
        if isinstance(value, Tensor):
            # A tensor with two names (tied weights) is written once.
            same = (value.data_ptr(), value.dtype, value.shape, value.stride()) if value.numel() else (path,)
            if same not in seen:
                if path in tensors:
                    raise TypeError(f"expected one tensor per path, found two tensors for {path!r}; rename a key")
                seen[same] = path
                tensors[path] = value.detach().cpu().contiguous()
            return {"tensor": seen[same]}
        if isinstance(value, dict):
            if not all(isinstance(key, str) for key in value):
                raise TypeError(f"{path}: expected a dict with string keys, found other keys; use strings")
            return {"dict": {key: walk(child, f"{path}/{key}".lstrip("/")) for key, child in value.items()}}
        if type(value) in (list, tuple):
            kind = "list" if isinstance(value, list) else "tuple"
            return {kind: [walk(child, f"{path}/{i}".lstrip("/")) for i, child in enumerate(value)]}
        if value is None or type(value) in (bool, int, float, str):
            return value
        raise TypeError(
            f"{path}: expected a tensor, number, string, None, dict, list or tuple, found {type(value).__name__}; "
            "convert it"
        )

    # json writes enough digits of a float to read the same float again.
    return tensors, json.dumps(walk(value, ""))


def decode(tensors: dict[str, Tensor], text: str) -> Any:
    """The inverse of `encode`: the nested value."""

    def walk(value: object) -> object:
        if not isinstance(value, dict):
            return value
        ((kind, content),) = value.items()
        if kind == "tensor":
            return tensors[content]
        if kind == "dict":
            return {key: walk(child) for key, child in content.items()}
        children = [walk(child) for child in content]
        return children if kind == "list" else tuple(children)

    return walk(json.loads(text))


def digest(tensors: dict[str, Tensor], text: str) -> str:
    """SHA-256 over the JSON and every tensor's name, type, shape and bytes. Cost: about one second per gigabyte."""
    sha = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        sha.update(f"\n{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        sha.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().data)
    return sha.hexdigest()


def write(path: Path, value: object) -> None:
    """Write a value atomically: after a crash at any moment, `path` is the complete old file or the new one.

    Raises InputError if the file cannot be written; the old file is then unchanged.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    tensors, text = encode(value)
    about = {"format": FORMAT, "tree": text, "sha256": digest(tensors, text)}
    try:
        with replacing(path) as temporary:
            save_file(_without_shared_storage(tensors), temporary, about)
            sort_metadata(temporary)
    except (OSError, SafetensorError) as error:
        raise InputError(f"{path}: the file could not be written ({error}); free disk space") from error


def _without_shared_storage(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors, with copies of those that share a storage: safetensors rejects shared storage."""
    storages: set[int] = set()
    result = {}
    for name, tensor in tensors.items():
        storage = tensor.untyped_storage().data_ptr()
        result[name] = tensor.clone() if storage in storages else tensor
        storages.add(storage)
    return result


def read(path: Path) -> Any:
    """Read a value that `write` wrote, on the CPU. Raises InputError if the file is missing, damaged or another."""
    from safetensors import SafetensorError, safe_open

    check_file(path)
    try:
        with safe_open(path, framework="pt") as file:
            about = file.metadata() or {}
            if about.get("format") != FORMAT:
                raise InputError(
                    f"{path}: expected a checkpoint ({FORMAT}), found another safetensors file; name another"
                )
            # Copied, because memory-mapped tensors may be unaligned, and some kernels round differently on these.
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
        intact = digest(tensors, about["tree"]) == about["sha256"]
    except InputError:
        raise
    except FileNotFoundError:
        raise InputError(f"{path}: expected a checkpoint, found no such file; name one that is in the folder") from None
    except (SafetensorError, OSError, KeyError, ValueError, RuntimeError) as error:
        problem = str(error).splitlines()[0]
        raise InputError(f"{path}: the file is damaged ({problem}); use an earlier one") from None
    if not intact:
        raise InputError(f"{path}: the file is damaged (its bytes do not match its SHA-256); use an earlier one")
    try:
        return decode(tensors, about["tree"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InputError(
            f"{path}: expected a checkpoint ({FORMAT}), found one whose tree cannot be read ({error!r:.60}); "
            "use an earlier one"
        ) from None
