"""A causal decoder of Transformers as a model of this library: read in segments, with or without a gated cache."""

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from mnemos.config import ModelConfig
from mnemos.hosts.attach import cache
from mnemos.memory.gated_cache import GRC
from mnemos.memory.key_values import KeyValues
from mnemos.memory.row_blocks import CacheState
from mnemos.models.shared import check_sizes
from mnemos.registry import register
from mnemos.types import Device, Splits, State, StateKind, check_token_ids, reset

from .hub import host_config, host_of, host_weights
from .model import SMALL, check_segments, keep_tables

if TYPE_CHECKING:
    from mnemos.hugging_face import Functional, FunctionalState

_AUTO = "AutoModelForCausalLM"
_DEFAULT = json.dumps({"model_type": "llama", "vocab_size": 256, **SMALL})


@register
@dataclass(frozen=True)
class HostedDecoderConfig(ModelConfig):
    """A causal decoder of Hugging Face, with or without a gated cache per stream: what `--model hf:NAME` chooses.

    host: the settings of the decoder as JSON (`hub.settings_of`). vocab_size: the tokens of the data; a smaller
    vocabulary of the host is enlarged. max_length: the tokens that are read together; attention and its positions begin
    again with each such segment, and only the gated cache goes on. A decoder whose state is of constant size by itself
    (sliding windows, recurrence) has no segments. `build` makes new weights; `train.init_from` names others.
    """

    name: ClassVar[str] = "hosted-decoder"
    cache_scopes: ClassVar[tuple[str, ...]] = ("stream",)
    host: str = _DEFAULT
    vocab_size: int = 256
    max_length: int = 256
    cache: GRC | None = None

    def build(self) -> "HostedDecoder":
        check_sizes(self, vocab_size=1, max_length=1)
        from mnemos.hugging_face.functional_model import check_model

        config = host_config(self.host)
        text = config.get_text_config(decoder=True)
        check_segments(self, "max_length", getattr(text, "max_position_embeddings", None), "row")
        if hasattr(text, "vocab_size"):  # else `host_of` refuses it
            text.vocab_size = max(text.vocab_size, self.vocab_size)
        host = host_of(_AUTO, config)
        check_model(host)
        if self.cache is not None:
            cache(host, self.cache)
        return HostedDecoder(self, host)


class HostedDecoder(nn.Module):
    """`logits, state = model(x, state=None, mask=None)`: the decoder `model.host`, read as `HostedDecoderConfig` says.

    x [B, T] int64 -> logits [B, T, V]; mask [B, T] bool, True = valid; padding changes no state. The state is a
    `FunctionalState` (`mnemos.functional`) of at most max_length tokens. Cost: the host's for each segment.
    """

    splits: Splits = "anywhere"
    state_kind: StateKind = "constant"
    rows_independent = True
    state_gradient = True
    autoregressive = True
    picks_positions = True

    def __init__(self, config: HostedDecoderConfig, host: nn.Module) -> None:
        super().__init__()
        self.config, self.host = config, host
        self.__dict__["_step"] = None
        keep_tables(self)

    @property
    def step(self) -> "Functional":
        """The host as a function of its state. It is made at the first call, which reads some tokens."""
        step: Functional | None = self.__dict__["_step"]  # no module of this one: its weights are the host's
        if step is None or step.model is not self.host:
            from mnemos.hugging_face import functional

            step = self.__dict__["_step"] = functional(self.host)
        return step

    def __getstate__(self) -> dict[str, Any]:
        """Without `step`, which belongs to this host alone."""
        return {**self.__dict__, "_step": None}

    def initial_state(
        self, batch_size: int, device: Device = None, dtype: torch.dtype | None = None
    ) -> "FunctionalState":
        return self.step.initial_state(batch_size, device, dtype)

    def forward(
        self, x: Tensor, state: State = None, mask: Tensor | None = None, only: Tensor | None = None
    ) -> tuple[Tensor, State]:
        """only [B, T] bool: the logits at these positions alone, [n, V]."""
        size, length = self.config.vocab_size, x.shape[1]
        check_token_ids(x, size, mask, "use the vocabulary of the data")
        later: Any = self.initial_state(len(x)) if state is None else state
        segmented = self.step.state_kind != "constant" and hasattr(later, "seen")  # `step` refuses other states
        outputs: list[Tensor] = []
        positions: list[Tensor] = []
        start, end = 0, -1
        while end < length:
            # --- as many tokens as can be read before a row has read a whole segment ---
            end = length
            if segmented and mask is None:
                end = min(length, start + int((self.config.max_length - later.seen).min()))
            elif segmented and mask is not None:
                read = later.seen[:, None] + mask[:, start:].cumsum(1)
                if bool((ends := (read >= self.config.max_length).any(0)).any()):
                    end = start + int(ends.int().argmax()) + 1
            part = slice(start, end)
            y, later = self.step(x[:, part], later, None if mask is None else mask[:, part])
            y = y[..., :size]
            if only is not None:
                rows, columns = only[:, part].nonzero(as_tuple=True)
                y = y[rows, columns]
                positions.append(rows * length + start + columns)
            outputs.append(y)
            start = end

            # --- rows that have read a whole segment are new, but for what their gated caches hold ---
            if segmented and bool((whole := later.seen >= self.config.max_length).any()):
                if bool(whole.all()):  # without the columns of keys and values that would stay empty
                    new = self.initial_state(len(x))
                    parts = [b if isinstance(b, CacheState) else a for a, b in zip(new.parts, later.parts, strict=True)]
                    later = new._replace(parts=tuple(parts))
                else:
                    seen = later.seen.masked_fill(whole, 0)
                    most = int(seen.max())
                    parts = [b if isinstance(b, CacheState) else reset(b, whole) for b in later.parts]
                    parts = [b.last(most) if isinstance(b, KeyValues) else b for b in parts]
                    later = later._replace(seen=seen, parts=tuple(parts))
        if only is None:
            return torch.cat(outputs, 1), later
        return torch.cat(outputs)[torch.cat(positions).argsort()], later

    if TYPE_CHECKING:
        __call__ = forward

    def pretrained(self, source: str) -> dict[str, Tensor]:
        """The trained weights of a host (`hub.is_source`) by this model's names.

        Rows of tokens that the host does not have are copies of that of its first token of a document, or the mean.
        """
        text = host_config(self.config.host).get_text_config(decoder=True)
        size, own = text.vocab_size, self.state_dict()
        first = next((i for i in (text.bos_token_id, text.eos_token_id) if isinstance(i, int) and i < size), None)
        weights = {f"host.{name}": value for name, value in host_weights(_AUTO, source).items()}
        for name, value in weights.items():
            mine = own.get(name, value)
            if value.dim() and len(value) == size < len(mine) and value.shape[1:] == mine.shape[1:]:
                row = value.mean(0, keepdim=True) if first is None else value[first : first + 1]
                weights[name] = torch.cat([value, row.expand(len(mine) - size, *value.shape[1:])])
        return weights
