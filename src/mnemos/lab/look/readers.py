"""How each memory is read: a reader for each class of layer or model, and the table to which one's own can be added."""

from typing import Any

import torch
from torch import Tensor, nn

from mnemos.attention.gated import GatedBranch
from mnemos.attention.linear import LinearAttention
from mnemos.attention.recurrent import RecurrentAttention
from mnemos.attention.softmax import SoftmaxAttention
from mnemos.hosts.branch import DecoderBranch
from mnemos.hosts.linearised import Linearised
from mnemos.memory.key_values import KeyValues
from mnemos.memory.row_blocks import CacheState
from mnemos.memory.slots import SlotState
from mnemos.memory.tokens import TokenState
from mnemos.models.memformer import Memformer
from mnemos.models.segments import SegmentModel
from mnemos.ops.gated_cache import resample
from mnemos.types import State

from .memories import Reader, calls_of, distance_moved, last, nodes, replaced
from .observe import Added, Attended, CacheWritten, Calls, Mixed, SlotsWritten
from .sums import LinearisedReader, RecurrentReader, SumsReader

REACH = 256  # earlier tokens whose attention received is recorded, of a window that is longer or has no end


class WindowReader(Reader):
    """Keys and values of the last tokens in one layer of softmax attention."""

    kind = "window"
    plural = "keys and values"
    own = ("earlier words of the window",)

    def __init__(self, name: str, title: str, layer: SoftmaxAttention, index: int) -> None:
        super().__init__(f"{title}, window")
        self.module, self.title, self.index = name, title, index
        self.cached = name.removesuffix(".inner") if name.endswith(".inner") else None  # the layer with a gated cache
        self.reach = REACH if layer.window is None else min(REACH, layer.window - 1)
        past = "all earlier tokens" if layer.window is None else f"the last {layer.window - 1:,} tokens"
        self.about = f"The layer attends to the keys and values of {past}."

    def read(self, calls: Calls, before: State, after: State, count: int) -> None:
        weights = calls_of(calls, self.module, Attended)[-1].weights()[0].mean(0)  # [T, N]
        n = weights.shape[1] - count
        received = torch.zeros(self.reach + count)
        seen = min(n, self.reach)
        received[self.reach - seen :] = weights.mean(0)[n - seen :]
        self.add(received=received)
        parts: tuple[str, ...] = ("this segment", "earlier words of the window")
        lengths = [weights[:, n:].sum(1), weights[:, :n].sum(1)]
        if self.cached is not None:
            own, memory = branches(calls, self.cached)
            parts, lengths = (*parts, "cache"), [*(one * own for one in lengths), memory]
        self.add_shares(self.title, parts, lengths)

    def emptied(self, state: State, unit: int | None) -> State | None:
        windows = nodes(state, KeyValues)
        if self.index >= len(windows):  # of a layer whose state is no part of the model's
            return None
        own = windows[self.index]  # without a token, at the same position of the row
        return replaced(state, own, KeyValues(own.k, own.v, torch.zeros_like(own.valid), own.seen))


class CacheReader(Reader):
    """A gated recurrent cache: its gates, the tokens its slots took, what was read, and how far each slot moved."""

    kind = "cache"
    plural = "caches"
    own = ("cache",)

    def __init__(self, name: str, title: str, layer: GatedBranch, index: int) -> None:
        super().__init__(f"{title}, cache", [f"slot {i + 1}" for i in range(layer.cache.shape[0])])
        self.about = "An update gate of 0 keeps a slot, 1 replaces it by its candidate."
        if layer.grc.constant:
            self.about = "A constant that was learned: nothing is written to it."
        elif not layer.grc.write:
            self.about = "Every update starts from the stored cache, and not from the update before."
        self.module, self.title, self.layer, self.index = name, title, layer, index

    def read(self, calls: Calls, before: State, after: State, count: int) -> None:
        k = len(self.units)
        if not isinstance(getattr(self.layer, "inner", None), SoftmaxAttention):  # else the window's reader says it
            self.add_shares(self.title, ("the attention", "cache"), branches(calls, self.module))

        # --- what the updates of the segment did to each slot; a segment of no whole block has none ---
        writes = calls_of(calls, self.module, CacheWritten)
        none = torch.full((k,), torch.nan)
        moved, update, reset, candidate, written = torch.zeros(k), none, none, none, torch.zeros(k, count)
        if writes:
            moved = distance_moved(writes[0].before[0].float(), writes[-1].after[0].float())
            update, reset = (
                torch.stack([getattr(one.gates, gate)[0].float().mean(-1) for one in writes]).mean(0)
                for gate in ("update", "reset")
            )
            steps = [
                (one.after[0] - one.before[0]).float() / one.gates.update[0].float().clamp(min=1e-3) for one in writes
            ]
            candidate = torch.stack(steps).square().mean((0, 2)).sqrt()
            if sum(one.source.shape[1] for one in writes) == count:  # the segment is whole blocks
                # The mean update gate of a slot, shared among the tokens that it took.
                gates = [one.gates.update[0].float().mean(-1, keepdim=True) for one in writes]
                tokens = [torch.eye(one.source.shape[1], device=one.source.device)[None] for one in writes]
                shares = [resample(eye, k, None, self.layer.grc.resample)[0] for eye in tokens]
                written = torch.cat([gate * share for gate, share in zip(gates, shares, strict=True)], 1)
        self.add(moved=moved, update=update, reset=reset, candidate=candidate, written=written)

        reads = [call.weights()[0].mean(0) for call in calls_of(calls, self.module, Attended)]
        self.add(readers=torch.cat(reads)[-count:] if reads else torch.zeros(count, k))

    def _of_state(self, state: State) -> CacheState | None:
        caches: list[Any] = nodes(state, CacheState)
        return caches[self.index] if self.index < len(caches) else None

    def part(self, state: State) -> Tensor | None:
        own = self._of_state(state)
        return None if own is None else own.cache if bool(own.seen[0]) else self.start(state)[None]

    def start(self, state: State) -> Tensor:
        stored = self.layer.contents()
        zero = isinstance(self.layer, DecoderBranch) and self.layer.grc.scope == "stream"
        return torch.zeros_like(stored) if zero else stored

    def with_part(self, state: State, part: Tensor) -> State:
        own = self._of_state(state)
        assert own is not None
        return replaced(state, own, own._replace(cache=part))


