"""All uses of private parts of PyTorch. No other module of mnemos uses one (tests/test_compat.py checks this).

Each function explains what it needs and why no public name suffices. All were tested with PyTorch 2.9 to 2.13. Where a
docstring names a fallback, it is used if the private name is missing: it is slower, but never changes a result.
tests/test_compat.py tests the functions and their fallbacks, and reports which name a new PyTorch has removed.
"""

import contextlib
import sys
from collections.abc import Callable, Mapping, MutableMapping
from types import FrameType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._higher_order_ops.scan import scan
from torch.nn.modules import module as _all_modules
from torch.nn.utils import parametrize
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

T = TypeVar("T")
DispatchMode = TorchDispatchMode  # base of modes that see every operation; the only public mode counts FLOPs alone

# Functions to flatten and map nested containers of tensors (states, batches) and to register classes. torch.compile
# uses the same registrations. PyTorch 2.13 has no public module with these functions.
pytree: Any = _pytree

_register_namedtuple: Callable[..., None] | None = getattr(pytree, "_register_namedtuple", None)
_transforms_active: Callable[[], bool] | None = getattr(torch._C, "_are_functorch_transforms_active", None)
_functorch: Any = getattr(torch._C, "_functorch", None)
_is_batched: Callable[[Tensor], bool] | None = getattr(_functorch, "is_legacy_batchedtensor", None)
_unseen: Any = getattr(torch._C, "_DisableFuncTorch", None)
_forward_level: Any = getattr(torch.autograd, "forward_ad", None)
_is_zero: Callable[[Tensor], bool] | None = getattr(Tensor, "_is_zerotensor", None)
_dispatch_modes: Callable[[], int] | None = getattr(torch._C, "_len_torch_dispatch_stack", None)
_function_modes: Callable[[], int] | None = getattr(torch._C, "_len_torch_function_stack", None)
_graph_task: Callable[[], int] | None = getattr(torch._C, "_current_graph_task_id", None)
_autograd: Any = getattr(torch._C, "_autograd", None)
_next_number: Callable[[], int] | None = getattr(_autograd, "_get_sequence_nr", None)
_current_node: Callable[[], Any] | None = getattr(torch._C, "_current_autograd_node", None)
_saving: Callable[[bool], Any] | None = getattr(_autograd, "_top_saved_tensors_default_hooks", None)


# ---- states as files and graphs ----


def parts_of(structure: Any) -> list[Any]:
    """The structures of a container's entries, of the structure that `pytree.tree_flatten` gives for it.

    A method of PyTorch 2.13; in 2.9 an attribute, which later versions warn of.
    """
    parts = getattr(structure, "children", None)
    return structure.children_specs if parts is None else parts()


def exportable(cls: type[T]) -> type[T]:
    """Decorator of a NamedTuple: `torch.export.save` stores it under the name mnemos.NAME.

    The public registration is not for named tuples. Fallback: nothing, and `torch.export.save` raises an error.
    """
    if _register_namedtuple is not None:
        _register_namedtuple(cls, serialized_type_name=f"mnemos.{cls.__name__}")
    torch.serialization.add_safe_globals([cls])  # so that loading the example inputs runs no code of the file
    return cls


# ---- what else sees an operation: transforms, modes, tensors that are not what their memory holds ----


def transformed(*tensors: Tensor) -> bool:
    """Whether a function transform (vmap, jvp) is active, or a tensor is batched by `is_grads_batched`.

    A transform rewrites PyTorch's operations; it cannot rewrite a custom kernel or a hand-written backward pass.
    Fallback: True, which selects the implementation in PyTorch's operations.
    """
    if _transforms_active is None or _is_batched is None:
        return True
    return _transforms_active() or any([_is_batched(x) for x in tensors])  # a list: for every token that is decoded


def outside_transforms() -> contextlib.AbstractContextManager[object]:
    """A context in which function transforms (grad, vmap) see no operation on plain tensors. Fallback: they do."""
    plain = torch.compiler.is_compiling() or _unseen is None or not transformed()
    return contextlib.nullcontext() if plain else _unseen()


