"""The kernels of mnemos/native in tests: whether they are here, and which instruction sets this processor can run."""

import contextlib

import pytest

from mnemos.native import NAMES, instruction_set, instruction_sets, library, why_not
from mnemos.native.build import HERE

__all__ = ["ALL_VARIANTS", "NAMES", "VARIANTS", "library", "needs_kernels", "run_variant", "variant", "words"]

needs_kernels = pytest.mark.skipif(library() is None, reason=why_not() or "built")
ALL_VARIANTS = range(max(1, len(instruction_sets())))
VARIANTS = [i for i in ALL_VARIANTS if NAMES[i] != "avx512bf16"]  # of kernels without products of bfloat16


def run_variant(number):
    """A context in which all kernels use that instruction set."""
    return instruction_set(NAMES[number])


@pytest.fixture(params=VARIANTS, ids=lambda i: NAMES[i])
def variant(request):
    """Every kind of the native kernels that this processor can run, by number. The folders that use it import it."""
    with run_variant(request.param) if library() else contextlib.nullcontext():
        yield request.param


def words(header, struct):
    """How many words of 64 bits a struct of a header has: a field is one, `Rows` or `Gates` four, `Marks` three."""
    found = 0
    for line in (HERE / header).read_text().partition(f"struct {struct} {{")[2].partition("};")[0].splitlines():
        line = line.partition("//")[0].strip().rstrip(";")
        if line:
            kind = line.removeprefix("const ").split()[0]
            found += len(line.split(",")) * {"Rows": 4, "Gates": 4, "Marks": 3}.get(kind, 1)
    return found
