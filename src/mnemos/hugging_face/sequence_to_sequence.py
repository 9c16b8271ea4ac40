"""`MnemosForSeq2SeqLM`: an encoder-decoder of this library as a model of Transformers."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mnemos import libraries
from mnemos.config import ModelConfig
from mnemos.types import InputError

from .language_model import Generates, check_labels, kept, last_of_mask, mean_loss, with_auxiliary
from .padded import packed_right
from .pretrained_model import MnemosPreTrainedModel
from .state_cache import CACHE, StateCache, checked_cache

libraries.transformers()
from transformers import GenerationMixin  # noqa: E402
from transformers.modeling_outputs import BaseModelOutput, Seq2SeqLMOutput  # noqa: E402


class SourceEncoder:
    """The encoder as `generate` calls it: `output = encoder(input_ids, attention_mask)`."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, **named: Any) -> Any:
        """A BaseModelOutput with last_hidden_state [B, S, D]; padding may be on either side, and gives 0."""
        if attention_mask is None or bool(attention_mask.all()):
            return BaseModelOutput(last_hidden_state=self.model.hidden(input_ids))
        mask = last_of_mask(attention_mask, input_ids)
        assert mask is not None
        source, valid = packed_right(input_ids, mask)
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
        cache = checked_cache(cache, past_key_values)
        carries = cache is not None or (labels is None and not self.training if use_cache is None else use_cache)
        cache = StateCache() if cache is None else cache
        if decoder_input_ids is None and labels is not None:
            decoder_input_ids = self.prepare_decoder_input_ids_from_labels(labels)
        if decoder_input_ids is None:
            raise InputError("expected decoder_input_ids [B, T] or labels, found neither; pass one of them")
        check_labels(labels, decoder_input_ids)
        with self._collect() as auxiliary:
            if cache.state is None:
                if encoder_outputs is None:
                    encoder_outputs = self.get_encoder()(self._source(input_ids), attention_mask)
                # A tuple is what other libraries, and `return_dict=False`, pass.
                hidden = encoder_outputs[0]
                cache.state = self.model.begin(hidden, None if attention_mask is None else attention_mask.bool())
            mask = last_of_mask(decoder_attention_mask, decoder_input_ids)
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
            logits=kept(outputs, logits_to_keep),
            **{CACHE: carried},
            encoder_last_hidden_state=None if encoder_outputs is None else encoder_outputs[0],
        )
        return found if returns is not False else found.to_tuple()
