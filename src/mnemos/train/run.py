"""The folder of a run: what was asked, where it ran, what it measured, and what came out.

runs/NAME/recipe.json      the resolved recipe
          run.json         provenance: commit, versions, machine, threads, seed, data, command, times
          metrics.jsonl    a line a measurement: {"kind": "train" | "valid" | "gates", "step", ...}
          checkpoints/     step-00000100.safetensors ...
          result.json      written last: a run with a result is finished
"""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from mnemos.atomic import write_bytes, write_json
from mnemos.config import to_dict
from mnemos.types import InputError, JSONObject

from . import checkpoint
from .provenance import now, provenance, source
from .recipe import Recipe, as_json

_OURS = {"run.json", "metrics.jsonl", "checkpoints", "recipe.json.tmp", "run.json.tmp", "metrics.jsonl.tmp"}


class RunFolder:
    """A run's folder, held for one writer; `start` makes one and `resume` opens one that is there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.checkpoints = folder / "checkpoints"
        self._lock = _hold(folder)
        self._metrics: Any = None

    @classmethod
    def start(cls, folder: str | Path, recipe: Recipe, device: str) -> "RunFolder":
        """A new run in a new folder, or an empty one. Raises InputError for any other; deletes nothing in it."""
        folder = Path(folder)
        if folder.exists() and not folder.is_dir():
            raise InputError(f"{folder}: expected a folder for the run, found a file; name another")
        if (folder / "recipe.json").exists():
            raise InputError(f"{folder}: there is a run here already; go on with --resume, or name another folder")
        # A start that was killed before it wrote the recipe leaves nothing but these.
        foreign = sorted(p.name for p in folder.iterdir() if p.name not in _OURS) if folder.is_dir() else []
        if foreign:
            raise InputError(f"{folder}: expected a new or empty folder, found {foreign[0]!r} in it; name another")
        try:
            (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"{folder}: a run cannot be written here ({error}); name another folder") from None
        run = cls(folder)
        about = {**provenance(recipe.train.seed, device, recipe.data), "finished": None, "resumed": []}
        write_json(folder / "run.json", about)
        write_json(folder / "recipe.json", to_dict(recipe))
        run.trim(0)
        return run

    @classmethod
    def resume(cls, folder: str | Path, recipe: Recipe) -> "RunFolder":
        """The run that is there. Raises InputError where there is none, it is another recipe's, or it is in use."""
        folder = Path(folder)
        if not (folder / "recipe.json").is_file():
            raise InputError(f"{folder}: expected a run to resume, found no recipe.json; start it without --resume")
        if difference := differing(_json(folder / "recipe.json"), as_json(recipe)):
            raise InputError(f"{folder}: the run has another {difference}; resume it with the recipe it has")
        run = cls(folder)
        for name in ("recipe.json.tmp", "run.json.tmp", "metrics.jsonl.tmp", "result.json.tmp"):
            (folder / name).unlink(missing_ok=True)
        run.checkpoints.mkdir(exist_ok=True)
        checkpoint.sweep(run.checkpoints)
        return run

    @property
    def result(self) -> JSONObject | None:
        """What came out, where the run is finished."""
        path = self.folder / "result.json"
        return _json(path) if path.is_file() else None

    def resumed(self, step: int) -> str | None:
        """Note in run.json that the run goes on after `step`. A sentence where the machine is not set as it was."""
        about = _json(self.folder / "run.json")
        about["resumed"].append({"step": step, "at": now(), **source(), "command": sys.argv})
        write_json(self.folder / "run.json", about)
        if about["threads"] == torch.get_num_threads():
            return None
        threads = torch.get_num_threads()
        return f"the run had {about['threads']} threads and goes on with {threads}: the same, but not bit for bit"

    def record(self, lines: Sequence[JSONObject]) -> None:
        """Append lines to metrics.jsonl, in one write."""
        if self._metrics is None:
            self._metrics = open(self.folder / "metrics.jsonl", "ab", buffering=0)  # noqa: SIM115
        self._metrics.write("".join(json.dumps(line) + "\n" for line in lines).encode())

    def trim(self, step: int) -> None:
        """Keep of metrics.jsonl what a run has written when it saves `step`; the rest is going to be written again.

        A checkpoint is saved after the line of its update and before the evaluation there.
        Raises InputError for a line that is no measurement, other than a last one that was cut off.
        """
        path = self.folder / "metrics.jsonl"
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        kept = []
        for i, line in enumerate(lines, 1):
            try:
                entry = json.loads(line)
                last = step if entry["kind"] == "train" else step - 1
                keep = entry["step"] <= last and line.endswith(b"\n")
            except (ValueError, KeyError, TypeError):
                if i < len(lines):
                    problem = f"line {i}: expected a measurement, found {line[:40]!r}"
                    raise InputError(f"{path}: {problem}; remove the line") from None
                keep = False
            if keep:
                kept.append(line)
        write_bytes(path, b"".join(kept))

    def save(self, step: int, value: object, keep: int) -> None:
        """Write a checkpoint (the measurements first), and only then delete what is older than the `keep` newest."""
        if self._metrics is not None:
            os.fsync(self._metrics.fileno())
        checkpoint.write(checkpoint.path_of(self.checkpoints, step), value)
        checkpoint.prune(self.checkpoints, step, keep)

    def finish(self, result: JSONObject) -> None:
        """Write the time it ended, and last of all the result."""
        about = _json(self.folder / "run.json")
        write_json(self.folder / "run.json", {**about, "finished": now()})
        write_json(self.folder / "result.json", result)

    def close(self) -> None:
        """Let another process have the folder."""
        if self._metrics is not None:
            self._metrics.close()
        if self._lock is not None:
            os.close(self._lock)
        self._metrics = self._lock = None


def differing(left: object, right: object, where: str = "") -> str | None:
    """The first place where two recipes differ, in words."""
    if isinstance(left, dict) and isinstance(right, dict):
        for key in [*left, *(k for k in right if k not in left)]:
            if found := differing(left.get(key), right.get(key), f"{where}.{key}".lstrip(".")):
                return found
        return None
    return None if left == right else f"{where} ({left!r}, not {right!r})"


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        raise InputError(f"{path}: expected a run's file, found none; start the run anew in another folder") from None
    except ValueError as error:
        raise InputError(f"{path}: damaged, not JSON ({error}); start the run anew in another folder") from None


def _hold(folder: Path) -> int | None:
    """Lock the folder until it is closed or the process dies, however it dies."""
    try:
        import fcntl
    except ImportError:  # Windows has no such lock
        return None
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise InputError(f"{folder}: another process is training here; wait for it, or name another folder") from None
    except OSError:  # a file system without locks
        os.close(descriptor)
        return None
    return descriptor
