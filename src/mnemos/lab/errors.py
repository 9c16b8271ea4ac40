"""Errors that end a command in one line. Nothing slow is imported: no command needs torch for it."""

import errno
import re

FIXES = {  # what to do where the system refuses, by the number of the error
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), "free disk space, or choose another folder"),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "allow it, or choose another folder"),
    **dict.fromkeys((errno.EMFILE, errno.ENFILE), "close other files, or raise the limit (ulimit -n)"),
    errno.EPIPE: "the reader of this program's output has ended: keep it open, or write the output to a file",
}


class TrainingFailed(Exception):  # noqa: N818
    """Training failed, for example with a loss that is not finite: one line with what, where and what to do."""


class Interrupted(Exception):  # noqa: N818
    """A signal requested an end and the run was saved: one line with where it is and how to resume it.

    Further arguments are words that the same command needs to continue.
    """


class SkippedRows(UserWarning):
    """Some of the data are not read: rows of a table without text."""


def one_line(error: BaseException) -> str | None:
    """The error of a system that refuses in one line: a disk, memory, another process. None for any other error.

    These are OSError, MemoryError and the errors by which safetensors and PyTorch report the same. The line has the
    file, if it is known, the reason and what to do. The errors' classes are known by name, without an import.
    """
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename is not None else ""
        return f"{where}{error.strerror or error}; {FIXES.get(error.errno or 0, 'check the path')}"
    first = (str(error).splitlines() or [type(error).__name__])[0]
    if type(error).__name__ == "SafetensorError" and "os error" in first.lower():
        return f"a file could not be written or read ({first}); free disk space, or choose a folder that can be written"
    if out_of_memory(error):
        return f"expected enough memory, found that it does not suffice ({first}); make the model or the batch smaller"
    # Of gloo, NCCL or their store, where another process of a group has ended or is silent.
    words = isinstance(error, RuntimeError) and any(word in str(error) for word in ("/gloo/", "by peer", "NCCL"))
    if words or type(error).__name__ in ("DistBackendError", "DistNetworkError", "DistStoreError"):
        return (
            f"expected the other processes of this training, found that one has ended or is silent ({first}); "
            "see what it printed, then resume the run"
        )
    return None


def out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed: in Python or NumPy, in PyTorch on the CPU, or on a GPU."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    words = ("DefaultCPUAllocator", "Storage size calculation")
    return isinstance(error, RuntimeError) and any(word in str(error) for word in words)


def problem_of_tyro(message: str) -> tuple[str, str]:
    """What is wrong in the boxed message of tyro, in one line, and the option that it proposes, or ""."""
    parts = [" ".join(part.split()) for part in re.split(r"\n\W*[-─]{8,}\W*\n", re.sub(r"[│╭╮╰╯]", " ", message))]
    proposed = re.search(r"Perhaps you meant:\W+(--[\w.-]+)", message)
    return next((part for part in parts[1:] if part), parts[0]).rstrip("."), proposed[1] if proposed else ""
