"""`python -m mnemos` and the program `mnemos`: the command line of the laboratory."""

import sys

from mnemos.errors import InputError, say


def main() -> int:
    """Run the command that the program was given; returns the exit code. 2 where the laboratory is not installed."""
    # Characters that the encoding of a stream lacks are no error; an output has their escapes.
    for stream, errors in ((sys.stdin, "replace"), (sys.stdout, "backslashreplace"), (sys.stderr, "backslashreplace")):
        if stream is not None:  # one that is closed, as a daemon's may be
            stream.reconfigure(errors=errors)  # type: ignore[union-attr]
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
