"""The fields of the models' configurations as keyword arguments, for editors and type checkers.

`Transformer(dim=64)` takes the fields of `TransformerConfig`; tests/test_typing.py compares the two.
"""

import dataclasses
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, TypedDict, TypeVar

from mnemos.types import InputError

if TYPE_CHECKING:
    from mnemos.config import AttentionConfig
    from mnemos.memory.gated_cache import GRC
    from mnemos.memory.slots import SlotsConfig
    from mnemos.ops.rotary import Rotary

    from .blocks import Activation, Norm
    from .heads import HeadConfig

M = TypeVar("M", bound=type)


class TransformerFields(TypedDict, total=False):
    """Those of `TransformerConfig`."""

    vocab_size: int
    dim: int
    layers: int
    num_heads: int
    mlp: int
    max_length: int
    causal: bool
    norm: "Norm"
    position: Literal["auto", "rotary", "sinusoidal", "learned", "none"]
    scale_embedding: bool
    activation: "Activation"
    dropout: float
    attention: "AttentionConfig | str"
    cache: "GRC | None"
    head: "HeadConfig"
    rotary: "Rotary"
    features: int


class MemformerFields(TypedDict, total=False):
    """Those of `MemformerConfig`."""

    vocab_size: int
    dim: int
    encoder_layers: int
    decoder_layers: int
    num_heads: int
    mlp: int
    segment: int
    preset: Literal["paper", "mnemos"]
    memory: "SlotsConfig"
    decoder_reads: bool
    cls: int | None
    bos: int | None
    buckets: int
    max_distance: int
    activation: "Activation"
    dropout: float
    tied: bool
    cutoffs: tuple[int, ...]
    div_value: float
    norm: Literal["rms", "pre"]


def check_sizes(config: object, **least: int) -> None:
    """Raise InputError for a field of the configuration that is below its least value, or is NaN."""
    for name, value in least.items():
        if not getattr(config, name) >= value:
            raise InputError(f"{name}: expected at least {value}, found {getattr(config, name)}; raise it")


def with_signature(config: type) -> Callable[[M], M]:
    """Give a model class the signature of its configuration, with the defaults, for `help` and notebooks.

    The meanings of the fields, "Attributes:" at the end of the configuration's docstring, are added to the model's.
    """

    def decorate(model: M) -> M:
        first = inspect.Parameter("config", inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None, annotation=config)
        fields = [
            inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=_default(f), annotation=f.type)
            for f in dataclasses.fields(config)
        ]
        model.__signature__ = inspect.Signature([first, *fields])  # type: ignore[attr-defined]
        _, _, meanings = (inspect.getdoc(config) or "").partition("\nAttributes:\n")
        if meanings:  # none with python -OO
            model.__doc__ = f"{inspect.getdoc(model)}\n\nFields:\n{meanings}"
        return model

    return decorate


def _default(field: "dataclasses.Field[Any]") -> object:
    made = field.default_factory
    return field.default if made is dataclasses.MISSING else made()
