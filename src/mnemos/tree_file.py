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
_READERS = {"mnemos state 3": "mnemos.load_state", "mnemos stream 3": "mnemos.Stream.restore"}  # by another format


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
            return {type(value).__name__: [walk(child, f"{path}/{i}".lstrip("/")) for i, child in enumerate(value)]}
        if value is None or type(value) in (bool, int, float, str):
            return value
        raise TypeError(
            f"{path}: expected a tensor, number, string, None, dict, list or tuple, found {type(value).__name__}; "
            "convert it"
        )

    # json writes enough digits of a float to read the same float again.
    return tensors, json.dumps(walk(value, ""))


def decode(tensors: dict[str, Tensor], text: str) -> Any:
    """The inverse of `encode`: the nested value. Raises ValueError for tensors that it does not have."""
    unread = set(tensors)

    def walk(value: object) -> object:
        if not isinstance(value, dict):
            return value
        ((cls, content),) = value.items()
        if cls == "tensor":
            unread.discard(content)
            return tensors[content]
        if cls == "dict":
            return {key: walk(child) for key, child in content.items()}
        children = [walk(child) for child in content]
        return children if cls == "list" else tuple(children)

    value = walk(json.loads(text))
    if unread:
        raise ValueError(f"a tensor {min(unread)} that is no part of it")
    return value


def digest(tensors: dict[str, Tensor], text: str) -> str:
    """SHA-256 over the JSON and every tensor's name, type, shape and bytes. Cost: about one second per gigabyte."""
    sha = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        sha.update(f"\n{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        sha.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().data)
    return sha.hexdigest()


def write(path: Path, value: object, format: str = FORMAT) -> None:
    """Write a value atomically: after a crash at any moment, `path` is the complete old file or the new one.

    Raises InputError if the file cannot be written; the old file is then unchanged.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    tensors, text = encode(value)
    storages: set[int] = set()
    for name, tensor in tensors.items():  # safetensors rejects tensors that share a storage
        storage = tensor.untyped_storage().data_ptr()
        tensors[name] = tensor.clone() if storage in storages else tensor
        storages.add(storage)
    try:
        with replacing(path) as temporary:
            save_file(tensors, temporary, {"format": format, "tree": text, "sha256": digest(tensors, text)})
            sort_metadata(temporary)
    except (OSError, SafetensorError) as error:
        raise InputError(f"{path}: the file could not be written ({error}); free disk space") from error


def read(path: Path, format: str = FORMAT, fix: str = "use an earlier one") -> Any:
    """Read a value that `write` wrote, on the CPU. Raises InputError if the file is missing, damaged or another.

    format: what the file must say that it is: "mnemos NAME VERSION". fix: what to do about a damaged file.
    """
    from safetensors import SafetensorError, safe_open

    name = format.split()[1]
    check_file(path)
    try:
        with safe_open(path, framework="pt") as file:
            about = file.metadata() or {}
            if (found := about.get("format")) != format:
                other = f"{_READERS[found]} reads it" if found in _READERS else "name another"
                raise InputError(f"{path}: expected a {name} ({format}), found another file ({found}); {other}")
            # Copied, because memory-mapped tensors may be unaligned, and some kernels round differently on these.
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
        intact = digest(tensors, about["tree"]) == about["sha256"]
    except InputError:
        raise
    except FileNotFoundError:
        raise InputError(f"{path}: expected a {name}, found no such file; name one that is in the folder") from None
    except (SafetensorError, OSError, KeyError, ValueError, RuntimeError) as error:
        problem = "a folder" if path.is_dir() else str(error).splitlines()[0]
        raise InputError(
            f"{path}: expected a {name}, found a damaged file, which cannot be read ({problem}); {fix}"
        ) from None
    if not intact:
        raise InputError(f"{path}: the file is damaged (its bytes do not match its SHA-256); {fix}")
    try:
        return decode(tensors, about["tree"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InputError(
            f"{path}: expected a {name} ({format}), found one whose tree cannot be read ({error!r:.60}); {fix}"
        ) from None
