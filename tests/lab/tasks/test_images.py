import gzip
import struct

import numpy as np
import pytest
import torch
from refusals import refuses

from mnemos.lab.tasks.augment import AugmentConfig
from mnemos.lab.tasks.images import DigitsConfig, MNISTConfig, read_idx
from mnemos.lab.tasks.pictures import fit


def images(count, seed=0, size=28):
    return np.random.default_rng(seed).integers(0, 256, (count, size, size)).astype(np.uint8)


def pack(array):
    return struct.pack(f">{1 + array.ndim}I", 0x800 + array.ndim, *array.shape) + array.tobytes()


def labels(count):
    return (np.arange(count) % 10).astype(np.uint8)


def write_mnist(folder, train=60, test=20, ending="", test_name="t10k"):
    folder.mkdir(parents=True, exist_ok=True)
    for name, count in (("train", train), (test_name, test)):
        for what, array in (("images-idx3", images(count)), ("labels-idx1", labels(count))):
            data = pack(array)
            (folder / f"{name}-{what}-ubyte{ending}").write_bytes(gzip.compress(data) if ending else data)
    return folder


@pytest.mark.parametrize(("ending", "test_name"), [("", "t10k"), (".gz", "t10k"), (".gz", "t10k-first5k")])
def test_mnist(tmp_path, ending, test_name):
    folder = write_mnist(tmp_path / "mnist", ending=ending, test_name=test_name)
    settings = MNISTConfig(str(folder), valid_size=10)
    task = settings.build()
    parts = [f"{part}-{what}" for part in ("train", test_name) for what in ("images-idx3", "labels-idx1")]
    assert [file.name for file in settings.files()] == [f"{part}-ubyte{ending}" for part in parts]
    assert (task.metrics[0].name, task.vocab_size, task.classes, task.max_length) == ("accuracy", 256, 10, 784)
    assert [task.size(split) for split in ("train", "valid", "test")] == [50, 10, 20]
    batch = next(task.batches("test", 20))
    assert batch.mask is None
    assert np.array_equal(batch.inputs.numpy(), images(20).reshape(20, 784))
    assert batch.targets.tolist() == labels(20).tolist()
    assert torch.equal(next(task.batches("valid", 10)).inputs, next(settings.build().batches("valid", 10)).inputs)
    assert next(task.batches("valid", 10)).targets.unique().numel() > 3, "drawn, not the file's last ten"
    rows = [next(task.batches("valid", 10)), *(task.train_batch(i, 10, 0) for i in range(5))]
    found = torch.cat([b.inputs for b in rows]).numpy()
    assert sorted(map(bytes, found.astype(np.uint8))) == sorted(map(bytes, images(60).reshape(60, 784)))


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (pack(labels(30)), "2051, found the number 2049"),
        (pack(images(3))[:-5], r"and 2363 bytes for the shape \[3, 28, 28\]"),
        (gzip.compress(pack(images(3)))[:-100], r"gzip.*damaged"),
        (struct.pack(">4I", 0x803, 2**31, 2**31, 4), r"and 16 bytes for the shape \[2147483648, "),
    ],
)
def test_broken_files(tmp_path, data, words):
    path = tmp_path / "train-images-idx3-ubyte"
    path.write_bytes(data)
    refuses(f"^{path}.*{words}", read_idx, path, 3)


@pytest.mark.parametrize(
    ("files", "change", "words"),
    [
        ({"train-images-idx3": None}, {}, r"train-images-idx3-ubyte: .*data\.path"),
        ({"train-images-idx3": np.zeros((60, 0, 28))}, {}, r"train-.*found 60 up to 9 for images \[60, 0, 28\]"),
        ({"train-labels-idx1": labels(59)}, {}, r"train-labels.*found 59 up to 9 for images \[60, "),
        ({"t10k-labels-idx1": labels(20) + 1}, {}, "t10k-labels.*0 to 9.* up to 10"),
        ({}, {"valid_size": 60}, "mnist: .*60 images.*found 60"),
        ({}, {"augment": AugmentConfig("light")}, "data.augment.policy: .*'light'.*data.layout image"),
    ],
)
def test_what_does_not_fit_together(tmp_path, files, change, words):
    write_mnist(tmp_path)
    for name, array in files.items():
        path = tmp_path / f"{name}-ubyte"
        path.unlink() if array is None else path.write_bytes(pack(array.astype(np.uint8)))
    refuses(words, MNISTConfig(str(tmp_path), **{"valid_size": 10, **change}).build)


