"""Configurations: frozen dataclasses, written as plain JSON and read back with strict checks.

A field whose type has several implementations (an attention, a task) is written with the name under which its class is
registered. Reading a file therefore imports only modules that `registry.py` names.
"""

import dataclasses
import functools
import inspect
import math
import types
import typing
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

import numpy as np

from . import registry
from .errors import near_name
from .types import InputError

_Value = TypeVar("_Value")
_Part = TypeVar("_Part")
_Model = TypeVar("_Model")


@dataclasses.dataclass(frozen=True)
class Config:
    """Base of the registered configurations: `kind` and `name` identify a class in the registry."""

    kind: ClassVar[str]
    name: ClassVar[str]
    # Fields that say how far a trained model reads or remembers, and change no weight: `mnemos eval` may set them.
    at_evaluation: ClassVar[tuple[str, ...]] = ()

    def build(self, *args: Any, **kwargs: Any) -> Any:
        """The object that the configuration describes."""
        raise TypeError(f"{type(self).__name__} is a base class; use one of {registry.names(self.kind)}")


@dataclasses.dataclass(frozen=True)
class AttentionConfig(Config):
    """Base of the configurations of attentions: `build(dim, num_heads, causal=True, dropout=0.0)` returns the layer.

    The layer is a `mnemos.types.Attention`, and declares what it can do. It is causal, unless it
    is asked not to be or cannot be; build() of ours raises InputError for a value that is not in `causal_modes`.
    """

    kind: ClassVar[str] = "attention"
    rotates: ClassVar[bool] = False  # whether build() takes rotary=True, or a mnemos.ops.positions.Rotary
    knows_distances: ClassVar[bool] = False  # whether its scores depend on distances, without positions in its inputs

    @property
    def causal_modes(self) -> frozenset[bool]:
        """The values of `causal` that `build` accepts; {True} for an attention that can only be causal."""
        return frozenset({False, True})

    def of_layer(self, number: int) -> "AttentionConfig":
        """The configuration in layer `number` (0, 1, …) of a model: the same in all layers, unless they are drawn."""
        return self


def check_mode(attention: AttentionConfig, causal: bool) -> None:
    """Raise InputError unless the attention can be built with this value of `causal`."""
    if causal not in attention.causal_modes:
        raise InputError(
            f"attention {attention.name!r}: expected causal={not causal}, its only mode, found causal={causal}; use "
            f"another attention, or a model with causal={not causal}"
        )


@dataclasses.dataclass(frozen=True)
class ModelConfig(Config):
    """Base of the configurations of models: `build()` returns the model, a `mnemos.types.RecurrentModel`."""

    kind: ClassVar[str] = "model"
    inputs: ClassVar[str] = "tokens"  # of forward: "tokens" [B, T], "images" [B, C, H, W] or "frames" [B, T, bands]


def to_dict(value: object) -> Any:
    """A configuration as JSON values: dataclasses become dicts, with "is": name for registered classes.

    "plugin" beside it is the file of a class that a file has registered (`registry.load_file`).
    """
    if dataclasses.is_dataclass(value):
        fields = {f.name: to_dict(getattr(value, f.name)) for f in dataclasses.fields(value)}
        file = registry.file_of(type(value))
        named = {"is": value.name} if isinstance(value, Config) else {}
        return {**named, **({"plugin": str(file)} if named and file else {}), **fields}
    if isinstance(value, (list, tuple)):
        return [to_dict(v) for v in value]
    return str(value) if isinstance(value, Path) else value


