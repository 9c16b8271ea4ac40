"""`mnemos predict` for language models of text: how a model continues text files."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

import torch

from mnemos.generate.stream import Stream
from mnemos.registry import register
from mnemos.types import InputError

from .files import read_bytes
from .preprocessing import Predicted, Preprocessing
from .subword_vocabulary import SubWords
from .text_files import find_text, nothing_found
from .vocabulary import Bytes, Vocabulary
from .word_vocabulary import Words

_STDIN = "-"


@register
@dataclass(frozen=True)
class TextPreprocessing(Preprocessing):
    """The most probable continuation of texts, token by token; - is the standard input, a folder the texts in it.

    Each file is read as a document of the training data: after the token `start`, in segments of `segment` tokens.
    tokens: what a token is, as the run's `TextConfig.tokens` says. words: the vocabulary of words, tokenizer: the
    content of the file of sub-words; at most one of the two is there, and without them tokens are bytes.
    """

    name: ClassVar[str] = "text"
    options: ClassVar[Mapping[str, int]] = MappingProxyType({"length": 200})

    segment: int
    start: int = 0
    tokens: str = "bytes"
    words: tuple[str, ...] = ()
    tokenizer: str = ""

    @classmethod
    def of(cls, segment: int, tokens: str, vocabulary: Vocabulary) -> "TextPreprocessing":
        """The preprocessing that holds a vocabulary."""
        words = vocabulary.list if isinstance(vocabulary, Words) else ()
        tokenizer = vocabulary.content if isinstance(vocabulary, SubWords) else ""
        return cls(segment, vocabulary.start, tokens, words, tokenizer)

    def vocabulary(self) -> Vocabulary:
        """The run's vocabulary. Raises InputError for sub-words where the library tokenizers is missing."""
        if self.tokenizer:
            return SubWords(self.tokenizer, self.tokens)
        return Words(self.words, "the run's vocabulary") if self.words else Bytes()

    def difference(self, other: Preprocessing) -> str | None:
        """See the base class."""
        if not isinstance(other, TextPreprocessing):
            return super().difference(other)
        if (self.words, self.tokenizer) == (other.words, other.tokenizer):
            return None
        found = f"{len(other.words):,} words" if other.words else "sub-words" if other.tokenizer else "bytes"
        return (
            f"expected the vocabulary that the run's model was trained with ({self.tokens}), found another one of "
            f"{found}; leave data.tokens and data.words out"
        )

    def predict(self, model: Any, files: Sequence[Path], options: Mapping[str, int]) -> Iterator[Predicted]:
        """The `length` tokens after each text: the most probable one, again and again."""
        vocabulary = self.vocabulary()
        for path in [path for file in files for path in _texts(file)]:
            try:
                text = vocabulary.encode(_text(path), str(path))
            except InputError as error:
                yield Predicted(str(path), "", problem=str(error))
                continue
            stream = Stream(model).prefill(torch.tensor([[self.start, *text.tolist()]]), self.segment)
            tokens, _ = stream.generate(options["length"], temperature=0.0)
            yield Predicted(str(path), vocabulary.decode(tokens[0].tolist()).decode(errors="replace"))


def _text(path: Path) -> bytes:
    text = sys.stdin.buffer.read() if str(path) == _STDIN else read_bytes(path)
    if not text:
        raise InputError(f"{path}: expected text that the model continues, found 0 bytes; add text to it")
    return text


def _texts(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    found = find_text(path)
    if not found.read:
        raise nothing_found(path, found.left_out)
    return found.read
