import numpy as np
import pytest
import torch
from refusals import refuses

pytest.importorskip("PIL", reason="images are read by Pillow")

from image_standins import need_timm, photo

from mnemos.generators import generator, global_generators
from mnemos.lab.tasks import augment
from mnemos.lab.tasks.augment import AugmentConfig, TimmAugmentation, augment_light, normalise
from mnemos.lab.tasks.image_task import IMAGENET


def noise(*shape):
    return np.random.default_rng(0).integers(0, 256, shape).astype(np.uint8)


def timms(size=8, classes=10, stored=False, colours=IMAGENET, **settings):
    need_timm()
    return TimmAugmentation(AugmentConfig("timm", **settings), size, classes, stored, *colours)


def test_normalise():
    pixels = noise(3, 5, 4, 3)
    mean, std = np.array(IMAGENET.mean), np.array(IMAGENET.std)
    expected = ((pixels / 255 - mean) / std).transpose(0, 3, 1, 2)
    found = normalise(pixels, *IMAGENET)
    assert found.dtype == torch.float32
    assert found.is_contiguous()
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("side", "channels"), [(17, 3), (8, 1)])
@pytest.mark.parametrize("flip", [True, False])
def test_light_crops_from_a_black_margin_and_flips(side, channels, flip):
    pixels = noise(200, side, side, channels)
    found = augment_light(pixels, generator(5), flip)
    margin = side // 8
    corners, flipped = set(), 0
    for image, made in zip(pixels, found, strict=True):
        padded = np.zeros((side + 2 * margin, side + 2 * margin, channels), np.uint8)
        padded[margin : margin + side, margin : margin + side] = image
        matches = [
            (top, left, turn)
            for top in range(2 * margin + 1)
            for left in range(2 * margin + 1)
            for turn in (False, True)
            if np.array_equal(padded[top : top + side, left : left + side][:, :: -1 if turn else 1], made)
        ]
        assert len(matches) == 1
        corners.add(matches[0][:2])
        flipped += matches[0][2]
    assert {top for top, _ in corners} == {left for _, left in corners} == set(range(2 * margin + 1))
    assert (70 < flipped < 130) if flip else flipped == 0
    assert np.array_equal(augment_light(pixels, generator(5), flip), found)
    assert not np.array_equal(augment_light(pixels, generator(6), flip), found)


@pytest.mark.parametrize("jitter", [False, True])
def test_the_papers_augmentation_is_timms(jitter):
    """Against the transform with DeiT's settings, drawing the same numbers; Cached Transformers adds colour jitter."""
    need_timm()
    from timm.data import Mixup, create_transform

    judge = create_transform(
        24,
        is_training=True,
        color_jitter=0.4,
        auto_augment="rand-m9-mstd0.5-inc1",
        interpolation="bicubic",
        re_prob=0.25,
        re_mode="pixel",
        re_count=1,
    )
    if jitter:  # after RandAugment
        from torchvision.transforms import ColorJitter

        judge.transforms.insert(3, ColorJitter(0.4, 0.4, 0.4))
    ours = timms(24, force_color_jitter=jitter)
    mix = Mixup(0.8, 1.0, label_smoothing=0.1, num_classes=10)
    labels = torch.arange(6)
    with global_generators() as seed:
        images = []
        for i in range(6):
            seed(1, i)
            expected = judge(photo(i))
            seed(1, i)
            images.append(ours.image(photo(i)))
            assert torch.equal(images[-1], expected)
        for i in range(4):  # mixup and cutmix both
            seed(2, i)
            expected = mix(torch.stack(images), labels)
            seed(2, i)
            found = ours.mix(torch.stack(images), labels)
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert found[1].shape == (6, 10)
    torch.testing.assert_close(found[1].sum(1), torch.ones(6))


def test_images_of_the_size_asked_for_are_padded_and_cropped(monkeypatch):
    """As DeiT does with CIFAR: nothing is scaled."""
    monkeypatch.setattr(augment, "_JITTER", 0.0)
    image = photo(3, 32, 32)
    padded = np.pad(np.array(image), ((4, 4), (4, 4), (0, 0)))
    ours = timms(32, stored=True, flip=False, operations="", erasing=0.0)
    choices = normalise(np.stack([padded[y : y + 32, x : x + 32] for y in range(9) for x in range(9)]), *IMAGENET)
    found = {int((choices == ours.image(image)).flatten(1).all(1).nonzero().item()) for _ in range(60)}
    assert len(found) > 20


def test_the_strongest_operation_there_is():
    """timm asks Pillow to keep no bits at all of a colour, which Pillow 13 refuses and which used to be black."""
    ours = timms(30, flip=False, operations="rand-m10-n1-p1.0-inc1", erasing=0.0)
    (operations,) = (step.ops for step in ours._transform.transforms if hasattr(step, "ops"))
    (operation,) = (one for one in operations if one.name == "PosterizeIncreasing")
    operation.prob = 1.0
    assert not np.array(operation(photo(1))).any()
    operation.magnitude = 6
    kept = np.array(operation(photo(1)))
    assert np.array_equal(kept, np.array(photo(1)) & 0b11000000)


def test_smoothing_and_odd_batches():
    images, labels = torch.randn(5, 3, 8, 8), torch.tensor([0, 1, 2, 3, 0])
    same, targets = timms(classes=4, mixup=0, cutmix=0).mix(images, labels)
    assert torch.equal(same, images)
    expected = torch.full((5, 4), 0.025)
    expected[range(5), labels] = 0.925
    torch.testing.assert_close(targets, expected)
    refuses(r"train.batch_size: expected an even one .* found 5", timms(cutmix=0).mix, images, labels)
    assert timms(mixup=0, cutmix=0, smoothing=0).mix(images, labels)[1] is labels


def test_wrong_settings_and_what_timm_cannot_do():
    for settings in ({"mixup": -0.1}, {"cutmix": float("nan")}, {"erasing": 1.5}, {"smoothing": 1.1}):
        refuses(rf"data.augment.{next(iter(settings))}: .*found", AugmentConfig("timm", **settings).check)
    refuses(r"data.augment.policy: .*3 .*found 1", timms, stored=True, colours=((0.1,), (0.3,)))
    for wrong in ("rand-m9-mstd0.5-xyz3", "nonsense"):
        refuses(f"data.augment.operations: .*'{wrong}'", timms, stored=True, operations=wrong)
