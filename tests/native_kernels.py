"""The kernels of mnemos/native in tests: whether they are here, and which instruction sets this processor can run."""

import contextlib

import pytest

from mnemos.native import INSTRUCTION_SETS, instruction_set, instruction_sets, library, why_not

__all__ = ["ALL_VARIANTS", "INSTRUCTION_SETS", "VARIANTS", "library", "needs_kernels", "run_variant", "variant"]

needs_kernels = pytest.mark.skipif(library() is None, reason=why_not() or "built")
ALL_VARIANTS = range(max(1, len(instruction_sets())))
VARIANTS = [i for i in ALL_VARIANTS if INSTRUCTION_SETS[i] != "avx512bf16"]  # of kernels without products of bfloat16


def run_variant(number):
    """A context in which all kernels use that instruction set."""
    return instruction_set(INSTRUCTION_SETS[number])


@pytest.fixture(params=VARIANTS, ids=lambda i: INSTRUCTION_SETS[i])
def variant(request):
    """Every kind of the native kernels that this processor can run, by number. The folders that use it import it."""
    with run_variant(request.param) if library() else contextlib.nullcontext():
        yield request.param
