import bz2
import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from mnemos.lab.tasks import no_learning
from mnemos.lab.tasks.no_learning import no_better, text_scores
from mnemos.lab.tasks.text import TextConfig
from mnemos.lab.tasks.vocabulary import Bytes

TEXT = b"the cat sat on the mat and the dog sat on the log\n"


def by_definition(task) -> tuple[float, float]:
    """Bits of the test split by unigrams and bigrams, token by token."""
    pairs, ones, start, size = Counter(), Counter(), task.vocabulary.start, task.vocabulary.size
    for document in task._splits["train"]:
        for before, token in zip([start, *document.tolist()], document.tolist(), strict=False):
            pairs[before, token] += 1
            ones[token] += 1
    after = {a: [n for (b, _), n in pairs.items() if b == a] for a in {a for a, _ in pairs}}
    bits = [0.0, 0.0]
    for document in task._splits["test"]:
        for a, b in zip([start, *document.tolist()], document.tolist(), strict=False):
            one = (ones[b] + 1) / (sum(ones.values()) + size)
            n, t = sum(after.get(a, [])), len(after.get(a, []))
            two = (pairs[a, b] + t * one) / (n + t) if n else one
            bits = [bits[0] - math.log2(one), bits[1] - math.log2(two)]
    return tuple(bits)


@pytest.mark.parametrize("tokens", ["bytes", "words", "sub-words"])
def test_ngrams_are_fitted_on_the_training_split_and_scored_on_the_test_split(tmp_path, monkeypatch, tokens):
    for split, times in {"train": 60, "valid": 25, "test": 30}.items():
        (tmp_path / f"{split}.txt").write_bytes(TEXT * times + b"a new word, of the " + split.encode() + b"\n")
    if tokens == "sub-words":
        made = Tokenizer(models.WordLevel({"the": 0, "cat": 1, "sat": 2, "?": 3}, unk_token="?"))
        made.pre_tokenizer = pre_tokenizers.Whitespace()
        tokens = str(tmp_path / "tokenizer.json")
        made.save(tokens)
    config = TextConfig(str(tmp_path), segment=16, tokens=tokens, longest=200)
    task = config.build()
    monkeypatch.setattr(no_learning, "_CHUNK", 70)  # several chunks, also of one document
    if tokens == "words":
        monkeypatch.setattr(no_learning, "_DENSE", 0)  # as of more words
    bits = by_definition(task)
    text = b"".join(task.vocabulary.decode(document.tolist()) for document in task._splits["test"])
    size = sum(task.vocabulary.lengths[document].sum() for document in task._splits["test"])
    unit = task.vocabulary.unit.removesuffix("s")
    more = "" if task.vocabulary.unknown is None else ", what the vocabulary lacks as one token"
    assert task.reference == {
        f"{unit} unigrams": pytest.approx(bits[0] / size),
        f"{unit} bigrams": pytest.approx(bits[1] / size),
        "bz2 of the text alone" + more: 8 * len(bz2.compress(text)) / size,
    }
    assert bits[1] < bits[0]
    without = [np.array([task.vocabulary.start])]
    if not task.vocabulary.lengths[without[0]]:  # no text to divide by
        assert text_scores(task._splits["train"], without, task.vocabulary) == {}
    assert list(replace(config, tokens="bytes").build_to_score("test").reference) == ["bz2 of the text alone"]


def test_long_text_is_compressed_in_part_and_empty_text_has_no_scores(monkeypatch):
    text, none = np.frombuffer(TEXT * 1400, np.uint8), np.zeros(0, np.uint8)
    monkeypatch.setattr(no_learning, "_MOST", 2**16)
    monkeypatch.setattr(no_learning, "_CHUNK", 7000)
    wanted = 8 * len(bz2.compress(text.tobytes()[: 2**16])) / 2**16
    name = "bz2 of the text alone (its first 0.0625 MiB)"
    assert text_scores([], [text], Bytes()) == {name: wanted}
    assert no_better({"a": 9.0}, {name: wanted}, "bits per byte", False) == []
    assert text_scores([text], [none], Bytes()) == text_scores([none], [text], Bytes()) == {}


def test_who_has_learned_nothing_is_named_once():
    known = {"byte unigrams": 4.56, "byte bigrams": 3.6, "bz2 of the text alone": 2.5}
    scores = {"a": 4.55, "b": 4.7, "c": 3.55, "d": 3.0, "e": math.nan}
    assert no_better(scores, known, "bits per byte", False) == [
        "Not 2% better than byte unigrams, 4.560 bits per byte: a 4.550, b 4.700.",
        "Not 2% better than byte bigrams, 3.600 bits per byte: c 3.550.",
    ]
    assert no_better({"a": 3.527, "b": 3.529}, known, "bits per byte", False)[0].endswith("bits per byte: b 3.529.")
    assert no_better({"a": 0.1, "b": 0.2}, {"a guess": 0.1}, "accuracy", True) == [
        "No better than a guess, 0.100 accuracy: a 0.100."
    ]
