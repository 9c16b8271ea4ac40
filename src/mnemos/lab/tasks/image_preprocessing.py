"""`mnemos predict` for image classifiers: the most probable classes of image files."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from mnemos.registry import register
from mnemos.types import InputError

from .augment import normalise
from .folders import ENDINGS
from .pictures import fit, read_image
from .preprocessing import Predicted, Preprocessing, files_below

_BATCH = 32


@register
@dataclass(frozen=True)
class ImagePreprocessing(Preprocessing):
    """The most probable classes of images; a folder stands for the images in it.

    Attributes:
        size: pixels per side.
        centre: share of the shorter side that is cropped (see `mnemos.lab.tasks.pictures.fit`).
        mean, std: of the pixels in [0, 1] by which images are normalised, per channel.
    """

    name: ClassVar[str] = "images"
    options: ClassVar[Mapping[str, int]] = MappingProxyType({"top": 3})

    size: int
    centre: float
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def predict(self, model: Any, files: Sequence[Path], options: Mapping[str, int]) -> Iterator[Predicted]:
        """The `top` most probable classes of each image: {"classes": [{"name", "probability"}, …]}."""
        top = min(options["top"], len(self.names))
        found = files_below(files, ENDINGS, "images")
        for start in range(0, len(found), _BATCH):
            read = [self._read(path) for path in found[start : start + _BATCH]]
            likely = iter(self._likely(model, [pixels for _, pixels in read if isinstance(pixels, np.ndarray)], top))
            for path, pixels in read:
                if isinstance(pixels, InputError):
                    yield Predicted(str(path), "", problem=str(pixels))
                    continue
                named = next(likely)
                details = {"classes": [{"name": name, "probability": value} for name, value in named]}
                yield Predicted(str(path), "  ".join(f"{name} {value:.3f}" for name, value in named), details)

    def _likely(self, model: Any, pixels: Sequence[NDArray[np.uint8]], top: int) -> list[list[tuple[str, float]]]:
        """The `top` most probable classes of each image, with their probabilities."""
        if not pixels:
            return []
        with torch.no_grad():
            logits, _ = model(normalise(np.stack(pixels), self.mean, self.std))
        best = logits.float().softmax(-1).topk(top)
        pairs = zip(best.values.tolist(), best.indices.tolist(), strict=True)
        return [[(self.names[i], value) for value, i in zip(*pair, strict=True)] for pair in pairs]

    def _read(self, path: Path) -> tuple[Path, NDArray[np.uint8] | InputError]:
        """The path, and its pixels or why they cannot be read."""
        try:
            return path, self._pixels(path)
        except InputError as error:
            return path, error

    def _pixels(self, path: Path) -> NDArray[np.uint8]:
        """The image as the task prepares it for evaluation: [size, size, C]."""
        image = read_image(path, 2 * math.floor(self.size / self.centre))  # as `FilePictures` decodes it
        return fit(image.convert("L") if len(self.mean) == 1 else image, self.size, self.centre)
