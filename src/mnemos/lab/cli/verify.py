"""`mnemos verify`: what this machine is, and whether every operation by every backend on it gives the right numbers."""

from mnemos.errors import say

from .parsers import CommandParser

ABOUT = (
    "Compare values and gradients of every operation, by every backend and instruction set of this machine, with its "
    "plain equations in float64. Exit code 1 if one differs by more than its bound."
)


def verify(arguments: list[str]) -> int:
    """Print the machine, a line for each operation by each backend, and how many passed."""
    parser = CommandParser("verify", ABOUT)
    parser.add_argument("operation", nargs="*", metavar="OPERATION", help="the first words of those to compare")
    options = parser.parse_args(arguments)
    from mnemos import native
    from mnemos.lab.run.provenance import processor, versions
    from mnemos.ops import dense_layer
    from mnemos.testing.machine import HEAD
    from mnemos.testing.machine import verify as compare

    say(f"processor    {processor()}")
    sets = native.instruction_sets()
    listed = ", ".join(sets)
    say(f"kernels      {f'compiled, {sets[-1]} (of {listed})' if sets else native.why_not()}")
    say(f"dense layers {dense_layer.choice()}")
    found = {name: version or "not installed" for name, version in versions().items()}
    say(f"versions     {', '.join(f'{name} {version}' for name, version in found.items())}\n")
    say(HEAD)
    results = []
    for result in compare(options.operation or None):
        say(result, flush=True)
        results.append(result)
    failed = sum(not result.passed for result in results)
    say(f"\n{failed} of {len(results)} FAILED" if failed else f"\nall {len(results)} passed")
    return 1 if failed else 0
