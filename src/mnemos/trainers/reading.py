"""How rows of documents are read from rollout to rollout: by which module, from which states, with which loss."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mnemos import generators
from mnemos._compat import pytree
from mnemos.hosts.remembering import Remembering, Segmented
from mnemos.hugging_face import functional
from mnemos.hugging_face.language_model import MnemosForCausalLM, mean_loss, with_auxiliary
from mnemos.hugging_face.pretrained_model import MnemosPreTrainedModel
from mnemos.memory_replay.engine import RolloutEngine, detach_contiguous, read_in_turn
from mnemos.modes import evaluating
from mnemos.types import Advances, InputError, JSONObject, State, collect_auxiliary_losses, likelihood_of

from .batches import Rollout, RolloutBatches, check_described


class Segment(NamedTuple):
    """One segment of every row: input_ids and targets [B, L] int64 (−100 = not counted); mask [B, L] bool, or None."""

    input_ids: Tensor
    targets: Tensor
    mask: Tensor | None = None


Step = Callable[[Segment, State], tuple[Tensor, State]]
Piece = tuple[Segment, Tensor | None]  # a segment, and the rows [B] that begin a document with it


class RowStates:
    """Where the rows of `RolloutBatches` are: the number of the next batch, and the states, one per set of rows.

    Batch 0, with which documents without a seed begin again, begins all rows.
    """

    def __init__(self, batches: RolloutBatches) -> None:
        self.batches, self._next = batches, 0
        self._states: list[State] = [None] * batches.sets

    def backward(
        self,
        engine: RolloutEngine,
        step: Step,
        batch: Rollout,
        advance: Callable[[Segment, State], State] | None = None,
    ) -> Tensor:
        """Add the gradients of Σ_t loss_t through the segments of a batch; returns the sum of the losses.

        step(segment, state) -> (loss, state); advance(segment, state) -> state. The rows go on from the state that the
        last batch of their set left, without gradient to it. Raises InputError for a batch that does not follow the
        last one.
        """
        own, given = self._split(batch)

        def read(given: Sequence[Piece], state: State) -> tuple[Tensor, list[State]]:
            losses, states = read_in_turn(step, given, state)
            return torch.stack(losses).sum(), states

        def skip(one: Piece, state: State) -> State:
            assert advance is not None
            return read_in_turn(lambda segment, state: (None, advance(segment, state)), [one], state)[1][0]

        losses, state = engine.run(read, given, self._states[own], None if advance is None else skip)
        self._go_on(own, state)
        return losses.to(torch.promote_types(losses.dtype, torch.float32)).sum()

    def read(self, step: Step, batch: Rollout) -> Tensor:
        """The sum of the losses of a batch, without gradient; the rows go on."""
        own, given = self._split(batch)
        with torch.no_grad():
            losses, states = read_in_turn(step, given, self._states[own])
        self._go_on(own, detach_contiguous(states[-1]))
        return torch.stack(losses).sum()

    def _split(self, batch: Rollout) -> tuple[int, list[Piece]]:
        """The number of the batch's set of rows, and its segments with the rows that begin a document."""
        index = int(batch["index"])
        if index == 0:
            self._next, self._states = 0, [None] * self.batches.sets
        if index != self._next:
            raise InputError(
                f"expected batch {self._next} of the rows, which follows the last one, found batch {index}; rows go on "
                "from batch to batch, so none can be left out or repeated"
            )
        begins = [mask if bool(mask.any()) else None for mask in batch["resets"].unbind(1)]
        found = segments(batch, self.batches.segment)
        return index % self.batches.sets, list(zip(found, begins, strict=True))

    def _go_on(self, own: int, state: State) -> None:
        self._states[own] = state
        self._next += 1

    def follow(self) -> None:
        """Let the next iteration of the batches begin where the rows are."""
        self.batches.load_state_dict({**self.batches.state_dict(), "place": self._next})

    def saved(self) -> JSONObject:
        """What `restore` reads: plain values and tensors."""
        states = [pytree.tree_leaves(state) for state in self._states]
        return {"next": self._next, "data": self.batches.described(), "states": states}

    def restore(self, saved: JSONObject, fresh: Callable[[], State], device: torch.device) -> None:
        """Go on from what `saved` gave. fresh(): a state with the model's structure.

        Raises InputError if it is of other data, other rows or another model.
        """
        check_described(self.batches, saved["data"])
        like, structure = pytree.tree_flatten(fresh())
        for found in saved["states"] if saved["next"] else ():
            same = len(found) == len(like) and all(_kind(a) == _kind(b) for a, b in zip(found, like, strict=True))
            if not same:
                raise InputError(
                    f"expected a state of this model ({len(like)} tensors), found one of another in the checkpoint "
                    f"({len(found)}); resume with the model that was trained"
                )
        self._next = int(saved["next"])
        self._states = [
            pytree.tree_unflatten([x.to(device) if isinstance(x, Tensor) else x for x in found], structure)
            if found
            else None
            for found in saved["states"]
        ]


def segments(batch: Rollout, length: int) -> list[Segment]:
    """The segments of a rollout; a segment without padding has no mask."""
    ids, targets = batch["input_ids"].split(length, 1), batch["targets"].split(length, 1)
    if "mask" not in batch:
        return [Segment(x, y) for x, y in zip(ids, targets, strict=True)]
    masks = batch["mask"].split(length, 1)
    return [Segment(x, y, None if bool(m.all()) else m) for x, y, m in zip(ids, targets, masks, strict=True)]


