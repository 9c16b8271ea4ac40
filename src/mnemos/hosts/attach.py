"""cache(model) and uncache(model): add a gated cache to every self-attention of an existing model, and remove it.

`apply` is the whole story: which attentions, by their class (`adapters`) or by name (`named`); the sizes of their
caches; a branch for each (`branch`), which hooks mix into the attention's output (`hooks`); a report.
"""

import difflib
import fnmatch
import re
import warnings
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import Tensor, nn

from mnemos._compat import COMPILED
from mnemos.config import to_dict
from mnemos.memory.gated_cache import GRC, caches
from mnemos.modes import uncompiled
from mnemos.ops.gated_cache import Windows
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


class SavedSizes(NamedTuple):
    """The sizes of an attention that had a cache when it was saved: Tm, T of a call (None: it varies), D."""

    length: int
    tokens: int | None
    width: int


@dataclass(frozen=True)
class Cached:
    """One attention that got a cache.

    length Tm, width D, cache_width Dm, heads H; tokens: T of a call, None if it varies; out_width: D of its output
    (mix="heads": of its heads); prefix: number of class tokens in front; grid: (height, width) of the other tokens;
    rows: rows of its batch per sample (Swin: windows); pool: side of the squares of tokens that are averaged to one
    slot; windows: those that the cache spans together (length="paper" in Swin: tokens is then the number in all
    windows); grc: with every switch set.
    """

    name: str
    host: str
    length: int
    width: int
    cache_width: int
    heads: int
    tokens: int | None
    out_width: int
    prefix: int
    grid: tuple[int, int] | None
    rows: int
    pool: int
    windows: Windows | None
    grc: GRC
    parameters: int

    @property
    def shape(self) -> Shape:
        """The sizes for the cost formula; T = Tm where T varies."""
        tokens = self.tokens or self.length
        grid = self.grid[0] * self.grid[1] if self.grid else 0
        sizes = tokens, self.length, self.width, self.cache_width, self.heads, self.out_width
        return Shape(*sizes, rows=self.rows, grid_tokens=grid, lifts=self.grc.mix == "channels")


@dataclass(frozen=True)
class Skipped:
    """One attention that got no cache, and why."""

    name: str
    why: str


@dataclass(frozen=True, repr=False)
class Report:
    """Attentions swapped and left, parameters added, and FLOPs added to a training and to an eval() forward per sample.

    A multiply-add is 2 FLOPs. They are computed by mnemos/ops/gated_cache/cost.py from the T of each attention (T = Tm
    where it varies), for a batch of one sample: what a batch shares counts in full.
    """

    swapped: tuple[Cached, ...]
    left: tuple[Skipped, ...]

    @property
    def parameters(self) -> int:
        """Parameters added."""
        return sum(one.parameters for one in self.swapped)

    @property
    def flops(self) -> int:
        """FLOPs added to a training forward of one sample."""
        return sum(2 * training_macs(one.shape, one.grc) for one in self.swapped)

    @property
    def inference_flops(self) -> int:
        """FLOPs added to an eval() forward of one sample."""
        return sum(2 * inference_macs(one.shape, one.grc) for one in self.swapped)

    def __str__(self) -> str:
        kinds: dict[str, int] = {}
        for one in self.swapped:
            key = f"{one.host}: {one.length} slots of {one.cache_width} channels, {one.heads} heads"
            key += f", each the mean of {one.pool} x {one.pool} tokens" if one.pool > 1 else ""
            key += ", across all windows" if one.windows else ""
            key += f", mix={one.grc.mix}"
            kinds[key] = kinds.get(key, 0) + 1
        count = len(self.swapped)
        lines = [f"{count} attention{'s have' if count > 1 else ' has'} a gated cache now:"]
        lines += [f"  {count} x {key}" for key, count in kinds.items()]
        lines += [f"  left {one.name}: {one.why}" for one in self.left]
        if all(one.tokens for one in self.swapped):
            flops = f"{self.flops / 1e6:,.1f} MFLOP per training forward of a sample added"
            lines.append(f"{self.parameters:,} parameters and {flops}")
            lines.append(f"({self.inference_flops / 1e6:,.1f} MFLOP in eval)")
        else:
            lines.append(f"{self.parameters:,} parameters added; FLOPs depend on T, which varies: example= gives one")
        return "\n".join(lines)

    __repr__ = __str__  # what a notebook and the prompt of Python show