def test_pictures_are_averaged_in_squares(tmp_path):
    folder = str(write_mnist(tmp_path / "mnist"))
    expected = np.stack([images(20)[:, i::4, j::4] for i in range(4) for j in range(4)]).mean(0)
    found = MNISTConfig(folder, valid_size=10, size=7).build()
    assert found.max_length == 49
    tokens = next(found.batches("test", 20)).inputs.numpy().reshape(20, 7, 7)
    assert np.array_equal(tokens, np.rint(expected))
    shown = MNISTConfig(folder, valid_size=10, size=7, layout="image").build()
    assert np.array_equal(shown.picture("test", 3)[..., 0], tokens[3])
    # `mnemos predict` reads a picture of the original size as training did, but for how halves are rounded.
    opener = pytest.importorskip("PIL.Image", reason="images are read by Pillow")
    found = [fit(opener.fromarray(one), 7, 1.0, shown.preprocessing().averaged)[..., 0] for one in images(20)]
    assert np.abs(found - np.rint(expected)).max() <= 1
    for side in (5, 56, -7):
        refuses(rf"data.size: .*divisor .* found {side} for", MNISTConfig(folder, valid_size=10, size=side).build)


def test_digits():
    pytest.importorskip("sklearn", reason="the digits come with scikit-learn")
    task = DigitsConfig().build()
    assert (task.vocab_size, task.classes, task.max_length) == (17, 10, 64)
    assert [task.size(split) for split in ("train", "valid", "test")] == [1257, 180, 360]
    rows = [*task.batches("valid", 64), *task.batches("test", 64), task.train_batch(0, 1257, 0)]
    found = torch.cat([b.inputs for b in rows])
    assert (found.shape, found.max().item()) == ((1797, 64), 16)
    from sklearn.datasets import load_digits

    digits = load_digits()
    expected = sorted(zip(digits.data.astype(int).tolist(), digits.target.tolist(), strict=True))
    assert sorted(zip(found.tolist(), torch.cat([b.targets for b in rows]).tolist(), strict=True)) == expected


def test_mnist_as_images(tmp_path):
    settings = MNISTConfig(str(write_mnist(tmp_path / "mnist")), valid_size=10, layout="image")
    task = settings.build()
    assert (task.inputs, task.vocab_size, task.classes, task.names) == ("images", 0, 10, list("0123456789"))
    assert task.example().inputs.shape == (1, 1, 28, 28)
    assert [task.size(split) for split in ("train", "valid", "test")] == [50, 10, 20]
    shown = np.stack([task.picture("test", i) for i in range(20)])
    assert sorted(map(bytes, shown)) == sorted(map(bytes, images(20)))
    batch = next(task.batches("test", 20))
    expected = (shown.transpose(0, 3, 1, 2) / 255 - 0.1307) / 0.3081
    np.testing.assert_allclose(batch.inputs.numpy(), expected, rtol=1e-5, atol=1e-6)
    tokens = MNISTConfig(settings.path, valid_size=10).build()
    number = {bytes(picture): i for i, picture in enumerate(images(20))}
    assert batch.targets.tolist() == [number[bytes(picture)] % 10 for picture in shown]
    # The splits are those of the pixels.
    ours = sorted(bytes(task.picture("valid", i)) for i in range(10))
    assert ours == sorted(map(bytes, next(tokens.batches("valid", 10)).inputs.numpy().astype(np.uint8)))
