"""The task of detection: batches, the one training loop, what a finished run has, and what is refused."""

import json
import pickle
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from refusals import refuses
from torch import nn

import mnemos
from mnemos.lab.report import report
from mnemos.lab.run import checkpoint
from mnemos.lab.run.recipe import OptimConfig, Recipe, TrainConfig
from mnemos.lab.run.scored_batches import part
from mnemos.lab.run.session import run
from mnemos.lab.run.weights import Start
from mnemos.lab.vision.classifiers import PVTConfig
from mnemos.lab.vision.detection.coco import COCOConfig
from mnemos.lab.vision.detection.scenes import Objects, collate, ground_truth, mirror, objects
from mnemos.lab.vision.detection.shapes import ShapesConfig
from mnemos.lab.vision.detection.task import DetectorOutputs
from mnemos.lab.vision.detectors import DetectorConfig, RegionConfig
from mnemos.memory.gated_cache import caches

COCO = Path(__file__).parents[4].parent / "shared" / "data" / "coco-mini"
SMALL = {"depths": (1, 1), "dims": (8, 16), "num_heads": (1, 2), "mlp_ratios": (2, 2), "reductions": (2, 1)}
SHAPES = ShapesConfig(side=64, train=6, valid=3, test=5)


def detector(kind="mask-rcnn", version=2, **backbone):
    return DetectorConfig(
        PVTConfig(version=version, image=64, patch=4, **SMALL, **backbone),
        detector=kind,
        classes=0,
        channels=8,
        sides=(64,),
        longest=96,
        anchor=16,
        regions=RegionConfig(proposals=20, sampled=8, dim=8, mask_dims=(8,)),
    )


def recipe(kind="mask-rcnn", **fields):
    data = replace(SHAPES, masks=kind == "mask-rcnn")
    train = TrainConfig(steps=4, batch_size=2, eval_every=2, checkpoint_every=2, log_every=1)
    made = Recipe(model=detector(kind), data=data, optim=OptimConfig(lr=1e-3), train=train, name="tiny")
    return replace(made, **fields)


def test_batches_are_padded_and_come_back_whole():
    pictures = [np.full((4, 19, 3), 9, np.uint8), np.full((5, 3, 3), 7, np.uint8)]
    masks = np.zeros((1, 4, 19), np.bool_)
    masks[0, 1:3, 2:5] = True
    some = [
        Objects(np.array([[2, 1, 5, 3]], np.float32), np.array([3]), masks),
        Objects(np.zeros((0, 4), np.float32), np.zeros(0, np.int64), np.zeros((0, 5, 3), np.bool_)),
    ]
    batch = collate(pictures, some, [4, 8])
    assert (batch.pictures.shape, batch.masks.shape) == ((2, 3, 5, 19), (2, 1, 5, 3))
    images, targets = batch.images(torch.float64), batch.targets()
    assert [tuple(image.shape) for image in images] == [(3, 4, 19), (3, 5, 3)]
    assert bool((images[0] == 9 / 255).all())
    assert targets[0]["boxes"].tolist() == [[2, 1, 5, 3]]
    assert torch.equal(targets[0]["masks"], torch.from_numpy(masks.astype(np.uint8)))
    assert len(targets[1]["boxes"]) == 0
    mirrored, turned = mirror(pictures[0], some[0])
    assert turned.boxes.tolist() == [[14, 1, 17, 3]]
    assert np.nonzero(turned.masks[0].any(0))[0].tolist() == [14, 15, 16]
    assert np.array_equal(mirror(mirrored, turned)[1].masks, masks)


def test_training_batches_are_functions_of_their_number_and_mirror_half():
    task = ShapesConfig(side=64, train=40, valid=1, test=1).build()
    first, again = task.train_batch(3, 20, seed=5), task.train_batch(3, 20, seed=5)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first.rows, task.train_batch(3, 20, seed=6).rows)

    def straight(batch):
        return [torch.from_numpy(task.splits["train"].picture(i)).permute(2, 0, 1) for i in batch.rows.tolist()]

    def mirrored(batch):
        return [not torch.equal(a, b) for a, b in zip(batch.pictures, straight(batch), strict=True)]

    turned = mirrored(first)
    assert 4 < sum(turned) < 16
    assert turned != mirrored(task.train_batch(2, 20, seed=5))
    row = turned.index(True)
    assert torch.equal(first.pictures[row].flip(2), straight(first)[row])
    found = objects(task.splits["train"], int(first.rows[row]))
    assert torch.equal(first.targets()[row]["masks"].flip(2), torch.from_numpy(found.masks.astype(np.uint8)))


