"""Parallel text as sub-words: cleaned by length and ratio with what was left out counted, and batched by tokens."""

from array import array
from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import islice, pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mnemos.generators import ORDER, generator
from mnemos.types import InputError

from .parallel_text import SentencePair
from .translation_vocabulary import SubWordTokens

_BLOCK = 4096  # pairs that are encoded together
_NOISE = 4  # tokens
FEWEST = 8  # rows of a batch, or a multiple of it, where so many fit: fairseq's required-batch-size-multiple


class Vocabularies(NamedTuple):
    """The sub-words of the two sides; one object if the sides share them."""

    source: SubWordTokens
    target: SubWordTokens

    @property
    def joint(self) -> bool:
        return self.source.content == self.target.content


class Corpus:
    """A split: the sub-words of both sides, without special tokens, and with `texts` the sentences too.

    A pair with an empty side, with more than `longest` sub-words, or with more than `ratio` times as many on one side
    (0: any) is left out, and counted in `cleaning`. strict: such a pair raises InputError with its file and
    line, and no ratio is too great, because held-out pairs must all be scored. Memory: 4 bytes per token, 80 per row,
    and the sentences.
    """

    def __init__(
        self,
        pairs: Iterable[SentencePair],
        vocabularies: Vocabularies,
        longest: int,
        ratio: float,
        texts: bool = True,
        strict: bool = True,
    ) -> None:
        self.longest, self.ratio = longest, ratio
        self.source: list[array[int]] = []
        self.target: list[array[int]] = []
        self.sources: list[str] = []
        self.references: list[str] = []
        self.cleaning = {"read": 0, "empty": 0, "long": 0, "uneven": 0}
        rest = iter(pairs)
        while block := list(islice(rest, _BLOCK)):
            self.cleaning["read"] += len(block)
            sources = vocabularies.source.encode([pair.source for pair in block])
            targets = vocabularies.target.encode([pair.target for pair in block])
            for pair, source, target in zip(block, sources, targets, strict=True):
                sizes = len(source), len(target)
                shorter, longer = sorted(sizes)
                if strict and not 0 < shorter <= longer <= longest:
                    sides = zip((pair.source_at, pair.target_at), sizes, strict=True)
                    (path, line), size = next((at, size) for at, size in sides if not 0 < size <= longest)
                    problem, more = (f"{size:,}", ", or raise data.longest") if size else ("an empty line", "")
                    raise InputError(
                        f"{path}: line {line:,}: expected a sentence of 1 to {longest:,} sub-words, because held-out "
                        f"pairs must all be scored, found {problem}; correct the line, or remove it in both "
                        f"languages{more}"
                    )
                if not shorter:
                    self.cleaning["empty"] += 1
                elif longer > longest:
                    self.cleaning["long"] += 1
                elif not strict and ratio and longer > ratio * shorter:
                    self.cleaning["uneven"] += 1
                else:
                    self.source.append(array("i", source))
                    self.target.append(array("i", target))
                    if texts:
                        self.sources.append(pair.source)
                        self.references.append(pair.target)

    def __len__(self) -> int:
        return len(self.source)

    @property
    def lengths(self) -> NDArray[np.int32]:
        """Tokens of each pair as the model reads them, [N, 2]: sub-words and one special token."""
        return np.array([[*map(len, self.source)], [*map(len, self.target)]], np.int32).T + 1

    def describe(self) -> str:
        """How many pairs were read, and how many of them were left out, by reason."""
        read = self.cleaning["read"]
        if len(self) == read:
            return f"{read:,} pairs, none left out"
        reasons = {
            "empty": "with an empty side",
            "long": f"with more than {self.longest:,} sub-words",
            "uneven": f"with more than {self.ratio:g} times as many sub-words on one side",
        }
        left = ", ".join(f"{self.cleaning[name]:,} {what}" for name, what in reasons.items() if self.cleaning[name])
        return f"{len(self):,} of {read:,} pairs; left out: {left}"


class TokenBatches:
    """Which rows make batch i, as a pure function of (i, seed): every row once per epoch.

    lengths: [N, 2], tokens of source and target. A batch has as many rows as fit into `tokens` when each side is padded
    to the longest sentence of the batch on either side, and at most `rows`: fairseq's max-tokens and batch-size. The
    rows are sorted by their longer side, then by the other, to which each epoch adds up to 4 tokens at random, so that
    other rows share a batch. The sorted longer sides are the same every epoch, so the batches are cut at the same
    rows every epoch; then they are shuffled.
    Cost: O(N log N) once per epoch, O(rows) per batch. Memory: 16 bytes per row. Raises InputError for a sentence that
    does not fit into a batch.
    """

    def __init__(self, lengths: NDArray[np.int32], tokens: int, rows: int) -> None:
        self._long, self._short = lengths.max(1), lengths.min(1)
        longest = int(self._long.max())
        if longest > tokens:
            raise InputError(
                f"data.batch_tokens: expected at least {longest:,}, the longest sentence, found {tokens:,}; raise it, "
                "or lower data.longest"
            )
        # --- where each batch starts, and the end ---
        descending, starts = -np.sort(-self._long), [0]
        while starts[-1] < len(descending):
            fits = min(rows, tokens // int(descending[starts[-1]]))
            starts.append(min(len(descending), starts[-1] + (fits - fits % FEWEST if fits > FEWEST else fits)))
        if len(starts) > 2 and starts[-1] - starts[-2] < starts[-2] - starts[-3]:
            starts[-2] = (starts[-3] + starts[-1] + 1) // 2  # a last batch of fewer rows shares those of the one before
        self._spans = [slice(start, end) for start, end in pairwise(starts)]
        self._epoch = lru_cache(maxsize=2)(self._shuffle)

    def __len__(self) -> int:
        return len(self._spans)

    @property
    def fewest(self) -> int:
        return min(span.stop - span.start for span in self._spans)

    def batch(self, index: int, seed: int) -> NDArray[np.int64]:
        """The rows of training batch `index` of the endless order."""
        epoch, number = divmod(index, len(self))
        order, spans = self._epoch(epoch, seed)
        return order[self._spans[spans[number]]]

    def once(self) -> Iterator[NDArray[np.int64]]:
        """All rows once, the longest first; equal ones in their own order."""
        order = np.lexsort((-self._short, -self._long))
        return (order[span] for span in self._spans)

    def _shuffle(self, epoch: int, seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(all rows, sorted by length; the order of the batches) in an epoch."""
        random = generator(seed, ORDER, epoch)
        order = np.lexsort((-self._short - _NOISE * random.random(len(self._short)), -self._long))
        return order, random.permutation(len(self))
