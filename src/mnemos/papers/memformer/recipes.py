"""Recipes of Memformer's Tables 1 and 2: the paper's models and their rivals, at its settings and at sizes for a core.

An arm is a row of a table, under the paper's name for it; `mnemos.registry` has the recipes' names. The paper names no
schedule after the warm-up: these go down half a cosine. Text is read as bytes here, as words in the paper, so that
its perplexities are not to be set beside those of Table 2.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from mnemos.attention.relative import RelativeConfig
from mnemos.config import DataConfig, ModelConfig
from mnemos.data.images import DigitsConfig, MNISTConfig
from mnemos.data.pixels import PixelsConfig
from mnemos.data.text import TextConfig
from mnemos.memory.slots import SlotsConfig
from mnemos.models.lstm import LSTMConfig
from mnemos.models.memformer import MemformerConfig
from mnemos.models.transformer import TransformerConfig
from mnemos.train.recipe import OptimConfig, Recipe, RolloutConfig, ScheduleConfig, TrainConfig

HORIZON = 8  # segments that gradient flows through
Arm = tuple[ModelConfig, RolloutConfig]


class ImageSizes(NamedTuple):
    """The size of Table 1's models: the paper's by default. A segment is a row of a picture."""

    dim: int = 128
    shallower: int = 1  # the paper's layers are divided by it
    fewer: int = 1  # its slots are
    side: int = 28
    dropout: float = 0.1

    @property
    def length(self) -> int:
        """Bytes of a picture."""
        return self.side**2


class LanguageSizes(NamedTuple):
    """The size of Table 2's models: the paper's by default."""

    dim: int = 512
    num_heads: int = 8
    shallower: int = 1  # the paper's layers are divided by it
    shorter: int = 1  # its segments, memories and slots are
    dropout: float = 0.1

    @property
    def segment(self) -> int:
        """Tokens of a segment."""
        return 128 // self.shorter


# The names of Table 1's rows, and those of their recipes; Table 4 says 8 slots, where the text says 64: there are both.
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
# The names of Table 2's rows: layers of encoder and decoder, and slots.
_MEMFORMERS = {
    "Memformer 4+16": (4, 16, 1024),
    "Memformer 4+12": (4, 12, 1024),
    "Memformer memory=512": (4, 16, 512),
    "Memformer w/o memory": (4, 16, 0),
}
LANGUAGE = (*_XL, *_MEMFORMERS)

_OPTIM = OptimConfig(lr=1e-3, weight_decay=0.01, grad_clip=1.0, schedule=ScheduleConfig("cosine", warmup=1000))
_PAPER = TrainConfig(steps=10_000, batch_size=256, eval_every=1000, checkpoint_every=500)
_MNIST = PixelsConfig(MNISTConfig(layout="image"), start=True)
_DIGITS = PixelsConfig(DigitsConfig(layout="image"), start=True)
_SMALL_OPTIM = OptimConfig(
    lr=3e-3, weight_decay=0.01, grad_clip=1.0, schedule=ScheduleConfig("cosine", warmup=50, floor=0.05)
)
_SMALL = TrainConfig(steps=600, batch_size=32, eval_every=600, checkpoint_every=300, log_every=50)
# Sizes that train on a core: half the layers, and on 8 x 8 pixels a quarter of the slots.
SMALL = {
    "digits": ImageSizes(dim=32, shallower=2, fewer=4, side=8, dropout=0.0),
    "mnist": ImageSizes(dim=32, shallower=2, dropout=0.0),
}
SMALL_LANGUAGE = LanguageSizes(dim=64, num_heads=4, shallower=4, shorter=4, dropout=0.0)


def picture_arm(name: str, size: ImageSizes) -> Arm:
    """The model of a row of Table 1, and how its updates read a picture.

    What carries no gradient from segment to segment has a horizon of 1; where a picture is no longer than a horizon,
    Memformer reads it at once: the gradient is the same.
    """
    if name == "LSTM":
        return LSTMConfig(dim=4 * size.dim, layers=4, dropout=size.dropout), RolloutConfig()
    plain = TransformerConfig(
        dim=size.dim,
        layers=8 // size.shallower,
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
    slots = 0 if name == "w/o memory" else max(1, (_number(name) if "memory=" in name else 64) // size.fewer)
    memory = SlotsConfig(
        slots=slots,
        temperature=1.0 if "temperature" in name else 0.25,
        forgetting=name != "w/o forgetting",
        num_heads=1 if name == "w/o multi-head" else 0,
    )
    memformer = MemformerConfig(
        dim=size.dim,
        encoder_layers=encoder // size.shallower,
        decoder_layers=decoder // size.shallower,
        num_heads=4,
        mlp=2 * size.dim,
        segment=size.side,
        memory=memory,
        dropout=size.dropout,
    )
    whole = size.side <= HORIZON
    return memformer, RolloutConfig() if whole else RolloutConfig(segment_length=size.side, horizon=HORIZON)


def language_arm(name: str, size: LanguageSizes) -> Arm:
    """The model of a row of Table 2, and how its updates read: `HORIZON` segments, with gradient through all of them.

    Transformer-XL's memory carries no gradient; it reads as many.
    """
    if name in _XL:
        model = TransformerConfig(
            dim=size.dim,
            num_heads=size.num_heads,
            mlp=4 * size.dim,
            layers=16 // size.shallower,
            max_length=size.segment,
            position="none",
            dropout=size.dropout,
            attention=RelativeConfig(memory=_XL[name] // size.shorter),
        )
        return model, RolloutConfig(segments=HORIZON, horizon=1)
    encoder, decoder, slots = _MEMFORMERS[name]
    memformer = MemformerConfig(
        dim=size.dim,
        num_heads=size.num_heads,
        mlp=4 * size.dim,
        encoder_layers=encoder // size.shallower,
        decoder_layers=decoder // size.shallower,
        segment=size.segment,
        memory=SlotsConfig(slots=slots // size.shorter, temperature=0.125),
        dropout=size.dropout,
    )
    return memformer, RolloutConfig(segments=HORIZON)


def picture_recipe(task: str, name: str) -> Recipe:
    """A row of Table 1 at a small size: task "digits" or "mnist"."""
    data = _DIGITS if task == "digits" else _MNIST
    arm = picture_arm(name, SMALL[task])
    ending = "" if task == "digits" else "-small"
    about = f"{task} byte by byte, {name} at a size for one core (Memformer, Table 1)"
    return _recipe(f"{task}-{PICTURES[name]}{ending}", about, arm, data, _SMALL_OPTIM, _SMALL)


def language_recipe(name: str, path: str | None = None) -> Recipe:
    """A row of Table 2 at a small size; path: a file or folder of text, None for the standard library's source."""
    data = TextConfig(path, segment=SMALL_LANGUAGE.segment, held_out=0.01)
    train = replace(_SMALL, batch_size=16)
    slug = name.lower().replace("w/o ", "no-").replace("transformer-xl base ", "xl ").replace(" ", "-")
    about = f"bytes of any text, {name} at a size for one core (Memformer, Table 2)"
    arm = language_arm(name, SMALL_LANGUAGE)
    return _recipe(f"text-{slug.replace('=', '-')}", about, arm, data, _SMALL_OPTIM, train)


