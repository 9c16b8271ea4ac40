"""cache(model) and uncache(model): add a gated cache to every self-attention of an existing model, and remove it.

`add_caches` is read from top to bottom: which attentions, by their class (`adapters`) or by name (`named`); the sizes
of their caches; a branch for each (`branch`), which hooks mix into the attention's output (`hooks`); a report.
"""

import copy
import difflib
import fnmatch
import functools
import re
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

from torch import Tensor, nn

from mnemos._compat import COMPILED
from mnemos.config import to_dict
from mnemos.errors import near_arguments
from mnemos.memory.gated_cache import GRC, caches
from mnemos.modes import uncompiled
from mnemos.ops.gated_cache.cost import Shape, inference_macs, training_macs
from mnemos.types import InputError

from .adapters import adapters_by_class
from .branch import DecoderBranch, HostBranch
from .hooks import RECORD, ROSTER, attach, attach_root, detach_all
from .host import DecoderHost, Host
from .inputs import AttentionInput, NamedModule
from .masks import DECODERS
from .named import make_adapter, make_reader, probe, record_calls

Where = str | Sequence[str] | Callable[[str, nn.Module], bool] | None
NOT_NAMED = "not named by where="


class Plan(NamedTuple):
    """An attention that gets a cache, what is known of its class, and of its input."""

    site: NamedModule
    adapter: Host
    input: AttentionInput


class SavedSizes(NamedTuple):
    """The sizes of an attention that had a cache when it was saved: Tm, T of a call (None: it varies), D."""

    length: int
    tokens: int | None
    width: int


@dataclass(frozen=True)
class Cached:
    """One attention that got a cache.

    length Tm, width D, cache_width Dm, heads H; out_width: D of its output (mix="heads": of its heads); input: its
    tokens and their grid; grc: with every switch set.
    """

    name: str
    host: str
    length: int
    width: int
    cache_width: int
    heads: int
    out_width: int
    input: AttentionInput
    grc: GRC
    parameters: int

    @property
    def shape(self) -> Shape:
        """The sizes for the cost formula; T = Tm where T varies."""
        tokens = self.input.tokens or self.length
        grid_tokens = self.input.grid[0] * self.input.grid[1] if self.input.grid else 0
        sizes = tokens, self.length, self.width, self.cache_width, self.heads, self.out_width
        return Shape(*sizes, rows=self.input.rows, grid_tokens=grid_tokens, lifts=self.grc.mix == "channels")


@dataclass(frozen=True)
class Skipped:
    """One attention that got no cache, and why."""

    name: str
    why: str


@dataclass(frozen=True, repr=False)
class Report:
    """The attentions that got a cache (`swapped`) or did not (`left`), and what was added to a forward of one sample.

    FLOPs (2 for a multiply-add) are computed by mnemos/ops/gated_cache/cost.py; T = Tm where T varies.
    """

    swapped: tuple[Cached, ...]
    left: tuple[Skipped, ...]

    @property
    def parameters(self) -> int:
        """Parameters added."""
        return sum(one.parameters for one in self.swapped)

    @property
    def flops(self) -> int:
        """FLOPs added to a training forward."""
        return sum(2 * training_macs(one.shape, one.grc) for one in self.swapped)

    @property
    def inference_flops(self) -> int:
        """FLOPs added to an eval() forward."""
        return sum(2 * inference_macs(one.shape, one.grc) for one in self.swapped)

    def __str__(self) -> str:
        counts = Counter[str]()  # of the attentions that one line describes
        for one in self.swapped:
            key = f"{one.host}: {one.length} slots of {one.cache_width} channels, {one.heads} heads"
            key += f", each the mean of {one.input.pool} x {one.input.pool} tokens" if one.input.pool > 1 else ""
            counts[f"{key}{', across all windows' if one.input.windows else ''}, mix={one.grc.mix}"] += 1
        total = len(self.swapped)
        lines = [f"{total} attention{'s have' if total > 1 else ' has'} a gated cache now:"]
        lines += [f"  {count} x {key}" for key, count in counts.items()]
        lines += [f"  left {one.name}: {one.why}" for one in self.left]
        if all(one.input.tokens for one in self.swapped):
            flops = f"{self.flops / 1e6:,.1f} MFLOP per training forward of a sample added"
            lines += [
                f"{self.parameters:,} parameters and {flops}",
                f"({self.inference_flops / 1e6:,.1f} MFLOP in eval)",
            ]
        else:
            lines.append(f"{self.parameters:,} parameters added; FLOPs depend on T, which varies: example= gives one")
        return "\n".join(lines)

    __repr__ = __str__  # what a notebook and the prompt of Python show


