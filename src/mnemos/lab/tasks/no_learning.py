"""What no learning gives: n-grams and a compressor for text, and which models are no better than such a score."""

import bz2
import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from .metrics import MAJORITY
from .vocabulary import Tokens, Vocabulary

UNIGRAMS, BIGRAMS = "unigrams", "bigrams"  # after the unit of the tokens, such as "byte unigrams"
COMPRESSED = "bz2 of the text alone"
NEAR = 0.02  # a model has learned more than n-grams if it is better by this share: below, it may have other frequencies
_CHUNK = 2**21  # tokens that are counted at a time
_MOST = 2**23  # bytes of text that are compressed
_PIECE = 2**20  # tokens of a document that are decoded at a time
_DENSE = 2**18  # pairs of tokens up to which each has a counter

Counts = tuple[NDArray[np.int64], NDArray[np.int64]]  # pairs of tokens a·V + b, sorted, and how often each occurs


def text_scores(train: Sequence[Tokens], scored: Sequence[Tokens], vocabulary: Vocabulary) -> dict[str, float]:
    """Bits per byte of scored documents by n-grams of the training documents, and by a compressor of these alone.

    n(·) are counts in `train` ([]: the n-grams are left out), N its tokens, V the vocabulary, a the token before b or
    the start token, and t(a) the number of different tokens after a (Witten and Bell):

        p(b) = (n(b) + 1) / (N + V),      p(b | a) = (n(ab) + t(a)·p(b)) / (n(a) + t(a))

    The compressor reads at most 8 MiB of the decoded documents; the name of its score then says so. Returns {} if
    either text has no tokens. Cost: 1 s for 40 MB of bytes, 7 s for 20 million words with 50,000 different ones.
    """
    if not any(map(len, scored)) or (train and not any(map(len, train))):
        return {}
    V = vocabulary.size
    pairs, times = _count_pairs(scored, vocabulary)
    size = int((times * vocabulary.lengths[pairs % V]).sum())
    if not size:  # tokens that stand for no text
        return {}
    scores = {}
    # --- n-grams ---
    if train:
        keys, counts = _count_pairs(train, vocabulary)
        of_token = np.bincount(keys % V, counts, V)
        before, different = np.bincount(keys // V, counts, V), np.bincount(keys // V, minlength=V)
        one = ((of_token + 1) / (of_token.sum() + V))[pairs % V]
        nearest = np.minimum(np.searchsorted(keys, pairs), len(keys) - 1)
        both, a = np.where(keys[nearest] == pairs, counts[nearest], 0), pairs // V
        two = np.where(before[a] > 0, (both + different[a] * one) / np.maximum(before[a] + different[a], 1), one)
        for name, p in ((UNIGRAMS, one), (BIGRAMS, two)):
            scores[f"{vocabulary.unit.removesuffix('s')} {name}"] = float(-(times * np.log2(p)).sum()) / size
    # --- the compressor ---
    text = bytearray()
    for document in scored:
        for first in range(0, len(document), _PIECE):
            if len(text) < _MOST:
                text += vocabulary.decode(document[first : first + _PIECE].tolist())
    name = COMPRESSED if vocabulary.unknown is None else f"{COMPRESSED}, what the vocabulary lacks as one token"
    name = name if size <= _MOST else f"{name} (its first {_MOST / 2**20:g} MiB)"
    return scores | {name: 8 * len(bz2.compress(bytes(text[:_MOST]))) / min(size, _MOST)}


def _count_pairs(documents: Sequence[Tokens], vocabulary: Vocabulary) -> Counts:
    """How often each pair occurs: every token with the one before it, as a model reads them."""
    V = vocabulary.size
    keys, counts = np.zeros(0, np.int64), np.zeros(0, np.int64)
    waiting: list[NDArray[np.int64]] = []
    left = sum(map(len, documents))
    for document, first in ((d, i) for d in documents for i in range(0, len(d), _CHUNK)):
        after = document[first : first + _CHUNK].astype(np.int64)
        before = int(document[first - 1]) if first else vocabulary.start
        waiting.append(np.append(before, after[:-1]) * V + after)
        left -= len(after)
        if sum(map(len, waiting)) < _CHUNK and left:
            continue
        # --- a chunk is full: add its counts ---
        pairs, waiting = np.concatenate(waiting), []
        if V * V > _DENSE:
            new, times = np.unique(pairs, return_counts=True)
        else:
            every = np.bincount(pairs)
            new = np.flatnonzero(every)
            times = every[new]
        keys, index = np.unique(np.append(keys, new), return_inverse=True)
        counts = np.bincount(index, np.append(counts, times)).astype(np.int64)
    return keys, counts


def no_better(
    scores: Mapping[str, float], reference: Mapping[str, float], metric: str, higher_is_better: bool
) -> list[str]:
    """Sentences about the models that are no better than a score without learning; each is named once.

    scores: the models' means over seeds. reference: `Task.reference`. A compressor is for scale only.
    """
    ranked = sorted((value, what) for what, value in reference.items() if not what.startswith(COMPRESSED))
    left, sentences = {name: score for name, score in scores.items() if math.isfinite(score)}, []
    for value, what in ranked if higher_is_better else ranked[::-1]:  # the weakest first
        of_text = what.endswith((UNIGRAMS, BIGRAMS))
        bound = value * (1 - NEAR) if of_text else value
        low = [name for name, one in left.items() if (one <= bound if higher_is_better else one >= bound)]
        if low:
            models = ", ".join(f"{name} {left.pop(name):.3f}" for name in low)
            better = f"not {NEAR:.0%} better" if of_text else "no better"
            of_what = "always answering the majority class" if what == MAJORITY else what
            sentences.append(f"{better.capitalize()} than {of_what}, {value:.3f} {metric}: {models}.")
    return sentences
