"""The first minute of a new installation: a first stream, and whether its numbers are right.

`python tools/smoke.py [--kernels]`, with the Python of an environment that has mnemos-torch and what it needs. Exit
code 1 if an operation differs from its oracle, or --kernels is given and the installation has none.
"""

import argparse
import sys
import time


def main() -> int:
    """Print what was found; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernels", action="store_true", help="the installation must have the compiled kernels")
    options = parser.parse_args()
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
    wrong = [result for result in results if not result.passed]
    seconds = time.monotonic() - start
    print(f"verified {len(results) - len(wrong)} of {len(results)} in {seconds:.1f} s", *wrong, sep="\n")
    if options.kernels and not sets:
        print("FAILED   no compiled kernels")
    return int(bool(wrong) or (options.kernels and not sets))


if __name__ == "__main__":
    sys.exit(main())
