"""Which readers a model's memories have: a table by class, to which a memory of one's own can be added."""

from typing import Any

from torch import nn

from mnemos.attention.gated import GatedBranch
from mnemos.attention.linear import LinearAttention
from mnemos.attention.recurrent import RecurrentAttention
from mnemos.attention.softmax import SoftmaxAttention
from mnemos.hosts.linearised import Linearised
from mnemos.models.memformer import Memformer
from mnemos.models.segments import SegmentModel

from .caches import CacheReader, WindowReader
from .memories import Reader
from .segments import EncodedReader, SlotReader, TokenReader
from .sums import LinearisedReader, RecurrentReader, SumsReader

# By class of layer: made as READER(its name in the model, "layer 1", the layer, its number among those of its class).
OF_LAYERS: dict[type[nn.Module], Any] = {
    SoftmaxAttention: WindowReader,
    GatedBranch: CacheReader,
    LinearAttention: SumsReader,
    RecurrentAttention: RecurrentReader,
    Linearised: LinearisedReader,
}


def readers_of(model: nn.Module, most: int) -> list[Reader]:
    """The readers of a model's memories, of at most so many layers, evenly spaced."""
    if isinstance(model, Memformer):
        return [*([SlotReader(model)] if model.memory is not None else []), EncodedReader(model)]
    if isinstance(model, SegmentModel):
        return [TokenReader(model)] if model.front else []
    layers = []
    for cls, reader in OF_LAYERS.items():
        modules = [(name, module) for name, module in model.named_modules() if isinstance(module, cls)]
        causal = [(name, module) for name, module in modules if getattr(module, "causal", True)]
        for index, (name, module) in enumerate(causal):
            number = tuple(int(part) for part in name.split(".") if part.isdigit())  # layers are ordered by these
            layers.append((number, reader, name, module, index))
    numbers = sorted({number for number, *_ in layers})
    count = len(numbers)
    shown = numbers if count <= most else [numbers[round(i * (count - 1) / (most - 1))] for i in range(most)]
    return [
        reader(name, f"layer {numbers.index(number) + 1}", module, index)
        for number, reader, name, module, index in sorted(layers, key=lambda one: one[0])
        if number in shown
    ]