def underlying(tensor: Tensor) -> Tensor | None:
    """The values that function transforms wrapped; None: one for each sample of a vmap, which the public
    `torch.func.debug_unwrap` does not tell apart. Fallback: the tensor itself."""
    if torch.compiler.is_compiling() or not hasattr(_functorch, "is_functorch_wrapped_tensor"):
        return tensor
    while _functorch.is_functorch_wrapped_tensor(tensor):
        if _functorch.is_batchedtensor(tensor):
            return None
        tensor = _functorch.get_unwrapped(tensor)
    return tensor


def forward_differentiated() -> bool:
    """Whether a level of forward-mode differentiation is open, where tensors may carry tangents.

    A custom kernel ignores them. Fallback: True, which selects the implementation in PyTorch's operations.
    """
    return _forward_level is None or getattr(_forward_level, "_current_level", 0) >= 0


def is_plain_tensor(x: Tensor) -> bool:
    """Whether x's memory holds its values: it is no lazy negative or conjugate, and no zero without memory.

    PyTorch's dispatcher makes such tensors real before it calls a kernel, but a kernel that is called directly reads
    their memory. Fallback: False, which selects the dispatcher.
    """
    return _is_zero is not None and not (x.is_neg() or x.is_conj() or _is_zero(x))


def dispatch_mode_active() -> bool:
    """Whether a TorchDispatchMode (a FLOP counter, a tracer) is active. Fallback: True.

    Such a mode does not see a kernel that is called directly.
    """
    return _dispatch_modes is None or _dispatch_modes() > 0


def forget_weights() -> None:
    """Forget the weights that autocast has cast, and those that `parametrize.cached` keeps, which has no public way.

    What a pass without gradient put there has no graph. Fallback, if the name is missing: the second kind stays.
    """
    torch.clear_autocast_cache()
    getattr(parametrize, "_cache", {}).clear()


# Whether torch.jit.trace records what runs. Fallback: the public function, which takes three times as long.
is_tracing: Callable[[], bool] = getattr(torch._C, "_is_tracing", torch.jit.is_tracing)

PLAIN = (Tensor, nn.Parameter)


def can_skip_dispatcher(*tensors: Tensor | None) -> bool:
    """Whether the tensors are plain and no compiler, tracer, transform or counter has to see the operator."""
    if torch.compiler.is_compiling() or is_tracing() or dispatch_mode_active() or forward_differentiated():
        return False
    present = [x for x in tensors if x is not None]
    for x in present:  # no generator: this runs for every token that is decoded
        if type(x) not in PLAIN or not is_plain_tensor(x):
            return False
    return not transformed(*present)


def rewritten() -> bool:
    """Whether a transform of PyTorch (torch.func, forward-mode AD) rewrites operations, which it cannot do to kernels.

    Nor to a hand-written backward: a kernel's tangent would silently be zero.
    """
    return not torch.compiler.is_compiling() and (transformed() or forward_differentiated())


def function_mode_active() -> bool:
    """Whether a TorchFunctionMode, which intercepts calls of PyTorch's functions, is active. Fallback: True."""
    return _function_modes is None or _function_modes() > 0


# ---- the backward pass, and forwards that it repeats ----


def in_backward() -> bool:
    """Whether this thread is inside a backward pass, where activation checkpointing repeats forwards.

    Fallback: whether a backward function of autograd or of checkpointing is on this thread's stack.
    """
    if _graph_task is not None:
        return _graph_task() != -1
    return _innermost_caller(_ENGINE, _UNPACK, ("torch.utils.checkpoint", "backward")) is not None


_ENGINE = "torch.autograd.graph", "_engine_run_backward"  # the thread that called backward()
_UNPACK = "torch.utils.checkpoint", "unpack_hook"  # non-reentrant checkpointing, also in a device's own thread


