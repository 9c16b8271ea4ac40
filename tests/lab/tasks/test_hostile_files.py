"""Data folders and archives that are not as they should be: nothing waits, expands or goes in circles."""

import gzip
import io
import os
import socket
import tarfile
import warnings

import numpy as np
import pytest
import torch
from limited import limited
from spoken_standins import wav, write_recordings

pytest.importorskip("PIL", reason="images are read by Pillow")

from image_standins import write_photos

import mnemos
from mnemos import registry, tree_file
from mnemos.atomic import special
from mnemos.lab.cli import listing, main
from mnemos.lab.errors import SkippedFile
from mnemos.lab.evaluate import records
from mnemos.lab.run.files import read_object
from mnemos.lab.run.recipe_files import find_recipe
from mnemos.lab.speech.audio import read_recordings
from mnemos.lab.tasks.files import Unpacked, archive_members, most_unpacked, read_bytes
from mnemos.lab.tasks.listops import read_tsv
from mnemos.lab.tasks.photos import scan
from mnemos.lab.tasks.pictures import check_image_files, read_image
from mnemos.lab.tasks.preprocessing import files_below
from mnemos.lab.tasks.text import TextConfig
from mnemos.lab.translation.parallel_text import read_lines
from mnemos.types import InputError

WORDS = b"one two three four five " * 300


def special_files(folder, ending):
    """A named pipe, links to it and to a device, and a socket."""
    os.mkfifo(folder / f"pipe{ending}")
    (folder / f"link{ending}").symlink_to(folder / f"pipe{ending}")
    (folder / f"zeros{ending}").symlink_to("/dev/zero")
    socket.socket(socket.AF_UNIX).bind(str(folder / f"socket{ending}"))
    return rf"(pipe|link|zeros|socket){ending}: skipped, because it is a (named pipe|socket|device)"


def texts(folder):
    for name in ("a", "b", "c", "d"):
        (folder / f"{name}.txt").write_bytes(WORDS)
    return lambda: {path.name for path in TextConfig(str(folder)).files()}, {"a.txt", "b.txt", "c.txt", "d.txt"}


def photos(folder):
    write_photos(folder, {"cat": 2, "dog": 2})
    return lambda: len(scan(str(folder)).paths), 4


def recordings(folder):
    write_recordings(folder, takes=1)
    return lambda: len(read_recordings(folder)), 4


def predicted(folder):
    (folder / "a.wav").write_bytes(wav(np.arange(800), 8000))
    return lambda: [path.name for path in files_below([folder], (".wav",), "recordings")], ["a.wav"]


@pytest.mark.parametrize(
    ("make", "ending", "below"),
    [(texts, ".txt", ""), (photos, ".png", "cat"), (recordings, ".wav", ""), (predicted, ".wav", "")],
)
def test_what_is_no_file_is_skipped_with_a_warning(tmp_path, make, ending, below):
    """A named pipe without a writer made training wait without end."""
    read, expected = make(tmp_path)
    words = special_files(tmp_path / below, ending)
    with pytest.warns(SkippedFile, match=words) as warned:
        assert read() == expected
    assert {str(one.message).split(":")[0].rsplit("/", 1)[1] for one in warned} == {
        f"{name}{ending}" for name in ("pipe", "link", "zeros", "socket")
    }


READERS = {
    "texts": lambda path: TextConfig(str(path)).build(),
    "bytes": read_bytes,
    "ListOps": read_tsv,
    "a picture": read_image,
    "pictures": lambda path: check_image_files([str(path)]),
    "an archive": lambda path: list(archive_members(path, bool)),
    "lines": lambda path: list(read_lines(path)),
    "a checkpoint": tree_file.read,
    "JSON of a run": read_object,
    "JSON of a record": lambda path: records.read_object(path, "write it again"),
    "a recipe": lambda path: find_recipe(str(path)),
    "a plug-in": registry.load_file,
    "a state": lambda path: mnemos.load_state(path, like=torch.zeros(1)),
}


@pytest.mark.parametrize("reader", READERS)
def test_a_pipe_that_is_named_is_refused(reader, tmp_path):
    path = tmp_path / f"pipe{'.py' * (reader == 'a plug-in')}{'.json' * (reader == 'a recipe')}"
    os.mkfifo(path)
    assert special(path) == "a named pipe"
    with pytest.raises(InputError, match=path.name):
        READERS[reader](path)


