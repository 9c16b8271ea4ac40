"""COCO's format: what is read, what is left out and counted, and what is refused."""

import json
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image
from refusals import refuses

from mnemos.lab.vision.detection.coco import COCOConfig, find_split, read_coco
from mnemos.lab.vision.detection.scenes import encode, ground_truth, mirror, objects
from mnemos.lab.vision.detection.task import DetectionTask
from mnemos.types import InputError

MASK = np.zeros((20, 30), np.bool_)
MASK[5:9, 10:25] = True
POLYGON = [[10, 5, 25, 5, 25, 9, 10, 9]]
IMAGE = {"id": 9, "file_name": "a.jpg", "height": 20, "width": 30}
NAN = float("nan")


def counts_of(mask):
    """Uncompressed run lengths in column-major order, beginning with zeros, written as plainly as possible."""
    flat, found, value = mask.T.flatten().tolist(), [0], False
    for pixel in flat:
        if pixel != value:
            found.append(0)
            value = pixel
        found[-1] += 1
    return found


def annotation(number, segmentation, box=(10, 5, 15, 4), category=7, crowd=0):
    entry = {"id": number, "image_id": 9, "category_id": category, "bbox": list(box), "iscrowd": crowd, "area": 60}
    return entry if segmentation is None else entry | {"segmentation": segmentation}


def write(folder, annotations, images=None, **changes):
    (folder / "annotations").mkdir(exist_ok=True, parents=True)
    (folder / "val2017").mkdir(exist_ok=True)
    Image.fromarray(np.full((20, 30, 3), 200, np.uint8)).save(folder / "val2017" / "a.jpg")
    content = {
        "images": [IMAGE] if images is None else images,
        "annotations": annotations,
        "categories": [{"id": 90, "name": "brush"}, {"id": 7, "name": "train"}],
    }
    (folder / "annotations" / "instances_val2017.json").write_text(json.dumps(content | changes))
    return find_split(folder, "", training=False)


def test_polygons_and_both_forms_of_run_lengths_are_the_same_mask(tmp_path):
    lengths = {"size": [20, 30], "counts": counts_of(MASK)}
    found = [annotation(1, POLYGON), annotation(2, lengths), annotation(3, encode(MASK))]
    scenes = read_coco(*write(tmp_path, [*found, annotation(4, lengths, crowd=1)]))
    assert (scenes.classes, scenes.categories) == (("train", "brush"), (7, 90))
    assert scenes.has_masks
    assert scenes.image_id(0) == 9
    some = objects(scenes, 0)
    assert some.labels.tolist() == [1, 1, 1]  # without the crowd, which is scored
    assert len(scenes.annotations(0)) == 4
    assert all(np.array_equal(mask, MASK) for mask in some.masks)
    assert some.boxes[0].tolist() == [10, 5, 25, 9]
    assert scenes.picture(0).shape == (20, 30, 3)


def test_boxes_outside_are_cut_or_left_out_and_counted(tmp_path):
    boxes = [(-5, 2, 10, 4), (40, 2, 10, 4), (3, 3, 0, 4), (0, 0, 30, 20), (25, 8, 10, 4), (3, 18, 4, 4), (3, -1, 4, 4)]
    boxes += [(0, 0, 1, 1), (29, 19, 1, 1)]
    scenes = read_coco(*write(tmp_path, [annotation(i, None, box) for i, box in enumerate(boxes)]))
    cut = [[0, 2, 5, 6], [0, 0, 30, 20], [25, 8, 30, 12], [3, 18, 7, 20], [3, 0, 7, 3], [0, 0, 1, 1]]
    assert objects(scenes, 0).boxes.tolist() == [*cut, [29, 19, 30, 20]]
    assert objects(scenes, 0).masks is None
    assert scenes.describe() == (
        "1 picture with 7 objects of 1 class, boxes cut at the edge: 4, boxes without an area in the picture: 2"
    )
    assert "1 picture without an object" in read_coco(*write(tmp_path, [])).describe()


def test_a_box_of_a_rounding_error_is_left_out_because_mirroring_makes_it_none(tmp_path):
    found = [annotation(1, None, (-3.2, 5, 3.2000000000000006, 4)), annotation(2, None, (1, 5, 0.02, 4))]
    scenes = read_coco(*write(tmp_path, found))
    assert len(scenes.annotations(0)) == 1
    mirrored = mirror(scenes.picture(0), objects(scenes, 0))[1].boxes
    assert (mirrored[:, 2:] > mirrored[:, :2]).all()


