"""Words and sub-words: text to tokens and back, documents, splits, bits per byte, and what is refused."""

import math
from pathlib import Path

import pytest
import torch
from refusals import refuses

from mnemos import Transformer
from mnemos.lab.evaluate.scores import evaluate
from mnemos.lab.tasks.metrics import BITS_PER_BYTE
from mnemos.lab.tasks.text import TextConfig, TextPreprocessing
from mnemos.lab.tasks.vocabulary import Bytes, SubWords, Words

tokenizers = pytest.importorskip("tokenizers")
SHARED = Path(__file__).parents[3] / "../shared/data"
ARTICLE = " \n = {0} = \n \n = = Part = = \n The {0} is a {0} of two words , Größe = 3 . \n"
NAMES = ("Owl", "Elk", "Fox", "Cat")


def wikitext(folder: Path, repeat: int = 9) -> Path:
    for split in ("train", "valid", "test"):
        text = "".join(ARTICLE.format(name) for name in NAMES[: 4 if split == "train" else 3]) * repeat
        (folder / f"wiki.{split}.tokens").write_text(text, encoding="utf-8")
    return folder


def byte_level(folder: Path) -> Path:
    """A tokenizer.json as GPT-2's, of the 256 bytes and three merges."""
    found = tokenizers.Tokenizer(tokenizers.models.BPE())
    found.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=270, initial_alphabet=alphabet, show_progress=False)
    found.train_from_iterator(["the Größe the words"], trainer)
    found.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def test_words_are_counted_and_come_back():
    vocabulary = Words.count([("a", b"b a b\nb\n"), ("b", "a ü\n".encode())])
    assert vocabulary.list == ("<eos>", "b", "a", "ü", "<unk>")
    assert vocabulary.start == 0
    tokens = vocabulary.encode("a new ü\n\nb".encode(), "x")
    assert tokens.tolist() == [2, 4, 3, 0, 0, 1], "a line end that is missing is no token"
    assert vocabulary.decode(tokens.tolist()) == "a <unk> ü \n\nb ".encode()
    assert vocabulary.lengths[tokens].sum() == len(vocabulary.decode(tokens.tolist()))
    assert vocabulary.words([2, 0]) == [("a", 1), ("<eos>", 1)]
    assert Words.count([("a", b"x x y y y z\n")], most=4).list == ("y", "x", "<eos>", "<unk>")


def test_a_byte_order_mark_is_no_part_of_the_text(tmp_path):
    mark = b"\xef\xbb\xbf"
    assert Words.count([("a", mark + b"the the cat\n")]).list == ("the", "<eos>", "cat", "<unk>")
    sub_words = SubWords.read(byte_level(tmp_path))
    assert sub_words.encode(mark + b"the words", "x").tolist() == sub_words.encode(b"the words", "x").tolist()


def test_sub_words_come_back_with_their_bytes(tmp_path):
    vocabulary = SubWords.read(byte_level(tmp_path))
    text = "the Größe 😀\n".encode()
    tokens = vocabulary.encode(text, "x")
    assert len(tokens) < len(text)
    assert vocabulary.decode([vocabulary.start, *tokens.tolist()]) == text
    assert vocabulary.lengths[tokens].sum() == len(text)
    assert (vocabulary.size, vocabulary.lengths[vocabulary.start]) == (vocabulary.start + 1, 0)
    assert [vocabulary.words(part) for part in (tokens[:2].tolist(), [])] == [[("the", 1), (" Größe", 1)], []]
    about = TextPreprocessing.of(8, "tokenizer.json", vocabulary)
    assert about.vocabulary().encode(text, "x").tolist() == tokens.tolist()


def test_a_file_that_pads_and_cuts_gives_the_tokens_of_the_text(tmp_path):
    plain = byte_level(tmp_path)
    expected = SubWords.read(plain).encode(b"the words", "x").tolist()
    padded = tokenizers.Tokenizer.from_file(str(plain))
    padded.enable_padding(length=64)
    assert SubWords(padded.to_str()).encode(b"the words", "x").tolist() == expected
    padded.enable_truncation(1)
    assert SubWords(padded.to_str()).encode(b"the words", "x").tolist() == expected


