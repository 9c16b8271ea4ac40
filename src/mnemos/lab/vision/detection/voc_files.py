"""Read data sets in the format of PASCAL VOC: one XML file of boxes for each photo."""

import math
from pathlib import Path
from xml.etree import ElementTree

from mnemos.types import InputError

from .files import FileScenes, Listed

_ANNOTATIONS, _PHOTOS, _SPLITS = "Annotations", "JPEGImages", "ImageSets/Main"


def find_list(folder: str | Path, split: str) -> Path:
    """The file that lists a split's photos. Raises InputError if there is none."""
    path = Path(folder) / _SPLITS / f"{split}.txt"
    if not path.is_file():
        raise InputError(
            f"{folder}: expected VOC's {_SPLITS}/{split}.txt beside {_ANNOTATIONS} and {_PHOTOS}, found none; name the "
            "folder of one year (such as VOC2012) with data.folder, and its split"
        )
    return path


def read_voc(folder: str | Path, split: str, categories: dict[int, str] | None = None) -> FileScenes:
    """The photos that ImageSets/Main/SPLIT.txt lists, with their boxes; segmentations by object do not exist there.

    A box of VOC includes its last pixel and counts from 1: (xmin, ymin) becomes (xmin − 1, ymin − 1). Objects marked
    difficult are annotated like COCO's crowds: they train nothing, and finding them is neither right nor wrong.
    categories: {id: name} of the training split; by default the names that occur, sorted, with ids from 1.
    Raises InputError for files that are missing or of another format, for names that `categories` lacks, and as
    `FileScenes`.
    """
    listing = find_list(folder, split)
    try:
        lines = listing.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise InputError(f"{listing}: expected names of photos in UTF-8, found {error.reason}; convert it") from None
    names = [line.split()[0] for line in lines if line.split()]
    trees = [_parse(Path(folder) / _ANNOTATIONS / f"{name}.xml") for name in names]
    if categories is None:
        found = sorted({_text(one, "name", path) for path, tree in trees for one in tree.iter("object")})
        categories = dict(enumerate(found, start=1))
    ids = {name: number for number, name in categories.items()}
    listed = []
    for number, (name, (path, tree)) in enumerate(zip(names, trees, strict=True), start=1):
        photo = Path(folder) / _PHOTOS / (tree.findtext("filename") or f"{name}.jpg").strip()
        size = tree.find("size")
        if size is None:
            raise InputError(f"{path}: expected the photo's <size>, found none; add it")
        one = Listed(photo, number, _whole(size, "height", path), _whole(size, "width", path))
        for entry in tree.iter("object"):
            box = entry.find("bndbox")
            if box is None:
                raise InputError(f"{path}: expected a <bndbox> in every object, found none; add it")
            x1, y1, x2, y2 = (_number(box, side, path) for side in ("xmin", "ymin", "xmax", "ymax"))
            label = _text(entry, "name", path)
            if label not in ids:
                raise InputError(
                    f"{path}: expected objects of the training split's classes ({', '.join(list(ids)[:10])}"
                    f"{', …' if len(ids) > 10 else ''}), found {label!r}; add a photo of it to the training list, or "
                    "remove the object"
                )
            one.annotations.append(
                {
                    "id": len(one.annotations) + 1,
                    "category_id": ids[label],
                    "bbox": [x1 - 1, y1 - 1, x2 - x1 + 1, y2 - y1 + 1],
                    "area": abs((x2 - x1 + 1) * (y2 - y1 + 1)),
                    "iscrowd": int((entry.findtext("difficult") or "0").strip() == "1"),
                }
            )
        listed.append(one)
    return FileScenes(listed, categories, str(listing))


def _parse(path: Path) -> tuple[Path, ElementTree.Element]:
    try:
        return path, ElementTree.fromstring(path.read_bytes())
    except OSError as error:
        raise InputError(f"{path}: expected VOC's annotations, but {error.strerror}; add the file") from None
    except (ElementTree.ParseError, ValueError, LookupError) as error:  # the last two: encodings that it cannot read
        raise InputError(f"{path}: expected VOC's annotations as XML, found {error}; correct it") from None


def _text(entry: ElementTree.Element, name: str, path: Path) -> str:
    found = (entry.findtext(name) or "").strip()
    if not found:
        raise InputError(f"{path}: expected a <{name}> in <{entry.tag}>, found none; add it")
    return found


def _number(entry: ElementTree.Element, name: str, path: Path) -> float:
    text = _text(entry, name, path)
    try:
        return float(text)
    except ValueError:
        raise InputError(f"{path}: expected a number as <{name}>, found {text!r:.80}; correct it") from None


def _whole(entry: ElementTree.Element, name: str, path: Path) -> int:
    found = _number(entry, name, path)
    if not math.isfinite(found) or found < 1 or found != int(found):
        raise InputError(f"{path}: expected a size of whole pixels as <{name}>, found {found:g}; correct it")
    return int(found)
