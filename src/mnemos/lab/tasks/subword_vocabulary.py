"""Vocabularies of sub-words, from a file of the library tokenizers (tokenizer.json)."""

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mnemos.libraries import tokenizers
from mnemos.types import InputError

from .files import read_bytes
from .vocabulary import Tokens, Vocabulary, as_characters

_PIECE = 2**20  # characters that are encoded in one call, whose memory is a hundred times as large
_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class SubWords(Vocabulary):
    """The tokens of a tokenizer.json, without the special tokens that it adds around a text.

    The start token is one more token, after those of the file. A token's bytes are exact where the file is
    byte-level (GPT-2, Llama 3) or falls back to bytes (Llama 2). Otherwise they are those of its characters, with a
    space before each first piece of a word (WordPiece), and differ from the text's where the file changes or drops
    characters.
    Some files put a space before a text, as before a word. It is left out, because the text does not have it.
    Text is encoded in pieces of about a million characters that end at line ends.
    content: that of the file, without such a space; source: its name, for errors.
    Raises InputError for other content, and if the library is not installed.
    """

    unit = "sub-words"

    def __init__(self, content: str, source: str = "the tokenizer") -> None:
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
        ids = self._tokenizer.get_vocab(with_added_tokens=True)
        self.start = max(ids.values(), default=-1) + 1
        self.size = self.start + 1
        unknown = about["model"].get("unk_token")
        self.unknown = ids.get(unknown) if isinstance(unknown, str) else about["model"].get("unk_id")
        added = {one["content"] for one in about.get("added_tokens") or ()}
        kinds = {*_types(about.get("decoder")), *_types(about.get("pre_tokenizer"))}
        self.lengths = np.zeros(self.size, np.int64)
        for token, i in ids.items():
            if token in added:
                self.lengths[i] = len(token.encode())
            elif "ByteLevel" in kinds:
                self.lengths[i] = len(token)  # one character for each byte
            elif about["model"].get("type") == "WordPiece":
                self.lengths[i] = len(token.removeprefix("##").encode()) + (not token.startswith("##"))
            else:
                self.lengths[i] = 1 if _BYTE.fullmatch(token) else len(token.replace("▁", " ").encode())

    @classmethod
    def read(cls, path: str | Path) -> "SubWords":
        """The vocabulary of a file."""
        return cls(as_characters(read_bytes(path), str(path)), str(path))

    def encode(self, text: bytes, where: str) -> Tokens:
        """The tokens of UTF-8 text."""
        found = [
            np.array(self._tokenizer.encode(piece, add_special_tokens=False).ids, np.int32)
            for piece in _pieces(as_characters(text, where))
        ]
        return np.concatenate(found) if found else np.zeros(0, np.int32)

    def decode(self, tokens: Sequence[int]) -> bytes:
        """The text as the file's decoder writes it. Pieces of a character that lack their others are written as �."""
        kept = [int(token) for token in tokens if token != self.start]
        return str(self._tokenizer.decode(kept, skip_special_tokens=False)).encode()


def _without_prefix(about: Any) -> Any:
    """The content of a tokenizer.json whose parts put no space before a text, and take none away again."""
    prepends = "Prepend" in _types(about.get("normalizer"))

    def changed(part: Any, decodes: bool) -> Any:
        if isinstance(part, list):
            return [changed(one, decodes) for one in part]
        if not isinstance(part, dict):
            return part
        found = {name: changed(value, decodes) for name, value in part.items()}
        match part.get("type"):
            case "ByteLevel" if not decodes:
                found["add_prefix_space"] = False
            case "Metaspace":
                found["prepend_scheme"] = "never"
            case "Prepend":
                found["prepend"] = ""
            case "Strip" if decodes and prepends:
                found["start"] = 0
        return found

    names = about.keys() & {"normalizer", "pre_tokenizer", "decoder"}
    return {name: changed(part, name == "decoder") if name in names else part for name, part in about.items()}


def _types(part: object) -> Iterator[str]:
    """The types of a part of a tokenizer.json and of the parts in it."""
    if isinstance(part, dict):
        yield str(part.get("type"))
        for value in part.values():
            yield from _types(value)
    elif isinstance(part, list):
        for value in part:
            yield from _types(value)


def _pieces(text: str) -> Iterator[str]:
    start = 0
    while start < len(text):
        end = text.find("\n", min(start + _PIECE, len(text))) + 1 or len(text)
        yield text[start:end]
        start = end
