"""Sub-words of translation: trained the same again, the text back from them, and other divisions by BPE dropout."""

import json

import numpy as np
import pytest
from tokenizers import Tokenizer, models
from translation_standins import sentences

from mnemos.lab.cli import main
from mnemos.lab.translation.translation_vocabulary import END, SPECIAL, BPEDropout, SubWordTokens
from mnemos.types import InputError

LINES = [side for pair in sentences(200, 0) for side in pair]


@pytest.fixture(scope="module")
def trained() -> SubWordTokens:
    return SubWordTokens.train(LINES, 80)


def test_the_text_comes_back_and_training_is_the_same_again(trained):
    assert SubWordTokens.train(LINES, 80).content == trained.content
    assert trained.size == 80
    assert [trained.decode(row) for row in trained.encode(LINES)] == LINES
    assert trained.decode([1, *trained.encode(["two. three!."])[0], END]) == "two. three!."
    assert END not in trained.encode(["one </s> two"])[0]
    assert trained.encode([""]) == [[]]


def test_lower_case_is_part_of_the_file():
    lower = SubWordTokens.train([line.title() for line in LINES], 80, lowercase=True)
    assert lower.lowercase
    assert lower.decode(lower.encode(["Two THREE"])[0]) == "two three"
    assert SubWordTokens(lower.content).lowercase


def test_dropout_gives_other_sub_words_of_the_same_text(trained):
    rows = trained.encode(LINES)
    always = BPEDropout(trained, 0.5)
    found = [always(row, np.random.default_rng(i)) for i, row in enumerate(rows)]
    assert [trained.decode(row) for row in found] == LINES
    assert sum(map(len, found)) > 1.2 * sum(map(len, rows))
    assert found == [always(row, np.random.default_rng(i)) for i, row in enumerate(rows)]
    # The least rate merges as the library does, and the greatest leaves characters.
    barely, nearly = BPEDropout(trained, 1e-300), BPEDropout(trained, 1 - 1e-15)
    random = np.random.default_rng(0)
    assert [barely(row, random) for row in rows] == rows
    assert [len(nearly(row, random)) for row in rows[:9]] == [len(line) + 1 for line in LINES[:9]]


def test_a_tokenizer_of_another_vocabulary_is_refused(trained, tmp_path):
    other = Tokenizer(models.BPE({"a": 0, "b": 1}, []))
    other.save(str(tmp_path / "other.json"))
    with pytest.raises(InputError, match=r"other\.json: expected the first tokens <pad> <s> </s> <unk>, found a b"):
        SubWordTokens.read(tmp_path / "other.json")
    with pytest.raises(InputError, match=r"expected a tokenizer\.json"):
        SubWordTokens("{}", "x.json")
    words = {
        **json.loads(trained.content),
        "model": {"type": "WordLevel", "vocab": dict(zip(SPECIAL, range(4), strict=True)), "unk_token": "<unk>"},
    }
    with pytest.raises(InputError, match="expected a tokenizer of byte-pair encoding, found WordLevel"):
        BPEDropout(SubWordTokens(json.dumps(words)), 0.1)
    for rate in (-0.1, 1.0):
        with pytest.raises(InputError, match="at least 0 and below 1"):
            BPEDropout(trained, rate)


@pytest.mark.parametrize(
    ("size", "message"),
    [
        (8, "data.subwords: expected at least 16 sub-words, found 8"),
        (20, "more characters"),
        (4000, "enough for 92, 4 of them special tokens; lower data.subwords"),
    ],
)
def test_a_size_that_the_text_does_not_give(size, message):
    with pytest.raises(InputError, match=message):
        SubWordTokens.train(LINES, size)


def test_the_command(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("\n".join(LINES))
    out = tmp_path / "t.json"
    assert main(["tokenizer", str(tmp_path / "a.txt"), "--size", "80", "--out", str(out)]) == 0
    assert SubWordTokens.read(out).size == 80
    assert main(["tokenizer", str(tmp_path / "a.txt"), "--size", "80", "--out", str(out)]) == 2
    assert main(["tokenizer", str(tmp_path / "a.txt"), "--size", "9000", "--out", str(tmp_path / "u.json")]) == 2
    assert "lower --size\n" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.txt", "t.json"]
