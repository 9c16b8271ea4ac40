"""What a linearised attention of a decoder has and does: feature maps, low-rank updates, and its calls.

`linearise` puts the child `Linearised` into an attention, which then runs a copy of its class's forward, in which the
functions of Transformers for attention and rotary positions are those of this file: `run` makes a call, `_rotate` notes
queries and keys before rotary positions, and `attend` computes attention, from the model's own cache and to it.
"""

import functools
import inspect
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from mnemos._compat import hooks_of
from mnemos.config import check_fields
from mnemos.libraries import ATTENTIONS, CACHE_NAMES, AttentionTable, loaded_weights, with_globals
from mnemos.modes import records_values
from mnemos.ops.dense_layer import dense
from mnemos.ops.linear.feature_maps import Hedgehog, elu
from mnemos.ops.window_state import Far, Ring, Sizes, WindowState, new_state, window_attention
from mnemos.types import InputError

from .host import CallStack
from .masks import own_tokens, read_once, refuse_lengths

StateName = Literal["none", "linear", "hedgehog", "delta"]
ROTARY = "apply_rotary_pos_emb"  # in the files of Transformers' models
_PASTS = (*CACHE_NAMES, "layer_past")  # what forwards of attentions call the model's cache
_OWN = "_mnemos_own"  # attribute of a mask: the tokens of the call that it shows, for all layers
_PASSED = {"scaling", "softcap", "dropout", "sliding_window", "is_causal"}  # what forwards give an attention function
# ln γ at the start: near or below the weights at which untrained maps of SmolLM2-135M did no harm, with features before
# and after rotary positions (docs/linearised.md).
START = {"linear": -16.0, "hedgehog": -8.0, "delta": -3.0}


LONGEST = 2**20  # half-life in tokens; beyond it float32 has hardly a digit for the factor of a token


@dataclass(frozen=True)
class Settings:
    """What `linearise` was called with."""

    window: int
    sinks: int
    state: StateName
    rank: int
    rotary: bool
    half_life: int

    def __post_init__(self) -> None:
        check_fields(self, "linearise")
        for name, least in (("window", 1), ("sinks", 0), ("rank", 0), ("half_life", 0)):
            if (value := getattr(self, name)) < least:
                raise InputError(f"linearise.{name}: expected at least {least}, found {value}; change it")
        if self.half_life > LONGEST:
            raise InputError(
                f"linearise.half_life: expected at most {LONGEST:,}, found {self.half_life}; 0 never forgets"
            )


class LinearisedState(NamedTuple):
    """The state of an attention: `window`, and turn [B, 2, R], cos and sin of the position w + s − 1 of each row."""

    window: WindowState
    turn: Tensor


