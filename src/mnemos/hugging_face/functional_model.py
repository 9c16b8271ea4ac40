"""`functional(model)`: a recurrent or cached causal model of Transformers as `y, state = step(x, state)`."""

import hashlib
import inspect
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mnemos import libraries
from mnemos.errors import install_command
from mnemos.hosts.attach import CONFIG_RECORDS
from mnemos.hosts.linearise import list_linearised
from mnemos.hosts.pretrained import find_record
from mnemos.memory.key_values import KeyValues
from mnemos.modes import evaluating
from mnemos.ops.padding import take, valid_last, zero_invalid
from mnemos.types import Device, InputError, Output, Splits, State, StateKind, describe, leaves, map_state, reset

from .fast_model import find_replacements, renew
from .functional_cache import CacheLayout, FunctionalCache, FunctionalState, add_forwards

_CACHES = (*libraries.CACHE_NAMES, "cache_params")  # what forwards of Transformers call their cache
_UNFIT = {  # what their caches ask of a call
    "cpmant": "reads the ids of all earlier tokens in every call; use another model",
    "prophetnet": "reads one token in a call with a cache; use another model",
    "recurrent_gemma": "keeps its recurrent states in its modules; use another model",
    "xlstm": "has a cache of its own kind; use another model",
    **dict.fromkeys(
        ("MnemosForCausalLM", "RememberingForCausalLM"), "has its own state; call y, state = model.model(x, state)"
    ),
}
_DISTANCES = ("bloom", "mpt")  # take no position_ids: biases by the distances of valid tokens replace positions
_FROM_CACHE = ("git",)  # take position_ids, but let every row attend to the first entries of the cache, also reset ones
# What code of Transformers raises that meets another cache than it expects.
_FAILURES = AssertionError, AttributeError, LookupError, NotImplementedError, TypeError, ValueError
_OF_ORIGIN = ("architectures", "auto_map", "dtype", "transformers_version", "use_cache")


def functional(model: nn.Module) -> "Functional":
    """A causal model of Hugging Face Transformers as `y, state = step(x, state)`, with its own weights.

        step = mnemos.functional(model)                    # Mamba, Qwen3-Next, Llama, ...
        logits, state = step(ids, None)                    # any number of tokens; None: new rows
        logits, state = step(more, state)                  # as if both were read at once

    It serves decoders whose cache is made of keys and values, and recurrent layers (`functional_cache.RECURRENT`). The
    model is not changed; it is `step.model`. `Functional` says what is computed, at what cost, and where the limits
    are. A few tokens are read to find out the shapes of the state, whether the model is causal, and how it numbers
    positions. Raises InputError for a model without a causal state, with layers of another kind, or with positions that
    are not numbered from 0 or from the padding token's id + 1.
    """
    return Functional(model)


@dataclass(frozen=True)
class HostSettings:
    """What a `Stream` notes of the model: its class, the size of its vocabulary, and a hash of its other settings.

    Settings that are no weights, such as the base of rotary positions, change what a state means.
    """

    architecture: str
    vocab_size: int
    settings: str

    @staticmethod
    def of(model: Any) -> "HostSettings":
        """That of a model of Transformers; where it was loaded from, and in which type, does not count."""

        def meaningful(settings: Any) -> Any:
            """Those of a configuration, and of configurations in it, that change what a state means."""
            if not isinstance(settings, dict):
                return settings
            return {
                name: meaningful(x)
                for name, x in settings.items()
                # what generation ends with, and padding, change nothing
                if name not in _OF_ORIGIN and not str(name).startswith("_") and not str(name).endswith("_token_id")
            }

        # What is noted of changes may be another model's, which shares the configuration.
        settings = {name: x for name, x in model.config.to_diff_dict().items() if name not in CONFIG_RECORDS}
        changes = zip(CONFIG_RECORDS, (find_record(model), list_linearised(model)), strict=True)
        settings |= {name: record for name, record in changes if record}
        text = json.dumps(meaningful(settings), sort_keys=True, default=str)
        size = int(model.config.get_text_config(decoder=True).vocab_size)
        return HostSettings(type(model).__name__, size, hashlib.sha256(text.encode()).hexdigest())


