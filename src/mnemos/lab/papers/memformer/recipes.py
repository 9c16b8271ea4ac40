"""Recipes of Memformer's Tables 1 and 2: at the paper's settings and at sizes for one core.

The paper names no schedule after the warm-up: these have half a cosine. At the paper's size text is read in words, with
a tied adaptive softmax, which the paper does not mention. The small recipes and `wikitext-bytes-…` read bytes: their
perplexities cannot be compared with those of Table 2.
"""

from dataclasses import replace

from mnemos.lab.recipes.in_words import in_words
from mnemos.lab.run.recipe import OptimConfig, Recipe, ScheduleConfig, TrainConfig, recipe
from mnemos.lab.tasks.images import DigitsConfig, MNISTConfig
from mnemos.lab.tasks.pixels import PixelsConfig
from mnemos.lab.tasks.text import TextConfig

from .table_models import (
    COMPRESSIVE,
    PICTURES,
    SMALL,
    SMALL_LANGUAGE,
    ImageSizes,
    LanguageSizes,
    language_variant,
    picture_variant,
)

_OPTIM = OptimConfig(lr=1e-3, weight_decay=0.01, grad_clip=1.0, schedule=ScheduleConfig("cosine", warmup=1000))
_PAPER = TrainConfig(steps=10_000, batch_size=256, eval_every=1000, checkpoint_every=500)
_MNIST = PixelsConfig(MNISTConfig(layout="image"), start=True)
_DIGITS = PixelsConfig(DigitsConfig(layout="image"), start=True)
_SMALL_OPTIM = OptimConfig(
    lr=3e-3, weight_decay=0.01, grad_clip=1.0, schedule=ScheduleConfig("cosine", warmup=50, floor=0.05)
)
_SMALL = TrainConfig(steps=600, batch_size=32, eval_every=600, checkpoint_every=300, log_every=50)


def picture_recipe(task: str, row: str) -> Recipe:
    """A row of Table 1 at a small size: task "digits" or "mnist"."""
    model, rollout = picture_variant(row, SMALL[task])
    ending = "" if task == "digits" else "-small"
    return Recipe(
        name=f"{task}-{PICTURES[row]}{ending}",
        about=f"{task} byte by byte, {row} at a size for one core (Memformer, Table 1)",
        model=model,
        data=_DIGITS if task == "digits" else _MNIST,
        optim=_SMALL_OPTIM,
        train=replace(_SMALL, rollout=rollout),
    )


def language_recipe(row: str, path: str | None = None) -> Recipe:
    """A row of Table 2 at a small size; path: a file or folder of text, None for the standard library's source."""
    model, rollout = language_variant(row, SMALL_LANGUAGE)
    slug = row.lower().replace("w/o ", "no-").replace("transformer-xl base ", "xl ").replace(" ", "-")
    return Recipe(
        name=f"text-{slug.replace('=', '-')}",
        about=f"bytes of any text, {row} at a size for one core (Memformer, Table 2)",
        model=model,
        data=TextConfig(path, segment=SMALL_LANGUAGE.segment, held_out=0.01),
        optim=_SMALL_OPTIM,
        train=replace(_SMALL, batch_size=16, rollout=rollout),
    )


def _wikitext(row: str) -> Recipe:
    """A row of Table 2 at the paper's size, over bytes."""
    model, rollout = language_variant(row, LanguageSizes())
    optim = replace(_OPTIM, schedule=replace(_OPTIM.schedule, warmup=10_000))
    train = replace(_PAPER, steps=150_000, batch_size=128, eval_every=5000, rollout=rollout)
    return Recipe(model, TextConfig(segment=128), optim, train)


def _mnist(row: str) -> Recipe:
    """A row of Table 1 at the paper's size."""
    model, rollout = picture_variant(row, ImageSizes())
    return Recipe(model, _MNIST, _OPTIM, replace(_PAPER, rollout=rollout))


@recipe
def wikitext_memformer() -> Recipe:
    """Words of WikiText-103, Memformer 4+16 at the paper's size (Memformer, Table 2)."""
    return in_words(_wikitext("Memformer 4+16"))


@recipe
def wikitext_xl() -> Recipe:
    """Words of WikiText-103, Transformer-XL base memory=1024 at the paper's size (Memformer, Table 2)."""
    return in_words(_wikitext("Transformer-XL base memory=1024"))


@recipe
def wikitext_compressive() -> Recipe:
    """Words of WikiText-103, Compressive Transformer at the paper's size (Memformer, Table 2)."""
    return in_words(_wikitext(COMPRESSIVE))


