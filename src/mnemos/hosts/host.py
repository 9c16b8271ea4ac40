"""What an adapter declares about a class of attention, so that a gated cache can be added to it."""

import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from torch import Tensor, nn

from mnemos.libraries import CACHE_NAMES
from mnemos.ops.gated_cache import Windows
from mnemos.types import InputError

from .masks import CAUSAL, refuse_lengths, valid_tokens


class AttentionInput(NamedTuple):
    """What a model declares about the input of one of its attentions.

    tokens: T of a call, with class tokens (None: it varies, and there is no example). slots: the value of
    length="auto". limit: the largest useful number of slots. grid: (height, width) of the tokens after the first
    `prefix`, which are class tokens. rows: rows of the attention's batch per sample; Swin's windows are rows.
    With a cache over a sample's whole grid, windows: how the rows of the batch cover it; tokens is then the number of
    tokens in all windows, and rows 1. pool: the side of the squares of tokens that are averaged to one slot. paper: the
    input as length="paper" has it, where it differs. warning: what the model does not declare, and what follows.
    padded: how windows that are rows cover the grid, which says what of them is padding.
    """

    tokens: int | None = None
    slots: int | None = None
    prefix: int = 0
    grid: tuple[int, int] | None = None
    limit: int | None = None
    rows: int = 1
    pool: int = 1
    windows: Windows | None = None
    paper: "AttentionInput | None" = None
    warning: str = ""
    padded: Windows | None = None


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


class Site(NamedTuple):
    """A module of a model, its name, and the modules above it, beginning with the model."""

    name: str
    module: Any
    above: tuple[Any, ...]


POOLS = (4, 2)  # length="paper": the sides of the squares of tokens per slot in a model's first stages; then 1
# Reasons to leave an attention. That of every causal one ends with FUTURE.
FUTURE = "a shared cache would show it the future"
DECODER = f"it is in a decoder: {FUTURE}"
ACROSS = "it attends across two sequences: a cache needs an input of its own"
PART = (
    "the number of class tokens, or the grid, is not known without the model around these attentions, so all tokens "
    "are summarised alike; give mnemos.cache() the whole model, with where= for the part"
)
_INPUTS = "in_features", "in_channels", "nx"  # of nn.Linear, nn.Conv2d and Conv1D of Transformers
TEXT_SLOTS = 64  # length="auto" where T varies: the value of the paper's translation models


def any_length(site: Site, seen: int | None) -> AttentionInput:
    """The input of an attention over sequences of any length: 64 slots, or the number of tokens of an example."""
    limit = next((n for m in site.above if (n := _find_max_positions(m))), None)
    slots = seen or TEXT_SLOTS
    return AttentionInput(tokens=seen, slots=min(slots, limit or slots), limit=limit)