def wikitext_memformer() -> Recipe:
    """Table 2 at the paper's settings."""
    return _wikitext("memformer", "Memformer 4+16")


def wikitext_xl() -> Recipe:
    """Its rival of Table 2 at the paper's settings, with a memory of 1,024."""
    return _wikitext("xl", "Transformer-XL base memory=1024")


def _wikitext(ending: str, name: str) -> Recipe:
    about = f"text of --data.path FOLDER, as bytes, {name} at the paper's size (Memformer, Table 2)"
    optim = replace(_OPTIM, schedule=replace(_OPTIM.schedule, warmup=10_000))
    train = replace(_PAPER, steps=150_000, batch_size=128, eval_every=5000)
    return _recipe(
        f"wikitext-{ending}", about, language_arm(name, LanguageSizes()), TextConfig(segment=128), optim, train
    )


def _mnist(name: str) -> Recipe:
    about = f"MNIST byte by byte, {name} at the paper's size (Memformer, Table 1)"
    return _recipe(f"mnist-{PICTURES[name]}", about, picture_arm(name, ImageSizes()), _MNIST, _OPTIM, _PAPER)


def _recipe(name: str, about: str, arm: Arm, data: DataConfig, optim: OptimConfig, train: TrainConfig) -> Recipe:
    model, rollout = arm
    return Recipe(name, about, model, data, optim, replace(train, rollout=rollout))


def _number(name: str) -> int:
    """What stands behind the row's "="."""
    return int(name.rpartition("=")[2])


_MADE: dict[str, Callable[[], Recipe]] = {f"mnist-{ending}": partial(_mnist, name) for name, ending in PICTURES.items()}
_MADE["digits-memformer"] = partial(picture_recipe, "digits", "Memformer 4+8")
_MADE["mnist-memformer-small"] = partial(picture_recipe, "mnist", "Memformer 4+8")


def __getattr__(name: str) -> Callable[[], Recipe]:
    """The function of each recipe of pictures, under its recipe's name."""
    if name not in _MADE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _MADE[name]
