"""The hooks through which a branch takes part in a host's forward.

They are plain functions that hold no module, so a deep copy of a cached model uses its own branches, and a cached
model can be pickled.
"""

import threading
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from mnemos._compat import compiled_again, compiled_as_before, forget_compiled, is_replica, pre_hooks_of
from mnemos.memory.gated_cache import GatedCache, StoredCache, begin_forward, end_forward, promote, recomputing, stored
from mnemos.types import InputError

from .branch import HostBranch
from .decoder_branch import DecoderBranch, mix_decoder
from .grids import NOTES, Grids, find_own_reader, find_reader_above
from .host import Call, DecoderHost, Site, reach

_HANDLES = "_mnemos_handles"  # attribute of a module with our hooks: their handles, by which they are removed
ROSTER = "gated_caches"  # attribute of the model given to `cache`: its branches, in order
_PART = "_mnemos_part"  # attribute of a module between the model and a branch: a `_Part`
RECORD = "_mnemos_record"  # attribute of the same model: the settings of each call of `cache`, as they are saved


class _Noted:
    """A call of an attention that is mixed inside it. mixed: whether it was. position: the convolution's output."""

    def __init__(self, module: Any, args: tuple, kwargs: dict) -> None:
        self.module, self.args, self.kwargs, self.mixed = module, args, kwargs, False
        self.position: tuple[Call, Tensor] | None = None


class _Present(threading.local):
    """The noted calls that are being made, each inside the one before it. Threads may share a model."""

    calls: tuple[_Noted, ...] = ()


_present = _Present()


def attach(site: Site, branch: HostBranch) -> None:
    """Make `branch` the child `grc` of a host's attention (or of its carrier), and mix its output in."""
    carrier = module = site.module
    if branch.host.carrier:
        carrier = getattr(module, branch.host.carrier)
        keep_handle(module, module.register_forward_pre_hook(_note_call, with_kwargs=True))
        keep_handle(carrier, carrier.register_forward_pre_hook(_mix_input))
        keep_handle(module, module.register_forward_hook(_forget_call, always_call=True))
    elif branch.before_projection:
        keep_handle(module, module.register_forward_pre_hook(_note_heads, with_kwargs=True))
        _hook_projection(reach(module, branch.host.projection or ""))
        keep_handle(module, module.register_forward_hook(_end_heads))
        keep_handle(module, module.register_forward_hook(_forget_call, always_call=True))
    else:
        mix = mix_decoder if isinstance(branch, DecoderBranch) else _mix_output
        keep_handle(module, module.register_forward_hook(mix, with_kwargs=True))
    carrier.grc = branch
    if branch.needs_grid:
        follow_grid(site, branch)
    _attach_parts(site, branch)


def follow_grid(site: Site, branch: HostBranch) -> None:
    """Let a branch know the grid of each call's tokens: from the call, or from a module above that shows it."""
    branch.own_grid = find_own_reader(site.module)
    if branch.own_grid is not None:
        return
    found = find_reader_above(site, branch.padded is not None or branch.windows is not None)
    if found is None:
        return
    above, reader = found
    if NOTES not in above.__dict__:
        setattr(above, NOTES, (Grids(), reader))
        if isinstance(above, nn.Conv2d):
            keep_handle(above, above.register_forward_hook(_note_output))
        else:
            keep_handle(above, above.register_forward_pre_hook(_note_grid, with_kwargs=True))
    branch.grids = getattr(above, NOTES)[0]


def attach_root(model: nn.Module, branches: Sequence[StoredCache]) -> None:
    """Begin and end the forwards of all branches with the model's own forward."""
    if ROSTER in model.__dict__:  # a further call of `cache`
        setattr(model, ROSTER, stored(model))
        forget_compiled()
        return
    setattr(model, ROSTER, branches)
    keep_handle(model, model.register_forward_pre_hook(_begin))
    keep_handle(model, model.register_forward_hook(_end))
    keep_handle(model, model.register_forward_hook(_fail, always_call=True))
    keep_handle(model, model.register_load_state_dict_post_hook(_report_missing))
    for module in _list_changed(model):
        compiled_again(module)


class _Part:
    """The branches below a part of a model, and whether a call of the part alone has begun their forward."""

    def __init__(self) -> None:
        self.branches: list[HostBranch] = []
        self.began = False


