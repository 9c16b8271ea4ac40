"""Pictures as sequences of bytes."""

import numpy as np
import pytest
import torch
from image_standins import write_photos
from refusals import refuses
from test_images import images, write_mnist

import mnemos
from mnemos.lab.tasks.images import DigitsConfig, MNISTConfig
from mnemos.lab.tasks.photos import PhotosConfig
from mnemos.lab.tasks.pixels import PixelsConfig, write_pictures
from mnemos.lab.tasks.text import TextConfig


def test_mnist_is_read_row_by_row(tmp_path):
    config = PixelsConfig(MNISTConfig(str(write_mnist(tmp_path / "mnist")), valid_size=10, layout="image"))
    task = config.build()
    assert (task.metrics[0].name, task.vocab_size, task.classes, task.max_length) == ("loss", 256, 0, 783)
    assert [task.images(split) for split in ("train", "valid", "test")] == [50, 10, 20]
    assert task.size("test") == 20 * 783
    batches = list(task.batches("test", 8))
    assert [len(b.inputs) for b in batches] == [8, 8, 4]
    inputs, targets = torch.cat([b.inputs for b in batches]), torch.cat([b.targets for b in batches])
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    whole = torch.cat([inputs, targets[:, -1:]], 1)
    assert sorted(map(bytes, whole.numpy().astype(np.uint8))) == sorted(map(bytes, images(20).reshape(20, 784)))
    again = task.pictures(whole)
    assert again.shape == (20, 28, 28, 1)
    assert np.array_equal(again[3].reshape(-1), task.bytes("test", [3])[0])
    epoch = torch.cat([task.train_batch(i, 10, 3).inputs for i in range(5)])
    assert torch.equal(config.build().train_batch(4, 10, 3).inputs, epoch[40:])
    assert len({bytes(row) for row in epoch.numpy().astype(np.uint8)}) == 50


def test_with_a_start_token_every_byte_is_predicted(tmp_path):
    images = MNISTConfig(str(write_mnist(tmp_path / "mnist")), valid_size=10, layout="image")
    plain, task = PixelsConfig(images).build(), PixelsConfig(images, start=True).build()
    assert (task.vocab_size, task.max_length, task.size("test")) == (256, 784, 20 * 784)
    assert task.example().inputs.shape == (1, 784)
    batch, without = next(task.batches("test", 20)), next(plain.batches("test", 20))
    assert (batch.inputs[:, 0] == 0).all()
    assert torch.equal(batch.inputs[:, 1:], batch.targets[:, :-1])
    assert torch.equal(batch.inputs[:, 2:], without.inputs[:, 1:])
    assert torch.equal(batch.targets[:, 1:], without.targets)
    assert np.array_equal(task.pictures(batch.targets)[3].reshape(-1), task.bytes("test", [3])[0])


def coloured(folder, size):
    photos = write_photos(folder, {"a": 5, "b": 5})
    return PixelsConfig(PhotosConfig(str(photos), size=size, held_out=0.2)).build()


@pytest.mark.parametrize(("size", "completed"), [(2, 3), (2, 0), (1, 3)])
def test_pictures_are_generated_and_the_lower_halves_of_others(tmp_path, size, completed):
    task = coloured(tmp_path, size)
    model = mnemos.Transformer(vocab_size=256, dim=8, num_heads=1, layers=1, attention="linear").eval()
    found = write_pictures(model, task, tmp_path, count=2, completed=completed)
    assert found["samples"].shape == (2, size, size, 3)
    assert ("completions" in found) is (size == 2 and completed > 0), "a picture of one row has no half"
    if "completions" in found:
        originals, upper = found["originals"], slice(size // 2)
        assert len(originals) == task.images("test") < completed
        assert (found["completions"][:, :, upper] == originals[:, None, upper]).all()


def test_colours_come_after_each_other(tmp_path):
    task = coloured(tmp_path, 4)
    scored = PixelsConfig(PhotosConfig(str(tmp_path), size=4)).build_to_score("test")
    assert (scored.whole, scored.size("test"), scored.about[0][:11]) == (True, 10 * 47, "scored: all")
    assert (task.shape, task.max_length) == ((4, 4, 3), 47)
    picture = task.pictures(task.bytes("train", [0]))[0]
    assert np.array_equal(task.bytes("train", [0])[0, :6], [*picture[0, 0], *picture[0, 1]])


def test_tasks_that_are_no_images_are_refused():
    refuses(r"data.images: .*'digits'.*data.images.layout image", PixelsConfig(DigitsConfig()).build)
    refuses(r"data.images: .*'text'.*mnist, cifar or photos", PixelsConfig(TextConfig(__file__, held_out=0.4)).build)
