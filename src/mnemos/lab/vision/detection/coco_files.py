"""Read data sets in COCO's format: annotations as JSON, in COCO's own folders or in others of that format."""

import json
from pathlib import Path
from typing import Any

from mnemos.types import InputError

from .files import FileScenes, Listed

_PLACES = (  # of a split's annotations, and of its photos
    ("annotations/instances_{}.json", "{}"),
    ("annotations/{}.json", "{}"),
    ("{}/_annotations.coco.json", "{}"),  # as Roboflow exports it
    ("{}.json", "{}"),
)
_TRAIN, _TEST = ("train2017", "train2014", "train"), ("val2017", "val2014", "valid", "val", "test")


def find_split(folder: str | Path, split: str, training: bool) -> tuple[Path, tuple[Path, ...]]:
    """(annotation file, folders for the photos) of a split; "": COCO's usual names of the training or validation split.

    Photos may be in a folder of the split's name, in one of that name in `images`, in `images`, or in the folder
    itself, which is the last. Raises InputError if there are no annotations.
    """
    folder = Path(folder)
    names = (split,) if split else (_TRAIN if training else _TEST)
    for name in names:
        for pattern, photos in _PLACES:
            file = folder / pattern.format(name)
            if file.is_file():
                places = [folder / photos.format(name), folder / "images" / name, folder / "images", folder]
                return file, tuple(place for place in places if place.is_dir())
    which = "data.train" if training else "data.test"
    raise InputError(
        f"{folder}: expected annotations in COCO's format, such as annotations/instances_{names[0]}.json, found none; "
        f"name the folder with data.folder, and the split with {which}"
    )


def read_coco(file: Path, places: tuple[Path, ...], categories: dict[int, str] | None = None) -> FileScenes:
    """The pictures of an annotation file. Cost: the whole file in memory.

    places: folders. All pictures are read from the first one that has the file of the first picture.
    categories: {id: name} of a training split, whose labels another split must share; by default the file's own, by id.
    Raises InputError for a file of another format, for an id that has another name in `categories`, and as
    `FileScenes`.
    """
    content = _read(file)
    own: dict[int, str] = {}
    for one in content["categories"]:
        number, name = _integer(one, "id", file), str(_value(one, "name", file))
        if own.setdefault(number, name) != name:
            raise InputError(
                f"{file}: expected one category of each id, found {own[number]!r} and {name!r} of id {number}; number "
                "them anew"
            )
    if categories is None:
        categories = dict(sorted(own.items()))
    for number, name in own.items():
        if categories.get(number, name) != name:
            raise InputError(
                f"{file}: expected category {number} to be {categories[number]!r}, as in the training split, found "
                f"{name!r}; number the categories of both files alike"
            )
    names = [_file_name(image, file) for image in content["images"]]
    photos = next((place for place in places if (place / names[0]).is_file()), places[0]) if names else places[0]
    listed: dict[int, Listed] = {}
    for image, name in zip(content["images"], names, strict=True):
        number = _integer(image, "id", file)
        if number in listed:
            raise InputError(f"{file}: expected one picture of each id, found two of id {number}; number them anew")
        path = photos / name
        height, width = _integer(image, "height", file), _integer(image, "width", file)
        if min(height, width) < 1:
            raise InputError(
                f"{file}: expected a height and width of at least 1, found {height} and {width} of {path.name}; "
                "correct them"
            )
        listed[number] = Listed(path, number, height, width)
    for one in content["annotations"]:
        number = _integer(one, "image_id", file)
        if number not in listed:
            raise InputError(
                f"{file}: expected annotations of its pictures, found annotation {one.get('id', '?')} of an unknown "
                f"picture {number}; add the picture or remove the annotation"
            )
        listed[number].annotations.append(dict(one))
    return FileScenes(list(listed.values()), categories, str(file))


def _read(file: Path) -> dict[str, list[Any]]:
    try:
        content = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise InputError(f"{file}: expected annotations as JSON, but they cannot be read ({error}); check it") from None
    for name in ("images", "annotations", "categories"):
        found = content.get(name) if isinstance(content, dict) else None
        if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
            raise InputError(
                f"{file}: expected COCO's lists images, annotations and categories, found no list {name!r}; "
                "name a file of instances"
            )
    return content


def _value(entry: dict[str, Any], name: str, file: Path) -> Any:
    if name not in entry:
        raise InputError(f"{file}: expected {name!r} in every entry, found {str(entry)[:80]}; add it")
    return entry[name]


def _file_name(image: dict[str, Any], file: Path) -> str:
    """The name of a picture's file; tools that ran on Windows separate folders by backslashes."""
    return str(_value(image, "file_name", file)).replace("\\", "/")


def _integer(entry: dict[str, Any], name: str, file: Path) -> int:
    """An integer; tools that keep tables write it as 1.0."""
    found = _value(entry, name, file)
    if isinstance(found, float) and found.is_integer():
        return int(found)
    if isinstance(found, bool) or not isinstance(found, int):
        raise InputError(f"{file}: expected an integer as {name!r}, found {found!r:.80}; correct it")
    return found
