"""Recipes of §4.2: images byte by byte, at the paper's settings and at a size that trains on two cores."""

from dataclasses import replace
from typing import cast

from mnemos.attention.linear import LinearConfig
from mnemos.attention.softmax import SoftmaxConfig
from mnemos.lab.run.recipe import OptimConfig, Recipe, ScheduleConfig, TrainConfig, recipe
from mnemos.lab.tasks.cifar import CIFARConfig
from mnemos.lab.tasks.images import DigitsConfig, MNISTConfig
from mnemos.lab.tasks.photos import PhotosConfig
from mnemos.lab.tasks.pixels import PixelsConfig
from mnemos.models.transformer import HeadConfig, TransformerConfig

MNIST = PixelsConfig(MNISTConfig(layout="image"))
CIFAR = PixelsConfig(CIFARConfig())
# The paper's for MNIST: 8 heads of 32, learned positions, ten logistics. CIFAR-10 has 16 layers.
PAPER = TransformerConfig.classic(
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
_PAPER = replace(PAPER, vocab_size=0, max_length=0)  # from the data
# One of 256 classes: a mixture needs several times the updates for the same loss. And narrow, because it takes many
# updates to learn that the byte above matters too.
SMALL = replace(_PAPER, dim=64, layers=2, num_heads=4, mlp=256, head=HeadConfig())
_PAPER_OPTIM = OptimConfig(name="radam", lr=1e-4, weight_decay=0.0, grad_clip=0.0)
_SMALL_OPTIM = OptimConfig(name="radam", lr=2e-3, weight_decay=0.0, schedule=ScheduleConfig(name="cosine", floor=0.05))
_EPOCH = (60_000 - 5_000) // 10  # MNIST without the validation split, in batches of the paper's size
_LONG = TrainConfig(steps=250 * _EPOCH, batch_size=10, eval_every=_EPOCH, checkpoint_every=_EPOCH, log_every=500)
_SHORT = TrainConfig(steps=3600, batch_size=8, eval_every=900, checkpoint_every=300, log_every=50)


@recipe
def mnist_pixels() -> Recipe:
    """MNIST byte by byte with linear attention, the paper's size and 250 epochs (Linear transformers, Table 1)."""
    return Recipe(_PAPER, MNIST, _PAPER_OPTIM, _LONG)


@recipe
def mnist_pixels_softmax() -> Recipe:
    """MNIST byte by byte with softmax attention, the paper's size and 250 epochs (Linear transformers, Table 1)."""
    return _softmax(mnist_pixels())


@recipe
def cifar_pixels() -> Recipe:
    """CIFAR-10 byte by byte with linear attention, at the paper's size (Linear transformers, Table 2)."""
    # The paper gives every model the same time and no number of steps; 1.5 million is ours.
    train = replace(_LONG, steps=1_500_000, batch_size=4, eval_every=6000, checkpoint_every=6000)
    return Recipe(replace(_PAPER, layers=16), CIFAR, _PAPER_OPTIM, train)


@recipe
def cifar_pixels_softmax() -> Recipe:
    """CIFAR-10 byte by byte with softmax attention, at the paper's size (Linear transformers, Table 2)."""
    return _softmax(cifar_pixels())


@recipe
def mnist_pixels_small() -> Recipe:
    """MNIST byte by byte with linear attention: 2 layers of width 64, eight minutes on one core."""
    return Recipe(SMALL, MNIST, _SMALL_OPTIM, _SHORT)


@recipe
def mnist_pixels_small_softmax() -> Recipe:
    """MNIST byte by byte with softmax attention: 2 layers of width 64."""
    return _softmax(mnist_pixels_small())


@recipe
def mnist_pixels_small_mixture() -> Recipe:
    """mnist-pixels-small with the paper's mixture of ten logistics for each byte instead of 256 classes."""
    return replace(mnist_pixels_small(), model=replace(SMALL, head=PAPER.head))


@recipe
def cifar_pixels_small() -> Recipe:
    """CIFAR-10 at 16 x 16, byte by byte with linear attention: 2 layers of width 64."""
    return Recipe(SMALL, PixelsConfig(CIFARConfig(size=16)), _SMALL_OPTIM, _SHORT)


@recipe
def digits_pixels() -> Recipe:
    """scikit-learn's 8 x 8 digits byte by byte with linear attention: a minute or two."""
    data = PixelsConfig(DigitsConfig(layout="image"))
    train = replace(_SHORT, steps=1500, batch_size=32, eval_every=500)
    return Recipe(SMALL, data, _SMALL_OPTIM, train)


@recipe
def photos_pixels() -> Recipe:
    """Photos of any folder (--data.images.folder) at 16 x 16, byte by byte with linear attention."""
    return Recipe(SMALL, PixelsConfig(PhotosConfig(size=16)), _SMALL_OPTIM, _SHORT)


def _softmax(base: Recipe) -> Recipe:
    """The baseline: the same recipe with softmax attention."""
    return replace(base, model=replace(cast(TransformerConfig, base.model), attention=SoftmaxConfig()))