@pytest.mark.slow
def test_workers_make_the_same_batches_and_name_a_damaged_photo(tmp_path):
    drawn = ShapesConfig(side=32, train=6, valid=1, test=1).build().splits["train"]
    (tmp_path / "annotations").mkdir()
    for split in ("train2017", "val2017"):
        (tmp_path / split).mkdir()
        content = ground_truth((row, drawn, row) for row in range(6))
        for row, one in enumerate(content["images"]):
            one["file_name"] = f"{row}.png"
            Image.fromarray(drawn.picture(row)).save(tmp_path / split / f"{row}.png")
        (tmp_path / "annotations" / f"instances_{split}.json").write_text(json.dumps(content))
    alone, helped = (COCOConfig(str(tmp_path), workers=workers).build() for workers in (0, 1))
    pickle.loads(pickle.dumps(helped._makers))  # for workers that are not forked
    for index in (0, 1, 2):
        for a, b in zip(alone.train_batch(index, 2, 7), helped.train_batch(index, 2, 7), strict=True):
            assert torch.equal(a, b)
    helped.close()
    for (i, a), (j, b) in zip(*(one.chosen_batches("test", 4, {1}) for one in (alone, helped)), strict=True):
        assert (i, j, len(a.rows)) == (1, 1, 2)
        assert torch.equal(a.pictures, b.pictures)
        assert a.rows.tolist() == b.rows.tolist() == [10, 11]
    path = tmp_path / "val2017" / "5.png"
    path.write_bytes(path.read_bytes()[:60] + path.read_bytes()[-12:])
    refuses(r"5\.png: expected an image", list, helped.batches("test", 1))


def test_the_figures_of_perfect_detections_are_100():
    task = SHAPES.build()
    printed = [f"{kind} {figure}" for kind in ("box", "mask") for figure in ("AP", "AP50", "AP75")]
    assert [m.name for m in task.metrics if m.form] == printed
    assert task.metrics[0].name == "box AP"
    assert all(m.higher_is_better for m in task.metrics)
    assert len(task.metrics) == 16  # without those of sizes that a picture of 64 pixels cannot have
    assert task.unit == "pictures"
    (batch,) = task.batches("test", 5)
    perfect = []
    for one in batch.targets():
        scores = torch.ones(len(one["labels"]))
        perfect.append({**one, "scores": scores, "masks": one["masks"][:, None].float()})
    records = task.collect(None, DetectorOutputs({}, perfect), batch)
    assert {m.name: round(m.value(records), 6) for m in task.metrics if "AP" in m.name} == {
        f"{kind} {figure}": 100.0 for kind in ("box", "mask") for figure in ("AP", "AP50", "AP75", "AP small")
    }
    nothing = [{key: one[key][:0] for key in ("boxes", "labels", "masks", "scores")} for one in perfect]
    none = task.collect(None, DetectorOutputs({}, nothing), batch)
    assert task.metrics[0].value(none) == 0


@pytest.mark.slow
def test_a_cached_detector_trains_and_is_scored(tmp_path):
    folder, made, model = tmp_path / "run", recipe(), detector(cache=mnemos.GRC(length="paper"))
    data, train = replace(SHAPES, valid=1), replace(made.train, steps=1, test_rows=2)
    result = run(replace(made, model=model, data=data, train=train), folder, quiet=True)
    assert result["metric"] == "box AP"
    assert {"emptied", "exchanged", "closed"} <= set(result["controls"])
    assert result["update_flops"] > result["flops"] > 0
    found = json.loads((folder / "detections.json").read_text())
    assert found
    assert all({"image_id", "category_id", "bbox", "score", "segmentation"} == set(one) for one in found)
    shown = sorted((folder / "detections").glob("*.jpg"))
    assert len(shown) == result["scored_rows"]["test"] < SHAPES.test, "the pictures that are scored, and no others"
    assert {one["image_id"] for one in found} <= {int(file.stem.split("-")[1]) for file in shown}
    assert [row["class"] for row in result["by_class"]] == ["circle", "triangle", "rectangle", "star"]
    assert set(result["by_class"][0]) == {"class", "box AP", "mask AP"}
    loaded = mnemos.load(folder / "model")
    assert any(cache.cache.any() for cache in caches(loaded))
    assert json.loads((folder / "explain.json").read_text())["left"] == "the task has no pictures"
    page = report([folder]).read_text()
    assert page.count("data:image/jpeg;base64,") == len(shown)
    for text in ("Detections", "<code>", "box AR 100"):
        assert text in page
    (row,) = re.findall('<th scope="row">circle</th>.*', page)
    assert row.count("<td") == len(result["by_class"][0]) - 1


