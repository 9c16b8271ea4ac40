"""Readers of memories that pass from segment to segment: Memformer's slots and encodings, and memory tokens."""

import torch
from torch import Tensor

from mnemos.memory.slots import SlotState
from mnemos.memory.tokens import TokenState
from mnemos.models.memformer import Memformer
from mnemos.models.segments import SegmentModel
from mnemos.types import State

from .memories import Reader, distance_moved, last, nodes, replaced
from .observe import Added, Attended, Calls, SlotsWritten

_DECODER = ("this segment", "the segment before", "slots")


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
                parts = ("this segment", "slots") if half == "encoder" else _DECODER[: len(names)]
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
        """Nothing to attend to."""
        if unit is not None:
            return None
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
