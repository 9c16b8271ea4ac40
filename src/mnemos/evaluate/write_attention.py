"""What the slots of a Memformer listen to in real documents: which hold, mix or overwrite, and which words they hear.

Nothing is trained and nothing drawn: the finished model reads some documents of its test split, segment by segment,
and one file is left in its run's folder (figures 6 and 7 of the paper). A slot's weight is the writer's attention,
averaged over heads; by its weight on itself a slot, in a segment,

    holds  (above `HOLDS`)      mixes  (between)      overwrites  (below `OVERWRITES`)

`write_attention.json`: {"split", "documents", "segment": tokens between two writes, "slots", "heads", "radius",
"thresholds":
[OVERWRITES, HOLDS], "counts" [S]: documents that reach a segment, "shares": {kind: [S] share of the slots, over those
documents}, "middle": {kind: its share over the middle half of every document}, "kinds": {kind: {"slots", "bias",
"least", "most"}}: the slots that are usually of it, by their mean weight on themselves in the middle halves, and the
mean, least and largest ‖v_bias‖ among them (null where there are none), "shown": the middle segment of the
longest document: {"place": its number from 0, "of" how many, "examples": the median slot of each kind there, [{"slot",
"kind", "itself", "bias", "weights": one a token, of this and the next segments, up to `SHOWN` tokens}], "first": how
many are the segment's own, "words": [[text, how many tokens it is]], null if it is no text}}.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mnemos.atomic import write_json
from mnemos.models.memformer import Memformer
from mnemos.modes import evaluating

HOLDS, OVERWRITES = 0.9, 0.1  # weight on itself: above the one a slot holds, below the other it is overwritten
KINDS = ("holds", "mixes", "overwrites")
DOCUMENTS, SEGMENTS = 8, 64  # at most: the longest documents, and their first segments
SHOWN = 512  # tokens whose weights are kept, of whole segments, at least one


@torch.no_grad()
def listen(model: nn.Module, task: Any, folder: Path) -> dict[str, Any] | None:
    """Write write_attention.json of a finished run; returns what it says, None for a model that writes no slots.

    Deterministic, and the model is left as it was. Cost: encoder and writer over at most 8 · 64 segments.
    """
    if not isinstance(model, Memformer) or model.memory is None or not model.config.memory.write:
        return None
    length = model.config.segment
    tokens, valid = documents(task, length, DOCUMENTS, SEGMENTS)
    read = valid.unflatten(1, (-1, length)).any(-1)  # [B, S]
    count = int(read[0].sum())
    place = count // 2
    end = min(count, place + max(1, SHOWN // length))
    with evaluating(model):
        itself, heard = _walk(model, tokens, valid, range(place, end))
    bias, span = model.memory.bias.float().norm(dim=-1).cpu(), slice(place * length, end * length)
    found = {
        "split": "test",
        "documents": len(tokens),
        "segment": length,
        "slots": len(bias),
        "heads": model.memory.num_heads,
        "radius": model.memory.radius,
        "thresholds": [OVERWRITES, HOLDS],
        **summary(itself, read, bias),
        "shown": {
            "place": place,
            "of": count,
            **_shown(task, tokens[0, span], valid[0, span], heard, bias),
        },
    }
    write_json(folder / "write_attention.json", found)
    return found


def documents(task: Any, length: int, rows: int, segments: int) -> tuple[Tensor, Tensor]:
    """(tokens, valid) [B, S·length] of whole documents of the test split, or of their first `segments` segments.

    A task that carries no state has a document a row.
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
    fill = (0, -used % length)
    return F.pad(tokens[:, :used], fill), F.pad(valid[:, :used], fill)


def summary(itself: Tensor, read: Tensor, bias: Tensor) -> dict[str, Any]:
    """counts, shares, middle and kinds of write_attention.json.

    itself [B, S, K]: each slot's weight on itself; read [B, S] bool: the segments that documents have; bias [K].
    """
    kind = kinds(itself)
    counts = read.sum(0)
    count = read.sum(1, keepdim=True)
    at = torch.arange(read.shape[1])
    middle = (at >= count // 4) & (at < count - count // 4)
    usual = kinds(itself[middle].mean(0))
    shares, halves, by_kind = {}, {}, {}
    for i, name in enumerate(KINDS):
        share = (kind == i).float().mean(-1)  # [B, S]
        shares[name] = rounded(share.masked_fill(~read, 0).sum(0) / counts)
        halves[name] = round(share[middle].mean().item(), 6)
        mine = bias[usual == i]
        norms = [round(f(mine).item(), 6) if len(mine) else None for f in (torch.mean, torch.amin, torch.amax)]
        by_kind[name] = {"slots": len(mine), **dict(zip(("bias", "least", "most"), norms, strict=True))}
    return {"counts": counts.tolist(), "shares": shares, "middle": halves, "kinds": by_kind}


def kinds(itself: Tensor) -> Tensor:
    """Index in `KINDS` of slots, by their weight on themselves."""
    return 1 - (itself > HOLDS).long() + (itself < OVERWRITES).long()


def rounded(values: Tensor) -> list[float]:
    """As JSON keeps them."""
    return [round(value, 6) for value in values.tolist()]


def _walk(model: Memformer, tokens: Tensor, valid: Tensor, places: range) -> tuple[Tensor, Tensor]:
    """Each slot's weight on itself [B, S, K], and all of the first row in some segments, [places, K, 1 + L + cls]."""
    device = next(model.parameters()).device
    length, state, itself, shown = model.config.segment, None, [], []
    for i in range(tokens.shape[1] // length):
        span = slice(i * length, (i + 1) * length)
        weights, state = model.writing(tokens[:, span].to(device), state, valid[:, span].to(device))
        weights = weights[:, 0].float().mean(1).cpu()
        itself.append(weights[..., 0])
        if i in places:
            shown.append(weights[0])
    return torch.stack(itself, 1), torch.stack(shown)


def _shown(task: Any, tokens: Tensor, valid: Tensor, heard: Tensor, bias: Tensor) -> dict[str, Any]:
    """The middle slot of each kind in the first of some segments, and what it heard in all of them, without padding.

    tokens, valid [n·L], heard [n, K, 1 + L + cls].
    """
    length = len(tokens) // len(heard)
    weights = heard[..., 1 : 1 + length].transpose(0, 1).flatten(1)[:, valid]
    first, tokens, heard = int(valid[:length].sum()), tokens[valid], heard[0]
    words = [list(word) for word in task.words(tokens.tolist())] if hasattr(task, "words") else None
    examples = [
        {
            "slot": slot,
            "kind": KINDS[int(kinds(heard[slot, 0]))],
            "itself": round(heard[slot, 0].item(), 6),
            "bias": round(bias[slot].item(), 6),
            "weights": rounded(weights[slot]),
        }
        for slot in _chosen(heard[:, 0])
    ]
    return {"first": first, "examples": examples, "words": words}


def _chosen(itself: Tensor) -> list[int]:
    """The slot of median weight of each kind there is; where all hold, the one that holds least, too."""
    found, kind = [], kinds(itself)
    for i in range(len(KINDS)):
        mine = (kind == i).nonzero().flatten()
        if len(mine):
            found.append(int(mine[itself[mine].argsort(stable=True)[(len(mine) - 1) // 2]]))
    if (kind == 0).all() and (least := int(itself.argmin())) not in found:
        found.append(least)
    return found
