"""What is found in image files before training, and what is found when they are decoded."""

import pytest

pytest.importorskip("PIL", reason="images are read by Pillow")

from image_standins import photo

from mnemos.lab.tasks.pictures import check_image_files
from mnemos.types import InputError


def written(folder, name, **options) -> bytes:
    photo(5, 200, 150).save(folder / name, **options)
    return (folder / name).read_bytes()


@pytest.mark.parametrize("name", ["a.jpg", "a.png"])
@pytest.mark.parametrize("kept", [0.5, 0.98])
def test_a_truncated_file_is_named_though_its_header_is_intact(tmp_path, name, kept):
    whole = written(tmp_path, name)
    check_image_files([str(tmp_path / name)])
    (tmp_path / name).write_bytes(whole[: int(kept * len(whole))])
    with pytest.raises(InputError, match=rf"{name}: expected an image.*truncated.*; replace or remove it") as raised:
        check_image_files([str(tmp_path / name)])
    assert str(raised.value).count(str(tmp_path)) == 1


def test_data_behind_the_end_of_an_image_are_allowed(tmp_path):
    """Phones write a film or a second picture behind a photo."""
    for name in ("a.jpg", "a.png", "a.bmp"):
        (tmp_path / name).write_bytes(written(tmp_path, name) + bytes(200))
    check_image_files([str(tmp_path / name) for name in ("a.jpg", "a.png", "a.bmp")])


def test_an_intact_file_is_not_decoded(tmp_path, monkeypatch):
    def decoded(*_: object, **__: object) -> None:
        raise AssertionError

    written(tmp_path, "a.jpg")
    written(tmp_path, "b.png")
    monkeypatch.setattr("mnemos.lab.tasks.pictures.read_image", decoded)
    check_image_files([str(tmp_path / "a.jpg"), str(tmp_path / "b.png")])


def test_bad_files_are_counted(tmp_path):
    whole = written(tmp_path, "a.jpg")
    (tmp_path / "b.jpg").write_bytes(whole[:999])
    (tmp_path / "c.jpg").write_bytes(b"no image")
    with pytest.raises(InputError, match=r"b.jpg: .*; so are 1 more of the 3 files that were opened; replace"):
        check_image_files([str(tmp_path / f"{name}.jpg") for name in "abc"])