def _innermost_caller(*places: tuple[str, str]) -> tuple[str, str] | None:
    """Which of these functions, as (module, name), is the innermost on this thread's stack; None: none is."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        where = frame.f_globals.get("__name__", ""), frame.f_code.co_name
        if where in places:
            return where
        frame = frame.f_back
    return None


def assert_in_graph(condition: Tensor, message: str) -> None:
    """Raise RuntimeError with `message` when `condition`, a scalar of booleans, is False, also in a compiled graph.

    The public `torch._assert` reads the value, which a graph does not have. Fallback: nothing is raised.
    """
    check = getattr(torch, "_assert_async", None)
    if check is not None:
        check(condition, message)


def next_node_number() -> int:
    """The number of the next node that this thread adds to autograd's graph. Nodes are numbered in order.

    Fallback: −1, and `backward_node_number` is None.
    """
    return -1 if _next_number is None else _next_number()


def backward_node_number() -> int | None:
    """The number of the node whose backward runs in this thread; None if none does, or it is not known (fallback)."""
    node = None if _current_node is None or _next_number is None else _current_node()
    return None if node is None else int(node._sequence_nr())


def repeats_saved_tensors() -> bool:
    """Inside a backward: whether a forward is repeated because a node of it needs the tensors that it saved.

    That is non-reentrant checkpointing, where the node was added by the forward. Otherwise the running node's own
    backward repeats the forward, as reentrant checkpointing and reversible layers do, and was added before it. Only the
    stack tells them apart: hooks of saved tensors tell the innermost checkpoint, which may be inside the repeated one.
    """
    return _innermost_caller(_ENGINE, _UNPACK) == _UNPACK


def to_be_repeated() -> bool:
    """Whether this code may run again in a backward: it saves no tensors, or something else saves them in its place.

    Fallback: True, which costs memory.
    """
    if not torch.is_grad_enabled() or _saving is None:
        return True
    hooks = _saving(True)
    return hooks is not None and "_recomputation_hook" not in getattr(hooks[0], "__qualname__", "")


def write_count(tensor: Tensor) -> int | None:
    """The number of in-place writes to a tensor; None if it is unknown, and callers must then assume a write.

    Raises RuntimeError for tensors of inference mode and of transforms, which have no count.
    """
    count: int | None = getattr(tensor, "_version", None)
    return count


# ---- compiled code ----


def assume_constant(function: Callable[..., Any]) -> Any:
    """`torch.compiler.assume_constant_result(function)` without importing the compiler, which takes a second.

    No fallback is needed: a compiler that ignores the mark traces the function or breaks the graph at it.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def forget_compiled() -> None:
    """Discard all compiled code of the process."""
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()


def scanned(
    step: Callable[[list[Tensor], tuple[Tensor, ...]], tuple[list[Tensor], Tensor]],
    carry: list[Tensor],
    inputs: tuple[Tensor, ...],
) -> tuple[list[Tensor], Tensor]:
    """`carry, y = step(carry, x)` for the entries x of inputs [T, ..] in turn: the last carry, and all y [T, ..].

    An exported program has one loop for any T; there is no public operator for it.
    """
    last: tuple[list[Tensor], Tensor] = scan(step, carry, inputs, dim=0)
    return last


# ---- modules: their tensors, hooks, copies ----


def parameters_of(module: nn.Module) -> MutableMapping[str, Tensor | None]:
    """A live mapping of a module's own parameters by name. It avoids `nn.Module.__getattr__`, which slows decoding."""
    own: MutableMapping[str, Tensor | None] = module.__dict__["_parameters"]
    return own


def buffers_of(module: nn.Module) -> MutableMapping[str, Tensor | None]:
    """A live mapping of a module's own buffers by name. Assignments are not checked and register nothing."""
    own: MutableMapping[str, Tensor | None] = module.__dict__["_buffers"]
    return own


