"""The models of Memformer's Tables 1 and 2, at the paper's sizes and at sizes for one core.

A variant is a row of a table, under the paper's name for it; the recipes that train them are in `recipes.py`.
"""

from dataclasses import replace
from typing import NamedTuple

from mnemos.attention.compressive import CompressiveConfig
from mnemos.attention.relative import RelativeConfig
from mnemos.config import ModelConfig
from mnemos.lab.run.recipe import RolloutConfig
from mnemos.memory.slots import SlotsConfig
from mnemos.models.lstm import LSTMConfig
from mnemos.models.memformer import MemformerConfig
from mnemos.models.transformer import TransformerConfig

HORIZON = 8  # segments that gradient flows through
Variant = tuple[ModelConfig, RolloutConfig]


class ImageSizes(NamedTuple):
    """The size of Table 1's models: the paper's by default. A segment is one row of a picture."""

    dim: int = 128
    layer_divisor: int = 1  # divides the paper's numbers of layers
    slot_divisor: int = 1  # divides the paper's numbers of slots
    side: int = 28
    dropout: float = 0.1

    @property
    def length(self) -> int:
        """Bytes per picture."""
        return self.side**2


class LanguageSizes(NamedTuple):
    """The size of Table 2's models: the paper's by default. slide: of Memformer's windows; 0: they share no segment."""

    dim: int = 512
    num_heads: int = 8
    layer_divisor: int = 1  # divides the paper's numbers of layers
    length_divisor: int = 1  # divides the paper's segments, memories and numbers of slots
    dropout: float = 0.1
    slide: int = 1  # Algorithm 1 pops the oldest memory after an update

    @property
    def segment(self) -> int:
        """Tokens per segment."""
        return 128 // self.length_divisor


# The names of Table 1's rows, and how the names of their recipes end. Table 4 has 8 slots where the text has 64: both
# are here.
PICTURES = {
    "LSTM": "lstm",
    "Transformer decoder": "transformer",
    "Transformer-XL memory=56": "xl-56",
    "Transformer-XL memory=224": "xl-224",
    "Transformer-XL memory=784": "xl-784",
    "Memformer 4+8": "memformer",
    "Memformer 4+8 memory=8": "memformer-8-slots",
    "Memformer 2+6 memory=64": "memformer-2+6",
    "Memformer 2+6 memory=32": "memformer-2+6-32-slots",
    "Memformer 2+6 memory=16": "memformer-2+6-16-slots",
    "Memformer 2+6 memory=1": "memformer-2+6-1-slot",
    "Memformer 4+4": "memformer-4+4",
    "w/o memory": "memformer-no-memory",
    "temperature=1.0": "memformer-temperature-1",
    "w/o forgetting": "memformer-no-forgetting",
    "w/o multi-head": "memformer-one-head",
}
_XL = {f"Transformer-XL base memory={memory}": memory for memory in (1600, 1024, 512, 256, 128, 32)}
COMPRESSIVE = "Compressive Transformer memory=512 compress=512"
# The names of Table 2's rows: layers of encoder and decoder, and slots.
_MEMFORMERS = {
    "Memformer 4+16": (4, 16, 1024),
    "Memformer 4+12": (4, 12, 1024),
    "Memformer memory=512": (4, 16, 512),
    "Memformer w/o memory": (4, 16, 0),
}
LANGUAGE = (*_XL, COMPRESSIVE, *_MEMFORMERS)

# Sizes that train on one core: half the layers, and on 8 x 8 pixels a quarter of the slots.
SMALL = {
    "digits": ImageSizes(dim=32, layer_divisor=2, slot_divisor=4, side=8, dropout=0.0),
    "mnist": ImageSizes(dim=32, layer_divisor=2, dropout=0.0),
}
# Windows that slide would read an eighth of the text in the same time.
SMALL_LANGUAGE = LanguageSizes(dim=64, num_heads=4, layer_divisor=4, length_divisor=4, dropout=0.0, slide=0)


def picture_variant(name: str, size: ImageSizes) -> Variant:
    """The model of a row of Table 1, and how its updates read a picture.

    A model that carries no gradient from segment to segment has a horizon of 1. Where a picture is no longer than a
    horizon, Memformer reads it at once: the gradient is the same.
    """
    if name == "LSTM":
        return LSTMConfig(dim=4 * size.dim, layers=4, dropout=size.dropout), RolloutConfig()
    plain = TransformerConfig.classic(
        dim=size.dim,
        layers=8 // size.layer_divisor,
        num_heads=4,
        mlp=2 * size.dim,
        max_length=size.length,
        dropout=size.dropout,
    )
    if name == "Transformer decoder":
        return plain, RolloutConfig()
    if name.startswith("Transformer-XL"):
        reach = round(_number(name) * size.length / 784)  # the same share of a picture
        model = replace(plain, position="none", attention=RelativeConfig(memory=reach))
        return model, RolloutConfig(segment_length=size.side, horizon=1)
    encoder, decoder = (4, 8) if "4+8" in name else (4, 4) if "4+4" in name else (2, 6)
    slots = 0 if name == "w/o memory" else max(1, (_number(name) if "memory=" in name else 64) // size.slot_divisor)
    memory = SlotsConfig(
        slots=slots,
        temperature=1.0 if "temperature" in name else 0.25,
        forgetting=name != "w/o forgetting",
        num_heads=1 if name == "w/o multi-head" else 0,
    )
    memformer = MemformerConfig(
        preset="paper",
        dim=size.dim,
        encoder_layers=encoder // size.layer_divisor,
        decoder_layers=decoder // size.layer_divisor,
        num_heads=4,
        mlp=2 * size.dim,
        segment=size.side,
        memory=memory,
        dropout=size.dropout,
    )
    whole = size.side <= HORIZON
    return memformer, RolloutConfig() if whole else RolloutConfig(segment_length=size.side, horizon=HORIZON)


def language_variant(name: str, size: LanguageSizes) -> Variant:
    """The model of a row of Table 2, and how its updates read: `HORIZON` segments, with gradient through all of them.

    Transformer-XL and the Compressive Transformer read as much new text per update; their memory carries no gradient.
    """
    if name in _XL or name == COMPRESSIVE:
        reach = 512 // size.length_divisor
        compressive = CompressiveConfig(memory=reach, compressed=reach, ratio=4)
        model = TransformerConfig.classic(
            dim=size.dim,
            num_heads=size.num_heads,
            mlp=4 * size.dim,
            layers=16 // size.layer_divisor,
            max_length=size.segment,
            position="none",
            dropout=size.dropout,
            attention=RelativeConfig(memory=_XL[name] // size.length_divisor) if name in _XL else compressive,
        )
        return model, RolloutConfig(segments=size.slide or HORIZON, horizon=1)
    encoder, decoder, slots = _MEMFORMERS[name]
    memformer = MemformerConfig(
        preset="paper",
        dim=size.dim,
        num_heads=size.num_heads,
        mlp=4 * size.dim,
        encoder_layers=encoder // size.layer_divisor,
        decoder_layers=decoder // size.layer_divisor,
        segment=size.segment,
        memory=SlotsConfig(slots=slots // size.length_divisor, temperature=0.125),
        dropout=size.dropout,
    )
    return memformer, RolloutConfig(segments=HORIZON, slide=size.slide)


def _number(name: str) -> int:
    """The number after the row's "="."""
    return int(name.rpartition("=")[2])