class Functional(nn.Module):
    """`y, state = step(x, state=None, mask=None)`: what `functional` returns.

    x [B, T] int64 token ids, or [B, T, D] embeddings, T ≥ 0; y [B, T, V] logits, those that predict the token after
    x[:, i]; of a model without a head, hidden states. mask [B, T]: True or 1 = valid. Padding may be anywhere in a row.
    It has no position, leaves the state as it is, and its y is 0. The state is a `FunctionalState`, never changed, of
    constant size except for the keys and values of attentions without a window, which `mnemos.linearise` makes
    constant. A sequence may be cut at any token; gradient flows through the state. `mnemos.select`, `reset`, `join`,
    `replay`, `Stream` and `beam_search` serve it.

    The model may be changed afterwards (`mnemos.cache`, `linearise`, `fast`, adapters, more tokens); earlier states of
    another form are refused then: of other tensors or sizes. What leaves sizes as they are, such as other key heads in
    `full=` or another half-life, is not seen in a state; a saved `Stream` refuses it.

    rows_apart: whether rows may have padding and may have read different numbers of tokens. False for models whose
    positions cannot be set per row (Bart, Marian, Whisper, RoFormer, ...): a mask with padding, and a state with such
    rows, raise InputError.

    Cost: the model's. Attention appends keys and values at O(T). Recurrences (gated delta rules, Mamba, Mamba-2) run in
    float32 at least, on this library's operators, differentiable once on a CPU.
    Rotary positions whose frequencies change with the length ("dynamic", "longrope") depend on where a sequence is
    cut, as they do in `generate`. A model with learned positions reads no more tokens than it has of these. Raises
    InputError for x, mask or state that do not fit, and for layers that got no state: gradient checkpointing of
    Transformers drops the cache in training.
    """

    splits: Splits = "anywhere"
    rows_independent = True
    state_gradient = True

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        base, self._cache = check_model(model)
        self.model, self.training = model, model.training
        self.autoregressive = base.get_output_embeddings() is not None
        self._settings, self._config_of = base.config.get_text_config(decoder=True), ""
        self._padding_id = getattr(self._settings, "pad_token_id", None)
        self._type = str(base.config.model_type)
        self._takes = frozenset(inspect.signature(base.forward).parameters)
        advice = "use another model"
        if any(find_replacements(cls)[0] for cls in {type(layer) for layer in model.modules()}):
            advice = "mnemos.fast(model) serves its recurrent layers, in calls as before"
        self._layout = CacheLayout(base, advice)
        add_forwards(base)
        renew(base)
        self._probed_as: Any = None
        self._follow()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Add the forwards again: the classes of the layers belong to the process."""
        super().__setstate__(state)
        add_forwards(self.model)
        renew(self.model)

    @property
    def config(self) -> HostSettings:
        """What a state belongs to. The model may have been changed since: its vocabulary, its attentions."""
        base = base_model(self.model)
        changes = [getattr(base.config, name, None) for name in ("mnemos", "mnemos_linearised")]
        present = f"{self._settings.vocab_size} {changes}"
        if present != self._config_of:  # the hash costs most of a millisecond, and is asked for at each prefill
            self._config, self._config_of = HostSettings.of(base), present
        return self._config

    def _table(self) -> tuple[int, int]:
        """The tokens of the model's vocabulary, and the width of their embeddings."""
        tokens, width = base_model(self.model).get_input_embeddings().weight.shape
        return int(tokens), int(width)

    def _follow(self) -> None:
        """Probe the model if it is new or another by now: its type, its vocabulary, or any module."""
        weight = next(self.model.parameters())
        # The modules themselves: a new one may have the address of an old one.
        modules = [(module, id(type(module))) for module in self.model.modules()]
        present = weight.device, weight.dtype, self._table(), modules
        if present == self._probed_as:
            return
        device = "cpu" if weight.is_meta else weight.device  # meta: offloaded by accelerate
        try:
            with evaluating(self.model), torch.no_grad():
                self._probe(device, weight.dtype in (torch.float32, torch.float64))
        except InputError:
            raise
        except _FAILURES as error:
            version, first_line = libraries.transformers().__version__, str(error).partition("\n")[0]
            tried = ".".join(version.split(".")[:2]) in libraries.TRIED
            raise libraries.other_version(
                "functional: expected a causal model with a cache as in",
                f"{self.config.architecture} of transformers {version}, which fails with that cache "
                f"({type(error).__name__}: {first_line})",
                ("" if tried else f"run {install_command('hf')}, or ") + "use another model",
            ) from error
        self._probed_as = present

    def _probe(self, device: Device, precise: bool) -> None:
        """Read a few tokens, to find out the shapes of the state, whether the model is causal, and its positions."""

        def begin(numbered: bool = True) -> tuple[Tensor, FunctionalCache]:
            """The outputs of new rows, and the cache after them, before the shapes of the state are known."""
            self._layout.part_windows.clear()
            cache = FunctionalCache(self._layout, tokens.new_zeros(len(tokens)), None, tokens.shape[1], None)
            return self._read(tokens, cache, numbered), cache

        def differ(a: Tensor, b: Tensor) -> bool:
            """Whether outputs differ by more than kernels with and without a mask do."""
            return not bool((a - b).abs().max() <= (1e-3 if precise else 5e-2) * b.abs().max())

        last_id = self._table()[0] - 1
        first, last = (next(i for i in ids if i != self._padding_id) for ids in (range(3), range(last_id, -1, -1)))
        tokens = torch.tensor([[first, first], [first, last]], device=device)

        # --- causal: rows that differ in their second token have equal outputs of the first, up to rounding ---
        self._first = 0
        y, cache = begin()
        rounding = 1e-5 if precise else 1e-2
        causal = y.dim() == 3 and bool((y[:1, 0] - y[1:, 0]).abs().max() <= rounding * y[:1, 0].abs().max())
        if not cache.new or not causal:
            found = "wrote no state" if not cache.new else f"returned {tuple(y.shape)} for two rows of two tokens"
            found = "has outputs that change with later tokens" if y.dim() == 3 and cache.new else found
            raise InputError(
                f"functional: expected a causal model with a state, found {self.config.architecture}, which {found}; "
                "use a decoder (is_decoder=True in its configuration)"
            )

        # --- positions: from 0, or as RoBERTa's, which keeps those up to the padding token's id for padding ---
        attends = any(isinstance(part, KeyValues) for part in cache.new)
        if attends and "position_ids" in self._takes:
            own, _ = begin(numbered=False)
            if differ(y, own) and self._padding_id is not None:
                self._first = self._padding_id + 1
                y, cache = begin()
            if differ(y, own):
                raise InputError(
                    f"functional: expected positions from 0 or from the padding token's id + 1, found other outputs of "
                    f"{self.config.architecture} without position_ids; use another model"
                )
        state = cache.after()
        self._template, self._like = state._replace(seen=cache.seen), y[:0, :0]
        grows = not all(self._layout.part_windows.values())
        self.state_kind: StateKind = "growing" if grows else "constant"

        # --- rows apart: whether a padded row, reset beside one that goes on, has the outputs of a new row ---
        self.rows_apart = True
        if attends:
            # Some models count their positions from the cache, for all rows alike. New weights and half precision may
            # hide that from the reading below.
            from_cache = "position_ids" not in self._takes and self._type not in _DISTANCES
            self.rows_apart = not (self._type in _FROM_CACHE or from_cache)
        if attends and self.rows_apart:
            state = reset(state, torch.tensor([False, True], device=device))
            valid = torch.tensor([[False] * 3, [False, True, True]], device=device)
            x = torch.cat([tokens[:, :1], tokens], 1)
            after = self._read(x, FunctionalCache(self._layout, state.seen, state.parts, 3, valid))
            self.rows_apart = not differ(after[1, 1:], y[1])

    def initial_state(
        self, batch_size: int, device: Device = None, dtype: torch.dtype | None = None
    ) -> FunctionalState:
        """The state of new rows: no keys and values, and zeros. device, dtype: by default the model's, per layer."""
        self._follow()

        def fresh(x: Tensor) -> Tensor:
            of = dtype if x.is_floating_point() else None
            return torch.zeros(batch_size, *x.shape[1:], device=device or x.device, dtype=of or x.dtype)

        parts = [part.last(0) if isinstance(part, KeyValues) else part for part in self._template.parts]
        state: FunctionalState = map_state(fresh, FunctionalState(self._template.seen, tuple(parts)))
        return state

    def forward(self, x: Tensor, state: State = None, mask: Tensor | None = None) -> Output:
        # --- the call: tokens, state and padding that fit together ---
        width = self._table()[1]
        ids = isinstance(x, Tensor) and x.dim() == 2 and x.dtype in (torch.int64, torch.int32)
        embeddings = isinstance(x, Tensor) and x.dim() == 3 and x.is_floating_point() and x.shape[2] == width
        if not (ids or embeddings) or len(x) == 0:
            raise InputError(f"expected token ids [B, T] int64 or embeddings [B, T, {width}], found {describe(x)}")
        state = self.initial_state(len(x)) if state is None else self._check_state(state, len(x))
        order = valid = None
        if mask is not None:
            if not isinstance(mask, Tensor) or mask.shape != x.shape[:2] or mask.is_floating_point():
                found = f"{describe(mask)}; True = valid"
                raise InputError(f"expected mask {tuple(x.shape[:2])} of booleans, found {found}")
            if not mask.all():
                mask = mask.bool()
                order = valid_last(mask)
                valid = take(mask, order)
                x = zero_invalid(x, mask) if embeddings else x  # 0 · NaN of padding would reach the valid tokens
        if not self.rows_apart:
            least, most = int(state.seen.min()), int(state.seen.max())
            if valid is not None or least != most:
                found = f"{least} to {most} tokens" if valid is None else "a mask with padding"
                raise InputError(
                    f"{self.config.architecture}: expected rows without padding that have read equally many tokens, "
                    f"found {found}; give rows of one length a call and a state of their own"
                )
            # Without what is before the first token of all rows: those positions count.
            parts = (part.last(most) if isinstance(part, KeyValues) else part for part in state.parts)
            state = state._replace(parts=tuple(parts))
        if x.shape[1] == 0:
            self._follow()
            return self._like.new_zeros(len(x), 0, self._like.shape[-1]), state

        # --- the model ---
        cache = FunctionalCache(self._layout, state.seen, state.parts, x.shape[1], valid)
        try:
            y = self._read(x if order is None else take(x, order), cache)
        except IndexError as error:
            size, name = self._table()[0], self.config.architecture
            if ids and not 0 <= int(x.min()) <= int(x.max()) < size:
                raise InputError(
                    f"{name}: expected token ids from 0 to {size - 1}, found {int(x.min())} to {int(x.max())}; use the "
                    "tokenizer of this model"
                ) from error
            raise InputError(
                f"{name}: expected no more tokens than it has positions for, found {int(cache.seen_after.max())} "
                "tokens per row; read fewer, or reset the rows"
            ) from error
        return y if order is None else zero_invalid(take(y, order.argsort(1)), mask), cache.after()

    if TYPE_CHECKING:
        __call__ = forward

    def _read(self, x: Tensor, cache: FunctionalCache, numbered: bool = True) -> Tensor:
        """The outputs of the model for the tokens, or embeddings, of one call. numbered: with `cache.positions`."""
        options = {
            "inputs_embeds" if x.is_floating_point() else "input_ids": x,
            self._cache: cache,
            "use_cache": True,
            "return_dict": True,
            "attention_mask": cache.mask(),
            "position_ids": cache.positions + self._first if numbered else None,
        }
        optional = {"attention_mask", "position_ids"} - self._takes
        out = self.model(**{name: value for name, value in options.items() if name not in optional})
        y: Tensor = out["logits"] if "logits" in out else out["last_hidden_state"]
        return y

    def _check_state(self, state: Any, rows: int) -> FunctionalState:
        if self._why_another(state):
            self._follow()
            if reason := self._why_another(state):
                raise InputError(f"expected the state of {self.config.architecture}, {reason}; begin with state=None")
        checked: FunctionalState = state
        if len(checked.seen) != rows:
            raise InputError(f"expected a state of {rows} rows, as x has, found {len(checked.seen)}; use mnemos.select")
        return checked

    def _why_another(self, state: State) -> str:
        """Why a state is not one of this model; empty: it may be."""
        expected = self._template.parts
        if not isinstance(state, FunctionalState) or len(state.parts) != len(expected):
            found = f"one of {len(state.parts)} layers" if isinstance(state, FunctionalState) else type(state).__name__
            return f"with {len(expected)} layers, found {found}"
        for i, (part, like) in enumerate(zip(state.parts, expected, strict=True)):
            # Keys, values and what is valid of them have tokens as their second axis.
            first = 2 if isinstance(like, KeyValues) else 1
            shapes = [[(x.dim(), *x.shape[first:]) for x in leaves(one)] for one in (part, like)]
            if type(part) is not type(like) or shapes[0] != shapes[1]:
                return (
                    f"found one of another model in layer {i}: {type(part).__name__} of "
                    f"{', '.join(str(tuple(x.shape)) for x in leaves(part))}"
                )
        return ""


