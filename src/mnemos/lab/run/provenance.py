"""What a run's numbers depend on: source, libraries, machine and data; what of it has changed since a checkpoint."""

import contextlib
import functools
import hashlib
import importlib.metadata
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path, PurePath

import numpy as np
import torch

import mnemos
from mnemos.atomic import check_file
from mnemos.config import to_dict
from mnemos.lab.tasks.task import DataConfig
from mnemos.ops import dense_layer
from mnemos.types import JSON, InputError, JSONObject

from .files import Provenance

LISTED = 2_000  # up to this number, all data files are listed and hashed; of more files, this many are hashed
_NAMED = 20  # a comparison lists at most this many data files; its runs list all
_LIBRARIES = ("numpy", "lightning-fabric", "safetensors", "pillow", "timm", "torchvision", "transformers", "tokenizers")
_PER_RUN = {"seed", "command", "started", "finished", "resumed"}


def provenance(seed: int, device: str, data: DataConfig | None = None) -> JSONObject:
    """Everything that a run's numbers may depend on: source, versions, machine, threads, seed, command, data files."""
    return {
        **made_with(),
        "device": device,
        "cpu": processor(),
        "threads": torch.get_num_threads(),
        "dense": dense_layer.choice().to_json(),
        "seed": seed,
        **({} if data is None else {"data": data_read(data)}),
        "command": command_line(),
        "started": now(),
    }


def made_with() -> JSONObject:
    """What a run may go on with another one of: {"commit", "dirty", "source_sha256", "versions"}."""
    return {**source(), "source_sha256": source_hash(), "versions": versions()}


def versions() -> dict[str, str | None]:
    """The versions of Python and of the libraries that numbers may depend on; None for one that is not installed."""
    own: dict[str, str | None] = {"mnemos": mnemos.__version__, "torch": str(torch.__version__)}
    own |= {"python": platform.python_version(), **dict.fromkeys(_LIBRARIES)}
    for name in _LIBRARIES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            own[name] = importlib.metadata.version(name)
    return own


def command_line() -> list[str]:
    """The words of this process's command as a user types them, without the folder that the program is installed in."""
    program = PurePath(sys.argv[0])
    if program.name == "__main__.py":
        return ["python", "-m", program.parent.name, *sys.argv[1:]]
    return [program.name if program.is_absolute() else str(program), *sys.argv[1:]]


def source() -> JSONObject:
    """{"commit", "dirty"} of the running source; both None if the package is not in a git checkout.

    dirty: a tracked file of the package differs from the commit, or an untracked Python file is in it, where the
    registry may find it. Files outside the package change no number.
    """
    if _git("ls-files", "--error-unmatch", "__init__.py") is None:
        return {"commit": None, "dirty": None}
    changed = _git("status", "--porcelain", "--untracked-files=all", "--", ".")
    lines = changed.splitlines() if changed is not None else []
    source_changed = any(not line.startswith("??") or line.rstrip('"').endswith(".py") for line in lines)
    dirty = None if changed is None else source_changed
    return {"commit": _git("rev-parse", "HEAD"), "dirty": dirty}


@functools.cache
def source_hash() -> str:
    """The SHA-256 over the names and contents of the package's Python and C++ files, at this process's first call."""
    package, digest = Path(mnemos.__file__).parent, hashlib.sha256()
    for path in sorted(path for path in package.rglob("*") if path.suffix in (".py", ".cpp", ".h")):
        digest.update(f"{path.relative_to(package).as_posix()}\n".encode() + path.read_bytes())
    return digest.hexdigest()


def data_read(data: DataConfig) -> JSONObject:
    """The exact source of a task's data.

    Data from files: {"count", "bytes", "sha256", "hashed", "files": [{"name", "bytes", "sha256"}]}, names relative to
    the deepest folder that holds all. "sha256" is the digest of a line per file, sorted by name: name, size and SHA-256
    of the contents, separated by tabs. With more than 2,000 files, "files" is omitted, the lines are in the order of
    `DataConfig.files`, and only 2,000 evenly spaced files are hashed ("hashed"). Generated data: {"generated":
    {"settings", "version" of the generator}}. Unknown: {"files": None}. Each hashed file is read once per process.
    """
    paths = data.files()
    if paths is None:
        return {"files": None}
    if not len(paths):
        return {"generated": {"settings": to_dict(data), "version": data.version}}
    folders = {os.path.dirname(path) for path in paths}
    folder = os.path.commonpath([*map(os.path.abspath, folders)])  # a tokenizer's path may be relative, a text's not
    listed = len(paths) <= LISTED
    order: Sequence[int] = range(len(paths))
    if listed:
        order = sorted(order, key=lambda i: os.fspath(paths[i]))
    spaced = set(np.linspace(0, len(paths) - 1, min(LISTED, len(paths))).astype(int).tolist())
    digest, total, files = hashlib.sha256(), 0, []
    for place, i in enumerate(order):
        path = os.fspath(paths[i])
        about = os.stat(path)
        name = os.path.relpath(path, folder).replace(os.sep, "/")
        found = _sha256(path, about.st_size, about.st_mtime_ns) if place in spaced else ""
        total += about.st_size
        digest.update(f"{name}\t{about.st_size}\t{found}\n".encode(errors="surrogateescape"))
        if listed:
            files.append({"name": name, "bytes": about.st_size, "sha256": found})
    summary = {"count": len(paths), "bytes": total, "sha256": digest.hexdigest(), "hashed": len(spaced)}
    return summary | ({"files": files} if listed else {})


