"""The reader of CIFAR's pickles: right on what is official, and never more than one line on what is hostile."""

import pickle
import pickletools
import random
import struct

import numpy as np
import pytest
from limited import limited

from mnemos.lab.tasks import cifar_pickle
from mnemos.lab.tasks.cifar_files import parse_python
from mnemos.lab.tasks.cifar_pickle import PickleError, read_pickle
from mnemos.types import InputError

UNSIGNED = b"cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
EMPTY = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R"


def array(kind=UNSIGNED, raw=b"\1\2\3\4\5\6", shape=b"K\x02K\x03\x86", rest=b""):
    """The opcodes of an array, as Python 2 and an old NumPy wrote it."""
    return EMPTY + b"(K\x01" + shape + kind + b"\x89U" + bytes([len(raw)]) + raw + b"tb" + rest


def file_of(value):
    return b"\x80\x02}(U\x04data" + value + b"u."


@pytest.mark.parametrize("protocol", [2, 3, 4])
@pytest.mark.parametrize("dtype", [np.uint8, np.int64])
def test_what_is_written_today(protocol, dtype):
    pixels = np.random.default_rng(0).integers(0, 256, (7, 3072)).astype(dtype)
    for one in (pixels, np.asfortranarray(pixels)):
        others = {b"labels": [*range(7)], b"names": ("a", "ü", None, 1.5, -3, 70_000, True)}
        written = {b"data": one, "again": one, **others}
        found = read_pickle(pickle.dumps(written, protocol))
        assert found[b"data"].dtype == dtype
        assert np.array_equal(found.pop(b"data"), one)
        assert np.array_equal(found.pop("again"), one)
        assert found == others


def test_what_python_2_wrote():
    found = read_pickle(file_of(array()))
    assert found[b"data"].tolist() == [[1, 2, 3], [4, 5, 6]]
    assert not found[b"data"].flags.writeable


def kind(code, state=b"(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"):
    return b"cnumpy\ndtype\nU" + bytes([len(code)]) + code + b"K\x00K\x01\x87R" + state