def test_the_command_line_shows_the_warning_as_one_line(monkeypatch, capsys):
    def shown():
        print(warnings.formatwarning("a/pipe: skipped", SkippedFile, "text_files.py", 109), end="")
        return 0

    monkeypatch.setattr(listing, "list_names", shown)
    main(["list"])
    assert capsys.readouterr().out == "mnemos: warning: a/pipe: skipped\n"


def test_links_that_lead_to_themselves(tmp_path):
    photos(tmp_path)
    dog = tmp_path / "dog"
    (dog / "itself.png").symlink_to(dog / "itself.png")
    with pytest.raises(InputError, match=r"itself.png: .*symbolic links"):
        check_image_files(scan(str(tmp_path)).paths)
    with pytest.raises(InputError, match=r"itself.png: .*symbolic links"):
        TextConfig(str(tmp_path), pattern="*.png").build()


def expand(path):
    with pytest.raises(InputError, match=r"expected at most 33,554,432 bytes .* MNEMOS_UNPACKED_GIB"):
        read_bytes(path)


def test_expansion_is_bounded(tmp_path, monkeypatch):
    assert (most_unpacked(10), most_unpacked(2**30)) == (2**30, 2**35), "a large file may be a large corpus"
    (tmp_path / "a.gz").write_bytes(gzip.compress(bytes(2**23), 9) * 128)  # one mebibyte of one gibibyte
    monkeypatch.setenv("MNEMOS_UNPACKED_GIB", "0.03125")
    assert limited(300 * 2**20, expand, tmp_path / "a.gz") == 0
    small = b"abc" * 1000
    (tmp_path / "b.gz").write_bytes(gzip.compress(small) * 2)
    monkeypatch.setenv("MNEMOS_UNPACKED_GIB", str(6000 / 2**30))
    assert read_bytes(tmp_path / "b.gz") == small * 2
    for limit, words in ((str(5999 / 2**30), r"at most 5,999 bytes"), ("nan", "a number of gibibytes")):
        monkeypatch.setenv("MNEMOS_UNPACKED_GIB", limit)
        with pytest.raises(InputError, match=words):
            read_bytes(tmp_path / "b.gz")
    with pytest.raises(InputError, match=r"c.gz: expected at most 10 bytes"):
        Unpacked(io.BytesIO(small), "c.gz", 10).seek(11)


def packed(path, *entries, **headers):
    with tarfile.open(path, "w:gz", **headers) as archive:
        for member, data in entries:
            archive.addfile(member, io.BytesIO(data))


def entry(name, data=b"", kind=tarfile.REGTYPE, link="", **headers):
    member = tarfile.TarInfo(name)
    member.size, member.type, member.linkname, member.pax_headers = len(data), kind, link, headers
    return member, data


HOLES = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": str(2**40)}
NAME = "b/7_george_1.wav"
ODD = {
    "a link to itself": [entry(NAME, kind=tarfile.SYMTYPE, link="7_george_1.wav")],
    "a hard link": [entry(NAME, kind=tarfile.LNKTYPE, link=NAME)],
    "a named pipe": [entry(NAME, kind=tarfile.FIFOTYPE)],
    "holes": [entry(NAME, b"0\n".ljust(512, b"\0"), **HOLES)],
    "a size that is no number": [entry(NAME, b"", **{"size": "x"})],
    "a size beyond the archive": [entry(NAME, b"", **{"size": str(2**62)})],
    "a size below zero, which leads to the same file again": [entry("b/one"), entry("b/other", **{"size": "-1536"})],
    "headers of headers": [entry("x" * 200, kind=tarfile.GNUTYPE_LONGNAME)] * 1_500,
}


@pytest.mark.parametrize("name", ODD)
def test_odd_archives_end_in_one_line(tmp_path, name):
    packed(tmp_path / "all.tar.gz", *ODD[name], format=tarfile.PAX_FORMAT)

    def refused():
        with pytest.raises(InputError, match=r"all\.tar\.gz") as error:
            read_recordings(tmp_path)
        assert str(error.value).isprintable()
        assert name != "holes" or "found a file with holes" in str(error.value)

    assert limited(500 * 2**20, refused) == 0


def test_links_that_are_not_read_do_not_matter(tmp_path):
    sound = wav(np.arange(800), 8000)
    packed(
        tmp_path / "all.tar.gz",
        entry("latest", kind=tarfile.SYMTYPE, link="latest"),
        entry("a/7_george_1.wav", sound),
        entry("pipe", kind=tarfile.FIFOTYPE),
    )
    assert len(read_recordings(tmp_path)) == 1
