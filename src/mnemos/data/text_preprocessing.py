"""`mnemos predict` for language models of bytes: how a model continues text files."""

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
from .text_files import find_text, nothing_found

_STDIN = "-"


@register
@dataclass(frozen=True)
class TextPreprocessing(Preprocessing):
    """The most probable continuation of texts, byte by byte; - is the standard input, a folder the texts in it.

    Each file is read as a document of the training data: after the token `start`, in segments of `segment` bytes.
    """

    name: ClassVar[str] = "text"
    options: ClassVar[Mapping[str, int]] = MappingProxyType({"length": 200})

    segment: int
    start: int = 0

    def predict(self, model: Any, files: Sequence[Path], options: Mapping[str, int]) -> Iterator[Predicted]:
        """The `length` bytes after each text: the most probable byte, again and again."""
        for path in [path for file in files for path in _texts(file)]:
            try:
                text = _text(path)
            except InputError as error:
                yield Predicted(str(path), "", problem=str(error))
                continue
            stream = Stream(model).prefill(torch.tensor([[self.start, *text]]), self.segment)
            tokens, _ = stream.generate(options["length"], temperature=0.0)
            yield Predicted(str(path), bytes(tokens[0].tolist()).decode(errors="replace"))


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
