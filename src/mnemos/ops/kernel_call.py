"""What the operators with C++ kernels share: how a kernel is called, and how an operator of kernels is defined once.

`kernel_operator` makes of an operator's kernels the function that a backend calls: it skips PyTorch's dispatcher, whose
overhead is the time of many tokens, where nothing but autograd needs to see the call, and elsewhere (compilers,
counters) calls the registered operator of the same kernels.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from mnemos import native
from mnemos._compat import PLAIN as PLAIN
from mnemos._compat import assume_constant, rewritten
from mnemos._compat import can_skip_dispatcher as can_skip_dispatcher
from mnemos.ops.backward import Gradients, differentiable_once

why_no_kernels = assume_constant(native.why_not)  # why there are none here, or ""; a compiler does not look into it
Outputs = tuple[Tensor | None, ...]


class Kernel:
    """A function of the C++ library, mnemos_NAME(instructions, *before, record, *after), and how its record is filled.

    fields: the fields of the C++ record in order, as `native.layout` lists them. The value of a field is a number or a
    tensor; the kernel reads a tensor's address and, from a field of several words, its strides. "q:4" is a tensor
    [B, T, H, width] or [B, T, width], "mask:3" a tensor [B, T]; a field of two words is two addresses, and takes two
    values. None is passed as zeros, and so are values that are missing at the end.
    """

    def __init__(self, operator: str, name: str, record: str, fields: str) -> None:
        self.operator, self.name, self.layout = operator, f"mnemos_{name}", native.layout(record, fields)
        self.function: Callable[..., int] | None = None  # the library is loaded when it is first needed
        fields = fields.replace("mask mask_b mask_t", "mask:3")  # two records have the strides as fields of their own
        sizes = [int(field.partition(":")[2] or 1) for field in fields.split()]
        self.words = [words for size in sizes for words in ((1, 1) if size == 2 else (size,))]

    def __call__(self, before: Iterable[int], values: Iterable[Any], *after: float) -> None:
        """Call it. A tensor that it cannot read as it lies is copied, so results must lie as new tensors do.

        Raises MemoryError if it has not enough memory.
        """
        words: list[int] = []
        copies = []  # held until the kernel has read them
        for x, size in zip(values, self.words, strict=False):
            if x is None:
                words += (0,) * size
            elif not isinstance(x, Tensor):
                words.append(x)
            else:
                # Rows may lie anywhere, each of one piece; what has no strides is of one piece.
                if not (x.is_contiguous() or (size > 1 and (size < 4 or x.stride(-1) == 1))):
                    copies.append(x := x.contiguous())
                words.append(x.data_ptr())
                words += x.stride()[: size - 1]
        words += (0,) * (self.layout.size // 8 - len(words))
        if self.function is None:
            self.function = getattr(native.load_kernels()[0], self.name)
        if self.function(native.instructions, *before, self.layout.pack(*words), *after):
            raise MemoryError(f"{self.operator}: not enough memory for its buffers; use fewer rows or smaller heads")


def pointers(*tensors: Tensor | None) -> tuple[int, ...]:
    """Addresses of contiguous tensors; 0 for None."""
    return tuple([0 if x is None else x.data_ptr() for x in tensors])


def kernel_operator(
    name: str,
    schema: str,
    allocate: Callable[..., Outputs],
    compute: Callable[..., Outputs],
    derive: Callable[..., Gradients],
    in_pytorch: Callable[..., tuple[Tensor, ...]],
    results: int,
    gradients: int,
    saves: Sequence[int] = (),
    name_of: Callable[[Sequence[Any]], str] | None = None,
) -> Callable[..., tuple[Tensor, ...]]:
    """The function of an operator's inputs that returns its results; it is differentiable once.

    schema: the inputs, tensors first: "Tensor q, Tensor? s, float scale". The first `gradients` have a gradient.
    compute(keeps, *inputs): the outputs. The first `results` of them are the function's; others are for the backward,
    and None unless it `keeps` something for that. allocate: the same, not filled, for what traces the operator.
    derive(needs, *inputs, *saved, *upstream): gradients, None where an input is None. saved: the outputs of the
    numbers `saves`. upstream: what comes from above for each result, or None. needs: which inputs ask for a gradient.
    in_pytorch: the same function of the inputs in PyTorch's own operations, which transforms (torch.func) rewrite.
    name_of: the operation's name in errors, from the inputs, where it is not NAME.

    It also defines mnemos::NAME (schema, bool keeps) and mnemos::NAME_backward on the CPU, whose results are tensors,
    an empty one for None.
    """
    tensors, count = schema.count("Tensor"), schema.count(",") + 1
    called = name_of or (lambda inputs: name)

    # --- the registered operators ---
    def as_tensors(outputs: Sequence[Tensor | None], like: Tensor) -> tuple[Tensor, ...]:
        return tuple([like.new_empty(0) if x is None else x for x in outputs])

    def on_all(function: Callable[..., Outputs], *args: Any) -> tuple[Tensor, ...]:
        keeps = args[count] if len(args) > count else True  # the dispatcher leaves out what is the default
        return as_tensors(function(keeps, *args[:count]), args[0])

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
        (f"mnemos::{name}", f"({schema}, bool keeps=True) -> ({', '.join(['Tensor'] * total)})",
         functools.partial(on_all, compute), functools.partial(on_all, allocate)),
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
            outputs = compute(True, *args)
            ctx.settings = args[tensors:]
            ctx.set_materialize_grads(False)
            ctx.save_for_backward(*args[:tensors], *[outputs[number] for number in saves])
            return outputs[:results]

        @staticmethod
        def backward(ctx: Any, *upstream: Tensor | None) -> Any:
            saved = ctx.saved_tensors  # read once: activation checkpointing gives them out once
            if can_skip_dispatcher(*upstream):  # the saved tensors were checked before the forward
                args = *saved[:tensors], *ctx.settings, *saved[tensors:], *upstream
                gradients_of = functools.partial(derive, ctx.needs_input_grad, *args)
            else:
                gradients_of = functools.partial(differentiate, saved, ctx.settings, upstream)
            grads = differentiable_once(called(saved), saved, upstream, gradients_of)
            return *grads, *[None] * (count - gradients)

    def call(*args: Any) -> tuple[Tensor, ...]:
        inputs = args[:tensors]
        skips = can_skip_dispatcher(*inputs)
        if not skips and rewritten():
            return in_pytorch(*args)
        keeps = torch.is_grad_enabled() and any([x is not None and x.requires_grad for x in inputs])
        if not skips:
            return forward(*args, keeps)[:results]
        if keeps:
            return Direct.apply(*args)
        return compute(False, *args)[:results]  # type: ignore[return-value]

    return call
