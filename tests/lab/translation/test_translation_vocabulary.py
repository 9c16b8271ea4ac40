"""Sub-words of translation: trained the same again, and the text back from them."""

import pytest
from refusals import refuses
from tokenizers import Tokenizer, models
from translation_standins import sentences

from mnemos.lab.cli import main
from mnemos.lab.translation.translation_vocabulary import END, SubWordTokens

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
    library = Tokenizer.from_str(trained.content)
    library.enable_truncation(2)
    library.enable_padding(length=9)
    assert SubWordTokens(library.to_str()).encode(LINES) == trained.encode(LINES), "whole, whatever the file says"


def test_lower_case_is_part_of_the_file():
    lower = SubWordTokens.train([line.title() for line in LINES], 80, lowercase=True)
    assert lower.lowercase
    assert lower.decode(lower.encode(["Two THREE"])[0]) == "two three"
    assert SubWordTokens(lower.content).lowercase


def test_a_tokenizer_of_another_vocabulary_is_refused(trained, tmp_path):
    other = Tokenizer(models.BPE({"a": 0, "b": 1}, []))
    other.save(str(tmp_path / "other.json"))
    refuses(r"other\.json: .* <pad> <s> </s> <unk>, found a b", SubWordTokens.read, tmp_path / "other.json")
    refuses(r"expected a tokenizer\.json", SubWordTokens, "{}", "x.json")


def test_a_size_that_the_text_does_not_give():
    refuses("data.subwords: expected at least 16 sub-words, found 8", SubWordTokens.train, LINES, 8)
    refuses("more characters", SubWordTokens.train, LINES, 20)
    refuses("enough for 92, 4 of them special tokens; lower data.subwords", SubWordTokens.train, LINES, 4000)


def test_the_command(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("\n".join(LINES))
    out = tmp_path / "t.json"
    assert main(["tokenizer", str(tmp_path / "a.txt"), "--size", "80", "--out", str(out)]) == 0
    assert SubWordTokens.read(out).size == 80
    assert main(["tokenizer", str(tmp_path / "a.txt"), "--size", "80", "--out", str(out)]) == 2
    assert main(["tokenizer", str(tmp_path / "a.txt"), "--size", "9000", "--out", str(tmp_path / "u.json")]) == 2
    assert "lower --size\n" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.txt", "t.json"]
