"""Denormal numbers, as of underflowing activations, are zeros in the kernels, and do not slow them down.

How much slower arithmetic with them is depends on the processor: nothing on some of AMD's, tens of times on others.
"""

import platform

import pytest
import torch
from native_kernels import needs_kernels

import mnemos
from mnemos import Transformer
from mnemos.attention.linear import LinearConfig
from mnemos.ops import linear_attention

pytestmark = [
    needs_kernels,
    pytest.mark.skipif(platform.machine().lower() not in ("x86_64", "amd64"), reason="other processors have no switch"),
]
TINY = 1e-41


def attention(scale, causal=True, tokens=256, rows=1):
    """Forward and backward, of values and upstream gradients of that size."""
    g = torch.Generator().manual_seed(0)
    q, k, v, upstream = (torch.randn(rows, tokens, 4, 32, generator=g) for _ in range(4))
    given = [x.requires_grad_() for x in (q, k, v * scale)]

    def run():
        y, state = linear_attention(*given, causal=causal, backend="native")
        return y, state.s, *torch.autograd.grad(y, given, upstream * scale)

    return run


def decoding(scale):
    """A fused step, whose state holds sums of that size."""
    torch.manual_seed(0)
    model = Transformer(vocab_size=8, dim=64, layers=4, num_heads=2, mlp=64, position="none", attention=LinearConfig())
    step, x = mnemos.fused_step(model.eval()), torch.zeros(8, 1, dtype=torch.int64)
    _, state = step(x)
    state = state._replace(layers=tuple(type(a)(a.s * 0 + scale, a.z) for a in state.layers))

    def run():
        return [layer.s for layer in step(x, state)[1].layers]

    return run


CASES = {
    "causal": attention,
    "bidirectional": lambda scale: attention(scale, causal=False),
    "token": lambda scale: attention(scale, tokens=1, rows=256),
    "decode": decoding,
}


@pytest.mark.each_value
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("name", CASES)
def test_denormal_numbers_are_zeros(name, count, variant, threads):
    """On the caller's thread and on the workers'; the result of a usual size, of sums of them, is then a zero too."""
    threads(count)
    tiny, zero = CASES[name](TINY)(), CASES[name](0.0)()
    assert all(map(torch.equal, tiny, zero))
    assert name == "decode" or not any(x.any() for x in tiny)


@pytest.mark.parametrize("count", [1, 3])
def test_the_setting_is_of_the_kernels_alone(count, threads):
    """PyTorch and the user compute with denormal numbers as before, on the caller's thread and on the workers'."""
    threads(count)
    attention(1.0)()
    decoding(1.0)()
    many = torch.full((1 << 20,), 1e-40)
    assert torch.equal((many + many).double(), 2 * many.double())
    torch.set_flush_denormal(True)
    try:
        attention(1.0)()
        assert many[0] * 1.0 == 0
    finally:
        torch.set_flush_denormal(False)
