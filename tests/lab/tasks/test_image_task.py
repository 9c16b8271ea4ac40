import multiprocessing
import pickle
import random
import signal
from contextlib import contextmanager

import numpy as np
import pytest
import torch

pytest.importorskip("PIL", reason="images are read by Pillow")

from image_standins import need_timm, write_photos
from refusals import refuses

from mnemos.lab.tasks.augment import AugmentConfig, normalise
from mnemos.lab.tasks.image_task import IMAGENET
from mnemos.lab.tasks.photos import PhotosConfig
from mnemos.lab.tasks.prefetch import prefetch
from mnemos.lab.tasks.row_order import BatchKey

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


@contextmanager
def generators_left_alone():
    def state():
        return torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())  # noqa: NPY002

    before = state()
    yield
    assert state() == before


def test_generators_are_left_alone(folder):
    made = task(folder, "timm")
    with generators_left_alone():
        made.train_batch(0, 4, 0)
        list(made.batches("valid", 2))


@generators_left_alone()
def test_workers_make_the_same_batches(folder):
    alone, helped = task(folder), task(folder, workers=2)
    # In order, twice at once, back (a resume), and on with another size and seed.
    asked = [(i, 4, 0) for i in range(4)] + [(3, 4, 0), (4, 4, 0), (2, 4, 0), (3, 4, 0), (4, 5, 1), (5, 5, 1)]
    before = len(multiprocessing.active_children())
    for key in asked:
        assert same(helped.train_batch(*key), alone.train_batch(*key)), key
        assert len(multiprocessing.active_children()) <= before + 2
    assert len(multiprocessing.active_children()) == before + 2
    helped.close()
    assert len(multiprocessing.active_children()) == before
    assert same(helped.train_batch(6, 5, 1), alone.train_batch(6, 5, 1)), "it can still be asked"
    next(helped.batches("test", 1))
    for a, b in zip(helped.batches("test", 2), alone.batches("test", 2), strict=True):
        assert same(a, b)
    assert len(multiprocessing.active_children()) == before + 2
    del helped
    assert len(multiprocessing.active_children()) == before


@pytest.mark.parametrize("workers", [0, 1])
def test_an_unreadable_photo_is_named_in_one_line(tmp_path, workers):
    write_photos(tmp_path, CLASSES)
    for path in tmp_path.glob("*/*.png"):
        path.write_bytes(path.read_bytes()[:90] + path.read_bytes()[-12:])  # begins and ends as an image does
    made, before = task(tmp_path, workers=workers), set(multiprocessing.active_children())
    for _ in range(2):
        refuses(r"\w+/\d+\.png: ", made.train_batch, 0, 4, 0)
    refuses(r"\w+/\d+\.png: ", list, made.batches("test", 2))
    assert set(multiprocessing.active_children()) <= before


def test_results_of_workers_are_in_order_and_a_dead_worker_raises():
    assert list(prefetch(abs, iter(range(-20, 0)), 2)) == [*range(20, 0, -1)]
    dying = prefetch(signal.raise_signal, iter([signal.SIGKILL] * 5), 1)
    refuses(r"data.workers: .*\(DataLoader.*\)", list, dying)
