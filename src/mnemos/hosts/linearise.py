"""linearise(model) and unlinearise(model): a trained decoder with a state of constant size, and back.

`merge_updates(model)` adds the low-rank updates to the weights.
"""

import functools
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from mnemos.errors import near_arguments
from mnemos.libraries import transformers
from mnemos.modes import uncompiled
from mnemos.types import InputError

from .adapters import adapters_by_class
from .attach import CONFIG_RECORDS, NOT_NAMED, Skipped, Where, find_unknown, list_sites, note_in_config, select_sites
from .host import DecoderHost, Host
from .inputs import NamedModule
from .linearised import (
    Linearised,
    LowRank,
    Settings,
    StateName,
    add_updates,
    copy_forward,
    drop_updates,
    has_rotary,
    list_projections,
    run,
)
from .row_caches import make_empty

FULL = "full= leaves it whole"  # of a report
_ALREADY = "it is linearised already; mnemos.unlinearise(model) undoes that"
_HEADS = re.compile(r"(.+):(\d+(?:,\d+)*)")  # of full=: an attention, and key heads of it
RECORD = CONFIG_RECORDS[1]


@dataclass(frozen=True)
class LinearisedAttention:
    """An attention with a state: H, Hk, bytes of a row's state in float32, and the key heads that are left whole."""

    name: str
    kind: str
    heads: int
    kv_heads: int
    state_bytes: int
    full_heads: tuple[int, ...] = ()


@dataclass(frozen=True, repr=False)
class LineariseReport:
    """What `linearise` changed and left, and what there is to train, by names in the model.

    maps: the new parameters of feature maps, γ and β; updates: those of the low-rank updates.
    """

    changed: tuple[LinearisedAttention, ...]
    left: tuple[Skipped, ...]
    settings: Settings
    maps: Mapping[str, nn.Parameter]
    updates: Mapping[str, nn.Parameter]

    def __str__(self) -> str:
        kinds = Counter(
            f"transformers {one.kind}: {one.heads} heads, {one.kv_heads} key-value heads" for one in self.changed
        )
        count, own = len(self.changed), self.settings
        forgets = f" (half_life={own.half_life})" if own.state != "none" else ""
        lines = [
            f"{count} attention{'s have' if count > 1 else ' has'} a window of {own.window} tokens, {own.sinks} sinks "
            f"and state={own.state!r}{forgets} now:"
        ]
        lines += [f"  {n} x {key}" for key, n in kinds.items()]
        lines += [f"  left {one.name}: {one.why}" for one in self.left]
        for one in self.changed:
            if one.full_heads:
                named = ", ".join(map(str, one.full_heads))
                lines.append(f"  left key heads {named} of {one.kv_heads} of {one.name}: full= leaves them whole")
        sizes = [sum(p.numel() for p in group.values()) for group in (self.maps, self.updates)]
        state = sum(one.state_bytes for one in self.changed)
        lines.append(f"{sizes[0]:,} parameters of feature maps and {sizes[1]:,} of low-rank updates added")
        keeps = any(one.why != _ALREADY for one in self.left) or any(one.full_heads for one in self.changed)
        beside = ", beside the keys and values of what is left" if keeps else ""
        lines.append(f"{state / 1024:,.0f} KiB of state for each row in float32, at any length{beside}")
        return "\n".join(lines)

    __repr__ = __str__  # what a notebook and the prompt of Python show