def cache(model: nn.Module, grc: GRC | None = None, where: Where = None, example: object = None) -> Report:
    """Add a gated recurrent cache to the self-attentions of a torch.nn, timm or Hugging Face model, in place.

        report = mnemos.cache(model, mnemos.GRC(preset="paper"))      # report.swapped, report.left
        mnemos.uncache(model)                                         # the model is as it was

    Each attention gets a child module `grc` (a `HostBranch`; in a causal decoder a `DecoderBranch`, whose state is kept
    on the model's own cache). A hook mixes its output into the attention's, or with GRC(mix="heads") into its heads.
    The host's modules and parameters keep their names, so its own checkpoints still load, also with strict=True; a
    checkpoint without caches leaves the caches as they are. With the gate closed (λ → −∞) the outputs are the host's;
    `gate_init` sets the initial gate. Code that torch.compile made of this model is compiled again at its next call.

    where: the attentions that get a cache: one or several patterns of module names ("encoder.*.attn"; `*` matches
    within one part of a name), or a function (name, module) -> bool. None: every attention of a known class. A pattern
    may also name other modules that map [B, T, D], or [B, height, width, D], to the same shape (a tensor, or a tuple
    that starts with it); a padding mask is recognised by its name (`mask`, `attention_mask`, `key_padding_mask`, …).
    Such modules must mix their tokens and not be causal, because a shared cache holds what all tokens of a row wrote,
    and their first axis must be the batch. To find out, a copy of each is called with changed tokens: those of the
    example, or random ones where that is enough.
    example: an input of the model (a tensor, or a tuple or dict of its arguments), for models that do not declare the
    length of their sequences. The model is run on it once, in eval mode.
    Slots: `grc.length` is one number for all, a tuple with one number per stage, or "auto": the number of patches of a
    vision host, the area of Swin's windows, the reduced length of PVT's keys; 64, or the T of the example, where T
    varies. "paper": in PVT and Swin the grid of a stage, averaged in squares of 4 × 4 tokens in the first stage and of
    2 × 2 in the second; a cache of Swin then spans all windows of a sample. In other hosts it equals "auto".

    Further calls on the same model, with other settings and where=, give caches to other attentions; `uncache` removes
    all of them.

    Cost: less than a second for 86M parameters. Raises InputError, and leaves the model unchanged, if no attention
    is found, if `where` names one that has a cache, if a length does not fit, or if a host's forward has other
    arguments than its adapter expects.
    """
    return apply(model, GRC() if grc is None else grc, where, example)


def apply(
    model: nn.Module, grc: GRC, where: Where = None, example: object = None, saved: dict[str, SavedSizes] | None = None
) -> Report:
    """Do the work of `cache`. saved: the sizes of the attentions by name, where they are known from a saved model."""
    # --- what cannot have a cache at all ---
    model = uncompiled(model)
    if not isinstance(model, nn.Module):
        raise InputError(
            f"expected a torch.nn.Module to give a cache to, found {_name_class(model)}; pass the model first"
        )
    if not isinstance(grc, GRC):
        raise InputError(
            f"expected one mnemos.GRC(...) for all attentions, found {_name_class(grc)}; choose the attentions with "
            "where="
        )
    own = {id(one) for one in model.__dict__.get(ROSTER, ())}
    if foreign := [one for one in caches(model) if id(one) not in own]:
        raise InputError(
            "expected a model without gated caches, or the one that cache() was called on before, found "
            f"{len(foreign)} of another call; mnemos.uncache(model) removes those of cache()"
        )
    sharded = any(hasattr(parameter, "device_mesh") for parameter in model.parameters())
    if sharded or isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
        found = "a sharded one" if sharded else type(model).__name__
        raise InputError(
            f"expected a model that is not distributed yet, found {found}; call mnemos.cache() first, then distribute "
            "it with its caches"
        )

    # --- which attentions, and how an example calls them ---
    sites = list_sites(model)
    chosen, skipped = _choose(sites, where)
    _refuse_nothing(chosen, skipped, where, model)
    reads = {site: make_reader(site.module) if adapter is None else adapter.call for site, adapter in chosen.items()}
    calls, refused = record_calls(model, reads, example)
    for site, adapter in list(chosen.items()):
        if site.name in refused:
            if adapter is None:  # it was named: it is not left in silence
                raise InputError(f"{site.name}: {refused[site.name]}")
            del chosen[site]
            skipped.append(Skipped(site.name, f"its call in the example: {refused[site.name]}"))
    _refuse_nothing(chosen, skipped, where, model)

    # --- the adapter, the input and the slots of each ---
    planned: list[tuple[NamedModule, Host, AttentionInput]] = []
    for site, adapter in chosen.items():
        shown = calls.get(site.name) if saved is None else saved.get(site.name)
        if adapter is None:
            adapter = make_adapter(site, shown and shown.width)
            if saved is None:  # else it was tested before it was saved
                probe(site, adapter, calls.get(site.name))
        declared = adapter.input(site, shown and shown.tokens)
        planned.append((site, adapter, declared.paper if grc.length == "paper" and declared.paper else declared))
    lengths = _choose_lengths(planned, grc) if saved is None else [saved[site.name].length for site in chosen]

    # --- the branches; until here the model is as it was ---
    branches: list[HostBranch] = []
    for (site, adapter, declared), length in zip(planned, lengths, strict=True):
        dim, out_dim, heads = adapter.sizes(site.module)
        cls = DecoderBranch if isinstance(adapter, DecoderHost) else HostBranch
        try:
            out_dim = adapter.heads_dim(site.module) if grc.mix == "heads" else out_dim
            branch = cls(adapter, declared, replace(grc, length=length), dim, out_dim, heads)
        except InputError as error:
            raise InputError(f"{site.name}: {error}") from None
        like: Tensor | None = next((p for p in site.module.parameters() if p.is_floating_point()), None)
        if like is not None:
            branch.to(device=like.device, dtype=like.dtype)
        branches.append(branch.train(site.module.training))
    for (site, _, _), branch in zip(planned, branches, strict=True):
        attach(site, branch)
    attach_root(model, branches)

    # --- the report, and the record from which `load` and `from_pretrained` make the same caches ---
    for warning in dict.fromkeys(declared.warning for _, _, declared in planned if declared.warning):
        warnings.warn(f"mnemos.cache: {warning}", UserWarning, stacklevel=3)
    cached = []
    for (site, adapter, one), branch in zip(planned, branches, strict=True):
        slots, added = branch.cache.shape[0], sum(p.numel() for p in branch.parameters())
        widths = branch.dim, branch.cache_dim, branch.num_heads, one.tokens, branch.out_dim
        layout = one.prefix, one.grid, one.rows, one.pool, one.windows
        cached.append(Cached(site.name, adapter.name, slots, *widths, *layout, branch.grc, added))
    sizes = {
        one.name.replace(f"{COMPILED}.", ""): SavedSizes(one.length, one.tokens, one.width)._asdict()  # as `save` names
        for one in cached
    }
    record = model.__dict__.setdefault(RECORD, [])
    record.append({"grc": to_dict(grc), "caches": sizes})
    if hasattr(model, "save_pretrained") and getattr(model, "config", None) is not None:
        model.config.mnemos = {**record[0], "more": record[1:]} if record[1:] else record[0]  # type: ignore[union-attr]
    return Report(tuple(cached), tuple(skipped))