def is_plain(module: nn.Module) -> bool:
    """Whether a call of the module runs its class's forward alone, so that a kernel may read its tensors instead.

    Not so with hooks of its own or of all modules, around forward or backward, and with a forward set on the instance.
    Wrappers and parametrisations are other classes: compare `type(module)` too. Fallback: False.
    """
    own = module.__dict__
    # As `nn.Module.__call__` asks before it calls forward directly. No loop: it is asked for every token.
    return not (
        own.get("_forward_hooks", True)
        or own.get("_forward_pre_hooks", True)
        or own.get("_backward_hooks", True)
        or own.get("_backward_pre_hooks", True)
        or getattr(_all_modules, "_global_forward_hooks", True)
        or getattr(_all_modules, "_global_forward_pre_hooks", True)
        or getattr(_all_modules, "_global_backward_hooks", True)
        or getattr(_all_modules, "_global_backward_pre_hooks", True)
        or "forward" in own
    )


def pre_hooks_of(module: nn.Module) -> MutableMapping[int, Callable[..., Any]]:
    """A live mapping of the hooks before a module's forward: a hook whose handle is lost can be found and removed.

    Fallback: an empty one, so that a hook is not found. torch 2.13.
    """
    hooks: MutableMapping[int, Callable[..., Any]] = getattr(module, "_forward_pre_hooks", {})
    return hooks


def hooks_of(module: nn.Module) -> MutableMapping[int, Callable[..., Any]]:
    """As `pre_hooks_of`, of the hooks after a module's forward."""
    hooks: MutableMapping[int, Callable[..., Any]] = getattr(module, "_forward_hooks", {})
    return hooks


def gradient_hooks_of(parameter: Tensor) -> list[Callable[..., Any]]:
    """The hooks of `Tensor.register_hook`, which `copy.deepcopy` leaves out. Fallback: none. torch 2.13."""
    return list((getattr(parameter, "_backward_hooks", None) or {}).values())