@near_arguments
def linearise(
    model: nn.Module,
    window: int = 64,
    sinks: int = 4,
    state: StateName = "delta",
    where: Where = None,
    rank: int = 0,
    rotary: bool = False,
    half_life: int = 1024,
    full: Where = None,
) -> LineariseReport:
    """Give the attentions of a trained decoder of Transformers a state of constant size, in place: an RNN.

        report = mnemos.linearise(model, window=64, sinks=4)     # report.changed, report.left
        model.generate(ids, max_new_tokens=100_000)              # constant memory and time a token
        mnemos.unlinearise(model)                                # bit for bit as before

    Softmax attention over the last `window` tokens w and the first `sinks` s, and a linear-attention state of all
    tokens between, in one normaliser (LoLCATs; Zhang et al. 2024):

        y_i = [Σ_near e^{a_ij − m_i} v_j + γ_h Σ_far φ_q(q_i)·φ_k(k_j) v_j] / [the same sums without v]
        near(i) = {j : i − w < j ≤ i} ∪ {j < s}, far(i) the other j ≤ i, a_ij = q_i·k_j·scale, m_i = max a_ij of near(i)

    Rotary positions: a sink j that has left the window is met by the query at the position min(i, w + s − 1), as
    StreamingLLM numbers them. While a call and what its cache holds fit into the window (i < w), the model's own
    attention function is called: its outputs are those of the model, bit for bit.

    state: "none" (window and sinks alone), "linear" (φ = elu + 1), "hedgehog" (φ(x) = [e^{Wx − m}, e^{−Wx − m}],
    m = max |Wx|, W [d, d] per head, the identity at the start), "delta" (these maps, keys of length 1, and the delta
    rule on [v, 1] with a rate β per key head in place of the sums; a negative far sum counts 0 in the denominator).
    γ_h starts small, so that an untrained state does no harm; without training no state is better than "none". rank:
    that of low-rank updates of all projections of these attentions, 0 at the start. rotary: features of queries and
    keys after rotary positions; False: before, where a key is the same at all distances. half_life: tokens after which
    S and z hold half of a token, at most 2²⁰; 0: they never forget.
    where: as in `mnemos.cache`: a pattern of names, several, or a function (name, module) -> bool. full: chosen as by
    `where`, attentions that stay as they are and keep all keys and values: a hybrid. Behind a name, ":0,2" leaves key
    heads 0 and 2 of it whole, with the query heads that read them. `mnemos.rank_attentions` says which ones need them.

    Every changed attention gets a child `linearised` with the new parameters (`report.maps`, `report.updates`); all
    weights keep their names. Updates stay where a projection is wrapped, replaced or quantised. Padding takes no place
    in the state. Dropout of attention weights is applied in calls that fit into the window, and in what is whole.
    Drafts of `generate` are taken back from the state; a linearised assistant is refused beyond the window. Further
    calls may linearise other attentions with other settings.

    Cost for each layer: O(T·(w + d)·d) for a call, O((w + s + 2d)·d) a token, and a state of 2·Hk·(w + s)·d +
    Hk·2d·(d + 1) numbers, and Hk·w·d of keys before rotary positions. Raises InputError, and leaves the model
    unchanged, for settings out of range and if no attention can be linearised: those of encoders, across two sequences,
    with a sliding window of at most `window`, of a part of a model, with accelerate's hooks, and of classes whose
    forward calls no attention function of Transformers (Falcon).
    Calls beyond the window raise it for registered decoders with another form of attention.
    """
    settings = Settings(window, sinks, state, rank, rotary, half_life)
    model = uncompiled(model)
    if not isinstance(model, nn.Module):
        raise InputError(
            f"linearise: expected a decoder of Transformers, found a {type(model).__name__}; pass the model"
        )
    if not (full is None or callable(full) or isinstance(full, Iterable)) or isinstance(full, Mapping):
        seen = f"full={full} and no text to rank them by" if isinstance(full, int) else f"full= {type(full).__name__}"
        raise InputError(
            f"linearise: expected names of attentions, found {seen}; give "
            f"full=mnemos.rank_attentions(model, pieces).full({full if isinstance(full, int) else 'COUNT'})"
        )

    # --- the new children; until here nothing was changed ---
    sites = list_sites(model)
    chosen, left = _choose(sites, settings, where, full)
    children = []
    for site, host, full_heads in chosen:
        module = site.module
        heads, kv_heads = host.sizes(module)[2], _count_key_heads(host, module)
        width = getattr(module, "head_dim", None) or module.head_size
        own = Linearised(settings, heads, kv_heads, width, full_heads)
        for name, _, size, out in list_projections(module) if rank else ():
            own.updates[f"to_{name}"] = LowRank(size, out, rank)
        device = next((x.device for x in chain(module.parameters(), module.buffers())), None)
        every = chain(module.parameters(), model.parameters())  # quantised projections have integers alone
        dtype = next((x.dtype for x in every if x.is_floating_point() and x.element_size() > 1), torch.float32)
        own.to(device=device, dtype=dtype).train(module.training)
        children.append((site, own, heads, kv_heads, width))

    # --- the attentions get another class, whose forward runs `linearised.run` ---
    changed: list[LinearisedAttention] = []
    maps: dict[str, nn.Parameter] = {}
    updates: dict[str, nn.Parameter] = {}
    for site, own, heads, kv_heads, width in children:
        cls = site.module.__class__
        site.module.__class__ = _make_class(cls)
        site.module.linearised = own
        add_updates(site.module)
        features = {"none": 0, "linear": width}.get(state, 2 * width)
        size = 2 * (window + sinks) * width + features * (width + 1)
        size += window * width if own.raw and has_rotary(cls) else 0
        sized = heads, kv_heads, 4 * len(own.far_heads) * size
        changed.append(LinearisedAttention(site.name, cls.__name__, *sized, own.full_heads))
        for name, parameter in own.named_parameters():
            group = updates if name.startswith("updates.") else maps
            group[f"{site.name}.linearised.{name}".removeprefix(".")] = parameter
    # --- masks must have all keys where layers keep them all, or windows differ ---
    owners: list[Any] = [module.linearised for module in model.modules() if is_linearised(module)]
    changed_names = {site.name for site in sites if is_linearised(site.module)}
    whole = any(one.name not in changed_names for one in left) or any(own.full_heads for own in owners)
    for own in owners:
        own.whole_masks = whole or len({own.settings.window for own in owners}) > 1
    note_in_config(model, RECORD, list_linearised(model))
    return LineariseReport(tuple(changed), tuple(left), settings, maps, updates)