def _attach_parts(site: Site, branch: HostBranch) -> None:
    """Begin and end the forward of a branch also with a part of the model that is called alone.

    Of parts inside one another the outermost that is called does it. Layers that share a branch, as in ALBERT, then all
    read one cache, as they do in a call of the whole model.
    """
    for module in site.above[1:]:
        part = getattr(module, _PART, None)
        if part is None:
            setattr(module, _PART, part := _Part())
            keep_handle(module, module.register_forward_pre_hook(_begin_part))
            keep_handle(module, module.register_forward_hook(_end_part))
            keep_handle(module, module.register_forward_hook(_fail_part, always_call=True))
        part.branches.append(branch)


def stop_nesting(model: nn.Module) -> None:
    """Stop PyTorch's encoder from packing padded batches into nested tensors, which a branch cannot read.

    They serve its fast path, which modules with hooks do not take anyway.
    """
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoder) and getattr(module, "use_nested_tensor", False):
            module._nested_before_cache = module.use_nested_tensor  # type: ignore[assignment]
            module.use_nested_tensor = False


def detach_all(model: nn.Module) -> int:
    """Remove every branch, and all hooks, from a model; returns how many branches there were. 0: nothing is changed."""
    if not any(isinstance(module, HostBranch) for module in model.modules()):
        return 0
    for module in model.modules():
        compiled_as_before(module)
        for handle in module.__dict__.pop(_HANDLES, ()):
            handle.remove()
        _unhook_projection(module)  # a copy that took the place of a projection, as quantisation makes, has no handle
        module.__dict__.pop(NOTES, None)
        module.__dict__.pop(ROSTER, None)
        module.__dict__.pop(RECORD, None)
        module.__dict__.pop(_PART, None)
    count = 0
    for module in list(model.modules()):
        if isinstance(getattr(module, "grc", None), HostBranch):
            del module.grc
            count += 1
    return count


def keep_handle(module: nn.Module, handle: RemovableHandle) -> None:
    """Store a hook's handle in its module, so that a copy of the module has handles of its own hooks."""
    module.__dict__.setdefault(_HANDLES, []).append(handle)


def _list_changed(model: nn.Module) -> list[nn.Module]:
    """The modules with our hooks, and all modules above them: compiled code that calls one of them is out of date."""
    return [m for m in model.modules() if any(_HANDLES in part.__dict__ for part in m.modules())]


def _mix_output(module: Any, args: tuple, kwargs: dict, output: Any) -> Any:
    """The host's output with the branch mixed in. What else the host returns is passed on unchanged."""
    branch: HostBranch = module.grc
    call = branch.host.call(module, args, kwargs)
    y = _first(output)
    grid = _find_grid(branch, args, kwargs, call) if branch.needs_grid else None
    return _with_first(output, call.like(branch(call.x, call.tokens(y), call.mask, grid=grid), y))


def _first(output: Any) -> Tensor:
    found: Tensor = output[0] if isinstance(output, tuple) else output
    return found


def _with_first(output: Any, first: Tensor) -> Any:
    if not isinstance(output, tuple):
        return first
    if hasattr(output, "_replace"):  # a named tuple
        return type(output)(first, *output[1:])
    return first, *output[1:]


def _note_call(module: Any, args: tuple, kwargs: dict) -> None:
    _present.calls = *_present.calls, _Noted(module, args, kwargs)


def _forget_call(module: Any, args: tuple, output: Any) -> None:
    """End a noted call, also one that raised; one that raised before it was noted has no note."""
    if _present.calls and _present.calls[-1].module is module:
        _present.calls = _present.calls[:-1]


def _note_heads(module: Any, args: tuple, kwargs: dict) -> None:
    _hook_projection(reach(module, module.grc.host.projection))
    _note_call(module, args, kwargs)


def _hook_projection(projection: Any) -> None:
    """Hook a projection, unless it is: attentions may share it, and tools may wrap, unwrap or replace it later.

    The input of an adapter around it is the heads too: the adapter is hooked then, and what is in it is not.
    """
    if _mix_heads in pre_hooks_of(projection).values():
        return
    for part in projection.modules():
        _unhook_projection(part)
    keep_handle(projection, projection.register_forward_pre_hook(_mix_heads))


def _unhook_projection(projection: nn.Module) -> None:
    hooks = pre_hooks_of(projection)
    for key in [key for key, hook in hooks.items() if hook is _mix_heads]:
        del hooks[key]


