"""The documents of a text: which files of a folder are text, their splits, and the articles in them.

A folder gives splits by its folders or by official names (`find_text`); shares of the documents stand for the others
(`split_documents`).
"""

import gzip
import hashlib
import itertools
import os
import re
import sysconfig
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mnemos.atomic import special
from mnemos.types import InputError

from .files import HEAD, check_text, not_text, read_bytes, skipped
from .folders import ENDINGS
from .task import Split
from .vocabulary import as_characters

LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test"}  # third-party packages, and tests
SPLIT_OF: dict[str, Split] = {
    "train": "train",
    "training": "train",
    "valid": "valid",
    "validation": "valid",
    "val": "valid",
    "dev": "valid",
    "test": "test",
}
_WORD = re.compile(rf"(?<![a-z0-9])(?:{'|'.join(SPLIT_OF)})(?![a-z0-9])")
# Files that lie beside a corpus and are not part of it.
_BESIDE = re.compile(
    r"licen[cs]e|copying|(?<![a-z0-9])notice(?![a-z0-9])|^(md5|sha\d+)(sums?)?(\.txt)?$|\.(md5|sha\d+|sum|sig|asc)$",
    re.IGNORECASE,
)
Document = NDArray[np.uint8]
SPLITS: tuple[Split, ...] = ("train", "valid", "test")
# The blank line before a heading belongs to its article. Section headings (" = = Title = = ") begin none.
_HEADING = re.compile(rb"(?m)(?:^[ \t\r]*\n|\A(?:\xef\xbb\xbf)?)[ \t]*= (?!=)[^\n]*(?<!=) =[ \t\r]*$")


@dataclass(frozen=True)
class TextFiles:
    """The files of a corpus, sorted.

    given: the splits that the folder gives; {} if it gives none. undivided: the files of a folder without splits.
    left_out: the other files that are not hidden. pattern: that of `find_text`, which takes files whatever is in them.
    """

    folder: Path
    given: dict[Split, list[Path]]
    undivided: list[Path]
    left_out: list[Path]
    pattern: str | None = None

    @property
    def read(self) -> list[Path]:
        """All files that are read, sorted."""
        return sorted([*self.undivided, *(file for files in self.given.values() for file in files)])

    def name(self, file: Path) -> str:
        """A file's path in the folder."""
        return file.name if file == self.folder else file.relative_to(self.folder).as_posix()


def find_text(path: str | Path | None, pattern: str | None = None, scoring: bool = False) -> TextFiles:
    """The files at `path`, a file or a folder; None means the *.py files of the standard library.

    A folder gives the splits in one of two ways. (1) A folder `train` with a folder for validation (valid, validation,
    val or dev), for test, or both beside it: each folder is a split, and files beside them are left out. (2) A file
    in the folder itself, such as wiki.train.tokens or train.txt, with one of validation or test that has the same name
    but for that word and for numbers: all such files are splits, and other files are left out. A folder that gives no
    splits takes them from the folders in it, one level below, as a corpus has them after it was unpacked: the splits of
    several are joined, and other files are left out. In any other folder, files at any depth are undivided.
    scoring: the text is scored and not trained on, so that any two splits suffice, without one for training.
    pattern: shell patterns such as "*.txt *.md", separated by spaces; a file is read if its name matches one, whatever
    is in it. None reads every file that is text and no table (`not_text`), except licences, checksums and a README at
    the top of the folder. Files that are not read give no splits.
    Names count without .gz. Hidden files and folders are ignored.
    Raises InputError if the path does not exist or is a file that is not text, if a split's folder holds no text, and
    if a split has two folders or files.
    """
    if path is None:
        folder = Path(sysconfig.get_path("stdlib"))
        found = sorted(file for file in _files(folder, LEFT_OUT) if file.suffix == ".py")
        return TextFiles(folder, {}, found, [])
    folder = Path(path)
    if not folder.exists():
        raise InputError(f"{folder}: expected a file or a folder of text, but the path does not exist; check data.path")
    if kind := special(folder):
        raise InputError(f"{folder}: expected a file or a folder of text, found {kind}; write its content to a file")
    if folder.is_file():
        if pattern is None:
            check_text(_head(folder), str(folder))
        return TextFiles(folder, {}, [folder], [], pattern)
    every = sorted(_files(folder))
    given = _given(folder, every, pattern, scoring)
    if not given:
        given = _given_below(folder, every, pattern, scoring)
    undivided = [] if given else _chosen(folder, every, pattern)
    taken = {*undivided, *(file for files in given.values() for file in files)}
    return TextFiles(folder, given, undivided, [file for file in every if file not in taken], pattern)


def nothing_found(folder: Path, files: Sequence[Path], what: str = "text") -> InputError:
    """The error for a folder whose files hold no text."""
    pictures = sum(file.suffix.lower() in ENDINGS for file in files)
    said = f"{len(files)} files and none with text; check data.path and data.pattern"
    if pictures:
        said = f"{pictures} pictures among {len(files)} files; use a recipe for pictures, such as photos-vit"
    return InputError(f"{folder}: expected {what}, found {said}")


