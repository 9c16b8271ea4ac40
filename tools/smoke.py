"""The first minute of a new installation: what came with it, whether its numbers are right, and a first stream.

`python tools/smoke.py [--kernels]`, with the Python of an environment that has mnemos-torch and no more. Exit code 1 if
a package is there that mnemos does not need, an operation differs from its oracle, or --kernels is given and the
installation has none. The program uses the standard library and mnemos alone.
"""

import argparse
import re
import sys
import time
from importlib.metadata import Distribution, PackageNotFoundError, distribution, distributions

OF_ENVIRONMENTS = {"pip", "setuptools", "wheel"}  # venv puts them there


def plain(name: str) -> str:
    """A distribution's name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def needed(name: str) -> dict[str, Distribution]:
    """An installed distribution and all that it needs, by name; what another system or Python needs is left out."""
    known, seen, left = {}, set(), [(name, "")]
    while left:
        name, extras = left.pop()
        if (name, extras) in seen:
            continue
        seen.add((name, extras))
        try:
            found = known[plain(name)] = distribution(name)
        except PackageNotFoundError:
            continue
        chosen = {plain(extra.strip()) for extra in extras.split(",")}
        for line in found.requires or ():
            wanted = re.search(r"extra == ['\"]([\w.-]+)", line)
            if wanted is None or plain(wanted[1]) in chosen:
                left.append(re.match(r"([\w.-]+)\s*(?:\[(.*?)\])?", line).groups(default=""))
    return known


def main() -> int:
    """Print what was found; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernels", action="store_true", help="the installation must have the compiled kernels")
    options = parser.parse_args()
    there = {plain(one.metadata["Name"]): one.version for one in distributions()}
    others = sorted(there.keys() - needed("mnemos-torch").keys() - OF_ENVIRONMENTS)
    print("packages", len(there), " ".join(f"{name}=={there[name]}" for name in sorted(there)))

    start = time.monotonic()
    import torch

    import mnemos
    from mnemos.testing import verify

    print(f"imported {mnemos.__file__} in {time.monotonic() - start:.1f} s")
    start = time.monotonic()
    model = mnemos.Transformer(vocab_size=256, attention=mnemos.attention.LinearConfig()).eval()
    stream = mnemos.Stream(model).prefill(torch.randint(256, (1, 1000)))
    tokens, _ = stream.generate(200, temperature=0.8)
    print(f"stream   1000 tokens read and {tokens.shape[1]} generated in {time.monotonic() - start:.1f} s")
    sets = mnemos.native.instruction_sets()
    print(f"kernels  {', '.join(sets) or mnemos.native.why_not()}")
    start = time.monotonic()
    results = list(verify())
    wrong = [str(result) for result in results if not result.passed]
    print(
        f"verified {len(results) - len(wrong)} of {len(results)} in {time.monotonic() - start:.1f} s", *wrong, sep="\n"
    )

    problems = [f"not needed by mnemos-torch: {', '.join(others)}"] if others else []
    problems += ["wrong numbers"] if wrong else []
    problems += ["no compiled kernels"] if options.kernels and not sets else []
    print(*(f"FAILED   {problem}" for problem in problems), sep="\n", end="\n" if problems else "")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
