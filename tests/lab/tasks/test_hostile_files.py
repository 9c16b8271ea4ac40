"""Data folders and archives that are not as they should be: nothing waits or goes in circles."""

import os
import tarfile

import pytest
import torch
from refusals import refuses

pytest.importorskip("PIL", reason="images are read by Pillow")

from image_standins import write_photos

import mnemos
from mnemos import registry, tree_file
from mnemos.atomic import special
from mnemos.lab.evaluate import records
from mnemos.lab.run.files import read_object
from mnemos.lab.run.recipe_files import find_recipe
from mnemos.lab.speech.audio import read_recordings
from mnemos.lab.tasks.files import archive_members, read_bytes
from mnemos.lab.tasks.pictures import read_image
from mnemos.lab.tasks.text import TextConfig
from mnemos.lab.translation.parallel_text import read_lines

READERS = {
    "texts": lambda path: TextConfig(str(path)).build(),
    "bytes": read_bytes,
    "a picture": read_image,
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
    refuses(path.name, READERS[reader], path)


@pytest.mark.parametrize(("read", "ending"), [(READERS["texts"], ".txt"), (read_recordings, ".wav")])
def test_a_pipe_in_a_folder_is_refused(read, ending, tmp_path):
    """A named pipe without a writer made training wait without end."""
    write_photos(tmp_path, {"cat": 2, "dog": 2})
    os.mkfifo(tmp_path / "cat" / f"pipe{ending}")
    refuses(rf"pipe{ending}: expected a file, found a named pipe", read, tmp_path)


def test_links_that_lead_to_themselves(tmp_path):
    write_photos(tmp_path, {"cat": 2, "dog": 2})
    dog = tmp_path / "dog"
    (dog / "itself.png").symlink_to(dog / "itself.png")
    refuses(r"itself.png: .*symbolic links", read_image, dog / "itself.png")
    refuses(r"itself.png: .*symbolic links", TextConfig(str(tmp_path)).build)


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE])
def test_what_is_no_file_in_an_archive_is_an_error_and_no_file_less(tmp_path, kind):
    with tarfile.open(tmp_path / "all.tar", "w") as archive:
        for name, each in (("a/7_george_1.wav", tarfile.REGTYPE), ("a/8_george_1.wav", kind)):
            member = tarfile.TarInfo(name)
            member.type, member.linkname = each, "a/7_george_1.wav"
            archive.addfile(member)
    assert len(list(archive_members(tmp_path / "all.tar", lambda name: "7" in name))) == 1
    refuses(r"a/8_george_1.wav is a link or no file", list, archive_members(tmp_path / "all.tar", bool))
