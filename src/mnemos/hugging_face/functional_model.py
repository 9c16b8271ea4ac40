"""`functional(model)`: a recurrent or cached causal model of Transformers as `y, state = step(x, state)`."""

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mnemos import libraries
from mnemos.memory.key_values import KeyValues
from mnemos.modes import evaluating
from mnemos.types import Device, InputError, Output, Splits, State, StateKind, leaves, map_state

from .functional_cache import TRIED, FunctionalCache, FunctionalState, Layout, Padding
from .known_layers import add_steps

_CACHES = ("cache_params", "past_key_values", "state")  # what forwards of Transformers call their cache


def functional(model: nn.Module) -> "Functional":
    """A causal model of Hugging Face Transformers as `y, state = step(x, state)`, with its own weights.

        step = mnemos.functional(model)                    # Mamba, RWKV, Qwen3-Next, Llama, ...
        logits, state = step(ids, None)                    # any number of tokens; None: new rows
        logits, state = step(more, state)                  # as if both were read at once

    It serves decoders whose cache is made of keys and values (GPT-2, Llama, Mistral, Qwen, ...) and the recurrent
    layers of Mamba, FalconMamba, Jamba, Mamba-2, Bamba, Qwen3-Next, RWKV (4), RecurrentGemma, xLSTM and others
    (`known_layers.STEPS`). The model is not changed; it is `step.model`. `Functional` says what is computed, at what
    cost, and where the limits are.

    Two tokens are read to find out the shapes of the state and whether the model is causal. Raises InputError for a
    model without a causal state, with layers of another kind, and where the caches of the installed version of
    Transformers are not those that are known.
    """
    return Functional(model)


@dataclass(frozen=True)
class Host:
    """What a `Stream` notes of the model: its class, and the size of its vocabulary."""

    architecture: str
    vocab_size: int