def test_losses_of_an_evaluation_leave_the_generators_and_modes():
    model = replace(detector(), classes=4).build().eval()
    task = SHAPES.build()
    (batch,) = task.batches("valid", 3)
    torch.manual_seed(3)
    before = torch.get_rng_state()
    with torch.no_grad():
        first, second = (task.forward(model, batch, None)[0] for _ in range(2))
    assert {k: v.item() for k, v in first.losses.items()} == {k: v.item() for k, v in second.losses.items()}
    assert len(first.losses) == 5
    assert torch.equal(torch.get_rng_state(), before)
    assert not any(module.training for module in model.modules())


@pytest.mark.parametrize("version", [1, 2])
def test_a_detector_starts_from_a_run_of_a_classifier_with_the_same_backbone_only(tmp_path, version):
    """Its caches start empty, whatever the classifier's hold; that of version 2 has none."""
    backbone = PVTConfig(version=version, image=64, **SMALL, cache=mnemos.GRC(length=4))
    classifier = replace(backbone, cache=backbone.cache if version == 1 else None).build()
    with torch.no_grad():
        for cache in caches(classifier):
            cache.cache.fill_(3.0)
    (tmp_path / "checkpoints").mkdir()
    checkpoint.write(checkpoint.path_of(tmp_path / "checkpoints", 1), {"model": dict(classifier.state_dict())})
    model = replace(detector(version=version), classes=4, backbone=backbone).build()
    start = Start.of(str(tmp_path), model)
    names = [n for n, _ in model.host.backbone.backbone.named_parameters() if version == 1 or ".grc." not in n]
    assert sorted(start.weights) == sorted(f"host.backbone.backbone.{name}" for name in names)
    start.load(model)
    assert all(torch.equal(model.state_dict()[name], value) for name, value in start.weights.items())
    assert all(not cache.cache.any() for cache in caches(model))
    own = model.state_dict()
    assert model.weights_from(own) == (own, "")
    deeper = replace(detector(version=version), classes=4, backbone=replace(backbone, depths=(1, 12))).build()
    refuses(r"parameters of host\.backbone\.backbone with their names and shapes", Start.of, str(tmp_path), deeper)


def test_retinanet_can_begin_with_the_finest_map():
    maps = {}
    for finest in (0, 1):
        model = replace(detector("retinanet"), classes=4, finest=finest, anchor=8).build()
        maps[finest] = [tuple(x.shape[-2:]) for x in model.host.backbone(torch.zeros(1, 3, 64, 64)).values()]
        sizes = model.host.anchor_generator.sizes
        assert len(sizes) == len(maps[finest])
        assert sizes[0] == (8, 10, 13)
    assert maps[0][0] == (16, 16)
    assert maps[1][0] == (8, 8)


def test_what_does_not_fit_is_refused(tmp_path):
    for kind, masks, message in (
        ("mask-rcnn", False, "with masks .* found boxes"),
        ("retinanet", True, "found masks to score"),
    ):
        refuses(message, run, recipe(kind, data=replace(SHAPES, masks=masks)), tmp_path / "run", quiet=True)
        assert not (tmp_path / "run").exists(), "so that the mended command can name the same folder"
        task = replace(SHAPES, masks=not masks).build()
        task.check_model(replace(detector(kind), classes=4).build().host)
        refuses("found 4; .*num_classes=5", task.check_model, replace(detector(kind), classes=3).build().host)
    task = SHAPES.build()
    (batch,) = task.batches("test", 5)
    boxes = [{**one, "scores": torch.ones(len(one["labels"]))} for one in batch.targets()]
    for one in boxes:
        del one["masks"]
    refuses("found one without", task.evaluate, "mask", task.collect(None, DetectorOutputs({}, boxes), batch))
    refuses("finest: expected 0 to 1", replace(detector(), classes=1, detector="retinanet", finest=2).build)