def uncache(model: nn.Module) -> nn.Module:
    """Undo `cache`: remove the caches and their hooks. Returns the model.

    The host's own parameters keep their current values. Raises InputError if the model has no cache of `cache`.
    """
    if not detach_all(model):
        raise InputError(
            "expected a model that mnemos.cache() was called on, found none of its caches; nothing to undo"
        )
    for module in model.modules():
        if hasattr(config := getattr(module, "config", None), "mnemos"):
            delattr(config, "mnemos")
    return model


def list_sites(model: nn.Module) -> list[NamedModule]:
    """Every module with the modules above it; a module that several parents share is listed once."""
    by_name: dict[str, NamedModule] = {}
    for name, module in model.named_modules():
        parent = by_name[name.rpartition(".")[0]] if name else None
        by_name[name] = NamedModule(name, module, () if parent is None else (*parent.above, parent.module))
    return list(by_name.values())


def _choose(sites: list[NamedModule], where: Where) -> tuple[dict[NamedModule, Host | None], list[Skipped]]:
    """The attentions that get a cache, each with its adapter (None: a module that `where` names), and the others."""
    find = adapters_by_class()
    adapters = {site.name: adapter for site in sites if (adapter := find(site.module)) is not None}
    named, others = select_sites(sites, set(adapters), where)
    chosen: dict[NamedModule, Host | None] = {}
    skipped: list[Skipped] = []
    for site in sites:
        adapter = adapters.get(site.name)
        if adapter is None and site.name not in others:
            continue
        carrier = getattr(site.module, adapter.carrier) if adapter is not None and adapter.carrier else site.module
        has_cache = isinstance(getattr(carrier, "grc", None), HostBranch)
        reason: str | None = None
        if adapter is not None:
            if named is not None and site.name not in named:
                reason = NOT_NAMED
            else:
                reason = adapter.find_obstacle(site, named is not None)
            if reason is None and named is None and has_cache:
                reason = "it has a cache already"
        if reason is not None:
            skipped.append(Skipped(site.name, reason))
            continue
        if has_cache:
            raise InputError(
                f"{site.name}: expected an attention without a cache, found one that has a cache already; leave it out "
                "of where=, or call mnemos.uncache(model) first"
            )
        if adapter is not None:
            adapter.check(site.module)
        chosen[site] = adapter

    # --- modules that are called attention and that no adapter knows, neither in a known one nor around one. Of several
    # inside one another the innermost: the outer ones often add a residual, which no cache replaces ---
    known = {*adapters, *others}
    unknown = [
        site
        for site in sites
        if site.name
        and is_called_attention(site)
        and any(True for _ in site.module.parameters())
        and not any(_is_inside(site.name, name) or _is_inside(name, site.name) for name in known)
    ]
    for site in unknown:
        if not any(other is not site and _is_inside(other.name, site.name) for other in unknown):
            reason = f"no adapter for {type(site.module).__name__}; name it with where= if it maps [B, T, D] to "
            reason += f"[B, T, D], adds no residual and is not causal; {DECODERS}"
            skipped.append(Skipped(site.name, reason))
    return chosen, skipped


