"""The kernels of mnemos/native in tests: whether they are here, and which kinds of processor this one can stand for."""

import pytest

import mnemos.native
from mnemos.native import library, why_not

needs_kernels = pytest.mark.skipif(library() is None, reason=why_not() or "built")
VARIANTS = range(library().mnemos_best() + 1) if library() else [0]
NAMES = ("baseline", "avx2", "avx512")


def run_variant(number, monkeypatch):
    """From here on, the kernels of that kind, whoever asks for them."""
    monkeypatch.setattr(mnemos.native, "variant", lambda _: number)
