import gzip
import hashlib
import io
import pickle
import tarfile

import numpy as np
import pytest
import torch
from image_standins import need_timm, photo
from PIL import Image
from refusals import refuses

from mnemos.lab.tasks.augment import AugmentConfig, normalise
from mnemos.lab.tasks.files import archive_members
from mnemos.lab.tasks.images import COLOURS, CIFARConfig, _release, read_cifar
from mnemos.lab.tasks.pictures import read_fitted

NAMES = {"cifar10": [f"kind{i}" for i in range(10)], "cifar100": [f"kind_{i:02d}" for i in range(100)]}
CLASSES = {variant: _release(variant) for variant in NAMES}


def images(variant, seed):
    random = np.random.default_rng(seed)
    return random.integers(0, 256, (110, 3, 32, 32)).astype(np.uint8), random.permutation(110) % len(NAMES[variant])


@pytest.fixture
def release(monkeypatch, tmp_path):
    """The official files with few images, as they are published, with torchvision's sums of them."""

    def make(variant):
        release, key = CLASSES[variant], "labels" if variant == "cifar10" else "fine_labels"
        contents = {}
        for i, (name, _) in enumerate((*release.train_list, *release.test_list)):
            pixels, labels = images(variant, i)
            contents[name] = pickle.dumps({"data": pixels.reshape(110, -1), key: labels.tolist()})
        contents[release.meta["filename"]] = pickle.dumps({release.meta["key"]: NAMES[variant]})
        sums = {name: hashlib.md5(data).hexdigest() for name, data in contents.items()}
        for field in ("train_list", "test_list"):
            monkeypatch.setattr(release, field, [[name, sums[name]] for name, _ in getattr(release, field)])
        monkeypatch.setattr(release, "meta", {**release.meta, "md5": sums[release.meta["filename"]]})
        (tmp_path / release.base_folder).mkdir()
        for name, data in contents.items():
            (tmp_path / release.base_folder / name).write_bytes(data)

    return make


def pack(path, contents):
    with tarfile.open(path, "w:gz") as archive:
        for name, data in contents.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return path


@pytest.mark.parametrize("variant", NAMES)
def test_official_files(tmp_path, release, variant):
    release(variant)
    *found, names = read_cifar(tmp_path, variant)
    batches = len(CLASSES[variant].train_list)
    parts = [images(variant, i) for i in range(batches + 1)]
    train = [np.concatenate(x) for x in zip(*parts[:-1], strict=True)]
    assert list(names) == NAMES[variant]
    for ours, theirs in zip(found, (train, parts[-1]), strict=True):
        assert np.array_equal(ours[0], theirs[0].transpose(0, 2, 3, 1))
        assert ours[1].tolist() == theirs[1].tolist()
    assert len(CIFARConfig(str(tmp_path), variant).files()) == batches + 2
    (tmp_path / CLASSES[variant].base_folder / CLASSES[variant].test_list[0][0]).write_bytes(b"damaged")
    refuses(r"corrupted.*data.download", read_cifar, tmp_path, variant)  # and nothing is unpickled


def jpegs(path, split, side=32, each=3):
    contents = {"README.txt": b"about"}
    for label in range(10):
        for i in range(each):
            data = io.BytesIO()
            photo(1000 * (split == "test") + 10 * label + i, side, side).save(data, "JPEG", quality=95)
            contents[f"{split}/class{label}/{i:04d}.jpg"] = data.getvalue()
    return pack(path, dict(reversed(contents.items())))  # the order of an archive is not that of the images


