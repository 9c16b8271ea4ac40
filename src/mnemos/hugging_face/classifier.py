"""`MnemosForSequenceClassification`: a classifier of this library as a model of Transformers."""

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from mnemos import libraries
from mnemos.config import ModelConfig
from mnemos.types import InputError

from .language_model import checked_tokens, last_of_mask
from .padded import hides_padding, packed_right
from .pretrained_model import MnemosPreTrainedModel

libraries.transformers()
from transformers.modeling_outputs import SequenceClassifierOutput  # noqa: E402


class MnemosForSequenceClassification(MnemosPreTrainedModel):
    """A classifier of token sequences: `output = model(input_ids, attention_mask, labels=...)`, logits [B, num_labels].

        config = mnemos.TransformerConfig(causal=False, head=mnemos.HeadConfig(classes=3))
        model = MnemosForSequenceClassification(MnemosConfig(model=config))

    A language model's configuration gets a new head of `num_labels` classes, which reads the last token; from its
    checkpoint, and from that of a classifier with other classes, `from_pretrained(folder, num_labels=3,
    ignore_mismatched_sizes=True)` takes the other weights.
    attention_mask [B, T], 1 = valid, padding anywhere. labels: as in Transformers, [B] classes, or by `problem_type`.
    Auxiliary losses of layers are added in training. Raises InputError for a model without a head of classes.
    """

    auto_class = "AutoModelForSequenceClassification"
    accepts_loss_kwargs = False  # the loss is a mean over rows, which Trainer divides by its accumulation steps

    def _build(self, config: ModelConfig) -> nn.Module:
        model: nn.Module = with_classes(config, self.config.num_labels or 2).build()
        return model

    @classmethod
    def of(cls, model: nn.Module, **named: Any) -> Any:
        """As of the base class. Raises InputError for a model without classes, or with another number of them."""
        found = super().of(model, **named)
        given = getattr(getattr(model.config, "head", None), "classes", 0)
        if given != found.config.num_labels:
            raise InputError(
                f"MnemosForSequenceClassification.of: expected a model with {found.config.num_labels} classes, found "
                f"{given}; load its checkpoint with from_pretrained(folder, num_labels="
                f"{found.config.num_labels}, ignore_mismatched_sizes=True)"
            )
        return found

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        return_dict: bool | None = None,
        **named: Any,
    ) -> Any:
        """See the class."""
        self._refuse(named)
        input_ids = checked_tokens(input_ids)
        mask = last_of_mask(attention_mask, input_ids)
        with self._collect() as auxiliary:
            logits = self._logits(input_ids, mask)
        loss = None
        if labels is not None:
            loss = self.loss_function(labels=labels, pooled_logits=logits, config=self.config)
            loss = loss + sum(auxiliary) if self.training and len(auxiliary) else loss
        found = SequenceClassifierOutput(loss=loss, logits=logits)
        return found if return_dict is not False else found.to_tuple()

    def _logits(self, x: Tensor, mask: Tensor | None) -> Tensor:
        if mask is None or bool(mask.all()):
            logits: Tensor = self.model(x)[0]
            return logits
        packed, valid = packed_right(x, mask)
        counts = valid.sum(1).clamp(min=1)  # a row of padding alone is read as one token
        if hides_padding(self.model):
            longest = int(counts.max())
            logits = self.model(packed[:, :longest], None, mask=valid[:, :longest])[0]
            return logits
        order, parts = [], []
        for count in counts.unique().tolist():
            rows = (counts == count).nonzero()[:, 0]
            order.append(rows)
            parts.append(self.model(packed[rows, :count])[0])
        return torch.cat(parts)[torch.cat(order).argsort()]


def with_classes(config: ModelConfig, classes: int) -> ModelConfig:
    """The configuration with that number of classes: a language model's gets a head that reads the last token.

    Raises InputError for a model that has no head of classes.
    """
    head: Any = getattr(config, "head", None)
    if config.inputs != "tokens" or not hasattr(head, "classes"):
        raise InputError(
            f"MnemosForSequenceClassification: expected a model with a head of classes (transformer), found "
            f"{config.name!r}; use another class"
        )
    plain = {"tied": False, "cutoffs": (), "div_value": 1.0, "mixture": 0, "pool": "last"}
    new = dataclasses.replace(head, classes=classes, **({} if head.classes else plain))
    found: ModelConfig = dataclasses.replace(config, **{"head": new})
    return found
