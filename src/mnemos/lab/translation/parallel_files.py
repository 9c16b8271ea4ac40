"""The files of parallel text in a folder, by split: pairs of files, tables, IWSLT's XML and TED's tagged files."""

import os
import re
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Literal, NamedTuple

from mnemos.lab.tasks.files import first_names, skipped
from mnemos.lab.tasks.task import Split
from mnemos.types import InputError

Format = Literal["lines", "tsv", "xml", "tags"]
# The stems of each split's files, the first that is there; as fnmatch reads them.
STEMS: dict[Split, tuple[str, ...]] = {
    "train": ("train", "training", "train.tags.*"),
    "valid": ("valid", "val", "validation", "dev", "*.dev*"),
    "test": ("test", "test[_-]*", "*.tst*"),
}


class PairedFiles(NamedTuple):
    """One parallel text: the files of its two sides, which are the same file for a table."""

    stem: str
    source: Path
    target: Path
    format: Format


def find_pairs(folder: str | Path, split: Split, languages: tuple[str, str], stem: str = "") -> list[PairedFiles]:
    """The parallel texts of a split, in the order of their names; [] if the folder has none and `stem` is "".

    languages: (source, target), the endings of the files' names: STEM.en and STEM.de, STEM.tsv, STEM.de-en.en.xml, or
    TED's train.tags.de-en.en; each may end in .gz. stem: those of the split's files, which may hold * and ?; by default
    the usual names of the split (`STEMS`). Several texts that * or ? find are one split; without a stem, several are
    an error. Raises InputError for a path that is no folder, for a stem without files, for a text with one side
    missing, and for a table beside other files of its text.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise InputError(
            f"data.path: expected a folder of parallel text, found no folder {str(folder)!r}; check the path"
        )
    texts = _texts(folder, languages)
    for pattern in (stem,) if stem else STEMS[split]:
        found = sorted(name for name in texts if fnmatch(name, pattern))
        if len(found) > 1 and not stem and not pattern.startswith(("*", "train.tags")):
            raise InputError(
                f"{folder}: expected one {split} split, found {first_names(found)}; choose one with data.{split}"
            )
        if found:
            return [_paired(folder, name, texts[name], languages) for name in found]
    if stem:
        source, target = languages
        raise InputError(
            f"{folder}: expected {stem}.{source} and {stem}.{target} (or .tsv, .xml, with or without .gz) for "
            f"data.{split}, found {first_names(sorted(texts)) or 'no text of these languages'}; correct data.{split}, "
            "data.source or data.target"
        )
    return []


def _texts(folder: Path, languages: tuple[str, str]) -> dict[str, dict[str, Path]]:
    """{stem: {language, or "tsv": file}} of every file whose name ends as parallel text does."""
    found: dict[str, dict[str, Path]] = {}
    ending = re.compile(rf"(.+)\.({'|'.join(map(re.escape, languages))}|tsv)(\.xml)?(\.gz)?")
    for name in sorted(os.listdir(folder)):
        match = ending.fullmatch(name)
        if match and (folder / name).is_file() and not skipped(folder / name):
            side = found.setdefault(match[1], {})
            if match[2] in side:
                raise InputError(
                    f"{folder}: expected one file for each language, found {side[match[2]].name} and {name}; remove one"
                )
            side[match[2]] = folder / name
    return found


def _paired(folder: Path, stem: str, sides: dict[str, Path], languages: Sequence[str]) -> PairedFiles:
    if "tsv" in sides:
        if len(sides) > 1:
            raise InputError(
                f"{folder}: expected one form of {stem}, found {first_names(sorted(p.name for p in sides.values()))}; "
                "remove the table or the other files"
            )
        return PairedFiles(stem, sides["tsv"], sides["tsv"], "tsv")
    if missing := [language for language in languages if language not in sides]:
        there = next(iter(sides.values()))
        raise InputError(
            f"{folder}: expected {stem}.{missing[0]} beside {there.name}, found none; add the file, or correct "
            "data.source and data.target"
        )
    source, target = (sides[language] for language in languages)
    if ".xml" in source.name:
        return PairedFiles(stem, source, target, "xml")
    return PairedFiles(stem, source, target, "tags" if ".tags." in source.name else "lines")
