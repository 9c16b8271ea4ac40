"""scikit-learn's digits as images: a minute or two on one core."""

from mnemos.lab.run.recipe import Recipe, recipe
from mnemos.lab.tasks.images import DigitsConfig
from mnemos.lab.vision.classifiers import ImageConfig

from .memory_variants import attention_cached, cached, unwritten, wider
from .small_images import PVT, SWIN, VIT, WIDER, small


def _digits(model: ImageConfig, steps: int) -> Recipe:
    return small(DigitsConfig(layout="image"), model, steps, batch=32)


@recipe
def digits_vit() -> Recipe:
    """A ViT on scikit-learn's digits as images."""
    return _digits(VIT(patch=2), steps=1500)


@recipe
def digits_vit_cached() -> Recipe:
    """digits-vit with a gated cache beside every attention."""
    return cached(digits_vit())


@recipe
def digits_vit_cached_unwritten() -> Recipe:
    """digits-vit-cached with a cache that is never written: what the branch adds without a memory."""
    return unwritten(digits_vit_cached())


@recipe
def digits_vit_attention_cache() -> Recipe:
    """digits-vit with keys and values of the batch before (Table 2)."""
    return attention_cached(digits_vit())


@recipe
def digits_vit_wider() -> Recipe:
    """digits-vit with wider MLPs: the parameters of digits-vit-cached, no memory."""
    return wider(digits_vit(), mlp_ratio=WIDER)


@recipe
def digits_pvt() -> Recipe:
    """A PVT on scikit-learn's digits as images."""
    return _digits(PVT(), steps=1000)


@recipe
def digits_pvt_cached() -> Recipe:
    """digits-pvt with a gated cache beside every attention."""
    return cached(digits_pvt())


@recipe
def digits_pvt_cached_unwritten() -> Recipe:
    """digits-pvt-cached with a cache that is never written: what the branch adds without a memory."""
    return unwritten(digits_pvt_cached())


@recipe
def digits_pvt_attention_cache() -> Recipe:
    """digits-pvt with keys and values of the batch before (Table 2)."""
    return attention_cached(digits_pvt())


@recipe
def digits_pvt_wider() -> Recipe:
    """digits-pvt with wider MLPs: the parameters of digits-pvt-cached, no memory."""
    return wider(digits_pvt(), mlp_ratios=(8, 2))


@recipe
def digits_swin() -> Recipe:
    """A Swin on scikit-learn's digits as images."""
    return _digits(SWIN(patch=1, window=4), steps=1500)


@recipe
def digits_swin_cached() -> Recipe:
    """digits-swin with a gated cache beside every attention."""
    return cached(digits_swin())


@recipe
def digits_swin_cached_unwritten() -> Recipe:
    """digits-swin-cached with a cache that is never written: what the branch adds without a memory."""
    return unwritten(digits_swin_cached())


@recipe
def digits_swin_wider() -> Recipe:
    """digits-swin with wider MLPs: the parameters of digits-swin-cached, no memory."""
    return wider(digits_swin(), mlp_ratio=WIDER)
