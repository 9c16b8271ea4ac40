"""The documents of a text: which files of a folder are text, and their splits."""

import gzip
import hashlib
import os
import re
import sysconfig
import zlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mnemos.atomic import check_file, special
from mnemos.types import InputError

from .files import HEAD, check_text, not_text, read_bytes
from .pictures import is_image
from .tables import DESCRIPTIONS, ENDINGS, is_table, read_column
from .task import SPLITS, Split
from .vocabulary import as_characters

LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test"}  # third-party packages, and tests
SPLIT_OF: dict[str, Split] = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("valid", "validation", "val", "dev"), "valid"),
    "test": "test",
}
_WORD = re.compile(rf"(?<![a-z0-9])(?:{'|'.join(SPLIT_OF)})(?![a-z0-9])")
# Files that lie beside a corpus and are not part of it: in a folder of its texts by their whole name.
_BESIDE = re.compile(
    r"^(un)?(licen[cs]es?|copying|notice)(\.\w+)?$|^(md5|sha\d+)(sums?)?(\.txt)?$|\.(md5|sha\d+|sum|sig|asc)$",
    re.IGNORECASE,
)
_AT_TOP = re.compile(r"licen[cs]e|copying|(?<![a-z0-9])notice(?![a-z0-9])|^readme(\.|$)", re.IGNORECASE)
Document = NDArray[np.uint8]


@dataclass(frozen=True)
class TextFiles:
    """The files of a corpus, sorted. splits: those that the folder gives; undivided: the files of one without splits.

    left_out: the other files that are not hidden. column: of tables, whose rows are documents.
    """

    folder: Path
    splits: dict[Split, list[Path]]
    undivided: list[Path]
    left_out: list[Path]
    column: str | None = None

    @property
    def read(self) -> list[Path]:
        return sorted([*self.undivided, *(file for files in self.splits.values() for file in files)])

    @property
    def has_tables(self) -> bool:
        return any(map(is_table, self.read))

    def name(self, file: Path) -> str:
        return file.name if file == self.folder else file.relative_to(self.folder).as_posix()


def find_text(
    path: str | Path | None, scoring: bool = False, tables: bool = False, column: str | None = None
) -> TextFiles:
    """The files at `path`, a file or a folder; None means the *.py files of the standard library.

    A folder gives the splits by names (`_named_splits`), itself or by the folders in it, whose splits are joined; other
    files are left out. Else files at any depth are undivided. scoring: not trained on, so that any two splits suffice.
    Every file is read that is text and no table (`not_text`), except licences, checksums, hidden files and a README at
    the top of the folder or of a split. tables: `path` may be a table or a saved folder of the library `datasets`; so
    may the files of a folder without text, and with `column`, the name of the column of text, those of any folder.
    """
    if path is None:
        folder = Path(sysconfig.get_path("stdlib"))
        return TextFiles(folder, {}, sorted(file for file in _files(folder, LEFT_OUT) if file.suffix == ".py"), [])
    folder = Path(path)
    if (what := special(folder)) or not folder.exists():
        raise InputError(f"{folder}: expected a file or a folder of text, found {what or 'nothing'}; check data.path")
    every = [folder] if folder.is_file() else sorted(_files(folder))
    in_tables = [file for file in every if is_table(file)] if tables else []
    if column is not None and not in_tables and not scoring:  # a run's column may meet other text
        raise InputError(
            f"data.column: expected a table ({', '.join(ENDINGS)}) in data.path, found none in {folder}; leave "
            "data.column out, or convert the text"
        )
    if folder.is_file():
        if not in_tables:
            check_text(_head(folder), str(folder))
        return TextFiles(folder, {}, [folder], [], column)
    texts = [file for file in every if _is_wanted(file, folder)]
    if in_tables and (column is not None or not texts):
        texts = in_tables
    splits = _named_splits(folder, every, {*texts}, scoring)
    read = {file for files in splits.values() for file in files} or {*texts}
    beside = DESCRIPTIONS if in_tables else ()
    left_out = [file for file in every if file not in read and file.name not in beside]
    return TextFiles(folder, splits, [] if splits else texts, left_out, column)


