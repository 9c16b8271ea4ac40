"""What has to be known of a host's attention to put a gated cache beside it."""

import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mnemos.types import InputError


class Place(NamedTuple):
    """Where in its model an attention stands, as far as the model says so.

    tokens: T of a call, class tokens and all (None: it varies, and there is no example). slots: what length="auto"
    means. limit: the most slots that make sense. grid: (height, width) of the tokens after the first `prefix`, which
    are class tokens. rows: rows of its batch a sample, as Swin folds its windows.
    """

    tokens: int | None = None
    slots: int | None = None
    prefix: int = 0
    grid: tuple[int, int] | None = None
    limit: int | None = None
    rows: int = 1


class Call(NamedTuple):
    """One call of a host's attention as a branch wants it: x [B, T, D] and mask [B, T] (bool, True = valid) or None.

    flipped: the host has time first, [T, B, D], and so has its output.
    """

    x: Tensor
    mask: Tensor | None = None
    flipped: bool = False


class Site(NamedTuple):
    """A module of a model under its name, and the modules above it, the model itself first."""

    name: str
    module: Any
    above: tuple[Any, ...]


TEXT_SLOTS = 64  # length="auto" where T varies: the paper's, for translation


def nowhere(site: Site, seen: int | None) -> Place:
    """The place of an attention over sequences of any length: 64 slots, or those seen in an example."""
    limit = next((n for m in site.above if (n := _max_positions(m))), None)
    slots = seen or TEXT_SLOTS
    return Place(tokens=seen, slots=min(slots, limit or slots), limit=limit)


def _max_positions(module: Any) -> int | None:
    config = getattr(module, "config", None)
    found = getattr(config, "max_position_embeddings", None)
    return found if isinstance(found, int) and found > 0 else None


def never(site: Site) -> str | None:
    """No reason to leave it."""
    return None


@dataclass(frozen=True)
class Host:
    """One attention class of a host library.

    kind "module:Class"; signature: the first names of its forward's arguments, checked before anything is changed.
    width, out and heads name attributes (dotted) of the module: D of its input, D of its output, H. call reads a call;
    place(site, seen) says where it stands, `seen` the T of an example; left(site) why it is to be left alone, if it is.
    carrier: the submodule whose *input* (o_self, x) is mixed, where the attention's own output is already past a
    residual or norm; "" where its output is mixed.
    """

    kind: str
    signature: tuple[str, ...]
    width: str
    heads: str
    call: Callable[[Any, tuple, dict], Call]
    out: str = ""
    place: Callable[[Site, int | None], Place] = nowhere
    left: Callable[[Site], str | None] = never
    carrier: str = field(default="", kw_only=True)

    @property
    def name(self) -> str:
        """As in "timm Attention"."""
        module, _, cls = self.kind.partition(":")
        return f"{module.partition('.')[0]} {cls}"

    def cls(self) -> Any:
        """The class, if its library has been imported, else None: a model of it cannot exist then."""
        module, _, name = self.kind.partition(":")
        return getattr(sys.modules.get(module), name, None)

    def check(self, module: nn.Module) -> None:
        """Raise InputError unless the module's forward takes what this adapter was written for."""
        found = tuple(inspect.signature(type(module).forward).parameters)[1:]
        if found[: len(self.signature)] != self.signature:
            raise InputError(
                f"{self.name}: expected forward({', '.join(self.signature)}, …), found ({', '.join(found)}); "
                "this version of the library is not known: name other modules with where="
            )

    def sizes(self, module: nn.Module) -> tuple[int, int, int]:
        """D of the input, D of the output and H of a module. Raises InputError where it does not say."""
        found = [reach(module, path) for path in (self.width, self.out or self.width, self.heads)]
        if not all(isinstance(n, int) and n > 0 for n in found):
            raise InputError(
                f"{self.name}: expected widths and heads as integers, found {found}; name others with where="
            )
        return found[0], found[1], found[2]


def reach(module: Any, path: str) -> Any:
    """The attribute at a dotted path, None where there is none."""
    for name in path.split("."):
        module = getattr(module, name, None)
    return module


def argument(args: Sequence[Any], kwargs: dict[str, Any], index: int, name: str) -> Any:
    """A call's argument by its place or its name, None where it was not given."""
    return args[index] if len(args) > index else kwargs.get(name)


def tokens_in(name: str) -> Callable[[Any, tuple, dict], Call]:
    """A reader of calls whose first argument is the tokens, and which have no padding."""
    return _TokensIn(name)


@dataclass(frozen=True)
class _TokensIn:  # a class and not a closure, so that a cached model can be pickled
    name: str

    def __call__(self, module: Any, args: tuple, kwargs: dict) -> Call:
        return Call(argument(args, kwargs, 0, self.name))


def valid_tokens(mask: Any, x: Tensor) -> Tensor | None:
    """Which tokens [B, T] a host's attention mask leaves: bool (True = attend) or additive, [B, T] or [B, 1, Q, T].

    A token is valid if any query may attend to it. Raises InputError for other shapes.
    """
    if mask is None:
        return None
    b, t = x.shape[:2]
    if not isinstance(mask, Tensor) or mask.shape[-1] != t or mask.dim() not in (2, 4) or mask.shape[0] not in (1, b):
        found = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise InputError(f"expected an attention mask [{b}, {t}] or [{b}, 1, Q, {t}], found {found}")
    if mask.dim() == 2:
        kept = mask if mask.dtype == torch.bool else mask > 0
    elif mask.dtype == torch.bool:
        kept = mask.any(2).any(1)
    else:
        kept = mask.amax((1, 2)) > torch.finfo(mask.dtype).min / 2
    return kept.expand(b, t)


def hides_the_future(mask: Tensor | None, hidden: bool) -> bool:
    """Whether an attention mask [..., T, T] hides from each token all later ones, and shows earlier ones.

    `hidden`: what a mask of booleans says of what is hidden, True in PyTorch's modules and False in its functions; an
    additive one says −∞. Cost O(T²). A compiler cannot ask: there the answer is no.
    """
    if mask is None or mask.dim() < 2 or mask.shape[-1] != mask.shape[-2]:
        return False
    if torch.compiler.is_compiling() or mask.is_meta:
        return False
    later = torch.ones(mask.shape[-2:], dtype=torch.bool, device=mask.device).triu(1)
    unseen = mask == hidden if mask.dtype == torch.bool else mask < -1
    return bool(unseen[..., later].all()) and not bool(unseen[..., later.T].all())
