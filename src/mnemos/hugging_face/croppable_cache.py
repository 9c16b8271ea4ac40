"""A cache of Transformers for its own recurrent models, from which assisted decoding can take rejected drafts back."""

import functools
import inspect
from contextlib import ExitStack
from typing import Any

from torch import Tensor, nn

from mnemos import libraries
from mnemos.ops import rewindable
from mnemos.ops.rewind import Calls
from mnemos.types import InputError

libraries.transformers()
from transformers.cache_utils import DynamicCache, LinearAttentionCacheLayerMixin  # noqa: E402

_REFUSED = "_is_stateful"  # of a model's class: `generate` refuses assistants for it, whatever its cache can do


class CroppableCache(DynamicCache):
    """The cache of a recurrent model of Transformers for `generate` with an assistant or drafts from the prompt.

        with mnemos.fast(model), CroppableCache(model) as cache:
            tokens = model.generate(ids, cache=cache, prompt_lookup_num_tokens=5)     # 5.23: past_key_values=cache

    Transformers cannot take tokens back from a recurrent state, and refuses such models. Here `crop` runs the recurrent
    operators of the last call again over the tokens that remain (`mnemos.ops.rewindable`), without a call of the model;
    it cuts keys, values and windows as Transformers does. So the tokens are those of decoding without drafts, to the
    rounding of a call of several tokens.

    It needs gated delta rules or Mamba-2 that `mnemos.fast` serves, on a CPU; not the scan of Mamba-1, which in
    Transformers begins every call of several tokens from zeros. Mamba-2 does not go back to before a call of one token,
    which no draft needs. It goes back within the last call alone, so it is a cache of the model and not of the
    assistant. Inside the `with` block a model may be one whose class declares itself stateful, which `generate` would
    refuse. As in Transformers, the batch is one row.
    Cost: the inputs of one call's operators are kept, until `crop`.

    Raises InputError for a model whose forward takes no such cache (the model Mamba-2 in 5.23), and from `crop` for
    layers that run otherwise, and for going back further.
    """

    def __init__(self, model: nn.Module) -> None:
        base: Any = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
        if libraries.cache_name() not in inspect.signature(base.forward).parameters:
            raise InputError(
                f"CroppableCache: expected a model whose forward takes {libraries.cache_name()}, found "
                f"{type(base).__name__}, to which generate cannot give this cache in this version of transformers; use "
                "another model"
            )
        config: Any = model.config
        super().__init__(config=config)
        self._model, self._stack = model, ExitStack()
        for i, layer in enumerate(self.layers):  # the same layers, but recurrent ones go back
            if isinstance(layer, LinearAttentionCacheLayerMixin):
                kind: Any = type(layer)
                self.layers[i] = _rewinding(kind).__new__(_rewinding(kind))
                vars(self.layers[i]).update(vars(layer))

    def __enter__(self) -> "CroppableCache":
        self._hand_out(self._stack.enter_context(rewindable()))
        if getattr(self._model, _REFUSED, False):
            setattr(self._model, _REFUSED, False)
            self._stack.callback(delattr, self._model, _REFUSED)
        return self

    def __exit__(self, *_: object) -> None:
        self._hand_out(Calls())
        self._stack.close()

    def _hand_out(self, operators: Calls) -> None:
        self._operators = operators
        for layer in self.layers:
            if isinstance(layer, _Rewinding):
                layer.operators = operators

    def crop(self, tokens_to_remove: int) -> None:
        """Take −tokens_to_remove tokens of the last call back."""
        super().crop(tokens_to_remove)
        self._operators.clear()


class _Rewinding:
    """In front of a class of cache layers: its states are values, and `crop` goes back to an earlier one."""

    operators = Calls()  # none, outside the block of the cache
    recurrent_states: dict[int, Tensor | None]
    read = 0  # the tokens of the last call
    written: frozenset[int] = frozenset()  # the states that it returned

    def update_conv_state(self, conv_states: Tensor, *given: Any, **named: Any) -> Tensor:
        """The inputs of the convolution: a call begins."""
        self.read, self.written = conv_states.shape[-1], frozenset()
        inputs: Tensor = super().update_conv_state(conv_states, *given, **named)  # type: ignore[misc]
        return inputs

    def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0, **named: Any) -> Tensor:
        """The state after the call. It is not copied into the earlier one, which `crop` needs."""
        this: Any = self
        this.is_recurrent_states_initialized[state_idx] = True
        self.recurrent_states[state_idx] = recurrent_states
        self.written |= {state_idx}
        return recurrent_states

    def _states(self) -> dict[int, Tensor]:
        return {i: state for i, state in self.recurrent_states.items() if state is not None}

    @property
    def is_croppable(self) -> bool:
        """Whether `crop` can go back within the last call."""
        if not (states := self._states()):
            return bool(super().is_croppable)  # type: ignore[misc]
        return all(i in self.written and self.operators.knows(state, self.read) for i, state in states.items())

    def crop(self, tokens_to_remove: int) -> None:
        """Take −tokens_to_remove tokens of the last call back."""
        count = self.read - abs(tokens_to_remove)
        if tokens_to_remove:
            if not self.is_croppable or count < 0:
                raise InputError(
                    f"crop: expected to take back tokens of the last call, of {self.read} tokens, with the layers on "
                    f"the kernels of mnemos, found {abs(tokens_to_remove)} tokens; call mnemos.fast(model), and use "
                    "the cache in its with block (the scan of Mamba-1, and a single token of Mamba-2, cannot go back)"
                )
            for i, state in self._states().items():
                self.recurrent_states[i] = self.operators.rewind(state, [count] * len(state))
        super().crop(tokens_to_remove)  # type: ignore[misc]


@functools.cache
def _rewinding(cls: type) -> Any:
    return type(f"Rewinding{cls.__name__}", (_Rewinding, cls), {})