def branches(calls: Calls, name: str) -> list[Tensor]:
    """The lengths [T] that a layer's own branch and its memory's add, along a segment read block by block."""
    own, memory = zip(*calls_of(calls, name, Mixed), strict=True)
    return [torch.cat(own, 1)[0], torch.cat(memory, 1)[0]]


class SlotReader(Reader):
    """Memformer's slots: the writer's attention, what encoder and decoder read, and how far each slot moved."""

    kind = "slots"
    plural = "slots"
    own = ("slots",)

    def __init__(self, model: Memformer) -> None:
        assert model.memory is not None
        self.about = "Slots are written once a segment, by attention to its tokens and to themselves."
        if not model.memory.config.write:
            self.about = "These slots are never written."
        super().__init__("slots", [f"slot {i + 1}" for i in range(model.config.memory.slots)])
        self.model, self.slots = model, model.memory

    def read(self, calls: Calls, before: State, after: State, count: int) -> None:
        # --- what was written, and how far each slot moved ---
        old = self.slots.start() if before is None else self.slots.contents(before.memory)[0]
        moved = distance_moved(old, self.slots.contents(after.memory)[0])
        weights = torch.zeros(len(self.units), 1 + count)
        weights[:, 0] = 1  # of a segment without a write
        if (write := last(calls, "memory", SlotsWritten)) is not None:
            weights = write.weights[0].float().mean(0)[:, : 1 + count]
        self.add(moved=moved, keeps=weights[:, 0], written=weights[:, 1:])

        # --- what each token took from where, and which slots: by the decoder if it reads them, else by the encoder ---
        read: dict[str, list[Tensor]] = {"encoder": [], "decoder": []}
        for half, reads in (("encoder", 1), ("decoder", 1 + self.model.decoder.memory)):
            for i in range(len(getattr(self.model, half).blocks)):
                names = [f"{half}.blocks.{i}.attention", *(f"{half}.blocks.{i}.reads.{j}" for j in range(reads))]
                slots = last(calls, names[-1], Attended) if half == "encoder" or self.model.decoder.memory else None
                if slots is not None and slots.q.shape[1] >= count:
                    read[half].append(slots.weights()[0, :, :count].mean(0))
                added = [one.length[0] for name in names if (one := last(calls, name, Added)) is not None]
                lengths = [length[:count] for length in added if len(length) >= count]
                if len(lengths) < len(names):  # the encoder reads whole segments, and this one is not
                    lengths = [torch.full((count,), torch.nan)] * len(names)
                parts = (
                    ("this segment", "slots")
                    if half == "encoder"
                    else ("this segment", "the segment before", "slots")[: len(names)]
                )
                self.add_shares(f"{half}, layer {i + 1}", parts, lengths)
        of_layers = read["decoder"] or read["encoder"] or [torch.zeros(count, len(self.units))]
        self.add(readers=torch.stack(of_layers).mean(0))

    def part(self, state: State) -> Tensor | None:
        return self.slots.contents(state.memory)

    def start(self, state: State) -> Tensor:
        return self.slots.start()

    def with_part(self, state: State, part: Tensor) -> State:
        return state._replace(memory=SlotState(part, state.memory.writes))