def unlinearise(model: nn.Module) -> nn.Module:
    """Undo `linearise`: every attention is as before, and the new parameters are gone. Returns the model.

    Raises InputError, and changes nothing, if the model has no linearised attention, if it is a part of a decoder, and
    if accelerate's hooks, or wrappers of PEFT around states, were added after `linearise`.
    """
    refuse_wrapped(model, "unlinearise")
    sites = [site for site in list_sites(model) if is_linearised(site.module)]
    if not sites:
        raise InputError("expected a model that mnemos.linearise() was called on, found no state; nothing to undo")
    for site in sites:
        if (reason := _find_obstacle(site)) is not None:
            raise InputError(f"unlinearise: expected a decoder as linearise changed it; {site.name}: {reason}")
    for module in (site.module for site in sites):
        drop_updates(module)
        del module.linearised
        module.__class__ = type(module).__mro__[1]
    for module in model.modules():
        if hasattr(config := getattr(module, "config", None), RECORD):
            delattr(config, RECORD)
    return model


@torch.no_grad()
def merge_updates(model: nn.Module) -> nn.Module:
    """Add the low-rank updates of linearised attentions to their projections, W ← W + up·down, in place; returns it.

    The updates are gone: a token costs what it costs at rank 0. Outputs are the same up to rounding, and `unlinearise`
    leaves the changed weights. Raises InputError, and changes nothing, if there are no updates, if PEFT has wrapped
    them, and for weights that are no matrix of floating-point numbers (quantised ones).
    """
    refuse_wrapped(model, "merge_updates")
    merged: list[tuple[Any, LowRank]] = []
    owners: list[Any] = [module for module in model.modules() if is_linearised(module)]
    for module in owners:
        projections = {name: projection for name, projection, *_ in list_projections(module)}
        for key, update in module.linearised.updates.items():
            projection: Any = projections.get(name := key.removeprefix("to_"))
            weight, shape = getattr(projection, "weight", None), (len(update.up), update.down.shape[1])
            if not (isinstance(weight, Tensor) and weight.is_floating_point() and weight.shape in (shape, shape[::-1])):
                seen = f"{tuple(weight.shape)} in {weight.dtype}" if isinstance(weight, Tensor) else "no such weight"
                raise InputError(
                    f"merge_updates: expected weights [{shape[0]}, {shape[1]}] of floating-point numbers, found {name} "
                    f"({type(projection).__name__}) with {seen}; keep its updates, or merge before quantisation"
                )
            merged.append((projection, update))
    if not merged:
        raise InputError("merge_updates: expected a model that linearise() gave low-rank updates, found none")
    for projection, update in merged:
        change = update.up.float() @ update.down.float()
        transposed = hasattr(projection, "nf")  # Conv1D, whose weight is [in, out]
        projection.weight.add_((change.mT if transposed else change).to(projection.weight.dtype))
    for module in owners:
        drop_updates(module)
        module.linearised.updates = nn.ModuleDict().train(module.linearised.training)
        module.linearised.settings = replace(module.linearised.settings, rank=0)
    note_in_config(model, RECORD, list_linearised(model))
    return model


