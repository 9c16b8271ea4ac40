"""What the tests do not wait for: the disk, and git where it would say the same again."""

import functools
import os


def leave_out_the_disk() -> None:
    """No test cuts the power, so what is written need not be on the disk: 5 ms a file and as much for its folder."""
    os.fsync = os.fstat  # which refuses a closed file too


def ask_git_once() -> None:
    """Each run asks git for the commit and the changes of the source: 10 ms, for which the first answer does."""
    from mnemos.lab.run import provenance

    ask = provenance._git

    @functools.cache
    def answer(package: str, *arguments: str) -> str | None:
        return ask(*arguments)

    @functools.wraps(ask)
    def again(*arguments: str) -> str | None:
        return answer(provenance.mnemos.__file__, *arguments)

    provenance._git = again
