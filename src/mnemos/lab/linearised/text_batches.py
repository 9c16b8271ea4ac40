"""Texts as pieces of token ids, in an order that a longer training continues."""

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mnemos.generators import ORDER, generator
from mnemos.lab.tasks.text_files import find_text, read_documents
from mnemos.types import InputError

_BODY = re.compile(r"\*\*\* ?START OF TH.*?\*\*\*\s*(.*?)\s*\*\*\* ?END OF TH", re.DOTALL)  # of Project Gutenberg
_BLOCK = 16  # pieces that a seed puts in another order among themselves


def read_texts(paths: Sequence[str | Path]) -> dict[str, str]:
    """The texts of files and folders by name. Line ends are "\\n"; of an e-book of Project Gutenberg, its body.

    Raises InputError for a path without text, and for two texts of one name.
    """
    texts: dict[str, str] = {}
    for path in paths:
        files = find_text(path) if Path(path).exists() else None
        if files is None or not any(file.stat().st_size for file in files.read):
            problem = "no such file or folder" if files is None else "none in it"
            raise InputError(f"{path}: expected a file or a folder of text, found {problem}; check --text and --test")
        for name, document in read_documents(files, characters=True).items():
            if name in texts:
                raise InputError(f"{path}: expected texts with names of their own, found a second {name}; rename one")
            text = document.tobytes().decode().replace("\r\n", "\n")
            body = _BODY.search(text)
            texts[name] = body[1] if body else text
    return texts


class Pieces:
    """Texts cut into pieces of `context` token ids, numbered in a mixed order; without a whole one InputError.

    Seeds mix 16 pieces among themselves: training on a multiple of 16 pieces reads the same tokens for every seed, and
    a longer training goes on where a shorter one ended. The last piece is held out, unless it is the only one.
    """

    def __init__(self, tokenizer: Any, texts: dict[str, str], context: int, seed: int = 0) -> None:
        pieces: list[Tensor] = []
        longest = 0
        for text in texts.values():
            ids = torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"], dtype=torch.int64)
            longest = max(longest, len(ids))
            pieces += list(ids[: len(ids) // context * context].view(-1, context))
        if not pieces:
            raise InputError(
                f"--text: expected a file of {context:,} tokens (--context) or more, found {longest:,} in the longest; "
                "add text, or lower --context"
            )
        order = generator(0, ORDER).permutation(len(pieces))
        for first in range(0, len(pieces), _BLOCK):
            order[first : first + _BLOCK] = generator(seed, ORDER, first).permutation(order[first : first + _BLOCK])
        self.numbers = [int(i) for i in order]
        self.held_out = self.numbers.pop() if len(pieces) > 1 else self.numbers[0]
        self.ids = torch.stack(pieces)
        self.sha256 = hashlib.sha256(self.ids.numpy().tobytes()).hexdigest()

    def group(self, number: int, rows: int) -> list[int]:
        """The numbers of the pieces that are read together as group `number`; the order begins anew at its end."""
        return [self.numbers[i % len(self.numbers)] for i in range(number * rows, (number + 1) * rows)]