FIELDS = b"(U\x01at}U\x01a" + UNSIGNED + b"J\xff\xff\xff\x7f\x86s"  # one field of bytes, two gigabytes from the start
ATTACKS = {
    "object": array(kind(b"O8", b"(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK?tb"), b"A" * 48),
    "void": array(kind(b"V1")),
    "structured": array(kind(b"V1", b"(K\x03U\x01|N" + FIELDS + b"K\x01K\x01K\x00tb")),
    "dtype state by BUILD": array(kind(b"u1", b"(K\x03U\x01|NNNK@J\xff\xff\xff\xffK\x00tb")),
    "object flags by BUILD": array(kind(b"u1", b"(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK?tb")),
    "subarray": array(kind(b"V8", b"(K\x03U\x01|" + UNSIGNED + b"K\x08\x85\x86NNK\x08K\x01K\x00tb")),
    "field out of range": array(kind(b"u1", b"(K\x03U\x01|N" + FIELDS + b"K\x01K\x01K\x00tb")),
    "state twice": array(rest=b"(K\x01K\x06\x85" + UNSIGNED + b"\x89U\x06ABCDEFtb"),
    "dtype without its state": array(kind(b"u1", b"")),
    "ndarray called": b"cnumpy\nndarray\nK\x64\x85R",
    "a large empty shape": array(raw=b"", shape=b"(K\x00" + b"J\xff\xff\xff\x7f" * 7 + b"t"),
    "a shape beyond the bytes": array(shape=b"J\xff\xff\xff\x7fK\x03\x86"),
    "a negative shape": array(shape=b"J\xfe\xff\xff\xffJ\xfd\xff\xff\xff\x86"),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_attacks(name):
    """Files that made NumPy read memory of the file's choosing, and near ones."""
    with pytest.raises(PickleError) as error:
        read_pickle(file_of(ATTACKS[name]))
    assert "\n" not in str(error.value)


def test_every_opcode_that_can_call_is_unknown():
    """Of the opcodes of all protocols, those that make objects of a file's classes, or read ahead, are refused."""
    for opcode in pickletools.opcodes:
        if opcode.name in ("INST", "OBJ", "NEWOBJ", "NEWOBJ_EX", "EXT1", "EXT4", "PERSID", "BINPERSID", "LONG4", "INT"):
            with pytest.raises(PickleError, match="not one of CIFAR's"):
                read_pickle(b"\x80\x02" + opcode.code.encode("latin1") + b"0\n0\n.")


def lengths():
    large = {b"T": "<i", b"B": "<I", b"X": "<I", b"\x8e": "<Q", b"\x8d": "<Q"}
    for opcode, form in large.items():
        for size in (2**31 - 1, 2**63, -1):
            low, high = (-(2**31), 2**31) if form == "<i" else (0, 2 ** (8 * struct.calcsize(form)))
            if not low <= size < high:
                continue
            with pytest.raises(PickleError):
                read_pickle(file_of(opcode + struct.pack(form, size) + b"abc"))
    text = b"X" + struct.pack("<I", 2**20) + b"A" * 2**20 + b"q\x00"
    again = b"c_codecs\nencode\nh\x00X\x06\x00\x00\x00latin1\x86R"
    with pytest.raises(PickleError, match="more encoded bytes"):  # a gigabyte, from a megabyte of file
        read_pickle(file_of(text + again * 1000))


def test_a_length_in_a_file_allocates_nothing():
    assert limited(200 * 2**20, lengths) == 0


def test_the_number_of_opcodes_is_bounded(monkeypatch):
    """A byte may be a list of 64 bytes of memory."""
    monkeypatch.setattr(cifar_pickle, "OPCODES", 1_000)
    with pytest.raises(PickleError, match="more than 1,000 opcodes"):
        read_pickle(b"\x80\x02" + b"]" * 1_000 + b".")


def mutated(data, draw):
    """A copy with some bytes changed, cut, doubled or moved, mostly at its ends: pixels have no structure."""
    found = bytearray(data)
    for _ in range(draw.choice((1, 1, 2, 5))):
        near = min(300, len(found))
        place = draw.choice((draw.randrange(near), len(found) - 1 - draw.randrange(near), draw.randrange(len(found))))
        size, change = draw.choice((1, 1, 1, 2, 4, 9)), draw.randrange(5)
        if change == 0:
            found[place] = draw.randrange(256)
        elif change == 1:
            found[place] = draw.choice(b"cRbtsuae().}]NKMJTUXCBqhrjG\x80\x85\x86\x87\x88\x89\x8c\x8e\x93\x94\x95")
        elif change == 2 and len(found) > size:
            del found[place : place + size]
        elif change == 3:
            found[place:place] = found[place : place + size]
        else:
            other = draw.randrange(len(found))
            found[place : place + size] = found[other : other + size]
    return bytes(found)


def fuzz(seeds, count):
    draw, read, refused = random.Random(0), 0, 0
    for i in range(count):
        try:
            pixels, labels = parse_python(mutated(seeds[i % len(seeds)], draw), "data_batch_1", "cifar10")
            read += len(pixels) == len(labels) > 0 and labels.max() < 10
        except InputError as error:
            refused += str(error).isprintable()
    assert read + refused == count, "each error is one line"
    assert min(read, refused) > count // 20, "both ends are reached"


def test_mutations_end_in_images_or_one_error(exhaustive):
    """In a child process, so that a crash is an exit code; its memory is limited."""
    pixels = np.random.default_rng(0).integers(0, 256, (2, 3072)).astype(np.uint8)
    seeds = [pickle.dumps({b"data": pixels, b"labels": [3, 7]}, protocol) for protocol in (2, 3, 4)]
    seeds.append(pickle.dumps({b"labels": np.array([3, 7]), b"data": pixels}, 3))
    raw = b"T" + struct.pack("<i", 6144) + pixels.tobytes()
    shape = b"K\x02M\x00\x0c\x86"
    old = EMPTY + b"(K\x01" + shape + UNSIGNED + b"\x89" + raw + b"tb"
    seeds.append(b"\x80\x02}(U\x06labels](K\x03K\x07eU\x04data" + old + b"u.")
    assert limited(200 * 2**20, fuzz, seeds, 50_000 if exhaustive else 600) == 0
