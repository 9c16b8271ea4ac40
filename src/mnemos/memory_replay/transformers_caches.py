"""The caches of Hugging Face Transformers as states of `replay`."""

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from mnemos import libraries
from mnemos._compat import pytree

_VALUES = (Tensor, bool, int, float, str, list, tuple, dict, type(None))


@dataclass(frozen=True)
class _Rest:
    """What a cache, or a layer of one, is made of besides its values; two are equal if they are of one class.

    Layers of a cache that was never written hold no dtype and no tensor: they become those of a written one.
    """

    cls: type
    names: tuple[str, ...] = field(compare=False)
    fixed: dict[str, Any] = field(compare=False)


def register_transformers_caches() -> None:
    """Let states of `replay` contain a `DynamicCache` of Transformers, with its layers of any dynamic type.

        mnemos.memory_replay.register_transformers_caches()

        def step(ids, cache):
            cache = DynamicCache(config=model.config) if cache is None else cache
            out = model(ids[:, :-1], cache=cache)              # before Transformers 5.24 past_key_values=
            return cross_entropy(out.logits.transpose(1, 2), ids[:, 1:]), cache

    `DynamicCache` and the layer classes of `transformers.cache_utils` become nodes of torch.utils._pytree, for the
    whole process. Keys and values are leaves, carry gradient from step to step and grow by the tokens of a segment.
    A step gets a cache of its own, so that a model may replace its tensors. Layers that write into tensors in place
    (static caches, Mamba's) raise an error. A class that is registered already (Transformers does so for torch.export)
    keeps that registration. Raises InputError if Transformers is not installed.
    """
    library = libraries.transformers().cache_utils
    names = ("DynamicCache", "CacheLayerMixin", "LinearAttentionCacheLayerMixin", "DummyLayer")
    bases = tuple(getattr(library, name) for name in names if hasattr(library, name))
    for cls in vars(library).values():
        if isinstance(cls, type) and issubclass(cls, bases) and cls not in pytree.SUPPORTED_NODES:
            pytree.register_pytree_node(cls, _flatten, _unflatten)


def _flatten(cache: Any) -> tuple[list[Any], _Rest]:
    """One list of values: empty for a layer that was never written, so that the structure of a cache only grows."""
    if vars(cache).get("is_initialized", True) is False:
        return [[]], _Rest(type(cache), (), dict(vars(cache)))
    values = {name: value for name, value in vars(cache).items() if isinstance(value, _VALUES)}
    fixed = {name: value for name, value in vars(cache).items() if name not in values}
    return [list(values.values())], _Rest(type(cache), tuple(values), fixed)


def _unflatten(children: Any, rest: _Rest) -> Any:
    cache: Any = object.__new__(rest.cls)
    vars(cache).update(rest.fixed)
    vars(cache).update(zip(rest.names, next(iter(children)), strict=True))
    return cache