def read_documents(found: TextFiles, characters: bool = False, articles: bool = False) -> dict[str, Document]:
    """The documents of a corpus as {name: bytes [n]}, sorted by name, whatever their split. Empty files are ignored.

    characters: the text must be UTF-8. articles: each article of a file of WikiText is a document. Raises InputError if
    there is no text, for text that is not as it must be, and, unless a pattern chose the file, for a byte 0 in it.
    """
    documents = {}
    for file in found.read:
        data = read_bytes(file) if found.pattern is not None else check_text(read_bytes(file), str(file))
        documents[found.name(file)] = np.frombuffer(data, np.uint8)
    if not documents:
        raise nothing_found(found.folder, found.left_out)
    if not any(map(len, documents.values())):
        raise InputError(f"{found.folder}: expected text, found {len(documents)} files with 0 bytes; check data.path")
    if characters:
        for file in found.read:
            as_characters(documents[found.name(file)].tobytes(), str(file))
    documents = {name: text for name, text in sorted(documents.items()) if len(text)}
    return divide_into_articles(documents) if articles else documents


def split_documents(
    found: TextFiles, share: float, characters: bool = False, articles: bool = False
) -> dict[Split, dict[str, Document]]:
    """The documents of train, valid and test by name: those that the folder gives; held-out shares for the others.

    characters, articles: see `read_documents`; characters: documents are cut at line ends only.
    """
    documents = read_documents(found, characters, articles)
    split_of = {found.name(file): split for split, files in found.given.items() for file in files}
    splits: dict[Split, dict[str, Document]] = {split: {} for split in found.given}
    for name, text in documents.items() if splits else ():
        splits[split_of[name.rpartition("#")[0] if articles else name]][name] = text
    missing: list[Split] = [split for split in SPLITS[1:] if split not in splits]
    if missing:
        whole = splits.get("train", documents)
        if len(whole) > len(missing):
            return splits | _share_of_documents(whole, share, missing)
        return splits | _share_of_each(whole, share, missing, _line_start if characters else _anywhere)
    return splits


def _files(folder: Path, left_out: Collection[str] = ()) -> Iterator[Path]:
    for here, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in left_out]
        yield from (Path(here, n) for n in names if not n.startswith(".") and not skipped(Path(here, n)))


def _given(folder: Path, every: Sequence[Path], pattern: str | None, scoring: bool) -> dict[Split, list[Path]]:
    """The splits that a folder gives by its folders, else by the names of its files; {} if it gives none."""
    if found := _split_folders(folder, every, pattern, scoring):
        return found
    here = [file for file in every if file.parent == folder and _WORD.search(_plain(file))]
    return _split_names(_chosen(folder, here, pattern), scoring)


def _given_below(folder: Path, every: Sequence[Path], pattern: str | None, scoring: bool) -> dict[Split, list[Path]]:
    """The splits that the folders in a folder give, joined."""
    below: dict[Path, list[Path]] = {}
    for file in every:
        if file.parent != folder:
            below.setdefault(folder / file.relative_to(folder).parts[0], []).append(file)
    given: dict[Split, list[Path]] = {}
    for here, inside in below.items():
        for split, files in _given(here, inside, pattern, scoring).items():
            given.setdefault(split, []).extend(files)
    return given


def _several(splits: Collection[Split], scoring: bool) -> bool:
    """Whether these are splits of a corpus: training and another one, or any two if the text is only scored."""
    return len({*splits}) > 1 and (scoring or "train" in splits)


def _split_folders(folder: Path, every: Sequence[Path], pattern: str | None, scoring: bool) -> dict[Split, list[Path]]:
    """The files of each split's folder; {} without several splits, and where none of their folders holds text."""
    found: dict[Split, Path] = {}
    below = sorted(here for here in folder.iterdir() if here.is_dir() and here.name.lower() in SPLIT_OF)
    for here in below:
        split = SPLIT_OF[here.name.lower()]
        if split in found:
            raise _two(folder, split, found[split].name, here.name)
        found[split] = here
    if not _several(found, scoring):
        return {}
    inside = {split: [file for file in every if here in file.parents] for split, here in found.items()}
    given = {split: _chosen(here, inside[split], pattern) for split, here in found.items()}
    if not any(given.values()):
        return {}
    for split, here in found.items():
        if not given[split]:
            raise nothing_found(here, inside[split], f"text for the {split} split")
    return given


