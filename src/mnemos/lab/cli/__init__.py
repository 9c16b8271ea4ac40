"""The command line: `mnemos VERB ...`. `verbs`, to be read first, is the table of the commands."""

from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code. argv: by default the program's. See `verbs.main`."""
    from . import verbs  # not before `interrupts` is installed (mnemos/__main__.py)

    return verbs.main(argv)
