"""cache(model) and uncache(model): add a gated cache to every self-attention of an existing model, and remove it."""

import difflib
import fnmatch
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from torch import Tensor, nn

from mnemos._compat import COMPILED
from mnemos.config import to_dict
from mnemos.memory.gated_cache import GRC, caches
from mnemos.modes import uncompiled
from mnemos.types import InputError

from .branch import HostBranch
from .custom import make_host, make_reader
from .decoder_branch import DecoderBranch
from .hooks import RECORD, ROSTER, attach, attach_root, detach_all, stop_nesting
from .host import AttentionInput, DecoderHost, Host, Site
from .known_hosts import hosts as registered_hosts
from .masks import DECODERS
from .probe import Seen, probe, record_calls
from .report import Left, Report, Swapped

Where = str | Sequence[str] | Callable[[str, nn.Module], bool] | None
_NOT_NAMED = "not named by where="


class Known(NamedTuple):
    """The sizes of an attention that had a cache when it was saved: Tm, T of a call (None: it varies), D."""

    length: int
    tokens: int | None
    width: int


class _Planned(NamedTuple):
    site: Site
    host: Host
    place: AttentionInput
    length: int


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
    model: nn.Module, grc: GRC, where: Where = None, example: object = None, known: dict[str, Known] | None = None
) -> Report:
    """Do the work of `cache`. known: the sizes of the attentions by name, where they are known from a saved model."""
    model = uncompiled(model)
    _check(model, grc)
    plans, left = _plan(model, grc, where, example, known)
    branches = [_make_branch(plan, grc) for plan in plans]
    for plan, branch in zip(plans, branches, strict=True):
        attach(plan.site, branch)
    attach_root(model, branches)
    stop_nesting(model)
    for warning in dict.fromkeys(plan.place.warning for plan in plans if plan.place.warning):
        warnings.warn(f"mnemos.cache: {warning}", UserWarning, stacklevel=3)
    report = Report(tuple(_describe(*both) for both in zip(plans, branches, strict=True)), tuple(left))
    _record(model, grc, report)
    return report


def uncache(model: nn.Module) -> nn.Module:
    """Undo `cache`: remove the caches and their hooks. Returns the model.

    The host's own parameters keep their current values. Raises InputError if the model has no cache of `cache`.
    """
    if not detach_all(model):
        raise InputError(
            "expected a model that mnemos.cache() was called on, found none of its caches; nothing to undo"
        )
    for module in model.modules():
        if (before := module.__dict__.pop("_nested_before_cache", None)) is not None:
            module.use_nested_tensor = before
        config = getattr(module, "config", None)
        if hasattr(config, "mnemos"):
            delattr(config, "mnemos")
    return model


def _check(model: nn.Module, grc: GRC) -> None:
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
    if found := [one for one in caches(model) if id(one) not in own]:
        raise InputError(
            "expected a model without gated caches, or the one that cache() was called on before, found "
            f"{len(found)} of another call; mnemos.uncache(model) removes those of cache()"
        )
    sharded = any(hasattr(parameter, "device_mesh") for parameter in model.parameters())
    if sharded or isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
        kind = "a sharded one" if sharded else type(model).__name__
        raise InputError(
            f"expected a model that is not distributed yet, found {kind}; call mnemos.cache() first, then distribute "
            "it with its caches"
        )


def _name_class(value: object) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else f"a {type(value).__name__}"


def list_sites(model: nn.Module) -> Iterable[Site]:
    """Every module with the modules above it; a module that several parents share is listed once."""

    def below(module: nn.Module, name: str, above: tuple[nn.Module, ...]) -> Iterable[Site]:
        yield Site(name, module, above)
        for part, child in module.named_children():
            yield from below(child, f"{name}.{part}" if name else part, (*above, module))

    seen: set[int] = set()
    for site in below(model, "", ()):
        if id(site.module) not in seen:  # layers that share a module share its cache
            seen.add(id(site.module))
            yield site


