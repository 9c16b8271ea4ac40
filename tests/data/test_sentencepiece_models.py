"""Models of sentencepiece give the same pieces and text as the library itself does."""

import io
from itertools import chain

import numpy as np
import pytest
from translation_standins import sentences

from mnemos.data.bpe_dropout import BPEDropout
from mnemos.data.translation_vocabulary import END, UNKNOWN, SubWordTokens
from mnemos.types import InputError

spm = pytest.importorskip("sentencepiece", reason="sentencepiece is not installed")

RANDOM = np.random.default_rng(0)
# Words of random letters can be merged in many ways. (In unigram models some of these are equally probable.)
WORDS = [" ".join("".join(RANDOM.choice([*"abcde"], 7)) for _ in range(9)) for _ in range(40)]
LINES = list(chain(*sentences(300, 0)))
ODD = ["Ｔｗｏ　①", " one  two ", "", "☃ two ☃☃ six", "ONE Fünf", "ﬁve.\u200b", "two\u2028six"]


def trained(**options) -> bytes:
    out = io.BytesIO()
    settings = {"vocab_size": 120, "hard_vocab_limit": False, "num_threads": 1, "minloglevel": 2, **options}
    spm.SentencePieceTrainer.train(sentence_iterator=iter(LINES + WORDS), model_writer=out, **settings)
    return out.getvalue()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"normalization_rule_name": "nmt_nfkc_cf"},
        {"model_type": "bpe"},
        {"model_type": "bpe", "byte_fallback": True, "vocab_size": 320},
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
        assert ours.names(found) == names, line
        if UNKNOWN not in found:
            assert ours.decode(found) == theirs.decode(wanted), line
    assert ours.lowercase == ("normalization_rule_name" in options)
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
