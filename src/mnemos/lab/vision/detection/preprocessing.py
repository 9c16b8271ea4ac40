"""`mnemos predict` and `mnemos detect` for detectors: the objects in photos of any size."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from mnemos.lab.tasks.pictures import ENDINGS, pillow, read_image
from mnemos.lab.tasks.preprocessing import Predicted, Preprocessing, files_below
from mnemos.registry import register
from mnemos.types import InputError

from .detector_outputs import as_results
from .scenes import Annotation, decode, encode

_BELOW = 1e-6  # detectors leave out a score that equals their threshold
LONGEST = 1600  # pixels: a larger photo is read at this size, because masks of all its objects are held at once


@register
@dataclass(frozen=True)
class DetectionPreprocessing(Preprocessing):
    """The objects in photos; a folder stands for the photos in it.

    Attributes:
        categories: for each name, the id by which the data set's annotations name the class.
    """

    name: ClassVar[str] = "detection"
    options: ClassVar[Mapping[str, int]] = MappingProxyType({"top": 10})

    categories: tuple[int, ...]

    @property
    def names_by_id(self) -> dict[int, str]:
        """{id of a category: name}."""
        return dict(zip(self.categories, self.names, strict=True))

    def predict(self, model: Any, files: Sequence[Path], options: Mapping[str, int]) -> Iterator[Predicted]:
        """The `top` most probable objects of each photo: {"objects": entries of COCO's result format}."""
        for path in files_below(files, ENDINGS, "photos"):
            try:
                found = self.objects_in(model, path, 0, 0.0)[1][: options["top"]]
            except InputError as error:
                yield Predicted(str(path), "", problem=str(error))
                continue
            yield Predicted(str(path), self.describe(found), {"objects": found})

    def describe(self, found: Sequence[Annotation]) -> str:
        """The names and scores of objects on one line."""
        return "  ".join(f"{self.names_by_id[one['category_id']]} {one['score']:.2f}" for one in found) or "no object"

    def objects_in(
        self, model: Any, path: Path, image_id: int, score: float
    ) -> tuple[NDArray[np.uint8], list[Annotation]]:
        """The pixels of a photo (`read_photo`) and its `objects`. Raises InputError, with the file's name."""
        pixels = read_photo(path)
        try:
            return pixels, self.objects(model, pixels, image_id, score)
        except InputError as error:
            raise InputError(f"{path}: {error}") from None

    @torch.no_grad()
    def objects(self, model: Any, pixels: NDArray[np.uint8], image_id: int, score: float) -> list[Annotation]:
        """The objects of a photo [H, W, 3] in COCO's result format, best first, with at least `score`.

        Boxes and masks are in the pixels of the photo. A photo of more than 1600 pixels is read at that size. model: a
        detector, or a module with one as `host`, in eval mode. No cache is written. Raises InputError for a photo so
        long and thin that less than a pixel of its shorter side is left at the detector's size.
        """
        opener, detector = pillow(), getattr(model, "host", model)
        height, width = pixels.shape[:2]
        shrunk = min(1.0, LONGEST / max(height, width))
        if shrunk < 1.0:
            size = (max(1, round(width * shrunk)), max(1, round(height * shrunk)))
            pixels = np.array(opener.fromarray(pixels).resize(size, opener.Resampling.BICUBIC))
        _check_proportions(detector, *pixels.shape[:2])
        parameter = next(p for p in detector.parameters() if p.is_floating_point())
        image = torch.from_numpy(pixels).permute(2, 0, 1).to(parameter.device, parameter.dtype) / 255
        with _scores_from(detector, score):
            (found,) = detector([image])
        results = [one for one in as_results(found, image_id, self.categories) if one["score"] >= score]
        if shrunk < 1.0:
            results = [_enlarge(one, pixels.shape[:2], height, width) for one in results]
        return sorted(results, key=lambda one: -float(one["score"]))


def read_photo(path: Path) -> NDArray[np.uint8]:
    """The pixels [H, W, 3] of a photo, turned as its EXIF data say. Raises InputError, with the file's name."""
    return np.array(read_image(path))


def _check_proportions(detector: Any, height: int, width: int) -> None:
    transform = getattr(detector, "transform", None)
    longest = getattr(transform, "max_size", None)
    if longest is None or getattr(transform, "fixed_size", None) is not None:
        return
    if min(height, width) * longest < 1.001 * max(height, width):  # the detector scales in float32
        raise InputError(
            f"expected a photo whose sides differ by less than a factor of {longest}, because the detector scales the "
            f"longer one to at most {longest} pixels, found {width} × {height} pixels; cut it into parts"
        )


@contextlib.contextmanager
def _scores_from(detector: Any, score: float) -> Iterator[None]:
    """Inside, a detector leaves out objects of lower scores before it computes their masks."""
    part = getattr(detector, "roi_heads", detector)
    own = getattr(part, "score_thresh", None)
    if own is None:
        yield
        return
    part.score_thresh = max(own, score - _BELOW)
    try:
        yield
    finally:
        part.score_thresh = own


def _enlarge(one: Annotation, size: Sequence[int], height: int, width: int) -> Annotation:
    """A detection in a picture of `size` (height, width), in the pixels of the photo from which it was made."""
    down, across = height / size[0], width / size[1]
    x, y, w, h = one["bbox"]
    one = {**one, "bbox": [x * across, y * down, w * across, h * down]}
    if "segmentation" in one:
        opener = pillow()
        small = opener.fromarray(decode({**one["segmentation"], "counts": one["segmentation"]["counts"].encode()}))
        one["segmentation"] = encode(np.array(small.resize((width, height), opener.Resampling.NEAREST)))
    return one
