"""The command line: `mnemos VERB ...`.

`verbs`, to be read first, is the table of the commands, and turns their errors into lines and exit codes. `parsers`
makes the options of a command from the parameters of its function. The functions stand in a file for each group:
`listing`, `training`, `linearising`, `comparing`, `benchmarking`, `using` and `chat`. `interrupts` is Ctrl-C, which
works before anything slow is imported.
"""

from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code. argv: by default the program's. See `verbs.main`."""
    from . import verbs  # not before `interrupts` is installed (mnemos/__main__.py)

    return verbs.main(argv)
