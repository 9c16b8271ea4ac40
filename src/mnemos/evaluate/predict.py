"""The classes of new images, by the trained model of a run: `mnemos predict RUN FILES`."""

import json
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from mnemos.data.augment import normalise
from mnemos.data.folders import ENDINGS
from mnemos.data.pictures import fit, read_image
from mnemos.models.store import RUN_MODEL, load
from mnemos.types import InputError, JSONObject

PREPROCESSING = "preprocessing.json"  # in the model's folder; `Task.preprocessing` gives its content
_BATCH = 32


def predict(folder: str | Path, files: Sequence[str | Path], top: int = 3) -> list[JSONObject]:
    """The most probable classes of each image: [{"file", "classes": [{"name", "probability"}, …]}].

    folder: a finished run of an image classifier, or the folder of its model, whose preprocessing.json has the class
    names and the size and colours that the model was trained with. files: images, and folders, all images in which are
    read. An image is prepared as in evaluation: upright, scaled and cropped to its centre. top: classes per image.
    Cost: one forward per image, 32 at a time. Raises InputError for another folder, a missing file, a folder without
    images, and an image that cannot be read.
    """
    if top < 1:
        raise InputError(f"--top: expected at least 1 class, found {top}; raise it")
    folder = Path(folder)
    about = _preprocessing(folder)
    paths = [path for file in files for path in _images(Path(file))]
    model = load(folder)
    names, found = about["names"], []
    for start in range(0, len(paths), _BATCH):
        chosen = paths[start : start + _BATCH]
        pixels = np.stack([_pixels(path, about) for path in chosen])
        with torch.no_grad():
            logits, _ = model(normalise(pixels, tuple(about["mean"]), tuple(about["std"])))
        best = logits.float().softmax(-1).topk(min(top, len(names)))
        for path, values, classes in zip(chosen, best.values.tolist(), best.indices.tolist(), strict=True):
            likely = [{"name": names[i], "probability": value} for value, i in zip(values, classes, strict=True)]
            found.append({"file": str(path), "classes": likely})
    return found


def _preprocessing(folder: Path) -> JSONObject:
    places = (folder / RUN_MODEL / PREPROCESSING, folder / PREPROCESSING)
    path = next((path for path in places if path.is_file()), None)
    if path is None:
        raise InputError(
            f"{folder}: expected a finished run of an image classifier, found no {PREPROCESSING} in its model's "
            "folder; for other tasks use mnemos eval RUN --data.FIELD value"
        )
    try:
        about: JSONObject = json.loads(path.read_text())
        if not {"names", "size", "centre", "mean", "std"} <= about.keys():
            raise ValueError("a field is missing")
    except (ValueError, AttributeError) as error:
        raise InputError(f"{path}: expected names, size, centre, mean and std as JSON ({error}); train again") from None
    return about


def _images(path: Path) -> Iterator[Path]:
    """The file itself, or the images of a folder at any depth, sorted; hidden ones are ignored."""
    if not path.is_dir():
        yield path
        return
    found = []
    for here, folders, names in os.walk(path):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [Path(here, n) for n in names if n.lower().endswith(ENDINGS) and not n.startswith(".")]
    if not found:
        raise InputError(f"{path}: expected images ({' '.join(ENDINGS)}), found none; name another folder")
    yield from sorted(found)


def _pixels(path: Path, about: JSONObject) -> NDArray[np.uint8]:
    """The image as the model's task prepares it for evaluation: [size, size, C]."""
    image = read_image(path, 2 * math.floor(about["size"] / about["centre"]))  # as `FilePictures` decodes it
    return fit(image.convert("L") if len(about["mean"]) == 1 else image, about["size"], about["centre"])
