"""Documents as rows of segments, and the states with which the rows go on from batch to batch."""

import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mnemos.memory_replay.engine import CarriedStates, RolloutEngine, read_in_turn
from mnemos.schedule import Schedule
from mnemos.types import InputError, JSONObject, State

# "input_ids", "targets", "mask" [B, S·L] (no "mask": all are valid), "resets" [B, S], "index"
RolloutBatch = dict[str, Any]
IGNORE = -100  # a target that is not counted


class RolloutBatches:
    """Documents of token ids, read by `rows` rows at a time in rollouts of S = `rollout` segments of L = `segment`.

        batches = RolloutBatches(documents, rows=8, segment=128, rollout=4)
        batches[0]["input_ids"]                      # [8, 512]; batch 1 goes on where batch 0 ends, row by row

    documents: a sequence of token ids [n], or of mappings with "input_ids" and, where not every token counts, "labels"
    (aligned with the ids as elsewhere, −100 = not counted). Tokens whose "attention_mask" is 0 are padding, and are
    left out with their labels, as if the document did not have them. Each row reads whole documents, one after the
    other; a document begins at the start of a segment, where "resets" [B, S] is True. Its last segment is padded
    (mask False).
    "targets" [B, S·L] are the next tokens, shifted already, −100 in padding; the first token of a document is read and
    not predicted, and a document of fewer than two tokens is left out.
    With a seed the documents are shuffled in every epoch, and epochs follow each other without end; None: every
    document once, the longest first. sets > 1: batches i, i + sets, … are of the same rows, which makes `sets` batches
    as good as one of sets·rows rows (gradient accumulation). In several processes each has rows of its own.

    Every document is looked up once at first, for its length, and again when a row begins it; beside that `batches[i]`
    costs O(rows·S·L). An iteration gives one epoch,
    with a seed from where the last one ended; a `state_dict` holds its position. Raises InputError for settings below
    1, and for documents that are none.
    """

    def __init__(
        self,
        documents: Sequence[Any],
        rows: int,
        segment: int,
        rollout: int = 1,
        seed: int | None = 0,
        sets: int = 1,
    ) -> None:
        for name, value in {"rows": rows, "segment": segment, "rollout": rollout, "sets": sets}.items():
            if not isinstance(value, int) or value < 1:
                raise InputError(f"{name}: expected a whole number of at least 1, found {value!r}; change it")
        columns = isinstance(documents, Mapping)  # as a tokenizer returns for a list of texts
        if columns or not (hasattr(documents, "__len__") and hasattr(documents, "__getitem__")):
            raise InputError(
                f"documents: expected a sequence with a length, found {type(documents).__name__}; give a list with "
                "token ids or a mapping for each document, or a data set that is read by index"
            )
        self.documents, self.rows, self.segment, self.rollout = documents, rows, segment, rollout
        self.seed, self.sets = seed, sets
        self._unpadded: dict[int, range | Tensor] = {}  # the positions of the tokens of documents with padding
        lengths = [self._read_length(number) for number in range(len(documents))]
        self._usable = [i for i, n in enumerate(lengths) if n > 1]
        if not self._usable:
            raise InputError(f"documents: expected one of at least two tokens, found none among {len(lengths)}")
        self._lengths = (
            f"{len(lengths)}, with lengths of hash {zlib.crc32(torch.tensor(lengths).numpy().tobytes()):08x}"
        )
        self._segments = [math.ceil((lengths[i] - 1) / segment) for i in self._usable]
        self._position, self._restored = 0, False

    @cached_property
    def process(self) -> tuple[int, int]:
        """(rank, number) of the processes; read at the first use, when all of them have been started."""
        several = torch.distributed.is_available() and torch.distributed.is_initialized()
        return (torch.distributed.get_rank(), torch.distributed.get_world_size()) if several else (0, 1)

    @cached_property
    def _look_up(self) -> Callable[[int], Any]:
        """documents[number], kept while rows read it: a data set may decode all of a document at each look-up."""
        return lru_cache(self.rows * self.sets)(self.documents.__getitem__)

    def __getstate__(self) -> dict[str, Any]:
        """Without what is made anew when it is needed, and cannot be pickled."""
        return {name: value for name, value in vars(self).items() if name not in ("_schedule", "_look_up")}

    @cached_property
    def _schedule(self) -> Schedule:
        return Schedule(self._segments, self.rows * self.sets * self.process[1], self.seed)

    def __len__(self) -> int:
        """The batches of an epoch: so many that about every segment is read once; without a seed, all there are."""
        rows = self.rows * self.sets * self.process[1]
        if self.seed is not None:
            return self.sets * math.ceil(sum(self._segments) / (rows * self.rollout))
        last = 0
        while any(self._schedule.at(last)):
            last += 1
        return self.sets * math.ceil(last / self.rollout)

    def __getitem__(self, index: int) -> RolloutBatch:
        """Batch number `index`, from 0; with a seed there is no last one."""
        first = (self.process[0] * self.sets + index % self.sets) * self.rows
        shape = self.rows, self.rollout * self.segment
        ids, targets = torch.zeros(shape, dtype=torch.int64), torch.full(shape, IGNORE)
        mask, resets = torch.zeros(shape, dtype=torch.bool), torch.zeros(self.rows, self.rollout, dtype=torch.bool)
        for t in range(self.rollout):
            of_rows = self._schedule.at(index // self.sets * self.rollout + t)[first : first + self.rows]
            for row, piece in enumerate(of_rows):
                resets[row, t] = piece is None or piece[1] == 0
                if piece is not None:
                    x, y = self._read(self._usable[piece[0]], piece[1])
                    where = row, slice(t * self.segment, t * self.segment + len(x))
                    ids[where], targets[where], mask[where] = x, y, True
        batch = {"input_ids": ids, "targets": targets, "resets": resets, "index": index}
        return batch if bool(mask.all()) else batch | {"mask": mask}

    def __iter__(self) -> Iterator[RolloutBatch]:
        if self.seed is None:  # an iteration begins the epoch, but for one that goes on from a saved position
            self._position = self._position % len(self) if self._restored else 0
        self._restored = False
        end = (self._position // len(self) + 1) * len(self)
        while self._position < end:
            self._position += 1  # before the batch is used: a state that is saved meanwhile goes on after it
            yield self[self._position - 1]

    def state_dict(self) -> JSONObject:
        """The position of an iteration, and the data that it is one in."""
        return {"position": self._position, "data": self.describe()}

    def load_state_dict(self, saved: JSONObject) -> None:
        """Go on from a saved position. Raises InputError if it is one in other data, or of other rows."""
        self.check_description(saved["data"])
        self._position, self._restored = int(saved["position"]), True

    def describe(self) -> JSONObject:
        """What the order of the tokens depends on: a saved position is one in data that are described alike."""
        about = {name: getattr(self, name) for name in ("rows", "segment", "rollout", "seed", "sets")}
        return about | {"processes": self.process[1], "documents": self._lengths}

    def check_description(self, saved: JSONObject) -> None:
        """Raise InputError unless a position was saved in the same data, cut in the same way."""
        for name, own in self.describe().items():
            if saved.get(name) != own:
                raise InputError(
                    f"{name}: expected {saved.get(name)!r}, with which the checkpoint was written, found {own!r}; "
                    "resume with the same documents, in the same order, and the same settings"
                )

    def _read_length(self, number: int) -> int:
        """The number of a document's tokens, without its padding, whose positions are kept. Checks the document."""
        document = self.documents[number]
        named = document if isinstance(document, Mapping) else {"input_ids": document}
        ids: Any = named.get("input_ids")
        shape = tuple(ids.shape) if hasattr(ids, "shape") else (len(ids),) if hasattr(ids, "__len__") else ()
        nested = len(shape) == 1 and shape[0] > 0 and hasattr(ids[0], "__len__") and not isinstance(ids[0], Tensor)
        if isinstance(ids, str) or len(shape) != 1 or nested:
            found = "a list of lists" if nested else list(shape) or type(document).__name__
            raise InputError(
                f"document {number}: expected token ids [n], or a mapping with these as 'input_ids', found {found}; "
                "tokenise the text first, and give each row as a document of its own"
            )
        for name in ("labels", "attention_mask"):
            if named.get(name) is not None and len(named[name]) != shape[0]:
                raise InputError(
                    f"document {number}: expected as many {name} as input_ids, found {len(named[name])} {name} and "
                    f"{shape[0]} ids; give one for each token (a label is −100 where it does not count)"
                )
        if named.get("attention_mask") is None or (mask := torch.as_tensor(named["attention_mask"]) != 0).all():
            return int(shape[0])
        kept = mask.nonzero().flatten()
        first, count = int(kept[0]) if len(kept) else 0, len(kept)
        whole = not count or int(kept[-1]) == first + count - 1  # no padding between: a range takes no memory
        self._unpadded[number] = range(first, first + count) if whole else kept
        return count

    def _read(self, number: int, segment: int) -> tuple[Tensor, Tensor]:
        """The token ids and targets of one segment of a document."""
        document = self._look_up(number)
        named = document if isinstance(document, Mapping) else {"input_ids": document}
        positions = self._unpadded.get(number, range(len(named["input_ids"])))
        positions = positions[segment * self.segment : (segment + 1) * self.segment + 1]
        first, last = int(positions[0]), int(positions[-1])
        columns = []
        for name in ("input_ids", "input_ids" if named.get("labels") is None else "labels"):
            values = torch.as_tensor(named[name][first : last + 1])
            if values.dim() != 1 or values.is_floating_point():
                raise InputError(
                    f"document {number}: expected token ids [n] of integers, found {values.dtype} {tuple(values.shape)}"
                )
            columns.append((values if isinstance(positions, range) else values[positions - first]).to(torch.int64))
        return columns[0][:-1], columns[1][1:]


class Segment(NamedTuple):
    """One segment of every row: input_ids and targets [B, L] int64 (−100 = not counted); mask [B, L] bool, or None."""

    input_ids: Tensor
    targets: Tensor
    mask: Tensor | None = None


SegmentStep = Callable[[Segment, State], tuple[Tensor, State]]
Piece = tuple[Segment, Tensor | None]  # a segment, and the rows [B] that begin a document with it


class RowStates:
    """Where the rows of `RolloutBatches` are: the number of the next batch, and the states, one per set of rows.

    Batch 0, with which documents without a seed begin again, begins all rows. engine: adds the gradients.
    """

    def __init__(self, batches: RolloutBatches, engine: RolloutEngine | None = None) -> None:
        self.batches, self._next = batches, 0
        self._carried = CarriedStates(engine or RolloutEngine(), batches.sets)

    def backward(
        self, step: SegmentStep, batch: RolloutBatch, advance: Callable[[Segment, State], State] | None = None
    ) -> Tensor:
        """Add the gradients of Σ_t loss_t through the segments of a batch; returns the sum of the losses.

        step(segment, state) -> (loss, state); advance(segment, state) -> state. The rows go on from the state that the
        last batch of their set left, without gradient to it. Raises InputError for a batch that does not follow the
        last one.
        """

        def read(pieces: Sequence[Piece], state: State) -> tuple[Tensor, list[State]]:
            losses, states = read_in_turn(step, pieces, state)
            return torch.stack(losses).sum(), states

        def skip(piece: Piece, state: State) -> State:
            assert advance is not None
            return read_in_turn(lambda segment, state: (None, advance(segment, state)), [piece], state)[1][0]

        number, pieces = self._split(batch)
        losses = self._carried.backward(number, read, pieces, None if advance is None else skip)
        self._next += 1
        return losses.to(torch.promote_types(losses.dtype, torch.float32)).sum()

    def read(self, step: SegmentStep, batch: RolloutBatch) -> Tensor:
        """The sum of the losses of a batch, without gradient; the rows go on."""
        number, pieces = self._split(batch)
        with torch.no_grad():
            losses, states = read_in_turn(step, pieces, self._carried.states[number])
        self._carried.states[number], self._next = states[-1], self._next + 1
        return torch.stack(losses).sum()

    def _split(self, batch: RolloutBatch) -> tuple[int, list[Piece]]:
        """The number of the batch's set of rows, and its segments with the rows that begin a document."""
        index = int(batch["index"])
        if index == 0:
            self._next, self._carried.states = 0, [None] * self.batches.sets
        if index != self._next:
            raise InputError(
                f"expected batch {self._next} of the rows, which follows the last one, found batch {index}; rows go on "
                "from batch to batch, so none can be left out or repeated"
            )
        begins = [mask if bool(mask.any()) else None for mask in batch["resets"].unbind(1)]
        return index % self.batches.sets, list(zip(segments(batch, self.batches.segment), begins, strict=True))

    def follow(self) -> None:
        """Let the next iteration of the batches begin where the rows are."""
        self.batches.load_state_dict({**self.batches.state_dict(), "position": self._next})

    def state_dict(self) -> JSONObject:
        """What `restore` reads: plain values and tensors."""
        return {"next": self._next, "data": self.batches.describe(), "states": self._carried.state_dict()}

    def restore(self, saved: JSONObject, fresh: Callable[[], State], device: torch.device) -> None:
        """Go on from a `state_dict`. fresh(): a state with the model's structure.

        Raises InputError if it is of other data, other rows or another model.
        """
        self.batches.check_description(saved["data"])
        self._carried.load_state_dict(saved["states"], fresh, device)
        self._next = int(saved["next"])


def segments(batch: RolloutBatch, length: int) -> list[Segment]:
    """The segments of a rollout; a segment without padding has no mask."""
    ids, targets = batch["input_ids"].split(length, 1), batch["targets"].split(length, 1)
    masks = batch["mask"].split(length, 1) if "mask" in batch else [None] * len(ids)
    masks = [None if m is None or bool(m.all()) else m for m in masks]
    return [Segment(*each) for each in zip(ids, targets, masks, strict=True)]
