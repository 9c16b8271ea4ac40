"""The steps of the recurrent layers in double precision: their derivatives, with padding and from any state."""

import pytest
import torch
from functional_models import build, step_of, tokens
from torch.autograd import gradcheck

import mnemos
from mnemos.hugging_face.functional_cache import FunctionalCache, Padding
from mnemos.hugging_face.recurrent_layers import CHUNK, STEPS, run_stabilised
from mnemos.types import leaves

LAYERS = {
    "Mamba": "MambaMixer",
    "FalconMamba": "FalconMambaMixer",
    "Jamba": "JambaMambaMixer",
    "Mamba2": "Mamba2Mixer",
    "Qwen3Next": "Qwen3NextGatedDeltaNet",
    "Rwkv": "RwkvSelfAttention",
    "RecurrentGemma": "RecurrentGemmaRecurrentBlock",
    "xLSTM": "xLSTMLayer",
}
SMALL = {
    "xLSTM": {"hidden_size": 4, "num_heads": 2, "norm_reduction_force_float32": False, "embedding_dim": 4},
}


@pytest.mark.parametrize("name", LAYERS)
def test_derivatives_of_a_layer(name):
    torch.manual_seed(0)
    model = build(name, **SMALL.get(name, {}))
    step = mnemos.functional(model)
    layer = next(part for part in model.modules() if type(part).__name__ == LAYERS[name]).double()
    cache = FunctionalCache(step._layout, torch.tensor([3, 0]), None, 3, None)
    x = torch.randn(2, 3, model.config.hidden_size, dtype=torch.float64)
    STEPS[LAYERS[name]](layer, cache, x)  # a state that is not zero
    kind, start = type(cache.new[0]), [z.detach().requires_grad_() for z in leaves(cache.new[0])]
    padding = Padding(torch.tensor([[True, True, True], [True, False, True]]))

    def run(x, *parts):
        cache = FunctionalCache(step._layout, torch.tensor([3, 3]), (kind(*parts),), 3, padding)
        y = STEPS[LAYERS[name]](layer, cache, x)
        y = y[0] if isinstance(y, tuple) else y
        valid = padding.valid[..., None]
        return y.masked_fill(~valid, 0), *leaves(cache.new[0])

    assert gradcheck(run, (x.requires_grad_(), *start), fast_mode=True)


LLAMA = {"num_key_value_heads": 1, "intermediate_size": 6}
SINGLE = {"eps": 1e-3, "atol": 1e-3, "rtol": 1e-3}  # Llama's norms compute in float32 at any type


@pytest.mark.parametrize(("name", "options", "bounds"), [("GPT2", {}, {}), ("Llama", LLAMA, SINGLE)])
def test_derivatives_of_a_decoder(name, options, bounds):
    model = build(name, hidden_size=4, num_hidden_layers=1, num_attention_heads=2, **options).double()
    step = mnemos.functional(model)
    state = step(tokens(2, 2), None, torch.tensor([[True, True], [False, True]]))[1]
    past = state.parts[0]
    x = model.get_input_embeddings()(tokens(2, 3)).detach()
    mask = torch.tensor([[True, False, True], [True, True, False]])

    def run(x, k, v):
        part = type(past)(k, v, past.valid, past.seen)
        y, new = step(x, state._replace(parts=(part,)), mask)
        return y, new.parts[0].k[:, 1:], new.parts[0].v[:, 1:]

    assert gradcheck(run, tuple(z.detach().requires_grad_() for z in (x, past.k, past.v)), fast_mode=True, **bounds)


@pytest.mark.parametrize("length", [1, CHUNK + 3])
def test_chunks_equal_the_recurrence(length):
    torch.manual_seed(length)
    kind = {"dtype": torch.float64}
    q, k, v = (torch.randn(2, length, 3, n, **kind) for n in (4, 4, 5))
    log_decay, log_write = -torch.rand(2, length, 3, **kind), torch.rand(2, length, 3, **kind)
    states, tops, expected = [torch.randn(2, 3, 4, 5, **kind)], [torch.randn(2, 3, **kind)], []
    for t in range(length):
        top = torch.maximum(log_decay[:, t] + tops[-1], log_write[:, t])
        keep, write = ((x - top).exp()[..., None, None] for x in (log_decay[:, t] + tops[-1], log_write[:, t]))
        states.append(keep * states[-1] + write * k[:, t, ..., None] * v[:, t, :, None])
        tops.append(top)
        expected.append((states[-1] * q[:, t, ..., None]).sum(2))
    y, m, s, top = run_stabilised(q, k, v, log_decay, log_write, states[0], tops[0])
    torch.testing.assert_close(
        (y, m, s, top), (torch.stack(expected, 1), torch.stack(tops[1:], 1), states[-1], tops[-1])
    )


def test_other_caches_run_their_own_forward():
    step, x = step_of("Mamba"), tokens(2, 5)
    layer = step.model.backbone.layers[0].mixer
    with torch.no_grad():
        hidden = step.model.get_input_embeddings()(x)
        assert torch.equal(layer(hidden), type(layer).forward.__wrapped__(layer, hidden))