def choose_split(corpus: TextFiles, split: Split) -> TextFiles:
    """The files of one split, of a folder that gives splits; else all. Raises InputError if it gives others alone."""
    if not corpus.splits:
        return corpus
    if split not in corpus.splits:
        raise InputError(
            f"{corpus.folder}: expected a {split} split, found the splits {' and '.join(corpus.splits)}; choose one "
            "with --split, or name a file"
        )
    return replace(corpus, splits={split: corpus.splits[split]})


def nothing_found(folder: Path, files: Sequence[Path], what: str = "text") -> InputError:
    """The error for a folder whose files hold no text."""
    number = {0: "no files", 1: "1 file, without text"}.get(len(files), f"{len(files)} files and none with text")
    problem = f"{number}; check data.path"
    if pictures := sum(is_image(file.name) for file in files):
        problem = f"{pictures} pictures among {len(files)} files; use a recipe for pictures, such as photos-vit"
    return InputError(f"{folder}: expected {what}, found {problem}")


def read_documents(corpus: TextFiles, characters: bool = False) -> dict[str, Document]:
    """The documents of a corpus that are not empty: {name: bytes [n]}, sorted. characters: the text must be UTF-8."""
    documents: dict[str, Document] = {}
    has_tables = corpus.has_tables
    for file in corpus.read:
        name = corpus.name(file)
        if has_tables and is_table(file):
            rows = [text.encode() for text in read_column(file, corpus.column) if text]
            width = len(str(len(rows)))
            documents |= {f"{name}#{i:0{width}}": np.frombuffer(row, np.uint8) for i, row in enumerate(rows)}
            continue
        data = check_text(read_bytes(file), str(file))
        if characters:
            as_characters(data, str(file))
        documents[name] = np.frombuffer(data, np.uint8)
    if not documents:
        raise nothing_found(corpus.folder, corpus.left_out)
    return {name: text for name, text in sorted(documents.items()) if len(text)}


