"""MNIST as images: minutes on one core."""

from mnemos.lab.run.recipe import Recipe, recipe
from mnemos.lab.tasks.images import MNISTConfig

from .memory_variants import attention_cached, cached, unwritten, wider
from .small_images import PVT, SWIN, VIT, WIDER, small

_MNIST = MNISTConfig(layout="image")


@recipe
def mnist_vit() -> Recipe:
    """A ViT on MNIST as images (--data.path FOLDER)."""
    return small(_MNIST, VIT(patch=7), steps=3000, lr=3e-3)


@recipe
def mnist_vit_cached() -> Recipe:
    """mnist-vit with a gated cache beside every attention."""
    return cached(mnist_vit())


@recipe
def mnist_vit_cached_unwritten() -> Recipe:
    """mnist-vit-cached with a cache that is never written: what the branch adds without a memory."""
    return unwritten(mnist_vit_cached())


@recipe
def mnist_vit_attention_cache() -> Recipe:
    """mnist-vit with keys and values of the batch before (Table 2)."""
    return attention_cached(mnist_vit())


@recipe
def mnist_vit_wider() -> Recipe:
    """mnist-vit with wider MLPs: the parameters of mnist-vit-cached, no memory."""
    return wider(mnist_vit(), mlp_ratio=WIDER)


@recipe
def mnist_pvt() -> Recipe:
    """A PVT on MNIST as images (--data.path FOLDER)."""
    return small(_MNIST, PVT(depths=(1, 2)), steps=1200)


@recipe
def mnist_pvt_cached() -> Recipe:
    """mnist-pvt with a gated cache beside every attention."""
    return cached(mnist_pvt())


@recipe
def mnist_pvt_cached_unwritten() -> Recipe:
    """mnist-pvt-cached with a cache that is never written: what the branch adds without a memory."""
    return unwritten(mnist_pvt_cached())


@recipe
def mnist_pvt_attention_cache() -> Recipe:
    """mnist-pvt with keys and values of the batch before (Table 2)."""
    return attention_cached(mnist_pvt())


@recipe
def mnist_pvt_wider() -> Recipe:
    """mnist-pvt with wider MLPs: the parameters of mnist-pvt-cached, no memory."""
    return wider(mnist_pvt(), mlp_ratios=(5, 3))


@recipe
def mnist_swin() -> Recipe:
    """A Swin on MNIST as images (--data.path FOLDER)."""
    return small(_MNIST, SWIN(patch=2, window=7), steps=1200)


@recipe
def mnist_swin_cached() -> Recipe:
    """mnist-swin with a gated cache beside every attention."""
    return cached(mnist_swin())


@recipe
def mnist_swin_cached_unwritten() -> Recipe:
    """mnist-swin-cached with a cache that is never written: what the branch adds without a memory."""
    return unwritten(mnist_swin_cached())


@recipe
def mnist_swin_wider() -> Recipe:
    """mnist-swin with wider MLPs: the parameters of mnist-swin-cached, no memory."""
    return wider(mnist_swin(), mlp_ratio=WIDER)
