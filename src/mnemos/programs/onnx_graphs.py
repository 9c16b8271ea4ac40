"""ONNX graphs of exported programs, and the operators that need another translation than PyTorch's."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from mnemos import libraries

from .quiet import quiet

OPSET = 20  # that of torch.onnx by default: runtimes of 2024 have it


def onnx_graph(program: torch.export.ExportedProgram, inputs: Sequence[str], outputs: Sequence[str]) -> Any:
    """The program as a `torch.onnx.ONNXProgram` with these names of its inputs and outputs.

    Raises InputError where the library onnx or onnxscript is missing.
    """
    libraries.onnx()
    libraries.onnxscript()
    # Without gradient: else PyTorch takes the attention apart into views that strides do not allow.
    with torch.no_grad(), quiet():
        return torch.onnx.export(
            program,
            dynamo=True,
            verbose=False,
            opset_version=OPSET,
            input_names=list(inputs),
            output_names=list(outputs),
            custom_translation_table=_translations(),
        )


def _translations() -> dict[Callable[..., Any], Callable[..., Any]]:
    """What ONNX Runtime has no kernel for, or PyTorch no translation: see each function."""
    script: Any = libraries.onnxscript()
    op, types = script.opset20, script.ir.DataType

    def where(condition: Any, self: Any, other: Any) -> Any:
        """ONNX Runtime chooses between numbers, not between truth values."""
        if self.dtype != types.BOOL:
            return op.Where(condition, self, other)
        return op.Or(op.And(condition, self), op.And(op.Not(condition), other))

    def sort(self: Any, *, stable: bool = True, dim: int = -1, descending: bool = False) -> Any:
        """`TopK` of all entries: equal ones stay in order. It takes no truth values and no bytes."""
        count = op.Gather(op.Shape(self), op.Constant(value_ints=[dim]))
        given = self if self.dtype in (types.FLOAT, types.DOUBLE) else op.Cast(self, to=types.INT64)
        values, places = op.TopK(given, count, axis=dim, largest=int(descending), sorted=1)
        return op.CastLike(values, self), places

    return {torch.ops.aten.where.self: where, torch.ops.aten.sort.stable: sort}
