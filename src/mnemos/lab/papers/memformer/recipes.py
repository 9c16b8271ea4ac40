"""The models of Memformer's Tables 1 and 2 and their recipes: at the paper's settings and at sizes for one core.

A row has the paper's name for it. The paper names no schedule after the warm-up: these have half a cosine. At the
paper's size text is read in words, with a tied adaptive softmax, which the paper does not mention. The small recipes
and `wikitext-bytes-…` read bytes: their perplexities cannot be compared with those of Table 2.
"""

from dataclasses import replace
from typing import Any, NamedTuple

from mnemos.attention.compressive import CompressiveConfig
from mnemos.attention.relative import RelativeConfig
from mnemos.config import ModelConfig
from mnemos.lab.recipes.family import altered, cosine, family
from mnemos.lab.recipes.text import in_words
from mnemos.lab.run.recipe import Recipe, RolloutConfig, TrainConfig, recipe
from mnemos.lab.tasks.images import DigitsConfig, MNISTConfig
from mnemos.lab.tasks.pixels import PixelsConfig
from mnemos.lab.tasks.recall import RecallConfig
from mnemos.lab.tasks.text import TextConfig
from mnemos.memory.slots import SlotsConfig
from mnemos.models.lstm import LSTMConfig
from mnemos.models.memformer import MemformerConfig
from mnemos.models.transformer import TransformerConfig

HORIZON = 8  # segments that gradient flows through
Variant = tuple[ModelConfig, RolloutConfig]
_OPTIM = cosine(1e-3, warmup=1000, weight_decay=0.01, grad_clip=1.0)
_PAPER = TrainConfig(steps=10_000, batch_size=256, eval_every=1000, checkpoint_every=500)
_SMALL_OPTIM = cosine(3e-3, warmup=50, floor=0.05)
_SMALL_TRAIN = TrainConfig(steps=600, batch_size=32, eval_every=600, checkpoint_every=300, log_every=50)

# ---- Table 1: pictures byte by byte ----


class ImageSizes(NamedTuple):
    """The size of Table 1's models: the paper's by default. A segment is one row of a picture: the paper names none."""

    dim: int = 128
    layer_divisor: int = 1  # divides the paper's numbers of layers
    slot_divisor: int = 1  # divides the paper's numbers of slots
    side: int = 28
    dropout: float = 0.1

    @property
    def length(self) -> int:
        return self.side**2  # bytes


# Sizes that train on one core: half the layers, and on 8 x 8 pixels a quarter of the slots.
SMALL_PICTURES = {
    "digits": ImageSizes(dim=32, layer_divisor=2, slot_divisor=4, side=8, dropout=0.0),
    "mnist": ImageSizes(dim=32, layer_divisor=2, dropout=0.0),
}
_PICTURE_XL = {f"Transformer-XL memory={memory}": memory for memory in (56, 224, 784)}
# Table 1's rows of Memformer: how the names of their recipes end, layers of encoder and decoder, and what else differs
# from 64 slots. Table 4 has 8 slots where the text has 64: both are here.
_PICTURE_MEMFORMERS: dict[str, tuple[str, tuple[int, int], dict[str, Any]]] = {
    "Memformer 4+8": ("memformer", (4, 8), {}),
    "Memformer 4+8 memory=8": ("memformer-8-slots", (4, 8), {"slots": 8}),
    "Memformer 2+6 memory=64": ("memformer-2+6", (2, 6), {}),
    "Memformer 2+6 memory=32": ("memformer-2+6-32-slots", (2, 6), {"slots": 32}),
    "Memformer 2+6 memory=16": ("memformer-2+6-16-slots", (2, 6), {"slots": 16}),
    "Memformer 2+6 memory=1": ("memformer-2+6-1-slot", (2, 6), {"slots": 1}),
    "Memformer 4+4": ("memformer-4+4", (4, 4), {}),
    "w/o memory": ("memformer-no-memory", (2, 6), {"slots": 0}),
    "temperature=1.0": ("memformer-temperature-1", (2, 6), {"temperature": 1.0}),
    "w/o forgetting": ("memformer-no-forgetting", (2, 6), {"forgetting": False}),
    "w/o multi-head": ("memformer-one-head", (2, 6), {"num_heads": 1}),
}
# The names of Table 1's rows, and how the names of their recipes end.
PICTURES = {
    "LSTM": "lstm",
    "Transformer decoder": "transformer",
    **{row: f"xl-{memory}" for row, memory in _PICTURE_XL.items()},
    **{row: ending for row, (ending, _, _) in _PICTURE_MEMFORMERS.items()},
}
_ROWS = {ending: row for row, ending in PICTURES.items()}
_IMAGES = {
    "digits": PixelsConfig(DigitsConfig(layout="image"), start=True),
    "mnist": PixelsConfig(MNISTConfig(layout="image"), start=True),
}