def is_linearised(module: Any) -> bool:
    """Whether `linearise` changed this attention. An adapter of PEFT (`modules_to_save`) may have wrapped its child."""
    own = getattr(module, "linearised", None)
    return isinstance(getattr(own, "original_module", own), Linearised)


def refuse_wrapped(model: nn.Module, call: str) -> None:
    """Raise InputError if an adapter has wrapped a state: its parameters are then there twice, one copy trained."""
    for name, module in model.named_modules():
        if is_linearised(module) and not isinstance(module.linearised, Linearised):
            raise InputError(
                f"{call}: expected the decoder's own states, found that of {name} wrapped by an adapter "
                "(modules_to_save); call its merge_and_unload() first"
            )


def _choose(
    sites: list[NamedModule], settings: Settings, where: Where, full: Where
) -> tuple[list[tuple[NamedModule, DecoderHost, list[int]]], list[Skipped]]:
    """The attentions that are linearised, each with its adapter and the key heads that stay whole; and the others."""
    adapter_of = adapters_by_class()
    known = {site.name: adapter for site in sites if (adapter := adapter_of(site.module)) is not None}
    selected, _ = select_sites(sites, set(known), where)
    full, heads = _split_heads(sites, known, full)
    whole, others = select_sites(sites, set(known), full, "full") if full not in (None, (), []) else (None, set())
    if others:  # else they would be linearised, against what was asked for
        raise InputError(
            f"linearise: expected full= to name attentions, found {min(others) or 'the model'!r}, which is none; "
            f"name {min(known, default='the attention inside')!r} and the like"
        )
    chosen, left = [], []
    for site in sites:
        if (adapter := known.get(site.name)) is None:
            continue
        reason = _find_reason(site, adapter, settings)
        if reason is None and selected is not None and site.name not in selected:
            reason = NOT_NAMED
        full_heads = sorted(heads.get(site.name, ()))
        every = _count_key_heads(adapter, site.module) if full_heads else 0
        if full_heads and full_heads[-1] >= every:
            raise InputError(
                f"linearise: expected key heads 0 to {every - 1} of {site.name}, found full= with {full_heads[-1]}"
            )
        if reason is None and (site.name in (whole or ()) or len(full_heads) == every > 0):
            reason = FULL
        if reason is not None:
            left.append(Skipped(site.name, reason))
        elif isinstance(adapter, DecoderHost):
            adapter.check(site.module)
            chosen.append((site, adapter, full_heads))
    unknown = ((site.name, type(site.module).__name__) for site in find_unknown(sites, known))
    left += [Skipped(name, f"its class {cls} is not known to mnemos.linearise") for name, cls in unknown]
    if not chosen:
        first = next((one for one in left if selected is None or one.name in selected), left[0] if left else None)
        shown = f"where={where!r} chose nothing" if where is not None else "none"
        shown = shown if first is None else f"none: {first.name} was left ({first.why})"
        raise InputError(
            f"linearise: expected causal self-attentions of Transformers, found {shown}; see docs/linearise.md"
        )
    return chosen, left


