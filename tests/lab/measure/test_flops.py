import copy

import pytest
import torch
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from mnemos import GRC, Transformer
from mnemos.attention import LinearAttention, SoftmaxAttention
from mnemos.attention.softmax import attend
from mnemos.lab.measure.flops import COUNTED, count_flops, forward_flops
from mnemos.lab.speech.models import BiLSTMConfig
from mnemos.ops import linear_attention

B, T, DIM, HEADS = 2, 48, 32, 4


class Called(torch.nn.Module):
    """Anything, called as a model is."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x, state=None, mask=None):
        return self.inner(x), None


def step_flops(model, x):
    return count_flops(lambda: model(x)[0].sum().backward())


def tokens():
    return torch.randn(B, T, DIM, requires_grad=True)


@pytest.mark.parametrize("causal", [True, False])
def test_softmax_attention_by_hand(causal):
    layer = SoftmaxAttention(DIM, HEADS, causal)
    projections = 2 * B * T * 4 * DIM * DIM
    products = 2 * 2 * B * T * T * DIM  # q·k and weights·v over all heads
    assert forward_flops(layer, tokens()) == projections + products
    # Backward: each projection once for the weights and once for the inputs. The fused kernel computes q·k again, and
    # then four products.
    assert step_flops(layer, tokens()) == 3 * projections + products + products * 5 // 2


def test_a_mask_does_not_hide_attention():
    layer = SoftmaxAttention(DIM, HEADS, True)
    mask = torch.ones(B, T, dtype=torch.bool)
    assert forward_flops(layer, tokens(), mask) == forward_flops(layer, tokens())


def test_linear_attention_by_hand():
    """The products within its own backward are seen as well."""
    d = m = DIM // HEADS
    c, chunks = 32, B * HEADS * 2  # 48 tokens: two chunks of 32
    square, sums = 2 * c * c, 2 * c * d * (m + 1)
    forward = chunks * (square * (d + m + 1) + 2 * sums)
    backward = chunks * (square * (m + d + d + d + m) + 3 * sums + 2 * (2 * c * d * m))
    q, k, v = (torch.randn(B, T, HEADS, d, requires_grad=True) for _ in range(3))
    run = {"backend": "chunked"}
    assert count_flops(lambda: linear_attention(q, k, v, **run)) == forward
    assert count_flops(lambda: linear_attention(q, k, v, **run)[0].sum().backward()) == forward + backward
    layer = LinearAttention(DIM, HEADS, causal=False)
    assert forward_flops(layer, tokens()) == 2 * B * T * 4 * DIM * DIM + 2 * 2 * B * T * HEADS * d * m + 2 * B * T * DIM


def test_the_native_kernels_are_counted_by_hand():
    """Declared whether or not they were built, so that what is counted is seen on a meta device as well."""
    d, m = 8, 6
    q, k = (torch.randn(B, T, HEADS, d, requires_grad=True, device="meta") for _ in range(2))
    v, s, z = (torch.randn(*n, device="meta") for n in ((B, T, HEADS, m), (B, HEADS, d, m), (B, HEADS, d)))

    def run():
        return torch.ops.mnemos.linear_attention(q, k, v, s, z, None, 1, 1e-6)[0]

    forward = B * T * HEADS * (4 * d * m + 2 * d)
    backward = B * T * HEADS * (8 * d * (m + 1) + 4 * d * m)
    assert count_flops(run) == forward
    assert count_flops(lambda: run().sum().backward()) == forward + backward


@pytest.mark.parametrize(("beta", "products"), [(True, 3), (False, 2)])
def test_the_delta_rule_s_kernel_is_counted_by_its_value_heads(beta, products):
    """Six of them share two key heads; with β the state is read once more."""
    q, k = (torch.randn(B, T, 2, 8, requires_grad=True, device="meta") for _ in range(2))
    v, rates = torch.randn(B, T, 6, 5, device="meta"), torch.rand(B, T, 6, device="meta")
    forward = products * 2 * B * T * 6 * 8 * 5

    def run():
        return torch.ops.mnemos.delta_rule(q, k, v, rates if beta else None, None, None, 1.0)[0]

    assert count_flops(run) == forward
    assert count_flops(lambda: run().sum().backward()) == forward + 3 * forward


def test_the_kernels_of_channels_are_counted_by_hand():
    x = torch.randn(B, T, 6, requires_grad=True, device="meta")
    weight, a, b = (torch.randn(*n, device="meta") for n in ((6, 4), (6, 3), (B, T, 3)))
    of_conv, of_scan = 2 * B * T * 6 * 4, 2 * 2 * B * T * 6 * 3

    def convolved():
        return torch.ops.mnemos.short_convolution(x, weight, None, None, None, None, None)[0]

    def scanned():
        return torch.ops.mnemos.selective_scan(x, x, a, b, b, None, None, None, None)[0]

    assert [count_flops(convolved), count_flops(scanned)] == [of_conv, of_scan]
    assert count_flops(lambda: convolved().sum().backward()) == 3 * of_conv
    assert count_flops(lambda: scanned().sum().backward()) == 4 * of_scan


def test_in_place_products_count():
    a, b, c = torch.randn(3, 4, 5), torch.randn(3, 5, 6), torch.randn(3, 4, 6)
    assert count_flops(lambda: c.baddbmm_(a, b)) == 2 * 3 * 4 * 5 * 6
    assert count_flops(lambda: c[0].addmm_(a[0], b[0])) == 2 * 4 * 5 * 6


def test_counting_moves_nothing():
    model = Transformer(vocab_size=9, dim=16, mlp=16, max_length=12, dropout=0.1, cache=GRC(length=3)).train()
    before = copy.deepcopy(model.state_dict())
    x = torch.randint(9, (2, 12))
    torch.manual_seed(5)
    drawn = torch.rand(3)
    torch.manual_seed(5)
    assert forward_flops(model, x) > 0
    assert torch.equal(torch.rand(3), drawn)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert all(p.grad is None for p in model.parameters())


def test_a_grouped_convolution_by_hand():
    """torch's own formula forgets the groups in the gradient of the weights."""
    model = Called(torch.nn.Conv2d(8, 12, 3, padding=1, groups=4))
    x = torch.randn(B, 8, 5, 7, requires_grad=True)
    forward = 2 * B * 12 * (8 // 4) * 9 * 5 * 7
    assert forward_flops(model, x) == forward
    assert step_flops(model, x) == 3 * forward
    turned = Called(torch.nn.ConvTranspose2d(8, 12, 3, groups=4))
    assert step_flops(turned, x) == 3 * forward_flops(turned, x)


def test_torchs_fast_path_hides_nothing():
    layer = torch.nn.TransformerEncoderLayer(DIM, HEADS, 80, 0.0, batch_first=True)
    model = Called(torch.nn.TransformerEncoder(layer, 1, enable_nested_tensor=False))
    x = torch.randn(B, T, DIM)
    before = torch.backends.mha.get_fastpath_enabled()
    assert forward_flops(model.eval(), x) == forward_flops(model.train(), x) > 2 * B * T * 4 * DIM * DIM
    assert torch.backends.mha.get_fastpath_enabled() == before


@pytest.mark.parametrize("stack", [1, 3])
def test_an_lstm_is_counted(stack):
    """A step of a layer, in each direction: four gates of a product with the input and one with the hidden state."""
    model = BiLSTMConfig(vocab_size=3, bands=5, stack=stack, dim=6, layers=2).build()
    x, steps = torch.randn(2, 9, 5), 9 // stack
    first, second, head = 4 * 6 * (5 * stack + 6), 4 * 6 * (12 + 6), 12 * 4
    forward = 2 * 2 * steps * (2 * first + 2 * second + head)
    assert forward_flops(model, x) == forward
    # Twice as much backward, but for the input, which wants no gradient, though the LSTM's kernel finds it.
    assert step_flops(model, x) == 3 * forward


@pytest.mark.parametrize("values", [4, 12])
def test_zeros_that_a_kernel_needs_are_not_counted(values):
    """Queries and keys narrower than the values are padded with zeros on the CPU."""
    q, k, v = (torch.randn(B, 70, 2, d, requires_grad=True) for d in (4, 4, values))
    forward = 2 * B * 2 * 70 * 70 * (4 + values)
    assert count_flops(lambda: attend(q, k, v, None, False)) == forward
    backward = count_flops(lambda: attend(q, k, v, None, False).sum().backward()) - forward
    assert 2 * forward <= backward <= 5 * forward // 2  # a fused kernel computes the scores again


def test_attention_that_is_called_by_keywords_counts_as_much():
    q, k, v = (torch.randn(B, 2, 70, 4) for _ in range(3))
    by_keywords = count_flops(lambda: F.scaled_dot_product_attention(query=q, key=k, value=v))
    assert by_keywords == count_flops(lambda: F.scaled_dot_product_attention(q, k, v)) == 2 * B * 2 * 70 * 70 * 8


@pytest.mark.parametrize(("holds", "products"), [(True, 2), (False, 1)])
def test_of_a_condition_the_branch_that_runs_is_counted(holds, products):
    x, w = torch.randn(4, 8), torch.randn(8, 8)
    found = []
    branches = (lambda x: x @ w @ w, lambda x: x @ w)
    count = count_flops(lambda: found.append(torch.cond(torch.tensor(holds), *branches, (x,))))
    assert count == products * 2 * 4 * 8 * 8
    assert torch.allclose(found[0], branches[not holds](x))


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])
def test_it_is_pytorchs_count_of_the_whole(mode):
    """Inference mode leaves operators whole that are made of others: scaled_dot_product_attention, linear, matmul."""
    model = Transformer(vocab_size=11, dim=8, layers=1, num_heads=2, mlp=8)
    words = torch.randint(11, (2, 5))

    def step():
        with mode():
            y = torch.matmul(model(words)[0], torch.ones(11, 3))
            if mode is torch.enable_grad:
                y.sum().backward()

    with FlopCounterMode(display=False, custom_mapping=COUNTED) as counter:
        step()
    assert count_flops(step) == counter.get_total_flops() > 0