class Rotation(NamedTuple):
    """A call of Transformers' function for rotary positions: queries and keys before it, cos, sin, and itself."""

    q: Tensor
    k: Tensor
    cos: Tensor
    sin: Tensor
    apply: Callable[..., tuple[Tensor, Tensor]]

    def turn(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [B, H, N, D] rotated; of x wider than what is rotated the rest stays."""
        width = self.q.shape[-1]
        turned = self.apply(x[..., :width], x[:, :1, ..., :width], cos, sin)[0]
        return turned if x.shape[-1] == width else torch.cat([turned, x[..., width:]], -1)


class Tokens(NamedTuple):
    """The tokens of a call: q [B, H, T, D], k [B, Hk, T, D], v [B, Hk, T, M], and valid [B, T], None: all.

    rotation: how they got their rotary positions; None: they have none.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    sizes: Sizes
    rotation: Rotation | None = None
    valid: Tensor | None = None

    @property
    def unrotated(self) -> tuple[Tensor, Tensor] | None:
        """q and k before rotary positions; of ones wider than what is rotated, the rest as it is. None: without."""
        if self.rotation is None:
            return None
        width = self.rotation.q.shape[-1]
        if width == self.q.shape[-1]:
            return self.rotation.q, self.rotation.k
        q, k = (x[..., width:] for x in (self.q, self.k))
        return torch.cat([self.rotation.q, q], -1), torch.cat([self.rotation.k, k], -1)

    def of_heads(self, heads: Sequence[int]) -> "Tokens":
        """Those of some key heads, with the query heads that read them."""
        pick, turn = functools.partial(pick_heads, groups=self.k.shape[1], heads=heads), self.rotation
        if turn is not None:
            turn = turn._replace(q=pick(turn.q), k=pick(turn.k))
        return Tokens(pick(self.q), pick(self.k), pick(self.v), self.sizes, turn, self.valid)

    def some(self, those: slice) -> "Tokens":
        """Some of them."""
        q, k, v = (x[:, :, those] for x in self[:3])
        turn, valid = self.rotation, None if self.valid is None else self.valid[:, those]
        if turn is not None:
            before_q, before_k, cos, sin, apply = turn
            turn = Rotation(before_q[:, :, those], before_k[:, :, those], cos[:, those], sin[:, those], apply)
        return Tokens(q, k, v, self.sizes, turn, valid)


def pick_heads(x: Tensor, groups: int, heads: Sequence[int]) -> Tensor:
    """Of x [B, H, ..], whose heads are in `groups` alike, the heads of some groups."""
    return x.unflatten(1, (groups, -1))[:, heads].flatten(1, 2)


class Linearised(nn.Module):
    """The child `linearised` of an attention: its settings and its new parameters, which are of its `far_heads` alone.

    heads, kv_heads: H and Hk of the attention. full_heads: the key heads that keep all keys and values; the others are
    `far_heads`, which have window and state.
    query_map [H, d, d], key_map [Hk, d, d]: W of the feature maps ("hedgehog", "delta"), the identity at the start.
    log_gamma [H]: γ = e^log_gamma. rate [Hk]: β = sigmoid(rate) ("delta"), ½ at the start. updates: a `LowRank` for
    each projection, `to_` and its name: adapters (LoRA) choose the modules that they wrap by the ends of names.
    """

    def __init__(
        self, settings: Settings, heads: int, kv_heads: int, width: int, full_heads: Sequence[int] = ()
    ) -> None:
        super().__init__()
        self.settings = settings
        self.split(kv_heads, full_heads)
        heads, kv_heads = heads // kv_heads * len(self.far_heads), len(self.far_heads)
        self.whole_masks = False  # whether layers or heads of the model keep all keys, so that masks have them all
        self.updates = nn.ModuleDict()
        if settings.state == "none":
            return
        self.log_gamma = nn.Parameter(torch.full((heads,), START[settings.state]))
        if settings.state != "linear":
            self.query_map = nn.Parameter(torch.eye(width).repeat(heads, 1, 1))
            self.key_map = nn.Parameter(torch.eye(width).repeat(kv_heads, 1, 1))
        if settings.state == "delta":
            self.rate = nn.Parameter(torch.zeros(kv_heads))

    def split(self, kv_heads: int, full_heads: Sequence[int]) -> None:
        """Leave these key heads whole."""
        self.full_heads = tuple(full_heads)
        self.far_heads = tuple(i for i in range(kv_heads) if i not in self.full_heads)

    @property
    def raw(self) -> bool:
        """Whether features are computed of queries and keys before rotary positions."""
        return not self.settings.rotary and self.settings.state != "none"

    def far(self) -> Far | None:
        """The feature maps with their weights, as the operator takes them."""
        state = self.settings.state
        if state == "none":
            return None
        decay = -math.log(2) / self.settings.half_life if self.settings.half_life else 0.0
        with loaded_weights(self):
            gamma = self.log_gamma.exp()
            if state == "linear":
                return Far(elu, elu, gamma, None, decay)
            beta = torch.sigmoid(self.rate) if state == "delta" else None
            return Far(Hedgehog(self.query_map), Hedgehog(self.key_map), gamma, beta, decay)

    def read(self, tokens: Tokens, state: LinearisedState | None) -> tuple[Tensor, LinearisedState]:
        """y [B, T, H, M] and the state after a call."""
        q, k, v, sizes, rotation, valid = tokens
        b, t = len(q), q.shape[2]
        unrotated = tokens.unrotated
        raw = unrotated if self.raw else None  # what features are computed of
        far = self.far()
        if state is None:
            turn = q.new_zeros(b, 2, rotation.cos.shape[-1] if rotation is not None and sizes.sinks else 0)
            state = LinearisedState(new_state(k, v, None if raw is None else raw[1], sizes, far), turn)

        # --- sinks are met by queries at the positions min(i, w + s − 1); cos and sin of the last of these are kept ---
        sink_q, turn = None, state.turn
        if rotation is not None and unrotated is not None and sizes.sinks:
            last = sizes.window + sizes.sinks - 1
            cos, sin = (x.expand(b, t, -1) for x in (rotation.cos, rotation.sin))
            number = torch.arange(t, device=q.device) if valid is None else valid.cumsum(1) - 1
            number = state.window.seen[:, None] + number
            is_last = number == last if valid is None else (number == last) & valid
            rows, position = torch.arange(b, device=q.device), is_last.to(torch.uint8).argmax(1)
            both = torch.stack([cos[rows, position], sin[rows, position]], 1).to(turn.dtype)
            turn = torch.where(is_last.any(1)[:, None, None], both, turn)
            beyond = (number > last)[..., None]
            cos = torch.where(beyond, turn[:, :1].to(cos.dtype), cos)
            sin = torch.where(beyond, turn[:, 1:].to(sin.dtype), sin)
            sink_q = rotation.turn(unrotated[0], cos, sin).transpose(1, 2)

        # --- attention in the window, and beyond it ---
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        raw = None if raw is None else (raw[0].transpose(1, 2), raw[1].transpose(1, 2))
        y, window = window_attention(q, k, v, sizes, far, state.window, valid, sink_q, raw)
        return y, LinearisedState(window, turn)

    def read_first(self, n: int, tokens: Tokens, state: LinearisedState | None) -> LinearisedState | None:
        """The state after the first n tokens of a call of `read`."""
        return self.read(tokens.some(slice(n)), state)[1] if n else state

    def start_ring(self, state: LinearisedState, sizes: Sizes, rotation: Rotation | None) -> Ring:
        """Buffers for single tokens; the sinks' keys are as queries before rotation meet them."""
        keys = state.window.sink_k
        if rotation is not None and sizes.sinks:
            keys = rotation.turn(keys, state.turn[:, :1], -state.turn[:, 1:])
        return Ring(state.window, sizes, keys)

    def step(self, ring: Ring, tokens: Tokens) -> Tensor:
        """y [B, 1, H, M] of one token; the ring is changed."""
        unrotated = tokens.unrotated
        sink_q = None if unrotated is None or not ring.sizes.sinks else unrotated[0]
        raw = unrotated if self.raw else None
        return ring.step(tokens.q, tokens.k, tokens.v, self.far(), sink_q, raw).transpose(1, 2)


# --- low-rank updates of projections ---


class LowRank(nn.Module):
    """x -> up·down·x, which is 0 at the start: down [r, D], up [D', r]."""

    def __init__(self, width: int, out: int, rank: int) -> None:
        super().__init__()
        self.down = nn.Parameter(torch.randn(rank, width) * width**-0.5)
        self.up = nn.Parameter(torch.zeros(out, rank))

    def forward(self, x: Tensor) -> Tensor:
        return dense(dense(x, self.down), self.up)

    def add(self, projection: nn.Module, args: tuple, output: Tensor) -> Tensor:
        """The hook after the forward of a projection."""
        return output + self(args[0])


_hooking = threading.Lock()


def add_updates(attention: Any) -> None:
    """Hook the updates of an attention to its projections, unless they are.

    Every call asks for it, since tools wrap and replace projections (adapters, quantisation), and a trained update must
    not vanish with the module that it was hooked to. Raises InputError where a projection is gone.
    """
    for name, update in attention.linearised.updates.items():
        projection = getattr(attention, name.removeprefix("to_"), None)
        if not isinstance(projection, nn.Module):
            raise InputError(
                f"{type(attention).__name__}: expected the projection {name.removeprefix('to_')} of a low-rank update, "
                "found none; call mnemos.hosts.merge_updates before the layer is rebuilt"
            )
        # Not `update.add in …`: torch.compile finds no bound method equal to another.
        if any([getattr(hook, "__self__", None) is update for hook in hooks_of(projection).values()]):
            continue
        with _hooking:  # two threads may call the model
            drop_updates(projection)
            projection.register_forward_hook(update.add)


def drop_updates(module: nn.Module) -> None:
    """Remove the hooks of updates from a module and all below it."""
    for part in module.modules():
        hooks = hooks_of(part)
        for key in [key for key, hook in hooks.items() if getattr(hook, "__func__", None) is LowRank.add]:
            del hooks[key]


def list_projections(attention: nn.Module) -> Iterator[tuple[str, nn.Module, int, int]]:
    """The projections of an attention, inside the wrappers of adapters: name, module, width of input and of output."""
    for name, child in attention.named_children():
        while isinstance(inner := getattr(child, "base_layer", None), nn.Module):  # PEFT's, which takes them off again
            child = inner
        for sizes in (("in_features", "out_features"), ("nx", "nf")):  # nn.Linear, quantised ones; Conv1D
            width, out = (getattr(child, size, None) for size in sizes)
            if isinstance(width, int) and isinstance(out, int):
                yield name, child, width, out


# --- a call of a linearised attention ---


class ActiveCall:
    """One call of an attention: its cache, its arguments by name, and what was noted inside."""

    def __init__(self, past: Any, options: dict[str, Any]) -> None:
        self.past, self.options, self.answered = past, options, False
        self.rotation: Rotation | None = None
        self.rotated: tuple[Tensor, Tensor] | None = None


_stack = CallStack()  # of `ActiveCall`


class _PassingCache:
    """The cache that the forward of an attention gets: its update returns what it is given."""

    def __init__(self, past: Any) -> None:
        self._past = past

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """The keys and values of the call alone."""
        return keys, values

    def __getattr__(self, name: str) -> Any:
        return getattr(self._past, name)


def _around(function: Any) -> Any:
    return functools.partial(attend, function)


@functools.cache
def copy_forward(cls: Any) -> Any:
    """The forward of a class of attentions in which attention is linearised; None: it calls no attention function."""
    function = inspect.unwrap(cls.forward)
    names = function.__globals__
    if ATTENTIONS not in function.__code__.co_names or ATTENTIONS not in names:
        return None
    others: dict[str, Any] = {ATTENTIONS: AttentionTable(names[ATTENTIONS], _around)}
    if has_rotary(cls):
        others[ROTARY] = functools.partial(_rotate, names[ROTARY])
    return with_globals(cls.forward, others)


def has_rotary(cls: Any) -> bool:
    """Whether the forward of a class of attentions may rotate its queries and keys."""
    return ROTARY in inspect.unwrap(cls.forward).__code__.co_names


@functools.cache
def _list_names(forward: Any) -> tuple[str, ...]:
    """The arguments of the forward of a class of attentions, without `self`."""
    return tuple(inspect.signature(forward).parameters)[1:]


def run(forward: Any, module: Any, args: tuple, options: dict[str, Any]) -> Any:
    """A call of the linearised attention `module`; forward: the copy of its class's."""
    refuse_lengths(options)
    add_updates(module)
    past = None
    for i, name in enumerate(_list_names(type(module).forward)[: len(args)]):
        if name in _PASTS and args[i] is not None:
            past = args[i]
            args = (*args[:i], _PassingCache(past), *args[i + 1 :])
    for name in _PASTS:
        if options.get(name) is not None:
            past = options[name]
            options = {**options, name: _PassingCache(past)}
    call = ActiveCall(past, options)
    _stack.calls = *_stack.calls, call
    try:
        output = forward(module, *args, **options)
    finally:
        _stack.calls = _stack.calls[:-1]
    if not call.answered:
        raise InputError(
            f"{type(module).__name__}: expected a forward that calls its attention function, found another; leave it "
            "out of where="
        )
    return output


def _rotate(function: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **options: Any) -> Any:
    apply = functools.partial(function, **options) if options else function
    call = _stack.calls[-1]
    call.rotation = Rotation(q, k, cos, sin, apply)
    call.rotated = function(q, k, cos, sin, *args, **options)
    return call.rotated


def attend(
    function: Any, module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """What the forward gets: attention [B, T, H, M], from q [B, H, T, D] and the keys and values of T tokens."""
    call = _stack.calls[-1]
    call.answered = True
    own: Linearised = module.linearised
    t, scale = q.shape[2], options.get("scaling")
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    sizes = Sizes(own.settings.window, own.settings.sinks, scale, options.get("softcap"))
    of_functional = hasattr(call.past, "gated")  # that of `mnemos.functional`, which has the state itself

    # --- within the window: the model's own function ---
    layer: Any = None
    if call.past is None and t <= sizes.window:
        whole: tuple[Tensor, Tensor | None] = function(module, q, k, v, mask, **options)
        return whole
    if call.past is not None and not of_functional:
        from .linearised_cache import find_layer

        layer = find_layer(call.past, module.layer_idx, own)
        if layer.whole and layer.get_seq_length() + t <= sizes.window:
            k, v = layer.extend(k, v, call.rotation if own.raw else None, find_valid(mask, q))
            whole = function(module, q, k, v, mask, **options)
            return whole

    # --- beyond it: refuse an attention that is more than softmax of q·k with rotary positions last ---
    expected = f"{type(module).__name__}: expected softmax attention of queries and keys after rotary positions, found"
    for name in options.keys() - _PASSED:  # what the caller gave it, and its forward has no name for, changes nothing
        if options[name] is not None and (name in _list_names(type(module).forward) or name not in call.options):
            raise InputError(f"{expected} the option {name!r}; leave it out of where=")
    for x, rotated in zip((q, k), call.rotated or (), strict=False):
        part = x[..., : rotated.shape[-1]]
        same = part.shape == rotated.shape and (
            x is rotated or torch.allclose(part, rotated.to(part.dtype), 0, 0, equal_nan=True)
        )
        if not same:
            raise InputError(f"{expected} them changed again after rotary positions; leave it out of where=")

    # --- the state ---
    valid = call.past.valid if of_functional else find_valid(mask, q)
    tokens = Tokens(q, k, v, sizes, call.rotation, valid)
    far = tokens.of_heads(own.far_heads) if own.full_heads else tokens
    if layer is not None:
        y = layer.read(own, far)
    elif of_functional:
        before: LinearisedState | None = call.past.take(LinearisedState)
        if before is not None:
            (_, heads, window, _), sinks = before.window.k.shape, before.window.sink_k.shape[2]
            if (heads, window, sinks) != (len(own.far_heads), sizes.window, sizes.sinks):
                raise call.past.misfit(f"one of {heads} key heads with a window of {window} tokens and {sinks} sinks")
        y, state = own.read(far, before)
        call.past.new.append(state)
    else:
        y = own.read(far, None)[0]

    # --- key heads that are left whole: the model's own function ---
    if own.full_heads:
        groups = k.shape[1]
        q, k, v = (pick_heads(x, groups, own.full_heads) for x in (q, k, v))
        if layer is not None:
            k, v = layer.keep(k, v, options.get("sliding_window"))
        elif of_functional:
            k, v = call.past.update(k, v, module.layer_idx)
        # Beside other layers with a sliding window, a mask may have fewer keys or more than one of this layer.
        n = k.shape[2] if mask is None else min(mask.shape[-1], k.shape[2])
        k, v, mask = k[:, :, -n:], v[:, :, -n:], mask if mask is None else mask[..., -n:]
        near = function(module, q, k, v, mask, **options)[0]
        order = sorted(range(groups), key=(own.full_heads + own.far_heads).__getitem__)
        y = torch.cat([near, y], 2).unflatten(2, (groups, -1))[:, :, order].flatten(2, 3)
    return y, None


def find_valid(mask: Tensor | None, q: Tensor) -> Tensor | None:
    """Which of the tokens of q [B, H, T, D] are valid, [B, T]; None: all. It is computed once for a mask."""
    if mask is None:
        return None

    def read() -> Tensor | None:
        tokens = own_tokens(mask, q[:, 0], mask.shape[-1])
        return None if tokens is None or (not records_values() and bool(tokens.all())) else tokens

    return read_once(mask, _OWN, (len(q), q.shape[2]), read)
