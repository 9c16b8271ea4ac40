"""Vocabularies: how text becomes tokens, and tokens become text. Tokens are bytes, words or sub-words."""

import json
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mnemos.libraries import tokenizers
from mnemos.types import InputError

from .files import read_bytes

Tokens = NDArray[np.integer[Any]]  # [n], each from 0 to `Vocabulary.size` − 1
END, UNKNOWN = "<eos>", "<unk>"  # the end of a line, and a word that the vocabulary lacks
_PIECE = 2**20  # characters that are encoded in one call, whose memory is a hundred times as large
_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class Vocabulary(ABC):
    """Base of vocabularies.

    unit: what a token is, in the plural. size: the number of tokens. start: the token before a document's first one.
    unknown: the token of everything that the vocabulary lacks; None if it lacks nothing, or refuses it. lengths: [size]
    int64, the bytes of text of each token, whose sum over a text is the number of bytes of `decode(tokens)`: the
    denominator of bits per byte.
    """

    unit: str
    size: int
    start: int
    unknown: int | None = None
    lengths: NDArray[np.int64]

    @abstractmethod
    def encode(self, text: bytes, where: str) -> Tokens:
        """The tokens of a text. Raises InputError, whose text begins with `where`, for text that has no tokens."""

    @abstractmethod
    def decode(self, tokens: Sequence[int]) -> bytes:
        """The text of tokens. The start token of a vocabulary that has one of its own is left out."""

    def around(self) -> tuple[list[int], list[int]]:
        """The special tokens before and after a text, such as [CLS] and [SEP]; by default none."""
        return [], []

    def words(self, tokens: Sequence[int]) -> list[tuple[str, int]]:
        """Group tokens into words: (text, number of tokens). Every token is in one group; by default each alone."""
        return [(self.decode([token]).decode("utf-8", "replace"), 1) for token in tokens]


class Bytes(Vocabulary):
    """The 256 bytes. The start token is byte 0, which does not occur in text."""

    unit, size, start = "bytes", 256, 0
    lengths = np.ones(256, np.int64)

    def encode(self, text: bytes, where: str) -> Tokens:
        return np.frombuffer(text, np.uint8)

    def decode(self, tokens: Sequence[int]) -> bytes:
        return bytes(tokens)

    def words(self, tokens: Sequence[int]) -> list[tuple[str, int]]:
        """Words, runs of white space, and other characters; the start token is ␀, what is no UTF-8 is �."""
        words = (match.group() for match in _WORD.finditer(bytes(tokens)))
        return [(word.replace(b"\0", "␀".encode()).decode("utf-8", "replace"), len(word)) for word in words]


_WORD = re.compile(rb"[\w\x80-\xff]+|\s+|[^\w\s\x80-\xff]")


def as_characters(text: bytes, where: str) -> str:
    """UTF-8 text, without the byte-order mark that some editors put before it."""
    try:
        return text.decode().removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{where}: offset {error.start}: expected UTF-8 text, found the byte 0x{text[error.start]:02x}; convert "
            "the file to UTF-8, or use data.tokens bytes"
        ) from None


class Words(Vocabulary):
    """Words in the order of a list: token i is words[i]. Adaptive softmax needs the most frequent words first.

    A line end is <eos>, which is also the start token. A word that the list lacks is <unk>. Decoding writes a space
    after each word and a line feed for <eos>, so a word counts its UTF-8 bytes and one, and <eos> one; a file with
    other white space has other bytes.
    """

    unit = "words"

    def __init__(self, words: Sequence[str]) -> None:
        self.list, self.size = tuple(words), len(words)
        self._ids = {word: i for i, word in enumerate(words)}
        self.start, self.unknown = self._ids[END], self._ids.get(UNKNOWN)
        self.lengths = np.array([len(word.encode()) + 1 for word in words], np.int64)
        self.lengths[self.start] = 1

    @classmethod
    def count(cls, texts: Iterable[tuple[str, bytes]], most: int = 0) -> "Words":
        """The words of (name, text) pairs, the most frequent first, those of equal frequency in alphabetical order.

        most: the size of the vocabulary, with <eos> and <unk>, which are always in it; 0: every word.
        """
        counts: Counter[str] = Counter()
        for name, text in texts:
            characters = as_characters(text, name)
            counts.update(characters.split())
            counts[END] += characters.count("\n")
        counts[UNKNOWN] += 0
        ranked = sorted(counts, key=lambda word: (-counts[word], word))
        if most:
            rare = {*[word for word in ranked if word not in (END, UNKNOWN)][most - 2 :]}
            ranked = [word for word in ranked if word not in rare]
        return cls(ranked)

    def encode(self, text: bytes, where: str) -> Tokens:
        """The words of each line, and <eos> for each line feed: a last line without one has no <eos>."""
        words = as_characters(text, where).replace("\n", f" {END} ").split()
        return np.fromiter((self._ids.get(word, self.unknown) for word in words), np.int32, len(words))

    def decode(self, tokens: Sequence[int]) -> bytes:
        """Each word with a space after it; <eos> is a line feed."""
        return "".join("\n" if token == self.start else f"{self.list[token]} " for token in tokens).encode()

    def words(self, tokens: Sequence[int]) -> list[tuple[str, int]]:
        return [(self.list[token], 1) for token in tokens]


