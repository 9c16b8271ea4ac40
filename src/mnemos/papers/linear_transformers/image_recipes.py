"""Recipes of §4.2: images byte by byte, at the paper's settings and at a size that trains on two cores."""

from dataclasses import replace
from typing import cast

from mnemos.attention.linear import LinearConfig
from mnemos.attention.softmax import SoftmaxConfig
from mnemos.config import AttentionConfig
from mnemos.data.cifar import CIFARConfig
from mnemos.data.images import DigitsConfig, MNISTConfig
from mnemos.data.photos import PhotosConfig
from mnemos.data.pixels import PixelsConfig
from mnemos.models.transformer import HeadConfig, TransformerConfig
from mnemos.train.recipe import OptimConfig, Recipe, ScheduleConfig, TrainConfig

MNIST = PixelsConfig(MNISTConfig(layout="image"))
CIFAR = PixelsConfig(CIFARConfig())
# The paper's: 8 heads of 32, positions learned, ten logistics. MNIST has 8 layers, CIFAR-10 16.
PAPER = TransformerConfig(
    vocab_size=256,
    dim=256,
    layers=8,
    num_heads=8,
    mlp=1024,
    max_length=783,
    position="learned",
    attention=LinearConfig(),
    head=HeadConfig(mixture=10),
)
# One of 256 classes, as a mixture needs several times the updates to be as good; and narrow, for many updates are what
# finds out that the byte above matters too.
SMALL = replace(PAPER, dim=64, layers=2, num_heads=4, mlp=256, head=HeadConfig())
_PAPER_OPTIM = OptimConfig(name="radam", lr=1e-4, weight_decay=0.0)
_SMALL_OPTIM = OptimConfig(name="radam", lr=2e-3, weight_decay=0.0, schedule=ScheduleConfig(name="cosine", floor=0.05))
_LONG = TrainConfig(steps=1_500_000, batch_size=10, eval_every=6000, checkpoint_every=6000, log_every=500)
_SHORT = TrainConfig(steps=3600, batch_size=8, eval_every=900, checkpoint_every=300, log_every=50)


def mnist_pixels() -> Recipe:
    """Figure 3 and Table 1 at the paper's size, linear."""
    about = "MNIST byte by byte with linear attention, at the paper's size (Linear transformers, Table 1)"
    return Recipe("mnist-pixels", about, PAPER, MNIST, _PAPER_OPTIM, _LONG)


def mnist_pixels_softmax() -> Recipe:
    """The same with softmax."""
    return _with(mnist_pixels(), SoftmaxConfig(), "softmax")


def cifar_pixels() -> Recipe:
    """Table 2: CIFAR-10 at the paper's size, linear."""
    about = "CIFAR-10 byte by byte with linear attention, at the paper's size (Linear transformers, Table 2)"
    model = replace(PAPER, layers=16, max_length=3071)
    return Recipe("cifar-pixels", about, model, CIFAR, _PAPER_OPTIM, replace(_LONG, batch_size=4))


def cifar_pixels_softmax() -> Recipe:
    """The same with softmax."""
    return _with(cifar_pixels(), SoftmaxConfig(), "softmax")


def mnist_pixels_small() -> Recipe:
    """MNIST at a size that trains here."""
    about = "MNIST byte by byte with linear attention: 2 layers of width 64, eight minutes on a core"
    return Recipe("mnist-pixels-small", about, SMALL, MNIST, _SMALL_OPTIM, _SHORT)


def mnist_pixels_small_softmax() -> Recipe:
    """The same with softmax."""
    return _with(mnist_pixels_small(), SoftmaxConfig(), "softmax")


def mnist_pixels_small_mixture() -> Recipe:
    """The same with the paper's mixture of logistics instead of a choice among 256 values."""
    base = mnist_pixels_small()
    about = "the same, each byte from the paper's mixture of ten logistics instead of one of 256 classes"
    return replace(base, name=f"{base.name}-mixture", about=about, model=replace(SMALL, head=PAPER.head))


def cifar_pixels_small() -> Recipe:
    """CIFAR-10 at 16 × 16, at a size that trains here."""
    return Recipe(
        "cifar-pixels-small",
        "CIFAR-10 at 16 x 16, byte by byte with linear attention: 2 layers of width 64",
        replace(SMALL, max_length=767),
        PixelsConfig(CIFARConfig(size=16)),
        _SMALL_OPTIM,
        _SHORT,
    )


def digits_pixels() -> Recipe:
    """scikit-learn's digits: minutes."""
    return Recipe(
        "digits-pixels",
        "scikit-learn's 8 x 8 digits byte by byte with linear attention: a minute or two",
        replace(SMALL, max_length=63),
        PixelsConfig(DigitsConfig(layout="image")),
        _SMALL_OPTIM,
        replace(_SHORT, steps=1500, batch_size=32, eval_every=500),
    )


def photos_pixels() -> Recipe:
    """Photos of any folder, at 16 × 16."""
    return Recipe(
        "photos-pixels",
        "photos of any folder (--data.images.folder) at 16 x 16, byte by byte with linear attention",
        replace(SMALL, max_length=767),
        PixelsConfig(PhotosConfig(size=16)),
        _SMALL_OPTIM,
        _SHORT,
    )


def _with(recipe: Recipe, attention: AttentionConfig, name: str) -> Recipe:
    about = recipe.about.replace("linear attention", f"{name} attention")
    model = replace(cast(TransformerConfig, recipe.model), attention=attention)
    return replace(recipe, name=f"{recipe.name}-{name}", about=about, model=model)
