import gzip
import hashlib
import io
import tarfile

import numpy as np
import pytest
import torch

pytest.importorskip("PIL", reason="images are read by Pillow")

from image_standins import REAL, need_timm, photo

from mnemos.config import from_dict, to_dict
from mnemos.lab.tasks import cifar
from mnemos.lab.tasks.augment import AugmentConfig, normalise
from mnemos.lab.tasks.cifar import OFFICIAL, CIFARConfig, download_cifar, find_cifar, read_cifar
from mnemos.lab.tasks.files import archive_members
from mnemos.lab.tasks.task import DataConfig
from mnemos.types import InputError

NAMES = {
    "cifar10": [f"kind{i}" for i in range(10)],
    "cifar100": [f"kind_{i:02d}" for i in range(100)],
}


def images(variant, rows, seed):
    random = np.random.default_rng(seed)
    return random.integers(0, 256, (rows, 3, 32, 32)).astype(np.uint8), random.permutation(rows) % len(NAMES[variant])


def files(variant, seed=0):
    """The content of the official files, few images in each."""
    *batches, test, names = OFFICIAL[variant].files
    found = {}
    for i, name in enumerate([*batches, test]):
        pixels, labels = images(variant, 110, seed + i)
        coarse = [labels // 5] if variant == "cifar100" else []
        found[name] = np.stack([*coarse, labels, *pixels.reshape(110, -1).T], 1).astype(np.uint8).tobytes()
    return found | {names: "\n".join(NAMES[variant]).encode()}


def pack(path, contents):
    with tarfile.open(path, "w:gz") as archive:
        for name, data in contents.items():
            member = tarfile.TarInfo(f"cifar-batches/{name}")
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))


def expected(variant):
    batches = len(OFFICIAL[variant].files) - 2
    parts = [images(variant, 110, i) for i in range(batches + 1)]
    train = [np.concatenate(x) for x in zip(*parts[:-1], strict=True)]
    return (train[0].transpose(0, 2, 3, 1), train[1]), (parts[-1][0].transpose(0, 2, 3, 1), parts[-1][1])


@pytest.mark.parametrize("variant", ["cifar10", "cifar100"])
@pytest.mark.parametrize("form", ["archive", "below", "here"])
def test_official_files(tmp_path, variant, form):
    contents = files(variant)
    if form == "archive":
        pack(tmp_path / OFFICIAL[variant].archive, contents)
    else:
        place = tmp_path / "unpacked" if form == "below" else tmp_path
        place.mkdir(exist_ok=True)
        for name, data in contents.items():
            (place / name).write_bytes(data)
    found = read_cifar(tmp_path, variant)
    assert list(found.names) == NAMES[variant]
    for ours, theirs in zip((found.train, found.test), expected(variant), strict=True):
        assert np.array_equal(ours[0], theirs[0])
        assert ours[1].tolist() == theirs[1].tolist()


def jpegs(path, split, classes=10, each=3, side=32):
    contents = {"README.txt": b"about"}
    for label in range(classes):
        for i in range(each):
            data = io.BytesIO()
            photo(1000 * (split == "test") + 10 * label + i, side, side).save(data, "JPEG", quality=95)
            contents[f"{split}/class{label}/{i:04d}.jpg"] = data.getvalue()
    pack(path, dict(reversed(contents.items())))  # the order of an archive is not that of the images


def test_tars_of_jpegs(tmp_path):
    jpegs(tmp_path / "cifar10-train50k-jpg.tar.gz", "train")
    jpegs(tmp_path / "cifar10-test5k-jpg.tar.gz", "test", each=2)
    found = read_cifar(tmp_path, "cifar10")
    assert found.names == tuple(f"class{i}" for i in range(10))
    assert found.train[1].tolist() == sorted([*range(10)] * 3)
    assert found.test[1].tolist() == sorted([*range(10)] * 2)
    assert np.abs(found.train[0][4].astype(int) - np.array(photo(11, 32, 32))).mean() < 5
    with pytest.raises(InputError, match=r"test\.tar\.gz|train.*\.tar\.gz: .*\b100\b.*\b10\b"):
        read_cifar(tmp_path, "cifar100")
    for split in ("train50k", "test5k"):
        with tarfile.open(tmp_path / f"cifar10-{split}-jpg.tar.gz") as archive:
            archive.extractall(tmp_path, filter="data")
    unpacked = read_cifar(tmp_path / "cifar-batches", "cifar10")
    for ours, theirs in ((unpacked.train, found.train), (unpacked.test, found.test)):
        assert np.array_equal(ours[0], theirs[0])
        assert np.array_equal(ours[1], theirs[1])
    assert len(find_cifar(tmp_path / "cifar-batches", "cifar10")) == 50
    (tmp_path / "cifar-batches/test/class3").rename(tmp_path / "cifar-batches/test/other")
    with pytest.raises(InputError, match=r"test: expected the same classes as in train, found 'class3'"):
        read_cifar(tmp_path / "cifar-batches", "cifar10")


