"""Relative attention as a layer: the op between projections, its memory, and where gradient goes."""

import pytest
import torch
from refusals import refuses
from torch.utils.flop_counter import FlopCounterMode

from mnemos.attention import RelativeAttention, RelativeConfig
from mnemos.memory import Segments
from mnemos.ops.relative_position.reference import reference_relative_attention, reference_sinusoid

DIM, HEADS = 12, 3


def layer(causal: bool = True, dropout: float = 0.0, **settings) -> RelativeAttention:
    torch.manual_seed(0)
    module = RelativeConfig(**{"memory": 5} | settings).build(DIM, HEADS, causal, dropout).double()
    for parameter in (module.content_bias, module.position_bias):
        torch.nn.init.normal_(parameter)
    return module


def tokens(t: int, seed: int = 1, rows: int = 2) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(DIM, t, rows, generator=generator, dtype=torch.float64).permute(2, 1, 0)


def oracle(module: RelativeAttention, x, context, mask=None) -> torch.Tensor:
    """The equations between the layer's weights; context [B, N, D] ends with x. Padding is not there."""
    if mask is not None:
        y, t = torch.zeros_like(x), x.shape[1]
        for row, valid in enumerate(mask):
            read = oracle(module, x[row : row + 1, valid[-t:]], context[row : row + 1, valid])
            y = y.index_put((torch.tensor(row), valid[-t:]), read[0])
        return y
    c, heads = module.config, (HEADS, DIM // HEADS)
    n = context.shape[1]
    r = {}
    for distance in range(1 - n, n):
        at = max(-c.clamp, min(c.clamp, distance)) if c.clamp else distance
        r[distance] = (module.position.weight @ reference_sinusoid(at, DIM)).view(heads)
    q = (x @ module.query.weight.T).unflatten(-1, heads)
    k, v = ((context @ w.T).unflatten(-1, heads) for w in module.key_value.weight.chunk(2))
    window = c.memory + 1 if c.same_length and module.causal else None
    u, w = module.content_bias, module.position_bias
    y = reference_relative_attention(q, k, v, r, u, w, module.causal, None, window)
    return y.flatten(2) @ module.output.weight.T


def close(a, b) -> None:
    torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)  # the sinusoids are float32


@pytest.mark.parametrize("settings", [{}, {"clamp": 3}, {"same_length": True, "memory": 3}], ids=str)
@pytest.mark.parametrize("causal", [True, False])
def test_is_the_equations_between_projections(settings, causal):
    module, x = layer(causal, **settings), tokens(9)
    mask = torch.rand(2, 9, generator=torch.Generator().manual_seed(3)) > 0.3
    close(module(x)[0], oracle(module, x, x))
    close(module(x, None, mask)[0][mask], oracle(module, x, x, mask)[mask])


