"""The hooks through which a branch takes part in a host's forward.

`attach` gives an attention its branch, and `_mix` is what the hooks around the attention do: `_mix_output` after it, or
`_mix_inside` before a part of it. `attach_root` lets the model's own forward begin and end an update of all caches.
Hooks are plain functions that hold no module, so a deep copy of a cached model uses its own branches, and a cached
model can be pickled.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from mnemos._compat import forget_compiled, is_replica, pre_hooks_of
from mnemos.memory.gated_cache import StoredCache, begin_forward, end_forward, promote, stored
from mnemos.types import InputError

from .branch import HostBranch
from .grids import NOTES, Grids, find_own_reader, find_reader_above
from .host import Call, CallStack, DecoderHost, reach
from .inputs import NamedModule
from .masks import own_tokens
from .row_caches import find_row_state

_HANDLES = "_mnemos_handles"  # attribute of a module with our hooks: their handles, by which they are removed
ROSTER = "gated_caches"  # attribute of the model given to `cache`: its branches, in order
RECORD = "_mnemos_record"  # attribute of the same model: the settings of each call of `cache`, as they are saved
_OWNER = "_mnemos_owner"  # attribute of that model, and of modules between it and a branch: a `_Owner`
_NESTED = "_nested_before_cache"  # attribute of an encoder of PyTorch: its `use_nested_tensor`
_INSTEAD_OF_HEADS = 'where it is mixed in as GRC(mix="heads"), use mix="channels"'


class ActiveCall:
    """A call of an attention that is mixed inside it. mixed: whether it was. position: the convolution's output."""

    def __init__(self, module: Any, args: tuple, kwargs: dict) -> None:
        self.module, self.args, self.kwargs, self.mixed = module, args, kwargs, False
        self.position: tuple[Call, Tensor] | None = None


_stack = CallStack()  # of `ActiveCall`


class _Owner:
    """Branches whose forward the model, or a part of it that is called alone, begins and ends; whether it has begun."""

    def __init__(self, branches: Sequence[StoredCache], whole: bool) -> None:
        self.branches, self.whole, self.began = list(branches), whole, False


def attach(site: NamedModule, branch: HostBranch) -> None:
    """Make `branch` the child `grc` of a host's attention, and mix its output in."""
    module = site.module
    module.grc = branch
    if branch.inside:
        keep_handle(module, module.register_forward_pre_hook(_open_call, with_kwargs=True))
        _hook_part(reach(module, branch.inside))
        keep_handle(module, module.register_forward_hook(_close_call, always_call=True))
    else:
        keep_handle(module, module.register_forward_hook(_mix_output, with_kwargs=True))
    if branch.needs_grid:
        follow_grid(site, branch)

    # --- no nested tensors, into which PyTorch's encoder packs padded batches for its fast path: a branch cannot read
    # them, and modules with hooks do not take that path anyway ---
    for part in site.above:
        if isinstance(part, nn.TransformerEncoder) and getattr(part, "use_nested_tensor", False):
            setattr(part, _NESTED, part.use_nested_tensor)
            part.use_nested_tensor = False
    # --- a part of the model that is called alone begins and ends the forward too. Of parts inside one another the
    # outermost does it: layers that share a branch, as in ALBERT, then read one cache, as in a call of the model ---
    for module in site.above[1:]:
        if (owner := getattr(module, _OWNER, None)) is None:
            _make_owner(module, [branch])
        else:
            owner.branches.append(branch)


def _make_owner(module: nn.Module, branches: Sequence[StoredCache], whole: bool = False) -> None:
    setattr(module, _OWNER, _Owner(branches, whole))
    keep_handle(module, module.register_forward_pre_hook(_begin))
    keep_handle(module, module.register_forward_hook(_end))
    keep_handle(module, module.register_forward_hook(_fail, always_call=True))


