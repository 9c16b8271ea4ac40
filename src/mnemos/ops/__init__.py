"""Pure functions of tensors. Each folder holds one algorithm, with its equations in reference.py."""

import importlib
from typing import Any

from mnemos.types import InputError

from .associative import associative_read, associative_write, dpfp
from .block_sparse import block_sparse_attention
from .convolution import short_convolution
from .delta import decayed_attention, delta_rule
from .linear import linear_attention
from .reformer import reformer_attention
from .relative_position import relative_attention
from .rewind import rewindable
from .selective import selective_scan
from .slot_memory import biased_memory_norm, slot_attention, slot_write

__all__ = [
    "associative_read",
    "associative_write",
    "backends",
    "biased_memory_norm",
    "block_sparse_attention",
    "decayed_attention",
    "delta_rule",
    "dpfp",
    "linear_attention",
    "reformer_attention",
    "relative_attention",
    "rewindable",
    "selective_scan",
    "short_convolution",
    "slot_attention",
    "slot_write",
    "which",
]

# operation: its folder
_WITH_BACKENDS = {
    "linear_attention": "linear",
    "delta_rule": "delta",
    "decayed_attention": "delta",
    "short_convolution": "convolution",
    "selective_scan": "selective",
}


def backends(operation: str) -> list[str]:
    """The backends of an operation that can run on this machine, best first: backends("linear_attention")."""
    return _module(operation).backends()


def which(operation: str, *tensors: object, backend: str = "auto", **options: object) -> str:
    """The backend that computes an operation on these tensors: which("linear_attention", q, k, v, feature_map=φ)."""
    return _module(operation).which(*tensors, backend=backend, **options)


def _module(operation: str) -> Any:
    if operation not in _WITH_BACKENDS:
        raise InputError(
            f"expected an operation with several backends, found {operation!r}; "
            f"there is one for {', '.join(_WITH_BACKENDS)}"
        )
    return importlib.import_module(f"{__name__}.{_WITH_BACKENDS[operation]}")
