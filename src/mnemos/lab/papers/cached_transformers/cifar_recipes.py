"""CIFAR-10: minutes on one core."""

from mnemos.lab.run.recipe import Recipe, recipe
from mnemos.lab.tasks.augment import AugmentConfig
from mnemos.lab.tasks.cifar import CIFARConfig

from .memory_variants import attention_cached, cached, unwritten, wider
from .small_images import PVT, SWIN, VIT, WIDER, small

# No augmentation: in two epochs the black margins of policy "light" cost 4 of 39 points of accuracy.
_CIFAR = CIFARConfig(augment=AugmentConfig(policy="none"))
_PVT = PVT(
    patch=4,
    dims=(32, 64, 128),
    depths=(1, 2, 1),
    num_heads=(1, 2, 4),
    mlp_ratios=(4, 4, 2),
    reductions=(2, 2, 1),
)


@recipe
def cifar_vit() -> Recipe:
    """A ViT on CIFAR-10 (--data.folder FOLDER)."""
    return small(_CIFAR, VIT(depth=3, patch=4), steps=1200)


@recipe
def cifar_vit_cached() -> Recipe:
    """cifar-vit with a gated cache beside every attention."""
    return cached(cifar_vit())


@recipe
def cifar_vit_cached_unwritten() -> Recipe:
    """cifar-vit-cached with a cache that is never written: what the branch adds without a memory."""
    return unwritten(cifar_vit_cached())


@recipe
def cifar_vit_attention_cache() -> Recipe:
    """cifar-vit with keys and values of the batch before (Table 2)."""
    return attention_cached(cifar_vit())


@recipe
def cifar_vit_wider() -> Recipe:
    """cifar-vit with wider MLPs: the parameters of cifar-vit-cached, no memory."""
    return wider(cifar_vit(), mlp_ratio=WIDER)


@recipe
def cifar_pvt() -> Recipe:
    """A PVT on CIFAR-10 (--data.folder FOLDER)."""
    return small(_CIFAR, _PVT, steps=2500, batch=32)


@recipe
def cifar_pvt_cached() -> Recipe:
    """cifar-pvt with a gated cache beside every attention."""
    return cached(cifar_pvt())


@recipe
def cifar_pvt_cached_unwritten() -> Recipe:
    """cifar-pvt-cached with a cache that is never written: what the branch adds without a memory."""
    return unwritten(cifar_pvt_cached())


@recipe
def cifar_pvt_attention_cache() -> Recipe:
    """cifar-pvt with keys and values of the batch before (Table 2)."""
    return attention_cached(cifar_pvt())


@recipe
def cifar_pvt_wider() -> Recipe:
    """cifar-pvt with wider MLPs: the parameters of cifar-pvt-cached, no memory."""
    return wider(cifar_pvt(), mlp_ratios=(5, 6, 3))


@recipe
def cifar_swin() -> Recipe:
    """A Swin on CIFAR-10 (--data.folder FOLDER)."""
    return small(_CIFAR, SWIN(patch=4, window=4, dim=48), steps=2000, batch=32)


@recipe
def cifar_swin_cached() -> Recipe:
    """cifar-swin with a gated cache beside every attention."""
    return cached(cifar_swin())


@recipe
def cifar_swin_cached_unwritten() -> Recipe:
    """cifar-swin-cached with a cache that is never written: what the branch adds without a memory."""
    return unwritten(cifar_swin_cached())


@recipe
def cifar_swin_wider() -> Recipe:
    """cifar-swin with wider MLPs: the parameters of cifar-swin-cached, no memory."""
    return wider(cifar_swin(), mlp_ratio=WIDER)
