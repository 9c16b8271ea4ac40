"""What the operators with C++ kernels share: how tensors are handed over, and how such an operator is defined once.

`kernel_operator` makes of an operator's kernels the function that a backend calls: it skips PyTorch's dispatcher, whose
overhead is the time of many tokens, where nothing but autograd needs to see the call, and elsewhere (compilers,
counters, transforms) calls the registered operator of the same kernels.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mnemos._compat import PLAIN as PLAIN
from mnemos._compat import assume_constant
from mnemos._compat import can_skip_dispatcher as can_skip_dispatcher
from mnemos.native import why_not
from mnemos.ops.backward import Gradients, differentiable_once

why_no_kernels = assume_constant(why_not)  # why there are none here, or ""; a compiler does not look into it
Outputs = tuple[Tensor | None, ...]


def dense(*tensors: Tensor | None) -> list[Any]:
    """The tensors with stride 1 in the last axis; the kernels take any other strides. None stays."""
    return [x if x is None or x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous() for x in tensors]


def contiguous(*tensors: Tensor | None) -> list[Any]:
    """The tensors without gaps; None stays."""
    return [x if x is None else x.contiguous() for x in tensors]


def rows(*tensors: Tensor | None) -> list[int]:
    """`struct Rows` of native/call.h for each [B, T, H, width], or [B, T, width], whose only head is at any stride."""
    words: list[int] = []
    for x in tensors:
        words += (0, 0, 0, 0) if x is None else (x.data_ptr(), *x.stride()[:3])
    return words


def mask_address(mask: Tensor | None) -> tuple[int, ...]:
    """The address and the strides of a mask [B, T]; zeros for None."""
    return (0, 0, 0) if mask is None else (mask.data_ptr(), *mask.stride())


def pointers(*tensors: Tensor | None) -> tuple[int, ...]:
    """Addresses of contiguous tensors; 0 for None."""
    return tuple([0 if x is None else x.data_ptr() for x in tensors])


def kernel_operator(
    name: str,
    schema: str,
    allocate: Callable[..., Outputs],
    fill: Callable[..., None],
    derive: Callable[..., Gradients],
    results: int,
    gradients: int,
    saves: Sequence[int] = (),
    name_of: Callable[[Sequence[Any]], str] | None = None,
) -> Callable[..., tuple[Tensor, ...]]:
    """The function of an operator's inputs that returns its results; it is differentiable once.

    schema: the inputs, tensors first: "Tensor q, Tensor? s, float scale". The first `gradients` have a gradient.
    allocate(kept, *inputs): the outputs, not filled. The first `results` of them are the function's; others are for the
    backward, and None unless something is `kept` for it.
    fill(outputs, *inputs): computes them.
    derive(needs, *inputs, *saved, *upstream): gradients, None where an input is None. saved: the outputs of the
    numbers `saves`. upstream: what comes from above for each result, or None. needs: which inputs ask for a gradient.
    name_of: the operation's name in errors, from the inputs, where it is not NAME.

    It also defines mnemos::NAME (schema, bool kept) and mnemos::NAME_backward on the CPU, whose results are tensors: an
    empty one for None.
    """
    tensors, count = schema.count("Tensor"), schema.count(",") + 1
    called = name_of or (lambda inputs: name)

    # --- the registered operators ---
    def as_tensors(outputs: Sequence[Tensor | None], like: Tensor) -> tuple[Tensor, ...]:
        return tuple([like.new_empty(0) if x is None else x for x in outputs])

    def allocate_all(*args: Any) -> Outputs:
        kept = args[count] if len(args) > count else True  # the dispatcher leaves out what is the default
        return allocate(kept, *args[:count])

    def compute(*args: Any) -> tuple[Tensor, ...]:
        outputs = allocate_all(*args)
        fill(outputs, *args[:count])
        return as_tensors(outputs, args[0])

    def compute_gradients(*args: Any) -> tuple[Tensor, ...]:
        return as_tensors(derive([x is not None for x in args[:gradients]], *args), args[0])

    def empty_gradients(*args: Any) -> tuple[Tensor, ...]:
        return as_tensors([x if x is None else x.new_empty(x.shape) for x in args[:gradients]], args[0])

    def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.settings = inputs[tensors:count]
        ctx.save_for_backward(*inputs[:tensors], *[output[number] for number in saves])
        ctx.mark_non_differentiable(*output[results:])
        ctx.set_materialize_grads(False)

    def differentiate(saved: Sequence[Any], settings: Sequence[Any], upstream: Sequence[Any]) -> Gradients:
        grads = backward(*saved[:tensors], *settings, *saved[tensors:], *upstream)
        return tuple([None if x is None else grad for x, grad in zip(saved, grads, strict=False)])

    def differentiate_call(ctx: Any, *upstream: Tensor | None) -> Gradients:
        return *differentiate(ctx.saved_tensors, ctx.settings, upstream[:results]), *[None] * (count + 1 - gradients)

    def save_name(ctx: Any, inputs: tuple[Any, ...], output: object) -> None:
        ctx.called = called(inputs)

    def refuse(ctx: Any, *_: object) -> None:
        raise RuntimeError(f"{ctx.called} is differentiable once; backend='native' has no derivative of its derivative")

    total = max([results, *[number + 1 for number in saves]])
    upstreams = ", ".join([*[f"Tensor saved{i}" for i in saves], *[f"Tensor? grad{i}" for i in range(results)]])
    for operator, signature, function, fake in (
        (f"mnemos::{name}", f"({schema}, bool kept=True) -> ({', '.join(['Tensor'] * total)})", compute,
         lambda *args: as_tensors(allocate_all(*args), args[0])),
        (f"mnemos::{name}_backward", f"({schema}, {upstreams}) -> ({', '.join(['Tensor'] * gradients)})",
         compute_gradients, empty_gradients),
    ):  # fmt: skip
        torch.library.define(operator, signature)
        torch.library.impl(operator, "CPU", function)
        torch.library.register_fake(operator, fake)
    torch.library.register_autograd(f"mnemos::{name}", differentiate_call, setup_context=save)
    torch.library.register_autograd(f"mnemos::{name}_backward", refuse, setup_context=save_name)
    forward, backward = (getattr(torch.ops.mnemos, operator) for operator in (name, f"{name}_backward"))

    # --- the same without the dispatcher ---
    class Direct(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *args: Any) -> Any:
            outputs = allocate(True, *args)
            fill(outputs, *args)
            ctx.settings = args[tensors:]
            ctx.set_materialize_grads(False)
            ctx.save_for_backward(*args[:tensors], *[outputs[number] for number in saves])
            return outputs[:results]

        @staticmethod
        def backward(ctx: Any, *upstream: Tensor | None) -> Any:
            saved = ctx.saved_tensors  # read once: activation checkpointing gives them out once
            if can_skip_dispatcher(*upstream):  # the saved tensors were checked before the forward
                args = *saved[:tensors], *ctx.settings, *saved[tensors:], *upstream
                compute = functools.partial(derive, ctx.needs_input_grad, *args)
            else:
                compute = functools.partial(differentiate, saved, ctx.settings, upstream)
            grads = differentiable_once(called(saved), saved, upstream, compute)
            return *grads, *[None] * (count - gradients)

    def call(*args: Any) -> tuple[Tensor, ...]:
        tensor_args = args[:tensors]
        kept = torch.is_grad_enabled() and any([x is not None and x.requires_grad for x in tensor_args])
        if not can_skip_dispatcher(*tensor_args):
            return forward(*args, kept)[:results]
        if kept:
            return Direct.apply(*args)
        outputs = allocate(False, *args)
        fill(outputs, *args)
        return outputs[:results]  # type: ignore[return-value]

    return call