def changed_since(about: Provenance, today: JSONObject) -> list[str]:
    """A line with the code, libraries and threads that are others now than when a run last began; [] if none is.

    today: as of `made_with`.
    """
    changed, sha256, threads = [], about.latest("source_sha256"), torch.get_num_threads()
    if sha256 not in (None, today["source_sha256"]):
        changed.append(f"the code of mnemos (commit {str(about.latest('commit'))[:10]})")
    before = about.latest("versions") or {}
    changed += [
        f"{name} ({before[name] or 'none'}, now {version or 'none'})"
        for name, version in sorted(today["versions"].items())
        if name != "mnemos" and before.get(name, version) != version
    ]
    if about.threads not in (None, threads):
        changed.append(f"threads ({about.threads}, now {threads}: set OMP_NUM_THREADS={about.threads})")
    line = "; the results may differ from those of a run that was not interrupted"
    return [f"changed since the run was started: {', '.join(changed)}{line}"] if changed else []


def check_data(where: str, before: JSON, now: JSONObject) -> None:
    """Raise InputError if a run's data are others than before; where one of the two is unknown, nothing is compared.

    Files are compared by their hash, generated data by the version of their generator: its settings are in the recipe,
    and one that a new version of the library adds must not make the data others.
    """

    def identity(data: JSON) -> tuple[JSON, str]:
        if not isinstance(data, dict):
            return None, "unknown"
        if data.get("sha256"):
            words = f"{data.get('count')} files of {data.get('bytes')} bytes, hash {str(data['sha256'])[:10]}"
            return data["sha256"], words
        version = (data.get("generated") or {}).get("version")
        return version, f"generated by version {version}"

    (old, was), (new, found) = identity(before), identity(now)
    if None not in (old, new) and old != new:
        raise InputError(
            f"{where}: expected the data that the run was trained on, {was}, found others, {found}; put them back, or "
            f"start a new run with its weights: mnemos train {where}/recipe.json --from {where}"
        )


def trained(place: Path, name: str) -> JSONObject:
    """The source that trained the run in `place`: {"folder": name, "seed", "commit", "dirty", "resumed" if it was}."""
    about = Provenance.read(place)
    resumed = [{key: one.get(key) for key in ("commit", "dirty")} for one in about.resumed]
    own: JSONObject = {"seed": about.seed, "commit": about.commit, "dirty": about.dirty}
    return {"folder": name, **own, **({"resumed": resumed} if resumed else {})}


def shared(places: Sequence[Path]) -> JSONObject:
    """The entries that are equal in the run.json of all runs, with the first start and the last finish.

    "reported": {"commit", "dirty"} of the source that writes the comparison. Of more than 20 data files only their
    digest.
    """
    abouts = [Provenance.read(place).to_json() for place in places]
    same = {k: v for k, v in abouts[0].items() if k not in _PER_RUN and all(a.get(k) == v for a in abouts)}
    if isinstance(same.get("data"), dict) and len(same["data"].get("files") or ()) > _NAMED:
        same["data"] = {k: v for k, v in same["data"].items() if k != "files"}
    times = {
        "started": min((a["started"] for a in abouts if a.get("started")), default=None),
        "finished": max((a["finished"] for a in abouts if a.get("finished")), default=None),
    }
    return {**same, **times, "reported": source(), "command": command_line()}


@functools.lru_cache(maxsize=2 * LISTED)
def _sha256(path: str, size: int, changed: int) -> str:
    check_file(path)
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def now() -> str:
    """The current time in UTC, to the second, in ISO format."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def _git(*arguments: str) -> str | None:
    package = Path(mnemos.__file__).parent
    try:
        done = subprocess.run(["git", *arguments], cwd=package, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def processor() -> str:
    """The processor's name."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