def _mix_heads(projection: Any, args: tuple) -> tuple:
    """The arguments of an attention's projection, with the branch mixed into the first, the heads."""
    noted, heads = _present.calls[-1] if _present.calls else None, args[0]
    if noted is None or noted.mixed or reach(noted.module, noted.module.grc.host.projection) is not projection:
        raise InputError(
            f"{type(projection).__name__}: expected one call of it in each call of its attention, found another; use "
            'GRC(mix="channels")'
        )
    module, given, kwargs = noted.module, noted.args, noted.kwargs
    noted.mixed, branch = True, module.grc
    if isinstance(branch.host, DecoderHost):  # the branch itself may be wrapped, as by PEFT
        return mix_decoder(module, given, kwargs, heads), *args[1:]
    call = branch.host.call(module, given, kwargs)
    grid = _find_grid(branch, given, kwargs, call) if branch.needs_grid else None
    mixed = branch(call.x, call.tokens(heads), call.mask, grid=grid)
    if branch.convolution is not None:
        mixed, position = mixed
        noted.position = call, position
    return call.like(mixed, heads), *args[1:]


def _end_heads(module: Any, args: tuple, output: Any) -> Any:
    """The attention's output, with the convolution's added."""
    noted = _present.calls[-1]
    if not noted.mixed:
        branch: HostBranch = module.grc
        raise InputError(
            f"{branch.host.name}: expected a call of its projection ({branch.host.projection}), found none; use "
            'GRC(mix="channels")'
        )
    if noted.position is None:
        return output
    y, (call, position) = _first(output), noted.position
    return _with_first(output, y + call.like(position.to(y.dtype), y))


def _find_grid(branch: HostBranch, args: tuple, kwargs: dict, call: Call) -> tuple[int, int] | None:
    """The grid of a call's tokens; None: it is not known, or it is not that of these tokens."""
    whole = args[0] if args else None
    if isinstance(whole, Tensor) and whole.dim() == 4 and call.layout == "batch":  # [B, height, width, D]
        return whole.shape[1], whole.shape[2]
    if branch.own_grid is not None:
        grid = branch.own_grid(args, kwargs)
    else:
        grid = None if branch.grids is None else branch.grids.current(branch.training)
    if grid is None or branch.padded is not None or branch.windows is not None:
        return grid
    return grid if grid[0] * grid[1] == call.x.shape[1] - branch.prefix else None


def _note_output(module: Any, args: tuple, output: Any) -> None:
    grids, reader = getattr(module, NOTES)
    grids.note(reader(args, {}, output))


def _note_grid(module: Any, args: tuple, kwargs: dict) -> None:
    grids, reader = getattr(module, NOTES)
    grids.note(reader(args, kwargs))


def _mix_input(carrier: Any, args: tuple) -> tuple:
    """A carrier's arguments (o_self, …), with the branch mixed into o_self."""
    branch: HostBranch = carrier.grc
    noted = _present.calls[-1] if _present.calls else None
    if noted is None or noted.mixed or reach(noted.module, branch.host.carrier) is not carrier:
        raise InputError(f"{type(carrier).__name__}: expected a call inside its attention, found one of it alone")
    noted.mixed = True
    call = branch.host.call(noted.module, noted.args, noted.kwargs)
    return branch(call.x, args[0], call.mask), *args[1:]


def _begin(model: nn.Module, args: tuple) -> None:
    if is_replica(model):
        raise InputError(
            "expected one model for each process, found a replica that DataParallel made, whose cache is lost after "
            "the forward; use DistributedDataParallel"
        )
    if model.training:
        begin_forward(getattr(model, ROSTER))


def _end(model: nn.Module, args: tuple, output: object) -> None:
    found: list[GatedCache] = getattr(model, ROSTER)
    if model.training and any(one.writes for one in found) and not found[0].complete and not recomputing():
        end_forward(found)


def _fail(model: nn.Module, args: tuple, output: object) -> None:
    """End a forward that raised: it commits nothing, and parts of the model may be called by themselves again."""
    found: list[GatedCache] = getattr(model, ROSTER)
    if model.training and not found[0].complete and not recomputing():
        promote(found)


def _begin_part(module: nn.Module, args: tuple) -> None:
    part: _Part = getattr(module, _PART)
    if module.training and part.branches[0].complete:
        part.began = begin_forward(part.branches)


def _end_part(module: nn.Module, args: tuple, output: object) -> None:
    part: _Part = getattr(module, _PART)
    if part.began:
        part.began = False
        end_forward(part.branches)


def _fail_part(module: nn.Module, args: tuple, output: object) -> None:
    part: _Part = getattr(module, _PART)
    if part.began:
        part.began = False
        promote(part.branches)


def _report_missing(model: nn.Module, incompatible: Any) -> None:
    """Report missing keys if a checkpoint has some of the branches: a checkpoint of the host alone has none."""
    found = [branch for branch in getattr(model, ROSTER) if isinstance(branch, HostBranch)]
    if any(branch.kept is None for branch in found):
        for branch in found:
            if branch.kept is not None:
                incompatible.missing_keys.extend(branch.state_dict(prefix=branch.kept))
