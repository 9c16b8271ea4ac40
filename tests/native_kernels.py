"""The kernels of mnemos/native in tests: whether they are here, and which instruction sets this processor can run."""

import pytest

from mnemos.native import NAMES, instruction_set, instruction_sets, library, why_not

__all__ = ["NAMES", "VARIANTS", "library", "needs_kernels", "run_variant"]

needs_kernels = pytest.mark.skipif(library() is None, reason=why_not() or "built")
VARIANTS = range(max(1, len(instruction_sets())))


def run_variant(number):
    """A context in which all kernels use that instruction set."""
    return instruction_set(NAMES[number])