def _kind(x: object) -> Any:
    """What must agree in a saved state and one of the model: its rows and tokens may differ in number."""
    return (x.dtype, x.dim(), tuple(x.shape[2:])) if isinstance(x, Tensor) else type(x)


class Reader:
    """`loss, state = reader(segment, state, count)` of a model of Transformers, ours or theirs, also inside PEFT.

        loss = Σ −log p(target) / count     (nats; label smoothing as in Trainer)

    model: a `MnemosForCausalLM` or `RememberingForCausalLM`, whose own state is used; or a causal model of theirs, with
    gated caches of scope="stream" or without, which is read by `mnemos.functional`. Auxiliary losses of layers count by
    the segment's share of the targets. Raises InputError for a model without a causal state.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model, self._smoothing = model, 0.0
        self.read: Any = state_step(model)
        self._likelihood = likelihood_of(self.read)
        # A padded row begins anew with its next segment, and `Segmented` reads no mask in rows that go on.
        self._masked = not isinstance(self.read, Segmented)

    def __call__(self, segment: Segment, state: State, count: Tensor | float) -> tuple[Tensor, State]:
        """The loss, a scalar, and the state after the segment."""
        with collect_auxiliary_losses() as auxiliary:
            outputs, state = self.read(segment.input_ids, state, self._mask(segment))
        if self._smoothing and self.model.training:
            wide = outputs.to(torch.promote_types(outputs.dtype, torch.float32)).transpose(1, 2)
            loss = F.cross_entropy(wide, segment.targets, reduction="sum", label_smoothing=self._smoothing) / count
        else:
            loss = mean_loss(outputs, segment.targets, self._likelihood, count)
        return (with_auxiliary(loss, auxiliary, segment.targets, count) if self.model.training else loss), state

    def smooth(self, label_smoothing: float) -> None:
        """Smooth the labels of all losses in training. Raises InputError for a model that has no logits."""
        if label_smoothing and self._likelihood is not None:
            raise InputError(
                f"label_smoothing_factor: expected 0 for a model without logits, found {label_smoothing}; leave it out"
            )
        self._smoothing = label_smoothing

    @property
    def advances(self) -> bool:
        """Whether the next state can be computed without the outputs, for the first pass of replay."""
        return isinstance(self.read, Advances)

    def advance(self, segment: Segment, state: State) -> State:
        """The state after the segment."""
        return self.read.advance(segment.input_ids, state, self._mask(segment))

    def fresh(self, rows: int, device: torch.device) -> State:
        """A state of `rows` rows with the structure of those that the model returns; its values mean nothing."""
        ids = torch.zeros(rows, 1, dtype=torch.int64, device=device)
        with torch.no_grad(), generators.kept(), evaluating(self.model):
            return self.read(ids, None)[1]

    def _mask(self, segment: Segment) -> Tensor | None:
        return segment.mask if self._masked else None


def state_step(model: nn.Module) -> nn.Module:
    """The module that is called as `outputs, state = step(input_ids, state, mask)` for a model that a trainer is given.

    Raises InputError for a model without a causal state, and says what to give instead.
    """
    adapted: Any = model
    base: Any = adapted.get_base_model() if hasattr(model, "get_base_model") else model
    found = type(base).__name__
    if isinstance(base, MnemosForCausalLM):
        if base.model.state_kind == "none":
            raise InputError(
                f"expected a model that keeps a state between segments, found {found} of {type(base.model).__name__}, "
                "which keeps none; use another attention or model, or transformers.Trainer"
            )
        own: nn.Module = base.model
        return own
    if isinstance(base, MnemosPreTrainedModel):
        raise InputError(f"expected a causal language model, found {found}; use transformers.Trainer")
    if isinstance(base, Remembering):
        raise InputError(
            "expected a model of Transformers, found what mnemos.remember returned; give "
            "mnemos.hugging_face.RememberingForCausalLM.of(model, segment=...)"
        )
    if type(base).__module__.startswith("mnemos."):
        raise InputError(
            f"expected a model of Transformers, found {found} of mnemos; give "
            "mnemos.hugging_face.MnemosForCausalLM.of(model)"
        )
    step = functional(model)
    if base.base_model is base and base.get_output_embeddings() is None:
        raise InputError(
            f"expected a causal language model, found {found}, which has no output layer; use AutoModelForCausalLM or "
            "the class whose name ends in ForCausalLM"
        )
    return step


def average_gradients(parameters: Iterable[Tensor]) -> None:
    """Average the gradients over the processes, with one all-reduce per type of number.

    A parameter without a gradient in every process keeps none. One process: nothing happens.
    """
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return
    world = torch.distributed.get_world_size()
    if world == 1:
        return
    groups: dict[Any, list[Tensor]] = {}
    for x in parameters:
        if x.requires_grad:
            groups.setdefault((x.dtype, x.device), []).append(x)
    for (dtype, device), found in groups.items():
        used = torch.tensor([x.grad is not None for x in found], dtype=dtype, device=device)
        flat = torch.cat([used, *((torch.zeros_like(x) if x.grad is None else x.grad).flatten() for x in found)])
        torch.distributed.all_reduce(flat)
        used, rest = flat[: len(found)], flat[len(found) :] / world
        for x, some, mean in zip(found, used.tolist(), rest.split([x.numel() for x in found]), strict=True):
            x.grad = mean.view_as(x).clone() if some else None
