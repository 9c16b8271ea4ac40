"""Which attentions of a trained decoder need what is beyond a window: `rank_attentions`, by the loss itself.

`WindowLoss` measures the loss with any of the attentions in the window; `linearise` leaves those whole that `full=`
names.
"""

import contextlib
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mnemos.errors import near_arguments
from mnemos.modes import evaluating, uncompiled
from mnemos.types import InputError

from .attach import Where
from .linearise import is_linearised, linearise, name_heads, unlinearise

_POSITIONS = 256  # whose logarithms of probabilities are held at a time


@dataclass(frozen=True, repr=False)
class AttentionRanking:
    """What `rank_attentions` measured, in nats a token.

    names: in the order of the model. alone: what the decoder loses when this attention alone has the window. order: all
    names, the one that is needed most first. nats: the loss with the first n of `order` whole and the others in the
    window, n = 0, 1, …, N. tokens: how many were predicted. heads: as `alone`, by key head.
    """

    names: tuple[str, ...]
    alone: dict[str, float]
    order: tuple[str, ...]
    nats: tuple[float, ...]
    window: int
    sinks: int
    tokens: int
    heads: dict[str, list[float]] | None = None

    def full(self, count: int) -> tuple[str, ...]:
        """The `count` attentions that are needed most, in the order of the model: `linearise(model, full=…)`."""
        _check_count(count, len(self.names), "full", "attentions")
        return tuple(name for name in self.names if name in self.order[:count])

    def full_heads(self, count: int) -> tuple[str, ...]:
        """The `count` key heads whose loss alone is highest, as `linearise(model, full=…)` names them."""
        if self.heads is None:
            raise InputError("full_heads: expected a ranking of key heads, found one without; set heads=True")
        return choose_heads(self.heads, count)

    def closed(self, count: int) -> float:
        """The share of the gap between all in the window (0) and all whole (1) that `full(count)` closes."""
        _check_count(count, len(self.names), "closed", "attentions")
        gap = self.nats[0] - self.nats[-1]
        return (self.nats[0] - self.nats[count]) / gap if gap else 0.0

    def __str__(self) -> str:
        width, most = max(map(len, self.names)), max(*self.alone.values(), 1e-9)
        lines = [
            f"{self.nats[-1]:.4f} nats a token whole, {self.nats[0]:.4f} with all {len(self.names)} attentions in a "
            f"window of {self.window} tokens and {self.sinks} sinks; {self.tokens:,} tokens",
            f"whole  {'attention':{width}}  of the gap  lost when it alone has the window",
        ]
        loses = self.nats[0] > self.nats[-1]
        if not loses:
            lines.insert(1, "the window loses nothing here: there is no gap to close")
        for n, name in enumerate(self.order, 1):
            bar = "#" * round(24 * self.alone[name] / most)
            closed = f"{self.closed(n):9.0%}" if loses else f"{'–':>9}"
            lines.append(f"{n:5}  {name:{width}}  {closed}  {self.alone[name]:9.4f} {bar}".rstrip())
        return "\n".join([*lines, *([show_heads(self.heads)] if self.heads else [])])

    __repr__ = __str__  # what a notebook and the prompt of Python show


@near_arguments
def rank_attentions(
    model: nn.Module,
    pieces: Sequence[Tensor],
    window: int = 64,
    sinks: int = 4,
    first: int = 512,
    where: Where = None,
    jointly: bool = True,
    heads: bool = False,
    progress: Callable[[int, int], object] | None = None,
) -> AttentionRanking:
    """Rank the attentions of a trained decoder of Transformers by what it loses without their far past.

        ranking = mnemos.rank_attentions(model, pieces)          # print(ranking): a line an attention
        mnemos.linearise(model, full=ranking.full(8))            # a hybrid: eight keep all keys and values

    pieces: token ids [T] each, of text that is no test's. The loss is the mean of −log p of the tokens with at least
    `first` before them; an attention "in the window" reads the last `window` tokens and the first `sinks`, as
    `linearise(state="none")` has it. alone: each in the window by itself, all others whole.

    jointly: from all whole on, the attention that is missed least goes into the window, again and again: N(N + 1)/2 + 1
    measurements for N attentions. They stand in for each other, so losses alone do not add up. False: the order is that
    of `alone`; 2N + 1 measurements. heads: also each key head alone. progress: called with the measurements that are
    done and their number.

    A measurement is a forward of all pieces from the changed attention on; the outputs of all blocks are held. Raises
    InputError as `linearise` does, for a linearised model, for one without the head of a language model, for a piece of
    at most `first` tokens, and if none is longer than window and sinks.
    """
    with WindowLoss(model, pieces, window, sinks, first, where) as loss:
        return rank(loss, jointly, heads, progress)