def _split_heads(sites: list[NamedModule], known: Mapping[str, Host], full: Where) -> tuple[Where, dict[str, set[int]]]:
    """What `full` says of attentions as a whole, and the key heads that it names, by attention."""
    heads: dict[str, set[int]] = {}
    if full is None or callable(full):
        return full, heads
    names = []
    for name in [full] if isinstance(full, str) else full:
        found = _HEADS.fullmatch(name) if isinstance(name, str) else None
        if found is None:
            if isinstance(name, str) and ":" in name:
                raise InputError(f'linearise: expected full= with key heads as in "NAME:0,2", found {name!r}')
            names.append(name)
            continue
        selected, others = select_sites(sites, set(known), found[1], "full")
        names += others  # which `_choose` refuses
        for attention in (selected or set()) & set(known):
            heads.setdefault(attention, set()).update(map(int, found[2].split(",")))
    return names, heads


def _count_key_heads(host: Host, attention: nn.Module) -> int:
    return host.sizes(attention)[2] // getattr(attention, "num_key_value_groups", 1)


def _find_reason(site: NamedModule, adapter: Host, settings: Settings) -> str | None:
    """Why an attention of a known class cannot be linearised."""
    module, why = site.module, adapter.find_obstacle(site, named=True)
    if not isinstance(adapter, DecoderHost):
        return why or "it is no causal self-attention of a decoder"
    if is_linearised(module):
        return _ALREADY
    if (why := why or _find_obstacle(site)) is not None:
        return why
    cls: Any = type(module)
    if copy_forward(cls) is None:
        return "its forward calls no attention function of Transformers, but computes attention itself"
    if getattr(module, "reorder_and_upcast_attn", False):
        return "reorder_and_upcast_attn=True computes attention itself"
    # --- a sliding window of its own ---
    config, number = getattr(module, "config", None), getattr(module, "layer_idx", None)
    if hasattr(module, "sliding_window"):
        own = module.sliding_window
    else:
        types = getattr(config, "layer_types", None)
        slides = not types or number is None or types[number] == "sliding_attention"
        own = getattr(config, "sliding_window", None) if slides else None
    if isinstance(own, int) and 0 < own <= settings.window:
        return f"its own sliding window of {own} tokens is not longer than window={settings.window}"
    return None


def _find_obstacle(site: NamedModule) -> str | None:
    """Why an attention's class cannot be changed here, and not back."""
    # The other attentions share its cache and its masks, so they must be seen.
    if not any(isinstance(one, transformers().PreTrainedModel) for one in site.above):
        return "what was given is a part of a decoder; pass the model of Transformers and choose with where="
    if "forward" in vars(site.module):
        return (
            "its forward was replaced (accelerate's hooks, mnemos.fast); undo that first, and do it again after "
            "linearise or unlinearise"
        )
    return None


@functools.cache
def _make_class(cls: Any) -> Any:
    """The subclass of a class of attentions that is linearised."""
    copied = copy_forward(cls)

    class LinearisedClass(cls):
        @functools.wraps(cls.forward)
        def forward(self, *args: Any, **options: Any) -> Any:
            return run(copied, self, args, options)

        def __reduce_ex__(self, protocol: Any) -> Any:
            # Pickle finds a class by its name, and this class is made when it is needed.
            return make_empty, (_make_class, cls), self.__dict__

    LinearisedClass.__name__, LinearisedClass.__qualname__ = cls.__name__, cls.__qualname__
    LinearisedClass.__module__ = cls.__module__
    return LinearisedClass


def list_linearised(model: nn.Module) -> list[dict[str, Any]]:
    """All that is linearised in a model: [{"settings": arguments of `linearise`, "names": of the attentions}].

    "full" is there where key heads are left whole: as the argument `full` names them.
    """
    of_settings: dict[Settings, dict[str, Any]] = {}
    for name, module in model.named_modules():
        if is_linearised(module):
            own = module.linearised
            one = of_settings.setdefault(own.settings, {"settings": asdict(own.settings), "names": []})
            one["names"].append(name)
            if own.full_heads:
                one.setdefault("full", []).append(name_heads(name, own.full_heads))
    return [*of_settings.values()]


def name_heads(name: str, heads: Iterable[int]) -> str:
    """Key heads of an attention, as `full=` names them."""
    return f"{name}:{','.join(map(str, heads))}"
