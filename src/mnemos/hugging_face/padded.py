"""Calls of a model with padding anywhere in a row: outputs and states are those of each row read by itself."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from mnemos.types import Output, State, is_padding_free, join, leaves, select

Call = Callable[[Tensor, State], Output]  # tokens [B, T] and a state -> outputs [B, T, V] and the new state


def read_padded(
    model: nn.Module, x: Tensor, before: tuple[State, Tensor | None], call: Call, carries: bool, last: int = 0
) -> Output:
    """(outputs [B, n, ·] of the last n = `last` tokens (0: all), state) of tokens x [B, T].

    before: the state (None: new rows), and mask [B, T] bool, True = valid (None: all are). Padding may be on the left,
    on the right or between tokens. It has no position and leaves the state of its row alone; its outputs are those of
    the last token before it, so that the last column is what `generate` goes on from, and 0 before the first token.
    call: reads rows without padding; it may give the outputs of the last n tokens only. carries: whether the state is
    wanted.
    Cost: one call without padding. With padding one call as well, if the state is not wanted; otherwise one for each
    number of valid tokens that a row has, because states of this library count positions and blocks for whole calls.
    """
    state, mask = before
    last = last or x.shape[1]
    if mask is None or bool(mask.all()):
        outputs, state = call(x, state)
        return outputs[:, -last:], state
    if carries or not hides_padding(model):
        return _by_lengths(model, x, (state, mask), call, last)
    packed, valid = packed_right(x, mask)
    longest = max(int(valid.sum(1).max()), 1)
    outputs, _ = model(packed[:, :longest], state, mask=valid[:, :longest])
    return _placed(outputs, mask, torch.zeros_like(valid[:, :1], dtype=torch.int64), last), None


def packed_right(x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """The tokens and their mask with all padding at the end of each row."""
    order = torch.argsort(~mask, dim=1, stable=True)
    valid = mask.gather(1, order)
    return torch.where(valid, x.gather(1, order), 0), valid


def hides_padding(model: nn.Module) -> bool:
    """Whether padding at the end of a row changes no output of its valid tokens."""
    attentions: Any = (part for part in model.modules() if hasattr(part, "causal"))
    return all(is_padding_free(part) for part in attentions)


def _placed(outputs: Tensor, mask: Tensor, first: Tensor | int, last: int) -> Tensor:
    """Outputs [R, m, ·] of valid tokens, from the `first`-th of each row on, at the last places of its row."""
    read = mask.cumsum(1)[:, -last:]
    place = (read - 1 - first).clamp(0, outputs.shape[1] - 1)
    found = outputs.gather(1, place[..., None].expand(-1, -1, outputs.shape[2]))
    return torch.where((read > 0)[..., None], found, 0)


def _by_lengths(model: Any, x: Tensor, before: tuple[State, Tensor], call: Call, last: int) -> Output:
    """Rows with the same number of valid tokens are read together, without their padding."""
    state, mask = before
    counts, every = mask.sum(1), []
    for count in counts.unique().tolist():
        chosen = (counts == count).nonzero()[:, 0]
        old = None if state is None else select(state, chosen)
        places = mask[chosen]
        if count:
            outputs, new = call(x[chosen][places].unflatten(0, (len(chosen), count)), old)
            outputs = _placed(outputs, places, count - outputs.shape[1], last)
        else:
            outputs, new = None, model.initial_state(len(chosen)) if old is None else old
        every.append((chosen, outputs, new))
    like = next((outputs for _, outputs, _ in every if outputs is not None), None)
    if like is None:  # padding alone: outputs of the model's kind, of a token that is read and forgotten
        like = call(x[:, :1] * 0, state)[0]
    found = [like.new_zeros(len(rows), last, like.shape[2]) if y is None else y for rows, y, _ in every]
    back = torch.cat([rows for rows, _, _ in every]).argsort()
    joined = join([new for _, _, new in every]) if leaves(every[0][2]) else None
    return torch.cat(found)[back], None if joined is None else select(joined, back)
