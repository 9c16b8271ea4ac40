"""Checkpoints: one safetensors file each, written atomically and verified when it is read. No pickle.

A checkpoint stores nested dicts, lists and tuples of numbers, strings, None and tensors. Each tensor of the value is a
tensor of the file, named by its path ("model/embedding.weight"), so any safetensors reader can open it. The rest is
JSON in the header's metadata, with a SHA-256 over the JSON and over the tensors' names, types, shapes and bytes.
"""

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mnemos.atomic import replacing, sort_metadata
from mnemos.types import InputError

from .stopping import TrainingFailed

FORMAT = "mnemos checkpoint 1"
_NAME = re.compile(r"step-(\d{8,})\.safetensors")
_BEST = re.compile(r"best-(\d{8,})\.safetensors")  # beside them: the weights of the best evaluations
_AVERAGED = re.compile(r"averaged-(\d{8,})\.safetensors")  # and those averaged at the end of the run


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
        sha.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return sha.hexdigest()


def write(path: Path, value: object) -> None:
    """Write a checkpoint atomically: after a crash at any moment, `path` is the complete old file or the new one.

    Raises TrainingFailed if the file cannot be written; the old file is then unchanged.
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
        raise TrainingFailed(
            f"{path}: the checkpoint could not be written ({error}); free disk space, then resume the run"
        ) from error


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
    """Read a checkpoint's value, on the CPU. Raises InputError if the file is missing, damaged or not a checkpoint."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            about = file.metadata() or {}
            if about.get("format") != FORMAT:
                raise InputError(
                    f"{path}: expected a checkpoint ({FORMAT}), found another safetensors file; name a file that "
                    "mnemos train wrote"
                )
            # Copied, because memory-mapped tensors may be unaligned, and some kernels round differently on these.
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
        intact = digest(tensors, about["tree"]) == about["sha256"]
    except InputError:
        raise
    except FileNotFoundError:
        raise InputError(
            f"{path}: expected a checkpoint, found no such checkpoint file; name one that is in the folder"
        ) from None
    except (SafetensorError, OSError, KeyError, ValueError, RuntimeError) as error:
        problem = str(error).splitlines()[0]
        raise InputError(f"{path}: the file is damaged ({problem}); use an earlier checkpoint") from None
    if not intact:
        raise InputError(f"{path}: the file is damaged (its bytes do not match its SHA-256); use an earlier checkpoint")
    try:
        return decode(tensors, about["tree"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InputError(
            f"{path}: expected a checkpoint ({FORMAT}), found one whose tree cannot be read ({error!r:.60}); use an "
            "earlier checkpoint"
        ) from None


def path_of(folder: Path, step: int) -> Path:
    """The path of the checkpoint after `step` updates."""
    return folder / f"step-{step:08d}.safetensors"


def best_path(folder: Path, step: int) -> Path:
    """The path of the weights whose evaluation after `step` updates was the best so far."""
    return folder / f"best-{step:08d}.safetensors"


def averaged_path(folder: Path, step: int) -> Path:
    """The path of the averaged weights of a run that ended after `step` updates."""
    return folder / f"averaged-{step:08d}.safetensors"


def averaged_steps(folder: Path) -> list[int]:
    """The ends of the run whose averaged weights are in a folder, newest first."""
    return _numbers(folder, _AVERAGED)


def steps(folder: Path) -> list[int]:
    """The steps of the checkpoints in a folder, newest first."""
    return _numbers(folder, _NAME)


def scheduled(folder: Path, every: int) -> list[int]:
    """The steps of the checkpoints of the schedule, newest first: every `every` steps, and the newest of the folder.

    A checkpoint that an interruption saved between them is left out, unless it is the newest.
    """
    return _scheduled(steps(folder), every)


def _scheduled(found: list[int], every: int) -> list[int]:
    return [step for step in found if step == found[0] or step % every == 0]


def best_steps(folder: Path) -> list[int]:
    """The steps of the best evaluations whose weights are in a folder, newest first: each was better than the last."""
    return _numbers(folder, _BEST)


def _numbers(folder: Path, name: re.Pattern[str]) -> list[int]:
    found = (name.fullmatch(path.name) for path in folder.iterdir()) if folder.is_dir() else ()
    return sorted((int(match[1]) for match in found if match), reverse=True)


def newest(folder: Path) -> tuple[int, Any, list[str]] | None:
    """Read the newest intact checkpoint: (step, value, one line per damaged checkpoint that was skipped).

    Returns None if the folder has no checkpoints. Raises InputError if it has some and all are damaged.
    """
    skipped: list[str] = []
    found = steps(folder)
    for step in found:
        try:
            value = read(path_of(folder, step))
        except InputError as error:
            skipped.append(str(error).rpartition("; ")[0])
            continue
        return step, value, [f"{line}; continuing from {path_of(folder, step).name}" for line in skipped]
    if found:
        raise InputError(
            f"{skipped[0]}; all {len(found)} checkpoints of the folder are damaged: start a new run in another folder"
        )
    return None


def prune(folder: Path, step: int, keep: int, every: int = 1) -> None:
    """Delete all checkpoints except the `keep` newest up to `step`. The checkpoint of `step` must be on disk already.

    every: steps between two checkpoints of the schedule. The `keep` newest `scheduled` ones are kept too, so that an
    interruption takes none from an average. Checkpoints of later steps are deleted too: they were damaged, and the run
    was resumed from an earlier one.
    """
    found = steps(folder)
    known = [s for s in found if s <= step]
    for old in set(found) - set(known[:keep]) - set(_scheduled(known, every)[:keep]):
        path_of(folder, old).unlink(missing_ok=True)


def prune_best(folder: Path) -> None:
    """Delete the best weights that neither the run nor a checkpoint of the folder refers to.

    The run refers to the newest. A checkpoint refers to the newest of an earlier step, as an evaluation follows the
    checkpoint of its step, so that a run that is resumed there finds the best weights of that time.
    """
    found = best_steps(folder)
    kept = {found[0], *(next((best for best in found if best < step), 0) for step in steps(folder))} if found else set()
    for old in set(found) - kept:
        best_path(folder, old).unlink(missing_ok=True)


def sweep(folder: Path) -> None:
    """Remove the temporary files of interrupted writes."""
    for path in folder.glob("*.safetensors.tmp"):
        path.unlink(missing_ok=True)
