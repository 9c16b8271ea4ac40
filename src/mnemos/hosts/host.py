"""What an adapter declares about a class of attention, so that a gated cache can be added to it."""

import inspect
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from torch import Tensor, nn

from mnemos.libraries import CACHE_NAMES
from mnemos.types import InputError

from .inputs import AttentionInput, NamedModule, any_length
from .masks import CAUSAL, refuse_lengths, valid_tokens

_INPUTS = "in_features", "in_channels", "nx"  # of nn.Linear, nn.Conv2d and Conv1D of Transformers


class Call(NamedTuple):
    """One call of a host's attention: x [B, T, D] and mask [B, T] (bool, True = valid) or None.

    layout: how the host's own output is arranged; `tokens` and `like` translate. "batch": [B, T, D], or with more axes
    of tokens or rows between the first and the last, as in [B, height, width, D]. "time": [T, B, D]. "channels":
    [B, D, height, width].
    """

    x: Tensor
    mask: Tensor | None = None
    layout: Literal["batch", "time", "channels"] = "batch"

    def tokens(self, y: Tensor) -> Tensor:
        """The host's output as [B, T, D]."""
        if self.layout == "time":
            return y.transpose(0, 1)
        if self.layout == "channels":
            return y.flatten(2).transpose(1, 2)
        return y if y.dim() == 3 else y.reshape(self.x.shape[0], -1, y.shape[-1])

    def like(self, mixed: Tensor, y: Tensor) -> Tensor:
        """Tokens [B, T, D] arranged as the host's output y."""
        if self.layout == "time":
            return mixed.transpose(0, 1)
        if self.layout == "channels":
            return mixed.transpose(1, 2).reshape(y.shape)
        return mixed if y.dim() == 3 else mixed.reshape(y.shape)


@dataclass(frozen=True)
class Host:
    """The adapter of one attention class of a host library.

    kind: "module:Class". signature: the first argument names of its forward, checked before anything is changed; the
    cache of Transformers may have either of its names (`libraries.CACHE_NAMES`).
    width, out, heads: dotted attributes of the module with D of its input, D of its output, and H. call: reads the
    arguments of a call. input(site, t): what the model declares of its tokens, where t is the T of an example.
    why_skipped(site): why it must not get a cache, or None. carrier: the submodule whose first input, o_self, is mixed,
    for an attention whose own output includes a residual or a norm; "": the output is mixed. projection: the dotted
    path of the module whose first input is the attention's heads, one after another, for mix="heads"; "": what is mixed
    is the heads, because the projection follows this attention; None: not known, and mix="heads" is refused. between:
    attributes with a norm or a gate between heads and projection; mix="heads" is refused unless each is None or an
    Identity.
    """

    kind: str
    signature: tuple[str, ...]
    width: str
    heads: str
    call: Callable[[Any, tuple, dict], Call]
    out: str = ""
    input: Callable[[NamedModule, int | None], AttentionInput] = any_length
    why_skipped: Callable[[NamedModule], str | None] | None = None
    carrier: str = field(default="", kw_only=True)
    projection: str | None = field(default=None, kw_only=True)
    between: tuple[str, ...] = field(default=(), kw_only=True)

    @property
    def name(self) -> str:
        """As in "timm Attention"."""
        module, _, cls = self.kind.partition(":")
        return f"{module.partition('.')[0]} {cls}"

    def cls(self) -> Any:
        """The class, or None if its library has not been imported: then no model of it exists in this process."""
        module, _, name = self.kind.partition(":")
        return getattr(sys.modules.get(module), name, None)

    def check(self, module: nn.Module) -> None:
        """Raise InputError unless the module's forward has the arguments that this adapter was written for."""
        names = tuple(inspect.signature(type(module).forward).parameters)[1:]
        # The cache of Transformers may have any of its names.
        one_name = [[CACHE_NAMES[0] if n in CACHE_NAMES else n for n in each] for each in (names, self.signature)]
        if one_name[0][: len(self.signature)] != one_name[1]:
            raise InputError(
                f"{self.name}: expected forward({', '.join(self.signature)}, …), found ({', '.join(names)}); "
                "use a version of the library with that forward, or name other modules with where="
            )

    def sizes(self, module: nn.Module) -> tuple[int, int, int]:
        """D of the input, D of the output and H of a module. Raises InputError if one is no positive integer."""
        sizes = [reach(module, path) for path in (self.width, self.out or self.width, self.heads)]
        if not all(isinstance(n, int) and n > 0 for n in sizes):
            raise InputError(f"{self.name}: expected integer widths and heads, found {sizes}; name others with where=")
        return sizes[0], sizes[1], sizes[2]

    def heads_dim(self, module: nn.Module) -> int:
        """The channels of all heads of a module. Raises InputError if mix="heads" is not possible."""
        if self.projection == "":
            return self.sizes(module)[1]
        linear = reach(module, self.projection) if self.projection else None
        dim = next((n for name in _INPUTS if isinstance(n := getattr(linear, name, None), int)), None)
        if dim is None or dim % self.sizes(module)[2]:
            raise InputError(
                f'GRC(mix="heads"): expected a projection that is a module, found {self.name}, of which none '
                'is known; use mix="channels"'
            )
        parts = {name: getattr(module, name, None) for name in self.between}
        if changed := [name for name, part in parts.items() if not (part is None or isinstance(part, nn.Identity))]:
            raise InputError(
                f'GRC(mix="heads"): expected heads that are the input of the projection, found {self.name} with '
                f'{" and ".join(changed)} before it; use mix="channels"'
            )
        return dim

    def find_obstacle(self, site: NamedModule, named: bool) -> str | None:
        """Why an attention gets no cache; of one that the user did not name, also heads that its widths do not fit."""
        reason = self.why_skipped(site) if self.why_skipped is not None else None
        if reason is None and not named:
            *widths, heads = self.sizes(site.module)
            if (odd := next((width for width in widths if width % heads), None)) is not None:
                reason = f"its width {odd} is no multiple of its {heads} heads, among which a cache is mixed"
        return reason