def test_the_bytes_of_other_kinds_of_sub_words():
    llama = {"<unk>": 0, "▁the": 1, "<0xC3>": 2, "r": 3}
    pieces = tokenizers.models.BPE(vocab=llama, merges=[], unk_token="<unk>", byte_fallback=True)
    found = SubWords(tokenizers.Tokenizer(pieces).to_str())
    assert (found.lengths.tolist(), found.unknown) == ([5, 4, 1, 1, 0], 0)
    bert = tokenizers.models.WordPiece(vocab={"[UNK]": 0, "the": 1, "##r": 2}, unk_token="[UNK]")
    assert SubWords(tokenizers.Tokenizer(bert).to_str()).lengths.tolist()[1:] == [4, 1, 0]


def test_special_tokens_around_a_text_are_known_where_a_letter_has_a_token():
    for letters, found in (("ab", ([2], [3, 3])), ("CG", ([], []))):
        made = tokenizers.Tokenizer(
            tokenizers.models.BPE({one: i for i, one in enumerate([*letters, "[C]", "[S]"])}, [])
        )
        assert SubWords(made.to_str()).around() == ([], [])
        special = [("[C]", 2), ("[S]", 3)]
        made.post_processor = tokenizers.processors.TemplateProcessing("[C] $A [S] [S]", special_tokens=special)
        assert SubWords(made.to_str()).around() == found


def spaced(kind: str):
    """A tokenizer that puts a space before a text, in one of the three ways of tokenizer.json."""
    vocabulary = {letter: i for i, letter in enumerate([*"Ġ▁acehtÃŁĊ\n", "Ġt", "▁t", "<0xC3>", "<0x9F>", "<0x0A>"])}
    merges = [("Ġ", "t"), ("▁", "t")]
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, merges, byte_fallback=kind != "ByteLevel"))
    decoders = tokenizers.decoders
    if kind == "ByteLevel":
        made.pre_tokenizer, made.decoder = tokenizers.pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    elif kind == "Metaspace":
        made.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
        made.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    else:
        parts = [tokenizers.normalizers.Prepend("▁"), tokenizers.normalizers.Replace(" ", "▁")]
        made.normalizer = tokenizers.normalizers.Sequence(parts)
        parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        made.decoder = decoders.Sequence(parts)
    return made


@pytest.mark.parametrize("kind", ["ByteLevel", "Metaspace", "Prepend"])
def test_sub_words_have_no_space_before_a_text(monkeypatch, kind):
    monkeypatch.setattr("mnemos.lab.tasks.vocabulary._PIECE", 4)  # pieces begin inside a text, too
    vocabulary = SubWords(spaced(kind).to_str())
    for text in ("the cat\nthe teaß\nat", " the cat", "\nthe"):
        tokens = vocabulary.encode(text.encode(), "x").tolist()
        assert vocabulary.lengths[tokens].sum() == len(text.encode())
        assert vocabulary.decode(tokens).decode() == text
        assert SubWords(vocabulary.content).encode(text.encode(), "x").tolist() == tokens
        assert tokenizers.Tokenizer.from_str(vocabulary.content).encode(text, add_special_tokens=False).ids == tokens


def test_wikitext_in_words(tmp_path):
    task = TextConfig(str(wikitext(tmp_path)), segment=8, tokens="words").build()
    vocabulary = task.vocabulary
    line = f"words  {vocabulary.size} in the vocabulary: train {task.size('train'):,} (0.00% unknown)"
    assert task.about[-1].startswith(line)
    assert task.vocab_size == vocabulary.size
    assert vocabulary.list[0] == "="
    words = (tmp_path / "wiki.valid.tokens").read_text(encoding="utf-8")
    assert task.size("valid") == len(words.split()) + words.count("\n")
    batch = task.train_batch(0, 2, 0)
    assert batch.inputs[0, 0] == vocabulary.start
    shown = vocabulary.decode(batch.targets[0].tolist()).decode()
    assert shown == "\n= Owl = \n\n= = ", "a blank line is a line end"
    fewer = TextConfig(str(tmp_path), segment=8, tokens="words", words=5).build()
    assert fewer.vocab_size == 5
    assert "(0.00% unknown)" not in fewer.about[-1]
    about = task.preprocessing()
    assert "(words), found another one of 5 words; leave" in about.difference(fewer.preprocessing())
    assert about.difference(about) is None
    scored = TextConfig(str(tmp_path), segment=8, tokens="words").build_to_score("valid", fewer.preprocessing())
    assert scored.vocab_size == 5, "other text is read with the run's vocabulary"