class WindowLoss:
    """The loss of a decoder in which some attentions read the window and the sinks alone.

        with WindowLoss(model, pieces) as loss:
            loss(loss.names)            # all whole: the model. Nats a token of each piece [pieces], float64
            loss(loss.names[8:])        # the first eight in the window

    Arguments and errors are those of `rank_attentions`. Within the block the model's attentions are changed.
    """

    def __init__(
        self,
        model: nn.Module,
        pieces: Sequence[Tensor],
        window: int = 64,
        sinks: int = 4,
        first: int = 512,
        where: Where = None,
    ) -> None:
        self.model, self.pieces, self.first = uncompiled(model), list(pieces), first
        self.window, self.sinks, self.where = window, sinks, where
        if isinstance(model, nn.Module) and any(is_linearised(module) for module in self.model.modules()):
            raise InputError("expected a decoder as it was trained, found a linearised one; call mnemos.unlinearise")
        if first < 1:
            raise InputError(f"first: expected at least 1, found {first}; the first token is not predicted")
        found = [f"{[*x.shape]}" if isinstance(x, Tensor) else type(x).__name__ for x in self.pieces]
        if not found or not all(isinstance(x, Tensor) and x.ndim == 1 and len(x) > first for x in self.pieces):
            raise InputError(
                f"expected a list of pieces [T], tensors of more than first={first} token ids, found "
                f"{', '.join(found[:4]) or 'none'}; give longer ones (of [1, T] its row), or lower first"
            )
        embedding = getattr(self.model, "get_input_embeddings", lambda: None)()
        vocabulary = getattr(embedding, "num_embeddings", sys.maxsize)
        for x in self.pieces:
            if x.dtype not in (torch.int64, torch.int32) or x.min() < 0 or x.max() >= vocabulary:
                raise InputError(
                    f"expected token ids from 0 to below {vocabulary:,}, found {x.dtype} from {x.min()} to {x.max()}; "
                    "use the decoder's tokenizer"
                )
        if (longest := max(map(len, self.pieces))) <= window + sinks:
            raise InputError(
                f"expected a piece of more tokens than window={window} and sinks={sinks} together, found at most "
                f"{longest}; give longer ones, or lower window"
            )
        self._ends = contextlib.ExitStack()

    def __enter__(self) -> "WindowLoss":
        report = linearise(self.model, self.window, self.sinks, "none", self.where)
        self._ends.callback(unlinearise, self.model)
        self._ends.enter_context(evaluating(self.model))
        self.names = tuple(one.name for one in report.changed)
        self.kv_heads = {one.name: one.kv_heads for one in report.changed}
        self._attentions: dict[str, Any] = {name: self.model.get_submodule(name) for name in self.names}
        self._windowed: dict[str, Any] = {name: type(module) for name, module in self._attentions.items()}
        self._blocks = _find_blocks(self.model, self.names)
        self._kept: tuple[Collection[str], list[list[Any]]] | None = None  # whole attentions, outputs of pieces' blocks
        return self

    def __exit__(self, *_: object) -> None:
        for name in self.names:
            self._switch(name, ())
        self._ends.close()

    def __call__(self, full: Collection[str], keep: bool = False) -> Tensor:
        """Nats a token of each piece, [pieces], with the attentions `full` whole.

        keep: hold the outputs of all blocks, so that later calls compute only what is above the first attention that
        differs from this call.
        """
        losses, outputs = self._read({name: range(self.kv_heads[name]) for name in full})
        if keep and self._blocks and len(outputs[0]) == len(self._blocks):  # not if one is called twice
            self._kept = frozenset(full), outputs
        return losses

    def with_heads(self, whole: Mapping[str, Collection[int]]) -> Tensor:
        """Nats a token of each piece, [pieces], with these key heads of attentions whole, and all others windowed."""
        return self._read(whole)[0]

    def _read(self, whole: Mapping[str, Collection[int]]) -> tuple[Tensor, list[list[Any]]]:
        """The losses of the pieces, and what the blocks returned for each."""
        known = 0  # blocks, from the first on, that are as in the call whose outputs are held
        for name, count in self.kv_heads.items():
            heads = {*whole.get(name, ())}
            self._switch(name, heads)
            if self._kept is not None and known == self.names.index(name):
                known += len(heads) == (count if name in self._kept[0] else 0)
        before = [outputs[:known] for outputs in self._kept[1]] if self._kept is not None else [[] for _ in self.pieces]
        losses, outputs = zip(*map(self._measure, self.pieces, before), strict=True)
        return torch.stack(losses), list(outputs)

    def _switch(self, name: str, heads: Collection[int]) -> None:
        """Make these key heads of an attention whole, and put its others into the window."""
        attention, windowed, count = self._attentions[name], self._windowed[name], self.kv_heads[name]
        attention.linearised.split(count, sorted(heads))
        attention.__class__ = windowed if len({*heads}) < count else windowed.__mro__[1]

    @torch.no_grad()
    def _measure(self, ids: Tensor, known: list[Any]) -> tuple[Tensor, list[Any]]:
        """The loss of a piece, and what its blocks returned; `known`: what the first of them return."""
        outputs: list[Any] = [*known]
        with contextlib.ExitStack() as ends:
            for i, block in enumerate(self._blocks):
                if i < len(known):
                    block.forward = partial(_return, known[i])
                    ends.callback(vars(block).pop, "forward")
                else:
                    hook = block.register_forward_hook(lambda _, __, output: outputs.append(output))
                    ends.callback(hook.remove)
            count = len(ids) - self.first
            output = self.model(input_ids=ids[None], use_cache=False, logits_to_keep=count + 1)
        logits = getattr(output, "logits", None)
        if logits is None or logits.ndim != 3:
            raise InputError(
                f"expected a decoder, found a {type(self.model).__name__} without logits; load AutoModelForCausalLM"
            )
        logits = logits[0, -count - 1 : -1]
        parts = zip(logits.split(_POSITIONS), ids[self.first :].long().split(_POSITIONS), strict=True)
        total = sum(F.cross_entropy(some.float(), wanted, reduction="sum").double() for some, wanted in parts)
        return torch.as_tensor(total) / count, outputs


