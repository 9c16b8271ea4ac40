"""What no learning gives: n-grams and a compressor for text, and which models are no better than such a score."""

import bz2
import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from .vocabulary import Tokens, Vocabulary

UNIGRAMS, BIGRAMS = "unigrams", "bigrams"  # after the unit of the tokens, such as "byte unigrams"
COMPRESSED = "bz2 of the text alone"
NEAR = 0.02  # a model has learned more than n-grams if it is better by this share: below, it may have other frequencies
_CHUNK = 2**21  # tokens that are counted at a time
_MOST = 2**23  # bytes of text that are compressed
_PIECE = 2**20  # tokens of a document that are decoded at a time
_DENSE = 2**18  # pairs of tokens up to which each has a counter

Counts = tuple[NDArray[np.int64], NDArray[np.int64]]  # keys, sorted, and how often each occurs


def text_scores(train: Sequence[Tokens], scored: Sequence[Tokens], vocabulary: Vocabulary) -> dict[str, float]:
    """Bits per byte of scored documents by n-grams of the training documents, and by a compressor of these alone.

    n(·) are counts in `train` ([]: the n-grams are left out), N its tokens, V the vocabulary, a the token before b or
    the start token, and t(a) the number of different tokens after a (Witten and Bell):

        p(b) = (n(b) + 1) / (N + V),      p(b | a) = (n(ab) + t(a)·p(b)) / (n(a) + t(a))

    The compressor reads the documents one after the other, as the vocabulary decodes them, at most 8 MiB of them; the
    name of its score then says so. Returns {} if either text has no tokens.
    Cost: a pass over both and one over the pairs so far per two million tokens; 40 MB of bytes took 1 s and 50 MB of
    memory beside the text, 20 million words with 50,000 different ones 7 s.
    """
    if not any(map(len, scored)) or (train and not any(map(len, train))):
        return {}
    found, pairs = {}, _pairs(scored, vocabulary)
    size = int((pairs[1] * vocabulary.lengths[pairs[0] % vocabulary.size]).sum())
    if not size:  # tokens that stand for no text
        return {}
    if train:
        unit = vocabulary.unit.removesuffix("s")
        bits = _ngram_bits(_pairs(train, vocabulary), pairs, vocabulary.size)
        found = {f"{unit} {name}": one / size for name, one in zip((UNIGRAMS, BIGRAMS), bits, strict=True)}
    text = _beginning(scored, vocabulary)
    name = COMPRESSED if size <= _MOST else f"{COMPRESSED} (its first {_MOST / 2**20:g} MiB)"
    return found | {name: 8 * len(bz2.compress(text)) / min(size, _MOST)}


def _beginning(documents: Sequence[Tokens], vocabulary: Vocabulary) -> bytes:
    """The first `_MOST` bytes of the documents' text."""
    text = bytearray()
    for document in documents:
        for first in range(0, len(document), _PIECE):
            text += vocabulary.decode(document[first : first + _PIECE].tolist())
            if len(text) >= _MOST:
                return bytes(text[:_MOST])
    return bytes(text)


def _parts(documents: Sequence[Tokens], vocabulary: Vocabulary) -> Iterator[tuple[Tokens, int]]:
    """Each document in parts of at most `_CHUNK` tokens, and the token before each."""
    for document in documents:
        for first in range(0, len(document), _CHUNK):
            before = int(document[first - 1]) if first else vocabulary.start
            yield document[first : first + _CHUNK], before


def _pairs(documents: Sequence[Tokens], vocabulary: Vocabulary) -> Counts:
    """How often each pair a·V + b occurs: every token with the one before it, as a model reads them."""
    size = vocabulary.size
    keys, counts = np.zeros(0, np.int64), np.zeros(0, np.int64)
    waiting: list[NDArray[np.int64]] = []
    left = sum(map(len, documents))
    for part, before in _parts(documents, vocabulary):
        after = part.astype(np.int64)
        waiting.append(np.append(before, after[:-1]) * size + after)
        left -= len(part)
        if sum(map(len, waiting)) < _CHUNK and left:
            continue
        new, times = _count(np.concatenate(waiting), size * size)
        waiting = []
        keys, places = np.unique(np.append(keys, new), return_inverse=True)
        counts = np.bincount(places, np.append(counts, times)).astype(np.int64)
    return keys, counts


def _count(pairs: NDArray[np.int64], most: int) -> Counts:
    if most > _DENSE:
        return np.unique(pairs, return_counts=True)
    times = np.bincount(pairs)
    keys = np.flatnonzero(times)
    return keys, times[keys]


def _ngram_bits(train: Counts, scored: Counts, size: int) -> tuple[float, float]:
    """(bits by unigrams, bits by bigrams) of the scored pairs."""
    (keys, counts), (wanted, times) = train, scored
    of_token = np.bincount(keys % size, counts, size)
    before, different = np.bincount(keys // size, counts, size), np.bincount(keys // size, minlength=size)
    one = ((of_token + 1) / (of_token.sum() + size))[wanted % size]
    place = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    both = np.where(keys[place] == wanted, counts[place], 0)
    a = wanted // size
    two = np.where(before[a] > 0, (both + different[a] * one) / np.maximum(before[a] + different[a], 1), one)
    return float(-(times * np.log2(one)).sum()), float(-(times * np.log2(two)).sum())


def no_better(
    scores: Mapping[str, float], reference: Mapping[str, float], metric: str, higher_is_better: bool
) -> list[str]:
    """Sentences about the models that are no better than a score without learning; each is named once.

    scores: in the metric, by the models' names: means over seeds. reference: `Task.reference`. A compressor is for
    scale only.
    """
    known = sorted((value, what) for what, value in reference.items() if not what.startswith(COMPRESSED))
    left, sentences = {name: score for name, score in scores.items() if math.isfinite(score)}, []
    for value, what in known if higher_is_better else known[::-1]:  # the weakest first
        of_text = what.endswith((UNIGRAMS, BIGRAMS))
        bound = value * (1 - NEAR) if of_text else value
        low = [name for name, one in left.items() if (one <= bound if higher_is_better else one >= bound)]
        if low:
            found = ", ".join(f"{name} {left.pop(name):.3f}" for name in low)
            better = f"not {NEAR:.0%} better" if of_text else "no better"
            sentences.append(f"{better.capitalize()} than {what}, {value:.3f} {metric}: {found}.")
    return sentences
