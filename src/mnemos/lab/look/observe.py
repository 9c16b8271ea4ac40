"""Observe what the memories of a model read and write in its own forward: the tensors that each part was called with.

Nothing is computed again for the model: a part's method is called as ever, with a note of what it was given. The
weights of an attention are then computed from the queries and keys that it had.
"""

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
from mnemos.hosts.branch import HostBranch
from mnemos.hosts.linearised import Linearised, LinearisedState, Tokens
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
        if visible is not None:
            hidden = (
                torch.zeros((), device=q.device).masked_fill(~visible, -torch.inf)
                if visible.dtype == torch.bool
                else visible
            )
            scores = scores + hidden
        return torch.softmax(scores, -1).nan_to_num(0.0)


class Summed(NamedTuple):
    """A call of causal linear attention: φ(q), φ(k) [B, T, H, D'], v [B, T, H, M], and the state before."""

    q: Tensor
    k: Tensor
    v: Tensor
    state: Any


class SlotsWritten(NamedTuple):
    """A write to slots: weights [B, H, K, 1 + L], column 0 the slot itself, and the slots before, [B, K, D]."""

    weights: Tensor
    before: Tensor


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

    The model must be in eval mode, without padding. Its outputs are those without observation, to rounding: gated
    caches compute in PyTorch's operations in place of one kernel.
    """
    calls: Calls = {}
    undo = contextlib.ExitStack()
    with undo:
        for name, module in model.named_modules():
            for put in _observers(name, module, partial(_note, calls)):
                undo.callback(put())
        yield calls


def _note(calls: Calls, name: str, call: Call) -> None:
    calls.setdefault(name, []).append(call)


Note = Callable[[str, Call], None]
Undo = Callable[[], None]


def _observers(name: str, module: nn.Module, note: Note) -> Iterator[Callable[[], Undo]]:
    """What puts each observer of a module in place; a call of it returns what takes it off."""
    if isinstance(module, SlotMemory):
        yield lambda: _on_slots(name, module, note)
    if isinstance(module, SoftmaxAttention | CrossAttention | SegmentAttention | GatedBranch):
        yield lambda: _around(module, "attend", partial(_see_attention, name, note))
    if isinstance(module, SoftmaxAttention | CrossAttention | LinearAttention):
        yield lambda: _after(module, lambda y: note(name, Added(_length(y))))
    if isinstance(module, LinearAttention):
        yield lambda: _around(module, "attend", partial(_see_sums, name, note, module))
    if isinstance(module, Linearised):
        yield lambda: _around(module, "read", partial(_see_window, name, note))
    if isinstance(module, GatedCache):
        yield lambda: _on_gates(name, module, note)
    if isinstance(module, GatedBranch):
        yield lambda: _on_branches(name, module, note)


def _around(module: nn.Module, method: str, see: Callable[..., Any]) -> Undo:
    """Let `see` call a method of one module: see(method, *args, **options) returns what the method returns."""
    kept = module.__dict__.get(method)
    setattr(module, method, partial(see, getattr(module, method)))

    def undo() -> None:
        if kept is None:
            delattr(module, method)
        else:
            setattr(module, method, kept)

    return undo


def _after(module: nn.Module, see: Callable[[Tensor], None]) -> Undo:
    def hook(_: nn.Module, __: Any, output: Any) -> None:
        see(output[0] if isinstance(output, tuple) else output)

    return module.register_forward_hook(hook).remove


def _length(y: Tensor) -> Tensor:
    return y.detach().float().flatten(2).norm(dim=-1)


def _see_attention(name: str, note: Note, attend: Any, q: Tensor, k: Tensor, v: Tensor, *more: Any) -> Tensor:
    visible, causal = (*more[:2], None, False)[:2] if len(more) < 2 else more[:2]
    if isinstance(visible, Past):
        visible, causal = visible.marks(k, q.shape[1]), False
    note(name, Attended(q, k, v, visible, bool(causal)))
    found: Tensor = attend(q, k, v, *more)
    return found


def _see_sums(
    name: str, note: Note, layer: LinearAttention, attend: Any, q: Tensor, k: Tensor, v: Tensor, state: Any, mask: Any
) -> Any:
    if layer.causal:
        phi = layer.phi()
        note(name, Summed(phi(q.float()), phi(k.float()), v, state))
    return attend(q, k, v, state, mask)


def _see_window(name: str, note: Note, read: Any, *given: Any) -> Any:
    y, state = read(*given)
    note(name, Windowed(*given))
    return y, state


def _on_slots(name: str, memory: SlotMemory, note: Note) -> Undo:
    def listen(_: nn.Module, given: tuple[Any, ...]) -> None:
        if memory.config.write:
            note(name, SlotsWritten(memory.write_attention(*given[:3]), memory.contents(given[0])))

    return memory.register_forward_pre_hook(listen).remove


def _on_gates(name: str, cache: GatedCache, note: Note) -> Undo:
    seen: list[GateValues] = []

    def see(written: Any, source: Tensor, before: Tensor, *more: Any, **options: Any) -> Any:
        seen.clear()
        found = written(source, before, *more, **options)
        note(name, CacheWritten(source, before.expand_as(found.new), found.new, seen[-1]))
        return found

    undo, cache.observer_of_gates = _around(cache, "written", see), seen.append

    def stop() -> None:
        undo()
        cache.observer_of_gates = None

    return stop


def _on_branches(name: str, branch: GatedBranch, note: Note) -> Undo:
    """Note what the branches add, and keep kernels away, which would read the cache in one step."""
    shares = torch.sigmoid(branch.mix.detach())
    hook = branch.map("query").register_forward_hook(lambda *_: None)

    def mixed(own: Tensor, memory: Tensor) -> None:
        heads = [x.detach().float().flatten(2).unflatten(2, (branch.num_heads, -1)) for x in (own, memory)]
        lengths = (
            x.mul(share[:, None]).flatten(2).norm(dim=-1) for x, share in zip(heads, (1 - shares, shares), strict=True)
        )
        note(name, Mixed(*lengths))

    if isinstance(branch, HostBranch):
        kept, branch.observer = branch.observer, lambda _, own, memory: mixed(own, memory)

        def stop() -> None:
            hook.remove()
            branch.observer = kept

        return stop

    def see(mix: Any, own: Tensor, memory: Tensor) -> Any:
        mixed(own, memory)
        return mix(own, memory)

    undo = _around(branch, "mix_heads", see)

    def take_off() -> None:
        hook.remove()
        undo()

    return take_off