@functools.partial(near_arguments, settings=GRC)
def cache(model: nn.Module, grc: GRC | None = None, where: Where = None, example: object = None) -> Report:
    """Add a gated recurrent cache to the self-attentions of a torch.nn, timm or Hugging Face model, in place.

        report = mnemos.cache(model, mnemos.GRC(preset="paper"))      # report.swapped, report.left
        mnemos.uncache(model)                                         # the model is as it was

    Each attention gets a child module `grc` (a `HostBranch`; in a causal decoder a `DecoderBranch`, whose state is kept
    on the model's own cache). A hook mixes its output into the attention's, or with GRC(mix="heads") into its heads.
    The host's modules and parameters keep their names, so its own checkpoints still load, also with strict=True, and
    leave the caches as they are. With the gate closed (λ → −∞) the outputs are the host's; `gate_init` sets the initial
    gate. Code that torch.compile made of this model is compiled again at its next call.

    where: the attentions that get a cache: one or several patterns of module names ("encoder.*.attn"; `*` matches
    within one part of a name), or a function (name, module) -> bool. None: every attention of a known class. A pattern
    may also name other modules that map [B, T, D], or [B, height, width, D], to the same shape (a tensor, or a tuple
    that starts with it), mix their tokens and are not causal (docs/hosts.md). To find out, a copy of each is called
    with changed tokens: those of the example, or random ones where that is enough.
    example: an input of the model (a tensor, or a tuple or dict of its arguments), for models that do not declare the
    length of their sequences. The model is run on it once, in eval mode.
    Slots: `grc.length` is one number for all, a tuple with one number per stage, or "auto": the number of patches of a
    vision host, the area of Swin's windows, the reduced length of PVT's keys; 64, or the T of the example, where T
    varies. "paper": in PVT and Swin the grid of a stage, averaged in squares of 4 × 4 tokens in the first stage and of
    2 × 2 in the second; a cache of Swin then spans all windows of a sample. In other hosts it equals "auto".

    Further calls, with other settings and where=, give caches to other attentions; `uncache` removes all of them.
    Raises InputError, and leaves the model unchanged, if no attention is found, if `where` names one that has a cache,
    if a length does not fit, or if a host's forward has other arguments than its adapter expects.
    """
    return add_caches(model, GRC() if grc is None else grc, where, example)