def follow_grid(site: NamedModule, branch: HostBranch) -> None:
    """Let a branch know the grid of each call's tokens: from the call, or from a module above that shows it."""
    branch.own_grid = find_own_reader(site.module)
    reads = find_reader_above(site, branch.padded is not None or branch.windows is not None)
    if branch.own_grid is not None or reads is None:
        return
    above, reader = reads
    if NOTES not in above.__dict__:
        setattr(above, NOTES, Grids(reader))
        is_shown_by_output = isinstance(above, nn.Conv2d)
        add: Any = above.register_forward_hook if is_shown_by_output else above.register_forward_pre_hook
        keep_handle(above, add(_note_grid, with_kwargs=True))
    branch.grids = getattr(above, NOTES)


def attach_root(model: nn.Module, branches: Sequence[StoredCache]) -> None:
    """Begin and end the forwards of all branches with the model's own forward."""
    forget_compiled()  # torch.compile does not look for hooks that were added to a module
    if ROSTER in model.__dict__:  # a further call of `cache`
        branches = stored(model)
        setattr(model, ROSTER, branches)
        getattr(model, _OWNER).branches = list(branches)
        return
    setattr(model, ROSTER, branches)
    _make_owner(model, branches, whole=True)
    keep_handle(model, model.register_load_state_dict_post_hook(_report_missing))


def detach_all(model: nn.Module) -> int:
    """Remove every branch, and all hooks, from a model; returns how many branches there were. 0: nothing is changed."""
    if not any(isinstance(module, HostBranch) for module in model.modules()):
        return 0
    forget_compiled()
    for module in model.modules():
        for handle in module.__dict__.pop(_HANDLES, ()):
            handle.remove()
        _unhook_part(module)  # a copy that took the place of a projection, as quantisation makes, has no handle
        for name in (NOTES, ROSTER, RECORD, _OWNER):
            module.__dict__.pop(name, None)
        if _NESTED in module.__dict__:
            module.use_nested_tensor = module.__dict__.pop(_NESTED)
    count = 0
    for module in list(model.modules()):
        if isinstance(getattr(module, "grc", None), HostBranch):
            del module.grc
            count += 1
    return count


def keep_handle(module: nn.Module, handle: RemovableHandle) -> None:
    """Store a hook's handle in its module, so that a copy of the module has handles of its own hooks."""
    module.__dict__.setdefault(_HANDLES, []).append(handle)


# --- around an attention ---


def _mix(module: Any, args: tuple, kwargs: dict, y: Tensor) -> tuple[Call, Any]:
    """A call of an attention, and its output or its heads y with the branch mixed in, [B, T, D]."""
    branch = module.grc  # which may be wrapped, as by PEFT
    host = branch.host
    if isinstance(host, DecoderHost):
        # --- a decoder: the state of its rows is on the host's cache ---
        x, mask, past = host.read(module, args, kwargs)
        carried, valid = None, None
        if branch.moves and hasattr(past, "gated"):  # that of `mnemos.functional`, which has the state itself
            carried, valid = past.gated(branch.grc), past.valid
        elif branch.moves:
            if past is not None:
                carried = find_row_state(past, reach(module, host.layer), *x.shape[:2])
            valid = own_tokens(mask, x, 0 if carried is None else carried.length)
        return Call(x), branch(x, y, valid, carried=carried)
    # --- an encoder: the grid of its tokens may be another one in every call ---
    call = host.call(module, args, kwargs)
    grid: tuple[int, int] | None = None
    if branch.needs_grid:
        whole = args[0] if args else None
        if isinstance(whole, Tensor) and whole.dim() == 4 and call.layout == "batch":  # [B, height, width, D]
            grid = whole.shape[1], whole.shape[2]
        else:
            if branch.own_grid is not None:
                grid = branch.own_grid(args, kwargs)
            elif branch.grids is not None:
                grid = branch.grids.current(branch.training)
            in_rows = branch.padded is not None or branch.windows is not None
            if grid is not None and not in_rows and grid[0] * grid[1] != call.x.shape[1] - branch.prefix:
                grid = None  # it is not that of these tokens
    return call, branch(call.x, call.tokens(y), call.mask, grid=grid)


def _mix_output(module: Any, args: tuple, kwargs: dict, output: Any) -> Any:
    y = _first(output)
    call, mixed = _mix(module, args, kwargs, y)
    return _with_first(output, call.like(mixed, y))


def _first(output: Any) -> Tensor:
    y: Tensor = output[0] if isinstance(output, tuple) else output
    return y