@pytest.mark.skipif(not SHARED.is_dir(), reason="the shared data are not here")
def test_the_words_of_wikitext_2():
    task = TextConfig(str(SHARED / "wikitext-2/wiki.valid.tokens.gz"), tokens="words").build_to_score("valid")
    assert task.size("valid") == 217_646


def test_words_are_cut_at_line_ends_and_a_long_line_between_words(tmp_path):
    (tmp_path / "one.txt").write_text("".join(f"größe{i} ü\n" for i in range(2000)), encoding="utf-8")
    task = TextConfig(str(tmp_path), tokens="words", held_out=0.1).build()
    assert sum(task.size(split) for split in ("train", "valid", "test")) == 6000
    for split in ("valid", "test"):
        first = next(task.batches(split, 1)).targets[0, :3].tolist()
        assert task.vocabulary.decode(first).decode().split()[-1] == "ü"
    (tmp_path / "one.txt").write_text("The title\n" + "word " * 20_000)
    task = TextConfig(str(tmp_path), tokens="words", held_out=0.05).build()
    assert all(task.size(split) > 900 for split in ("train", "valid", "test"))


@pytest.mark.parametrize("tokens", ["words", "tokenizer.json"])
def test_bits_per_byte(tmp_path, tokens):
    tokens = tokens if tokens == "words" else str(byte_level(tmp_path))
    (tmp_path / "text").mkdir()
    task = TextConfig(str(wikitext(tmp_path / "text")), segment=16, tokens=tokens).build()
    torch.manual_seed(0)
    model = Transformer(vocab_size=task.vocab_size, dim=8, layers=1, num_heads=2, mlp=8)
    found = evaluate(model, task.batches("valid", 2), task)
    written = sum(len(task.vocabulary.decode(text.tolist())) for text in task._splits["valid"])
    wanted = found["loss"] * task.size("valid") / math.log(2) / written
    assert found[BITS_PER_BYTE.name] == pytest.approx(wanted, rel=1e-6)
    assert found["perplexity"] == pytest.approx(math.exp(found["loss"]))
    lacks = tokens == "words"  # what is not among them is one token, and costs little
    assert ("compares all kinds of tokens" in task.metrics[0].about) != lacks
    assert any("lacks as one token" in name for name in task.reference) == lacks


def test_bytes_are_as_they_were(tmp_path):
    task = TextConfig(str(wikitext(tmp_path)), segment=8).build()
    assert (task.metrics[0], task.vocab_size, task.preprocessing()) == (BITS_PER_BYTE, 256, TextPreprocessing(8))
    assert Bytes().words("aü\0".encode()) == [("aü", 3), ("␀", 1)]


def test_vocabularies_that_do_not_fit(tmp_path):
    text = str(wikitext(tmp_path))
    refuses("data.tokens: .*'word', which is no file", TextConfig(text, tokens="word").build)
    refuses("data.words: .*found words 9, tokens 'bytes'", TextConfig(text, words=9).build)
    for name, content in (("words.txt", b"the\ncat\n"), ("wrong.json", b'{"a": 1}')):
        (tmp_path / name).write_bytes(content)
        words = f"{name}: expected a tokenizer.json of the library tokenizers, found"
        refuses(words, TextConfig(text, tokens=str(tmp_path / name)).build)


def test_the_text_must_be_utf_8(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"word " * 800)
    (tmp_path / "b.txt").write_bytes(b"word " * 400 + b"\xe9")
    refuses(r"b\.txt: offset 2000: .* the byte 0xe9", TextConfig(str(tmp_path), tokens="words").build)
    about = TextPreprocessing.of(8, "words", Words.count([("a", b"word\n")]))
    (one,) = about.predict(None, [tmp_path / "b.txt"], {"length": 3})
    assert "b.txt: offset 2000: expected UTF-8" in one.problem
