"""Parallel text: every format gives the same pairs, and every fault is named with its file and line."""

import gzip
from pathlib import Path

import pytest
from refusals import refuses

from mnemos.lab.translation.parallel_text import find_pairs, pairs, read_lines

PAIRS = [("A man & a dog.", "Ein Mann & ein Hund."), ("Two  birds\tfly.", "Zwei Vögel fliegen."), ("", "Nichts.")]
SAID = [tuple(" ".join(side.split()) for side in pair) for pair in PAIRS]
LANGUAGES = ("en", "de")


def read(folder: Path, split: str = "train", stem: str = "", languages: tuple[str, str] = LANGUAGES) -> list:
    return [tuple(pair[:2]) for pair in pairs(find_pairs(folder, split, languages, stem))]


def write(folder: Path, **files: str | bytes) -> Path:
    for name, content in files.items():
        path = folder / name.replace("__", "-").replace("_", ".")
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


def sides(end: str = "\n") -> list[str]:
    return ["".join(pair[side] + end for pair in PAIRS) for side in (0, 1)]


def test_two_files_of_lines_gzipped_or_not_with_any_line_ends(tmp_path):
    en, _ = sides()
    _, de = sides("\r\n")
    write(tmp_path, train_en_gz=gzip.compress(en.encode()), train_de=b"\xef\xbb\xbf" + de.encode())
    assert read(tmp_path) == SAID
    assert read(tmp_path, languages=("de", "en")) == [(b, a) for a, b in SAID]
    write(tmp_path, train_de=de.rstrip().encode())  # no line end at the end
    assert read(tmp_path) == SAID


def test_the_files_of_iwslt(tmp_path):
    for language, side in (("en", 0), ("de", 1)):
        segments = "".join(f'<seg id="{i}"> {p[side].replace("&", "&amp;")} </seg>\n' for i, p in enumerate(PAIRS))
        whole = f'<?xml version="1.0"?>\n<mteval>\n<doc docid="7">\n<title>T</title>\n{segments}</doc>\n</mteval>\n'
        for year in (2010, 2011):
            (tmp_path / f"IWSLT14.TED.tst{year}.de-en.{language}.xml").write_text(whole)
        tagged = f"<url>http://ted</url>\n<title>Title {language}</title>\n<talkid>7</talkid>\n" + sides()[side]
        (tmp_path / f"train.tags.de-en.{language}").write_text(tagged)
    assert read(tmp_path, "test") == SAID * 2
    assert read(tmp_path, "test", "*2011*") == SAID
    assert read(tmp_path) == [("Title en", "Title de"), *SAID]
    one = (tmp_path / "IWSLT14.TED.tst2011.de-en.en.xml").read_text()
    (tmp_path / "IWSLT14.TED.tst2011.de-en.en.xml").write_text(one.replace("</seg>\n", "</seg>"))
    assert read(tmp_path, "test", "*2011*") == SAID  # several in a line
    (tmp_path / "IWSLT14.TED.tst2010.de-en.en.xml").write_text('<doc>\n<seg id="1"> half\n</seg>')
    refuses(r"tst2010\.de-en\.en\.xml: line 2: expected <seg .* in one line", read, tmp_path, "test")


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"train_de": "a\nb\n"}, r"train\.de: expected 4 sentences, as train\.en has, found 2: line 3 of train\.en"),
        ({"train_en": "a\n"}, r"train\.en: expected 3 sentences, as train\.de has, found 1: line 2 of train\.de"),
        ({"train_en": b"a\nna\xefve\nc\nd\n"}, r"train\.en: line 2: expected UTF-8, found the byte 0xef at place 3"),
        ({"train_de": "a\nb\nc\n".encode("utf-16")}, r"train\.de: line 1: expected UTF-8, found the byte 0xff"),
        ({"train_de": gzip.compress(b"a\nb\nc\n")[:-6]}, r"train\.de: expected a whole gzip file"),
    ],
)
def test_a_fault_is_named_with_its_file_and_line(tmp_path, files, message):
    write(tmp_path, **{"train_en": "a\nb\nc\nd\n", "train_de": "a\nb\nc\n", **files})
    refuses(message, read, tmp_path)


def test_files_that_are_no_pair_of_languages(tmp_path):
    write(tmp_path, train_en="a\n", train_fr="a\n", test__2016_en="a\n", test__2017_en="a\n")
    assert find_pairs(tmp_path, "valid", LANGUAGES) == []
    for path in (tmp_path / "none", tmp_path / "train.en"):
        refuses(f"expected a folder of parallel text, found no folder '{path}'", find_pairs, path, "valid", LANGUAGES)
    for path, problem in ((tmp_path / "none", "No such file or directory"), (tmp_path, "Is a directory")):
        refuses(rf"expected a readable file, .* \({problem}\); check the path", list, read_lines(path))
    refuses(r"expected train\.de beside train\.en, found none", read, tmp_path)
    write(tmp_path, test__2016_de="", test__2017_de="")
    refuses("one test split, found test-2016, test-2017", read, tmp_path, "test")
