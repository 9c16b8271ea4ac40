"""Measure the write attention of a Memformer's slots on documents: figures 6 and 7 of the paper.

A weight is the writer's attention, averaged over heads. In a segment a slot whose weight on itself is above `HOLDS`
holds, below `OVERWRITES` it is overwritten, and between it mixes. Its usual kind is that of its mean weight in the
middle halves of documents.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from mnemos.lab.tasks.task import Task
from mnemos.memory.slots import SlotMemory, SlotState
from mnemos.models.memformer import Memformer, MemformerState
from mnemos.modes import evaluating
from mnemos.types import select

Kind = Literal["holds", "mixes", "overwrites"]
KINDS: tuple[Kind, ...] = ("holds", "mixes", "overwrites")  # of slots, by their weight on themselves
HOLDS, OVERWRITES = 0.9, 0.1  # thresholds of a slot's weight on itself
DOCUMENTS, SEGMENTS = 8, 64  # maximum numbers: the longest documents (unless `rows` says), their first segments
SHOWN = 512  # tokens whose weights are kept; whole segments, at least one


@dataclass(frozen=True)
class SlotKind:
    """The slots that are usually of a kind: their number, and the mean of their ‖v_bias‖."""

    slots: int
    bias: float = math.nan


@dataclass(frozen=True)
class SlotExample:
    """One slot in a segment: its kind, weight on itself, and weights on tokens of it and the next [N]."""

    slot: int
    kind: Kind
    itself: float
    weights: np.ndarray


@dataclass(frozen=True)
class ShownSegment:
    """A segment of the first document, with the median slot of each kind."""

    place: int  # its number, of `of`
    of: int
    first: int  # the number of its tokens; the examples have weights on those of the following segments too
    examples: tuple[SlotExample, ...]
    words: tuple[tuple[str, int], ...] | None = None  # (text, number of tokens); None if the task has no text


@dataclass(frozen=True)
class WriteAttention:
    """What the slots attend to when they are written."""

    documents: int
    segment: int  # tokens between two writes
    slots: int
    radius: float
    thresholds: tuple[float, float]  # of a slot's weight on itself: below it is overwritten, above it holds
    shares: dict[str, np.ndarray]  # {kind: share of slots in segment s [S], over the documents that reach it}
    middle: dict[str, float]  # {kind: share of slots over the middle half of every document}
    kinds: dict[str, SlotKind]  # by the mean weight on themselves in the middle halves
    shown: ShownSegment
    split: str = "test"


@torch.no_grad()
def measure_write_attention(model: nn.Module, task: Task, rows: int = DOCUMENTS) -> WriteAttention | None:
    """What a model's slots attend to when they are written; None where no slots are written.

    The result is deterministic and the model is unchanged. Cost: encoder and writer on at most rows · 64 segments.
    """
    if not isinstance(model, Memformer) or model.memory is None or not model.config.memory.write:
        return None
    length = model.config.segment
    tokens, valid = documents(task, length, rows, SEGMENTS)
    whole = tokens.shape[1] // length * length  # what is behind whole segments is not written
    tokens, valid = tokens[:, :whole], valid[:, :whole]
    read = valid.unflatten(1, (-1, length)).all(-1)  # [B, S]
    if not read[0].any():
        return None

    # --- each slot's weight on itself [B, S, K], and all weights of row 0 in the segments that are shown ---
    count = int(read[0].sum())
    start = count // 2
    end = min(count, start + max(1, SHOWN // length))
    device = next(model.parameters()).device
    on_itself = torch.zeros(*read.shape, model.config.memory.slots)
    state, rows_before, shown = None, torch.arange(len(read)), []
    with evaluating(model):
        for i in range(int(read.any(0).sum())):
            going = read[rows_before, i]
            state, rows_before = (state if state is None else select(state, going.nonzero()[:, 0])), rows_before[going]
            x = tokens[rows_before, i * length : (i + 1) * length]
            weights, state = writing(model, x.to(device), state)
            weights = weights[:, 0].float().mean(1).cpu()
            on_itself[rows_before, i] = weights[..., 0]
            if start <= i < end:
                shown.append(weights[0])
    bias, span = model.memory.bias.float().norm(dim=-1).cpu(), slice(start * length, end * length)
    return WriteAttention(
        documents=len(tokens),
        segment=length,
        slots=len(bias),
        radius=model.memory.radius,
        thresholds=(OVERWRITES, HOLDS),
        **summary(on_itself, read, bias),
        shown=_shown(task, start, count, tokens[0, span], valid[0, span], torch.stack(shown)),
        split="test" if task.has_test else "valid",
    )


def documents(task: Task, length: int, rows: int, segments: int) -> tuple[Tensor, Tensor]:
    """The first `segments` segments of up to `rows` documents of the test split: (tokens, valid) [B, T].

    T: of the longest, to its end, which may be within a segment. In a task without state, each row is a document.
    """
    inputs: list[Tensor] = []
    marks: list[Tensor] = []
    ended = torch.zeros(0, dtype=torch.bool)
    for batch in task.batches("test", rows):
        fresh = batch.reset if inputs and batch.reset is not None else torch.zeros(len(batch.inputs), dtype=torch.bool)
        ended = ended | fresh if inputs else fresh
        valid = torch.ones_like(batch.inputs, dtype=torch.bool) if batch.mask is None else batch.mask
        inputs.append(batch.inputs)
        marks.append(valid & ~ended[:, None])
        if not task.carries_state or ended.all() or sum(x.shape[1] for x in inputs) >= segments * length:
            break
    tokens, valid = (torch.cat(x, 1)[:, : segments * length] for x in (inputs, marks))
    used = int(valid.any(0).nonzero().max()) + 1
    return tokens[:, :used], valid[:, :used]


def summary(self_weight: Tensor, read: Tensor, bias: Tensor) -> dict[str, Any]:
    """The fields shares, middle and kinds of `WriteAttention`.

    self_weight [B, S, K]: each slot's weight on itself; read [B, S] bool: the segments of each document; bias [K].
    """
    kind = kinds(self_weight)
    count = read.sum(1, keepdim=True)
    at = torch.arange(read.shape[1])
    middle = (at >= count // 4) & (at < count - count // 4)
    usual = kinds(self_weight[middle].mean(0))
    shares, halves, by_kind = {}, {}, {}
    for i, name in enumerate(KINDS):
        share = (kind == i).float().mean(-1)  # [B, S]
        shares[name] = (share.masked_fill(~read, 0).sum(0) / read.sum(0)).numpy()
        halves[name] = share[middle].mean().item()
        biases = bias[usual == i]
        by_kind[name] = SlotKind(len(biases), biases.mean().item())
    return {"shares": shares, "middle": halves, "kinds": by_kind}


def kinds(self_weight: Tensor) -> Tensor:
    """The index into `KINDS` for each slot, from its weight on itself."""
    return 1 - (self_weight > HOLDS).long() + (self_weight < OVERWRITES).long()


def writing(model: Memformer, x: Tensor, state: MemformerState | None = None) -> tuple[Tensor, MemformerState]:
    """`advance` of a model with slots, and the writer's attention: weights [B, S, H, K, 1 + L + cls] of S segments.

    Column 0 is the slot itself: weight 1 keeps the slot, 0 overwrites it. The rows are at the same place of their
    segments, and the call has a whole segment at least.
    """
    assert model.memory is not None
    writes: list[Tensor] = []

    def listen(memory: SlotMemory, inputs: tuple[SlotState, Tensor, Tensor | None]) -> None:
        writes.append(memory.write_attention(*inputs[:3]))

    hook = model.memory.register_forward_pre_hook(listen)
    try:
        after = model.advance(x, state)
    finally:
        hook.remove()
    return torch.stack(writes, 1), after


def _shown(task: Task, segment: int, of: int, tokens: Tensor, valid: Tensor, weights: Tensor) -> ShownSegment:
    """The median slot of each kind in the first of n segments, with its weights on the valid tokens of all n; if all
    hold, also the one with the lowest weight on itself. tokens, valid [n·L], weights [n, K, 1 + L + cls].
    """
    length = len(tokens) // len(weights)
    on_tokens = weights[..., 1 : 1 + length].transpose(0, 1).flatten(1)[:, valid]
    first, tokens, self_weight = int(valid[:length].sum()), tokens[valid], weights[0, :, 0]
    kind, chosen = kinds(self_weight), list[int]()
    for i in range(len(KINDS)):
        slots = (kind == i).nonzero().flatten()
        if len(slots):
            chosen.append(int(slots[self_weight[slots].argsort(stable=True)[(len(slots) - 1) // 2]]))
    if (kind == 0).all() and (least := int(self_weight.argmin())) not in chosen:
        chosen.append(least)
    examples = tuple(
        SlotExample(
            slot=slot,
            kind=KINDS[int(kind[slot])],
            itself=self_weight[slot].item(),
            weights=on_tokens[slot].numpy(),
        )
        for slot in chosen
    )
    words = task.words(tokens.tolist())
    return ShownSegment(segment, of, first, examples, None if words is None else tuple(words))