def add_paper(place: AttentionInput, stage: int, windows: Windows | None = None) -> AttentionInput:
    """The input of an attention in stage 0, 1, … of a model with stages, with the one that length="paper" has.

    There the tokens of the first stages are averaged in squares (Cached Transformers, Appendix B: "pooling sizes for
    the first two blocks are 4 and 2"), and a cache spans the whole grid that the `windows` cover. Its slots are None
    where the tokens have to be averaged and form no known grid.
    """
    pool = POOLS[stage] if stage < len(POOLS) else 1
    tokens, grid = (place.tokens, place.grid) if windows is None else (windows.tokens, windows.grid)
    slots = None if pool > 1 or tokens is None else tokens - place.prefix
    if grid is not None:
        slots = -(-grid[0] // pool) * -(-grid[1] // pool)
    return place._replace(paper=AttentionInput(tokens, slots, place.prefix, grid, pool=pool, windows=windows))


def _find_max_positions(module: object) -> int | None:
    config = getattr(module, "config", None)
    found = getattr(config, "max_position_embeddings", None)
    return found if isinstance(found, int) and found > 0 else None


def in_a_part(site: Site, seen: int | None) -> AttentionInput:
    """The input of an attention of images whose model is not known: as `any_length`, with a warning."""
    return any_length(site, seen)._replace(warning=PART)


def no_reason(site: Site) -> str | None:
    """None: there is no reason to leave an attention without a cache."""
    return None


@dataclass(frozen=True)
class Host:
    """One attention class of a host library.

    kind: "module:Class". signature: the first argument names of its forward, checked before anything is changed; the
    cache of Transformers may have either of its names (`libraries.CACHE_NAMES`).
    width, out, heads: dotted attributes of the module with D of its input, D of its output, and H. call: reads the
    arguments of a call. place(site, seen): the attention's place, where `seen` is the T of an example. left(site): why
    it must not get a cache, or None. carrier: the submodule whose first input, o_self, is mixed, for an attention whose
    own output includes a residual or a norm; "": the output is mixed. projection: the dotted path of the module whose
    first input is the attention's heads, one after another, for mix="heads"; "": what is mixed is the heads, because
    the projection follows this attention; None: not known, and mix="heads" is refused. between: attributes with a norm
    or a gate between heads and projection; mix="heads" is refused unless each is None or an Identity.
    """

    kind: str
    signature: tuple[str, ...]
    width: str
    heads: str
    call: Callable[[Any, tuple, dict], Call]
    out: str = ""
    place: Callable[[Site, int | None], AttentionInput] = any_length
    left: Callable[[Site], str | None] = no_reason
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
        found = tuple(inspect.signature(type(module).forward).parameters)[1:]
        if _unify_names(found[: len(self.signature)]) != _unify_names(self.signature):
            raise InputError(
                f"{self.name}: expected forward({', '.join(self.signature)}, …), found ({', '.join(found)}); "
                "use a version of the library with that forward, or name other modules with where="
            )

    def sizes(self, module: nn.Module) -> tuple[int, int, int]:
        """D of the input, D of the output and H of a module. Raises InputError if one is no positive integer."""
        found = [reach(module, path) for path in (self.width, self.out or self.width, self.heads)]
        if not all(isinstance(n, int) and n > 0 for n in found):
            raise InputError(
                f"{self.name}: expected widths and heads as integers, found {found}; name others with where="
            )
        return found[0], found[1], found[2]

    def heads_dim(self, module: nn.Module) -> int:
        """The channels of all heads of a module. Raises InputError if mix="heads" is not possible."""
        if self.projection == "":
            return self.sizes(module)[1]
        linear = reach(module, self.projection) if self.projection else None
        found = next((n for name in _INPUTS if isinstance(n := getattr(linear, name, None), int)), None)
        if found is None or found % self.sizes(module)[2]:
            raise InputError(
                f'GRC(mix="heads"): expected an attention that calls its projection as a module, found {self.name}, '
                'of which none is known; use mix="channels"'
            )
        parts = {name: getattr(module, name, None) for name in self.between}
        if changed := [name for name, part in parts.items() if not (part is None or isinstance(part, nn.Identity))]:
            raise InputError(
                f'GRC(mix="heads"): expected an attention whose heads are the input of its projection, found '
                f'{self.name} with {" and ".join(changed)} before it; use mix="channels"'
            )
        return found

    def uneven(self, module: nn.Module) -> str | None:
        """Why the heads of a cache do not fit the module's widths; None: they do."""
        *widths, heads = self.sizes(module)
        odd = next((width for width in widths if width % heads), None)
        return (
            None
            if odd is None
            else f"its width {odd} is no multiple of its {heads} heads, among which a cache is mixed"
        )


def _unify_names(names: Sequence[str]) -> list[str]:
    """Names of arguments, with one name for the cache of Transformers in all its versions."""
    return [CACHE_NAMES[0] if name in CACHE_NAMES else name for name in names]


def reach(module: object, path: str) -> Any:
    """The attribute at a dotted path, None where there is none."""
    for name in path.split("."):
        module = getattr(module, name, None)
    return module


def argument(args: Sequence[object], kwargs: dict[str, Any], index: int, name: str) -> Any:
    """A call's argument by its position or its name; None if it was not given."""
    return args[index] if len(args) > index else kwargs.get(name)


def config_field(site: Site, name: str) -> Any:
    """A field's value in the innermost Hugging Face configuration that has it, from the module upwards; else None."""
    for module in (site.module, *reversed(site.above)):
        if (value := getattr(getattr(module, "config", None), name, None)) is not None:
            return value
    return None


@dataclass(frozen=True)
class TokenReader:  # a class and no closure, as every reader, so that a cached model can be pickled
    """Reads calls whose first argument is the tokens, without padding. [B, height, width, D] is taken in rows."""

    name: str

    def __call__(self, module: object, args: tuple, kwargs: dict) -> Call:
        """The call's tokens."""
        x = argument(args, kwargs, 0, self.name)
        return Call(x if x.dim() == 3 else x.flatten(1, 2))


@dataclass(frozen=True)
class PaddedReader:
    """Reads calls whose first argument is `hidden_states`, with a mask as `valid_tokens` has it."""

    index: int
    name: str = "attention_mask"

    def __call__(self, module: object, args: tuple, kwargs: dict) -> Call:
        """The call's tokens and mask."""
        refuse_lengths(kwargs)
        if kwargs.get("is_causal"):
            raise InputError(CAUSAL)
        x = argument(args, kwargs, 0, "hidden_states")
        return Call(x, valid_tokens(argument(args, kwargs, self.index, self.name), x))


class DecoderCall(NamedTuple):
    """One call of a decoder's attention: x [B, T, D], the host's mask, and the host's cache (None: new rows)."""

    x: Tensor
    mask: Any
    past: Any


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

    def read(self, module: Any, args: tuple, kwargs: dict) -> DecoderCall:
        """The call. Raises InputError where an argument packs several sequences into one row."""
        refuse_lengths(kwargs)
        mask, past = (self.signature.index(name) for name in (self.mask, self.past))
        names = CACHE_NAMES if self.past in CACHE_NAMES else (self.past,)
        given = [argument(args, kwargs, past, name) for name in names]
        return DecoderCall(
            self.call(module, args, kwargs).x,
            argument(args, kwargs, mask, self.mask),
            given[-1] if given[0] is None else given[0],
        )
