"""Objects that a trained run finds in photos: `mnemos.detect`, `mnemos detect RUN PHOTOS` and `mnemos predict`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mnemos.atomic import check_output_folder, write_bytes, write_json
from mnemos.errors import near_arguments
from mnemos.lab.evaluate.predict import read_preprocessing
from mnemos.lab.tasks.pictures import ENDINGS, pillow, read_image
from mnemos.lab.tasks.preprocessing import Predicted, Preprocessing, files_below
from mnemos.models.store import load
from mnemos.registry import register
from mnemos.types import InputError

from .detection.results import DETECTIONS, jpeg, overlay
from .detection.scenes import Annotation, decode, encode

LONGEST = 1600  # pixels: a larger photo is read at this size, because masks of all its objects are in memory at once
_BELOW = 1e-6  # detectors leave out a score that equals their threshold
_QUALITY = 92  # of the drawn JPEGs


class Photo(NamedTuple):
    """A photo and its objects."""

    file: Path
    objects: list[Annotation]  # in COCO's result format with `file_name`, best first
    text: str = ""  # the names and scores of the objects
    drawn: Path | None = None  # the file of the photo with its objects drawn on it
    problem: str = ""  # why the photo could not be read, with its name


@near_arguments
def detect(
    run: str | Path,
    photos: Sequence[str | Path],
    score: float = 0.5,
    out: str | Path | None = None,
    progress: Callable[[Photo, int], None] | None = None,
) -> list[Photo]:
    """Find objects in photos with a trained detector: a `Photo` for each, with its objects in COCO's result format.

        for photo in mnemos.detect("runs/shapes", ["photos"], out="objects"):
            print(photo.file, photo.text)

    run: the folder of a finished run or of its model. photos: files, and folders, which stand for the photos in them at
    any depth. score: the least score of an object. out: a folder for the photos with their objects drawn on them, as
    JPEG, and for detections.json, a list of all objects; files of the same names are replaced. progress(photo, number
    of all photos) is called after each photo.

    An object is {"image_id", "category_id" (the id of the training data), "bbox" [x, y, width, height] in the photo's
    pixels, "score", "file_name"}, with masks also "segmentation" (run lengths). image_id: the number that is the file's
    name, if all files are named by different numbers, as in COCO; else 1, 2, … in the order of the photos. Photos are
    turned as their EXIF data say; one with more than 1600 pixels a side is read at that size.
    Raises InputError for a run of another task, a folder without photos, and an `out` in a folder of photos.
    """
    # --- what is asked for ---
    about = read_preprocessing(Path(run))
    if not isinstance(about, DetectionPreprocessing):
        raise InputError(
            f"{run}: expected a run whose task is detection, found one of {about.name}; use mnemos predict"
        )
    if not 0 <= score <= 1:
        raise InputError(f"score: expected 0 to 1, the least score of an object, found {score}; change it")
    named = [Path(photo) for photo in ([photos] if isinstance(photos, str | Path) else photos)]
    files = files_below(named, ENDINGS, "photos")
    if not files:
        raise InputError("photos: expected at least one file or folder, found none; name some")
    if out is not None:
        check_output_folder(out)
    drawings = [None] * len(files) if out is None else _output_files(files, named, Path(out))
    numbers = [int(file.stem) for file in files if file.stem.isascii() and file.stem.isdigit()]
    ids = numbers if len(set(numbers)) == len(files) else range(1, len(files) + 1)

    # --- the photos, one by one ---
    model, result = load(run).eval(), list[Photo]()
    for file, image_id, drawn in zip(files, ids, drawings, strict=True):
        try:
            pixels = np.array(read_image(file))
        except InputError as error:
            photo = Photo(file, [], problem=str(error))
        else:
            objects = about.objects(model, pixels, image_id, score)
            objects = [{**one, "file_name": file.name} for one in objects]
            photo = Photo(file, objects, about.describe(objects), drawn)
            if drawn is not None:
                drawn.parent.mkdir(parents=True, exist_ok=True)
                write_bytes(drawn, jpeg(overlay(pixels, objects, about.names_by_id), _QUALITY))
        result.append(photo)
        if progress is not None:
            progress(photo, len(files))
    if out is not None:
        Path(out).mkdir(parents=True, exist_ok=True)
        write_json(Path(out) / DETECTIONS, [one for photo in result for one in photo.objects])
    return result


def _output_files(files: Sequence[Path], named: Sequence[Path], out: Path) -> list[Path]:
    """The file in `out` for each photo: as below the named folder, but .jpg; with a number where a name repeats."""
    folders = [folder for folder in named if folder.is_dir()]
    inside = any(out.resolve().is_relative_to(folder.resolve()) for folder in folders)
    if inside or out.resolve() in {file.resolve().parent for file in files}:
        raise InputError(
            f"--out {out}: expected a folder outside those of the photos, because drawn photos would replace them, or "
            "be read as photos the next time; name another"
        )
    names: dict[str, Path] = {}  # by their lower-case form, as file systems may compare them
    for file in files:
        folder = next((folder for folder in folders if folder in file.parents), file.parent)
        name, number = file.relative_to(folder).with_suffix(".jpg"), 1
        while str(name).lower() in names:
            number += 1
            name = name.with_name(f"{file.stem}-{number}.jpg")
        names[str(name).lower()] = out / name
    return list(names.values())


@register
@dataclass(frozen=True)
class DetectionPreprocessing(Preprocessing):
    """The objects in photos; a folder stands for the photos in it."""

    name: ClassVar[str] = "detection"
    options: ClassVar[Mapping[str, int]] = MappingProxyType({"top": 10})
    endings = ENDINGS
    files = "photos"

    categories: tuple[int, ...]  # for each name, the id by which the data set's annotations name the class

    @property
    def names_by_id(self) -> dict[int, str]:
        return dict(zip(self.categories, self.names, strict=True))

    def answer(self, reader: Any, path: Path, options: Mapping[str, int]) -> Predicted:
        """The `top` most probable objects of a photo: {"objects": entries of COCO's result format}."""
        entries = self.objects(reader, np.array(read_image(path)), 0, 0.0)[: options["top"]]
        return Predicted(str(path), self.describe(entries), {"objects": entries})

    def describe(self, entries: Sequence[Annotation]) -> str:
        """The names and scores of objects on one line."""
        names = self.names_by_id
        return "  ".join(f"{names[one['category_id']]} {one['score']:.2f}" for one in entries) or "no object"

    @torch.no_grad()
    def objects(self, model: Any, pixels: NDArray[np.uint8], image_id: int, score: float) -> list[Annotation]:
        """The objects of a photo [H, W, 3] in COCO's result format, best first, with at least `score`.

        Boxes and masks are in the pixels of the photo. model: a detector, or a module with one as `host`, in eval mode.
        """
        # --- the photo, at most as large as `LONGEST` ---
        library, detector = pillow(), getattr(model, "host", model)
        height, width = pixels.shape[:2]
        shrunk = LONGEST / max(height, width)
        if shrunk < 1.0:
            size = (max(1, round(width * shrunk)), max(1, round(height * shrunk)))
            pixels = np.array(library.fromarray(pixels).resize(size, library.Resampling.BICUBIC))
        parameter = next(p for p in detector.parameters() if p.is_floating_point())
        image = torch.from_numpy(pixels).permute(2, 0, 1).to(parameter.device, parameter.dtype) / 255

        # --- detection; objects of lower scores are left out before their masks are computed ---
        part = getattr(detector, "roi_heads", detector)
        own = getattr(part, "score_thresh", None)
        try:
            if own is not None:
                part.score_thresh = max(own, score - _BELOW)
            (detections,) = detector([image])
        finally:
            if own is not None:
                part.score_thresh = own
        entries = [one for one in as_results(detections, image_id, self.categories) if one["score"] >= score]

        # --- in pixels of the whole photo ---
        if shrunk < 1.0:
            down, across = height / pixels.shape[0], width / pixels.shape[1]
            for entry in entries:
                x, y, w, h = entry["bbox"]
                entry["bbox"] = [x * across, y * down, w * across, h * down]
                if "segmentation" in entry:
                    small = library.fromarray(decode(entry["segmentation"]))
                    entry["segmentation"] = encode(np.array(small.resize((width, height), library.Resampling.NEAREST)))
        return sorted(entries, key=lambda one: -float(one["score"]))


def as_results(detections: dict[str, Tensor], image_id: int, categories: Sequence[int]) -> list[Annotation]:
    """A picture's detections, as torchvision's detectors return them, in COCO's result format."""
    results: list[Annotation] = []
    corners, scores, labels = (detections[name].cpu().double().tolist() for name in ("boxes", "scores", "labels"))
    for (x1, y1, x2, y2), score, label in zip(corners, scores, labels, strict=True):
        box = [x1, y1, x2 - x1, y2 - y1]
        category = categories[int(label) - 1]
        results.append({"image_id": image_id, "category_id": category, "bbox": box, "score": score})
    if "masks" in detections:
        for one, mask in zip(results, (detections["masks"][:, 0] > 0.5).cpu().numpy(), strict=True):
            one["segmentation"] = encode(mask)
    return results