def base_model(model: Any) -> Any:
    """The model of Transformers inside an adapter of PEFT, or the model."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def check_model(model: nn.Module) -> tuple[Any, str]:
    """The model of Transformers, and what its forward calls its cache."""
    base = base_model(model)
    if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
        raise InputError(
            "functional: expected an adapter that changes layers (LoRA), found one that puts tokens before those of "
            "every call; use another adapter"
        )
    if not isinstance(base, libraries.transformers().PreTrainedModel):
        raise InputError(
            f"functional: expected a model of Hugging Face Transformers, found {type(model).__name__}; give the model "
            "itself, without torch.compile or DistributedDataParallel around it"
        )
    takes = inspect.signature(base.forward).parameters
    cache = next((name for name in _CACHES if name in takes), None)
    name, config = type(base).__name__, base.config
    if cache is None:
        raise InputError(
            f"functional: expected a causal model with a cache, found {name}, whose forward takes none of "
            f"{', '.join(_CACHES)}; use a decoder"
        )
    if unfit := _UNFIT.get(config.model_type) or _UNFIT.get(name):
        raise InputError(f"functional: expected a model that goes on from any cache, found {name}, which {unfit}")
    if config.is_encoder_decoder or getattr(config, "add_cross_attention", False):
        raise InputError(
            f"functional: expected a decoder alone, found {name}, which reads an encoder; use mnemos.EncoderDecoder"
        )
    return base, cache