def test_tars_of_jpegs(tmp_path):
    tars = [jpegs(tmp_path / f"cifar10-{split}-jpg.tar.gz", split) for split in ("train", "test")]
    train, test, names = read_cifar(tmp_path, "cifar10")
    assert names == tuple(f"class{i}" for i in range(10))
    assert train[1].tolist() == test[1].tolist() == sorted([*range(10)] * 3)
    assert np.abs(train[0][4].astype(int) - np.array(photo(11, 32, 32))).mean() < 5
    refuses(r"cifar-10-python.tar.gz.*train/CLASS.*data.download", CIFARConfig(str(tmp_path / "none")).build)
    refuses(r"train.*\.tar\.gz: .*\b100\b.*\b10\b", read_cifar, tmp_path, "cifar100")
    for tar in tars:
        with tarfile.open(tar) as archive:
            archive.extractall(tmp_path / "unpacked", filter="data")
    unpacked, *_ = read_cifar(tmp_path / "unpacked", "cifar10")
    assert np.array_equal(unpacked[0], train[0])
    assert CIFARConfig(str(tmp_path)).files() == sorted(tars, reverse=True)
    assert len(CIFARConfig(str(tmp_path / "unpacked")).files()) == 60
    (tmp_path / "unpacked" / "test" / "class3").rename(tmp_path / "unpacked" / "test" / "third")
    refuses(r"test: .*same classes as in train, found 'class3'", read_cifar, tmp_path / "unpacked", "cifar10")
    jpegs(tars[0], "train", side=31, each=1)
    refuses(r"train/class9/0000.jpg: .*32 x 32.*\(31, 31\)", read_cifar, tmp_path, "cifar10")


def test_the_task(tmp_path, release):
    release("cifar10")
    settings = CIFARConfig(str(tmp_path), valid_size=100, augment=AugmentConfig("none"))
    task = settings.build()
    assert (task.classes, task.inputs, task.names) == (10, "images", NAMES["cifar10"])
    assert [task.size(split) for split in ("train", "valid", "test")] == [450, 100, 110]
    assert task.reference == {"majority class": 0.1}
    pixels, labels = images("cifar10", 5)
    order = np.lexsort(pixels.transpose(0, 2, 3, 1).reshape(110, -1).T[:4])
    batch = next(task.batches("test", 110))
    shown = np.stack([task.picture("test", i) for i in range(110)])
    again = np.lexsort(shown.reshape(110, -1).T[:4])
    assert np.array_equal(shown[again], pixels.transpose(0, 2, 3, 1)[order])
    assert batch.targets[again].tolist() == labels[order].tolist()
    assert torch.equal(batch.inputs, normalise(shown, *COLOURS["cifar10"]))
    told = [(x[None].transpose(0, 2, 3, 1), y) for i in range(5) for x, y in zip(*images("cifar10", i), strict=True)]
    known = [next(task.batches("valid", 100)), task.train_batch(0, 450, 0)]
    found = {x.numpy().tobytes(): y for b in known for x, y in zip(b.inputs, b.targets.tolist(), strict=True)}
    assert found == {normalise(x, *COLOURS["cifar10"]).numpy().tobytes(): y for x, y in told}
    assert CIFARConfig(str(tmp_path), size=24, valid_size=100).build().example().inputs.shape == (1, 3, 24, 24)
    need_timm()
    task = CIFARConfig(str(tmp_path), valid_size=100, augment=AugmentConfig("timm")).build()
    augmented = task.train_batch(0, 8, 0)
    assert (augmented.inputs.shape, augmented.targets.shape) == ((8, 3, 32, 32), (8, 10))
    file, about = tmp_path / "one.png", task.preprocessing()
    Image.fromarray(task.picture("test", 0)).save(file)
    read = read_fitted(file, about.size, about.centre)
    assert np.array_equal(read, task.picture("test", 0)), "a new picture is prepared as those of the evaluation"


def test_damaged_archives(tmp_path):
    """Cut short it must not pass for a smaller one, wherever the cut is."""
    path = jpegs(tmp_path / "train.tar.gz", "train", each=1)
    whole = path.read_bytes()
    unpacked = gzip.decompress(whole)
    changed = bytearray(unpacked)
    changed[2000] ^= 1  # of a picture
    end = len(unpacked.rstrip(b"\0")) // 512 * 512
    broken = [whole[: len(whole) * i // 10] for i in (1, 5, 9)] + [unpacked[:cut] for cut in range(512, end, 512)]
    for data in (*broken, b"nothing", gzip.compress(changed)[:-8] + whole[-8:]):
        path.write_bytes(data)
        refuses(r"train.tar.gz: .*damaged", list, archive_members(path, lambda _: True))
