"""Observe what the memories of a model are called with in its own forward, which computes nothing again."""

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mnemos.attention.cross import CrossAttention
from mnemos.attention.gated import GatedBranch
from mnemos.attention.linear import LinearAttention
from mnemos.attention.softmax import Past, SoftmaxAttention
from mnemos.hosts.linearised import Linearised, LinearisedState, Tokens
from mnemos.lab.evaluate.branches import observe_mixing
from mnemos.memory.gated_cache import GatedCache
from mnemos.memory.slots import SlotMemory
from mnemos.models.segments import SegmentAttention
from mnemos.ops.gated_cache import GateValues


class Attended(NamedTuple):
    """A call of softmax attention: q [B, T, H, d], k [B, N, H, d], v, which keys are visible, and whether causal."""

    q: Tensor
    k: Tensor
    v: Tensor
    visible: Tensor | None
    causal: bool

    def weights(self) -> Tensor:
        """softmax(q·kᵀ/√d + scores), [B, H, T, N], in float32; a query that sees nothing has weights of 0."""
        q, k = self.q.float().transpose(1, 2), self.k.float().transpose(1, 2)
        if (groups := q.shape[1] // k.shape[1]) > 1:
            k = k.repeat_interleave(groups, 1)
        scores = q @ k.mT * q.shape[-1] ** -0.5
        visible = self.visible
        if self.causal:
            visible = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        if visible is not None and visible.dtype == torch.bool:
            scores = scores.masked_fill(~visible, -torch.inf)
        elif visible is not None:
            scores = scores + visible
        return torch.softmax(scores, -1).nan_to_num(0.0)


class Summed(NamedTuple):
    """A call of causal linear attention: φ(q), φ(k) [B, T, H, D'], v [B, T, H, M], and the state before."""

    q: Tensor
    k: Tensor
    v: Tensor
    state: Any


class SlotsWritten(NamedTuple):
    """A write to slots: weights [B, H, K, 1 + L], column 0 the slot itself."""

    weights: Tensor


class CacheWritten(NamedTuple):
    """An update of a gated cache: its tokens [B, T, Dm], the cache before and after [B, Tm, Dm], and the gates."""

    source: Tensor
    before: Tensor
    after: Tensor
    gates: GateValues


class Mixed(NamedTuple):
    """The two branches of a layer with a gated cache as they are added: lengths [B, T] of own and of remembered."""

    own: Tensor
    memory: Tensor


class Added(NamedTuple):
    """The length [B, T] of what an attention adds to its residual stream."""

    length: Tensor


class Windowed(NamedTuple):
    """A call of a linearised attention: its tokens, and its state before them."""

    tokens: Tokens
    state: LinearisedState | None


Call = Attended | Summed | SlotsWritten | CacheWritten | Mixed | Added | Windowed
Calls = dict[str, list[Call]]  # what happened in a forward, by the name of the module, in order


@contextlib.contextmanager
def observing(model: nn.Module) -> Iterator[Calls]:
    """Within the context, what the memories of a model are called with is added to the dictionary, which one empties.

    The model must be in eval mode, without padding. Its outputs are the usual ones, to rounding: gated caches compute
    in PyTorch's operations in place of one kernel.
    """
    calls: Calls = {}

    def record(name: str, call: Call) -> None:
        calls.setdefault(name, []).append(call)

    with contextlib.ExitStack() as undo:
        for name, module in model.named_modules():
            _observe(module, partial(record, name), undo)
        yield calls


def _observe(module: nn.Module, record: Callable[[Call], None], undo: contextlib.ExitStack) -> None:
    """Record the calls of a module, if it is a part of a memory; `undo` takes the observers off."""

    def around(method: str, see: Callable[..., Any]) -> None:
        """Let `see` call a method: see(method, *args, **options) returns what the method returns."""
        own = module.__dict__.get(method)
        setattr(module, method, partial(see, getattr(module, method)))
        undo.callback(lambda: delattr(module, method) if own is None else setattr(module, method, own))

    # --- attentions: queries and keys, sums, and what is added to the residual stream ---
    def attended(attend: Any, q: Tensor, k: Tensor, v: Tensor, *more: Any) -> Any:
        visible, causal = (*more, *(None, False)[len(more) :])[:2]
        if isinstance(visible, Past):
            visible, causal = visible.marks(k, q.shape[1]), False
        record(Attended(q, k, v, visible, bool(causal)))
        return attend(q, k, v, *more)

    def summed(attend: Any, q: Tensor, k: Tensor, v: Tensor, state: Any, mask: Any) -> Any:
        if module.causal:
            phi = module.phi()  # type: ignore[operator]
            record(Summed(phi(q.float()), phi(k.float()), v, state))
        return attend(q, k, v, state, mask)

    def added(_: nn.Module, __: Any, output: Any) -> None:
        y = output[0] if isinstance(output, tuple) else output
        record(Added(y.detach().float().flatten(2).norm(dim=-1)))

    if isinstance(module, SoftmaxAttention | CrossAttention | SegmentAttention | GatedBranch):
        around("attend", attended)
    if isinstance(module, SoftmaxAttention | CrossAttention | LinearAttention):
        undo.callback(module.register_forward_hook(added).remove)
    if isinstance(module, LinearAttention):
        around("attend", summed)
    if isinstance(module, Linearised):

        def windowed(read: Any, *arguments: Any) -> Any:
            y, state = read(*arguments)
            record(Windowed(*arguments))
            return y, state

        around("read", windowed)

    # --- what is written to slots and caches ---
    if isinstance(module, SlotMemory) and module.config.write:

        def write(memory: Any, arguments: tuple[Any, ...]) -> None:
            record(SlotsWritten(memory.write_attention(*arguments[:3])))

        undo.callback(module.register_forward_pre_hook(write).remove)
    if isinstance(module, GatedCache):
        gates: list[GateValues] = []

        def written(update: Any, source: Tensor, before: Tensor, *more: Any, **options: Any) -> Any:
            gates.clear()
            result = update(source, before, *more, **options)
            record(CacheWritten(source, before.expand_as(result.new), result.new, gates[-1]))
            return result

        around("written", written)
        module.observer_of_gates = gates.append
        undo.callback(setattr, module, "observer_of_gates", None)

    # --- what the two branches of a layer with a gated cache add ---
    if isinstance(module, GatedBranch):
        share = torch.sigmoid(module.mix.detach())[:, None]

        def mixed(own: Tensor, memory: Tensor) -> None:
            heads = [x.detach().float().flatten(2).unflatten(2, (module.num_heads, -1)) for x in (own, memory)]
            lengths = [x.mul(part).flatten(2).norm(dim=-1) for x, part in zip(heads, (1 - share, share), strict=True)]
            record(Mixed(*lengths))

        undo.enter_context(observe_mixing(module, mixed))
