"""ImageNet at the settings of the paper (Tables 1, 2 and 8): days on 16 GPUs."""

from functools import partial

from mnemos.lab.run.recipe import OptimConfig, Recipe, ScheduleConfig, TrainConfig, recipe
from mnemos.lab.tasks.augment import AugmentConfig
from mnemos.lab.tasks.photos import PhotosConfig
from mnemos.lab.vision.classifiers import ImageConfig, PVTConfig, SwinConfig, ViTConfig

from .memory_variants import PAPER_CACHE, attention_cached, cached

_PVT = partial(
    PVTConfig,
    image=224,
    classes=1000,
    dims=(64, 128, 320, 512),
    num_heads=(1, 2, 5, 8),
    mlp_ratios=(8, 8, 4, 4),
    reductions=(8, 4, 2, 1),
)
_SWIN_T = partial(
    SwinConfig, image=224, patch=4, window=7, dim=96, depths=(2, 2, 6, 2), num_heads=(3, 6, 12, 24), mlp_ratio=4.0
)


def _imagenet(model: ImageConfig, clip: float = 0.0) -> Recipe:
    """ImageNet-1k: 224², AdamW, weight decay 0.05, 300 epochs, 5 of them warm-up, cosine, timm's augmentation.

    Batch 1024 at learning rate 5e-4·batch/512, warm-up from 1e-6 and cosine to 1e-5, as DeiT, whose settings the hosts
    share (the paper gives none of these). The validation set is the test split; a hundredth of the training set is held
    out. The share of dropped paths and the largest gradient norm (`clip`, 0: not clipped) are those that each host was
    released with, DeiT's for ViT-S.
    """
    optim, train = _epochs(images=1_281_167, epochs=300, batch=1024, lr=1e-3, start=1e-6, end=1e-5, clip=clip)
    return Recipe(model=model, data=_photos("imagenet", held_out=0.01), optim=optim, train=train)


def _photos(folder: str, held_out: float) -> PhotosConfig:
    augment = AugmentConfig(policy="timm", force_color_jitter=True)  # the paper lists colour jittering
    return PhotosConfig(folder=folder, held_out=held_out, workers=8, augment=augment)


def _epochs(
    images: int, epochs: int, batch: int, lr: float, start: float, end: float, clip: float
) -> tuple[OptimConfig, TrainConfig]:
    """Training in epochs, as updates: 5 of warm-up from learning rate `start`, then a cosine from `lr` to `end`."""
    epoch = images // batch
    schedule = ScheduleConfig(name="cosine", warmup=5 * epoch, start=start / lr, floor=end / lr)
    optim = OptimConfig(lr=lr, weight_decay=0.05, grad_clip=clip, schedule=schedule)
    train = TrainConfig(steps=epochs * epoch, batch_size=batch, log_every=50, eval_every=epoch, checkpoint_every=epoch)
    return optim, train


@recipe
def imagenet_vit_s() -> Recipe:
    """ViT-S/16 on ImageNet-1k, 300 epochs as in the paper: days on 16 GPUs (--data.folder IMAGENET)."""
    return _imagenet(
        ViTConfig(image=224, classes=1000, patch=16, dim=384, depth=12, num_heads=6, mlp_ratio=4.0, drop_path=0.1)
    )


@recipe
def imagenet_vit_s_cached() -> Recipe:
    """imagenet-vit-s with a gated cache beside every attention."""
    return cached(imagenet_vit_s(), PAPER_CACHE)


@recipe
def imagenet_vit_s_attention_cache() -> Recipe:
    """imagenet-vit-s with keys and values of the batch before (Table 2)."""
    return attention_cached(imagenet_vit_s())


@recipe
def imagenet_pvt_tiny() -> Recipe:
    """PVT-Tiny on ImageNet-1k, 300 epochs as in the paper: days on 16 GPUs (--data.folder IMAGENET)."""
    return _imagenet(_PVT(depths=(2, 2, 2, 2), drop_path=0.1))


@recipe
def imagenet_pvt_tiny_cached() -> Recipe:
    """imagenet-pvt-tiny with a gated cache beside every attention."""
    return cached(imagenet_pvt_tiny(), PAPER_CACHE)


@recipe
def imagenet_pvt_tiny_attention_cache() -> Recipe:
    """imagenet-pvt-tiny with keys and values of the batch before (Table 2)."""
    return attention_cached(imagenet_pvt_tiny())


@recipe
def imagenet_pvt_small() -> Recipe:
    """PVT-Small on ImageNet-1k, 300 epochs as in the paper: days on 16 GPUs (--data.folder IMAGENET)."""
    return _imagenet(_PVT(depths=(3, 4, 6, 3), drop_path=0.1))


