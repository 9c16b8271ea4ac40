"""Which readers a model's memories have."""

from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from mnemos.attention.gated import GatedBranch
from mnemos.attention.linear import LinearAttention
from mnemos.attention.recurrent import RecurrentAttention
from mnemos.attention.softmax import SoftmaxAttention
from mnemos.hosts.linearised import Linearised
from mnemos.models.memformer import Memformer
from mnemos.models.segments import SegmentModel

from .memories import CacheReader, EncodedReader, Reader, SlotReader, TokenReader, WindowReader
from .sums import LinearisedReader, RecurrentReader, SumsReader


def readers_of(model: nn.Module, most: int) -> list[Reader]:
    """The readers of a model's memories, of at most so many layers, evenly spaced."""
    if isinstance(model, Memformer):
        slots = [SlotReader(model)] if model.memory is not None else []
        return [*slots, EncodedReader(model)]
    if isinstance(model, SegmentModel):
        return [TokenReader(model)] if model.front else []
    found = []
    for kind, make in _MAKERS:
        modules = [(name, module) for name, module in model.named_modules() if isinstance(module, kind)]
        modules = [(name, module) for name, module in modules if getattr(module, "causal", True)]
        for place, (name, module) in enumerate(modules):
            found.append((_layer_number(name), name, place, module, make))
    numbers = sorted({number for number, *_ in found})
    shown = {numbers[i] for i in _evenly(len(numbers), most)}
    readers: list[Reader] = []
    for number, name, place, module, make in sorted(found, key=lambda one: one[0]):
        if number in shown:
            readers += make(model, name, f"layer {numbers.index(number) + 1}", module, place)
    return readers


def _evenly(count: int, most: int) -> Iterator[int]:
    return iter(range(count)) if count <= most else (round(i * (count - 1) / (most - 1)) for i in range(most))


def _layer_number(name: str) -> tuple[int, ...]:
    """The numbers in a module's name, by which layers are ordered."""
    return tuple(int(part) for part in name.split(".") if part.isdigit())


def _make_window(model: nn.Module, name: str, title: str, module: Any, place: int) -> list[Reader]:
    outer = name.removesuffix(".inner")
    return [WindowReader(name, title, module, outer if outer != name else None, place)]


def _make_cache(model: nn.Module, name: str, title: str, module: Any, place: int) -> list[Reader]:
    return [CacheReader(name, title, module, place)]


def _make_sums(model: nn.Module, name: str, title: str, module: Any, place: int) -> list[Reader]:
    return [SumsReader(name, title, module.num_heads, place)]


def _make_recurrent(model: nn.Module, name: str, title: str, module: Any, place: int) -> list[Reader]:
    return [RecurrentReader(name, title, module.widths.value_heads, place)]


def _make_linearised(model: nn.Module, name: str, title: str, module: Any, place: int) -> list[Reader]:
    return [LinearisedReader(name, title, module, len(module.key_map), place)]


_MAKERS: tuple[tuple[type[nn.Module], Callable[..., list[Reader]]], ...] = (
    (SoftmaxAttention, _make_window),
    (GatedBranch, _make_cache),
    (LinearAttention, _make_sums),
    (RecurrentAttention, _make_recurrent),
    (Linearised, _make_linearised),
)