def _with_first(output: Any, first: Tensor) -> Any:
    """What a host returned, with another tensor in the first place."""
    if not isinstance(output, tuple):
        return first
    if hasattr(output, "_replace"):  # a named tuple
        return type(output)(first, *output[1:])
    return first, *output[1:]


def _open_call(module: Any, args: tuple, kwargs: dict) -> None:
    _hook_part(reach(module, module.grc.inside))
    _stack.calls = *_stack.calls, ActiveCall(module, args, kwargs)


def _hook_part(part: Any) -> None:
    """Hook a part of an attention, unless it is: attentions may share it, and tools may wrap or replace it later.

    The first input of an adapter around it is the same: the adapter is hooked then, and what is in it is not.
    """
    if _mix_inside in pre_hooks_of(part).values():
        return
    for inner in part.modules():
        _unhook_part(inner)
    keep_handle(part, part.register_forward_pre_hook(_mix_inside))


def _unhook_part(part: nn.Module) -> None:
    hooks = pre_hooks_of(part)
    for key in [key for key, hook in hooks.items() if hook is _mix_inside]:
        del hooks[key]


def _mix_inside(part: Any, args: tuple) -> tuple:
    """The arguments of a part of an attention, with the branch mixed into the first: the heads, or o_self."""
    active = _stack.calls[-1] if _stack.calls else None
    if active is None or active.mixed or reach(active.module, active.module.grc.inside) is not part:
        raise InputError(
            f"{type(part).__name__}: expected one call of it in each call of its attention, found another; "
            f"{_INSTEAD_OF_HEADS}"
        )
    active.mixed = True
    call, mixed = _mix(active.module, active.args, active.kwargs, args[0])
    if active.module.grc.convolution is not None:
        mixed, position = mixed
        active.position = call, position
    return call.like(mixed, args[0]), *args[1:]


def _close_call(module: Any, args: tuple, output: Any) -> Any:
    """End a call; its output, with the convolution's added. None: it raised, and may not have been opened before."""
    if not _stack.calls or _stack.calls[-1].module is not module:
        return None
    active, _stack.calls = _stack.calls[-1], _stack.calls[:-1]
    if output is None:
        return None
    if not active.mixed:
        branch = module.grc
        raise InputError(f"{branch.host.name}: expected a call of its {branch.inside}, found none; {_INSTEAD_OF_HEADS}")
    if active.position is None:
        return output
    y, (call, position) = _first(output), active.position
    return _with_first(output, y + call.like(position.to(y.dtype), y))


def _note_grid(module: Any, args: tuple, kwargs: dict, output: object = None) -> None:
    getattr(module, NOTES).note(args, kwargs, output)


# --- around the model, and around a part of it ---


def _begin(module: nn.Module, args: tuple) -> None:
    owner: _Owner = getattr(module, _OWNER)
    if owner.whole and is_replica(module):
        raise InputError(
            "expected one model for each process, found a replica that DataParallel made, whose cache is lost after "
            "the forward; use DistributedDataParallel"
        )
    if module.training and (owner.whole or owner.branches[0].complete):  # a part begins none inside of another
        owner.began = begin_forward(owner.branches)


def _end(module: nn.Module, args: tuple, output: object) -> None:
    owner: _Owner = getattr(module, _OWNER)
    if owner.began:
        owner.began = False
        end_forward(owner.branches)


def _fail(module: nn.Module, args: tuple, output: object) -> None:
    """End a forward that raised: it commits nothing, and parts of the model may be called by themselves again."""
    owner: _Owner = getattr(module, _OWNER)
    if owner.began:
        owner.began = False
        promote(owner.branches)


def _report_missing(model: nn.Module, incompatible: Any) -> None:
    """Report missing keys if a checkpoint has some of the branches: a checkpoint of the host alone has none."""
    branches = [branch for branch in getattr(model, ROSTER) if isinstance(branch, HostBranch)]
    if any(branch.lacking is None for branch in branches):
        for branch in branches:
            if branch.lacking is not None:
                incompatible.missing_keys.extend(branch.state_dict(prefix=branch.lacking))