@recipe
def imagenet_pvt_small_cached() -> Recipe:
    """imagenet-pvt-small with a gated cache beside every attention."""
    return cached(imagenet_pvt_small(), PAPER_CACHE)


@recipe
def imagenet_pvt_small_attention_cache() -> Recipe:
    """imagenet-pvt-small with keys and values of the batch before (Table 2)."""
    return attention_cached(imagenet_pvt_small())


@recipe
def imagenet_pvt_medium() -> Recipe:
    """PVT-Medium on ImageNet-1k, 300 epochs as in the paper: days on 16 GPUs (--data.folder IMAGENET)."""
    return _imagenet(_PVT(depths=(3, 4, 18, 3), drop_path=0.3), clip=1.0)


@recipe
def imagenet_pvt_medium_cached() -> Recipe:
    """imagenet-pvt-medium with a gated cache beside every attention."""
    return cached(imagenet_pvt_medium(), PAPER_CACHE)


@recipe
def imagenet_pvt_v2_b2() -> Recipe:
    """PVTv2-B2 on ImageNet-1k, 300 epochs as in the paper: days on 16 GPUs (--data.folder IMAGENET)."""
    return _imagenet(_PVT(version=2, depths=(3, 4, 6, 3), drop_path=0.1))


@recipe
def imagenet_pvt_v2_b2_cached() -> Recipe:
    """imagenet-pvt-v2-b2 with a gated cache beside every attention."""
    return cached(imagenet_pvt_v2_b2(), PAPER_CACHE)


@recipe
def imagenet_pvt_v2_b3() -> Recipe:
    """PVTv2-B3 on ImageNet-1k, 300 epochs as in the paper: days on 16 GPUs (--data.folder IMAGENET)."""
    return _imagenet(_PVT(version=2, depths=(3, 4, 18, 3), drop_path=0.3), clip=1.0)


@recipe
def imagenet_pvt_v2_b3_cached() -> Recipe:
    """imagenet-pvt-v2-b3 with a gated cache beside every attention."""
    return cached(imagenet_pvt_v2_b3(), PAPER_CACHE)


@recipe
def imagenet_pvt_v2_b4() -> Recipe:
    """PVTv2-B4 on ImageNet-1k, 300 epochs as in the paper: days on 16 GPUs (--data.folder IMAGENET)."""
    return _imagenet(_PVT(version=2, depths=(3, 8, 27, 3), drop_path=0.3), clip=1.0)


@recipe
def imagenet_pvt_v2_b4_cached() -> Recipe:
    """imagenet-pvt-v2-b4 with a gated cache beside every attention."""
    return cached(imagenet_pvt_v2_b4(), PAPER_CACHE)


@recipe
def imagenet_swin_t() -> Recipe:
    """Swin-T on ImageNet-1k, 300 epochs as in the paper: days on 16 GPUs (--data.folder IMAGENET)."""
    return _imagenet(_SWIN_T(classes=1000, drop_path=0.2), clip=5.0)


@recipe
def imagenet_swin_t_cached() -> Recipe:
    """imagenet-swin-t with a gated cache beside every attention."""
    return cached(imagenet_swin_t(), PAPER_CACHE)


@recipe
def imagenet_22k_swin_t() -> Recipe:
    """Swin-T on ImageNet-22k, 90 epochs as Swin's own (Table 8): days on 16 GPUs (--data.folder IMAGENET_22K).

    The paper follows "the Swin-Transformer implementation". From its configurations: 21,841 classes, AdamW at
    1.25e-4·batch/512 from 1.25e-7·batch/512 and to 1.25e-6·batch/512, 5 epochs of warm-up, batch 4096, weight decay
    0.05, gradient norm at most 5. The share of dropped paths, 0.1, is assumed: the configuration of Swin-T was not
    available.
    """
    scale = 4096 / 512
    optim, train = _epochs(
        images=14_197_122,
        epochs=90,
        batch=4096,
        lr=1.25e-4 * scale,
        start=1.25e-7 * scale,
        end=1.25e-6 * scale,
        clip=5.0,
    )
    model = _SWIN_T(classes=21_841, drop_path=0.1)
    return Recipe(model=model, data=_photos("imagenet-22k", held_out=0.002), optim=optim, train=train)


@recipe
def imagenet_22k_swin_t_cached() -> Recipe:
    """imagenet-22k-swin-t with a gated cache beside every attention."""
    return cached(imagenet_22k_swin_t(), PAPER_CACHE)