class Functional(nn.Module):
    """`y, state = step(x, state=None, mask=None)`: what `functional` returns.

    x [B, T] int64 token ids, or [B, T, D] embeddings, T ≥ 0; y [B, T, V] logits, those that predict the token after
    x[:, i]; of a model without a head, hidden states. mask [B, T]: True or 1 = valid. Padding may be anywhere in a row.
    It has no position, leaves the state as it is, and its y is 0. The state is a `FunctionalState`, never changed, of
    constant size except for the keys and values of attentions without a window. A sequence may be cut at any token;
    gradient flows through the state. `mnemos.select`, `reset`, `join`, `replay`, `Stream` and `beam_search` serve it.

    Cost: the model's. Attention appends keys and values at O(T). The recurrent layers run in PyTorch, in float32 at
    least: Mamba-2 in chunks, Mamba in a loop over tokens; kernels of Transformers for a GPU are not used.
    Rotary positions whose frequencies change with the length ("dynamic", "longrope") depend on where a sequence is
    cut, as they do in `generate`. A model with learned positions reads no more tokens than it has of these.
    Raises InputError for x, mask or state that do not fit, and for layers that got no state: gradient checkpointing of
    Transformers drops the cache in training.
    """

    splits: Splits = "anywhere"
    rows_independent = True
    state_gradient = True

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        base, self._cache = _checked_model(model)
        self.model, self.training = model, model.training
        self.config = Host(type(base).__name__, int(base.config.get_text_config(decoder=True).vocab_size))
        self.autoregressive = base.get_output_embeddings() is not None
        self._width = int(base.get_input_embeddings().weight.shape[1])
        # In evaluation xLSTM reads more tokens than these in pieces of its own, without gradient.
        self._most = int(getattr(base.config, "max_inference_chunksize", 0))
        self._takes = frozenset(inspect.signature(base.forward).parameters)
        self._layout = Layout(base.config)
        add_steps(base)
        self._probe()
        keys = any(isinstance(part, KeyValues) for part in self._template.parts)
        grows = any(a and not w for a, w in zip(self._layout.attends, self._layout.windows, strict=True))
        self.state_kind: StateKind = "growing" if keys and grows else "constant"

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Add the steps: the classes of the layers belong to the process."""
        super().__setstate__(state)
        add_steps(self.model)

    def _probe(self) -> None:
        """Read two rows of two tokens, to find out the shapes of the state and whether the model is causal."""
        weight = next(self.model.parameters())
        tokens = torch.tensor([[0, 0], [0, self.config.vocab_size - 1]], device=weight.device)
        cache = FunctionalCache(self._layout, tokens.new_zeros(2), None, 2, None)
        try:
            with evaluating(self.model), torch.no_grad():
                y = self._read(tokens, cache)
        except InputError:
            raise
        except (AttributeError, KeyError, NotImplementedError, TypeError, ValueError) as error:
            raise InputError(
                f"functional: expected a cache as in transformers {TRIED} (the versions tried), found that "
                f"{self.config.architecture} of transformers {libraries.transformers().__version__} asks for another "
                f"({type(error).__name__}: {_line(error)}); install transformers {TRIED}, or use another model"
            ) from error
        causal = y.dim() == 3 and _same(y[:1, 0], y[1:, 0], weight.dtype)
        if not cache.new or not causal:
            found = "wrote no state" if not cache.new else f"returned {tuple(y.shape)} for two rows of two tokens"
            found = "has outputs that change with later tokens" if y.dim() == 3 and cache.new else found
            raise InputError(
                f"functional: expected a causal model with a state, found {self.config.architecture}, which {found}; "
                "use a decoder, as AutoModelForCausalLM returns, with is_decoder=True if its configuration has that"
            )
        self._template, self._like = FunctionalState(cache.seen, tuple(cache.new)), y[:0, :0]
        self._probed_as = weight.device, weight.dtype

    def initial_state(
        self, batch_size: int, device: Device = None, dtype: torch.dtype | None = None
    ) -> FunctionalState:
        """The state of new rows: no keys and values, and zeros. device, dtype: by default the model's, per layer."""
        weight = next(self.model.parameters())
        if (weight.device, weight.dtype) != self._probed_as:
            self._probe()

        def fresh(x: Tensor) -> Tensor:
            of = dtype if x.is_floating_point() else None
            return torch.zeros(batch_size, *x.shape[1:], device=device or x.device, dtype=of or x.dtype)

        parts = [part.last(0) if isinstance(part, KeyValues) else part for part in self._template.parts]
        state: FunctionalState = map_state(fresh, FunctionalState(self._template.seen, tuple(parts)))
        return state

    def forward(self, x: Tensor, state: State = None, mask: Tensor | None = None) -> Output:
        """See the class."""
        self._check_input(x)
        state = self.initial_state(len(x)) if state is None else self._checked_state(state, len(x))
        padding = self._padding(x, mask)
        if x.shape[1] == 0:
            return self._like.new_zeros(len(x), 0, self._like.shape[-1]), state
        if 0 < self._most < x.shape[1]:
            return self._in_pieces(x, state, mask)
        cache = FunctionalCache(self._layout, state.seen, state.parts, x.shape[1], padding)
        y = self._read(x if padding is None else padding.ordered(x), cache)
        if len(cache.new) != len(state.parts):
            raise InputError(
                f"{self.config.architecture}: expected {len(state.parts)} layers to read the state, found "
                f"{len(cache.new)}; for training, turn gradient checkpointing of Transformers off"
            )
        return y if padding is None else padding.restored(y), FunctionalState(cache.seen_after, tuple(cache.new))

    if TYPE_CHECKING:
        __call__ = forward

    def _in_pieces(self, x: Tensor, state: FunctionalState, mask: Tensor | None) -> Output:
        outputs = []
        for start in range(0, x.shape[1], self._most):
            piece = slice(start, start + self._most)
            y, state = self.forward(x[:, piece], state, None if mask is None else mask[:, piece])
            outputs.append(y)
        return torch.cat(outputs, 1), state

    def _read(self, x: Tensor, cache: FunctionalCache) -> Tensor:
        """The outputs of the model for the tokens, or embeddings, of one call."""
        options = {
            "inputs_embeds" if x.is_floating_point() else "input_ids": x,
            self._cache: cache,
            "use_cache": self._cache == "past_key_values",  # xLSTM would count its tokens in the cache
            "return_dict": True,
            "attention_mask": cache.mask(),
            "position_ids": cache.positions,
        }
        optional = {"attention_mask", "position_ids"} - self._takes
        try:
            out = self.model(**{name: value for name, value in options.items() if name not in optional})
        except IndexError as error:
            raise InputError(
                f"{self.config.architecture}: expected tokens and positions that it has embeddings for, found "
                f"{int(cache.seen_after.max())} tokens per row ({_line(error)}); read fewer, or reset the rows"
            ) from error
        y: Tensor = out["logits"] if "logits" in out else out["last_hidden_state"]
        return y

    def _check_input(self, x: Tensor) -> None:
        width = self._width
        ids = isinstance(x, Tensor) and x.dim() == 2 and x.dtype in (torch.int64, torch.int32)
        embeddings = isinstance(x, Tensor) and x.dim() == 3 and x.is_floating_point() and x.shape[2] == width
        if not (ids or embeddings) or len(x) == 0:
            found = f"{x.dtype} {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
            raise InputError(f"expected token ids [B, T] int64 or embeddings [B, T, {width}], found {found}")

    def _padding(self, x: Tensor, mask: Tensor | None) -> Padding | None:
        if mask is None:
            return None
        if not isinstance(mask, Tensor) or mask.shape != x.shape[:2] or mask.is_floating_point():
            found = f"{mask.dtype} {tuple(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
            raise InputError(f"expected mask {tuple(x.shape[:2])} of booleans, found {found}; True = valid")
        mask = mask.bool()
        return None if bool(mask.all()) else Padding(mask)

    def _checked_state(self, state: State, rows: int) -> FunctionalState:
        expected = self._template.parts
        if not isinstance(state, FunctionalState) or len(state.parts) != len(expected):
            found = f"one of {len(state.parts)} layers" if isinstance(state, FunctionalState) else type(state).__name__
            raise InputError(
                f"expected the state of {self.config.architecture} with {len(expected)} layers, found {found}; begin "
                "with state=None, or read on with the model that returned it"
            )
        for i, (part, like) in enumerate(zip(state.parts, expected, strict=True)):
            # Keys, values and what is valid of them have tokens as their second axis.
            first = 2 if isinstance(like, KeyValues) else 1
            shapes = [[(x.dim(), *x.shape[first:]) for x in leaves(one)] for one in (part, like)]
            if type(part) is not type(like) or shapes[0] != shapes[1]:
                raise InputError(
                    f"expected the state of {self.config.architecture}, found one of another model in layer {i}: "
                    f"{type(part).__name__} of {', '.join(str(tuple(x.shape)) for x in leaves(part))}; begin with "
                    "state=None"
                )
        if len(state.seen) != rows:
            raise InputError(f"expected a state of {rows} rows, as x has, found {len(state.seen)}; use mnemos.select")
        return state


