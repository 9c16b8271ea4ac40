"""Files that are replaced or extended whole: a crash or a full disk leaves the old file or the new one."""

import contextlib
import errno
import json
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def replacing(path: str | Path, own: bool = False) -> Iterator[Path]:
    """Yield the path of a temporary file, NAME.tmp in the same folder, that becomes `path` when the block ends.

    own: NAME.PROCESS-THREAD.tmp, so that several may write the same path at once, and the last replaces the others.

    The file and its folder's entry are on the disk (fsync) before this returns. If the block raises, the temporary
    file is removed and `path` is unchanged. Only a killed process leaves NAME.tmp. Raises OSError, with `path` as its
    file name, where the disk refuses.
    """
    path = Path(path)
    mark = f".{os.getpid()}-{threading.get_ident()}" if own else ""
    temporary = path.with_name(f"{path.name}{mark}.tmp")
    try:
        yield temporary
        sync(temporary)
        os.replace(temporary, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename in (None, str(temporary)):
            error.filename = str(path)
        raise
    sync(path.parent)


@contextlib.contextmanager
def whole_or_none(folder: Path) -> Iterator[None]:
    """If the block raises, the files and folders that it added to a folder are removed, so that it can run again.

    What was in the folder before stays.
    """
    existed = folder.exists()
    before = set(folder.iterdir()) if folder.is_dir() else set()
    try:
        yield
    except BaseException:
        for path in set(folder.iterdir()) - before if folder.is_dir() else ():
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        if not existed and folder.is_dir():
            folder.rmdir()
        raise


def sync(path: Path) -> None:
    """Wait until a file's bytes, or a folder's entries, are on the disk. Windows cannot open folders: no wait there."""
    if os.name == "nt" and path.is_dir():
        return
    descriptor = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def append(descriptor: int, data: bytes) -> None:
    """Append all bytes to a file that has no other writer, or none of them.

    descriptor: opened with O_APPEND. A disk that is nearly full takes a part of the bytes and refuses the rest: the
    file is then cut back to its old end. Raises the OSError of the refusal.
    """
    end, written = os.fstat(descriptor).st_size, 0
    try:
        while written < len(data):
            count = os.write(descriptor, data[written:])
            if not count:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            written += count
    except BaseException:
        with contextlib.suppress(OSError):
            os.ftruncate(descriptor, end)
        raise


def sort_metadata(path: Path) -> None:
    """Sort the metadata of a safetensors file by name: the library writes them in an order that differs each time.

    Then equal tensors and metadata are equal bytes, in any process.
    """
    with path.open("r+b") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
        if "__metadata__" in header:
            header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
            file.seek(8)
            file.write(json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode().ljust(size))


def write_bytes(path: str | Path, data: bytes) -> None:
    """Replace a file's contents: see `replacing`."""
    with replacing(path) as temporary:
        temporary.write_bytes(data)


def write_text(path: str | Path, text: str) -> None:
    """Replace a file's contents by UTF-8 text with "\\n" line ends: see `replacing`.

    Half of a surrogate pair, as in the name of a file that is not UTF-8, is written as an escape.
    """
    write_bytes(path, text.encode(errors="backslashreplace"))


def write_json(path: str | Path, value: object) -> None:
    """Replace a file's contents by indented JSON: see `replacing`. Values that JSON does not know become strings."""
    write_text(path, json.dumps(value, indent=2, default=str) + "\n")
