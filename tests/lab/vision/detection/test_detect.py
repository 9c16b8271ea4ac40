"""Objects in new photos: `mnemos.detect`, `mnemos detect`, and what is drawn."""

import json

import numpy as np
import pytest
from PIL import Image

import mnemos
from mnemos.config import to_dict
from mnemos.lab.cli import main
from mnemos.lab.evaluate.predict import read_preprocessing
from mnemos.lab.vision.classifiers import PVTConfig
from mnemos.lab.vision.detection import preprocessing
from mnemos.lab.vision.detection.detections import overlay
from mnemos.lab.vision.detection.preprocessing import DetectionPreprocessing
from mnemos.lab.vision.detection.scenes import decode, encode
from mnemos.lab.vision.detectors import DetectorConfig, RegionConfig
from mnemos.types import InputError

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
    assert "1 of 3 photos could not be read" in said.err
    assert said.out.count("\n") == 2
    found = json.loads((out / "detections.json").read_text())
    assert {one["image_id"] for one in found} == {139, 285}, "COCO's names are ids"
    for one in found:
        assert set(one) == {"image_id", "category_id", "bbox", "score", "segmentation", "file_name"}
        assert one["category_id"] in IDS
        assert one["score"] >= 0.2
        assert one["segmentation"]["size"] == [60, 90]
    assert sorted(str(p.relative_to(out)) for p in out.rglob("*.jpg")) == [
        "000000000139.jpg",
        "more/000000000285.jpg",
    ]
    assert main(["detect", str(model), str(folder / "000000000139.jpg"), "--out", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads((out / "detections.json").read_text())


def test_photos_are_upright_and_large_ones_are_read_smaller(model, tmp_path, monkeypatch):
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by 90 degrees
    file = photo(tmp_path / "a.jpg", exif=exif)
    (one,) = mnemos.detect(model, [file], score=0.0)
    assert one.objects[0]["segmentation"]["size"] == [90, 60]
    assert one.objects[0]["image_id"] == 1
    assert one.drawn is None
    monkeypatch.setattr(preprocessing, "LONGEST", 45)
    (small,) = mnemos.detect(model, [file], score=0.0)
    assert small.objects[0]["segmentation"]["size"] == [90, 60]
    half = preprocessing.read_image(file).resize((30, 45), Image.Resampling.BICUBIC)
    found = read_preprocessing(model).objects(mnemos.load(model).eval(), np.array(half), 1, 0.0)
    boxes = [np.array([entry["bbox"] for entry in entries]) for entries in (small.objects, found)]
    np.testing.assert_allclose(boxes[0], 2 * boxes[1], rtol=1e-5, err_msg="boxes are in the photo's pixels")


def test_a_photo_too_thin_for_the_detector_is_named_and_others_are_read(model, tmp_path):
    thin, other = photo(tmp_path / "thin.png", (300, 2)), photo(tmp_path / "other.png")
    found = mnemos.detect(model, [thin, other], score=0.0, out=tmp_path / "out")
    assert "thin.png: expected a photo whose sides differ by less than a factor of 96" in found[0].problem
    assert found[1].objects


def test_the_least_score_belongs_to_what_is_found(model, tmp_path):
    file = photo(tmp_path / "a.png")
    (every,) = mnemos.detect(model, [file], score=0.0)
    (some,) = mnemos.detect(model, [file], score=every.objects[2]["score"])
    assert some.objects == every.objects[:3]


def test_what_is_refused(model, tmp_path):
    photos = tmp_path / "photos"
    photos.mkdir()
    with pytest.raises(InputError, match=r"photos: expected photos \(.*found none"):
        mnemos.detect(model, [photos])
    photo(photos / "a.jpg")
    with pytest.raises(InputError, match=r"expected a folder outside .*photos"):
        mnemos.detect(model, [photos], out=photos / "drawn")
    with pytest.raises(InputError, match=r"other than that of the photos"):
        mnemos.detect(model, [photos / "a.jpg"], out=photos)
    with pytest.raises(InputError, match=r"score: expected 0 to 1.*found 50"):
        mnemos.detect(model, [photos], score=50)
    with pytest.raises(InputError, match=r"expected a list of photos"):
        mnemos.detect(model, str(photos))
    other = tmp_path / "lstm"
    mnemos.save(mnemos.LSTMConfig(vocab_size=4, dim=4, layers=1).build(), other)
    with pytest.raises(InputError, match=r"lstm: expected a model that reads files .*detection"):
        mnemos.detect(other, [photos])


def test_no_box_crosses_a_name():
    grey, names = np.full((400, 400, 3), 128, np.uint8), {1: "cat", 2: "dog"}
    cat = {"category_id": 1, "bbox": [100, 200, 90, 90], "score": 0.4}
    dog = {"category_id": 2, "bbox": [120, 100, 150, 150], "score": 0.9}  # its left side goes through the cat's name
    name = np.s_[185:199, 100:140]
    alone, both = overlay(grey, [cat], names)[name], overlay(grey, [cat, dog], names)[name]
    drawn = (alone != 128).any(-1)
    assert drawn[:, 20:23].any(), "the place that the line goes through"
    assert (both[drawn] == alone[drawn]).all()


def test_objects_are_drawn_where_they_are():
    grey = np.full((50, 80, 3), 128, np.uint8)
    mask = np.zeros((50, 80), np.bool_)
    mask[25:40, 30:60] = True
    one = {"category_id": 3, "bbox": [30, 25, 30, 15], "segmentation": encode(mask), "score": 0.5}
    drawn = overlay(grey, [one], {3: "cat"})
    assert drawn.shape == (400, 640, 3)
    changed = (drawn != 128).any(-1)
    assert changed[201:319, 241:479].all()
    changed[150:321, 239:481] = False  # the box, its mask and its name above
    assert not changed.any()
    assert overlay(grey, [one], {3: "cat"}, longest=40).shape == (25, 40, 3)
    assert (overlay(grey, [], {3: "cat"}, longest=80) == grey).all()
    assert overlay(grey[:1, :1].repeat(900, 1), [], {}).shape == (4, 3600, 3), "enlarged no further"
    assert overlay(grey[:1, :1].repeat(70_000, 1), [], {}).shape == (1, 65_500, 3), "no larger than a JPEG can be"
    assert np.array_equal(decode({**one["segmentation"], "counts": one["segmentation"]["counts"].encode()}), mask)
