"""States of beginnings on disk, by their tokens: within a number of bytes, for several processes, for any models."""

import contextlib
import hashlib
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from torch import Tensor, nn

from mnemos.state_file import SMALLER, fingerprint
from mnemos.types import InputError

from .rollback import check_cuts
from .stream import Stream, check_tokens, require_tokens, restore_stream, save_stream

_STALE = 3600.0  # seconds after which the temporary file of a killed process is removed


class _File(NamedTuple):
    used: int  # nanoseconds
    size: int
    path: Path


class PrefixStore:
    """The streams after beginnings of prompts, one file each, in a folder.

        store = mnemos.PrefixStore(model, "states", limit_bytes=10 << 30)
        store.put(tokens, stream)                     # tokens [T], and the stream of one row that has read them
        found = store.get(prompt)                     # the longest stored beginning of the prompt [T], or None
        if found: length, stream = found; stream = stream.prefill(prompt[None, length:])

    `mnemos.PrefixTree(model, folder=store)` puts and gets by itself, block by block.

    limit_bytes: of all files together; those that were used least recently are deleted when another is put; None: no
    limit. dtype: "bfloat16" or "int8" for smaller files (`mnemos.save_state`).

    Several processes may put, get and delete at once: a file appears whole, and one that another process deletes is not
    found. A folder may hold states of several models, or of one before and after training, whose names have the hash
    of configuration, weights and tokens: none is taken for another. The weights are hashed once, here.

    Cost: a look at the names of all files a call, a hash of the tokens, and a file of one row's state.
    Raises InputError for a model whose outputs depend on the cuts of a sequence, and for a file that is damaged.
    """

    def __init__(
        self, model: nn.Module, folder: str | Path, limit_bytes: int | None = 1 << 30, dtype: str | None = None
    ) -> None:
        check_cuts(model, "PrefixStore")
        if not (limit_bytes is None or (isinstance(limit_bytes, int) and limit_bytes >= 0)):
            raise InputError(f"PrefixStore: expected a limit of at least 0 bytes or None, found {limit_bytes!r}")
        if dtype not in (None, *SMALLER):
            raise InputError(f"PrefixStore: expected a dtype of {', '.join(SMALLER)} or None, found {dtype!r}")
        self.model, self.folder, self.limit_bytes, self.dtype = model, Path(folder), limit_bytes, dtype
        self._new = Stream(model)
        self._of = fingerprint(model)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            raise InputError(f"{folder}: expected a folder or a new name, found a file; name another") from None

    def put(self, tokens: Tensor, stream: Stream) -> None:
        """Write the stream, of one row, that has read the tokens [T]; then delete what is above the limit."""
        row = self._checked(tokens)
        last = require_tokens(stream, "PrefixStore")
        if stream.model is not self.model or len(last) != 1 or int(last[0, 0]) != int(row[-1]):
            raise InputError(
                "PrefixStore: expected a stream of one row of the store's model whose last token is that of the "
                f"tokens, found {stream!r}; use Stream(model).prefill(tokens[None])"
            )
        self.write(next(self.keys(row, [len(row)])), stream)

    def get(self, tokens: Tensor) -> tuple[int, Stream] | None:
        """(its number of tokens, the stream) of the longest stored beginning of the tokens [T]; None: there is none."""
        row = self._checked(tokens)
        names = {file.path.stem for file in self._files()}
        lengths = sorted({length for name in names if (length := _length(name)) <= len(row)})
        for length, key in reversed(list(zip(lengths, self.keys(row, lengths), strict=True))):
            if key in names and (stream := self.read(key)) is not None:
                return length, stream
        return None

    def keys(self, row: Tensor, lengths: Iterable[int]) -> Iterator[str]:
        """The names of the beginnings [length] of tokens [T], for ascending lengths."""
        found = hashlib.sha256("\n".join(self._of.values()).encode())
        begin = 0
        for length in lengths:
            found.update(row[begin:length].cpu().contiguous().numpy().tobytes())
            begin = length
            yield f"{length}-{found.copy().hexdigest()}"

    def read(self, key: str) -> Stream | None:
        """The stream of a name; None: there is none, also where another process has just deleted it."""
        file = self._path(key)
        try:
            stream = restore_stream(Stream, self.model, file, self._new.step, self._of)
        except InputError as error:
            if not file.is_file():
                return None
            found = str(error).rpartition(";")[0]
            raise InputError(f"{found}; remove the file, and its tokens are read again") from error
        _use(file)
        return stream

    def write(self, key: str, stream: Stream) -> None:
        """Write the stream of a name, and delete what is above the limit."""
        file = self._path(key)
        if not file.is_file():
            save_stream(stream, file, self._of, self.dtype)
        _use(file)
        if self.limit_bytes is None:
            return
        files = sorted(self._files())
        total = sum(file.size for file in files)
        for oldest in files:
            if total <= self.limit_bytes:
                break
            with contextlib.suppress(OSError):  # another process has deleted it, or (Windows) reads it
                oldest.path.unlink()
            total -= oldest.size

    @property
    def size(self) -> int:
        """The bytes of all states in the folder."""
        return sum(file.size for file in self._files())

    def __len__(self) -> int:
        """The number of states in the folder."""
        return sum(1 for _ in self._files())

    def _checked(self, tokens: Tensor) -> Tensor:
        if not isinstance(tokens, Tensor) or tokens.dim() != 1:
            raise InputError(f"PrefixStore: expected tokens [T] of one prompt, found {type(tokens).__name__}")
        return check_tokens(self._new, tokens[None])[0]

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}.safetensors"

    def _files(self) -> Iterator[_File]:
        """The states; removes temporary files that a killed process has left."""
        for entry in os.scandir(self.folder):
            with contextlib.suppress(FileNotFoundError):  # deleted since
                about = entry.stat()
                if entry.name.endswith(".safetensors") and _length(entry.name) > 0:
                    yield _File(about.st_mtime_ns, about.st_size, Path(entry.path))
                elif entry.name.endswith(".tmp") and time.time() - about.st_mtime > _STALE:
                    os.unlink(entry.path)


def _length(name: str) -> int:
    """The number of tokens of a file's name; 0 for other files."""
    first = name.partition("-")[0]
    return int(first) if first.isdecimal() else 0


def _use(file: Path) -> None:
    with contextlib.suppress(OSError):
        now = time.time_ns()  # finer than the clock of most file systems
        os.utime(file, ns=(now, now))