@pytest.mark.each_value
@pytest.mark.parametrize(
    "settings",
    [{"memory": 7}, {"memory": 40}, {"memory": 3}, {"memory": 0}, {"clamp": 4}, {"memory": 2, "same_length": True}],
    ids=str,
)
@pytest.mark.parametrize("sizes", [[4, 4, 4], [1, 6, 2], [9, 6, 1, 2]], ids=str)
def test_segments_and_a_memory_longer_or_shorter_than_them(settings, sizes):
    """The memory as a plain list of the inputs so far, with gradient where the layer is told to keep it."""
    module, x = layer(detached=False, **settings), tokens(sum(sizes)).requires_grad_()
    state, wanted, found, at = None, [], [], 0
    mask = torch.rand(2, sum(sizes), generator=torch.Generator().manual_seed(3)) > 0.3
    for size in sizes:
        here = slice(at, at + size)
        y, state = module(x[:, here], state, mask[:, here])
        found.append(y)
        # The memory holds the last valid tokens.
        left = mask[:, :at].flip(1).cumsum(1).flip(1) <= module.config.memory
        kept = torch.cat([mask[:, :at] & left, mask[:, here]], 1)
        wanted.append(oracle(module, x[:, here], x[:, : at + size], kept))
        at += size
        assert state.x.shape == (2, min(at, module.config.memory), DIM)
    found, wanted = torch.cat(found, 1)[mask], torch.cat(wanted, 1)[mask]
    close(found, wanted)
    sources = [x, *module.parameters()]
    for a, b in zip(*(torch.autograd.grad(y.square().sum(), sources) for y in (found, wanted)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("settings", [{"memory": 30}, {"memory": 20, "same_length": True}], ids=str)
@pytest.mark.parametrize("dropout", [0.0, 0.4])
@pytest.mark.parametrize("t", [1, 2, 4])
def test_few_queries_read_the_memory_itself_and_find_the_same(t, dropout, settings):
    module = layer(dropout=dropout, detached=False, **settings).train()
    context, x = tokens(30 + t).requires_grad_(), tokens(30 + t)[:, -t:].clone().requires_grad_()
    mask = torch.rand(2, 30 + t, generator=torch.Generator().manual_seed(3)) > 0.3
    context.data.masked_fill_(~mask[..., None], 0)  # as the layer has them
    x.data.masked_fill_(~mask[:, -t:, None], 0)
    results = []
    for way in (module.read_few, module.read_many):
        torch.manual_seed(4)
        y = way(x, context, mask)[mask[:, -t:]]
        sources = [x, context, *(p for p in module.parameters() if p is not module.output.weight)]
        results.append([y, *torch.autograd.grad(y.square().sum(), sources)])
    if not dropout:  # the heads' weights lie in another order, and other ones are dropped
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b)
    assert all(x.isfinite().all() for pair in results for x in pair)


@pytest.mark.parametrize("t", [1, 30])
def test_no_gradient_goes_into_a_memory_that_is_detached(t):
    """And that of the weights is whole, though keys and values of memory and segment are made apart."""
    given = tokens(20).requires_grad_()
    gradients = []
    for detached in (True, False):
        module, x = layer(detached=detached, memory=20), tokens(t, 2).requires_grad_()
        y, after = module(x, Segments(given, torch.ones(2, 20, dtype=torch.bool)))
        assert after.x.requires_grad != detached
        found = torch.autograd.grad(y.square().sum(), [given, x, *module.parameters()], allow_unused=True)
        assert (found[0] is None) == detached
        gradients.append(found[1:])
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b)


def test_a_stream_writes_into_one_buffer_of_a_bounded_size():
    module = layer(same_length=True, memory=6).eval()
    with torch.no_grad():
        state, copies = None, 0
        for i in range(60):
            before = state
            _, state = module(tokens(1, i), state)
            copies += (
                before is not None and state.x.untyped_storage().data_ptr() != before.x.untyped_storage().data_ptr()
            )
            assert state.x.shape[1] == min(i + 1, 6)
            if state._room is not None:
                assert state._room.buffer.capacity <= 14
        assert copies < 20


def test_the_memory_keeps_nothing_else_of_a_long_call():
    module, state = layer(), None
    for grad in (False, True, False):
        with torch.set_grad_enabled(grad):
            state = module(tokens(60), state)[1]
        assert state.x.untyped_storage().nbytes() <= 4 * state.x.nbytes


def test_training_goes_on_from_what_inference_left():
    module = layer()
    with torch.inference_mode():
        module(tokens(6))
    module(tokens(6))[0].sum().backward()
    assert module.position.weight.grad is not None


def test_refuses_what_does_not_fit():
    refuses("num_heads may be", RelativeAttention, 10, 3)
    for settings in ({"memory": -1}, {"clamp": -1}):
        refuses("at least 0", layer, **settings)
    module = layer()
    for state in (Segments.empty(3, DIM), Segments.empty(2, 4), (1, 2)):
        refuses("expected a state of inputs", module, tokens(3), state)


def test_few_queries_project_nothing_of_the_memory():
    module = layer(memory=200).eval()
    _, state = module(tokens(200))
    cost = {}
    for t in (1, 60):
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            module(tokens(t), state)
        cost[t] = counter.get_total_flops()
    keys_and_values = 2 * 2 * 200 * DIM * 2 * DIM  # of two rows
    assert cost[1] < keys_and_values < cost[60]
