"""The command line: `mnemos VERB ...`."""

from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code. argv: by default the program's. See `verbs.main`."""
    from . import verbs  # not before `interrupts` is installed (mnemos/__main__.py)

    return verbs.main(argv)