def add_caches(
    model: nn.Module,
    grc: GRC,
    where: Where = None,
    example: object = None,
    saved_sizes: dict[str, SavedSizes] | None = None,
) -> Report:
    """Do the work of `cache`, also where the sizes of the attentions, by name, are known from a saved model."""
    # --- what cannot have a cache at all ---
    model = uncompiled(model)
    if not isinstance(model, nn.Module):
        raise InputError(f"expected a torch.nn.Module, found {_name_class(model)}; pass the model first")
    if not isinstance(grc, GRC):
        raise InputError(f"expected one mnemos.GRC(...), found {_name_class(grc)}; choose the attentions with where=")
    own = {id(one) for one in model.__dict__.get(ROSTER, ())}  # branches of earlier calls
    if foreign := [one for one in caches(model) if id(one) not in own]:
        raise InputError(
            "expected a model without gated caches, or the one that cache() was called on before, found "
            f"{len(foreign)} of another call; mnemos.uncache(model) removes those of cache()"
        )
    sharded = any(hasattr(parameter, "device_mesh") for parameter in model.parameters())
    if sharded or isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
        description = "a sharded one" if sharded else type(model).__name__
        raise InputError(
            f"expected a model that is not distributed yet, found {description}; call mnemos.cache() first"
        )

    # --- which attentions, and how an example calls them ---
    sites = list_sites(model)
    targets, skips = _choose(sites, where)
    _require_targets(targets, skips, where, model)
    readers = {site: make_reader(site.module) if adapter is None else adapter.call for site, adapter in targets.items()}
    calls, refusals = record_calls(model, readers, example)
    for site, adapter in list(targets.items()):
        if site.name in refusals:
            if adapter is None:  # the caller named it, so it is not skipped without an error
                raise InputError(f"{site.name}: {refusals[site.name]}")
            del targets[site]
            skips.append(Skipped(site.name, f"its call in the example: {refusals[site.name]}"))
    _require_targets(targets, skips, where, model)

    # --- the adapter, the input and the slots of each ---
    plans: list[Plan] = []
    adapter_of = adapters_by_class()
    for site, adapter in targets.items():
        call = calls.get(site.name)
        sizes = call if saved_sizes is None else saved_sizes[site.name]  # both have `tokens` (T) and `width` (D)
        if adapter is None:
            inside = (one.name for one in sites if one.name.startswith(f"{site.name}.") and adapter_of(one.module))
            adapter = make_adapter(site, sizes and sizes.width, next(inside, None))
            if saved_sizes is None:  # a saved model passed this test before it was saved
                probe(site, adapter, call)
        attention_input = adapter.input(site, sizes and sizes.tokens)
        if grc.length == "paper" and attention_input.paper:
            attention_input = attention_input.paper  # the grid of a stage
        plans.append(Plan(site, adapter, attention_input))
    if saved_sizes is None:
        lengths = _choose_lengths(plans, grc)
    else:
        lengths = [saved_sizes[plan.site.name].length for plan in plans]

    # --- the branches; until here the model is as it was ---
    branches: list[HostBranch] = []
    for (site, adapter, attention_input), length in zip(plans, lengths, strict=True):
        dim, out_dim, heads = adapter.sizes(site.module)
        cls = DecoderBranch if isinstance(adapter, DecoderHost) else HostBranch
        try:
            out_dim = adapter.heads_dim(site.module) if grc.mix == "heads" else out_dim
            branch = cls(adapter, attention_input, replace(grc, length=length), dim, out_dim, heads)
        except InputError as error:
            raise InputError(f"{site.name}: {error}") from None
        like: Tensor | None = next((p for p in site.module.parameters() if p.is_floating_point()), None)
        if like is not None:
            branch.to(device=like.device, dtype=like.dtype)
        branches.append(branch.train(site.module.training))
    for plan, branch in zip(plans, branches, strict=True):
        attach(plan.site, branch)
    attach_root(model, branches)

    # --- the report, and the record from which `load` and `from_pretrained` make the same caches ---
    if saved_sizes is None:  # else they were given before the model was saved
        for warning in dict.fromkeys(plan.input.warning for plan in plans if plan.input.warning):
            warnings.warn(f"mnemos.cache: {warning}", UserWarning, stacklevel=4)  # names the line that calls `cache`
    entries = [
        Cached(
            name=site.name,
            host=adapter.name,
            length=branch.cache.shape[0],
            width=branch.dim,
            cache_width=branch.cache_dim,
            heads=branch.num_heads,
            out_width=branch.out_dim,
            input=attention_input,
            grc=branch.grc,
            parameters=sum(p.numel() for p in branch.parameters()),
        )
        for (site, adapter, attention_input), branch in zip(plans, branches, strict=True)
    ]
    to_save = {  # by the names that `save` writes
        one.name.replace(f"{COMPILED}.", ""): SavedSizes(one.length, one.input.tokens, one.width)._asdict()
        for one in entries
    }
    record = model.__dict__.setdefault(RECORD, [])
    record.append({"grc": to_dict(grc), "caches": to_save})
    note_in_config(model, CONFIG_RECORDS[0], list(record))
    return Report(tuple(entries), tuple(skips))


def uncache(model: nn.Module) -> nn.Module:
    """Undo `cache`: remove the caches and their hooks. Returns the model.

    The host's own parameters keep their current values. Raises InputError if the model has no cache of `cache`.
    """
    if not detach_all(model):
        raise InputError("expected a model that mnemos.cache() was called on, found none; nothing to undo")
    for module in model.modules():
        if hasattr(config := getattr(module, "config", None), "mnemos"):
            delattr(config, "mnemos")
    return model