@recipe
def wikitext_bytes_memformer() -> Recipe:
    """wikitext-memformer over the bytes of --data.path FOLDER."""
    return _wikitext("Memformer 4+16")


@recipe
def wikitext_bytes_xl() -> Recipe:
    """wikitext-xl over the bytes of --data.path FOLDER."""
    return _wikitext("Transformer-XL base memory=1024")


@recipe
def wikitext_bytes_compressive() -> Recipe:
    """wikitext-compressive over the bytes of --data.path FOLDER."""
    return _wikitext(COMPRESSIVE)


@recipe
def digits_memformer() -> Recipe:
    """scikit-learn's digits byte by byte, Memformer 4+8 at a size for one core (Memformer, Table 1)."""
    return picture_recipe("digits", "Memformer 4+8")


@recipe
def mnist_memformer_small() -> Recipe:
    """MNIST byte by byte, Memformer 4+8 at a size for one core (Memformer, Table 1)."""
    return picture_recipe("mnist", "Memformer 4+8")


@recipe
def mnist_lstm() -> Recipe:
    """MNIST byte by byte, LSTM at the paper's size (Memformer, Table 1)."""
    return _mnist("LSTM")


@recipe
def mnist_transformer() -> Recipe:
    """MNIST byte by byte, Transformer decoder at the paper's size (Memformer, Table 1)."""
    return _mnist("Transformer decoder")


@recipe
def mnist_xl_56() -> Recipe:
    """MNIST byte by byte, Transformer-XL memory=56 at the paper's size (Memformer, Table 1)."""
    return _mnist("Transformer-XL memory=56")


@recipe
def mnist_xl_224() -> Recipe:
    """MNIST byte by byte, Transformer-XL memory=224 at the paper's size (Memformer, Table 1)."""
    return _mnist("Transformer-XL memory=224")


@recipe
def mnist_xl_784() -> Recipe:
    """MNIST byte by byte, Transformer-XL memory=784 at the paper's size (Memformer, Table 1)."""
    return _mnist("Transformer-XL memory=784")


@recipe
def mnist_memformer() -> Recipe:
    """MNIST byte by byte, Memformer 4+8 at the paper's size (Memformer, Table 1)."""
    return _mnist("Memformer 4+8")


@recipe
def mnist_memformer_8_slots() -> Recipe:
    """MNIST byte by byte, Memformer 4+8 memory=8 at the paper's size (Memformer, Table 1)."""
    return _mnist("Memformer 4+8 memory=8")


@recipe("mnist-memformer-2+6")
def mnist_memformer_2_6() -> Recipe:
    """MNIST byte by byte, Memformer 2+6 memory=64 at the paper's size (Memformer, Table 1)."""
    return _mnist("Memformer 2+6 memory=64")


@recipe("mnist-memformer-2+6-32-slots")
def mnist_memformer_2_6_32_slots() -> Recipe:
    """MNIST byte by byte, Memformer 2+6 memory=32 at the paper's size (Memformer, Table 1)."""
    return _mnist("Memformer 2+6 memory=32")


@recipe("mnist-memformer-2+6-16-slots")
def mnist_memformer_2_6_16_slots() -> Recipe:
    """MNIST byte by byte, Memformer 2+6 memory=16 at the paper's size (Memformer, Table 1)."""
    return _mnist("Memformer 2+6 memory=16")


@recipe("mnist-memformer-2+6-1-slot")
def mnist_memformer_2_6_1_slot() -> Recipe:
    """MNIST byte by byte, Memformer 2+6 memory=1 at the paper's size (Memformer, Table 1)."""
    return _mnist("Memformer 2+6 memory=1")


@recipe("mnist-memformer-4+4")
def mnist_memformer_4_4() -> Recipe:
    """MNIST byte by byte, Memformer 4+4 at the paper's size (Memformer, Table 1)."""
    return _mnist("Memformer 4+4")


@recipe
def mnist_memformer_no_memory() -> Recipe:
    """MNIST byte by byte, w/o memory at the paper's size (Memformer, Table 1)."""
    return _mnist("w/o memory")


@recipe
def mnist_memformer_temperature_1() -> Recipe:
    """MNIST byte by byte, temperature=1.0 at the paper's size (Memformer, Table 1)."""
    return _mnist("temperature=1.0")


@recipe
def mnist_memformer_no_forgetting() -> Recipe:
    """MNIST byte by byte, w/o forgetting at the paper's size (Memformer, Table 1)."""
    return _mnist("w/o forgetting")


@recipe
def mnist_memformer_one_head() -> Recipe:
    """MNIST byte by byte, w/o multi-head at the paper's size (Memformer, Table 1)."""
    return _mnist("w/o multi-head")
