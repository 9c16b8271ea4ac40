"""Small folders of images for tests of the data room."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mnemos.libraries import timm
from mnemos.types import InputError


def photo(seed: int, width: int = 40, height: int = 30) -> Image.Image:
    """Smooth colours, so that a JPEG of it keeps them."""
    small = np.random.default_rng(seed).integers(0, 256, (3, 4, 3)).astype(np.uint8)
    return Image.fromarray(small).resize((width, height), Image.Resampling.BILINEAR)


def write_photos(folder: Path, classes: dict[str, int], seed: int = 0, ending: str = "png") -> Path:
    """Write FOLDER/CLASS/NUMBER.png; `classes` gives the number of images per class."""
    for label, (name, count) in enumerate(classes.items()):
        (folder / name).mkdir(parents=True, exist_ok=True)
        for i in range(count):
            photo(1000 * seed + 100 * label + i).save(folder / name / f"{i:03d}.{ending}")
    return folder


def need_timm() -> None:
    """Import timm, or skip the test."""
    try:
        timm()
    except InputError as error:
        pytest.skip(str(error))