def test_an_area_that_is_missing_is_that_of_the_segmentation_or_of_the_box(tmp_path):
    triangle = [[10, 5, 25, 5, 10, 9]]
    found = [annotation(1, triangle), annotation(2, encode(MASK), (10, 5, 20, 4)), annotation(3, None)]
    found.append(annotation(4, triangle))
    for one in found[:3]:
        del one["area"]
    scenes = read_coco(*write(tmp_path, found))
    areas = [one["area"] for one in scenes.annotations(0)]
    assert 25 < areas[0] < 35
    assert areas[1:] == [60, 60, 60]
    assert "objects without an area, measured here: 3" in scenes.describe()
    scenes = read_coco(*write(tmp_path, [annotation(1, None, crowd=None) | {"area": None}]))  # null: as if missing
    (one,) = ground_truth([(1, scenes, 0)])["annotations"]
    assert (one["iscrowd"], one["area"]) == (0, 60)
    assert read_coco(*write(tmp_path, [annotation(1, None) | {"area": 0}])).areas() == [0]


def test_a_held_out_split_without_an_object_is_refused(tmp_path):
    file, (photos, *_) = write(tmp_path, [annotation(1, None)])
    train = file.with_name("train.json")
    train.write_bytes(file.read_bytes())
    (tmp_path / "train").symlink_to(photos)
    settings = COCOConfig(str(tmp_path), "train", "val2017", masks=False)
    assert settings.files() == (train, file)
    _, places = write(tmp_path, [])
    refuses(r"valid split: expected an annotated object, .* found none", settings.build)
    file, _ = write(tmp_path, [annotation(1, None, crowd=1)])
    refuses(r"found groups \(iscrowd 1\) alone", settings.build)
    assert "1 object of 1 class, 1 of the objects groups" in read_coco(file, places).describe()
    write(tmp_path, [annotation(1, None)])
    for size in (-1, 1):
        refuses(rf"data.valid_size: expected 0 to 0, .* found {size}", replace(settings, valid_size=size).build)
    train.write_text(json.dumps(json.loads(train.read_text()) | {"annotations": []}))
    refuses("train split: expected at least one picture with an object, found none", settings.build)
    train.write_bytes(file.read_bytes())
    named = {metric.name for metric in settings.build().metrics}
    assert "box AP small" in named
    assert not {"box AP medium", "box AP large"} & named, "the held-out splits have no object of these sizes"


def test_an_object_whose_segmentation_encloses_nothing_is_left_out_and_one_without_is_named(tmp_path):
    nothing = [[[10, 5, 25, 9]], [[]], [[40, 5, 50, 5, 50, 9]], [[2, 6, 9, 6, 5, 6]]]
    nothing.append({"size": [20, 30], "counts": [600]})
    found = [annotation(number, one) for number, one in enumerate([POLYGON, *nothing])]
    scenes = read_coco(*write(tmp_path, found))
    assert scenes.has_masks
    assert [one["id"] for one in scenes.annotations(0)] == [0]
    assert "objects whose segmentation encloses nothing: 5" in scenes.describe()
    scenes = read_coco(*write(tmp_path, [*found, annotation(8, None)]))
    with pytest.raises(InputError, match=r"train split: .* annotation 8 of picture 9"):
        DetectionTask({"train": scenes, "valid": scenes, "test": scenes}, masks=True)


@pytest.mark.parametrize(
    ("annotations", "changes", "message"),
    [
        ([annotation(3, None, category=8)], {}, r"annotation 3 of a.jpg: expected a category of 7, 90, found 8"),
        ([annotation(3, None, box=(1, 2, 3, NAN))], {}, r"expected bbox \[x, y, width, height\]"),
        ([annotation(3, "all of it")], {}, "annotation 3 of a.jpg: segmentation: expected polygons"),
        ([annotation(3, {"size": [3, 2], "counts": [6]})], {}, r"run lengths of size \[20, 30\], found \[3, 2\]"),
        ([annotation(3, {"size": [20, 30], "counts": [5, 5]})], {}, "annotation 3 .* run lengths .* of 600 pixels"),
        ([annotation(3, [[10, 5, 25, 9], [1, 2, 3, 4, 5]])], {}, r"annotation 3 .* of finite numbers, found \[1, 2"),
        ([annotation(3, [[1, 1, 1e12, 1, 1e12, 5]])], {}, r"polygons within 100,000 pixels, found 1e\+12"),
        ([annotation(3, None, crowd="0")], {}, "annotation 3 of a.jpg: expected 0 or 1 as iscrowd, found '0'"),
        ([annotation(3, None) | {"area": "60"}], {}, "annotation 3 of a.jpg: expected at least 0 as area, found '60'"),
        ([annotation(3, None) | {"image_id": 1}], {}, "found annotation 3 of an unknown picture 1"),
        ([], {"categories": [{"id": 7, "name": "a"}, {"id": 7, "name": "b"}]}, "found 'a' and 'b' of id 7"),
        ([], {"images": [IMAGE | {"file_name": "b.jpg"}]}, "found no .*b.jpg; add them"),
        ([], {"images": []}, "expected at least one picture"),
        ([], {"images": [IMAGE, IMAGE]}, "found two of id 9"),
        ([], {"images": [{"id": 9}]}, "expected 'file_name' in every entry"),
        ([], {"images": [IMAGE | {"height": 0}]}, "a height and width of at least 1, found 0 and 30 of a.jpg"),
        ([], {"images": [IMAGE | {"width": 29.5}]}, "expected an integer as 'width', found 29.5; correct it"),
        ([], {"images": [IMAGE | {"id": True}]}, "expected an integer as 'id', found True"),
        ([], {"images": [IMAGE | {"id": "9"}]}, "expected an integer as 'id', found '9'"),
        ([], {"categories": {"id": 7}}, "COCO's lists images, annotations and categories, found no list 'categories'"),
        ([3], {}, "found no list 'annotations'; name a file of instances"),
    ],
)
def test_wrong_annotations_are_refused_by_name(tmp_path, annotations, changes, message):
    refuses(message, read_coco, *write(tmp_path, annotations, **changes))


