"""Photos of any kind in class folders, at 64 × 64."""

from mnemos.lab.run.recipe import Recipe, recipe
from mnemos.lab.tasks.photos import PhotosConfig

from .memory_variants import attention_cached, cached, unwritten, wider
from .small_images import VIT, WIDER, small


@recipe
def photos_vit() -> Recipe:
    """A ViT on photos in class folders, at 64 x 64 (--data.folder PHOTOS)."""
    return small(PhotosConfig(size=64), VIT(patch=8, drop_path=0.1), steps=800, batch=32, lr=1e-3)


@recipe
def photos_vit_cached() -> Recipe:
    """photos-vit with a gated cache beside every attention."""
    return cached(photos_vit())


@recipe
def photos_vit_cached_unwritten() -> Recipe:
    """photos-vit-cached with a cache that is never written: what the branch adds without a memory."""
    return unwritten(photos_vit_cached())


@recipe
def photos_vit_attention_cache() -> Recipe:
    """photos-vit with keys and values of the batch before (Table 2)."""
    return attention_cached(photos_vit())


@recipe
def photos_vit_wider() -> Recipe:
    """photos-vit with wider MLPs: the parameters of photos-vit-cached, no memory."""
    return wider(photos_vit(), mlp_ratio=WIDER)
