"""An encoder of Transformers that classifies texts of any length, read in segments, with or without a gated cache."""

import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mnemos.config import ModelConfig
from mnemos.hosts.attach import cache, uncache
from mnemos.hosts.branch import RowCaches, carry
from mnemos.hosts.hooks import keep_handle
from mnemos.hosts.host import argument
from mnemos.memory.gated_cache import GRC
from mnemos.models.shared import check_sizes
from mnemos.ops.dense_layer import Linear
from mnemos.ops.padding import take, valid_first
from mnemos.registry import register
from mnemos.types import InputError, check_token_ids, select

from .hub import host_config, host_of, host_weights
from .model import SMALL, Stateless, check_segments, keep_tables

_AUTO = "AutoModel"
_SMALL = SMALL | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_DEFAULT = json.dumps({"model_type": "bert", "vocab_size": 256, **_SMALL})


@register
@dataclass(frozen=True)
class HostedEncoderConfig(ModelConfig):
    """An encoder of Hugging Face that classifies texts in segments, with or without a gated cache per text.

    `--model hf:NAME` chooses the encoder. `build` makes new weights; `train.init_from` names those to start with.

    Attributes:
        host: the settings of the encoder as JSON (`hub.settings_of`).
        vocab_size: the tokens of the data; a smaller vocabulary of the host is enlarged.
        classes: the number of classes.
        segment: L, the tokens that the encoder reads together; its positions begin again with each segment.
        read: what the class is read from. "mean": the logits, averaged over the segments. "last": the last segment.
        frozen: the embeddings and so many lower layers keep their weights, and run without dropout.
        adapter: hidden channels h of an MLP beside each attention that could have a cache, y + W₂·gelu(W₁·x + b), which
            starts at W₂ = 0: the baseline of equal parameters, h·(2·D + 1) in each layer. 0: none.
        cache: a gated cache in each attention above the frozen layers, of scope "stream": the text's own, which goes on
            from segment to segment.
    """

    name: ClassVar[str] = "hosted-encoder"
    cache_scopes: ClassVar[tuple[str, ...]] = ("stream",)
    host: str = _DEFAULT
    vocab_size: int = 256
    classes: int = 2
    segment: int = 128
    read: Literal["mean", "last"] = "mean"
    frozen: int = 0
    adapter: int = 0
    cache: GRC | None = None

    def build(self) -> "HostedEncoder":
        check_sizes(self, vocab_size=1, classes=1, segment=1, frozen=0, adapter=0)
        if self.adapter and self.cache is not None:
            raise InputError(
                f"{self.name}: adapter: expected 0 beside a cache, whose baseline it is, found {self.adapter}; choose "
                "one of them"
            )
        config = host_config(self.host)
        check_segments(self, "segment", getattr(config, "max_position_embeddings", None), "text")
        decodes = config.is_encoder_decoder or getattr(config, "is_decoder", False)
        if decodes or not hasattr(config, "vocab_size"):
            raise InputError(
                f"{self.name}: host: expected an encoder of texts, found {config.model_type}; choose one such as BERT"
            )
        config.vocab_size = max(config.vocab_size, self.vocab_size)
        host: Any = host_of(_AUTO, config)
        # Positions of RoBERTa and its relatives begin behind that of padding: of 514 rows of the table they use 512.
        table: Any = getattr(getattr(host, "embeddings", None), "position_embeddings", None)
        if (padding := getattr(table, "padding_idx", None)) is not None:
            check_segments(self, "segment", len(table.weight) - padding - 1, "text")
        if getattr(host, "pooler", None) is not None:  # the class is read from the tokens' mean
            host.pooler = None
        return HostedEncoder(self, host)


