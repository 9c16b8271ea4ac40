"""Every use of a private part of PyTorch, in one place. Nothing else in mnemos names one (tests/test_compat.py).

Each function says what it needs and why no public name serves. All were run with PyTorch 2.13, and with no other
version. Where a private name is missing, a function takes a fallback that is slower or refuses, and never gives another
result; tests/test_compat.py checks both, and says which name a new PyTorch has lost.
"""

import importlib
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as _all_modules

try:
    from torch.utils._python_dispatch import TorchDispatchMode as DispatchMode
except ImportError:

    class DispatchMode:  # type: ignore[no-redef]
        """The base of modes that see every operation as it runs. The one public mode counts FLOPs, and no bytes.

        Fallback: one error, when a mode is made.
        """

        def __init__(self) -> None:
            raise RuntimeError(f"torch {torch.__version__} has no TorchDispatchMode; measure with torch 2.13")


def _first_module(*names: str) -> ModuleType:
    """The first of these modules that can be imported."""
    for name in names:
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    raise ImportError(f"expected one of the modules {', '.join(names)}, found none; install torch 2.13")


# Nested containers of tensors (states, batches): flatten, map, and registration of classes. torch.compile knows the
# classes that are registered here; a public copy of these functions does not exist in 2.13.
pytree: Any = _first_module("torch.utils._pytree", "torch.utils.pytree", "torch.pytree")

_transforms_active: Callable[[], bool] | None = getattr(torch._C, "_are_functorch_transforms_active", None)
_is_batched: Callable[[Tensor], bool] | None = getattr(
    getattr(torch._C, "_functorch", None), "is_legacy_batchedtensor", None
)
_dispatch_modes: Callable[[], int] | None = getattr(torch._C, "_len_torch_dispatch_stack", None)
_function_modes: Callable[[], int] | None = getattr(torch._C, "_len_torch_function_stack", None)
_graph_task: Callable[[], int] | None = getattr(torch._C, "_current_graph_task_id", None)


def transformed(*tensors: Tensor) -> bool:
    """Whether a function transform (vmap, jvp) is active, or a tensor is the batch of `is_grads_batched`.

    A transform replaces each operation by its own; a hand-written backward or a kernel is no operation that it knows.
    Fallback: True, which chooses the path made of PyTorch's operations.
    """
    if _transforms_active is None or _is_batched is None:
        return True
    return _transforms_active() or any(_is_batched(x) for x in tensors)


def dispatch_mode_active() -> bool:
    """Whether a TorchDispatchMode (a FLOP counter, a tracer) sees each operation. Fallback: True.

    A kernel that is called directly would be hidden from it.
    """
    return _dispatch_modes is None or _dispatch_modes() > 0


def function_mode_active() -> bool:
    """Whether a TorchFunctionMode sees each call of a function of PyTorch. Fallback: True."""
    return _function_modes is None or _function_modes() > 0


def in_backward() -> bool:
    """Whether this thread is inside a backward pass. Activation checkpointing runs a forward again there.

    Fallback: whether a function of autograd's or of checkpointing's backward is on this thread's stack.
    """
    if _graph_task is not None:
        return _graph_task() != -1
    frame = sys._getframe(1)
    while frame is not None:
        where = frame.f_globals.get("__name__"), frame.f_code.co_name
        if where in _BACKWARD:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


_BACKWARD = {
    ("torch.autograd.graph", "_engine_run_backward"),  # the thread that called backward()
    ("torch.utils.checkpoint", "unpack_hook"),  # a device's own thread
    ("torch.utils.checkpoint", "backward"),
}


def write_count(tensor: Tensor) -> int | None:
    """How often a tensor was written in place; None where PyTorch does not say, and callers must assume a write.

    Raises RuntimeError for tensors of inference mode and of transforms, which do not count.
    """
    count: int | None = getattr(tensor, "_version", None) if hasattr(Tensor, "_version") else None
    return count


