import io
import multiprocessing
import pickle

import numpy as np
import pytest
from refusals import refuses

pytest.importorskip("PIL", reason="images are read by Pillow")

from image_standins import need_timm, photo, write_photos
from PIL import Image

from mnemos.lab.tasks import pictures
from mnemos.lab.tasks.pictures import ArrayPictures, FilePictures, fit, parse_image, read_image


def saved(image, kind, **options):
    data = io.BytesIO()
    image.save(data, kind, **options)
    return data.getvalue()


@pytest.mark.parametrize("extent", [(40, 30), (30, 41), (7, 5), (3, 200), (61, 203), (50, 50)])
@pytest.mark.parametrize(("size", "centre"), [(8, 1.0), (17, 0.875), (64, 0.875)])
def test_fit_is_what_timm_evaluates_on(extent, size, centre):
    need_timm()
    from timm.data import create_transform

    judge = create_transform(size, is_training=False, interpolation="bicubic", crop_pct=centre, normalize=False)
    image = photo(3, *extent)
    found, expected = fit(image, size, centre), judge(image).numpy().transpose(1, 2, 0)
    assert found.shape == (size, size, 3)
    assert np.abs(found.astype(int) - expected.astype(int)).max() <= 1
    assert fit(image.convert("L"), size, centre).shape == (size, size, 1)


def test_a_long_image_is_cut_before_it_is_scaled():
    """Scaled as a whole it would have 2·10⁹ pixels."""
    assert fit(Image.new("RGB", (1, 40_000), (9, 8, 7)), 224, 1.0).tolist()[0][0] == [9, 8, 7]


def test_colours():
    image = photo(5)
    grey = np.array(parse_image(saved(image.convert("L"), "PNG"), "x"))
    assert (grey == np.array(image.convert("L"))[..., None]).all()
    assert np.array_equal(np.array(parse_image(saved(image.convert("1"), "PNG"), "x"))[..., 0] > 0, image.convert("1"))
    palette = image.quantize(8)
    assert np.array_equal(parse_image(saved(palette, "PNG"), "x"), palette.convert("RGB"))
    deep = np.linspace(0, 65535, 1200).astype(np.uint16).reshape(30, 40)
    assert np.array_equal(parse_image(saved(Image.fromarray(deep), "PNG"), "x").getchannel(1), (deep // 257))


@pytest.mark.parametrize("kind", [np.float32, np.int32, np.int16])
def test_values_whose_white_is_unknown_are_refused(kind):
    refuses("write 8 or 16 bits", parse_image, saved(Image.fromarray(np.eye(3, dtype=kind)), "TIFF"), "x")


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_transparent_places_are_white(mode):
    image = Image.new("RGBA", (4, 4), (0, 0, 0, 0))
    image.putpixel((1, 2), (10, 10, 10, 255))
    if mode == "P":
        small = Image.new("P", (4, 4), 0)
        small.putpalette([0, 0, 0, 10, 10, 10])
        small.putpixel((1, 2), 1)
        data = saved(small, "PNG", transparency=0)
    else:
        data = saved(image.convert(mode), "PNG")
    found = np.array(parse_image(data, "x"))
    assert found[2, 1].tolist() == [10, 10, 10]
    assert (np.delete(found.reshape(16, 3), 9, 0) == 255).all()


def test_upright():
    """A camera's sideways photo, as its EXIF says; also one that is decoded smaller."""
    image, exif = photo(7, 48, 32), Image.Exif()
    exif[0x0112] = 6
    expected = np.array(image.transpose(Image.Transpose.ROTATE_270)).astype(int)
    data = saved(image, "JPEG", exif=exif, quality=95)
    found = np.array(parse_image(data, "x"))
    assert found.shape == expected.shape == (48, 32, 3)
    assert np.abs(found - expected).mean() < 4
    assert parse_image(data, "x", 10).size == (16, 24)


def test_a_large_jpeg_is_decoded_smaller_but_not_too_small():
    data = saved(photo(1, 400, 300), "JPEG")
    for least, size in ((0, 400), (300, 400), (151, 400), (150, 200), (100, 200), (75, 100), (30, 50), (1, 50)):
        assert parse_image(data, "x", least).size[0] == size
    assert parse_image(saved(photo(1, 400, 300), "PNG"), "x", 30).size == (400, 300)


@pytest.mark.parametrize("content", [b"", b"no image at all", "cut", "noise"])
def test_an_unreadable_file_is_named(tmp_path, content):
    whole = saved(photo(1), "JPEG")
    path = tmp_path / "broken.jpg"
    path.write_bytes({"cut": whole[: len(whole) // 2], "noise": whole[:20] + bytes(400)}.get(content, content))
    refuses(r"broken.jpg: (?!.*BytesIO).*\(\w.*\)", read_image, path)
    refuses(r"gone.jpg: .*\(No such file", read_image, tmp_path / "gone.jpg")


def test_pictures_from_files_are_kept_while_they_fit(tmp_path, monkeypatch):
    paths = sorted(map(str, write_photos(tmp_path, {"a": 3, "b": 2}).glob("*/*")))
    reads = []
    original = pictures.read_image
    monkeypatch.setattr(pictures, "read_image", lambda *a: (reads.append(a), original(*a))[1])
    found = FilePictures(paths, np.zeros(5), 8, 1.0)
    expected = [fit(original(paths[i]), 8, 1.0) for i in range(5)]
    for _ in range(2):
        for i in (4, 0, 2, 1, 3):
            assert np.array_equal(found.fitted(i), expected[i])
    assert len(reads) == 5
    again = pickle.loads(pickle.dumps(found))
    assert np.array_equal(again.fitted(2), expected[2])
    monkeypatch.setattr(pictures, "CACHED", 5 * 192 - 1)
    lazy = FilePictures(paths, np.zeros(5), 8, 1.0)
    for _ in range(2):
        assert np.array_equal(lazy.fitted(1), expected[1])
    assert len(reads) == 8


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="shares the memory of its parent")
def test_what_a_worker_decodes_is_decoded_for_all(tmp_path, monkeypatch):
    """Otherwise each worker would decode and hold all pictures, and each evaluation, with new workers, decode anew."""
    paths = sorted(map(str, write_photos(tmp_path, {"a": 3}).glob("*/*")))
    found = FilePictures(paths, np.zeros(3), 8, 1.0)
    worker = multiprocessing.get_context("fork").Process(target=found.fitted, args=(1,))
    worker.start()
    worker.join()
    expected = pictures.read_fitted(paths[1], 8, 1.0)
    monkeypatch.setattr(pictures, "read_image", None)
    assert np.array_equal(found.fitted(1), expected)


def test_pictures_from_arrays():
    pixels = np.random.default_rng(0).integers(0, 256, (4, 10, 10, 3)).astype(np.uint8)
    whole, small = ArrayPictures(pixels, np.zeros(4), 10, 0.875), ArrayPictures(pixels, np.zeros(4), 6, 0.875)
    assert whole.stored
    assert not small.stored
    assert np.array_equal(whole.fitted(2), pixels[2]), "stored at the size asked for: as it is"
    assert np.array_equal(small.fitted(2), fit(Image.fromarray(pixels[2]), 6, 0.875))
    assert np.array_equal(whole.image(1), pixels[1])
    grey = ArrayPictures(pixels[..., :1], np.zeros(4), 6, 1.0)
    assert grey.image(0).mode == "L"
    assert grey.fitted(0).shape == (6, 6, 1)
