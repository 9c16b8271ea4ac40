"""Our models as models of Transformers: `MnemosForCausalLM`, `MnemosForSeq2SeqLM`, `MnemosForSequenceClassification`.

Two ideas: `generate` carries a model's state in a `StateCache` (`Generates`), and padding may be anywhere in a row,
because outputs and states are those of each row read by itself (`read_padded`).
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mnemos import libraries
from mnemos.config import ModelConfig
from mnemos.generate.fused import fused_step
from mnemos.ops.padding import PackedRows, zero_invalid
from mnemos.types import (
    InputError,
    Likelihood,
    Output,
    State,
    collect_auxiliary_losses,
    describe,
    is_padding_free,
    join,
    leaves,
    likelihood_of,
    read_by_count,
    select,
)

from .pretrained_model import MnemosPreTrainedModel
from .state_cache import CACHE, StateCache, check_cache

libraries.transformers()
from transformers import GenerationMixin  # noqa: E402
from transformers.modeling_outputs import (  # noqa: E402
    BaseModelOutput,
    CausalLMOutputWithPast,
    Seq2SeqLMOutput,
    SequenceClassifierOutput,
)

Call = Callable[[Tensor, State], Output]  # tokens [B, T] and a state -> outputs [B, T, V] and the new state


class Generates:
    """What `generate` needs of a model whose cache is a `StateCache`; before GenerationMixin among the base classes."""

    model: Any
    config: Any
    training: bool

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], *given: Any, **named: Any
    ) -> None:
        """Make the cache before the first call: assisted decoding needs it then."""
        if generation_config.cache_implementation is not None:
            raise InputError(
                f"cache_implementation: expected none, found {generation_config.cache_implementation!r}; leave it out"
            )
        cache = check_cache(*(model_kwargs.pop(name, None) for name in libraries.CACHE_NAMES))
        if cache is not None:
            cache._is_user_defined = True
        elif generation_config.use_cache is not False:
            cache = StateCache()
        if cache is not None:
            model_kwargs[CACHE] = cache
        if generation_config.is_assistant:
            model_kwargs.pop("position_ids", None)  # those of the model that this one drafts for
            if cache is not None:
                cache.activate_past_recording()

    def _read(self, cache: StateCache | None, tokens: Tensor, mask: Tensor | None, keep: int) -> tuple[Tensor, State]:
        """Outputs [B, n, ·] of the last n = `keep` tokens of [B, T] (0: all) after the cache's, and the state.

        The cache goes on to the state.
        """
        keep = min(keep or tokens.shape[1], tokens.shape[1])
        if cache is None:
            return read_padded(self.model, tokens, (None, mask), self._call(None, keep), False, keep)
        if cache.recording and self.model.splits != "anywhere":
            raise InputError(
                "assisted decoding: expected a model that may be cut anywhere, found one with splits = 'segments'; "
                "decode without an assistant"
            )
        tokens, mask = cache.with_unread(tokens, mask)
        outputs, state = read_padded(self.model, tokens, (cache.state, mask), self._call(cache, keep), True, keep)
        cache.read(tokens, mask, state)
        return outputs, state

    def _call(self, cache: StateCache | None, keep: int) -> Call:
        """What reads tokens without padding."""

        def call(x: Tensor, state: State) -> Output:
            # --- a prompt in segments, and its last token alone, as `mnemos.Stream` reads it ---
            if cache is not None and self.model.splits == "segments" and x.shape[1] > 1:
                parts = []
                for part in (*x[:, :-1].split(self.config.segment, 1), x[:, -1:]):
                    outputs, state = self.model(part, state)
                    parts.append(outputs)
                return torch.cat(parts, 1), state

            # --- a token ---
            if x.shape[1] == 1 and cache is not None and not torch.is_grad_enabled() and not self.training:
                if cache.step is None or cache.step.model is not self.model:
                    cache.step = fused_step(self.model)
                outputs, state = cache.step(x, state)
                return outputs, state

            # --- any number of tokens; a prompt's logits are large, and only the last are wanted ---
            if not 0 < keep < x.shape[1] or not getattr(self.model, "picks_positions", False):
                outputs, state = self.model(x, state)
                return outputs, state
            last = torch.arange(x.shape[1], device=x.device) >= x.shape[1] - keep
            outputs, state = self.model(x, state, only=last.expand(x.shape))
            return outputs.unflatten(0, (len(x), keep)), state

        return call


class MnemosForCausalLM(Generates, MnemosPreTrainedModel, GenerationMixin):
    """A causal language model of this library: `output = model(input_ids, attention_mask, labels=...)`.

        model = MnemosForCausalLM(MnemosConfig(model=mnemos.MemformerConfig(vocab_size=256)))
        model = MnemosForCausalLM.of(trained)                     # a model that is trained already
        model.generate(ids, attention_mask=mask, num_beams=4, max_new_tokens=20)

    input_ids [B, T]; attention_mask [B, T], or [B, past + T] with the past's, 1 = valid, padding anywhere; logits
    [B, T, V] predict the token after input_ids[:, i], or those of the last `logits_to_keep` tokens. labels [B, T]: the
    input ids, −100 where they do not count: the loss is the mean −log p in nats, shifted here; the token after
    padding does not count, and auxiliary losses of layers are added in training. num_items_in_batch: the labels of an
    update but each row's first, as Trainer counts them (see `shift_labels`). cache, or past_key_values: a `StateCache`,
    which goes on to the new state; use_cache: whether to make one (config's default: in evaluation without labels).
    The output has it under the name of the installed Transformers: `cache` from 5.24 on, `past_key_values` before.
    Padding has no position. `model.model` is the model itself: `y, state = model.model(x, state)`. A model with an
    adaptive softmax gives log-probabilities as logits, and none (None) in training with labels. Raises InputError for a
    model that does not predict tokens, a cache of another kind, and for position_ids, inputs_embeds, attentions and
    hidden states, which these models do not have.
    """

    auto_class = "AutoModelForCausalLM"

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        if self.model.state_kind == "none":
            self.generation_config.use_cache = False

    def _build(self, config: Any) -> Any:
        model: Any = config.build()
        if config.inputs != "tokens" or not model.autoregressive:
            other = "MnemosForSeq2SeqLM" if config.inputs == "pairs" else "MnemosForSequenceClassification"
            raise InputError(f"MnemosForCausalLM: expected a causal language model, found {config.name!r}; use {other}")
        return model

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        cache: StateCache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        return_dict: bool | None = None,
        past_key_values: StateCache | None = None,
        **loss_kwargs: Any,
    ) -> Any:
        self._refuse(loss_kwargs)
        input_ids = check_tokens(input_ids)
        cache = check_cache(cache, past_key_values)
        if use_cache is None:
            use_cache = cache is not None or (labels is None and not self.training and self.model.state_kind != "none")
        if cache is None and use_cache:
            cache = StateCache()
        mask = cut_mask(attention_mask, input_ids)
        check_labels(labels, input_ids)

        # --- outputs ---
        with collect_auxiliary_losses() as auxiliary:
            keep = logits_to_keep if isinstance(logits_to_keep, int) and labels is None else 0
            outputs, _ = self._read(cache, input_ids, mask, keep)

        # --- loss; logits too, unless only the loss is wanted and they are large ---
        likelihood, loss, logits = likelihood_of(self.model), None, None
        if labels is not None:
            targets, count = shift_labels(labels, mask, loss_kwargs.get("num_items_in_batch"))
            loss = mean_loss(outputs, targets, likelihood, count, auxiliary if self.training else ())
        if likelihood is None or not (self.training and labels is not None):
            logits = keep_positions(outputs, logits_to_keep)
            logits = logits if likelihood is None else likelihood.log_prob(logits)
        carried: Any = cache if use_cache else None
        output = CausalLMOutputWithPast(loss=loss, logits=logits, **{CACHE: carried})
        return output if return_dict is not False else output.to_tuple()


class SourceEncoder:
    """The encoder as `generate` calls it: `output = encoder(input_ids, attention_mask)`."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, **named: Any) -> Any:
        """A BaseModelOutput with last_hidden_state [B, S, D]; padding may be on either side, and gives 0."""
        mask = cut_mask(attention_mask, input_ids)
        rows = PackedRows.of(zero_invalid(input_ids, mask), mask)
        hidden = rows.in_place(self.model.hidden(rows.x, rows.mask), input_ids.shape[1])
        return BaseModelOutput(last_hidden_state=hidden)

    __call__ = forward


class MnemosForSeq2SeqLM(Generates, MnemosPreTrainedModel, GenerationMixin):
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

    def _build(self, config: Any) -> Any:
        if config.inputs != "pairs":
            raise InputError(f"MnemosForSeq2SeqLM: expected pairs, found {config.name!r}; use MnemosForCausalLM")
        return config.build()

    def get_encoder(self, *given: Any, **named: Any) -> SourceEncoder:
        """What `generate` calls for the source."""
        return SourceEncoder(self.model)

    def prepare_decoder_input_ids_from_labels(self, labels: Tensor) -> Tensor:
        """The labels [B, T] behind decoder_start_token_id, without the last one."""
        start = self.generation_config.decoder_start_token_id
        if start is None:
            raise InputError(
                "labels: expected decoder_start_token_id, found none; set it in MnemosConfig, or pass decoder_input_ids"
            )
        pad = self.generation_config.pad_token_id
        shifted = F.pad(labels[:, :-1], (1, 0), value=int(start))
        return shifted.masked_fill(shifted == -100, 0 if pad is None else int(pad))

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
        return_dict = named.pop("return_dict", None)
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
            # --- the source, in the first call ---
            if cache.state is None:
                if encoder_outputs is None:
                    if input_ids is None:
                        raise InputError("expected input_ids [B, S] or encoder_outputs, found neither; pass one")
                    encoder_outputs = self.get_encoder()(input_ids, attention_mask)
                hidden = encoder_outputs[0]  # other libraries, and `return_dict=False`, pass a tuple
                cache.state = self.model.begin(hidden, None if attention_mask is None else attention_mask.bool())

            # --- the target ---
            mask = cut_mask(decoder_attention_mask, decoder_input_ids)
            outputs, _ = self._read(cache, decoder_input_ids, mask, logits_to_keep if labels is None else 0)
        loss = None
        if labels is not None:
            count = named.get("num_items_in_batch")
            loss = mean_loss(outputs, labels, None, count, auxiliary if self.training else ())
        carried: Any = cache if carries else None
        output = Seq2SeqLMOutput(
            loss=loss,
            logits=keep_positions(outputs, logits_to_keep),
            **{CACHE: carried},
            encoder_last_hidden_state=None if encoder_outputs is None else encoder_outputs[0],
        )
        return output if return_dict is not False else output.to_tuple()


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

    def _build(self, config: Any) -> Any:
        head: Any = getattr(config, "head", None)
        if config.inputs != "tokens" or not hasattr(head, "classes"):
            raise InputError(
                f"MnemosForSequenceClassification: expected a head of classes, found {config.name!r}; use another class"
            )
        # A language model's head becomes one that reads the last token.
        plain = {"tied": False, "cutoffs": (), "mixture": 0, "pool": "last"}
        settings = {"classes": self.config.num_labels or 2, **({} if head.classes else plain)}
        return dataclasses.replace(config, head=dataclasses.replace(head, **settings)).build()

    @classmethod
    def of(cls, model: nn.Module, **named: Any) -> Any:
        """As of the base class. Raises InputError for a model without classes, or with another number of them."""
        config = getattr(model, "config", None)
        if isinstance(config, ModelConfig):
            classes = getattr(getattr(config, "head", None), "classes", 0)
            wanted = cls.config_class(model=config, **named).num_labels
            if classes != wanted:
                raise InputError(
                    f"MnemosForSequenceClassification.of: expected a model with {wanted} classes, found {classes}; "
                    f"load it with from_pretrained(folder, num_labels={wanted}, ignore_mismatched_sizes=True)"
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
        self._refuse(named)
        input_ids = check_tokens(input_ids)
        mask = cut_mask(attention_mask, input_ids)
        with collect_auxiliary_losses() as auxiliary:
            logits = self._logits(input_ids, mask)
        loss = None
        if labels is not None:
            loss = self.loss_function(labels=labels, pooled_logits=logits, config=self.config)
            loss = loss + sum(auxiliary) if self.training and len(auxiliary) else loss
        output = SequenceClassifierOutput(loss=loss, logits=logits)
        return output if return_dict is not False else output.to_tuple()

    def _logits(self, x: Tensor, mask: Tensor | None) -> Tensor:
        rows = PackedRows.of(zero_invalid(x, mask), mask)
        if rows.mask is None or hides_padding(self.model):
            logits: Tensor = self.model(rows.x, None, mask=rows.mask)[0]
            return logits
        counts = rows.mask.sum(1).clamp(min=1)  # a row of padding alone is read as one token
        return read_by_count(counts, lambda indices, count: self.model(rows.x[indices, :count])[0])


# --- arguments of all of them ---


def check_tokens(input_ids: Tensor | None) -> Tensor:
    """The token ids. Raises InputError unless they are [B, T]."""
    if isinstance(input_ids, Tensor) and input_ids.dim() == 2:
        return input_ids
    found = "none" if input_ids is None else getattr(input_ids, "shape", type(input_ids).__name__)
    raise InputError(f"expected input_ids [B, T], found {found}; pass those of the tokenizer")


def cut_mask(attention_mask: Tensor | None, tokens: Tensor) -> Tensor | None:
    """[B, T] bool: the part of a mask that is about these tokens; it may be about all tokens so far."""
    check_tokens(tokens)
    if attention_mask is None:
        return None
    b, t = tokens.shape
    is_mask = isinstance(attention_mask, Tensor) and attention_mask.dim() == 2
    if not is_mask or len(attention_mask) != b or attention_mask.shape[1] < t:
        raise InputError(f"attention_mask: expected [{b}, {t} or more], found {describe(attention_mask)}")
    return attention_mask[:, -tokens.shape[1] :].bool()


def check_labels(labels: Tensor | None, tokens: Tensor) -> None:
    """Raise InputError unless there is a label for each of the tokens, or none at all."""
    if labels is not None and labels.shape != tokens.shape:
        raise InputError(
            f"labels: expected {list(tokens.shape)}, found {list(labels.shape)}; −100 where a token does not count"
        )


def keep_positions(outputs: Tensor, logits_to_keep: int | Tensor) -> Tensor:
    """The outputs [B, n, ·] of the last `logits_to_keep` tokens, or of those at positions [n]; 0: all."""
    if isinstance(logits_to_keep, Tensor):
        return outputs[:, logits_to_keep]
    return outputs[:, -logits_to_keep:] if logits_to_keep else outputs


# --- losses ---


def shift_labels(labels: Tensor, mask: Tensor | None, count: Any = None) -> tuple[Tensor, Any]:
    """(targets [B, T]: the label of the token after each, −100 where that one stands after padding; the count of them).

    count: of an update's labels that are not −100, each row's first left out, as Trainer gives it to each call; None:
    the call is the update. Trainer counts the first token after padding, which has a label and no context. So the count
    shrinks by this call's share of such labels: one call has the mean of its targets, and several have the mean of
    their means, weighted by their labels.
    """
    targets = F.pad(labels, (0, 1), value=-100)[:, 1:]
    if mask is None:
        return targets, count
    counted = targets.masked_fill(~mask, -100)
    if count is not None:
        before, after = ((x >= 0).sum().clamp(min=1) for x in (targets, counted))
        count = count * (after / before)
    return counted, count


def mean_loss(
    outputs: Tensor,
    targets: Tensor,
    likelihood: Likelihood | None,
    count: Any = None,
    auxiliary: Sequence[Tensor] = (),
    label_smoothing: float = 0.0,
) -> Tensor:
    """The sum of −log p of targets [B, T], −100 left out, over their number or `count`, and the auxiliary losses.

    Trainer gives the count of the targets of all calls that it accumulates into an update, and adds their losses: a
    call's auxiliary losses then count by its share of the targets, so that their mean is what an update sees.
    Raises InputError for other targets that are no tokens.
    """
    if likelihood is not None:
        total = likelihood.loss(outputs, targets)
    else:
        logits = outputs.to(torch.promote_types(outputs.dtype, torch.float32)).flatten(0, -2)
        try:
            total = F.cross_entropy(logits, targets.flatten(), reduction="sum", label_smoothing=label_smoothing)
        except IndexError as error:
            found = targets[targets != -100]
            raise InputError(
                f"labels: expected 0 to {logits.shape[-1] - 1}, or −100 where a token does not count, found "
                f"{int(found.min())} to {int(found.max())}; use the tokenizer of this model"
            ) from error
    own = (targets >= 0).sum()
    loss = total / (own.clamp(min=1) if count is None else count)
    return loss + sum(auxiliary) * (1.0 if count is None else own / count) if len(auxiliary) else loss


# --- padding ---


def read_padded(
    model: nn.Module, x: Tensor, before: tuple[State, Tensor | None], call: Call, carries: bool, last: int
) -> Output:
    """(outputs [B, n, ·] of the last n = `last` tokens, 1 to T, and the state) of tokens x [B, T].

    before: the state (None: new rows), and mask [B, T] bool, True = valid (None: all are). Padding may be on the left,
    on the right or between tokens. It has no position and leaves the state of its row alone; its outputs are those of
    the last token before it, so that the last column is what `generate` goes on from, and 0 before the first token.
    call: reads rows without padding; it may give the outputs of the last n tokens only. carries: whether the state is
    wanted.
    Cost: one call without padding. With padding one call as well, if the state is not wanted; otherwise one for each
    number of valid tokens that a row has, because states of this library count positions and blocks for whole calls.
    """
    state, mask = before
    if mask is None or bool(mask.all()):
        outputs, state = call(x, state)
        return outputs[:, -last:], state
    if carries or not hides_padding(model):
        return _read_by_lengths(model, x, (state, mask), call, last)
    rows = PackedRows.of(zero_invalid(x, mask), mask)
    outputs, _ = model(rows.x, state, mask=rows.mask)
    return _at_their_tokens(outputs, mask, 0, last), None


def hides_padding(model: nn.Module) -> bool:
    """Whether padding at the end of a row changes no output of its valid tokens."""
    attentions: Any = (part for part in model.modules() if hasattr(part, "causal"))
    return all(is_padding_free(part) for part in attentions)


def _at_their_tokens(outputs: Tensor, mask: Tensor, first: Tensor | int, last: int) -> Tensor:
    """Outputs [R, m, ·] of valid tokens, from the `first`-th of each row on, at the last positions of its row."""
    read = mask.cumsum(1)[:, -last:]
    index = (read - 1 - first).clamp(0, outputs.shape[1] - 1)
    spread = outputs.gather(1, index[..., None].expand(-1, -1, outputs.shape[2]))
    return torch.where((read > 0)[..., None], spread, 0)


def _read_by_lengths(model: Any, x: Tensor, before: tuple[State, Tensor], call: Call, last: int) -> Output:
    """Rows with the same number of valid tokens are read together, without their padding."""
    (state, mask), parts = before, []
    counts = mask.sum(1)
    for count in counts.unique().tolist():
        rows = (counts == count).nonzero()[:, 0]
        old = None if state is None else select(state, rows)
        if count:
            outputs, new = call(x[rows][mask[rows]].unflatten(0, (len(rows), count)), old)
            outputs = _at_their_tokens(outputs, mask[rows], count - outputs.shape[1], last)
        else:
            outputs, new = None, model.initial_state(len(rows)) if old is None else old
        parts.append((rows, outputs, new))
    like = next((outputs for _, outputs, _ in parts if outputs is not None), None)
    if like is None:  # padding alone: outputs as those of a token that is read and forgotten
        like = call(x[:, :1] * 0, state)[0]
    y = torch.cat([like.new_zeros(len(rows), last, like.shape[2]) if y is None else y for rows, y, _ in parts])
    back = torch.cat([rows for rows, _, _ in parts]).argsort()
    return y[back], select(join([new for _, _, new in parts]), back) if leaves(parts[0][2]) else None
