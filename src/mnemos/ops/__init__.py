"""Pure functions of tensors, a folder each: read its `__init__.py`, then reference.py, its equations.

Four folders have several backends (`BACKENDS`, see backend.py), one of which computes a call: linear, delta (two
operators), convolution and selective. Their native.py calls the C++ kernels (kernel_call.py makes a kernel an operator
that PyTorch differentiates), their chunked.py PyTorch's operations, which run everywhere. The other folders have no
choice of backend: associative, slot_memory and relative_position; and those that only attentions and memories call,
window_state, softmax_attention and gated_cache, which decides by itself when its kernels run.
An operator's tensors are checked once, in its `__init__.py`, by a `Signature` (signature.py).
The files beside the folders: dense_layer, the dense layers of all models, by the faster of two libraries; padding,
positions and dropout, what attentions do to their inputs; precision and backward, what operators of several folders
share.
"""

import importlib
from typing import TYPE_CHECKING, Any

from mnemos.errors import InputError
from mnemos.face import lazy

if TYPE_CHECKING:
    from .associative import associative_read as associative_read
    from .associative import associative_write as associative_write
    from .associative import dpfp as dpfp
    from .convolution import short_convolution as short_convolution
    from .delta import decayed_attention as decayed_attention
    from .delta import delta_rule as delta_rule
    from .dense_layer import Linear as Linear
    from .dense_layer import dense as dense
    from .linear import linear_attention as linear_attention
    from .relative_position import relative_attention as relative_attention
    from .selective import selective_scan as selective_scan
    from .slot_memory import biased_memory_norm as biased_memory_norm
    from .slot_memory import slot_attention as slot_attention
    from .slot_memory import slot_write as slot_write
else:
    __getattr__, __dir__, __all__ = lazy(__name__, "backends", "which")

# The folder of each operation that has backends.
_WITH_BACKENDS = {
    "linear_attention": "linear",
    "delta_rule": "delta",
    "decayed_attention": "delta",
    "short_convolution": "convolution",
    "selective_scan": "selective",
    "dense": "dense_layer",
}


def backends(operation: str) -> list[str]:
    """The backends of an operation that can run on this machine, best first: backends("linear_attention")."""
    names: list[str] = _module(operation).BACKENDS.here()
    return names


def which(operation: str, *tensors: Any, backend: str = "auto", **options: Any) -> str:
    """The backend that computes an operation on these tensors: which("linear_attention", q, k, v, feature_map=φ)."""
    module = _module(operation)
    if operation == "linear_attention":  # alone: it has a feature map, which changes what a backend gets
        tensors = module.features_of_one_token(*tensors, **options)
    name: str = module.BACKENDS.choose(backend, *tensors).name
    return name


def _module(operation: str) -> Any:
    if operation not in _WITH_BACKENDS:
        raise InputError(
            f"expected an operation with several backends, found {operation!r}; "
            f"there is one for {', '.join(_WITH_BACKENDS)}"
        )
    return importlib.import_module(f"{__name__}.{_WITH_BACKENDS[operation]}")
