import multiprocessing
import os
import pickle
import random
import signal

import numpy as np
import pytest
import torch

pytest.importorskip("PIL", reason="images are read by Pillow")

from image_standins import need_timm, write_photos

from mnemos.lab.tasks.augment import AugmentConfig, normalise
from mnemos.lab.tasks.image_task import IMAGENET
from mnemos.lab.tasks.photos import PhotosConfig
from mnemos.lab.tasks.prefetch import prefetch
from mnemos.lab.tasks.row_order import BatchKey
from mnemos.types import InputError

POLICIES = ["none", "light", "timm"]
CLASSES = {"ant": 9, "bee": 14, "cow": 6}  # held out: 1, 1 and 1 each


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_photos(tmp_path_factory.mktemp("photos"), CLASSES)


def task(folder, policy="light", workers=0, size=16, **settings):
    if policy == "timm":
        need_timm()
    return PhotosConfig(str(folder), size, workers=workers, augment=AugmentConfig(policy), **settings).build()


def same(a, b):
    return torch.equal(a.inputs, b.inputs) and torch.equal(a.targets, b.targets)


@pytest.mark.parametrize("policy", POLICIES)
def test_evaluation_sees_every_picture_once_as_it_is(folder, policy):
    made = task(folder, policy)
    for split, batch_size in (("test", 2), ("valid", 3), ("test", 100)):
        batches = list(made.batches(split, batch_size))
        assert [len(b.targets) for b in batches] == {2: [2, 1], 3: [3], 100: [3]}[batch_size]
        inputs, targets = torch.cat([b.inputs for b in batches]), torch.cat([b.targets for b in batches])
        assert sorted(targets.tolist()) == [0, 1, 2]
        pictures = np.stack([made.picture(split, i) for i in range(3)])
        assert pictures.dtype == np.uint8
        assert torch.equal(inputs, normalise(pictures, *IMAGENET)), "in the order of `picture`"
        assert all(b.mask is None and b.reset is None for b in batches)


def test_without_augmentation_an_epoch_is_the_training_split(folder):
    made = task(folder, "none")
    batches = [made.train_batch(i, 23, 4) for i in range(2)]
    rows = [sorted(zip(b.inputs.flatten(1).tolist(), b.targets.tolist(), strict=True)) for b in batches]
    pictures = np.stack([made.picture("train", i) for i in range(23)])
    assert rows[0] == rows[1]
    assert [x for x, _ in rows[0]] == sorted(normalise(pictures, *IMAGENET).flatten(1).tolist())
    assert not same(*batches), "another order"


@pytest.mark.parametrize("policy", POLICIES)
def test_a_training_batch_is_a_pure_function(folder, policy):
    made, other = task(folder, policy), task(folder, policy)
    asked = [(0, 4, 0), (5, 4, 0), (5, 4, 1), (2, 6, 0), (5, 4, 0), (7, 50, 3)]
    first = [made.train_batch(*key) for key in asked]
    torch.manual_seed(99), random.seed(99), np.random.seed(99)  # noqa: NPY002
    again = [other.train_batch(*key) for key in reversed(asked)][::-1]
    assert all(same(a, b) for a, b in zip(first, again, strict=True))
    assert same(first[1], first[4])
    assert not same(first[1], first[2])
    assert first[5].inputs.shape == (50, 3, 16, 16), "more than there are"
    if policy == "timm":
        assert first[3].targets.shape == (6, 3)
        torch.testing.assert_close(first[3].targets.sum(1), torch.ones(6))


@pytest.mark.parametrize("settings", [AugmentConfig("light"), AugmentConfig("timm", mixup=0, cutmix=0)])
def test_an_image_is_augmented_differently_each_time(folder, settings):
    """From batch to batch at one place of it, within a batch, and with another seed."""
    if settings.policy == "timm":
        need_timm()
    made = PhotosConfig(str(folder), 16, augment=settings).build()
    everything = np.arange(23)
    make = pickle.loads(pickle.dumps(made._maker))  # as for processes that are not forked
    keys = [BatchKey(everything, (seed, index)) for seed in (0, 1) for index in range(5)]
    versions = torch.stack([make(key).inputs for key in keys])
    for row in range(23):
        assert len(versions[:, row].flatten(1).unique(dim=0)) > 6
    twins = make(BatchKey(np.zeros(10, np.int64), (0, 0))).inputs
    assert len(twins.flatten(1).unique(dim=0)) > 6


@pytest.mark.parametrize(("policy", "workers"), [("light", 2), ("timm", 0)])
def test_generators_are_left_alone(folder, policy, workers):
    made = task(folder, policy, workers)
    torch.manual_seed(3), random.seed(3), np.random.seed(3)  # noqa: NPY002
    expected = torch.rand(2).tolist(), random.random(), np.random.rand()  # noqa: NPY002
    torch.manual_seed(3), random.seed(3), np.random.seed(3)  # noqa: NPY002
    for i in range(3):
        made.train_batch(i, 4, 0)
    list(made.batches("valid", 2))
    made.close()
    assert (torch.rand(2).tolist(), random.random(), np.random.rand()) == expected  # noqa: NPY002


def test_workers_make_the_same_batches(folder):
    alone, helped = task(folder), task(folder, workers=2)
    # In order, twice at once, back (a resume), another seed and size, and on from where the workers were.
    asked = [(i, 4, 0) for i in range(6)] + [(5, 4, 0), (6, 4, 0), (2, 4, 0), (3, 4, 0), (4, 4, 0)]
    asked += [(0, 5, 1), (1, 5, 1), (9, 5, 1), (2, 5, 1), (3, 5, 1)]
    before = len(multiprocessing.active_children())
    for key in asked:
        assert same(helped.train_batch(*key), alone.train_batch(*key)), key
        assert len(multiprocessing.active_children()) <= before + 2
    assert len(multiprocessing.active_children()) == before + 2
    helped.close()
    assert len(multiprocessing.active_children()) == before
    assert same(helped.train_batch(4, 5, 1), alone.train_batch(4, 5, 1)), "it can still be asked"
    assert same(helped.train_batch(5, 5, 1), alone.train_batch(5, 5, 1))
    next(helped.batches("test", 1))
    for split in ("valid", "test"):
        for a, b in zip(helped.batches(split, 2), alone.batches(split, 2), strict=True):
            assert same(a, b)
    assert len(multiprocessing.active_children()) == before + 2
    del helped
    assert len(multiprocessing.active_children()) == before


@pytest.mark.parametrize("workers", [0, 2])
def test_an_unreadable_photo_is_named_in_one_line(tmp_path, workers):
    write_photos(tmp_path, CLASSES)
    for path in tmp_path.glob("*/*.png"):
        path.write_bytes(path.read_bytes()[:90] + path.read_bytes()[-12:])  # begins and ends as an image does
    made = task(tmp_path, workers=workers)
    for ask in (lambda: made.train_batch(0, 4, 0), lambda: list(made.batches("test", 2))) * 2:
        with pytest.raises(InputError, match=r"\w+/\d+\.png: ") as error:
            ask()
        assert "\n" not in str(error.value)
    assert not [c for c in multiprocessing.active_children() if c.name.startswith("Process")]


def square(number):
    return number * number


def die(number):
    os.kill(os.getpid(), signal.SIGKILL)


def test_results_of_workers_are_in_order_and_a_dead_worker_raises():
    assert list(prefetch(square, iter(range(20)), 3)) == [n * n for n in range(20)]
    with pytest.raises(InputError, match=r"data.workers: .*\(DataLoader.*\)") as error:
        list(prefetch(die, iter(range(5)), 2))
    assert "\n" not in str(error.value)
