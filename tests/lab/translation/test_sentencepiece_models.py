"""Models of sentencepiece give the same pieces and text as the library itself does."""

import io
from itertools import chain

import numpy as np
import pytest
from translation_standins import sentences

from mnemos.lab.translation.translation_vocabulary import END, UNKNOWN, BPEDropout, SubWordTokens
from mnemos.types import InputError

spm = pytest.importorskip("sentencepiece", reason="sentencepiece is not installed")

RANDOM = np.random.default_rng(0)
# Words of random letters can be merged in many ways. (In unigram models some of these are equally probable.)
WORDS = [" ".join("".join(RANDOM.choice([*"abcde"], 7)) for _ in range(9)) for _ in range(40)]
LINES = list(chain(*sentences(300, 0)))
SIGNS = ["İstanbul </b> a </ b <1>", "a▁b ▁ ▁x", "日本\u3000語", "ß ẞ e\u0307 < / s>"] * 5
ODD = ["Ｔｗｏ　①", " one  two ", "", "☃ two ☃☃ six", "ONE Fünf", "ﬁve.\u200b", "two\u2028six", "İ", "A\u0307I\u0307"]
ODD += ["▁", "▁▁", " ▁a", "▁ a▁", "\u3000", "\u3000a \u3000", "a\u3000\u3000b", "\u3000\u0307", "\u0307"]
ODD += ["\t", "a \r\n", "\x01", "<0x41>"]
PARTS = [*"abeABIßẞ日☃</>▁ é", "İ", "</", "<s>", "</s>", "<pad>", "<unk>", "<0x41>", "\u3000", "\u0307", "e\u0301"]
PARTS += ["\u1100\u1161", "  ", "\n", "\u00a0", "\u200b", "one", "zwei", "ﬁ", "～", "Σ", "ς"]
ODD += ["".join(RANDOM.choice(PARTS, RANDOM.integers(1, 10))) for _ in range(150)]


def trained(**options) -> bytes:
    out = io.BytesIO()
    settings = {"vocab_size": 160, "hard_vocab_limit": False, "num_threads": 1, "minloglevel": 2, **options}
    spm.SentencePieceTrainer.train(sentence_iterator=iter(LINES + WORDS + SIGNS), model_writer=out, **settings)
    return out.getvalue()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"normalization_rule_name": "nmt_nfkc_cf"},
        {"normalization_rule_name": "identity"},
        {"byte_fallback": True, "vocab_size": 420},
        {"byte_fallback": True, "vocab_size": 420, "character_coverage": 0.985, "remove_extra_whitespaces": False},
        {"model_type": "bpe"},
        {"model_type": "bpe", "byte_fallback": True, "vocab_size": 420},
        {"split_by_whitespace": False, "add_dummy_prefix": False, "remove_extra_whitespaces": False},
    ],
    ids=lambda options: "-".join(f"{name}={value}" for name, value in options.items()) or "unigram",
)
def test_pieces_and_text_are_those_of_the_library(tmp_path, options):
    content = trained(**options)
    (tmp_path / "a.model").write_bytes(content)
    theirs, ours = spm.SentencePieceProcessor(model_proto=content), SubWordTokens.read(tmp_path / "a.model")
    merged = options.get("model_type") == "bpe"
    for line in [*LINES[-60:], *ODD, *WORDS * merged]:
        wanted = theirs.encode(line)
        (found,) = ours.encode([line])
        names = ["<unk>" if i == theirs.unk_id() else theirs.id_to_piece(i) for i in wanted]
        if ours.names(found) != names:  # a unigram model may divide a text in several ways of equal probability
            assert (merged, "".join(ours.names(found))) == (False, "".join(names)), line
            score = [sum(theirs.get_score(theirs.piece_to_id(one)) for one in x) for x in (ours.names(found), names)]
            assert score[0] == pytest.approx(score[1], abs=1e-4), line
        if UNKNOWN not in found and not line.strip().startswith("▁"):  # theirs drops every space at the beginning
            assert ours.decode(found) == theirs.decode(wanted), line
    assert ours.lowercase == ("cf" in options.get("normalization_rule_name", ""))
    assert SubWordTokens(ours.content).encode(LINES[:9]) == ours.encode(LINES[:9])
    assert END not in ours.encode(["one </s> two"])[0]
    assert not {0, 1, 2} & set(ours.encode(["<s><pad></s>"])[0])


def test_dropout_divides_the_pieces_of_byte_pair_encoding(tmp_path):
    (tmp_path / "a.model").write_bytes(trained(model_type="bpe"))
    ours, random = SubWordTokens.read(tmp_path / "a.model"), np.random.default_rng(0)
    rows = ours.encode(LINES[:60])
    often = BPEDropout(ours, 0.5)
    found = [often(row, random) for row in rows]
    assert [ours.decode(row) for row in found] == LINES[:60]
    assert sum(map(len, found)) > 1.2 * sum(map(len, rows))
    assert [BPEDropout(ours, 1e-300)(row, random) for row in rows] == rows


def test_what_is_not_read_is_named_with_its_file(tmp_path):
    path = tmp_path / "a.model"
    for content, message in (
        (b"{}", r"a\.model: expected a model of sentencepiece, found another file"),
        (b"", r"a\.model: expected a model of sentencepiece, found another file"),
        (trained(model_type="char"), "found another kind of model; train one without"),
        (trained(user_defined_symbols=["<sep>"]), "found the piece '<sep>'"),
        (trained(treat_whitespace_as_suffix=True), "found another kind of model"),
    ):
        path.write_bytes(content)
        with pytest.raises(InputError, match=message):
            SubWordTokens.read(path)
    path.write_bytes(trained())
    with pytest.raises(InputError, match="expected a tokenizer of byte-pair encoding, found Unigram"):
        BPEDropout(SubWordTokens.read(path), 0.1)
