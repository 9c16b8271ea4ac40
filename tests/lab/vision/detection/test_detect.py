"""Objects in new photos: `mnemos.detect`, `mnemos detect`, and what is drawn."""

import json

import numpy as np
import pytest
import torch
from PIL import Image
from refusals import refuses

import mnemos
from mnemos.config import to_dict
from mnemos.lab.cli import main
from mnemos.lab.evaluate import predict as evaluated
from mnemos.lab.tasks.text import TextPreprocessing
from mnemos.lab.vision import detect
from mnemos.lab.vision.classifiers import PVTConfig
from mnemos.lab.vision.detect import DetectionPreprocessing
from mnemos.lab.vision.detection.scenes import decode
from mnemos.lab.vision.detectors import DetectorConfig, RegionConfig

SMALL = {"depths": (1, 1), "dims": (8, 16), "num_heads": (1, 2), "mlp_ratios": (2, 2), "reductions": (2, 1)}
IDS = (3, 90)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The folder of an untrained Mask R-CNN of two classes."""
    folder = tmp_path_factory.mktemp("model")
    config = DetectorConfig(
        PVTConfig(version=2, image=64, patch=4, **SMALL),
        classes=2,
        channels=8,
        sides=(64,),
        longest=96,
        regions=RegionConfig(proposals=10, sampled=8, dim=8, mask_dims=(8,)),
    )
    mnemos.save(config.build(), folder)
    about = DetectionPreprocessing(names=("cat", "dog"), categories=IDS)
    (folder / "preprocessing.json").write_text(json.dumps(to_dict(about)))
    return folder


def photo(file, size=(90, 60), **save):
    pixels = np.random.default_rng(0).integers(0, 255, (size[1], size[0], 3), np.uint8)
    Image.fromarray(pixels).save(file, **save)
    return file


def test_photos_are_drawn_and_listed(model, tmp_path, capsys):
    folder = tmp_path / "photos"
    (folder / "more").mkdir(parents=True)
    photo(folder / "000000000139.jpg")
    whole = photo(folder / "more" / "000000000285.png").read_bytes()
    (folder / "000000000632.png").write_bytes(whole[: len(whole) // 2])
    out = tmp_path / "out"
    assert main(["detect", str(model), str(folder), "--out", str(out), "--score", "0.2"]) == 1
    said = capsys.readouterr()
    assert "000000000632.png: expected an image" in said.err
    assert "objects in 3 photos; 1 of them could not be read" in said.err
    assert said.out.count("\n") == 2
    found = json.loads((out / "detections.json").read_text())
    assert {one["image_id"] for one in found} == {139, 285}, "COCO's names are ids"
    for one in found:
        assert set(one) == {"image_id", "category_id", "bbox", "score", "segmentation", "file_name"}
        assert one["category_id"] in IDS
        assert one["score"] >= 0.2
        assert one["segmentation"]["size"] == [60, 90]
    assert sorted(str(p.relative_to(out)) for p in out.rglob("*.jpg")) == ["000000000139.jpg", "more/000000000285.jpg"]
    assert main(["detect", str(model), str(folder / "000000000139.jpg"), "--out", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads((out / "detections.json").read_text())


class Found(torch.nn.Module):
    """Finds the same three objects in every image, in the left, the right and the lower part of 10 x 20 pixels."""

    score_thresh = 0.3

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1, dtype=torch.float64))
        self.read = []

    def forward(self, images):
        (image,) = images
        self.read.append((tuple(image.shape), image.dtype, float(image.max()), self.score_thresh))
        masks = torch.zeros(3, 1, *image.shape[1:])
        masks[0, 0, :5, 2:6], masks[1, 0, :, 10:], masks[2] = 0.6, 0.5, 1
        boxes = torch.tensor([[2.0, 0, 6, 5], [10, 1, 20, 9], [0, 5, 20, 8]])
        scores = torch.tensor([0.5, 0.75, 0.25])
        return [{"boxes": boxes, "scores": scores, "labels": torch.tensor([2, 1, 2]), "masks": masks}]


def test_what_a_detector_finds_is_told_in_pixels_of_the_photo(monkeypatch):
    about, found = DetectionPreprocessing(names=("cat", "dog"), categories=IDS), Found()
    white = np.full((10, 20, 3), 255, np.uint8)
    one, other = about.objects(found, white, 7, 0.5)
    assert [entry["category_id"] for entry in (one, other)] == [3, 90]
    assert (one["bbox"], one["score"], one["image_id"]) == ([10, 1, 10, 8], 0.75, 7)
    assert not decode(one["segmentation"]).any(), "above one half alone"
    assert np.argwhere(decode(other["segmentation"])).tolist() == [[y, x] for y in range(5) for x in range(2, 6)]
    assert about.describe([one, other]) == "cat 0.75  dog 0.50"
    assert about.describe([]) == "no object"
    assert found.read[0] == ((3, 10, 20), torch.float64, 1.0, pytest.approx(0.5, rel=1e-4))
    assert found.read[0][-1] < 0.5, "detectors leave out a score that equals their threshold"
    assert len(about.objects(found, white, 7, 0.0)) == 3
    assert found.read[1][-1] == found.score_thresh == 0.3
    monkeypatch.setattr(detect, "LONGEST", 20)
    entries = about.objects(found, np.full((30, 40, 3), 255, np.uint8), 7, 0.4)
    assert found.read[2][0] == (3, 15, 20)
    assert [entry["bbox"] for entry in entries] == [[20, 2, 20, 16], [4, 0, 8, 10]]
    assert decode(entries[1]["segmentation"]).nonzero()[0].max() == 9
    for height, width, read in ((1, 90, (3, 1, 20)), (6, 15, (3, 6, 15))):
        about.objects(found, np.zeros((height, width, 3), np.uint8), 7, 0.4)
        assert found.read[-1][0] == read
    monkeypatch.setattr(found, "forward", lambda images: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        about.objects(found, white, 7, 0.5)
    assert found.score_thresh == 0.3


def test_drawn_photos_and_objects_have_names_and_numbers_of_their_own(model, tmp_path, monkeypatch):
    found, exif = Found(), Image.Exif()
    exif[0x0112] = 6  # turned by 90 degrees
    monkeypatch.setattr(detect, "load", lambda run: found)
    for name in ("7.jpg", "a/sub/7.png", "a/sub/x.png", "a/sub/X.JPG"):
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        photo(tmp_path / "in" / name, (20, 10), exif=exif)
    told, out = [], tmp_path / "out"
    given = [tmp_path / "in", tmp_path / "in" / "a" / "sub" / "x.png"]
    photos = mnemos.detect(model, given, out=out, progress=lambda one, count: told.append((one, count)))
    drawn = [str(one.drawn.relative_to(out)) for one in photos]
    assert sorted(drawn) == ["7.jpg", *(f"a/sub/{name}.jpg" for name in ("7", "X", "x-2", "x-3"))]
    assert all(one.drawn.is_file() for one in photos)
    assert told == [(one, 5) for one in photos]
    assert {shape for shape, *_ in found.read} == {(3, 20, 10)}, "upright"
    listed = json.loads((out / "detections.json").read_text())
    assert [one["image_id"] for one in listed] == [1, 1, 2, 2, 3, 3, 4, 4, 5, 5], "7 is there twice"
    (one,) = mnemos.detect(model, str(tmp_path / "in" / "7.jpg"))
    assert [entry["image_id"] for entry in one.objects] == [7, 7]
    assert (one.drawn, one.text) == (None, "cat 0.75  dog 0.50")
    monkeypatch.setattr(evaluated, "load", lambda run: Found())
    ((answer,), (every,)) = (evaluated.predict(model, [one.file], top=top) for top in (1, None))
    assert (answer.text, every.text) == ("cat 0.75", "cat 0.75  dog 0.50  dog 0.25")
    assert [entry["image_id"] for entry in answer.details["objects"]] == [0]
    refuses("--top: expected at least 1, found 0", evaluated.predict, model, [one.file], top=0)
    assert [len(mnemos.detect(model, [one.file], score=score)[0].objects) for score in (0, 1)] == [3, 0]
    for score in (-0.01, 1.01):
        refuses("score: expected 0 to 1", mnemos.detect, model, [one.file], score=score)


def test_what_is_refused(model, tmp_path):
    photos = tmp_path / "photos"
    photos.mkdir()
    other = tmp_path / "lstm"
    mnemos.save(mnemos.LSTMConfig(vocab_size=4, dim=4, layers=1).build(), other)
    refuses("photos: expected at least one file or folder, found none; name some", mnemos.detect, model, [])
    refuses(r"photos: expected photos \(.*found none", mnemos.detect, model, [photos])
    photo(photos / "a.jpg")
    refuses("expected a folder outside .*photos", mnemos.detect, model, [photos], out=photos / "drawn")
    refuses("expected a folder outside .*photos", mnemos.detect, model, [photos / "a.jpg"], out=photos)
    (tmp_path / "text" / "model").mkdir(parents=True)
    (tmp_path / "text" / "preprocessing.json").write_text(json.dumps(to_dict(TextPreprocessing(8))))
    refuses("text: .*task is detection, found one of text", mnemos.detect, tmp_path / "text", [photos])
    refuses("lstm: expected a model that reads files .*detection", mnemos.detect, other, [photos])
