"""A tree of states for shared prefixes: a beginning that many prompts have in common is read once."""

import hashlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from mnemos.state_file import weights_mark
from mnemos.types import InputError, leaves

from .rollback import check_cuts
from .sampling import is_whole
from .stream import Stream, check_tokens


class PrefixTree:
    """The streams after the beginnings of prompts, by their tokens, at the ends of blocks.

        tree = mnemos.PrefixTree(model, block=64, memory=1 << 30)
        stream = tree.prefill(prompts)                # [B, T], or a list of prompts [T] of any lengths
        stream = mnemos.Stream(model).prefill(prompt, tree=tree)

    `prefill` gives the stream that `Stream.prefill` gives. Of each prompt it takes the state of the longest stored
    beginning and reads the rest, block by block; a block that several prompts share is read once, and different blocks
    after equally many tokens are read as one batch. States are kept after every `block` tokens, as one row each, up to
    `memory` bytes: those that were used least recently go first.

    Cost: a forward of the tokens that are new, and a copy of the state per block. The state of softmax attention
    without a window grows, so its N tokens cost O(N²/block) bytes: choose a larger block. Not for several threads at
    once.

    Attributes:
        read, found: the tokens that were read by the model, and those of prompts that were not, so far.
        size: bytes of the stored states.

    Raises InputError for a model whose outputs depend on the cuts of a sequence, in training mode, or changed since
    the tree was made, and as `Stream.prefill` does.
    """

    def __init__(self, model: nn.Module, block: int = 64, memory: int = 1 << 30) -> None:
        check_cuts(model, "PrefixTree")
        if not (is_whole(block) and isinstance(memory, int | float) and block >= 1 and memory >= 0):
            raise InputError(
                "PrefixTree: expected a block of at least 1 token, a whole number, and at least 0 bytes, found "
                f"{block!r} and {memory!r}"
            )
        self.model, self.block, self.memory = model, block, memory
        self.read = self.found = self.size = 0
        self._new = Stream(model)
        self._stored: OrderedDict[str, Stream] = OrderedDict()
        self._weights = weights_mark(model)

    def prefill(self, prompts: Tensor | Sequence[Tensor]) -> Stream:
        """The stream after each of the prompts, tokens [B, T] or B tensors [T]; the rows are in their order."""
        rows = [check_tokens(self._new, row[None])[0] for row in _rows(prompts)]
        if weights_mark(self.model) != self._weights:
            raise InputError(
                "PrefixTree: expected the weights with which the tree was made, found others; make a new tree"
            )
        different: dict[bytes, int] = {}
        numbers = [different.setdefault(_bytes(row), len(different)) for row in rows]
        unique = [rows[numbers.index(i)] for i in range(len(different))]
        keys = [list(self._keys(row)) for row in unique]
        before = self.read
        streams = self._read_blocks(unique, keys)
        self.read += sum(len(row) % self.block for row in unique)
        self.found += sum(map(len, rows)) - (self.read - before)
        stream = self._read_ends(unique, keys, streams)
        return stream if numbers == list(range(stream.rows)) else stream.select(torch.tensor(numbers))

    def _read_blocks(self, rows: list[Tensor], keys: list[list[str]]) -> dict[str, Stream]:
        """The streams after all whole blocks of the prompts, by key: those that are stored, or read now."""
        streams: dict[str, Stream] = {}
        depths = []
        for row_keys in keys:
            depth = len(row_keys)
            while depth:
                stream = self._get(row_keys[depth - 1])
                if stream is not None:
                    streams[row_keys[depth - 1]] = stream
                    break
                depth -= 1
            depths.append(depth)
        for depth in range(max(map(len, keys), default=0)):
            missing = {
                row_keys[depth]: (row_keys[depth - 1] if depth else None, row)
                for row, row_keys, known in zip(rows, keys, depths, strict=True)
                if known <= depth < len(row_keys) and row_keys[depth] not in streams
            }
            if not missing:
                continue
            blocks = torch.stack([row[depth * self.block : (depth + 1) * self.block] for _, row in missing.values()])
            parents = [streams[parent] for parent, _ in missing.values() if parent is not None]
            after = (Stream.join(parents) if parents else self._new).prefill(blocks)
            self.read += blocks.numel()
            for i, key in enumerate(missing):
                one = after.select(torch.tensor([i]))  # a copy, so that a stored row keeps no more alive
                streams[key] = after if len(missing) == 1 else one
                self._put(key, one)
        return streams

    def _read_ends(self, rows: list[Tensor], keys: list[list[str]], streams: dict[str, Stream]) -> Stream:
        """The streams after the prompts, from those after their blocks; ends of one length are read as one batch."""
        groups: dict[tuple[bool, int], list[int]] = {}
        for i, row in enumerate(rows):
            groups.setdefault((bool(keys[i]), len(row) % self.block), []).append(i)
        parts = []
        for (has_block, length), members in groups.items():
            stream = Stream.join([streams[keys[i][-1]] for i in members]) if has_block else self._new
            ends = [rows[i][len(rows[i]) - length :] for i in members]
            parts.append(stream.prefill(torch.stack(ends)) if length else stream)
        order = torch.tensor([i for members in groups.values() for i in members])
        whole = parts[0] if len(parts) == 1 else Stream.join(parts)
        return whole if bool((order.diff() > 0).all()) else whole.select(order.argsort())

    def _keys(self, row: Tensor) -> Iterator[str]:
        """A key for each beginning of the prompt that ends with a block: a hash of its tokens."""
        found = hashlib.sha256()
        for end in range(self.block, len(row) + 1, self.block):
            found.update(_bytes(row[end - self.block : end]))
            yield found.copy().hexdigest()

    def _get(self, key: str) -> Stream | None:
        stream = self._stored.get(key)
        if stream is not None:
            self._stored.move_to_end(key)
        return stream

    def _put(self, key: str, stream: Stream) -> None:
        self._stored[key] = stream
        self.size += _size(stream)
        while self.size > self.memory:
            self.size -= _size(self._stored.popitem(last=False)[1])

    def __len__(self) -> int:
        """The stored states."""
        return len(self._stored)


def _rows(prompts: Tensor | Sequence[Tensor]) -> list[Tensor]:
    rows = list(prompts)
    if not rows or not all(isinstance(row, Tensor) and row.dim() == 1 for row in rows):
        raise InputError(
            "PrefixTree: expected a tensor of prompts [B, T], or a list of tensors [T], of integers and at least one, "
            f"found {type(prompts).__name__} of {len(rows)}{f' {type(rows[0]).__name__}' if rows else ''}"
        )
    return rows


def _bytes(tokens: Tensor) -> bytes:
    return tokens.cpu().contiguous().numpy().tobytes()


def _size(stream: Stream) -> int:
    return sum(x.numel() * x.element_size() for x in [*leaves(stream.state), *leaves(stream.last)])
