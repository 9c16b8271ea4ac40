"""`MnemosForCausalLM`: a causal language model of this library as a model of Transformers, and how padding is read.

Padding may be anywhere in a row: outputs and states are those of each row read by itself.
"""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mnemos import libraries
from mnemos.generate.fused import fused_step
from mnemos.models.heads import LogisticMixture
from mnemos.ops import logistic_mixture, rewindable
from mnemos.types import (
    InputError,
    Likelihood,
    LogProbLikelihood,
    Output,
    PicksPositions,
    State,
    collect_auxiliary_losses,
    is_padding_free,
    join,
    leaves,
    likelihood_of,
    select,
)

from .pretrained_model import MnemosPreTrainedModel
from .state_cache import CACHE, StateCache, check_cache

libraries.transformers()
from transformers import GenerationMixin  # noqa: E402
from transformers.modeling_outputs import CausalLMOutputWithPast  # noqa: E402

Call = Callable[[Tensor, State], Output]  # tokens [B, T] and a state -> outputs [B, T, V] and the new state


class Generates:
    """What `generate` needs of a model whose cache is a `StateCache`; before GenerationMixin among the base classes."""

    model: Any
    config: Any
    training: bool

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], *given: Any, **named: Any
    ) -> None:
        """Make the cache before the first call: assisted decoding needs it then."""
        if generation_config.cache_implementation is not None:
            raise InputError(
                f"cache_implementation: expected none, because the model has a state of its own, found "
                f"{generation_config.cache_implementation!r}; leave it out"
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
        if cache is None:
            return read_padded(self.model, tokens, (None, mask), self._call(None, keep), False, keep)
        if cache.recording and self.model.splits != "anywhere":
            raise InputError(
                "assisted decoding: expected a model that may be cut anywhere, found one whose cuts are part of the "
                "computation (splits = 'segments'); decode without an assistant"
            )
        if (unread := cache.take_unread()) is not None:
            _, state = read_padded(self.model, unread[0], (cache.state, unread[1]), self._call(cache, 1), True, 1)
            cache.read(*unread, state)
        with rewindable() if cache.recording else contextlib.nullcontext() as operators:
            outputs, state = read_padded(self.model, tokens, (cache.state, mask), self._call(cache, keep), True, keep)
        cache.read(tokens, mask, state, operators)
        return outputs, state

    def _call(self, cache: StateCache | None, keep: int) -> Any:
        """What reads tokens without padding."""

        def call(x: Tensor, state: State) -> Output:
            if cache is not None and self.model.splits == "segments" and x.shape[1] > 1:
                return self._in_segments(x, state)
            if x.shape[1] == 1 and cache is not None and not torch.is_grad_enabled() and not self.training:
                if cache.step is None or cache.step.model is not self.model:
                    cache.step = fused_step(self.model)
                found: Output = cache.step(x, state)
                return found
            if not 0 < keep < x.shape[1] or not isinstance(self.model, PicksPositions):
                outputs, state = self.model(x, state)
                return outputs, state
            # A prompt's logits are large, and only the last are wanted.
            last = torch.arange(x.shape[1], device=x.device) >= x.shape[1] - keep
            outputs, state = self.model(x, state, only=last.expand(x.shape))
            return outputs.unflatten(0, (len(x), keep)), state

        return call

    def _in_segments(self, x: Tensor, state: State) -> Output:
        """As `mnemos.Stream` reads a prompt: in segments of `config.segment` tokens, and the last token alone."""
        parts = []
        for part in (*x[:, :-1].split(self.config.segment, 1), x[:, -1:]):
            outputs, state = self.model(part, state)
            parts.append(outputs)
        return torch.cat(parts, 1), state


class MnemosForCausalLM(Generates, MnemosPreTrainedModel, GenerationMixin):  # type: ignore[misc]
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
    Positions are counted by the state: padding has none, so left padding changes nothing.
    `model.model` is the model itself: `y, state = model.model(x, state)`.
    A model with an adaptive softmax gives log-probabilities as logits, and none (None) in training with labels.
    Raises InputError for a model that does not predict tokens, a cache of another kind, and for position_ids,
    inputs_embeds, attentions and hidden states, which these models do not have.
    """

    auto_class = "AutoModelForCausalLM"

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        if self.model.state_kind == "none":
            self.generation_config.use_cache = False

    def _build(self, config: Any) -> nn.Module:
        model: Any = config.build()
        if config.inputs != "tokens" or not model.autoregressive:
            raise InputError(
                f"MnemosForCausalLM: expected a causal language model, found {config.name!r} "
                f"{'of pairs' if config.inputs == 'pairs' else 'with classes'}; use "
                f"{'MnemosForSeq2SeqLM' if config.inputs == 'pairs' else 'MnemosForSequenceClassification'}"
            )
        found: nn.Module = model
        return found

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
        """See the class."""
        self._refuse(loss_kwargs)
        input_ids = check_tokens(input_ids)
        cache = check_cache(cache, past_key_values)
        if use_cache is None:
            use_cache = cache is not None or (labels is None and not self.training and self.model.state_kind != "none")
        if cache is None and use_cache:
            cache = StateCache()
        mask = cut_mask(attention_mask, input_ids)
        check_labels(labels, input_ids)
        with collect_auxiliary_losses() as auxiliary:
            keep = logits_to_keep if isinstance(logits_to_keep, int) and labels is None else 0
            outputs, _ = self._read(cache, input_ids, mask, keep)
        likelihood, loss = likelihood_of(self.model), None
        if labels is not None:
            targets, count = shift_labels(labels, mask, loss_kwargs.get("num_items_in_batch"))
            loss = mean_loss(outputs, targets, likelihood, count)
            loss = with_auxiliary(loss, auxiliary, targets, count) if self.training else loss
        logits = None
        if likelihood is None or not (self.training and labels is not None):
            logits = as_logits(keep_positions(outputs, logits_to_keep), likelihood)
        carried: Any = cache if use_cache else None
        found = CausalLMOutputWithPast(loss=loss, logits=logits, **{CACHE: carried})
        return found if return_dict is not False else found.to_tuple()


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
    shape = tuple(attention_mask.shape) if isinstance(attention_mask, Tensor) else type(attention_mask).__name__
    if isinstance(shape, str) or len(shape) != 2 or shape[0] != len(tokens) or shape[1] < tokens.shape[1]:
        raise InputError(
            f"attention_mask: expected [{len(tokens)}, {tokens.shape[1]}] or more columns for tokens before, found "
            f"{shape}; pass that of the tokenizer"
        )
    return attention_mask[:, -tokens.shape[1] :].bool()


def check_labels(labels: Tensor | None, tokens: Tensor) -> None:
    """Raise InputError unless there is a label for each of the tokens, or none at all."""
    if labels is not None and labels.shape != tokens.shape:
        raise InputError(
            f"labels: expected {list(tokens.shape)}, one for each token, found {list(labels.shape)}; −100 where a "
            "token does not count"
        )


def keep_positions(outputs: Tensor, logits_to_keep: int | Tensor) -> Tensor:
    """The outputs [B, n, ·] of the last `logits_to_keep` tokens, or of those at places [n]; 0: all."""
    if isinstance(logits_to_keep, Tensor):
        return outputs[:, logits_to_keep]
    return outputs[:, -logits_to_keep:] if logits_to_keep else outputs


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
    found = targets.masked_fill(~mask, -100)
    if count is not None:
        given, left = ((x >= 0).sum().clamp(min=1) for x in (targets, found))
        count = count * (left / given)
    return found, count


def mean_loss(outputs: Tensor, targets: Tensor, likelihood: Likelihood | None, count: Any = None) -> Tensor:
    """The sum of −log p of targets [B, T], −100 left out, over their number or the given one.

    Raises InputError for other targets that are no tokens.
    """
    if likelihood is not None:
        total = likelihood.loss(outputs, targets)
    else:
        logits = outputs.to(torch.promote_types(outputs.dtype, torch.float32)).flatten(0, -2)
        try:
            total = F.cross_entropy(logits, targets.flatten(), reduction="sum", ignore_index=-100)
        except IndexError as error:
            found = targets[targets != -100]
            raise InputError(
                f"labels: expected 0 to {logits.shape[-1] - 1}, or −100 where a token does not count, found "
                f"{int(found.min())} to {int(found.max())}; use the tokenizer of this model"
            ) from error
    return total / ((targets >= 0).sum().clamp(min=1) if count is None else count)


def with_auxiliary(loss: Tensor, auxiliary: Sequence[Tensor], targets: Tensor, count: Any = None) -> Tensor:
    """The loss and the auxiliary losses of one call.

    count: as of `mean_loss`. Trainer gives the targets of all calls that it accumulates into an update, and adds their
    losses: a call's auxiliary losses then count by its share of the targets, so that their mean is what an update sees.
    """
    if not len(auxiliary):
        return loss
    return loss + sum(auxiliary) * (1.0 if count is None else (targets >= 0).sum() / count)


def as_logits(outputs: Tensor, likelihood: Likelihood | None) -> Tensor:
    """Logits [B, T, V] of outputs. Raises InputError for a likelihood without log-probabilities."""
    if likelihood is None:
        return outputs
    if isinstance(likelihood, LogisticMixture):
        levels = torch.arange(likelihood.levels, device=outputs.device).expand(*outputs.shape[:-1], -1)
        expanded = outputs[..., None, :].expand(*levels.shape, -1)
        return logistic_mixture.log_prob(expanded, levels, likelihood.levels)
    if isinstance(likelihood, LogProbLikelihood):
        return likelihood.log_prob(outputs)
    raise InputError(
        f"expected logits or a likelihood with `log_prob`, found {type(likelihood).__name__}; use mnemos.Stream, which "
        "draws"
    )


def read_padded(
    model: nn.Module, x: Tensor, before: tuple[State, Tensor | None], call: Call, carries: bool, last: int = 0
) -> Output:
    """(outputs [B, n, ·] of the last n = `last` tokens (0: all), state) of tokens x [B, T].

    before: the state (None: new rows), and mask [B, T] bool, True = valid (None: all are). Padding may be on the left,
    on the right or between tokens. It has no position and leaves the state of its row alone; its outputs are those of
    the last token before it, so that the last column is what `generate` goes on from, and 0 before the first token.
    call: reads rows without padding; it may give the outputs of the last n tokens only. carries: whether the state is
    wanted.
    Cost: one call without padding. With padding one call as well, if the state is not wanted; otherwise one for each
    number of valid tokens that a row has, because states of this library count positions and blocks for whole calls.
    """
    state, mask = before
    last = last or x.shape[1]
    if mask is None or bool(mask.all()):
        outputs, state = call(x, state)
        return outputs[:, -last:], state
    if carries or not hides_padding(model):
        return _read_by_lengths(model, x, (state, mask), call, last)
    packed, valid = pack_right(x, mask)
    longest = max(int(valid.sum(1).max()), 1)
    outputs, _ = model(packed[:, :longest], state, mask=valid[:, :longest])
    return _place(outputs, mask, torch.zeros_like(valid[:, :1], dtype=torch.int64), last), None


def pack_right(x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """The tokens and their mask with all padding at the end of each row."""
    order = torch.argsort(~mask, dim=1, stable=True)
    valid = mask.gather(1, order)
    return torch.where(valid, x.gather(1, order), 0), valid


def hides_padding(model: nn.Module) -> bool:
    """Whether padding at the end of a row changes no output of its valid tokens."""
    attentions: Any = (part for part in model.modules() if hasattr(part, "causal"))
    return all(is_padding_free(part) for part in attentions)


def _place(outputs: Tensor, mask: Tensor, first: Tensor | int, last: int) -> Tensor:
    """Outputs [R, m, ·] of valid tokens, from the `first`-th of each row on, at the last places of its row."""
    read = mask.cumsum(1)[:, -last:]
    place = (read - 1 - first).clamp(0, outputs.shape[1] - 1)
    found = outputs.gather(1, place[..., None].expand(-1, -1, outputs.shape[2]))
    return torch.where((read > 0)[..., None], found, 0)


def _read_by_lengths(model: Any, x: Tensor, before: tuple[State, Tensor], call: Call, last: int) -> Output:
    """Rows with the same number of valid tokens are read together, without their padding."""
    state, mask = before
    counts, every = mask.sum(1), []
    for count in counts.unique().tolist():
        chosen = (counts == count).nonzero()[:, 0]
        old = None if state is None else select(state, chosen)
        places = mask[chosen]
        if count:
            outputs, new = call(x[chosen][places].unflatten(0, (len(chosen), count)), old)
            outputs = _place(outputs, places, count - outputs.shape[1], last)
        else:
            outputs, new = None, model.initial_state(len(chosen)) if old is None else old
        every.append((chosen, outputs, new))
    like = next((outputs for _, outputs, _ in every if outputs is not None), None)
    if like is None:  # padding alone: outputs of the model's kind, of a token that is read and forgotten
        like = call(x[:, :1] * 0, state)[0]
    found = [like.new_zeros(len(rows), last, like.shape[2]) if y is None else y for rows, y, _ in every]
    back = torch.cat([rows for rows, _, _ in every]).argsort()
    joined = join([new for _, _, new in every]) if leaves(every[0][2]) else None
    return torch.cat(found)[back], None if joined is None else select(joined, back)