def from_dict(cls: Any, value: Any, where: str = "", record: bool = False) -> Any:
    """The value of a field's type `cls`, such as a configuration, that `to_dict` wrote, or that is one already.

    An integer is a number, a list may be a tuple and a text may be a path. where: the path of the value, which errors
    name. record: it is of a file of results, where fields that a class does not know are ignored, a missing number is
    null and numbers have 64 bits. Raises InputError for unknown fields and wrong types.
    """
    origin, arguments = typing.get_origin(cls), typing.get_args(cls)
    if cls is Any:
        return value
    if origin is typing.Annotated:
        return from_dict(arguments[0], value, where, record)
    if origin in (typing.Union, types.UnionType):
        problem: InputError | None = None
        if value is None and type(None) in arguments:
            return None
        for option in arguments:
            try:
                return from_dict(option, value, where, record)
            except InputError as error:
                if isinstance(value, dict) and dataclasses.is_dataclass(option):
                    problem = problem or error  # it names the field within the value
        raise problem or _wrong(where, cls, value)
    if origin is tuple and isinstance(value, (list, tuple)):
        options = arguments[:1] * len(value) if arguments[-1] is Ellipsis else arguments
        if len(options) != len(value):
            raise InputError(f"{where}: expected {len(options)} values, found {len(value)}")
        parts = enumerate(zip(options, value, strict=True))
        return tuple(from_dict(k, v, f"{where}[{i}]", record) for i, (k, v) in parts)
    if origin is list and isinstance(value, list):
        return [from_dict(arguments[0], v, f"{where}[{i}]", record) for i, v in enumerate(value)]
    if origin is dict and isinstance(value, dict):
        return {k: from_dict(arguments[1], v, f"{where}.{k}", record) for k, v in value.items()}
    if cls is np.ndarray and isinstance(value, list):
        return np.array(from_dict(list[float], value, where, record))
    if dataclasses.is_dataclass(cls) and isinstance(value, dict):
        return _dataclass(cls, dict(value), where, record)

    # --- a value without parts ---
    if record and value is None and cls is float:
        return math.nan
    if record and isinstance(value, int) and abs(value) >= 2**63:
        fits = False
    elif origin is not None:
        fits = origin is Literal and value in arguments
    elif cls is None or value is None:
        fits = value is None and cls in (None, type(None))
    elif isinstance(value, bool):
        fits = cls in (bool, object)
    else:
        accepted: Any = (int, float) if cls is float else (str, Path) if issubclass(cls, Path) else cls
        fits = isinstance(value, accepted)
    if not fits:
        raise _wrong(where, cls, value)
    converted = origin is None and ((cls is float and not record) or (isinstance(cls, type) and issubclass(cls, Path)))
    return cls(value) if converted else value


def _dataclass(cls: Any, value: dict[str, Any], where: str, record: bool) -> Any:
    if "is" in value:
        name, file = value.pop("is"), value.pop("plugin", None)
        if not issubclass(cls, Config) or not isinstance(name, str):
            raise InputError(
                f"{where or cls.__name__}: 'is' names a registered class, found {name!r} in {cls.__name__}"
            )
        cls = registry.load(cls.kind, name, file)
    elif issubclass(cls, Config) and not hasattr(cls, "name"):
        raise InputError(f"{where or cls.__name__}: 'is' is missing; known: {', '.join(registry.names(cls.kind))}")
    hints = _hints(cls)
    for key in value:
        if key not in hints and not record:
            raise InputError(unknown_field(key, hints, where or cls.__name__))
    prefix = f"{where}." if where else ""
    for f in dataclasses.fields(cls):
        if f.name not in value and f.default is f.default_factory is dataclasses.MISSING:
            raise InputError(f"{prefix}{f.name} is missing")
    return cls(**{k: from_dict(hints[k], v, prefix + k, record) for k, v in value.items() if k in hints})


@functools.cache
def _hints(cls: Any) -> dict[str, Any]:
    """The annotations of a dataclass's fields."""
    hints = typing.get_type_hints(cls)
    return {f.name: hints[f.name] for f in dataclasses.fields(cls)}


