"""A checkpoint: one safetensors file, whole or not there at all, and checked when it is read. No pickle.

Anything nested of dicts, lists, tuples, numbers, strings, None and tensors can be kept. The tensors are the file's
tensors, under their path ("model/embedding.weight"), so that any safetensors reader finds them; the rest is JSON in
the header's metadata, beside a SHA-256 over all of it, bytes, names, types and shapes.
"""

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mnemos.atomic import replacing
from mnemos.types import InputError

from .stopping import TrainingFailed

FORMAT = "mnemos checkpoint 1"
_NAME = re.compile(r"step-(\d{8,})\.safetensors")


def encode(value: Any) -> tuple[dict[str, Tensor], str]:
    """A nested value as (tensors by path, JSON of the rest). Raises TypeError for what cannot be kept."""
    tensors: dict[str, Tensor] = {}
    seen: dict[tuple[Any, ...], str] = {}

    def walk(value: Any, path: str) -> Any:
        if isinstance(value, Tensor):
            # Tied weights: one tensor under two names is written once.
            same = (value.data_ptr(), value.dtype, value.shape, value.stride()) if value.numel() else (path,)
            if same not in seen:
                if path in tensors:
                    raise TypeError(f"two tensors would be called {path!r}")
                seen[same] = path
                tensors[path] = value.detach().cpu().contiguous()
            return {"tensor": seen[same]}
        if isinstance(value, dict):
            if not all(isinstance(key, str) for key in value):
                raise TypeError(f"{path}: only dicts with strings as keys can be kept")
            return {"dict": {key: walk(child, f"{path}/{key}".lstrip("/")) for key, child in value.items()}}
        if type(value) in (list, tuple):
            kind = "list" if isinstance(value, list) else "tuple"
            return {kind: [walk(child, f"{path}/{i}".lstrip("/")) for i, child in enumerate(value)]}
        if value is None or type(value) in (bool, int, float, str):
            return value
        raise TypeError(f"{path}: a {type(value).__name__} cannot be kept")

    # Python writes floats with the digits that give the same float back.
    return tensors, json.dumps(walk(value, ""))


def decode(tensors: dict[str, Tensor], text: str) -> Any:
    """The value that `encode` was given."""

    def walk(value: object) -> Any:
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
    """SHA-256 over the JSON and every tensor's name, type, shape and bytes. Cost: about a second a gigabyte."""
    sha = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        sha.update(f"\n{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        sha.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return sha.hexdigest()


def write(path: Path, value: object) -> None:
    """Write a checkpoint so that, whenever the machine stops, `path` is the old file or the new one.

    Raises TrainingFailed where the disk refuses; what was there before is then untouched.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    tensors, text = encode(value)
    about = {"format": FORMAT, "tree": text, "sha256": digest(tensors, text)}
    try:
        with replacing(path) as temporary:
            save_file(_apart(tensors), temporary, about)
    except (OSError, SafetensorError) as error:
        raise TrainingFailed(f"{path}: could not be written ({error}); make room, then resume the run") from error


def _apart(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors with memory of their own each: safetensors refuses views of one another."""
    owned: set[int] = set()
    result = {}
    for name, tensor in tensors.items():
        where = tensor.untyped_storage().data_ptr()
        result[name] = tensor.clone() if where in owned else tensor
        owned.add(where)
    return result


def read(path: Path) -> Any:
    """The value in a checkpoint, on the CPU. Raises InputError where the file is missing, damaged or something else."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            about = file.metadata() or {}
            if about.get("format") != FORMAT:
                raise InputError(f"{path}: expected a checkpoint ({FORMAT}), found other tensors; train writes them")
            # Copies, because what is mapped lies at odd addresses, where some kernels round differently.
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
        whole = digest(tensors, about["tree"]) == about["sha256"]
    except InputError:
        raise
    except FileNotFoundError:
        raise InputError(f"{path}: no such checkpoint; see the folder for those that are there") from None
    except (SafetensorError, OSError, KeyError, ValueError, RuntimeError) as error:
        problem = str(error).splitlines()[0]
        raise InputError(f"{path}: damaged, cannot be read ({problem}); use the checkpoint before it") from None
    if not whole:
        raise InputError(f"{path}: damaged, its bytes do not match its SHA-256; use the checkpoint before it")
    return decode(tensors, about["tree"])


def path_of(folder: Path, step: int) -> Path:
    """Where the checkpoint after `step` updates lies."""
    return folder / f"step-{step:08d}.safetensors"


def steps(folder: Path) -> list[int]:
    """The updates after which there are checkpoints in a folder, newest first."""
    found = (_NAME.fullmatch(path.name) for path in folder.iterdir()) if folder.is_dir() else ()
    return sorted((int(match[1]) for match in found if match), reverse=True)


def newest(folder: Path) -> tuple[int, Any, list[str]] | None:
    """The newest checkpoint that is whole: (step, value, a line for each damaged one passed over). None: there is none.

    Raises InputError where there are some and all are damaged.
    """
    skipped: list[str] = []
    found = steps(folder)
    for step in found:
        try:
            value = read(path_of(folder, step))
        except InputError as error:
            skipped.append(str(error).rpartition("; ")[0])
            continue
        return step, value, [f"{line}; going on from {path_of(folder, step).name}" for line in skipped]
    if found:
        raise InputError(f"{skipped[0]}; so are all {len(found)} checkpoints here, start anew in another folder")
    return None


def prune(folder: Path, step: int, keep: int) -> None:
    """Delete all but the `keep` newest checkpoints up to `step`, the newest, which must be on disk by now.

    Those of later updates go too: the run was resumed from before them because they were damaged.
    """
    found = steps(folder)
    kept = [s for s in found if s <= step][:keep]
    for old in set(found) - set(kept):
        path_of(folder, old).unlink(missing_ok=True)


def sweep(folder: Path) -> None:
    """Remove what writes that were cut off have left."""
    for path in folder.glob("step-*.safetensors.tmp"):
        path.unlink(missing_ok=True)