def _plan(
    model: nn.Module, grc: GRC, where: Where, example: object, known: dict[str, Known] | None
) -> tuple[list[_Planned], list[Left]]:
    """Which attentions get a cache and which do not. Changes nothing."""
    sites = list(list_sites(model))
    known_hosts = registered_hosts()
    hosts = {site.name: host for site in sites if (host := find_host(site.module, known_hosts)) is not None}
    named, others = select_sites(sites, set(hosts), where)
    chosen: list[Site] = []
    left = []
    for site in sites:
        host = hosts.get(site.name)
        if host is None:
            chosen += [site] if site.name in others else []
        elif named is not None and site.name not in named:
            left.append(Left(site.name, _NOT_NAMED))
        elif (why := host.left(site) or (host.uneven(site.module) if named is None else None)) is not None:
            left.append(Left(site.name, why))
        elif named is None and _has_cache(site, host):
            left.append(Left(site.name, "it has a cache already"))
        else:
            host.check(site.module)
            chosen.append(site)
    if twice := next((site for site in chosen if _has_cache(site, hosts.get(site.name))), None):
        raise InputError(
            f"{twice.name}: expected an attention without a cache, found one that has a cache already; leave it out of "
            "where=, or call mnemos.uncache(model) first"
        )
    left += _list_unknown(sites, set(hosts) | others)
    if not chosen:
        raise InputError(_explain_nothing(left, where, model))
    reads = {site: hosts[site.name].call if site.name in hosts else make_reader(site.module) for site in chosen}
    called, refused = record_calls(model, reads, example)
    for site in [site for site in chosen if site.name in refused]:
        if site.name not in hosts:  # it was named: it is not left in silence
            raise InputError(f"{site.name}: {refused[site.name]}")
        chosen.remove(site)
        left.append(Left(site.name, f"its call in the example: {refused[site.name]}"))
    if not chosen:
        raise InputError(_explain_nothing(left, where, model))
    seen: Mapping[str, Known | Seen] = called if known is None else known
    placed = []
    for site in chosen:
        found = seen.get(site.name)
        host = hosts.get(site.name)
        if host is None:
            host = make_host(site, found and found.width)
            if known is None:  # else it was tested before it was saved
                probe(site, host, called.get(site.name))
        place = host.place(site, found and found.tokens)
        placed.append((site, host, place.paper if grc.length == "paper" and place.paper else place))
    lengths = _choose_lengths(placed, grc) if known is None else [known[site.name].length for site in chosen]
    return [_Planned(*each, n) for each, n in zip(placed, lengths, strict=True)], left


def _has_cache(site: Site, host: Host | None) -> bool:
    carrier = getattr(site.module, host.carrier) if host is not None and host.carrier else site.module
    return isinstance(getattr(carrier, "grc", None), HostBranch)


def find_host(module: nn.Module, known: Sequence[Host]) -> Host | None:
    """The adapter of a module's class; None: it is of no known class."""
    return next((host for host in known if (cls := host.cls()) is not None and isinstance(module, cls)), None)


def select_sites(sites: list[Site], hosts: set[str], where: Where) -> tuple[set[str] | None, set[str]]:
    """The names that `where` selects (None: no selection), and those among them that no adapter knows.

    If a function or a pattern selects at least one known attention, the other modules it selects are ignored:
    "blocks.*.attn*" does not mean the dropout next to the attention.
    """
    if where is None:
        return None, set()
    names = [site.name for site in sites]
    if callable(where):
        chosen = {site.name for site in sites if where(site.name, site.module)}
        return chosen, set() if chosen & hosts else chosen
    found: set[str] = set()
    others: set[str] = set()
    for pattern in [where] if isinstance(where, str) else where:
        hits = [name for name in names if _is_match(name, pattern)]
        if not hits:
            near = difflib.get_close_matches(pattern, names, 1, 0.0)
            raise InputError(
                f"where={pattern!r} names no module; the nearest is {''.join(near)!r} (`*` matches within one part)"
            )
        found |= set(hits)
        others |= set() if hosts & set(hits) else set(hits)
    return found, others


def _is_match(name: str, pattern: str) -> bool:
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatch.fnmatchcase, parts, wanted))


def _list_unknown(sites: list[Site], known: set[str]) -> list[Left]:
    """Modules that are called attention, by their class or their name, that no adapter knows.

    Of several inside one another the innermost: the outer ones often add a residual, which no cache replaces. A module
    with a known attention inside, or inside of one, is not listed.
    """
    found = [
        site
        for site in sites
        if site.name
        and is_called_attention(site)
        and any(True for _ in site.module.parameters())
        and not any(_is_inside(site.name, name) or _is_inside(name, site.name) for name in known)
    ]
    return [
        Left(
            site.name,
            f"no adapter for {type(site.module).__name__}; name it with where= if it maps [B, T, D] to [B, T, D], adds "
            f"no residual and is not causal; {DECODERS}",
        )
        for site in found
        if not any(other is not site and _is_inside(other.name, site.name) for other in found)
    ]


