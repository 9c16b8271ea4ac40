"""Objects in new photos: `mnemos.detect`, `mnemos detect`, and what is drawn."""

import json

import numpy as np
import pytest
from PIL import Image

import mnemos
from mnemos.config import to_dict
from mnemos.lab.cli import main
from mnemos.lab.evaluate.predict import read_preprocessing
from mnemos.lab.vision import detect
from mnemos.lab.vision.classifiers import PVTConfig
from mnemos.lab.vision.detect import DetectionPreprocessing
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


def test_photos_are_upright_and_large_ones_are_read_smaller(model, tmp_path, monkeypatch):
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by 90 degrees
    file = photo(tmp_path / "a.jpg", exif=exif)
    (one,) = mnemos.detect(model, [file], score=0.0)
    (some,) = mnemos.detect(model, [file], score=one.objects[2]["score"])
    assert some.objects == one.objects[:3]
    assert one.objects[0]["segmentation"]["size"] == [90, 60]
    assert one.objects[0]["image_id"] == 1
    assert one.drawn is None
    monkeypatch.setattr(detect, "LONGEST", 45)
    (small,) = mnemos.detect(model, [file], score=0.0)
    assert small.objects[0]["segmentation"]["size"] == [90, 60]
    half = detect.read_image(file).resize((30, 45), Image.Resampling.BICUBIC)
    found = read_preprocessing(model).objects(mnemos.load(model).eval(), np.array(half), 1, 0.0)
    boxes = [np.array([entry["bbox"] for entry in entries]) for entries in (small.objects, found)]
    np.testing.assert_allclose(boxes[0], 2 * boxes[1], rtol=1e-5, err_msg="boxes are in the photo's pixels")


def test_a_detector_reads_white_as_one(model):
    detector, read = mnemos.load(model).eval(), []
    detector.host.register_forward_pre_hook(lambda _, given: read.append(float(given[0][0].max())))
    read_preprocessing(model).objects(detector, np.full((20, 30, 3), 255, np.uint8), 1, 0.0)
    assert read == [1.0]


def test_what_is_refused(model, tmp_path):
    photos = tmp_path / "photos"
    photos.mkdir()
    other = tmp_path / "lstm"
    mnemos.save(mnemos.LSTMConfig(vocab_size=4, dim=4, layers=1).build(), other)

    def refuses(words, model, given, **options):
        with pytest.raises(InputError, match=words):
            mnemos.detect(model, given, **options)

    refuses(r"photos: expected photos \(.*found none", model, [photos])
    photo(photos / "a.jpg")
    refuses("expected a folder outside .*photos", model, [photos], out=photos / "drawn")
    refuses("expected a folder outside .*photos", model, [photos / "a.jpg"], out=photos)
    refuses("score: expected 0 to 1.*found 50", model, [photos], score=50)
    refuses("lstm: expected a model that reads files .*detection", other, [photos])
