"""Augmentation of training images: timm's, as the paper used it, or a light one that needs no library."""

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mnemos.types import InputError

_JITTER = 0.4  # colour jitter, DeiT's value


@dataclass(frozen=True)
class AugmentConfig:
    """How training images are augmented. Images for evaluation are never augmented.

    policy "none": no augmentation. "light": pad each side with black by 1/8 of the size, crop at random and, with
    `flip`, mirror half of the images left to right. "timm": DeiT's "standard timm augmentation": a random resized crop
    (bicubic; a padded crop for images that are stored at the target size, such as CIFAR's), `flip`, RandAugment with
    the policy `operations`, a rectangle of noise in a share `erasing` of the images, and mixup or cutmix in every
    batch, with labels smoothed by `smoothing`. `mixup` and `cutmix` are the parameters of the beta distributions of the
    mixing weights. The value 0 turns a part off; operations "" replaces RandAugment by a colour jitter of 0.4, which
    force_color_jitter adds beside RandAugment, as Cached Transformers has it. Evaluation takes the central 7/8 of the
    shorter side under "timm", unless images are stored at the target size, and the whole side otherwise.
    """

    policy: Literal["timm", "light", "none"] = "light"
    flip: bool = True
    # The fields below apply to the policy "timm" only.
    operations: str = "rand-m9-mstd0.5-inc1"
    erasing: float = 0.25
    mixup: float = 0.8
    cutmix: float = 1.0
    smoothing: float = 0.1
    force_color_jitter: bool = False

    @property
    def centre(self) -> float:
        """The central share of the shorter side that evaluation takes."""
        return 0.875 if self.policy == "timm" else 1.0

    def check(self) -> None:
        """Raise InputError for a value out of range."""
        for name, most in (("mixup", math.inf), ("cutmix", math.inf), ("erasing", 1), ("smoothing", 1)):
            if not 0 <= (value := getattr(self, name)) <= most:
                raise InputError(f"data.augment.{name}: expected 0 to {most:g}, found {value}; change it")


def normalise(pixels: NDArray[np.uint8], mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
    """Pixels [B, H, W, C] as images (pixels/255 − mean)/std, float32 [B, C, H, W]."""
    images = torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous().float()
    shape = 1, -1, 1, 1
    return images.div_(255).sub_(torch.tensor(mean).view(shape)).div_(torch.tensor(std).view(shape))


def augment_light(pixels: NDArray[np.uint8], random: np.random.Generator, flip: bool) -> NDArray[np.uint8]:
    """Apply the light policy to pixels [B, S, S, C]: a random crop from a black margin of S/8, and a flip for half."""
    rows, side = pixels.shape[:2]
    margin = side // 8
    padded = np.pad(pixels, ((0, 0), (margin, margin), (margin, margin), (0, 0)))
    corners = random.integers(0, 2 * margin, (rows, 2), endpoint=True)
    mirrored = random.random(rows) < (0.5 if flip else 0.0)
    augmented = np.stack([padded[i, y : y + side, x : x + side] for i, (y, x) in enumerate(corners)])
    augmented[mirrored] = augmented[mirrored, :, ::-1]
    return augmented


def _posterise(image: Any, bits: int, **_: Any) -> Any:
    # timm also keeps 0 bits per colour, which is black and which Pillow accepts only before version 13.
    from PIL import Image, ImageOps

    if bits < 1:
        return Image.new(image.mode, image.size)
    return image if bits >= 8 else ImageOps.posterize(image, bits)


class TimmAugmentation:
    """The policy "timm", built by timm. It draws from the global generators of Python, NumPy and PyTorch."""

    def __init__(
        self,
        config: AugmentConfig,
        size: int,
        classes: int,
        stored: bool,
        mean: tuple[float, ...],
        std: tuple[float, ...],
    ) -> None:
        from mnemos.libraries import timm

        if len(mean) != 3:
            raise InputError(f"data.augment.policy: timm expects images with 3 colours, found {len(mean)}; use light")
        timm()
        from timm.data import Mixup
        from timm.data.transforms_factory import transforms_imagenet_train

        # --- of each picture: what create_transform calls, which does not pass force_color_jitter on ---
        try:
            self._transform: Any = transforms_imagenet_train(
                size,
                hflip=0.5 if config.flip else 0.0,
                color_jitter=_JITTER,
                force_color_jitter=config.force_color_jitter,
                auto_augment=config.operations or None,
                interpolation="bicubic",
                mean=mean,
                std=std,
                re_prob=config.erasing,
                re_mode="pixel",
                re_count=1,
            )
        except (AssertionError, KeyError, ValueError) as error:
            raise InputError(
                f"data.augment.operations: expected a policy of timm such as rand-m9-mstd0.5-inc1, found "
                f"{config.operations!r} ({error}); see timm's documentation of auto_augment"
            ) from None
        for step in self._transform.transforms:
            for operation in getattr(step, "ops", ()):
                if operation.name.startswith("Posterize"):
                    operation.aug_fn = _posterise
        if stored:
            from torchvision.transforms import RandomCrop

            self._transform.transforms[0] = RandomCrop(size, padding=size // 8)
        # --- of each batch ---
        self._classes, self._smoothing = classes, config.smoothing
        self._mix: Any = None
        if config.mixup or config.cutmix:
            self._mix = Mixup(config.mixup, config.cutmix, label_smoothing=config.smoothing, num_classes=classes)

    def image(self, image: object) -> Tensor:
        """Augment and normalise one PIL image: float32 [3, size, size]."""
        return self._transform(image)

    def mix(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Apply mixup or cutmix to images [B, 3, S, S], in place; returns them and their targets [B, classes].

        Row i is mixed with row B − 1 − i. Without mixing and smoothing, the labels [B] are returned.
        """
        if self._mix is None and not self._smoothing:
            return images, labels
        if self._mix is None:
            targets = torch.nn.functional.one_hot(labels, self._classes).float()
            return images, targets * (1 - self._smoothing) + self._smoothing / self._classes
        if len(images) % 2:
            raise InputError(
                f"train.batch_size: expected an even one for data.augment.mixup and cutmix, found {len(images)}; "
                "change it, or set both to 0"
            )
        mixed: tuple[Tensor, Tensor] = self._mix(images, labels)
        return mixed