CONFIG_RECORDS = ("mnemos", "mnemos_linearised")  # attributes in which `cache` and `linearise` note what they did
# The model that has noted something in a configuration, by the configuration's id: models may share one.
_noted_by: WeakValueDictionary[int, Any] = WeakValueDictionary()


def note_in_config(model: Any, name: str, value: Any) -> None:
    """Note in the configuration of a model of Transformers what `mnemos.hosts.from_pretrained` makes again.

    name: of `CONFIG_RECORDS`. What another model, made from the same configuration, has noted in it stays there, and
    the modules of this one get a copy without it.
    """
    config = getattr(model, "config", None)
    if config is None or not hasattr(model, "save_pretrained"):
        return
    owner = _noted_by.get(id(config))
    owner = owner if owner is not None and owner.config is config else None
    noted = [one for one in CONFIG_RECORDS if hasattr(config, one)]
    if owner is not None and noted and not _within(owner, model):
        shared, config, owner = config, copy.copy(config), None
        for module in model.modules():
            if vars(module).get("config") is shared:
                module.config = config
    if owner is None:  # what is noted is another model's, perhaps one that is gone, or was in a file
        for one, attribute in zip(CONFIG_RECORDS, (RECORD, "linearised"), strict=True):
            if one in noted and not any(hasattr(module, attribute) for module in model.modules()):
                delattr(config, one)
    setattr(config, name, value)
    _noted_by[id(config)] = model


def _within(one: nn.Module, other: nn.Module) -> bool:
    """Whether they are one model, or one is a part of the other."""
    return any(module is other for module in one.modules()) or any(module is one for module in other.modules())


def list_sites(model: nn.Module) -> list[NamedModule]:
    """Every module with the modules above it; a module that several parents share is listed once."""
    by_name: dict[str, NamedModule] = {}
    for name, module in model.named_modules():
        parent = by_name[name.rpartition(".")[0]] if name else None
        by_name[name] = NamedModule(name, module, () if parent is None else (*parent.above, parent.module))
    return list(by_name.values())


def _choose(sites: list[NamedModule], where: Where) -> tuple[dict[NamedModule, Host | None], list[Skipped]]:
    """The attentions that get a cache, each with its adapter (None: a module that `where` names), and the others."""
    adapter_of = adapters_by_class()
    adapter_by_name = {site.name: adapter for site in sites if (adapter := adapter_of(site.module)) is not None}
    selected, without_adapter = select_sites(sites, set(adapter_by_name), where)
    targets: dict[NamedModule, Host | None] = {}
    skips: list[Skipped] = []
    for site in sites:
        adapter = adapter_by_name.get(site.name)
        if adapter is None and site.name not in without_adapter:
            continue
        has_cache = isinstance(getattr(site.module, "grc", None), HostBranch)
        reason: str | None = None
        if selected is not None and site.name not in selected:
            reason = NOT_NAMED
        elif adapter is not None:
            reason = adapter.find_obstacle(site, selected is not None)
        if reason is None and selected is None and has_cache:  # one that `where` selects is refused below
            reason = "it has a cache already"
        if reason is not None:
            skips.append(Skipped(site.name, reason))
            continue
        if has_cache:
            raise InputError(
                f"{site.name}: expected an attention without a cache, found one; leave it out of where=, or call "
                "mnemos.uncache(model) first"
            )
        if adapter is not None:
            adapter.check(site.module)
        targets[site] = adapter

    for site in find_unknown(sites, (*adapter_by_name, *without_adapter)):
        reason = f"no adapter for {type(site.module).__name__}; name it with where= if it maps [B, T, D] to [B, T, D], "
        skips.append(Skipped(site.name, f"{reason}adds no residual and is not causal; {DECODERS}"))
    return targets, skips


