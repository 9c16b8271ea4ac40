"""The adapter for modules that the user names and no other adapter knows: any [B, T, D] -> [B, T, D]."""

from dataclasses import dataclass

from torch import Tensor, nn

from mnemos.types import InputError

from .host import AttentionInput, Call, Host, Site, reach

_WIDTHS = ("embed_dim", "dim", "hidden_size", "d_model", "width")
_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "heads", "nhead")


@dataclass(frozen=True)
class _Custom(Host):
    """A host whose sizes are stored here instead of read from attributes."""

    found: tuple[int, int] = (0, 0)

    def check(self, module: nn.Module) -> None:
        """Accept any forward: its arguments are not known."""

    def sizes(self, module: nn.Module) -> tuple[int, int, int]:
        """D, D and H."""
        dim, heads = self.found
        return dim, dim, heads


def custom_host(site: Site, width: int | None) -> Host:
    """A host for a named module. D is `width`, which an example showed, or an attribute of the module.

    H is an attribute of the module, or else 1. Raises InputError if D is unknown, and if the module declares that it
    is causal: a shared cache would show it the future.
    """
    module = site.module
    if getattr(module, "is_causal", False) is True or reach(module, "is_decoder") is True:
        raise InputError(
            f"{site.name}: expected an attention that is not causal, found a causal one; "
            "a shared cache would show it the future: leave it out of where="
        )
    dim = width or next((n for name in _WIDTHS if (n := _integer(module, name))), None)
    if dim is None:
        raise InputError(
            f"{site.name}: expected a width D, found none of {', '.join(_WIDTHS)}; "
            "give cache() an example= input of the model"
        )
    heads = next((n for name in _HEADS if (n := _integer(module, name)) and dim % n == 0), 1)
    kind = f"{type(module).__module__}:{type(module).__name__}"
    return _Custom(kind, (), "", "", _call, place=_anywhere, found=(dim, heads))


def _integer(module: object, name: str) -> int | None:
    value = reach(module, name)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _call(module: object, args: tuple, kwargs: dict) -> Call:
    x = args[0] if args else next((v for v in kwargs.values() if isinstance(v, Tensor)), None)
    if not isinstance(x, Tensor) or x.dim() != 3:
        raise InputError(
            f"{type(module).__name__}: expected a call with [B, T, D] first, found another; leave it out of where="
        )
    return Call(x)


def _anywhere(site: Site, seen: int | None) -> AttentionInput:
    """One slot per token of the example; 64 without an example."""
    return AttentionInput(tokens=seen, slots=seen or 64)