def rank(
    loss: WindowLoss, jointly: bool, heads: bool, progress: Callable[[int, int], object] | None = None
) -> AttentionRanking:
    """The ranking of `rank_attentions` from an entered `WindowLoss`."""
    names = loss.names
    of_heads = sum(loss.kv_heads.values()) if heads else 0
    every = 1 + of_heads + (len(names) * (len(names) + 1) // 2 if jointly else 2 * len(names))
    measured = _measuring(loss, every, progress)

    # --- each alone ---
    whole = measured(loss(names, keep=True))
    without = {name: measured(loss([one for one in names if one != name])) for name in names}
    alone = {name: nats - whole for name, nats in without.items()}
    by_head = _lose_heads(loss, measured, whole) if heads else None

    # --- which goes into the window next ---
    left, order, nats = list(names), list[str](), [whole]
    while left:
        if jointly and order:
            if len(left) > 1:
                loss(left, keep=True)
            without = {name: measured(loss([one for one in left if one != name])) for name in left}
        least = min(left, key=without.__getitem__ if jointly else alone.__getitem__)
        left.remove(least)
        order.append(least)
        nats.append(without[least] if jointly else measured(loss(left)))
    tokens = sum(len(ids) - loss.first for ids in loss.pieces)
    ranked = tuple(reversed(order)), tuple(reversed(nats))
    return AttentionRanking(names, alone, *ranked, loss.window, loss.sinks, tokens, by_head)


def rank_heads(loss: WindowLoss, progress: Callable[[int, int], object] | None = None) -> dict[str, list[float]]:
    """The losses of `AttentionRanking.heads` from an entered `WindowLoss`."""
    measured = _measuring(loss, 1 + sum(loss.kv_heads.values()), progress)
    return _lose_heads(loss, measured, measured(loss(loss.names, keep=True)))


def choose_heads(lost: Mapping[str, Sequence[float]], count: int) -> tuple[str, ...]:
    """The `count` key heads whose loss is highest, in the order of the model, as `linearise(full=…)` names them."""
    most = _list_most(lost, count)
    of_name = {name: sorted(i for one, i in most if one == name) for name in lost}
    return tuple(
        name if len(some) == len(lost[name]) else name_heads(name, some) for name, some in of_name.items() if some
    )


def show_heads(lost: Mapping[str, Sequence[float]], count: int = 0) -> str:
    """A line for each attention with the losses of its key heads; * marks the `count` that lose most."""
    width, most = max(map(len, lost)), _list_most(lost, count)
    lines = [f"       {'key heads':{width}}  lost when one alone has the window" + (", * left whole" if count else "")]
    for name, some in lost.items():
        losses = "  ".join(f"{loss:7.4f}{'*' if (name, i) in most else ' '}" for i, loss in enumerate(some))
        lines.append(f"       {name:{width}}  {losses}".rstrip())
    return "\n".join(lines)


def _list_most(lost: Mapping[str, Sequence[float]], count: int) -> list[tuple[str, int]]:
    losses = {(name, i): loss for name, some in lost.items() for i, loss in enumerate(some)}
    _check_count(count, len(losses), "full_heads", "key heads")
    return sorted(losses, key=losses.__getitem__, reverse=True)[:count]


def _check_count(count: int, most: int, what: str, kind: str) -> None:
    if not isinstance(count, int) or isinstance(count, bool) or not 0 <= count <= most:
        raise InputError(f"{what}: expected 0 to {most} {kind}, found {count!r}; change it")


def _measuring(
    loss: WindowLoss, every: int, progress: Callable[[int, int], object] | None
) -> Callable[[Tensor], float]:
    """What makes a mean over tokens of a measurement, and says that one more of `every` is done."""
    counts = torch.tensor([len(ids) - loss.first for ids in loss.pieces])
    numbers = iter(range(1, every + 1))

    def measured(nats: Tensor) -> float:
        done = next(numbers)
        if progress is not None:
            progress(done, every)
        return float((nats * counts).sum() / counts.sum())

    return measured


def _lose_heads(loss: WindowLoss, measured: Callable[[Tensor], float], whole: float) -> dict[str, list[float]]:
    """What each key head alone in the window loses; whole: the loss of the decoder."""
    every = {name: {*range(count)} for name, count in loss.kv_heads.items()}
    return {
        name: [measured(loss.with_heads({**every, name: heads - {i}})) - whole for i in heads]
        for name, heads in every.items()
    }


def _return(output: Any, *_: Any, **__: Any) -> Any:
    return output


def _find_blocks(model: nn.Module, names: Sequence[str]) -> list[Any]:
    """The member of a ModuleList around each attention; none where one has several, or a forward of its own."""
    lists = {name for name, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    found = []
    for name in names:
        parts = name.split(".")
        around = [".".join(parts[:n]) for n in range(1, len(parts)) if ".".join(parts[: n - 1]) in lists]
        found += around[-1:]
    blocks = [model.get_submodule(name) for name in found]
    if len(set(found)) < len(names) or any("forward" in vars(block) for block in blocks):
        return []
    return blocks
