"""Files by name: replaced or extended whole, so that a crash or a full disk leaves the old one or the new one.

No writer follows a link to a file, and no reader waits for what is no file: a folder that a stranger made may hold
links, named pipes and devices under the names that are written and read here.
"""

import contextlib
import errno
import json
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from typing import Any

from .errors import InputError

_SPECIAL = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def special(path: str | Path) -> str:
    """What a path is that is neither file nor folder: "a named pipe", "a socket" or "a device"; "" for all others.

    Reading one may wait without end. A path that does not exist, or whose link leads to itself, is no special
    one: opening it says what is wrong.
    """
    try:
        return _SPECIAL.get(stat.S_IFMT(os.stat(path).st_mode), "")
    except (OSError, ValueError):
        return ""


def check_file(path: str | Path) -> None:
    """Raise InputError, before a library opens a path, if it is `special`."""
    if found := special(path):
        raise InputError(f"{path}: expected a file, found {found}; write its content to a file, and name that")


def check_output_folder(path: str | Path) -> None:
    """Raise InputError, before the work that it is for, if a path neither is nor can become a folder."""
    path = Path(path)
    there = next((one for one in (path, *path.parents) if one.exists()), None)
    if there is not None and not there.is_dir():
        found = "a file" if there == path else f"that {there} is a file"
        raise InputError(f"{path}: expected a folder or a new name, found {found}; name another")


def check_output_file(path: str | Path) -> None:
    """Raise InputError, before the work that it is for, if no file can be written at a path (`replacing`)."""
    path = Path(path)
    if found := "a folder" if path.is_dir() else special(path):
        raise InputError(f"{path}: expected a file or a new name to write to, found {found}; name another")
    check_output_folder(path.parent)


def read_bytes(path: str | Path) -> bytes:
    """The bytes of a file. Raises OSError, and InputError for what is `special`."""
    check_file(path)
    return Path(path).read_bytes()


def read_text(path: str | Path) -> str:
    """The UTF-8 text of a file. Raises OSError, UnicodeDecodeError, and InputError for what is `special`."""
    return read_bytes(path).decode()


def parse(text: str) -> Any:
    """The value of a JSON text, which may be damaged. Raises json.JSONDecodeError for any text that is none.

    `json.loads` itself raises RecursionError for deep nesting and a plain ValueError for a number of thousands of
    digits.
    """
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        raise
    except RecursionError:
        raise json.JSONDecodeError("lists or objects that are nested too deeply", text, 0) from None
    except ValueError:
        raise json.JSONDecodeError("a number of too many digits", text, 0) from None


@contextlib.contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """Yield the path of a new, empty file in the same folder that becomes `path` when the block ends.

    Its name is NAME.RANDOM.tmp, so that several may write the same path at once, and the last replaces the others. A
    link at `path` is replaced, and the file that it leads to stays as it is.

    The file and its folder's entry are on the disk (fsync) before this returns. If the block raises, the temporary
    file is removed and `path` is unchanged. Only a killed process leaves one. Raises InputError if `path`, or what it
    links to, is a folder or `special`, and OSError, with `path` as its file name, where the disk refuses.
    """
    path = Path(path)
    check_output_file(path)
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        # Exclusively: whatever is at that name already, a link too, is an error and is not written through.
        os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
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


def is_temporary(path: Path) -> bool:
    """Whether a path has a name of the temporary files of `replacing`, which a killed process leaves."""
    return path.match(f"*.{'[0-9a-f]' * 16}.tmp")


def remove_temporary(folder: Path) -> None:
    """Remove the temporary files that killed processes left in a folder."""
    for path in filter(is_temporary, list(folder.iterdir())):
        path.unlink(missing_ok=True)


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


def open_to_append(path: Path) -> FileIO:
    """A file, or a new one, to `append` to. Raises InputError for what is `special`, and OSError for a link."""
    check_file(path)
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
    return open(os.open(path, flags, 0o666), "ab", buffering=0)


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