def _line(error: Exception) -> str:
    """The first line of an error's message."""
    return str(error).partition("\n")[0]


def _same(a: Tensor, b: Tensor, dtype: torch.dtype) -> bool:
    """Whether outputs of equal inputs differ by no more than the rounding of weights of a type."""
    rounding = 1e-5 if dtype in (torch.float32, torch.float64) else 1e-2
    return bool((a - b).abs().max() <= rounding * a.abs().max())


def _checked_model(model: nn.Module) -> tuple[Any, str]:
    """The model of Transformers inside an adapter of PEFT, or the model; and what its forward calls its cache."""
    adapted: Any = model
    base: Any = adapted.get_base_model() if hasattr(model, "get_base_model") else model
    if not isinstance(base, libraries.transformers().PreTrainedModel):
        raise InputError(
            f"functional: expected a model of Hugging Face Transformers, found {type(model).__name__}; models of "
            "mnemos are called as y, state = model(x, state) already"
        )
    takes = inspect.signature(base.forward).parameters
    cache = next((name for name in _CACHES if name in takes), None)
    name, config = type(base).__name__, base.config
    if cache is None:
        raise InputError(
            f"functional: expected a causal model with a cache, found {name}, whose forward takes none of "
            f"{', '.join(_CACHES)}; use a decoder"
        )
    if config.is_encoder_decoder or getattr(config, "add_cross_attention", False):
        raise InputError(
            f"functional: expected a decoder alone, found {name}, which reads an encoder; use mnemos.EncoderDecoder, "
            "or a decoder without cross-attention"
        )
    if any(getattr(getattr(part, "grc", None), "scope", None) == "stream" for part in base.modules()):
        raise InputError(
            f'functional: expected no gated caches of scope="stream", whose state is in a cache of transformers, found '
            f'some in {name}; call it with past_key_values=DynamicCache(), or use scope="shared"'
        )
    return base, cache