class EncodedReader(Reader):
    """The encoding of the segment before, which Memformer's decoder attends to."""

    kind = "window"
    plural = "encoding of the segment before"
    own = ("the segment before",)
    about = "The decoder attends to the encoded tokens of the segment before."

    def __init__(self, model: Memformer) -> None:
        super().__init__("the segment before")
        self.config = model.config

    def read(self, calls: Calls, before: State, after: State, count: int) -> None:
        names = [f"decoder.blocks.{i}.reads.0" for i in range(self.config.decoder_layers)]
        reads = [one.weights()[0].mean((0, 1)) for name in names if (one := last(calls, name, Attended)) is not None]
        received = torch.stack(reads).mean(0)
        if before is None:  # of the token for the beginning, which is no word of the text
            received = torch.zeros_like(received)
        self.add(received=torch.cat([received, torch.zeros(self.config.segment)]))

    def emptied(self, state: State, unit: int | None) -> State | None:
        return state._replace(encoded=torch.zeros_like(state.encoded), valid=torch.zeros_like(state.valid))


class TokenReader(Reader):
    """Memory tokens of a model of segments: what they attended to when they were written, and who attended to them."""

    kind = "tokens"
    plural = "memory tokens"
    own = ("memory tokens",)

    def __init__(self, model: SegmentModel) -> None:
        self.about = "The memory tokens stand before every segment, the same ones each time."
        if model.back:
            self.about = "The outputs of the memory tokens behind a segment stand before the next one."
        super().__init__("memory tokens", [f"token {i + 1}" for i in range(model.front)])
        self.model = model

    def read(self, calls: Calls, before: State, after: State, count: int) -> None:
        front, back = self.model.front, self.model.back
        size = front + count + back
        names = [f"blocks.{i}.attention" for i in range(len(self.model.blocks))]
        weights = [one.weights()[0].mean(0) for name in names if (one := last(calls, name, Attended)) is not None]
        whole = [one for one in weights if one.shape == (size, size)]
        if not whole:  # a segment that is not complete: memory tokens in front alone
            short = [one for one in weights if one.shape[0] == front + count]
            whole = [torch.nn.functional.pad(one, (0, back, 0, back)) for one in short]
        mean = torch.stack(whole).mean(0) if whole else torch.zeros(size, size)
        words = slice(front, front + count)
        written = mean[front + count :, words][:front] if back else torch.zeros(front, count)
        self.add(readers=mean[words, :front], written=written)
        parts = [None if state is None else self.part(state) for state in (before, after)]
        old, new = (self.start(after) if part is None else part[0] for part in parts)
        self.add(moved=distance_moved(old, new))
        lengths = [mean[words, words].sum(1), mean[words, :front].sum(1)]
        self.add_shares("all layers", ("this segment", "memory tokens"), lengths)

    def part(self, state: State) -> Tensor | None:
        tokens = nodes(state.memory, TokenState)
        return tokens[0].tokens if tokens and int(tokens[0].writes) else None

    def start(self, state: State) -> Tensor:
        start: Tensor = self.model.memory.start  # type: ignore[union-attr, assignment]
        return start

    def with_part(self, state: State, part: Tensor) -> State:
        (old,) = nodes(state.memory, TokenState)
        return replaced(state, old, old._replace(tokens=part))


# By class of layer: made as READER(its name in the model, "layer 1", the layer, its number among those of its class).
OF_LAYERS: dict[type[nn.Module], Any] = {
    SoftmaxAttention: WindowReader,
    GatedBranch: CacheReader,
    LinearAttention: SumsReader,
    RecurrentAttention: RecurrentReader,
    Linearised: LinearisedReader,
}


def readers_of(model: nn.Module, most: int) -> list[Reader]:
    """The readers of a model's memories, of at most so many layers, evenly spaced."""
    if isinstance(model, Memformer):
        return [*([SlotReader(model)] if model.memory is not None else []), EncodedReader(model)]
    if isinstance(model, SegmentModel):
        return [TokenReader(model)] if model.front else []
    layers = []
    for cls, reader in OF_LAYERS.items():
        modules = [(name, module) for name, module in model.named_modules() if isinstance(module, cls)]
        causal = [(name, module) for name, module in modules if getattr(module, "causal", True)]
        for index, (name, module) in enumerate(causal):
            number = tuple(int(part) for part in name.split(".") if part.isdigit())  # layers are ordered by these
            layers.append((number, reader, name, module, index))
    numbers = sorted({number for number, *_ in layers})
    count = len(numbers)
    shown = numbers if count <= most else [numbers[round(i * (count - 1) / (most - 1))] for i in range(most)]
    return [
        reader(name, f"layer {numbers.index(number) + 1}", module, index)
        for number, reader, name, module, index in sorted(layers, key=lambda one: one[0])
        if number in shown
    ]