def split_documents(corpus: TextFiles, share: float, characters: bool = False) -> dict[Split, dict[str, Document]]:
    """The documents of train, valid and test by name: those that the folder gives; held-out shares for the others.

    Of several documents whole ones are held out, by the hashes of their names; else each gives shares of its end.
    characters: the text must be UTF-8, and is cut at line ends.
    """
    documents = read_documents(corpus, characters)
    # --- the splits that the folder gives ---
    split_of = {corpus.name(file): split for split, files in corpus.splits.items() for file in files}
    splits: dict[Split, dict[str, Document]] = {split: {} for split in corpus.splits}
    for name, text in documents.items() if splits else ():
        file = name if name in split_of else name.rpartition("#")[0]  # a row of it
        splits[split_of[file]][name] = text
    missing: list[Split] = [split for split in SPLITS[1:] if split not in splits]
    if not missing:
        return splits
    # --- for the others whole documents of those for training ---
    documents = splits.get("train", documents)
    parts: dict[Split, dict[str, Document]] = {split: {} for split in ("train", *missing)}
    if len(documents) > len(missing):
        ranked = sorted(documents, key=lambda name: hashlib.sha256(name.encode(errors="surrogateescape")).digest())
        count = max(1, min(round(share * len(ranked)), (len(ranked) - 1) // len(missing)))
        split_by_hash = {name: missing[i // count] for i, name in enumerate(ranked[: count * len(missing)])}
        for name, text in documents.items():
            parts[split_by_hash.get(name, "train")][name] = text
        return splits | parts
    # --- or the end of each ---
    for name, text in documents.items():
        if len(text) <= len(missing):
            needs = len(missing) + 1
            raise InputError(f"{name}: expected at least {needs} bytes, one per split, found {len(text)}; add text")
        count = max(1, min(round(share * len(text)), (len(text) - 1) // len(missing)))
        bounds = [len(text) - count * i for i in range(len(missing), 0, -1)]
        if characters:
            bounds = [_line_start(text, bound, count) for bound in bounds]
        for split, first, last in zip(parts, [0, *bounds], [*bounds, len(text)], strict=True):
            parts[split][name] = text[first:last]
    return splits | parts


def _line_start(text: Document, end: int, most: int) -> int:
    """The last line that begins at `end` or at most `most` bytes before it; where none does, the last such word."""
    before, first = text[:end].tobytes(), max(0, end - most)
    start = max(before.rfind(b"\n", first), 0) or max(before.rfind(b" ", first), 0)
    while not start and end and text[end] & 0xC0 == 0x80:  # inside a character
        end -= 1
    return start + 1 if start else end


def _named_splits(
    folder: Path, every: Sequence[Path], texts: Collection[Path], scoring: bool
) -> dict[Split, list[Path]]:
    """The splits that names give; {} if they give none, which are training and another one (scoring: any two).

    (1) Folders train and valid (validation, val, dev) or test beside it. (2) Files whose names differ by such a word
    and by numbers alone, such as wiki.train.tokens, train-1.txt and test-2.txt. (3) The same of the folders in it.
    """
    # --- files by (level, what is around the word), and by the word ---
    groups: dict[tuple[int, tuple[str, ...]], dict[str, list[Path]]] = {}
    for file in every:
        parts = file.relative_to(folder).parts
        for depth, part in enumerate(parts[:2]):
            if depth < len(parts) - 1:
                if part.lower() in SPLIT_OF:
                    groups.setdefault((2 * depth, parts[:depth]), {}).setdefault(part.lower(), []).append(file)
            elif file in texts and len(words := [*_WORD.finditer(_plain(file))]) == 1:
                start, end = words[0].span()
                around = (re.sub(r"\d+", "#", text) for text in (_plain(file)[:start], _plain(file)[end:]))
                group = groups.setdefault((2 * depth + 1, (*parts[:depth], *around)), {})
                group.setdefault(words[0].group(), []).append(file)
    # --- the groups that are splits, and of these the first level ---
    levels: dict[int, dict[Split, list[Path]]] = {}
    for (level, _), group in groups.items():
        split_files = {SPLIT_OF[word]: [file for file in files if file in texts] for word, files in group.items()}
        if not any(split_files.values()) or ("train" not in split_files and not scoring) or len({*group}) < 2:
            continue
        if len(split_files) < len(group):
            twice = next(split for split in split_files if sum(SPLIT_OF[word] == split for word in group) > 1)
            names = [word if level % 2 == 0 else group[word][0].name for word in group if SPLIT_OF[word] == twice]
            raise InputError(f"{folder}: expected one {twice} split, found {' and '.join(names)}; keep one of them")
        if empty := [split for split, files in split_files.items() if not files]:
            raise nothing_found(folder, every, f"text for the {empty[0]} split")
        for split, files in split_files.items():
            levels.setdefault(min(level, 2), {}).setdefault(split, []).extend(files)
    return levels[min(levels)] if levels else {}


def _files(folder: Path, left_out: Collection[str] = ()) -> Iterator[Path]:
    for here, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in left_out]
        yield from (Path(here, n) for n in names if not n.startswith("."))


def _plain(file: Path) -> str:
    return file.name.lower().removesuffix(".gz")


def _is_wanted(file: Path, folder: Path) -> bool:
    at_top = file.parent == folder or file.parent.name.lower() in SPLIT_OF
    beside = file.name in DESCRIPTIONS or _BESIDE.search(_plain(file)) or (at_top and _AT_TOP.search(_plain(file)))
    return not beside and not not_text(_head(file), file.name)


def _head(file: Path) -> bytes:
    """The beginning of a file, decompressed; that of an unreadable one is empty: reading it raises."""
    check_file(file)
    try:
        with open(file, "rb") as opened:
            packed = opened.read(2) == b"\x1f\x8b"
        with gzip.open(file) if packed else open(file, "rb") as opened:
            return opened.read(HEAD)
    except (OSError, EOFError, zlib.error):
        return b""
