"""How a segment of documents is read: by which module of a given model, with which loss."""

from typing import Any

import torch
from torch import Tensor, nn

from mnemos import generators
from mnemos.hosts.remembering import Remembering, Segmented
from mnemos.hugging_face import functional
from mnemos.hugging_face.pretrained_heads import MnemosForCausalLM, mean_loss
from mnemos.hugging_face.pretrained_model import MnemosPreTrainedModel
from mnemos.modes import evaluating
from mnemos.types import Advances, InputError, State, collect_auxiliary_losses, likelihood_of

from .batches import Segment


class Reader:
    """`loss, state = reader(segment, state, count)` of a model of Transformers, ours or theirs, also inside PEFT.

        loss = Σ −log p(target) / count     (nats; label smoothing as in Trainer)

    model: a `MnemosForCausalLM` or `RememberingForCausalLM`, whose own state is used; or a causal model of theirs, with
    gated caches of scope="stream" or without, which is read by `mnemos.functional`. Auxiliary losses of layers count by
    the segment's share of the targets. label_smoothing: in training alone.
    Raises InputError for a model without a causal state, and for smoothed labels of one without logits.
    """

    def __init__(self, model: nn.Module, label_smoothing: float = 0.0) -> None:
        self.model, self._smoothing = model, label_smoothing
        self.read: Any = state_step(model)
        self._likelihood = likelihood_of(self.read)
        if label_smoothing and self._likelihood is not None:
            raise InputError(
                f"label_smoothing_factor: expected 0 for a model without logits, found {label_smoothing}; leave it out"
            )
        self.advances = isinstance(self.read, Advances)  # without the outputs, for the first pass of replay
        # A padded row begins anew with its next segment, and `Segmented` reads no mask in rows that go on.
        self._masked = not isinstance(self.read, Segmented)

    def __call__(self, segment: Segment, state: State, count: Tensor | float) -> tuple[Tensor, State]:
        """The loss, a scalar, and the state after the segment."""
        with collect_auxiliary_losses() as auxiliary:
            outputs, state = self.read(segment.input_ids, state, self._mask(segment))
        if not self.model.training:
            return mean_loss(outputs, segment.targets, self._likelihood, count), state
        return mean_loss(outputs, segment.targets, self._likelihood, count, auxiliary, self._smoothing), state

    def advance(self, segment: Segment, state: State) -> State:
        """The state after the segment."""
        return self.read.advance(segment.input_ids, state, self._mask(segment))

    def fresh(self, rows: int, device: torch.device) -> State:
        """A state of `rows` rows with the structure of those that the model returns; its values mean nothing."""
        ids = torch.zeros(rows, 1, dtype=torch.int64, device=device)
        with torch.no_grad(), generators.preserve(), evaluating(self.model):
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