class SubWords(Vocabulary):
    """The tokens of a tokenizer.json, without special tokens around a text, and a start token after them.

    A token's bytes are exact where the file is byte-level (GPT-2, Llama 3) or falls back to bytes (Llama 2). Otherwise
    they are those of its characters, with a space before each first piece of a word (WordPiece). A space that the file
    puts before a text is left out, because the text does not have it. content: that of the file; source: its name.
    """

    unit = "sub-words"

    def __init__(self, content: str, source: str = "the tokenizer") -> None:
        # --- the tokenizer, without a space before each text ---
        library: Any = tokenizers()
        try:
            about = json.loads(content)
            if (same := _without_prefix(about)) != about:
                content, about = json.dumps(same, ensure_ascii=False), same
            self._tokenizer = library.Tokenizer.from_str(content)
        except Exception as error:  # the library raises Exception itself
            raise InputError(
                f"{source}: expected a tokenizer.json of the library tokenizers, found another file "
                f"({' '.join(str(error).split()):.80}); save it with Tokenizer.save"
            ) from None
        self.content = content
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        # --- its tokens ---
        ids = self._tokenizer.get_vocab(with_added_tokens=True)
        self.start = max(ids.values(), default=-1) + 1
        self.size = self.start + 1
        unknown = about["model"].get("unk_token")
        self.unknown = ids.get(unknown) if isinstance(unknown, str) else about["model"].get("unk_id")
        # --- the bytes of each ---
        added = {one["content"] for one in about.get("added_tokens") or ()}
        byte_level = "ByteLevel" in {*_types(about.get("decoder")), *_types(about.get("pre_tokenizer"))}
        self.lengths = np.zeros(self.size, np.int64)
        for token, i in ids.items():
            if token in added:
                self.lengths[i] = len(token.encode())
            elif byte_level:
                self.lengths[i] = len(token)  # one character for each byte
            elif about["model"].get("type") == "WordPiece":
                self.lengths[i] = len(token.removeprefix("##").encode()) + (not token.startswith("##"))
            else:
                self.lengths[i] = 1 if _BYTE.fullmatch(token) else len(token.replace("▁", " ").encode())

    @classmethod
    def read(cls, path: str | Path) -> "SubWords":
        return cls(as_characters(read_bytes(path), str(path)), str(path))

    def around(self) -> tuple[list[int], list[int]]:
        whole, bare = self._tokenizer.encode("a"), self._tokenizer.encode("a", add_special_tokens=False)
        inside = [i for i, special in enumerate(whole.special_tokens_mask) if not special]
        if not inside or [whole.ids[i] for i in inside] != bare.ids:  # not told apart: "a" may have no token
            return [], []
        return whole.ids[: inside[0]], whole.ids[inside[-1] + 1 :]

    def encode(self, text: bytes, where: str) -> Tokens:
        characters = as_characters(text, where)
        ids: list[int] = []
        start = 0
        while start < len(characters):  # in pieces that end with a line
            end = characters.find("\n", min(start + _PIECE, len(characters))) + 1 or len(characters)
            ids += self._tokenizer.encode(characters[start:end], add_special_tokens=False).ids
            start = end
        return np.array(ids, np.int32)

    def decode(self, tokens: Sequence[int]) -> bytes:
        """The text as the file's decoder writes it. Pieces of a character that lack their others are written as �."""
        ids = [int(token) for token in tokens if token != self.start]
        return str(self._tokenizer.decode(ids, skip_special_tokens=False)).encode()


def _without_prefix(about: Any) -> Any:
    """The content of a tokenizer.json whose parts put no space before a text, and take none away again."""
    prepends = "Prepend" in _types(about.get("normalizer"))

    def changed(part: Any, decodes: bool) -> Any:
        if isinstance(part, list):
            return [changed(one, decodes) for one in part]
        if not isinstance(part, dict):
            return part
        settings = {name: changed(value, decodes) for name, value in part.items()}
        match part.get("type"):
            case "ByteLevel" if not decodes:
                settings["add_prefix_space"] = False
            case "Metaspace":
                settings["prepend_scheme"] = "never"
            case "Prepend":
                settings["prepend"] = ""
            case "Strip" if decodes and prepends:
                settings["start"] = 0
        return settings

    names = about.keys() & {"normalizer", "pre_tokenizer", "decoder"}
    return {name: changed(part, name == "decoder") if name in names else part for name, part in about.items()}


def _types(part: object) -> Iterator[str]:
    if isinstance(part, dict):
        yield str(part.get("type"))
        for value in part.values():
            yield from _types(value)
    elif isinstance(part, list):
        for value in part:
            yield from _types(value)