def select_sites(sites: list[NamedModule], known: set[str], where: Where) -> tuple[set[str] | None, set[str]]:
    """The names that `where` selects (None: no selection), and those among them that no adapter knows.

    If a function or a pattern selects at least one known attention, the other modules it selects are ignored:
    "blocks.*.attn*" does not mean the dropout next to the attention.
    """
    if where is None:
        return None, set()
    if callable(where):
        chosen = {site.name for site in sites if where(site.name, site.module)}
        return chosen, set() if chosen & known else chosen
    selected: set[str] = set()
    others: set[str] = set()
    for pattern in [where] if isinstance(where, str) else where:
        parts, hits = pattern.split("."), set()
        for name in (site.name for site in sites):
            of_name = name.split(".")
            if len(parts) == len(of_name) and all(map(fnmatch.fnmatchcase, of_name, parts)):
                hits.add(name)
        if not hits:
            near = difflib.get_close_matches(pattern, [site.name for site in sites], 1, 0.0)
            raise InputError(
                f"where={pattern!r} names no module; the nearest is {''.join(near)!r} (`*` matches within one part)"
            )
        selected |= hits
        others |= set() if known & hits else hits
    return selected, others


def is_called_attention(site: NamedModule) -> bool:
    """Whether a module is called attention, by its class or its name."""
    words = re.findall("[A-Z]+(?![a-z])|[A-Z]?[a-z]+", type(site.module).__name__)
    named = site.name.rpartition(".")[2] in ("attn", "attention", "self_attn", "self_attention")
    named = named and any(True for _ in site.module.children())  # no linear map or dropout
    return named or bool({"attention", "attn", "mhsa"} & {word.lower() for word in words})


def _is_inside(name: str, outer: str) -> bool:
    return name == outer or name.startswith(f"{outer}.")


def _name_class(value: object) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else f"a {type(value).__name__}"


def _refuse_nothing(chosen: Collection[NamedModule], skipped: list[Skipped], where: Where, model: nn.Module) -> None:
    """Raise InputError if no attention is chosen, with what would help."""
    if chosen:
        return
    if skipped:
        first = next((one for one in skipped if one.why != NOT_NAMED), skipped[0])
        more = f"; {len(skipped) - 1} more were left" if skipped[1:] else ""
        raise InputError(
            f"expected a self-attention for a cache, found none: {first.name!r} was left ({first.why}){more}"
        )
    hint = "name modules that map [B, T, D] to [B, T, D] with where="
    if where is not None:
        hint = f"where={where!r} chose nothing"
    elif any(isinstance(module, nn.Conv2d) for module in model.modules()):
        hint += "; layers of convolutions take maps [B, C, H, W], and cannot have a cache"
    raise InputError(f"expected an attention of torch.nn, timm or Hugging Face that mnemos knows, found none; {hint}")


def _choose_lengths(planned: list[tuple[NamedModule, Host, AttentionInput]], grc: GRC) -> list[int]:
    """Tm of each attention. A stage is all attentions of one width and number of tokens."""
    keys = [(adapter.sizes(site.module)[0], declared.tokens) for site, adapter, declared in planned]
    stages = list(dict.fromkeys(keys))
    wanted = grc.length
    if isinstance(wanted, tuple) and len(wanted) != len(stages):
        raise InputError(f"expected one cache length for each of {len(stages)} stages, found {len(wanted)}: {wanted}")
    lengths = []
    for key, (site, _, declared) in zip(keys, planned, strict=True):
        asked = wanted[stages.index(key)] if isinstance(wanted, tuple) else wanted
        length = declared.slots if isinstance(asked, str) else asked
        if length is None:
            raise InputError(
                f'{site.name}: GRC(length="paper"): expected tokens of a known grid, to average squares of '
                f"{declared.pool} x {declared.pool}, found {declared.tokens} tokens; use square images, or give "
                "GRC(length=) as numbers"
            )
        if declared.limit is not None and length > declared.limit:
            raise InputError(
                f"{site.name}: expected {declared.limit} slots at most, one per token, found {length}; lower "
                "GRC(length=)"
            )
        lengths.append(length)
    return lengths