def select_sites(
    sites: list[NamedModule], known: set[str], where: Where, option: str = "where"
) -> tuple[set[str] | None, set[str]]:
    """The names that `where` selects (None: no selection), and those among them that no adapter knows.

    option: what the user calls it. Where a function or a pattern selects a known attention, the other modules that it
    selects are ignored: "blocks.*.attn*" does not mean the dropout next to the attention.
    """
    if where is None:
        return None, set()
    if callable(where):
        selected = {site.name for site in sites if where(site.name, site.module)}
        return selected, set() if selected & known else selected
    selected, without_adapter = set(), set()
    for pattern in [where] if isinstance(where, str) else where:
        if not isinstance(pattern, str):
            raise InputError(f"{option}: expected names of modules, found {pattern!r}; give strings")
        parts, hits = pattern.split("."), set()
        for name in (site.name for site in sites):
            name_parts = name.split(".")
            if len(parts) == len(name_parts) and all(map(fnmatch.fnmatchcase, name_parts, parts)):
                hits.add(name)
        if not hits:
            near = difflib.get_close_matches(pattern, [site.name for site in sites], 1, 0.0)
            raise InputError(
                f"{option}={pattern!r} names no module; the nearest is {''.join(near)!r} (`*` matches within one part)"
            )
        selected |= hits
        without_adapter |= set() if known & hits else hits
    return selected, without_adapter


def find_unknown(sites: list[NamedModule], known: Collection[str]) -> list[NamedModule]:
    """The modules whose class or name says "attention", except the `known` ones and modules inside or around these.

    Of nested modules it returns the innermost, because outer ones often add a residual.
    """

    def is_inside(name: str, outer: str) -> bool:
        return name == outer or name.startswith(f"{outer}.")

    def is_called_attention(site: NamedModule) -> bool:
        words = re.findall("[A-Z]+(?![a-z])|[A-Z]?[a-z]+", type(site.module).__name__)
        by_name = site.name.rpartition(".")[2] in ("attn", "attention", "self_attn", "self_attention")
        by_name = by_name and any(True for _ in site.module.children())  # a linear map or a dropout has none
        return by_name or bool({"attention", "attn", "mhsa"} & {word.lower() for word in words})

    unknown = [
        site
        for site in sites
        if site.name
        and is_called_attention(site)
        and any(True for _ in site.module.parameters())
        and not any(is_inside(site.name, name) or is_inside(name, site.name) for name in known)
    ]
    return [one for one in unknown if not any(o is not one and is_inside(o.name, one.name) for o in unknown)]


def _name_class(value: object) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else f"a {type(value).__name__}"


def _require_targets(targets: Collection[NamedModule], skips: list[Skipped], where: Where, model: nn.Module) -> None:
    """Raise InputError if no attention gets a cache, with what would help."""
    if targets:
        return
    if skips:
        first = next((one for one in skips if one.why != NOT_NAMED), skips[0])
        more = f"; {len(skips) - 1} more were left" if skips[1:] else ""
        raise InputError(f"expected a self-attention, found none: {first.name!r} was left ({first.why}){more}")
    hint = "name modules that map [B, T, D] to [B, T, D] with where="
    if where is not None:
        hint = f"where={where!r} chose nothing"
    elif any(isinstance(module, nn.Conv2d) for module in model.modules()):
        hint += "; layers of convolutions take maps [B, C, H, W], and cannot have a cache"
    raise InputError(f"expected an attention of torch.nn, timm or Hugging Face that mnemos knows, found none; {hint}")


def _choose_lengths(plans: list[Plan], grc: GRC) -> list[int]:
    """Tm of each attention. A stage is all attentions of one width and number of tokens."""
    stage_of = [(plan.adapter.sizes(plan.site.module)[0], plan.input.tokens) for plan in plans]
    stages = list(dict.fromkeys(stage_of))
    setting = grc.length
    if isinstance(setting, tuple) and len(setting) != len(stages):
        raise InputError(f"expected one cache length for each of {len(stages)} stages, found {len(setting)}: {setting}")
    lengths = []
    for stage, plan in zip(stage_of, plans, strict=True):
        of_stage = setting[stages.index(stage)] if isinstance(setting, tuple) else setting
        length = plan.input.slots if isinstance(of_stage, str) else of_stage
        if length is None:
            raise InputError(
                f'{plan.site.name}: GRC(length="paper"): expected tokens of a known grid, found {plan.input.tokens} '
                "tokens; use square images, or give GRC(length=) as numbers"
            )
        if plan.input.limit is not None and length > plan.input.limit:
            raise InputError(
                f"{plan.site.name}: expected {plan.input.limit} slots at most, found {length}; lower GRC(length=)"
            )
        lengths.append(length)
    return lengths