class HostedEncoder(Stateless, nn.Module):
    """`logits, None = model(x, mask=None)`: texts as tokens [B, T] -> [B, classes], by the encoder `model.host`.

    mask [B, T] bool, True = valid. The embedding of a segment of L tokens is the mean of its valid tokens' last hidden
    states, and the head is one linear map of it. A segment without a valid token is not read. Cost: the host's for each
    segment; with read="last" and no cache that is written, for one segment.
    """

    def __init__(self, config: HostedEncoderConfig, host: Any) -> None:
        super().__init__()
        self.config, self.host = config, host
        keep_tables(self)
        # The head is made before the caches, so that it starts the same with and without them.
        self.head = Linear(host.config.hidden_size, config.classes)
        self._kept: list[nn.Module] = []
        frozen = self._freeze(config.frozen) if config.frozen else ()

        def above(name: str, module: nn.Module) -> bool:
            return not name.startswith(frozen)

        if config.cache is not None:
            cache(host, config.cache, where=above)
        if config.adapter:  # beside each attention that `mnemos.cache` would give a cache
            with torch.random.fork_rng(devices=[]):
                report = cache(host, replace(GRC(), length=1, ratio=1.0, scope="stream"), where=above)
                uncache(host)
            for one in report.swapped:
                attention: Any = host.get_submodule(one.name)
                attention.adapter = Adapter(one.width, config.adapter, one.out_width)
                keep_handle(attention, attention.register_forward_hook(_add_adapter, with_kwargs=True))

    def _freeze(self, count: int) -> tuple[str, ...]:
        """Freeze the embeddings and `count` layers; returns the beginnings of the layers' names."""
        host: Any = self.host
        total = getattr(host.config, "num_hidden_layers", 0)
        lists = ((n, m) for n, m in host.named_modules() if isinstance(m, nn.ModuleList) and len(m) == total)
        name, layers = next(lists, ("", None))
        if layers is None or count >= total:
            raise InputError(
                f"{self.config.name}: frozen: expected fewer layers than the {total} of the host, each with weights of "
                f"its own, found {count}; lower it"
            )
        self._kept = [getattr(host, "embeddings", None) or host.get_input_embeddings(), *layers[:count]]
        for module in self._kept:
            module.requires_grad_(False)
        return tuple(f"{name}.{i}." for i in range(count))

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        for module in self._kept:
            module.eval()
        return self

    @property
    def carries(self) -> bool:
        return self.config.cache is not None and self.config.cache.write

    def forward(self, x: Tensor, state: None = None, mask: Tensor | None = None) -> tuple[Tensor, None]:
        if state is not None:
            raise InputError(f"{self.config.name}: expected no state, found one; pass whole texts")
        check_token_ids(x, self.config.vocab_size, mask, "use the vocabulary of the data")
        if mask is not None:  # segments count valid tokens: padding goes behind them
            order = valid_first(mask)
            x, mask = take(x, order), take(mask, order)
        # --- tokens and whether they are valid, by segment: [B, S, L] ---
        more, cut = -x.shape[1] % self.config.segment, (-1, self.config.segment)
        valid = torch.ones_like(x, dtype=torch.bool) if mask is None else mask
        tokens, valid = F.pad(x, (0, more)).unflatten(1, cut), F.pad(valid, (0, more)).unflatten(1, cut)
        used = valid.any(2)
        last = (used * torch.arange(1, used.shape[1] + 1, device=x.device)).argmax(1)
        going = every = torch.arange(len(x), device=x.device)
        if self.config.read == "last" and not self.carries:
            return self.head(self._embed(tokens[every, last], valid[every, last], None)[0]), None

        # --- the embeddings of those with a valid token: all at once, or in order where caches go on ---
        embeddings = self.head.weight.new_zeros(0, self.head.in_features)
        if not self.carries:
            rows, segments = used.nonzero(as_tuple=True)
            if len(rows):
                embeddings, _ = self._embed(tokens[used], valid[used], None)
        else:
            segments, rows = used.T.nonzero(as_tuple=True)
            parts, caches = [], None
            for i in range(used.shape[1]):
                left = used[going, i].nonzero()[:, 0]
                if len(left) < len(going):  # some rows have ended, and do not come back
                    going, caches = going[left], None if caches is None else select(caches, left)
                if len(going):
                    part, caches = self._embed(tokens[going, i], valid[going, i], caches)
                    parts.append(part)
            embeddings = torch.cat(parts) if parts else embeddings

        # --- [B, S, D], with zeros where a row has no segment, and the class from it ---
        whole = embeddings.new_zeros(*used.shape, embeddings.shape[-1]).index_put((rows, segments), embeddings)
        if self.config.read == "last":
            return self.head(whole[every, last]), None
        return self.head(whole.sum(1) / used.sum(1, keepdim=True).clamp(min=1)), None

    if TYPE_CHECKING:
        __call__ = forward

    def _embed(self, tokens: Tensor, valid: Tensor, state: RowCaches | None) -> tuple[Tensor, RowCaches | None]:
        """The embeddings [n, D] of segments [n, L], and the state of their rows after them, if it is carried."""
        inputs = {"input_ids": tokens, "attention_mask": None if bool(valid.all()) else valid.long()}
        if self.carries:
            output, state = carry(self.host, state, **inputs)
        else:
            output = self.host(**inputs)
        weight = valid[..., None].to(output.last_hidden_state.dtype)
        return (output.last_hidden_state * weight).sum(1) / weight.sum(1).clamp(min=1), state

    def pretrained(self, source: str) -> dict[str, Tensor]:
        return {f"host.{name}": value for name, value in host_weights(_AUTO, source).items()}


class Adapter(nn.Module):
    """W₂·gelu(W₁·x + b), [B, T, D] -> [B, T, D_out], which is 0 at the start."""

    def __init__(self, width: int, hidden: int, out: int) -> None:
        super().__init__()
        self.first, self.second = Linear(width, hidden), Linear(hidden, out, bias=False)
        nn.init.zeros_(self.second.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.gelu(self.first(x)))


def _add_adapter(module: Any, args: tuple, kwargs: dict, output: Any) -> Any:
    more = module.adapter(argument(args, kwargs, 0, "hidden_states"))
    return (output[0] + more, *output[1:]) if isinstance(output, tuple) else output + more