@pytest.mark.parametrize("name", ["cifar-10-python.tar.gz", "cifar-10-batches-py/batches.meta"])
def test_pickles_are_not_read(tmp_path, name):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(InputError, match=rf"{name}: .*pickles.*fetch cifar-10-binary.tar.gz.*data.download") as error:
        CIFARConfig(str(tmp_path)).files()
    assert "\n" not in str(error.value)


def test_the_task(tmp_path):
    pack(tmp_path / OFFICIAL["cifar10"].archive, files("cifar10"))
    settings = CIFARConfig(str(tmp_path), valid_size=100, augment=AugmentConfig("none"))
    task = settings.build()
    assert (task.classes, task.inputs, task.names) == (10, "images", NAMES["cifar10"])
    assert [task.size(split) for split in ("train", "valid", "test")] == [450, 100, 110]
    assert task.reference == {"majority class": 0.1}
    (_, _), (pixels, labels) = expected("cifar10")
    batch = next(task.batches("test", 110))
    order = np.lexsort(pixels.reshape(110, -1).T[:4])
    shown = np.stack([task.picture("test", i) for i in range(110)])
    again = np.lexsort(shown.reshape(110, -1).T[:4])
    assert np.array_equal(shown[again], pixels[order])
    assert batch.targets[again].tolist() == labels[order].tolist()
    assert torch.equal(batch.inputs, normalise(shown, *OFFICIAL["cifar10"].colours))
    known = torch.cat([next(task.batches("valid", 100)).inputs, task.train_batch(0, 450, 0).inputs])
    assert len(known.flatten(1).unique(dim=0)) == 550
    assert CIFARConfig(str(tmp_path), size=24, valid_size=100).build().example().inputs.shape == (1, 3, 24, 24)
    assert from_dict(DataConfig, to_dict(settings)) == settings


def test_the_papers_augmentation(tmp_path):
    need_timm()
    pack(tmp_path / OFFICIAL["cifar10"].archive, files("cifar10"))
    settings = {"folder": str(tmp_path), "valid_size": 100, "augment": AugmentConfig("timm")}
    alone, helped = CIFARConfig(**settings).build(), CIFARConfig(**settings, workers=1).build()
    for i in range(3):
        ours, theirs = alone.train_batch(i, 8, 0), helped.train_batch(i, 8, 0)
        assert ours.inputs.shape == (8, 3, 32, 32)
        assert ours.targets.shape == (8, 10)
        assert torch.equal(ours.inputs, theirs.inputs)
        assert torch.equal(ours.targets, theirs.targets)
    helped.close()


def write(folder, contents):
    folder.mkdir(exist_ok=True)
    for name, data in contents.items():
        (folder / name).write_bytes(data)


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("data_batch_2.bin", b"\0" * 3072, "data_batch_2.bin: .*3073 bytes, found 3072"),
        ("data_batch_2.bin", b"", "data_batch_2.bin: .*3073 bytes, found 0"),
        ("test_batch.bin", b"\x0a" * 3073, "test_batch.bin: .*labels 0 to 9 .*found 10 to 10"),
        ("batches.meta.txt", b"one\ntwo\n", "batches.meta.txt: .*10 .*found 2"),
    ],
)
def test_damaged_files(tmp_path, name, data, words):
    write(tmp_path, {**files("cifar10"), name: data})
    with pytest.raises(InputError, match=words) as error:
        read_cifar(tmp_path, "cifar10")
    assert "\n" not in str(error.value)