class Moving(nn.Module):
    """A module whose method `moved` is called when `.to`, `.cuda`, `.double` etc. move or convert its tensors.

    It is needed for tensors that must not be buffers, because DistributedDataParallel overwrites every process's
    buffers with those of process 0. PyTorch has no public hook for this. There is no fallback: without `_apply` these
    tensors would not be moved, and tests/test_compat.py fails.
    """

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        super()._apply(fn, recurse)
        self.moved(fn)
        return self

    def moved(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Called after the parameters and buffers were replaced by `fn` of them."""


def is_replica(module: nn.Module) -> bool:
    """Whether a module is a copy that DataParallel made for one forward. Fallback: False."""
    return bool(module.__dict__.get("_is_replica", False))


COMPILED = "_orig_mod"  # the child that torch.compile's module has; PyTorch has no public name for it


def with_children(
    module: nn.Module, children: dict[str, nn.Module], parameters: Mapping[str, Tensor | None] | None = None
) -> nn.Module:
    """A shallow copy of a module with other children; its buffers and settings are the original's own.

    So are its parameters, unless others are given. Children that are not named are the original's: a list may have one
    child twice, and a name may have None. No fallback: tests/test_compat.py checks that a module has this dictionary.
    """
    copy = type(module).__new__(type(module))
    copy.__dict__.update(module.__dict__, _modules=module.__dict__["_modules"] | children)
    if parameters is not None:
        copy.__dict__["_parameters"] = dict(parameters)
    return copy


# ---- workers and processes ----


def end_workers(batches: object) -> None:
    """Stop the worker processes of a DataLoader's iterator. Fallback: they stop when the iterator is collected."""
    end = getattr(batches, "_shutdown_workers", None)
    if end is not None:
        end()


def name_worker_dataset(dataset: object) -> None:
    """In a worker process of a DataLoader, make `get_worker_info().dataset` this one, although the loader has another.

    A WorkerInfo refuses new values, so its own setter is passed by. Fallback: it names the loader's data set.
    """
    from torch.utils.data import get_worker_info

    with contextlib.suppress(AttributeError, TypeError):
        object.__setattr__(get_worker_info(), "dataset", dataset)


def expect_forward(wrapped: nn.parallel.DistributedDataParallel, told: bool = False) -> bool:
    """Make `had_forward` false until the wrapper's next forward that prepares a reduction of gradients.

    No public name tells; a hook would not run where the wrapper was compiled before. The attribute that this sets says
    whether the next forward broadcasts buffers; returns what it was, to be given back as `told`.
    """
    before: bool = getattr(wrapped, "require_forward_param_sync", True)
    if hasattr(wrapped, "require_forward_param_sync"):
        wrapped.require_forward_param_sync = told
    return before


def had_forward(wrapped: nn.parallel.DistributedDataParallel) -> bool:
    """Whether it had such a forward since `expect_forward`. Fallback, and with a reducer of another kind: true."""
    others = ("_use_python_reducer", "_delay_all_reduce_all_params")  # whose forwards set nothing
    told: bool = getattr(wrapped, "require_forward_param_sync", True)
    return told or any(getattr(wrapped, name, False) for name in others)


def share_buffers(wrapped: nn.parallel.DistributedDataParallel) -> None:
    """Broadcast the buffers of a DistributedDataParallel from process 0 now, instead of at its next forward.

    Fallback, if the wrapper's undocumented attributes are missing: broadcast all buffers now and at the next forward.
    """
    try:
        if not wrapped.will_sync_module_buffers():
            return
        buffers, group = list(wrapped.modules_buffers), wrapped.process_group
    except AttributeError:
        buffers, group = list(wrapped.buffers()), None
    for buffer in buffers:
        torch.distributed.broadcast(buffer, group=group, group_src=0)
    wrapped.require_forward_param_sync = False  # as after a forward that broadcast them


# ---- operators ----


def dense_product() -> Callable[[Tensor, Tensor, Tensor | None], Tensor] | None:
    """oneDNN's product of linear layers in float32 on a CPU: product(x, weight, bias) = x·weightᵀ + bias.

    It makes x contiguous; the weight may be a transposed matrix. It has no gradient. torch.compile uses the operator;
    public ones take oneDNN's own tensors alone. Fallback: None, and layers are computed as usual.
    """
    product = getattr(getattr(getattr(torch.ops, "mkldnn", None), "_linear_pointwise", None), "default", None)
    if product is None or not torch.backends.mkldnn.is_available():
        return None
    return lambda x, weight, bias: product(x, weight, bias, "none", [], "")


def packed_products() -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor, Tensor | None], Tensor]] | None:
    """oneDNN's (pack, product) of linear layers in float32 on a CPU: product(x, pack(weight), bias) = x·weightᵀ + bias.

    torch.compile uses the same operators for frozen weights. Fallback: None, and layers are computed as usual.
    """
    pack, product = getattr(getattr(torch.ops, "mkldnn", None), "_reorder_linear_weight", None), dense_product()
    return None if pack is None or product is None else (pack, product)


def operators(*names: str) -> list[Any]:
    """The operators aten::NAME that exist in this PyTorch. Those of fused attention and of unsafe views are private.

    Fallback: a missing operator is omitted; without the operator there are no calls to count.
    """
    return [getattr(torch.ops.aten, name) for name in names if hasattr(torch.ops.aten, name)]


def operator_of(overload: Any) -> Any:
    """The operator (torch.ops.aten.add) of one of its overloads (torch.ops.aten.add.Tensor), or itself without them."""
    return getattr(overload, "_overloadpacket", overload)


def is_elementary(overload: Any) -> bool:
    """Whether a dispatched operator is itself, and not made of others. Fallback: False, and it is asked for its parts.

    prim: a tensor's device and layout, of which PyTorch cannot be asked, as of operators on functions (higher_order).
    """
    decomposes = getattr(overload, "_can_decompose", None)
    return overload.namespace in ("prim", "higher_order") or (decomposes is not None and not decomposes())
