"""A tree of states for shared prefixes: a beginning that many prompts have in common is read once."""

import hashlib
from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from mnemos.state_file import weights_mark
from mnemos.types import InputError, leaves

from .sampling import is_whole
from .stream import Stream, check_tokens


class PrefixTree:
    """The streams after the beginnings of prompts, by their tokens, at the ends of blocks.

        tree = mnemos.PrefixTree(model, block=64, memory=1 << 30)
        stream = tree.prefill(prompts)                # [B, T], or a list of prompts [T] of any lengths

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
        if (splits := getattr(model, "splits", "anywhere")) != "anywhere":
            raise InputError(
                f"PrefixTree: expected a model whose sequences may be cut at any token, found {type(model).__name__} "
                f"with splits={splits!r}, in which a token read alone has other outputs than one read among others; "
                "use another memory (relative attention: same_length=True)"
            )
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
        whole = list(prompts)
        if not whole or not all(isinstance(row, Tensor) and row.dim() == 1 for row in whole):
            raise InputError(
                "PrefixTree: expected a tensor of prompts [B, T], or a list of tensors [T], of integers and at least "
                f"one, found {type(prompts).__name__} of {len(whole)}"
                f"{f' {type(whole[0]).__name__}' if whole else ''}"
            )
        whole = [check_tokens(self._new, row[None])[0] for row in whole]
        if weights_mark(self.model) != self._weights:
            raise InputError(
                "PrefixTree: expected the weights with which the tree was made, found others; make a new tree"
            )
        # --- each prompt once, with a key for each of its beginnings that end with a block: a hash of its tokens ---
        different: dict[bytes, int] = {}
        numbers = [different.setdefault(_bytes(row), len(different)) for row in whole]
        rows = [whole[numbers.index(i)] for i in range(len(different))]
        keys: list[list[str]] = []
        for row in rows:
            digest, keys_of_row = hashlib.sha256(), []
            for end in range(self.block, len(row) + 1, self.block):
                digest.update(_bytes(row[end - self.block : end]))
                keys_of_row.append(digest.hexdigest())
            keys.append(keys_of_row)
        # --- their whole blocks, and what is behind them: ends of one length are read as one batch ---
        before = self.read
        streams = self._read_blocks(rows, keys)
        self.read += sum(len(row) % self.block for row in rows)
        self.found += sum(map(len, whole)) - (self.read - before)
        groups: dict[tuple[bool, int], list[int]] = {}
        for i, row in enumerate(rows):
            groups.setdefault((bool(keys[i]), len(row) % self.block), []).append(i)
        parts = []
        for (has_block, length), members in groups.items():
            stream = Stream.join([streams[keys[i][-1]] for i in members]) if has_block else self._new
            ends = [rows[i][len(rows[i]) - length :] for i in members]
            parts.append(stream.prefill(torch.stack(ends)) if length else stream)
        # --- in the order of the prompts ---
        position = {i: n for n, i in enumerate(i for members in groups.values() for i in members)}
        order = [position[number] for number in numbers]
        stream = parts[0] if len(parts) == 1 else Stream.join(parts)
        return stream if order == list(range(stream.rows)) else stream.select(torch.tensor(order))

    def _read_blocks(self, rows: list[Tensor], keys: list[list[str]]) -> dict[str, Stream]:
        """The streams after all whole blocks of the prompts, by key: those that are stored, or read now."""
        # --- the longest stored beginning of each prompt ---
        streams: dict[str, Stream] = {}
        depths = []
        for row_keys in keys:
            depth = next((n for n in range(len(row_keys), 0, -1) if row_keys[n - 1] in self._stored), 0)
            if depth:
                key = row_keys[depth - 1]
                streams[key] = self._stored[key]
                self._stored.move_to_end(key)
            depths.append(depth)
        # --- then the next block of all prompts that have one, after equally many tokens ---
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
                self._stored[key] = one
                self.size += _size(one)
                while self.size > self.memory:
                    self.size -= _size(self._stored.popitem(last=False)[1])
        return streams

    def __len__(self) -> int:
        """The stored states."""
        return len(self._stored)


def _bytes(tokens: Tensor) -> bytes:
    return tokens.cpu().contiguous().numpy().tobytes()


def _size(stream: Stream) -> int:
    return sum(x.numel() * x.element_size() for x in [*leaves(stream.state), *leaves(stream.last)])