def test_wrong_photos_and_classes_of_other_numbers_are_refused_by_name(tmp_path):
    file, places = write(tmp_path, [annotation(1, None)])
    assert read_coco(file, places, {7: "train", 8: "sky", 90: "brush"}).classes == ("train", "sky", "brush")
    refuses("expected category 90 .*'train', .* found 'brush'", read_coco, file, places, {7: "brush", 90: "train"})
    file, places = write(tmp_path, [], [IMAGE | {"height": 21}])
    refuses("expected 30 x 21 pixels, .* found 30 x 20; correct", read_coco(file, places).picture, 0)
    file.write_text("{")
    refuses("expected annotations as JSON", read_coco, file, places)


def test_photos_are_read_as_detection_reads_them_but_not_turned(tmp_path):
    """Transparent pixels on white, 16 bits scaled. Where annotations are of the turned photo, the error says so."""
    images = [{"id": i, "file_name": f"{i}.png", "height": 20, "width": 30} for i in (1, 2, 3)]
    file, places = write(tmp_path, [], images)
    Image.fromarray(np.full((20, 30), 257 * 100, np.uint16)).save(places[0] / "1.png")
    Image.fromarray(np.zeros((20, 30, 4), np.uint8)).save(places[0] / "2.png")
    turned = Image.fromarray(np.zeros((30, 20, 3), np.uint8))
    exif = turned.getexif()
    exif[0x0112] = 6
    turned.save(places[0] / "3.png", exif=exif)
    scenes = read_coco(file, places)
    assert (scenes.picture(0) == 100).all()
    assert (scenes.picture(1) == 255).all()
    refuses(r"expected 30 x 20 pixels, .* found 20 x 30; turn its pixels as its EXIF", scenes.picture, 2)
    sizes = [image | {"height": 30, "width": 20} if image["id"] == 3 else image for image in images]
    assert read_coco(*write(tmp_path, [], sizes)).picture(2).shape == (30, 20, 3)


def test_the_export_of_a_tool_that_lists_photos_with_their_folder_and_writes_numbers_as_floats(tmp_path):
    (_, (photos, *_)) = write(tmp_path, [])
    content = {
        "images": [{"id": 9.0, "file_name": "images\\a.jpg", "height": 20.0, "width": 30.0}],
        "annotations": [annotation(1, None, category=7.0) | {"image_id": 9.0}],
        "categories": [{"id": 7.0, "name": "train"}],
    }
    (tmp_path / "labels").mkdir()
    photos.rename(tmp_path / "labels" / "images")
    (tmp_path / "labels" / "train.json").write_text(json.dumps(content))
    scenes = read_coco(*find_split(tmp_path / "labels", "", training=True))
    assert scenes.image_id(0) == 9
    assert objects(scenes, 0).labels.tolist() == [1]


@pytest.mark.parametrize("layout", ["annotations/train.json", "train/_annotations.coco.json", "train.json"])
def test_other_layouts_are_found(tmp_path, layout):
    file, (photos, *_) = write(tmp_path / "coco", [annotation(1, None)])
    refuses(r"annotations/instances_train2017.json, found none", find_split, tmp_path / "coco", "", training=True)
    place = tmp_path / "other" / layout
    place.parent.mkdir(parents=True)
    place.write_bytes(file.read_bytes())
    pictures = tmp_path / "other" / ("train" if "/" in layout else "images")
    pictures.mkdir(exist_ok=True)
    (pictures / "a.jpg").write_bytes((photos / "a.jpg").read_bytes())
    assert len(read_coco(*find_split(tmp_path / "other", "", training=True))) == 1
