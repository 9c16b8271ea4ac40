"""Text as pieces of token ids, in an order that a longer training continues, and the teacher's predictions of them."""

import hashlib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from mnemos import tree_file
from mnemos.atomic import parse, read_text, write_json
from mnemos.generators import ORDER, generator
from mnemos.lab.tasks.text_files import find_text, read_documents
from mnemos.types import InputError, JSONObject

from .original import original

_BODY = re.compile(r"\*\*\* ?START OF TH.*?\*\*\*\s*(.*?)\s*\*\*\* ?END OF TH", re.DOTALL)  # of Project Gutenberg
_BLOCK = 16  # pieces that a seed puts in another order among themselves


def read_texts(paths: Sequence[str | Path]) -> dict[str, str]:
    """The texts of files and folders by name. Line ends are "\\n"; of an e-book of Project Gutenberg, its body.

    Raises InputError for a path without text, and for two texts of one name.
    """
    texts: dict[str, str] = {}
    for path in paths:
        found = find_text(path) if Path(path).exists() else None
        if found is None or not any(file.stat().st_size for file in found.read):
            said = "no such file or folder" if found is None else "none in it"
            raise InputError(f"{path}: expected a file or a folder of text, found {said}; check --text and --test")
        for name, document in read_documents(found, characters=True).items():
            if name in texts:
                raise InputError(f"{path}: expected texts with names of their own, found a second {name}; rename one")
            text = document.tobytes().decode().replace("\r\n", "\n")
            body = _BODY.search(text)
            texts[name] = body[1] if body else text
    return texts


class Pieces:
    """Texts cut into pieces of `context` token ids, numbered in a mixed order.

    Piece i is the same for all seeds up to its place among 16: training on a number of pieces that is a multiple of 16
    reads the same tokens for every seed, and a longer training goes on where a shorter one ended. What is left of a
    text after its last whole piece is not used. Raises InputError if no text has a whole piece.
    """

    def __init__(self, tokenizer: Any, texts: dict[str, str], context: int, seed: int = 0) -> None:
        found = []
        longest = 0
        for text in texts.values():
            ids = torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"], dtype=torch.int64)
            longest = max(longest, len(ids))
            found += list(ids[: len(ids) // context * context].view(-1, context))
        if not found:
            raise InputError(
                f"--text: expected a file of {context:,} tokens (--context) or more, found {longest:,} in the longest; "
                "add text, or lower --context"
            )
        order = generator(0, ORDER).permutation(len(found))
        for first in range(0, len(found), _BLOCK):
            order[first : first + _BLOCK] = generator(seed, ORDER, first).permutation(order[first : first + _BLOCK])
        self.numbers, self._ids = [int(i) for i in order], found
        digest = hashlib.sha256()
        for ids in found:
            digest.update(ids.numpy().tobytes())
        self.sha256 = digest.hexdigest()

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, place: int) -> tuple[int, Tensor]:
        """The number of the piece at a place of the order, and its token ids [context]. The order begins anew."""
        number = self.numbers[place % len(self)]
        return number, self._ids[number]


class Teacher:
    """The next-token distributions of the model before it was linearised: of each position, the `top` likeliest tokens.

        tokens, probabilities, rest = teacher.of(numbers, ids)          # [B, T, K], [B, T, K], [B, T]; rest = 1 − Σ

    They are computed by the same weights with the linearisation switched off, when a piece is first asked for, and kept
    in `folder`, so that runs of other seeds and other states find them. A file has 6·K + 4 bytes a token. Raises
    InputError if the folder has those of other text, of another model or of another `top`.
    """

    def __init__(self, model: nn.Module, folder: Path, top: int, about: JSONObject) -> None:
        self.model, self.folder, self.top = model, folder, top
        about = about | {"top": top}
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "teacher.json"
        if path.is_file() and parse(read_text(path)) != about:
            raise InputError(f"{folder}: expected the teacher of this model and text, found another; name a new folder")
        write_json(path, about)

    def of(self, numbers: Sequence[int], ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The predictions after each token of the pieces `ids` [B, T] with these numbers."""
        found = [self._piece(number, row) for number, row in zip(numbers, ids, strict=True)]
        tokens, logs, rest = (torch.stack([one[name] for one in found]) for name in ("tokens", "logs", "rest"))
        kept = logs.float().exp()
        return tokens.long(), kept * ((1 - rest) / kept.sum(-1))[..., None], rest

    def _piece(self, number: int, ids: Tensor) -> dict[str, Tensor]:
        path = self.folder / f"piece-{number:06d}.safetensors"
        if not path.is_file():
            with torch.no_grad(), original(self.model):
                logits = self.model(input_ids=ids[None], use_cache=False).logits[0]
            kept, tokens = logits.topk(self.top)
            logs = kept - logits.logsumexp(-1, keepdim=True)
            rest = (1 - logs.double().exp().sum(-1)).clamp(min=1e-6).float()
            value = {"tokens": tokens.int(), "logs": logs.half(), "rest": rest}
            tree_file.write(path, value)
        found: dict[str, Tensor] = tree_file.read(path)
        return found


class _Divergence(torch.autograd.Function):
    """See `divergence`. The gradient is computed with the value, in place of the logits' exponentials: one buffer."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, tokens: Tensor, probabilities: Tensor, rest: Tensor) -> Tensor:
        p = logits.detach().float().log_softmax(-1)
        logs = p.gather(-1, tokens)
        kept = logs.exp()
        left = (1 - kept.double().sum(-1)).clamp(min=1e-9).float()
        terms = probabilities * (probabilities.clamp(min=1e-9).log() - logs)
        value = terms.sum(-1) + rest * (rest.log() - left.log())
        p.exp_().mul_((1 - rest / left)[..., None])
        p.scatter_(-1, tokens, kept - probabilities)
        ctx.save_for_backward(p)
        return value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *given: Tensor) -> tuple[Tensor | None, ...]:
        (p,) = ctx.saved_tensors
        return p * given[0][..., None], None, None, None


def divergence(logits: Tensor, tokens: Tensor, probabilities: Tensor, rest: Tensor) -> Tensor:
    """KL(teacher ‖ student) in nats at each position, [..., V] -> [...], with all other tokens as one.

        Σ_k p_k·log(p_k/q_k) + r·log(r/(1 − Σ_k q_k))

    tokens, probabilities [..., K], rest [...]: of `Teacher.of`. q: softmax of the logits. It is at most the whole
    divergence, and equals it if the tokens are all of the vocabulary. Only the logits get a gradient.
    """
    found: Tensor = _Divergence.apply(logits, tokens, probabilities, rest)
    return found


def groups(pieces: Pieces, rows: int, first: int, last: int) -> Iterator[tuple[list[int], Tensor]]:
    """The numbers and ids [rows, context] of the pieces of groups first, …, last − 1."""
    for group in range(first, last):
        found = [pieces[group * rows + row] for row in range(rows)]
        yield [number for number, _ in found], torch.stack([ids for _, ids in found])