def is_called_attention(site: Site) -> bool:
    """Whether a module is called attention, by its class or its name."""
    words = re.findall("[A-Z]+(?![a-z])|[A-Z]?[a-z]+", type(site.module).__name__)
    named = site.name.rpartition(".")[2] in ("attn", "attention", "self_attn", "self_attention")
    named = named and any(True for _ in site.module.children())  # no linear map or dropout
    return named or bool({"attention", "attn", "mhsa"} & {word.lower() for word in words})


def _is_inside(name: str, outer: str) -> bool:
    return name == outer or name.startswith(f"{outer}.")


def _explain_nothing(left: list[Left], where: Where, model: nn.Module) -> str:
    if left:
        first = next((one for one in left if one.why != _NOT_NAMED), left[0])
        more = f"; {len(left) - 1} more were left" if left[1:] else ""
        return f"expected a self-attention for a cache, found none: {first.name!r} was left ({first.why}){more}"
    hint = "name modules that map [B, T, D] to [B, T, D] with where="
    if where is not None:
        hint = f"where={where!r} chose nothing"
    elif any(isinstance(module, nn.Conv2d) for module in model.modules()):
        hint += "; layers of convolutions take maps [B, C, H, W], and cannot have a cache"
    return f"expected an attention of torch.nn, timm or Hugging Face that mnemos knows, found none; {hint}"


def _choose_lengths(placed: list[tuple[Site, Host, AttentionInput]], grc: GRC) -> list[int]:
    """Tm of each attention. A stage is all attentions of one width and number of tokens."""
    keys = [(host.sizes(site.module)[0], place.tokens) for site, host, place in placed]
    stages = list(dict.fromkeys(keys))
    wanted = grc.length
    if isinstance(wanted, tuple) and len(wanted) != len(stages):
        raise InputError(f"expected one cache length for each of {len(stages)} stages, found {len(wanted)}: {wanted}")
    lengths = []
    for key, (site, _, place) in zip(keys, placed, strict=True):
        given = wanted[stages.index(key)] if isinstance(wanted, tuple) else wanted
        length = place.slots if isinstance(given, str) else given
        if length is None:
            raise InputError(
                f'{site.name}: GRC(length="paper"): expected tokens of a known grid, to average squares of '
                f"{place.pool} x {place.pool}, found {place.tokens} tokens; use square images, or give GRC(length=) as "
                "numbers"
            )
        if place.limit is not None and length > place.limit:
            raise InputError(
                f"{site.name}: expected {place.limit} slots at most, one per token, found {length}; lower GRC(length=)"
            )
        lengths.append(length)
    return lengths


def _make_branch(plan: _Planned, grc: GRC) -> HostBranch:
    dim, out_dim, heads = plan.host.sizes(plan.site.module)
    try:
        if grc.mix == "heads":
            out_dim = plan.host.heads_dim(plan.site.module)
        kind = DecoderBranch if isinstance(plan.host, DecoderHost) else HostBranch
        branch = kind(plan.host, plan.place, replace(grc, length=plan.length), dim, out_dim, heads)
    except InputError as error:
        raise InputError(f"{plan.site.name}: {error}") from None
    like: Tensor | None = next((p for p in plan.site.module.parameters() if p.is_floating_point()), None)
    if like is not None:
        branch.to(device=like.device, dtype=like.dtype)
    return branch.train(plan.site.module.training)


def _describe(plan: _Planned, branch: HostBranch) -> Swapped:
    return Swapped(
        plan.site.name,
        plan.host.name,
        plan.length,
        branch.dim,
        branch.cache_dim,
        branch.num_heads,
        plan.place.tokens,
        branch.out_dim,
        plan.place.prefix,
        plan.place.grid,
        plan.place.rows,
        plan.place.pool,
        plan.place.windows,
        branch.grc,
        sum(p.numel() for p in branch.parameters()),
    )


def _record(model: object, grc: GRC, report: Report) -> None:
    """Record what `load` needs; for `from_pretrained`, also in the configuration, which Hugging Face models save."""
    found = {one.name: Known(one.length, one.tokens, one.width)._asdict() for one in report.swapped}
    found = {name.replace(f"{COMPILED}.", ""): one for name, one in found.items()}  # as `save` names the tensors
    record = model.__dict__.setdefault(RECORD, [])
    record.append({"grc": to_dict(grc), "caches": found})
    config = getattr(model, "config", None)
    if hasattr(model, "save_pretrained") and config is not None:
        config.mnemos = {**record[0], "more": record[1:]} if record[1:] else record[0]
