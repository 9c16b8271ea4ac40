"""The Triton kernels compile for GPUs that are not here: the interpreter does not mind what the compiler refuses."""

import os

import pytest

triton = pytest.importorskip("triton")
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from mnemos.ops.linear import triton_kernels as kernels  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="interpreted kernels are not compiled"),
]
HALVES = {"fp32": ("tf32x3", "tf32x3"), "bf16": ("bf16", "bf16x2"), "fp16": ("tf32", "tf32x3")}
UNUSED = {
    "y": ("g", "gamma"),
    "dq": ("x_end", "n_end"),
    "dk": ("y", "x_end"),
    "dv": ("y", "gamma", "n_end"),
    "s": ("g", "y", "den", "gamma", "out", "x_start", "n_start"),
    "r": ("y", "out", "x_start", "n_start"),
}
IN = ("q", "k", "v", "g", "y", "out")
SUMS = (
    "den",
    "gamma",
    "x_start",
    "n_start",
    "x_end",
    "n_end",
    "s",
    "z",
    "s_end",
    "z_end",
    "totals",
    "start",
    "end",
    "exact",
)


def compiled(kernel, capability, dtype, unused=(), **constants):
    """As a launch of tensors of this type would have it."""
    given = constants | dict.fromkeys(unused)
    types = dict.fromkeys(IN, f"*{dtype}") | dict.fromkeys(SUMS, "*fp32")
    types |= {"mask": "*u8", "offsets": "*i64", "eps": "fp32"}
    if kernel is kernels.scan:
        types["y"] = "*fp32"  # of which the result may be rounded to half precision
    signature = {name: "constexpr" if name in given else types.get(name, "i32") for name in kernel.arg_names}
    source = ASTSource(kernel, signature, {name: value for name, value in given.items() if name in signature})
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 4})


CASES = [(out, *target) for target in ((80, "fp32"), (90, "fp16")) for out in UNUSED] + [("y", 90, "bf16")]
CASES += [pytest.param(out, 90, "bf16", marks=pytest.mark.exhaustive) for out in UNUSED if out != "y"]


@pytest.mark.parametrize(("out", "capability", "dtype"), CASES)
def test_scan(out, capability, dtype):
    packed = dtype == "fp16"
    unused = [*UNUSED[out], "mask" if packed else "offsets"] + ["y"] * (out == "y" and dtype == "fp32")
    sizes = {"D": 20, "M": 32, "C": 32, "BD": 32, "BM": 32, "KIND": 2 if packed else 1}
    flags = {"OUT": out, "MASKED": not packed, "PACKED": packed, "ENDS": out != "dq", "EXACT": dtype != "fp32"}
    reads, sums = HALVES[dtype]
    found = compiled(kernels.scan, capability, dtype, unused, **sizes, **flags, PRECISION=reads, SUMS=sums)
    assert "mma" in found.asm["ptx"]  # on tensor cores


@pytest.mark.parametrize("capability", [80, 90])
def test_the_others(capability):
    compiled(kernels.step, capability, "bf16", D=20, M=32, KIND=1, MASKED=True, EXACT=True, BD=32, BM=32)
    compiled(
        kernels.step, capability, "fp32", ["mask", "exact"], D=20, M=32, KIND=1, MASKED=False, EXACT=False, BD=32, BM=32
    )
    compiled(kernels.running, capability, "fp32", BACKWARDS=True, BLOCK=64)
