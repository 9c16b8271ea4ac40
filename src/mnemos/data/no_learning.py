"""What no learning gives: n-grams and a compressor for text, and which models are no better than such a score."""

import bz2
import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from .vocabulary import Tokens, Vocabulary

UNIGRAMS, BIGRAMS = "unigrams", "bigrams"  # after the unit of the tokens, such as "byte unigrams"
COMPRESSED = "bz2 of the text alone"
NEAR = 0.02  # a model has learned more than n-grams if it is better by this share: below, it may have other frequencies
_CHUNK = 2**22  # tokens that are counted at a time
_DENSE = 2**18  # pairs of tokens up to which each has a counter

Counts = tuple[NDArray[np.int64], NDArray[np.int64]]  # keys, sorted, and how often each occurs


def text_scores(train: Sequence[Tokens], scored: Sequence[Tokens], vocabulary: Vocabulary) -> dict[str, float]:
    """Bits per byte of scored documents by n-grams of the training documents, and by a compressor of these alone.

    n(·) are counts in `train` ([]: the n-grams are left out), N its tokens, V the vocabulary, a the token before b or
    the start token, and t(a) the number of different tokens after a (Witten and Bell):

        p(b) = (n(b) + 1) / (N + V),      p(b | a) = (n(ab) + t(a)·p(b)) / (n(a) + t(a))

    The compressor reads the documents one after the other, as the vocabulary decodes them. Cost: a pass over both.
    """
    size = sum(int(vocabulary.lengths[document].sum()) for document in scored)
    found = {}
    if train:
        unit = vocabulary.unit.removesuffix("s")
        bits = _ngram_bits(_pairs(train, vocabulary), _pairs(scored, vocabulary), vocabulary.size)
        found = {f"{unit} {name}": one / size for name, one in zip((UNIGRAMS, BIGRAMS), bits, strict=True)}
    text = b"".join(vocabulary.decode(document.tolist()) for document in scored)
    return found | {COMPRESSED: 8 * len(bz2.compress(text)) / size}


def _pairs(documents: Sequence[Tokens], vocabulary: Vocabulary) -> Counts:
    """How often each pair a·V + b occurs: every token with the one before it, as a model reads them."""
    size = vocabulary.size
    keys, counts, waiting, tokens = np.zeros(0, np.int64), np.zeros(0, np.int64), [], 0
    for number, document in enumerate(documents, start=1):
        after = document.astype(np.int64)
        waiting.append(np.append(vocabulary.start, after[:-1]) * size + after)
        tokens += len(after)
        if tokens < _CHUNK and number < len(documents):
            continue
        new, times = _counted(np.concatenate(waiting), size * size)
        keys, places = np.unique(np.append(keys, new), return_inverse=True)
        counts = np.bincount(places, np.append(counts, times)).astype(np.int64)
        waiting, tokens = [], 0
    return keys, counts


def _counted(pairs: NDArray[np.int64], most: int) -> Counts:
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
    """Sentences about the models that have learned nothing, or less than pairs of tokens tell; each is named once.

    scores: in the metric, by the models' names. reference: `Task.reference`. A compressor is for scale only.
    """
    known = sorted((value, what) for what, value in reference.items() if what != COMPRESSED)
    left, sentences = {name: score for name, score in scores.items() if math.isfinite(score)}, []
    for value, what in known if higher_is_better else known[::-1]:  # the weakest first
        of_text = what.endswith((UNIGRAMS, BIGRAMS))
        bound = value * (1 - NEAR) if of_text else value
        low = [name for name, one in left.items() if (one <= bound if higher_is_better else one >= bound)]
        if low:
            found = " and ".join(filter(None, [", ".join(low[:-1]), low[-1]]))
            sentences.append(f"{found} {_learned(what, [left.pop(name) for name in low], metric, value)}.")
    return sentences


def _learned(what: str, scores: Sequence[float], metric: str, value: float) -> str:
    several = len(scores) > 1
    if not what.endswith((UNIGRAMS, BIGRAMS)):
        return f"{'do' if several else 'does'} no better than {what} ({value:.3f}): the task was not learned"
    unit = what.split()[0].replace("byte", "letter")
    learned = f"no more than {unit} frequencies" if what.endswith(UNIGRAMS) else f"less than which {unit} follows which"
    found = ", ".join(f"{score:.3f}" for score in scores)
    return f"{'have' if several else 'has'} learned {learned}: {found} {metric}, and {what} have {value:.3f}"
