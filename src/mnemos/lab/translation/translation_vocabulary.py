"""Sub-words of translation: learned by byte-pair encoding, or read from a tokenizer.json.

BPE dropout (Provilkov et al. 2020) divides a word into other sub-words each time that training reads it.
"""

import json
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from mnemos.atomic import write_text
from mnemos.lab.tasks.files import read_bytes
from mnemos.lab.tasks.vocabulary import as_characters
from mnemos.libraries import tokenizers
from mnemos.types import InputError

PAD, START, END, UNKNOWN = range(4)
SPECIAL = ("<pad>", "<s>", "</s>", "<unk>")  # of every tokenizer that translates, in this order
LEAST = 16  # sub-words: fewer hold the special tokens and hardly a letter
MARK = "▁"  # the beginning of a word


class SubWordTokens:
    """The sub-words of a tokenizer.json whose first four tokens are <pad>, <s>, </s> and <unk>.

    `train` makes such a file: byte-pair encoding (Sennrich et al. 2016) inside words and punctuation marks, with ▁ for
    the beginning of a word. The joined sub-words are the text, apart from repeated spaces and unknown characters.
    content: that of the file; source: its name, for errors.
    Raises InputError for other content, other special tokens, and if the library tokenizers is not installed.
    """

    def __init__(self, content: str, source: str = "the tokenizer") -> None:
        library: Any = tokenizers()
        self.content = content
        try:
            self.library: Any = library.Tokenizer.from_str(content)
            about = json.loads(content)
        except Exception as error:  # the library raises Exception itself
            raise InputError(
                f"{source}: expected a tokenizer.json of the library tokenizers, found another file "
                f" ({' '.join(str(error).split()):.80}); make one with mnemos tokenizer"
            ) from None
        first = tuple(self.library.id_to_token(i) for i in range(len(SPECIAL)))
        if first != SPECIAL:
            raise InputError(
                f"{source}: expected the first tokens {' '.join(SPECIAL)}, found {' '.join(map(str, first))}; make the "
                "tokenizer with mnemos tokenizer"
            )
        self.library.no_truncation()
        self.library.no_padding()
        self.library.encode_special_tokens = True  # "</s>" in a sentence is text
        self.size = int(self.library.get_vocab_size(with_added_tokens=True))
        self.model = about["model"]
        normal = self.library.normalizer
        self.lowercase = normal is not None and normal.normalize_str("A").endswith("a")

    @classmethod
    def read(cls, path: str | Path) -> "SubWordTokens":
        """The sub-words of a tokenizer.json. Raises InputError if it cannot be read, and as the class."""
        return cls(as_characters(read_bytes(path), str(path)), str(path))

    @classmethod
    def train(
        cls,
        lines: Iterable[str],
        size: int,
        lowercase: bool = False,
        source: str = "the training split",
        option: str = "data.subwords",
    ) -> "SubWordTokens":
        """Byte-pair encoding with `size` sub-words, learned from lines of text, which are read once.

        lowercase: the text is lower-cased first. source: the name of the text, option: what sets the size, for errors.
        Equal lines in the same order give the same tokenizer. Memory: the distinct words of the text. Raises InputError
        for fewer than 16 sub-words, and for text that gives fewer than `size`.
        """
        if size < LEAST:
            raise InputError(f"{option}: expected at least {LEAST} sub-words, found {size}; raise it")
        library: Any = tokenizers()
        tokenizer = library.Tokenizer(library.models.BPE(unk_token=SPECIAL[UNKNOWN]))
        normal = [library.normalizers.NFC(), *([library.normalizers.Lowercase()] if lowercase else [])]
        tokenizer.normalizer = library.normalizers.Sequence(normal)
        tokenizer.pre_tokenizer = library.pre_tokenizers.Sequence(
            [library.pre_tokenizers.Metaspace(MARK), library.pre_tokenizers.Punctuation("isolated")]
        )
        tokenizer.decoder = library.decoders.Metaspace(MARK)
        trainer = library.trainers.BpeTrainer(vocab_size=size, special_tokens=list(SPECIAL), show_progress=False)
        tokenizer.train_from_iterator(lines, trainer)
        if (learned := tokenizer.get_vocab_size()) != size:
            problem, fix = "more characters", "raise"
            if learned < size:
                problem, fix = f"enough for {learned:,}, {len(SPECIAL)} of them special tokens", "lower"
            raise InputError(f"{source}: expected text for {size:,} sub-words, found {problem}; {fix} {option}")
        return cls(tokenizer.to_str())

    def write(self, path: str | Path) -> None:
        write_text(path, self.content)

    def encode(self, lines: Sequence[str]) -> list[list[int]]:
        """The sub-words of each line, without special tokens."""
        return [one.ids for one in self.library.encode_batch_fast(list(lines), add_special_tokens=False)]

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self.library.decode([token for token in tokens if token >= len(SPECIAL)]))


class BPEDropout:
    """Divides encoded sentences again at random: each step of a word's encoding leaves out each merge with `rate`.

    The library's own dropout draws from a generator without a seed, so a run would not resume exactly; this class draws
    from the generator of each call.
    Cost: about 30 µs per word. Raises InputError for a tokenizer that is no byte-pair encoding, and for rates outside
    [0, 1).
    """

    def __init__(self, vocabulary: SubWordTokens, rate: float) -> None:
        if not 0 <= rate < 1:
            raise InputError(f"data.bpe_dropout must be at least 0 and below 1, found {rate}")
        if vocabulary.model.get("type") != "BPE":
            raise InputError(
                f"data.bpe_dropout: expected a tokenizer of byte-pair encoding, found {vocabulary.model.get('type')}; "
                "use 0"
            )
        self.rate = rate
        ids: dict[str, int] = vocabulary.model["vocab"]
        # (left, right) -> (rank, the merged sub-word): a lower rank is merged first.
        self._merges: dict[tuple[int, int], tuple[int, int]] = {}
        self._parts: dict[int, tuple[int, int]] = {}
        for rank, merge in enumerate(vocabulary.model["merges"]):
            left, right = merge if isinstance(merge, list) else merge.split(" ")
            pair, whole = (ids[left], ids[right]), ids[left + right]
            self._merges.setdefault(pair, (rank, whole))
            self._parts.setdefault(whole, pair)
        self._first = {i for name, i in ids.items() if name.startswith(MARK) or name in SPECIAL}  # that begin a word
        self._letters = lru_cache(maxsize=None)(self._split)

    def _split(self, token: int) -> tuple[int, ...]:
        """The characters of a sub-word, as tokens."""
        if token not in self._parts:
            return (token,)
        left, right = self._parts[token]
        return (*self._letters(left), *self._letters(right))

    def __call__(self, tokens: Sequence[int], random: np.random.Generator) -> list[int]:
        """The sentence in other sub-words of the same text."""
        words: list[list[int]] = []
        for token in tokens:
            if not words or token in self._first:
                words.append([])
            words[-1] += self._letters(token)
        # Each word's characters are merged until every further merge was left out.
        for word in words:
            while len(word) > 1:
                allowed = random.random(len(word) - 1) >= self.rate
                pairs = ((self._merges.get((word[i], word[i + 1])), i) for i in np.flatnonzero(allowed).tolist())
                best = min(((merge, i) for merge, i in pairs if merge is not None), default=None)
                if best is None:
                    break
                (_, whole), i = best
                word[i : i + 2] = [whole]
        return [token for word in words for token in word]
