"""A host for modules that the user names and no adapter knows: any [B, T, D] -> [B, T, D]."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from mnemos.types import InputError

from .host import Call, Host, Place, Site, reach

_WIDTHS = ("embed_dim", "dim", "hidden_size", "d_model", "width")
_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "heads", "nhead")


@dataclass(frozen=True)
class _Custom(Host):
    """Sizes that were found once, instead of attributes."""

    found: tuple[int, int] = (0, 0)

    def check(self, module: nn.Module) -> None:
        """Its forward may be called anything."""

    def sizes(self, module: nn.Module) -> tuple[int, int, int]:
        """D, D and H."""
        dim, heads = self.found
        return dim, dim, heads


def custom_host(site: Site, width: int | None) -> Host:
    """A host for a named module: D as an example has shown it, else from what the module says of itself.

    H is what the module says, else 1. Raises InputError where D cannot be known, and where the module says that it is
    causal: a shared cache would show it its future.
    """
    module = site.module
    if getattr(module, "is_causal", False) is True or reach(module, "is_decoder") is True:
        raise InputError(
            f"{site.name}: a causal attention, to which a shared cache would show the future; leave it out"
        )
    dim = width or next((n for name in _WIDTHS if (n := _integer(module, name))), None)
    if dim is None:
        raise InputError(f"{site.name}: its width is not known; give cache() an example= input of the model")
    heads = next((n for name in _HEADS if (n := _integer(module, name)) and dim % n == 0), 1)
    kind = f"{type(module).__module__}:{type(module).__name__}"
    return _Custom(kind, (), "", "", _call, place=_anywhere, found=(dim, heads))


def _integer(module: Any, name: str) -> int | None:
    value = reach(module, name)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _call(module: Any, args: tuple, kwargs: dict) -> Call:
    x = args[0] if args else next((v for v in kwargs.values() if isinstance(v, Tensor)), None)
    if not isinstance(x, Tensor) or x.dim() != 3:
        raise InputError(f"{type(module).__name__}: expected a call with [B, T, D] first; leave it out of where=")
    return Call(x)


def _anywhere(site: Site, seen: int | None) -> Place:
    """As many slots as the example has tokens; 64 without one."""
    return Place(tokens=seen, slots=seen or 64)