def picture_variant(row: str, size: ImageSizes) -> Variant:
    """The model of a row of Table 1, and how its updates read a picture.

    A model that carries no gradient from segment to segment has a horizon of 1. Where a picture is no longer than a
    horizon, Memformer reads it at once: the gradient is the same.
    """
    if row == "LSTM":
        return LSTMConfig(dim=4 * size.dim, layers=4, dropout=size.dropout), RolloutConfig()
    sizes: dict[str, Any] = {"dim": size.dim, "num_heads": 4, "mlp": 2 * size.dim, "dropout": size.dropout}
    if row not in _PICTURE_MEMFORMERS:
        plain = TransformerConfig.classic(**sizes, layers=8 // size.layer_divisor, max_length=size.length)
        if row not in _PICTURE_XL:
            return plain, RolloutConfig()
        reach = round(_PICTURE_XL[row] * size.length / 784)  # the same share of a picture
        model = replace(plain, position="none", attention=RelativeConfig(memory=reach))
        return model, RolloutConfig(segment_length=size.side, horizon=1)
    _, (encoder, decoder), changes = _PICTURE_MEMFORMERS[row]
    memory = replace(SlotsConfig(slots=64, temperature=0.25), **changes)
    memformer = MemformerConfig(
        **sizes,
        preset="paper",
        encoder_layers=encoder // size.layer_divisor,
        decoder_layers=decoder // size.layer_divisor,
        segment=size.side,
        memory=replace(memory, slots=memory.slots and max(1, memory.slots // size.slot_divisor)),
    )
    whole = size.side <= HORIZON
    return memformer, RolloutConfig() if whole else RolloutConfig(segment_length=size.side, horizon=HORIZON)


def picture_recipe(images: str, row: str) -> Recipe:
    """A row of Table 1 at a small size: images "digits" or "mnist"."""
    model, rollout = picture_variant(row, SMALL_PICTURES[images])
    return Recipe(
        name=f"{images}-{PICTURES[row]}{'' if images == 'digits' else '-small'}",
        model=model,
        data=_IMAGES[images],
        optim=_SMALL_OPTIM,
        train=replace(_SMALL_TRAIN, rollout=rollout),
    )


@family("{images}-{model}-{size}", images=_IMAGES, model=_ROWS, size=("", "small"))
def memformer_pictures(images: str, model: str, size: str) -> Recipe | None:
    """Images byte by byte: the models of Memformer's Table 1 at the paper's size, and one for one core."""
    row = _ROWS[model]
    called = {"digits": "scikit-learn's digits", "mnist": "MNIST"}[images]
    about = f"{called} byte by byte, {row} at"
    if (images, size) == ("mnist", ""):
        config, rollout = picture_variant(row, ImageSizes())
        about, train = f"{about} the paper's size (Memformer, Table 1)", replace(_PAPER, rollout=rollout)
        return Recipe(about=about, model=config, data=_IMAGES[images], optim=_OPTIM, train=train)
    if model == "memformer" and (images, size) != ("digits", "small"):
        return replace(picture_recipe(images, row), about=f"{about} a size for one core (Memformer, Table 1)")
    return None


# ---- Table 2: text ----


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
        return 128 // self.length_divisor


# Windows that slide would read an eighth of the text in the same time.
SMALL_LANGUAGE = LanguageSizes(dim=64, num_heads=4, layer_divisor=4, length_divisor=4, dropout=0.0, slide=0)
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


def language_variant(row: str, size: LanguageSizes) -> Variant:
    """The model of a row of Table 2, and how its updates read: `HORIZON` segments, with gradient through all of them.

    Transformer-XL and the Compressive Transformer read as much new text per update; their memory carries no gradient.
    """
    sizes: dict[str, Any] = {"dim": size.dim, "num_heads": size.num_heads, "mlp": 4 * size.dim, "dropout": size.dropout}
    if row not in _MEMFORMERS:
        reach = 512 // size.length_divisor
        compressive = CompressiveConfig(memory=reach, compressed=reach, ratio=4)
        model = TransformerConfig.classic(
            **sizes,
            layers=16 // size.layer_divisor,
            max_length=size.segment,
            position="none",
            attention=RelativeConfig(memory=_XL[row] // size.length_divisor) if row in _XL else compressive,
        )
        return model, RolloutConfig(segments=size.slide or HORIZON, horizon=1)
    encoder, decoder, slots = _MEMFORMERS[row]
    memformer = MemformerConfig(
        **sizes,
        preset="paper",
        encoder_layers=encoder // size.layer_divisor,
        decoder_layers=decoder // size.layer_divisor,
        segment=size.segment,
        memory=SlotsConfig(slots=slots // size.length_divisor, temperature=0.125),
    )
    return memformer, RolloutConfig(segments=HORIZON, slide=size.slide)


def language_recipe(row: str, path: str | None = None) -> Recipe:
    """A row of Table 2 at a small size; path: a file or folder of text, None for the standard library's source."""
    model, rollout = language_variant(row, SMALL_LANGUAGE)
    slug = row.lower().replace("w/o ", "no-").replace("transformer-xl base ", "xl ").replace(" ", "-")
    return Recipe(
        name=f"text-{slug.replace('=', '-')}",
        model=model,
        data=TextConfig(path, segment=SMALL_LANGUAGE.segment, held_out=0.01),
        optim=_SMALL_OPTIM,
        train=replace(_SMALL_TRAIN, batch_size=16, rollout=rollout),
    )


_WIKITEXT = {"memformer": "Memformer 4+16", "xl": "Transformer-XL base memory=1024", "compressive": COMPRESSIVE}


@family("wikitext-{tokens}-{model}", tokens=("", "bytes"), model=_WIKITEXT)
def memformer_wikitext(tokens: str, model: str) -> Recipe:
    """Language models of WikiText-103 at the size of Memformer's Table 2."""
    row = _WIKITEXT[model]
    config, rollout = language_variant(row, LanguageSizes())
    called = "Compressive Transformer" if row == COMPRESSIVE else row
    recipe = Recipe(
        about=f"Words of WikiText-103, {called} at the paper's size (Memformer, Table 2)",
        model=config,
        data=TextConfig(segment=128),
        optim=altered(_OPTIM, schedule={"warmup": 10_000}),
        train=replace(_PAPER, steps=150_000, batch_size=128, eval_every=5000, rollout=rollout),
    )
    if tokens:
        return replace(recipe, about=f"wikitext-{model} over the bytes of --data.path FOLDER")
    return in_words(recipe)


# ---- recall of a fact, not in the paper ----

# One pair and one query, with thousands of distractors between them. In training, the number of distractors is random,
# up to a maximum that grows: slots learn to keep facts over short distances first, in short rows. The last updates use
# the full distance; without them 6 % of the answers at that distance are wrong.
RECALL = RecallConfig(pairs=1, symbols=16, queries=1, distance=4096, shortest=16, grow=500, rows=512)
RECALL_MODEL = MemformerConfig(
    vocab_size=0,
    dim=32,
    encoder_layers=1,
    decoder_layers=1,
    num_heads=4,
    mlp=64,
    segment=128,
    memory=SlotsConfig(slots=8),
    decoder_reads=True,  # the query is in the segment that is decoded, so earlier segments do not contain it
)
_RECALL_TRAIN = TrainConfig(steps=540, batch_size=128, eval_every=1000, checkpoint_every=100, log_every=20)


@recipe
def recall_memformer() -> Recipe:
    """Recall a fact after 4,096 tokens (32 segments): Memformer, with exact gradients by memory replay."""
    train = replace(_RECALL_TRAIN, rollout=RolloutConfig(segment_length=RECALL_MODEL.segment))
    return Recipe(RECALL_MODEL, RECALL, cosine(3e-3, warmup=50, floor=0.05), train)