def constant(function: Callable[..., Any]) -> Any:
    """`torch.compiler.assume_constant_result(function)` without importing the compiler, which takes a second.

    Fallback: none is needed. A compiler that ignores the mark traces the function or breaks the graph at it.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def compiled_again(module: nn.Module) -> None:
    """Make what torch.compile compiled with this module be compiled again; `compiled_as_before` undoes it.

    torch.compile does not check whether hooks were added to a module that had none. It does check the type of the
    module's `_modules`. So this changes that type, to the other kind of dictionary that PyTorch itself has used there.
    Code that was compiled for other models stays. Copies and pickles of the module keep the change.
    Fallback: forget what was compiled in the whole process.
    """
    children: Any = module.__dict__.get("_modules")
    if _KIND in module.__dict__:
        return
    if type(children) not in (dict, OrderedDict):
        _forget_compiled()
        return
    module.__dict__[_KIND] = type(children)
    module.__dict__["_modules"] = dict(children) if type(children) is OrderedDict else OrderedDict(children)


def compiled_as_before(module: nn.Module) -> None:
    """Undo `compiled_again`: code that was compiled before it is valid again."""
    kind = module.__dict__.pop(_KIND, None)
    if kind is not None:
        module.__dict__["_modules"] = kind(module.__dict__["_modules"])
    elif type(module.__dict__.get("_modules")) not in (dict, OrderedDict):
        _forget_compiled()


_KIND = "_mnemos_modules_kind"


def _forget_compiled() -> None:
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()


def parameters_of(module: nn.Module) -> MutableMapping[str, Tensor | None]:
    """A module's own parameters by name, read live: without `nn.Module.__getattr__`, which a decoding step waits for.

    Fallback: a mapping over the module's public methods.
    """
    return _live(module, "_parameters")


def buffers_of(module: nn.Module) -> MutableMapping[str, Tensor | None]:
    """A module's own buffers by name, live: what is assigned here is not checked or registered again.

    Fallback: a mapping over the module's public methods.
    """
    return _live(module, "_buffers")


def _live(module: nn.Module, name: str) -> MutableMapping[str, Tensor | None]:
    found: MutableMapping[str, Tensor | None] | None = module.__dict__.get(name)
    return _Members(module, name == "_parameters") if found is None else found


class _Members(MutableMapping[str, Tensor | None]):
    """A module's own parameters or buffers, by its public methods."""

    def __init__(self, module: nn.Module, parameters: bool) -> None:
        self._module = module
        self._named: Callable[..., Iterable[tuple[str, Tensor]]] = (
            module.named_parameters if parameters else module.named_buffers
        )

    def __getitem__(self, name: str) -> Tensor | None:
        try:
            value: Tensor | None = getattr(self._module, name)
        except AttributeError:
            raise KeyError(name) from None
        return value

    def __setitem__(self, name: str, value: Tensor | None) -> None:
        setattr(self._module, name, value)

    def __delitem__(self, name: str) -> None:
        delattr(self._module, name)

    def __iter__(self) -> Iterator[str]:
        return (name for name, _ in self._named(recurse=False, remove_duplicate=False))

    def __len__(self) -> int:
        return sum(1 for _ in self)


def has_forward_hooks(module: nn.Module) -> bool:
    """Whether hooks run before or after a module's forward; code that bypasses the forward would skip them.

    Fallback: True.
    """
    return any(module.__dict__.get(name, True) for name in ("_forward_hooks", "_forward_pre_hooks"))


def has_global_forward_hooks() -> bool:
    """Whether hooks run before or after the forward of every module. Fallback: True."""
    return any(getattr(_all_modules, name, True) for name in ("_global_forward_hooks", "_global_forward_pre_hooks"))


class Moving(nn.Module):
    """A module that is told when its tensors are moved or converted, by `.to`, `.cuda`, `.double` and the like.

    It serves tensors that are neither parameters nor buffers: DistributedDataParallel overwrites every process's
    buffers with those of the first. PyTorch has no public hook for it. There is no fallback: without `_apply` these
    tensors would stay where they were, and tests/test_compat.py fails.
    """

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        super()._apply(fn, recurse)
        self.moved(fn)
        return self

    def moved(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Called after the parameters and buffers were replaced by `fn` of them."""


def end_workers(batches: Any) -> None:
    """End the processes of a DataLoader's iterator now. Fallback: they end when the iterator is collected."""
    end = getattr(batches, "_shutdown_workers", None)
    if end is not None:
        end()


def share_buffers(wrapped: nn.parallel.DistributedDataParallel) -> None:
    """Do now what the next forward of a DistributedDataParallel would do first: broadcast buffers from process 0.

    Fallback, where the wrapper's undocumented attributes are missing: broadcast all buffers, now and at the forward.
    """
    try:
        if not wrapped.will_sync_module_buffers():
            return
        buffers, group = list(wrapped.modules_buffers), wrapped.process_group
    except AttributeError:
        buffers, group = list(wrapped.buffers()), None
    for buffer in buffers:
        torch.distributed.broadcast(buffer, group=group, group_src=0)
    wrapped.require_forward_param_sync = False  # as after a forward that did it


def operators(*names: str) -> list[Any]:
    """The operators aten::NAME that this PyTorch has. Those of fused attention and of unsafe views are private.

    Fallback: a missing one is left out; then no call of it can be counted, either.
    """
    return [getattr(torch.ops.aten, name) for name in names if hasattr(torch.ops.aten, name)]


def operator_of(overload: Any) -> Any:
    """The operator (torch.ops.aten.add) of one of its overloads (torch.ops.aten.add.Tensor).

    Fallback: found by its public name, "aten::add.Tensor".
    """
    found = getattr(overload, "_overloadpacket", None)
    if found is None:
        space, _, name = overload.name().partition("::")
        found = getattr(getattr(torch.ops, space), name.partition(".")[0])
    return found


def schema_of(overload: Any) -> Any:
    """An operator's declaration: its arguments' names, and which results alias or overwrite them.

    Fallback: RuntimeError, in one line; a roofline cannot be computed without it.
    """
    found = getattr(overload, "_schema", None)
    if found is None:
        raise RuntimeError(f"torch {torch.__version__} does not declare {overload}; measure with torch 2.13")
    return found