def test_damaged_archives(tmp_path):
    path = tmp_path / OFFICIAL["cifar10"].archive
    contents = files("cifar10")
    pack(path, {name: data for name, data in contents.items() if name != "data_batch_3.bin"})
    with pytest.raises(InputError, match=r"cifar-10-binary.tar.gz: .*data_batch_3.bin"):
        read_cifar(tmp_path, "cifar10")
    pack(path, contents)
    whole = path.read_bytes()
    # Cut short it must not pass for a smaller one, wherever the cut is.
    cut = [whole[: len(whole) * i // 20] for i in range(1, 20)]
    for broken in (*cut, b"nothing", whole[:5000] + b"\0" * 99 + whole[5099:]):
        path.write_bytes(broken)
        with pytest.raises(InputError, match=r"cifar-10-binary.tar.gz: .*(truncated|damaged|cut short)") as error:
            read_cifar(tmp_path, "cifar10")
        assert "\n" not in str(error.value)
    changed = bytearray(gzip.decompress(whole))
    changed[2000] ^= 1  # of a picture
    path.write_bytes(gzip.compress(changed)[:-8] + whole[-8:])
    with pytest.raises(InputError, match=r"cifar-10-binary.tar.gz: .*damaged \(CRC check failed"):
        read_cifar(tmp_path, "cifar10")
    path.unlink()
    jpegs(tmp_path / "test.tar.gz", "test")
    jpegs(tmp_path / "train.tar.gz", "train")
    whole = (tmp_path / "train.tar.gz").read_bytes()
    for i in range(2, 20):
        (tmp_path / "train.tar.gz").write_bytes(whole[: len(whole) * i // 20])
        with pytest.raises(InputError, match=r"train.tar.gz: .*(damaged|truncated)"):
            read_cifar(tmp_path, "cifar10")
    unpacked = gzip.decompress(whole)
    end = len(unpacked.rstrip(b"\0")) // 512 * 512
    for cut in range(512, end, 512):  # also where a member ends
        (tmp_path / "train.tar.gz").write_bytes(unpacked[:cut])
        with pytest.raises(InputError, match=r"train.tar.gz: .*(damaged|truncated)"):
            list(archive_members(tmp_path / "train.tar.gz", lambda _: True))


def test_missing_files(tmp_path):
    with pytest.raises(InputError, match=r"none: .*cifar-10-binary.tar.gz.*data.download"):
        CIFARConfig(str(tmp_path / "none")).build()
    with pytest.raises(InputError, match=r"cifar-100-binary.tar.gz.*train/CLASS.*data.download") as error:
        CIFARConfig(str(tmp_path), "cifar100").build()
    assert "\n" not in str(error.value)
    jpegs(tmp_path / "train.tar.gz", "train", side=31, each=1)
    jpegs(tmp_path / "test.tar.gz", "test", each=1)
    with pytest.raises(InputError, match=r"train/class9/0000.jpg: .*32 x 32.*\(31, 31\)"):
        read_cifar(tmp_path, "cifar10")
    with pytest.raises(InputError, match=r"data.size .*0"):
        CIFARConfig(str(tmp_path), size=0).build()


@pytest.fixture
def mirror(tmp_path, monkeypatch):
    """A folder that replaces the download server."""
    folder, about = tmp_path / "mirror", OFFICIAL["cifar10"]
    folder.mkdir()
    pack(folder / about.archive, files("cifar10"))
    digest = hashlib.sha256((folder / about.archive).read_bytes()).hexdigest()
    monkeypatch.setattr(cifar, "URL", folder.as_uri() + "/")
    monkeypatch.setitem(OFFICIAL, "cifar10", about._replace(sha256=digest))
    return folder


def test_download(tmp_path, mirror):
    place = tmp_path / "new" / "cifar"
    assert CIFARConfig(str(place), download=True, valid_size=100).build().size("test") == 110
    assert [path.name for path in place.iterdir()] == [OFFICIAL["cifar10"].archive]
    (mirror / OFFICIAL["cifar10"].archive).unlink()
    download_cifar(place, "cifar10")  # what is there is not fetched again


@pytest.mark.parametrize("fault", ["another", "gone"])
def test_a_download_that_fails_stores_nothing(tmp_path, mirror, fault):
    archive = mirror / OFFICIAL["cifar10"].archive
    archive.write_bytes(b"another") if fault == "another" else archive.unlink()
    words = "cifar-10-binary.tar.gz: .*" + ("SHA-256" if fault == "another" else str(tmp_path / "new"))
    with pytest.raises(InputError, match=words) as error:
        download_cifar(tmp_path / "new", "cifar10")
    assert "\n" not in str(error.value)
    assert not list((tmp_path / "new").iterdir())


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.skipif(not (REAL / "cifar10-jpg").is_dir(), reason="the images are not here")
def test_real_images():
    task = CIFARConfig(str(REAL / "cifar10-jpg"), valid_size=2_000).build()
    assert task.names[0] == "airplane"
    assert [task.size(split) for split in ("train", "valid", "test")] == [48_000, 2_000, 5_000]
    assert task.reference == {"majority class": 0.1}
    batch = next(task.batches("valid", 2000))
    assert batch.inputs.mean((0, 2, 3)).abs().max() < 0.15
    assert (batch.inputs.std((0, 2, 3)) - 1).abs().max() < 0.1
    assert batch.targets.bincount().min() > 150
