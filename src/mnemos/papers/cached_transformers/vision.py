"""Image classification: ImageNet at the paper's settings (Tables 1, 2 and 8), and small tasks that train on two cores.

A recipe here is a base, and what is changed of its memory alone: nothing, "-cached" (a gated cache beside every
attention), "-attention-cache" (keys and values of an earlier batch, Table 2) or, of small ones, "-wider" (as many
parameters as the cached one has, in wider MLPs, and no memory). `mnemos.registry` has their names.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from mnemos.config import DataConfig
from mnemos.data.augment import AugmentConfig
from mnemos.data.cifar import CIFARConfig
from mnemos.data.images import DigitsConfig, MNISTConfig
from mnemos.data.photos import PhotosConfig
from mnemos.memory.grc import GRC
from mnemos.memory.token_cache import AttentionCache
from mnemos.models.vision import ImageConfig, PVTConfig, SwinConfig, ViTConfig
from mnemos.train.recipe import OptimConfig, Recipe, ScheduleConfig, TrainConfig


def _arms(base: Recipe, cache: GRC, wider: dict[str, Any] | None = None) -> dict[str, Recipe]:
    """A base and its arms by name."""
    changes: dict[str, tuple[str, dict[str, Any]]] = {
        "": (base.about, {}),
        "-cached": (f"{base.name} with a gated cache beside every attention", {"cache": cache}),
    }
    if not isinstance(base.model, SwinConfig):  # whose windows leave no room for other keys
        about = f"{base.name} with keys and values of the batch before (Table 2)"
        changes["-attention-cache"] = about, {"cache": AttentionCache()}
    if wider is not None:
        changes["-wider"] = f"{base.name} with wider MLPs: the cached one's parameters, no memory", wider
    return {
        base.name + arm: replace(base, name=base.name + arm, about=about, model=replace(base.model, **fields))
        for arm, (about, fields) in changes.items()
    }


_PAPER = GRC(preset="paper", ratio=0.5, length="auto")

# ImageNet ------------------------------------------------------------------------------------------------------------
_PYRAMID = partial(
    PVTConfig,
    image=224,
    classes=1000,
    dims=(64, 128, 320, 512),
    num_heads=(1, 2, 5, 8),
    mlp_ratios=(8, 8, 4, 4),
    reductions=(8, 4, 2, 1),
)
_SWIN_T = SwinConfig(
    image=224, classes=1000, patch=4, window=7, dim=96, depths=(2, 2, 6, 2), num_heads=(3, 6, 12, 24), mlp_ratio=4.0
)
_VIT_S = ViTConfig(image=224, classes=1000, patch=16, dim=384, depth=12, num_heads=6, mlp_ratio=4.0)
# The paper's models; the share of dropped paths and the largest gradient (0: not clipped) are those that each host was
# released with, DeiT's for ViT-S.
_HOSTS: dict[str, tuple[str, ImageConfig, float, float]] = {
    "vit-s": ("ViT-S/16", _VIT_S, 0.1, 0.0),
    "pvt-tiny": ("PVT-Tiny", _PYRAMID(depths=(2, 2, 2, 2)), 0.1, 0.0),
    "pvt-small": ("PVT-Small", _PYRAMID(depths=(3, 4, 6, 3)), 0.1, 0.0),
    "pvt-medium": ("PVT-Medium", _PYRAMID(depths=(3, 4, 18, 3)), 0.3, 1.0),
    "pvt-v2-b2": ("PVTv2-B2", _PYRAMID(version=2, depths=(3, 4, 6, 3)), 0.1, 0.0),
    "pvt-v2-b3": ("PVTv2-B3", _PYRAMID(version=2, depths=(3, 4, 18, 3)), 0.3, 1.0),
    "pvt-v2-b4": ("PVTv2-B4", _PYRAMID(version=2, depths=(3, 8, 27, 3)), 0.3, 1.0),
    "swin-t": ("Swin-T", _SWIN_T, 0.2, 5.0),
}


def _imagenet(key: str) -> Recipe:
    """ImageNet-1k at the paper's settings: 224², AdamW, decay 0.05, 300 epochs, 5 of warm-up, cosine, timm's policy.

    Batch 1024 at rate 5e-4·batch/512, warm-up from 1e-6 and cosine to 1e-5, as DeiT, whose settings its hosts share
    (the paper gives none of these). The validation set is the test split; a hundredth of the training set is held out.
    """
    title, model, drop_path, clip = _HOSTS[key]
    return Recipe(
        name=f"imagenet-{key}",
        about=f"{title} on ImageNet-1k, 300 epochs as in the paper: days on 16 GPUs (--data.folder IMAGENET)",
        model=replace(model, drop_path=drop_path),
        data=_photos("imagenet", held_out=0.01),
        **_schedule(images=1_281_167, epochs=300, batch=1024, rate=1e-3, start=1e-6, end=1e-5, clip=clip),
    )


def _imagenet_22k() -> Recipe:
    """ImageNet-22k, "following the Swin-Transformer implementation" (Table 8): 90 epochs, 5 of warm-up, batch 4096.

    That is, from its configurations: 21,841 classes, AdamW at 1.25e-4·batch/512 from 1.25e-7·batch/512 and to
    1.25e-6·batch/512, decay 0.05, gradients to 5. Assumed, as the one for Swin-T was not at hand: dropped paths 0.1.
    """
    scale = 4096 / 512
    return Recipe(
        name="imagenet-22k-swin-t",
        about="Swin-T on ImageNet-22k, 90 epochs as Swin's own (Table 8): days on 16 GPUs (--data.folder IMAGENET_22K)",
        model=replace(_SWIN_T, classes=21_841, drop_path=0.1),
        data=_photos("imagenet-22k", held_out=0.002),
        **_schedule(
            images=14_197_122,
            epochs=90,
            batch=4096,
            rate=1.25e-4 * scale,
            start=1.25e-7 * scale,
            end=1.25e-6 * scale,
            clip=5.0,
        ),
    )


def _photos(folder: str, held_out: float) -> PhotosConfig:
    return PhotosConfig(folder=folder, held_out=held_out, workers=8, augment=AugmentConfig(policy="timm"))


def _schedule(
    images: int, epochs: int, batch: int, rate: float, start: float, end: float, clip: float
) -> dict[str, Any]:
    """Training in epochs, as updates: 5 of warm-up from rate `start`, then a cosine to rate `end`."""
    epoch = images // batch
    schedule = ScheduleConfig(name="cosine", warmup=5 * epoch, start=start / rate, floor=end / rate)
    return {
        "optim": OptimConfig(lr=rate, weight_decay=0.05, grad_clip=clip, schedule=schedule),
        "train": TrainConfig(
            steps=epochs * epoch, batch_size=batch, log_every=50, eval_every=epoch, checkpoint_every=epoch
        ),
    }


# Small tasks ---------------------------------------------------------------------------------------------------------
def _small(
    name: str,
    about: str,
    data: DataConfig,
    model: ImageConfig,
    wider: dict[str, Any],
    updates: int,
    batch: int = 64,
    rate: float = 2e-3,
) -> dict[str, Recipe]:
    """A base of a minute or two on one core, and its arms."""
    base = Recipe(
        name=name,
        about=about,
        model=model,
        data=data,
        optim=OptimConfig(lr=rate, weight_decay=0.05, schedule=ScheduleConfig(name="cosine", warmup=100)),
        train=TrainConfig(steps=updates, batch_size=batch, eval_every=500, checkpoint_every=1000),
    )
    return _arms(base, GRC(), wider)


_DIGITS, _MNIST = DigitsConfig(layout="image"), MNISTConfig(layout="image")
_CIFAR = CIFARConfig(augment=AugmentConfig(policy="none"))  # for two epochs; light's black margins cost 4 points of 39
_VIT = partial(ViTConfig, dim=64, depth=4, num_heads=4, pool="mean")
# PVT 2 throughout, which learns several times faster from few images than PVT 1.
_PVT = partial(PVTConfig, version=2, patch=2, dims=(32, 64), depths=(2, 2), num_heads=(2, 4))
_SWIN = partial(SwinConfig, dim=32, depths=(2, 2), num_heads=(2, 4))
_WIDER = {"mlp_ratio": 3.40625}  # from 2: three gates and four projections of half the width


def _digits() -> dict[str, Recipe]:
    vit, pvt = _VIT(image=8, channels=1, patch=2), _PVT(image=8, channels=1)
    swin = _SWIN(image=8, channels=1, patch=1, window=4)
    about = "on scikit-learn's digits as images"
    return {
        **_small("digits-vit", f"a ViT {about}", _DIGITS, vit, _WIDER, updates=1500, batch=32),
        **_small("digits-pvt", f"a PVT {about}", _DIGITS, pvt, {"mlp_ratios": (8, 2)}, updates=1000, batch=32),
        **_small("digits-swin", f"a Swin {about}", _DIGITS, swin, _WIDER, updates=1500, batch=32),
    }


def _mnist() -> dict[str, Recipe]:
    vit, pvt = _VIT(image=28, channels=1, patch=7), _PVT(image=28, channels=1, depths=(1, 2))
    swin = _SWIN(image=28, channels=1, patch=2, window=7)
    about = "on MNIST as images (--data.path FOLDER)"
    return {
        **_small("mnist-vit", f"a ViT {about}", _MNIST, vit, _WIDER, updates=3000, rate=3e-3),
        **_small("mnist-pvt", f"a PVT {about}", _MNIST, pvt, {"mlp_ratios": (5, 3)}, updates=1200),
        **_small("mnist-swin", f"a Swin {about}", _MNIST, swin, _WIDER, updates=1200),
    }


def _cifar() -> dict[str, Recipe]:
    vit, swin = _VIT(depth=3, patch=4), _SWIN(patch=4, window=4, dim=48)
    pvt = PVTConfig(
        version=2,
        dims=(32, 64, 128),
        depths=(1, 2, 1),
        num_heads=(1, 2, 4),
        mlp_ratios=(4, 4, 2),
        reductions=(2, 2, 1),
    )
    about = "on CIFAR-10 (--data.folder FOLDER)"
    return {
        **_small("cifar-vit", f"a ViT {about}", _CIFAR, vit, _WIDER, updates=1200),
        **_small("cifar-pvt", f"a PVT {about}", _CIFAR, pvt, {"mlp_ratios": (5, 6, 3)}, updates=2500, batch=32),
        **_small("cifar-swin", f"a Swin {about}", _CIFAR, swin, _WIDER, updates=2000, batch=32),
    }


def _any_photos() -> dict[str, Recipe]:
    vit = _VIT(image=0, classes=0, patch=8, drop_path=0.1)
    about = "a ViT on photos in class folders, at 64 x 64 (--data.folder PHOTOS)"
    return _small("photos-vit", about, PhotosConfig(size=64), vit, _WIDER, updates=800, batch=32, rate=1e-3)


_RECIPES = {**_digits(), **_mnist(), **_cifar(), **_any_photos(), **_arms(_imagenet_22k(), _PAPER)}
for _key in _HOSTS:
    _RECIPES |= _arms(_imagenet(_key), _PAPER)


def __getattr__(name: str) -> Callable[[], Recipe]:
    """The function of each recipe, under its recipe's name."""
    if name not in _RECIPES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return partial(_RECIPES.__getitem__, name)