def _split_names(files: Sequence[Path], scoring: bool) -> dict[Split, list[Path]]:
    """The files of a folder whose names differ by the split alone; {} without several splits.

    Names that differ in a number are alike: train-1.txt, train-2.txt and valid-1.txt.
    """
    groups: dict[tuple[str, ...], dict[str, list[Path]]] = {}  # {the name around the word: {the word: its files}}
    for file in files:
        words = list(_WORD.finditer(_plain(file)))
        if len(words) == 1:
            start, end = words[0].span()
            around = tuple(re.sub(r"\d+", "#", part) for part in (_plain(file)[:start], _plain(file)[end:]))
            groups.setdefault(around, {}).setdefault(words[0].group(), []).append(file)
    given: dict[Split, list[Path]] = {}
    for group in groups.values():
        splits = [SPLIT_OF[word] for word in group]
        if not _several(splits, scoring):
            continue
        if twice := next((split for split in splits if splits.count(split) > 1), None):
            first, second, *_ = (group[word][0].name for word in group if SPLIT_OF[word] == twice)
            raise _two(files[0].parent, twice, first, second)
        for word, files in group.items():
            given.setdefault(SPLIT_OF[word], []).extend(files)
    return given


def _plain(file: Path) -> str:
    return file.name.lower().removesuffix(".gz")


def _two(folder: Path, split: str, first: str, second: str) -> InputError:
    return InputError(f"{folder}: expected one {split} split, found {first} and {second}; keep one of them")


def _chosen(folder: Path, files: Sequence[Path], pattern: str | None) -> list[Path]:
    """The files that match the pattern; without one, those that are text."""
    if pattern is not None:
        patterns = pattern.lower().split()
        return [file for file in files if any(fnmatchcase(_plain(file), one) for one in patterns)]
    return [file for file in files if not _beside(folder, file) and not not_text(_head(file), file.name)]


def _beside(folder: Path, file: Path) -> bool:
    """Whether a file describes the corpus: a licence, checksums, or a README at the top."""
    readme = file.parent == folder and file.name.lower().split(".")[0] == "readme"
    return readme or _BESIDE.search(_plain(file)) is not None


def _head(file: Path) -> bytes:
    """The beginning of a file, decompressed; that of an unreadable one is empty: reading it raises."""
    try:
        with open(file, "rb") as opened:
            packed = opened.read(2) == b"\x1f\x8b"
        with gzip.open(file) if packed else open(file, "rb") as opened:
            return opened.read(HEAD)
    except (OSError, EOFError, zlib.error):
        return b""


def _share_of_documents(
    documents: dict[str, Document], share: float, held_out: Sequence[Split]
) -> dict[Split, dict[str, Document]]:
    """Divide the documents between train and the held-out splits."""
    ranked = sorted(documents, key=lambda name: hashlib.sha256(name.encode(errors="surrogateescape")).digest())
    held = max(1, min(round(share * len(ranked)), (len(ranked) - 1) // len(held_out)))
    split_of = {name: held_out[i // held] for i, name in enumerate(ranked[: held * len(held_out)])}
    return {
        split: {name: text for name, text in documents.items() if split_of.get(name, "train") == split}
        for split in ("train", *held_out)
    }


def _share_of_each(
    documents: dict[str, Document],
    share: float,
    held_out: Sequence[Split],
    cut: Callable[[Document, int], int],
) -> dict[Split, dict[str, Document]]:
    """Divide each document: its beginning for train, then a share of its end for each held-out split.

    cut: the place at which the document is divided instead of a given one.
    """
    parts: dict[Split, dict[str, Document]] = {split: {} for split in ("train", *held_out)}
    for name, text in documents.items():
        held = max(1, min(round(share * len(text)), (len(text) - 1) // len(held_out)))
        if len(text) <= len(held_out):
            needs = len(held_out) + 1
            raise InputError(f"{name}: expected at least {needs} bytes, one per split, found {len(text)}; add text")
        bounds = [cut(text, len(text) - held * i) for i in range(len(held_out), 0, -1)]
        for split, first, last in zip(parts, [0, *bounds], [*bounds, len(text)], strict=True):
            parts[split][name] = text[first:last]
    return parts


def _anywhere(text: Document, place: int) -> int:
    return place


def _line_start(text: Document, place: int) -> int:
    """The first line or, in a text of one line, the first word that begins at or before a place."""
    before = text[:place].tobytes()
    found = max(before.rfind(b"\n"), 0) or max(before.rfind(b" "), 0)
    while not found and place and text[place] & 0xC0 == 0x80:  # inside a character
        place -= 1
    return found + 1 if found else place


def divide_into_articles(documents: dict[str, NDArray[np.uint8]]) -> dict[str, NDArray[np.uint8]]:
    """The articles of documents as {"name#001": bytes [n]}, in their order.

    Text before a file's first heading, and a file without headings, is an article of its own. Raises InputError if no
    file has a heading.
    """
    found: dict[str, NDArray[np.uint8]] = {}
    headings = 0
    for name, document in documents.items():
        starts = [match.start() for match in _HEADING.finditer(document.tobytes())]
        headings += len(starts)
        bounds = sorted({0, *starts, len(document)})
        width = len(str(len(bounds) - 1))
        for i, (first, last) in enumerate(itertools.pairwise(bounds), start=1):
            found[f"{name}#{i:0{width}}"] = document[first:last]
    if not headings:
        raise InputError(
            'data.articles: expected files with headings of WikiText, lines " = Title = " after a blank line, found '
            f"none in {len(documents)} files; use data.articles False"
        )
    return found
