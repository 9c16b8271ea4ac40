"""Objects that a trained run finds in photos: `mnemos.detect` and `mnemos detect RUN PHOTOS`."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from mnemos.atomic import write_bytes, write_json
from mnemos.lab.evaluate.predict import read_preprocessing
from mnemos.lab.tasks.pictures import ENDINGS
from mnemos.lab.tasks.preprocessing import files_below
from mnemos.lab.vision.detection.detections import DETECTIONS, jpeg, overlay
from mnemos.models.store import load
from mnemos.types import InputError

from .detection.preprocessing import DetectionPreprocessing
from .detection.scenes import Annotation

_QUALITY = 92  # of the drawn JPEGs

Progress = Callable[["Photo", int, int], None]  # (a photo, how many are done, how many there are)


class Photo(NamedTuple):
    """A photo and its objects, in COCO's result format with `file_name`, best first.

    text: the names and scores of the objects. drawn: the file of the photo with its objects drawn on it, or None.
    problem: why the photo could not be read, with its name; "" if it was read.
    """

    file: Path
    objects: list[Annotation]
    text: str = ""
    drawn: Path | None = None
    problem: str = ""


class TrainedDetector:
    """The model and the classes of a finished run, or of the folder of its model.

    Raises InputError for a path that is no folder, or whose task is not detection.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        about = read_preprocessing(self.folder)
        if not isinstance(about, DetectionPreprocessing):
            raise InputError(
                f"{folder}: expected a run whose task is detection, found one of {about.name}; use mnemos predict"
            )
        self.about, self.model = about, load(self.folder).eval()

    def detect(
        self, photos: Sequence[str | Path], score: float = 0.5, out: str | Path | None = None
    ) -> Iterator[tuple[Photo, int]]:
        """Each photo with its objects, and the number of photos. See `mnemos.detect`.

        The arguments are checked before this returns. detections.json is written after the last photo.
        """
        if not 0 <= score <= 1:
            raise InputError(f"score: expected 0 to 1, the least score of an object, found {score}; change it")
        files = files_below([Path(photo) for photo in photos], ENDINGS, "photos")
        if not files:
            raise InputError("photos: expected at least one file or folder, found none; name some")
        drawn = None if out is None else _output_files(files, [Path(photo) for photo in photos], Path(out))
        return self._detect(files, score, drawn, out)

    def _detect(
        self, files: list[Path], score: float, drawn: list[Path] | None, out: str | Path | None
    ) -> Iterator[tuple[Photo, int]]:
        every: list[Annotation] = []
        for number, (file, image_id) in enumerate(zip(files, _image_ids(files), strict=True)):
            try:
                pixels, found = self.about.objects_in(self.model, file, image_id, score)
            except InputError as error:
                yield Photo(file, [], problem=str(error)), len(files)
                continue
            found = [{**one, "file_name": file.name} for one in found]
            every += found
            if drawn is not None:
                drawn[number].parent.mkdir(parents=True, exist_ok=True)
                write_bytes(drawn[number], jpeg(overlay(pixels, found, self.about.names_by_id), _QUALITY))
            yield Photo(file, found, self.about.describe(found), drawn[number] if drawn else None), len(files)
        if out is not None:
            Path(out).mkdir(parents=True, exist_ok=True)
            write_json(Path(out) / DETECTIONS, every)


def detect(
    run: str | Path | TrainedDetector,
    photos: Sequence[str | Path],
    score: float = 0.5,
    out: str | Path | None = None,
    progress: Progress | None = None,
) -> list[Photo]:
    """Find objects in photos with a trained detector: a `Photo` for each, with its objects in COCO's result format.

        for photo in mnemos.detect("runs/shapes", ["photos"], out="found"):
            print(photo.file, photo.text)

    run: the folder of a finished run or of its model; to detect again and again, a `TrainedDetector`, which loads them
    once. photos: files, and folders, which stand for the photos in them at any depth. score: the least score of an
    object. out: a folder for the photos with boxes, masks, names and scores drawn on them, as JPEG, and for
    detections.json, a list of all objects; files of the same names are replaced. progress(photo, done, all) is called
    after each photo.

    An object is {"image_id", "category_id" (the id of the training data), "bbox" [x, y, width, height] in the photo's
    pixels, "score", "file_name"}, with masks also "segmentation" (run lengths). image_id: the number that is the file's
    name, if all files are named by different numbers, as in COCO; else 1, 2, … in the order of the photos. Photos are
    turned as their EXIF data say. One that cannot be read has a `problem` and no objects; the others are still read.
    Cost: a forward pass per photo; a photo with more than 1600 pixels a side is read at that size.
    Raises InputError for a run of another task, a folder without photos, and an `out` in a folder of photos.
    """
    if isinstance(photos, str | Path):
        raise InputError("mnemos.detect: expected a list of photos, found one name; put it in a list")
    opened = run if isinstance(run, TrainedDetector) else TrainedDetector(run)
    found = []
    for done, (photo, count) in enumerate(opened.detect(photos, score, out), start=1):
        found.append(photo)
        if progress is not None:
            progress(photo, done, count)
    return found


def _image_ids(files: Sequence[Path]) -> list[int]:
    """The numbers that are the files' names, if all are different numbers; else 1, 2, …"""
    stems = [file.stem for file in files]
    if all(stem.isascii() and stem.isdigit() and len(stem) <= 18 for stem in stems):
        numbers = [int(stem) for stem in stems]
        if len(set(numbers)) == len(numbers):
            return numbers
    return list(range(1, len(files) + 1))


def _output_files(files: Sequence[Path], named: Sequence[Path], out: Path) -> list[Path]:
    """The file in `out` for each photo: its place below the named folder, as .jpg, with a number if that is taken."""
    folders = [folder for folder in named if folder.is_dir()]
    inside = next((f for f in folders if out.resolve() == f.resolve() or f.resolve() in out.resolve().parents), None)
    if inside is not None:
        raise InputError(
            f"--out {out}: expected a folder outside {inside}, whose photos are read, because drawn photos would be "
            "read as photos the next time; name another"
        )
    taken: set[str] = set()
    places = []
    for file in files:
        folder = next((folder for folder in folders if folder in file.parents), file.parent)
        place, number = file.relative_to(folder).with_suffix(".jpg"), 1
        while str(place).lower() in taken:
            number += 1
            place = file.relative_to(folder).with_name(f"{file.stem}-{number}.jpg")
        taken.add(str(place).lower())
        places.append(out / place)
    photos = {file.resolve() for file in files}
    if any(place.resolve() in photos for place in places):
        raise InputError(f"--out {out}: expected a folder other than that of the photos; name another")
    return places