class CallStack(threading.local):
    """The calls of attentions that are being made, each inside the one before it. Threads may share a model."""

    def __init__(self) -> None:  # not of the class: a compiled call would guard on an attribute that comes later
        self.calls: tuple[Any, ...] = ()


def reach(module: object, path: str) -> Any:
    """The attribute at a dotted path, None where there is none."""
    for name in path.split("."):
        module = getattr(module, name, None)
    return module


def argument(args: Sequence[object], kwargs: dict[str, Any], index: int, name: str) -> Any:
    """A call's argument by its position or its name; None if it was not given."""
    return args[index] if len(args) > index else kwargs.get(name)


@dataclass(frozen=True)
class TokenReader:  # a class and no closure, as every reader, so that a cached model can be pickled
    """Reads calls whose first argument is the tokens. [B, height, width, D] is taken in rows.

    mask: the position of a mask, which `valid_tokens` reads; None: the call has no padding. mask_name: its name.
    """

    name: str
    mask: int | None = None
    mask_name: str = "attention_mask"

    def __call__(self, module: object, args: tuple, kwargs: dict) -> Call:
        x = argument(args, kwargs, 0, self.name)
        x = x if x.dim() == 3 else x.flatten(1, 2)
        if self.mask is None:
            return Call(x)
        refuse_lengths(kwargs)
        if kwargs.get("is_causal"):
            raise InputError(CAUSAL)
        return Call(x, valid_tokens(argument(args, kwargs, self.mask, self.mask_name), x))


@dataclass(frozen=True)
class DecoderHost(Host):
    """One attention class of causal decoders; its gated cache is updated in blocks and carried on the host's cache.

    call reads the tokens alone. past: the argument with the host's cache, a transformers `Cache`; one of
    `libraries.CACHE_NAMES` stands for all of them. mask: the argument with the attention mask (see `own_tokens`).
    layer: the attribute with the attention's number in the cache.
    """

    call: Any = field(default=TokenReader("hidden_states"), kw_only=True)
    past: str = field(default="past_key_values", kw_only=True)
    mask: str = field(default="attention_mask", kw_only=True)
    layer: str = field(default="layer_idx", kw_only=True)

    def read(self, module: Any, args: tuple, kwargs: dict) -> tuple[Tensor, Any, Any]:
        """One call: x [B, T, D], the host's mask, and the host's cache (None: new rows).

        Raises InputError where an argument packs several sequences into one row.
        """
        refuse_lengths(kwargs)
        mask, index = (self.signature.index(name) for name in (self.mask, self.past))
        names = CACHE_NAMES if self.past in CACHE_NAMES else (self.past,)
        pasts = [argument(args, kwargs, index, name) for name in names]
        past = next((one for one in pasts if one is not None), None)
        return self.call(module, args, kwargs).x, argument(args, kwargs, mask, self.mask), past