@pytest.mark.skipif(not COCO.is_dir(), reason="needs the shared data set coco-mini")
@pytest.mark.slow
def test_coco_in_its_own_folders(monkeypatch):
    """A few photos are scored, and no others decoded for it."""
    task = COCOConfig(folder=str(COCO), valid_size=20).build()
    assert [task.size(split) for split in ("train", "valid", "test")] == [140, 20, 119]
    assert (task.classes, len(task.metrics)) == (80, 24)
    batch = task.train_batch(0, 4, seed=0)
    ratios = batch.sizes[:, 1] / batch.sizes[:, 0]
    assert ratios.max() / ratios.min() < 1.6  # of similar proportions
    read, picture = [], task.splits["test"].picture
    monkeypatch.setattr(task.splits["test"], "picture", lambda row: read.append(row) or picture(row))
    rows = [row - 20 for batch in part(task, "test", 4, 5) for row in batch.rows.tolist()]
    assert len(rows) == 8
    assert read[4:] == rows, "after the first batch, which shows that no state is carried"


def test_groups_are_normalised_after_the_convolutions_of_pyramid_and_heads():
    """A narrow RetinaNet's heads differ by place from the beginning; without, weights of 0.01 let nothing through."""
    spread = []
    for group_norm in (False, True):
        torch.manual_seed(0)
        model = replace(detector("retinanet"), classes=4, channels=16, group_norm=group_norm).build().eval()
        with torch.no_grad():
            head, maps = model.host.head, model.host.backbone(torch.rand(1, 3, 64, 64))
            spread.append(float(head.classification_head.conv(next(iter(maps.values()))).std()))
        assert sum(isinstance(m, nn.GroupNorm) for m in model.modules()) == (10 if group_norm else 0)
    assert spread[0] < 1e-4 < 0.1 < spread[1]
    masked = replace(detector(), classes=4, group_norm=True).build()
    assert sum(isinstance(m, nn.GroupNorm) for m in masked.modules()) == 5  # two for each map, one in the mask branch


def test_the_parts_of_a_detector_have_the_configured_sizes():
    model = replace(detector(), classes=4, channels=12, group_norm=True).build()
    assert not model.rows_independent
    host, image = model.host.eval(), torch.rand(3, 64, 64)
    with torch.no_grad():
        assert torch.equal(model([image])[0]["scores"], host([image])[0]["scores"])
    rpn, heads = host.rpn, host.roi_heads
    assert rpn._pre_nms_top_n == rpn._post_nms_top_n == {"training": 40, "testing": 20}
    assert rpn.anchor_generator.sizes == ((16,), (32,), (64,))
    for pool, side in ((heads.box_roi_pool, 7), (heads.mask_roi_pool, 14)):
        assert (pool.featmap_names, pool.output_size, pool.sampling_ratio) == (["0", "1"], (side, side), 2)
    assert (heads.box_head.fc6.in_features, heads.box_head.fc6.out_features) == (12 * 49, 8)
    assert (heads.box_predictor.cls_score.out_features, heads.mask_predictor.mask_fcn_logits.out_channels) == (5, 5)
    assert (host.transform.max_size, heads.fg_bg_sampler.batch_size_per_image) == (96, 8)
    assert {m.num_groups for m in host.modules() if isinstance(m, nn.GroupNorm)} == {1}, "12 channels are not divided"
    host = replace(detector("retinanet"), classes=4, channels=16, group_norm=True).build().host
    head = host.head.classification_head
    assert (host.detections_per_img, head.num_classes, head.num_anchors) == (100, 5, 9)
    assert {m.num_groups for m in host.modules() if isinstance(m, nn.GroupNorm)} == {2}
    least = replace(detector("retinanet"), classes=1, channels=1, longest=1, anchor=1, sides=(1,))
    assert least.build()
    for name, value in (("classes", 0), ("channels", 0), ("longest", 0), ("anchor", 0), ("finest", -1)):
        refuses(f"{name}: expected", replace(least, **{name: value}).build)
