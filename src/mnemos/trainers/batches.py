"""Documents as rows of segments: batch i holds the next rollout of every row, as a pure function of i."""

import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mnemos.schedule import Schedule
from mnemos.types import InputError, JSONObject

# "input_ids", "targets", "mask" [B, S·L] (no "mask": all are valid), "resets" [B, S], "index"
RolloutBatch = dict[str, Any]
IGNORE = -100  # a target that is not counted
_LENGTHS = "lengths of documents"
_ELSEWHERE = {
    "rows": "per_device_train_batch_size",
    "sets": "gradient_accumulation_steps",
    "seed": "data_seed or seed",
}


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

    Every document is read once at first, for its length; `batches[i]` costs O(rows·S·L). An iteration gives one epoch,
    with a seed from where the last one ended; a `state_dict` holds the place. Raises InputError for settings below 1,
    and for documents that are none.
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
        lengths = []
        self._unpadded: dict[int, range | Tensor] = {}  # of the documents with padding
        for i in range(len(documents)):
            found = documents[i]
            places = _find_unpadded(found, i)
            if places is not None:
                self._unpadded[i] = places
            lengths.append(len(_find_ids(found, i) if places is None else places))
        self._usable = [i for i, n in enumerate(lengths) if n > 1]
        if not self._usable:
            raise InputError(f"documents: expected one of at least two tokens, found none among {len(lengths)}")
        self._lengths = zlib.crc32(torch.tensor(lengths).numpy().tobytes())
        self._segments = [math.ceil((lengths[i] - 1) / segment) for i in self._usable]
        self._place, self._restored = 0, False
        self._process: tuple[int, int] | None = None
        self._schedule: Schedule | None = None

    @property
    def process(self) -> tuple[int, int]:
        """(rank, number) of the processes; found out at the first use, when all of them have been started."""
        if self._process is None:
            several = torch.distributed.is_available() and torch.distributed.is_initialized()
            self._process = (torch.distributed.get_rank(), torch.distributed.get_world_size()) if several else (0, 1)
        return self._process

    def describe(self) -> JSONObject:
        """What the order of the tokens depends on: a saved place is one in data that are described alike."""
        names = ("rows", "segment", "rollout", "seed", "sets")
        about = {name: getattr(self, name) for name in names}
        return about | {"processes": self.process[1], _LENGTHS: self._lengths}

    def __len__(self) -> int:
        """The batches of an epoch: so many that about every segment is read once; without a seed, all there are."""
        rows = self.rows * self.sets * self.process[1]
        if self.seed is not None:
            return self.sets * math.ceil(sum(self._segments) / (rows * self.rollout))
        schedule, last = Schedule(self._segments, rows, None), 0
        while any(schedule.at(last)):
            last += 1
        return self.sets * math.ceil(last / self.rollout)

    def __getitem__(self, index: int) -> RolloutBatch:
        """Batch number `index`, from 0; with a seed there is no last one."""
        rank, processes = self.process
        if self._schedule is None:
            self._schedule = Schedule(self._segments, self.rows * self.sets * processes, self.seed)
        first = (rank * self.sets + index % self.sets) * self.rows
        shape = self.rows, self.rollout * self.segment
        ids, targets = torch.zeros(shape, dtype=torch.int64), torch.full(shape, IGNORE)
        mask, resets = torch.zeros(shape, dtype=torch.bool), torch.zeros(self.rows, self.rollout, dtype=torch.bool)
        for t in range(self.rollout):
            of_rows = self._schedule.at(index // self.sets * self.rollout + t)[first : first + self.rows]
            for row, found in enumerate(of_rows):
                resets[row, t] = found is None or found[1] == 0
                if found is not None:
                    x, y = self._piece(*found)
                    place = row, slice(t * self.segment, t * self.segment + len(x))
                    ids[place], targets[place], mask[place] = x, y, True
        batch = {"input_ids": ids, "targets": targets, "resets": resets, "index": index}
        return batch if bool(mask.all()) else batch | {"mask": mask}

    def _piece(self, document: int, number: int) -> tuple[Tensor, Tensor]:
        """The token ids and targets of one segment of a document."""
        place = self._usable[document]
        found = self.documents[place]
        first = number * self.segment
        ids = _find_ids(found, place)
        here = self._unpadded.get(place, range(len(ids)))[first : first + self.segment + 1]
        ids = _part(ids, here, place)
        labels = ids
        if isinstance(found, Mapping) and "labels" in found:
            if len(found["labels"]) != len(found["input_ids"]):
                raise InputError(
                    f"document {place}: expected as many labels as input_ids, found {len(found['labels'])} labels and "
                    f"{len(found['input_ids'])} ids; a label is −100 where its token does not count"
                )
            labels = _part(found["labels"], here, place)
        return ids[:-1], labels[1:]

    def __iter__(self) -> Iterator[RolloutBatch]:
        if self.seed is None:  # an iteration begins the epoch, but for one that goes on from a saved place
            self._place = self._place % len(self) if self._restored else 0
        self._restored = False
        end = (self._place // len(self) + 1) * len(self)
        while self._place < end:
            self._place += 1  # before the batch is used: a state that is saved meanwhile goes on after it
            yield self[self._place - 1]

    def state_dict(self) -> JSONObject:
        """The place of an iteration, and the data that it is one of."""
        return {"place": self._place, "data": self.describe()}

    def load_state_dict(self, saved: JSONObject) -> None:
        """Go on from a saved place. Raises InputError if it is one of other data, or of other rows."""
        check_description(self, saved["data"])
        self._place, self._restored = int(saved["place"]), True


def check_description(batches: RolloutBatches, saved: JSONObject) -> None:
    """Raise InputError unless a place was saved in the same data, cut in the same way."""
    for name, found in batches.describe().items():
        if saved.get(name) != found and name == _LENGTHS:
            raise InputError(
                "documents: expected those with which the checkpoint was written, found others, or more or fewer of "
                "them; resume with the same, in the same order"
            )
        if saved.get(name) != found:
            also = f" ({_ELSEWHERE[name]} of TrainingArguments)" if name in _ELSEWHERE else ""
            raise InputError(
                f"{name}{also}: expected {saved.get(name)!r}, with which the checkpoint was written, found {found!r}; "
                "resume with the same data and settings"
            )


def _find_ids(document: Any, place: int) -> Any:
    """The token ids of a document."""
    if isinstance(document, Mapping):
        if "input_ids" not in document:
            found = ", ".join(map(str, document))
            raise InputError(f"document {place}: expected 'input_ids', found {found}; tokenise it")
        document = document["input_ids"]
    if isinstance(document, str) or not hasattr(document, "__len__") or getattr(document, "shape", None) == ():
        raise InputError(
            f"document {place}: expected token ids [n], found {type(document).__name__}; tokenise the text first"
        )
    shape = getattr(document, "shape", ())
    if len(shape) > 1 or (not shape and len(document) > 0 and hasattr(document[0], "__len__")):
        raise InputError(
            f"document {place}: expected token ids [n], found {list(shape) or 'a list of lists'}; give each row as a "
            "document of its own"
        )
    return document


def _find_unpadded(document: Any, place: int) -> range | Tensor | None:
    """The places of a document's tokens that are no padding, as a range where there is none between; None: all."""
    if not isinstance(document, Mapping) or document.get("attention_mask") is None:
        return None
    ids, mask = _find_ids(document, place), torch.as_tensor(document["attention_mask"])
    if mask.shape != (len(ids),) or mask.is_floating_point():
        raise InputError(
            f"document {place}: expected an attention_mask of {len(ids)} integers or booleans, as many as input_ids, "
            f"found {mask.dtype} {tuple(mask.shape)}; give the one that the tokenizer returns"
        )
    if bool(mask.all()):
        return None
    places = mask.nonzero().flatten()
    first, count = int(places[0]) if len(places) else 0, len(places)
    return range(first, first + count) if count == 0 or int(places[-1]) == first + count - 1 else places


def _part(values: Any, here: range | Tensor, place: int) -> Tensor:
    """A document's ids or labels at some places, which are in order."""
    first, last = int(here[0]), int(here[-1])
    found = _as_ids(values[first : last + 1], place)
    return found if isinstance(here, range) else found[here - first]


def _as_ids(values: Any, place: int) -> Tensor:
    found = torch.as_tensor(values)
    if found.dim() != 1 or found.is_floating_point():
        raise InputError(
            f"document {place}: expected token ids [n] of integers, found {found.dtype} {tuple(found.shape)}"
        )
    return found.to(torch.int64)
