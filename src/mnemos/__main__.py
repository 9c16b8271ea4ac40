"""`python -m mnemos` and the program `mnemos`: the command line of the laboratory."""

import os
import sys

from mnemos.errors import InputError, say


def _open_streams() -> None:
    """Make the standard streams usable whatever started the program.

    One that is closed, as a daemon's may be, becomes the null device: else the next file that is opened has its number,
    and gets what is printed. Characters that the encoding of an output lacks are printed as escapes.
    """
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest free number, which is this one
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115
    for stream, errors in ((sys.stdin, "replace"), (sys.stdout, "backslashreplace"), (sys.stderr, "backslashreplace")):
        stream.reconfigure(errors=errors)  # type: ignore[union-attr]


def main() -> int:
    """Run the command that the program was given; returns the exit code. 2 where the laboratory is not installed."""
    _open_streams()
    try:
        from mnemos.lab.cli.interrupts import end_at_once

        end_at_once()  # before the other imports, which take time
        from mnemos.lab.cli import verbs
    except InputError as error:
        say(f"mnemos: {error}", file=sys.stderr)
        return 2
    return verbs.main()


if __name__ == "__main__":
    raise SystemExit(main())
