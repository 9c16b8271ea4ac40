"""`MnemosForSeq2SeqLM` and `MnemosForSequenceClassification`: our other models in Transformers."""

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mnemos import libraries
from mnemos.config import ModelConfig
from mnemos.types import InputError, collect_auxiliary_losses

from .language_model import (
    Generates,
    check_labels,
    check_tokens,
    cut_mask,
    hides_padding,
    keep_positions,
    mean_loss,
    pack_right,
    with_auxiliary,
)
from .pretrained_model import MnemosPreTrainedModel
from .state_cache import CACHE, StateCache, check_cache

libraries.transformers()
from transformers import GenerationMixin  # noqa: E402
from transformers.modeling_outputs import BaseModelOutput, Seq2SeqLMOutput, SequenceClassifierOutput  # noqa: E402


class SourceEncoder:
    """The encoder as `generate` calls it: `output = encoder(input_ids, attention_mask)`."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, **named: Any) -> Any:
        """A BaseModelOutput with last_hidden_state [B, S, D]; padding may be on either side, and gives 0."""
        if attention_mask is None or bool(attention_mask.all()):
            return BaseModelOutput(last_hidden_state=self.model.hidden(input_ids))
        mask = cut_mask(attention_mask, input_ids)
        assert mask is not None
        source, valid = pack_right(input_ids, mask)
        hidden = torch.where(valid[..., None], self.model.hidden(source, valid), 0)
        back = torch.argsort(~mask, dim=1, stable=True).argsort(1)
        return BaseModelOutput(last_hidden_state=hidden.gather(1, back[..., None].expand_as(hidden)))

    __call__ = forward


class MnemosForSeq2SeqLM(Generates, MnemosPreTrainedModel, GenerationMixin):  # type: ignore[misc]
    """An encoder-decoder of this library: `output = model(input_ids, attention_mask, labels=...)`.

        model = MnemosForSeq2SeqLM.of(trained, decoder_start_token_id=1, eos_token_id=2, pad_token_id=0)
        model.generate(source, attention_mask=mask, num_beams=5, max_new_tokens=50)

    input_ids [B, S], attention_mask [B, S]: the source, padding on either side. decoder_input_ids [B, T] with
    decoder_attention_mask [B, past + T]: what the decoder reads; by default `labels` [B, T], shifted right behind
    decoder_start_token_id. The loss is the mean −log p of the labels in nats, −100 left out. logits [B, T, V], or those
    of the last `logits_to_keep` tokens. encoder_outputs: of an earlier call. cache, or past_key_values: a `StateCache`,
    which holds the source too, and goes on to the new state. Raises InputError for other models, and as
    MnemosForCausalLM.
    """

    auto_class = "AutoModelForSeq2SeqLM"

    def _build(self, config: ModelConfig) -> nn.Module:
        if config.inputs != "pairs":
            raise InputError(
                f"MnemosForSeq2SeqLM: expected an encoder-decoder, found {config.name!r}; use MnemosForCausalLM"
            )
        found: nn.Module = config.build()
        return found

    def get_encoder(self, *given: Any, **named: Any) -> SourceEncoder:
        """What `generate` calls for the source."""
        return SourceEncoder(self.model)

    def prepare_decoder_input_ids_from_labels(self, labels: Tensor) -> Tensor:
        """The labels [B, T] behind decoder_start_token_id, without the last one."""
        start = self.generation_config.decoder_start_token_id
        if start is None:
            raise InputError(
                "labels: expected a model with decoder_start_token_id, found none; set it in MnemosConfig, or pass "
                "decoder_input_ids"
            )
        pad = self.generation_config.pad_token_id
        shifted = F.pad(labels[:, :-1], (1, 0), value=int(start))
        return shifted.masked_fill(shifted == -100, 0 if pad is None else int(pad))

    @staticmethod
    def _source(input_ids: Tensor | None) -> Tensor:
        if input_ids is None:
            raise InputError("expected input_ids [B, S] or encoder_outputs, found neither; pass one of them")
        return input_ids

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        encoder_outputs: Any = None,
        cache: StateCache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int = 0,
        past_key_values: StateCache | None = None,
        **named: Any,
    ) -> Any:
        """See the class."""
        returns = named.pop("return_dict", None)
        self._refuse(named)
        cache = check_cache(cache, past_key_values)
        carries = cache is not None or (labels is None and not self.training if use_cache is None else use_cache)
        cache = StateCache() if cache is None else cache
        if decoder_input_ids is None and labels is not None:
            decoder_input_ids = self.prepare_decoder_input_ids_from_labels(labels)
        if decoder_input_ids is None:
            raise InputError("expected decoder_input_ids [B, T] or labels, found neither; pass one of them")
        check_labels(labels, decoder_input_ids)
        with collect_auxiliary_losses() as auxiliary:
            if cache.state is None:
                if encoder_outputs is None:
                    encoder_outputs = self.get_encoder()(self._source(input_ids), attention_mask)
                # A tuple is what other libraries, and `return_dict=False`, pass.
                hidden = encoder_outputs[0]
                cache.state = self.model.begin(hidden, None if attention_mask is None else attention_mask.bool())
            mask = cut_mask(decoder_attention_mask, decoder_input_ids)
            keep = logits_to_keep if labels is None else 0
            outputs, _ = self._read(cache, decoder_input_ids, mask, keep)
        loss = None
        if labels is not None:
            count = named.get("num_items_in_batch")
            loss = mean_loss(outputs, labels, None, count)
            loss = with_auxiliary(loss, auxiliary, labels, count) if self.training else loss
        carried: Any = cache if carries else None
        found = Seq2SeqLMOutput(
            loss=loss,
            logits=keep_positions(outputs, logits_to_keep),
            **{CACHE: carried},
            encoder_last_hidden_state=None if encoder_outputs is None else encoder_outputs[0],
        )
        return found if returns is not False else found.to_tuple()


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
        model: nn.Module = _with_classes(config, self.config.num_labels or 2).build()
        return model

    @classmethod
    def of(cls, model: nn.Module, **named: Any) -> Any:
        """As of the base class. Raises InputError for a model without classes, or with another number of them."""
        config = getattr(model, "config", None)
        if isinstance(config, ModelConfig):
            classes, wanted = (
                getattr(getattr(config, "head", None), "classes", 0),
                cls.config_class(model=config, **named).num_labels,
            )
            if classes != wanted:
                raise InputError(
                    f"MnemosForSequenceClassification.of: expected a model with {wanted} classes, found {classes}; "
                    f"load its checkpoint with from_pretrained(folder, num_labels={wanted}, "
                    "ignore_mismatched_sizes=True)"
                )
        return super().of(model, **named)

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
        input_ids = check_tokens(input_ids)
        mask = cut_mask(attention_mask, input_ids)
        with collect_auxiliary_losses() as auxiliary:
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
        packed, valid = pack_right(x, mask)
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


def _with_classes(config: ModelConfig, classes: int) -> ModelConfig:
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