def mapped(value: Any, cls: type[_Part], function: Callable[[_Part], _Part]) -> Any:
    """A configuration with `function` applied to every value of class `cls` in it, at any depth.

    Returns `value` itself if the function changed none.
    """
    if isinstance(value, cls):
        return function(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        new = {name: part for name, old in fields.items() if (part := mapped(old, cls, function)) is not old}
        return dataclasses.replace(value, **new) if new else value
    if isinstance(value, tuple):
        parts = tuple(mapped(part, cls, function) for part in value)
        return parts if any(a is not b for a, b in zip(parts, value, strict=True)) else value
    return value


def default_config(kind: str, name: str, where: str) -> Any:
    """The registered configuration of that name with default settings.

    Raises InputError, which begins with `where`, for unknown names and for settings that have no defaults.
    """
    cls = registry.load(kind, name)
    missing = dataclasses.MISSING
    needed = [f.name for f in dataclasses.fields(cls) if f.init and f.default is f.default_factory is missing]
    if needed:
        raise InputError(
            f"{where}: expected the name of a configuration whose settings have defaults, found {name!r} with none for "
            f"{', '.join(needed)}; give the configuration"
        )
    return cls()


def check_fields(config: Any, where: str) -> None:
    """Raise InputError if a field of a dataclass has a value of the wrong type, which Python does not check."""
    cls: Any = type(config)
    for name, hint in _hints(cls).items():
        value = getattr(config, name)
        if isinstance(value, type):
            raise InputError(
                f"{where}.{name}: expected a value, found the class {value.__name__}; write {value.__name__}()"
            )
        read = from_dict(hint, value, f"{where}.{name}")
        if isinstance(value, dict) and read is not value:  # a configuration that is written as in a file
            expected = type(read).__name__
            raise InputError(f"{where}.{name}: expected a {expected}, found {value!r:.80}; write {expected}(...)")


def with_fields(config: _Value, fields: dict[str, Any], model: str) -> _Value:
    """A model's configuration with other values of some fields. Raises InputError for a field that it does not have."""
    cls: Any = type(config)
    known = _hints(cls)
    for name in fields:
        if name not in known:
            raise InputError(unknown_field(name, known, model))
    return dataclasses.replace(config, **fields)  # type: ignore[type-var]


def with_signature(config: type) -> Callable[[type[_Model]], type[_Model]]:
    """Give a model class the signature of its configuration, with the defaults, for `help` and notebooks.

    The meanings of the fields, "Attributes:" at the end of the configuration's docstring, are added to the model's.
    """

    def decorate(model: type[_Model]) -> type[_Model]:
        first = inspect.Parameter("config", inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None, annotation=config)
        defaults, only = config(), inspect.Parameter.KEYWORD_ONLY
        fields = [
            inspect.Parameter(f.name, only, default=getattr(defaults, f.name), annotation=f.type)
            for f in dataclasses.fields(config)
        ]
        model.__signature__ = inspect.Signature([first, *fields])  # type: ignore[attr-defined]
        _, _, meanings = (inspect.getdoc(config) or "").partition("\nAttributes:\n")
        if meanings:  # none with python -OO
            model.__doc__ = f"{inspect.getdoc(model)}\n\nFields:\n{meanings}"
        return model

    return decorate


def unknown_field(name: str, known: Iterable[str], where: str) -> str:
    """The error message for a field that does not exist, with the most similar field that does."""
    known = sorted(known)
    return f"{where} has no field {name!r}; {near_name(name, known, 'it has: ' + ', '.join(known))}"


def _wrong(where: str, cls: object, value: object) -> InputError:
    nested = [one for part in typing.get_args(cls) for one in (part, *typing.get_args(part))]
    words = [one for one in nested if isinstance(one, str)]
    fix = near_name(value, words, "change it") if isinstance(value, str) else "change it"
    return InputError(f"{where}: expected {in_words(cls) or cls}, found {value!r:.80}; {fix}")


def in_words(annotation: object) -> str | None:
    """The values that a field's type allows, in words: "an integer or None"; None for a type without words."""
    options = list(_options(annotation))
    if not options or None in options:
        return None
    words = [option for option in options if option]
    return " or ".join(part for part in (", ".join(words[:-1]), words[-1]) if part)


_WORDS = {
    int: "an integer",
    float: "a number",
    bool: "True or False",
    str: "a text",
    type(None): "None",
    dict: "a dict",
    list: "a list",
    np.ndarray: "a list of numbers",
}


def _options(annotation: object) -> Iterator[str | None]:
    """The alternatives of a type, each in words."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        yield from map(repr, arguments)
    elif origin in (typing.Union, types.UnionType):
        for argument in arguments:
            yield from _options(argument)
    elif origin is tuple and len({*arguments} - {Ellipsis}) == 1 and (one := in_words(arguments[0])):
        count = "one or more" if Ellipsis in arguments else str(len(arguments))
        yield f"{count} {one.split(' ', 1)[-1]}s"
    elif origin in (dict, list):
        yield _WORDS[origin]
    elif isinstance(annotation, type):
        name = "path" if issubclass(annotation, Path) else annotation.__name__
        yield _WORDS.get(annotation, f"{'an' if name[0] in 'AEIOU' else 'a'} {name}")
    else:
        yield None
