"""The steps of the recurrent layers in double precision: their derivatives, with padding and from any state."""

import pytest
import torch
from functional_models import build, in_pieces, step_of, tokens
from module_surgery import WAYS
from torch.autograd import gradcheck

import mnemos
from mnemos.hugging_face.functional_cache import RECURRENT, FunctionalCache
from mnemos.types import leaves

LAYERS = {
    "Mamba": "MambaMixer",
    "FalconMamba": "FalconMambaMixer",
    "Jamba": "JambaMambaMixer",
    "Mamba2": "Mamba2Mixer",
    "Qwen3Next": "Qwen3NextGatedDeltaNet",
}


@pytest.mark.parametrize("name", LAYERS)
def test_derivatives_of_a_layer(name):
    torch.manual_seed(0)
    model = build(name)
    step = mnemos.functional(model)
    layer = next(part for part in model.modules() if type(part).__name__ == LAYERS[name]).double()
    cache = FunctionalCache(step._layout, torch.tensor([3, 0]), None, 3, None)
    x = torch.randn(2, 3, model.config.hidden_size, dtype=torch.float64)
    layer(x, cache)  # a state that is not zero
    kind, start = type(cache.new[0]), [z.detach().requires_grad_() for z in leaves(cache.new[0])]
    valid = torch.tensor([[True, True, True], [False, True, True]])

    def run(x, *parts):
        cache = FunctionalCache(step._layout, torch.tensor([3, 3]), (kind(*parts),), 3, valid)
        y = layer(x, cache)
        return y.masked_fill(~valid[..., None], 0), *leaves(cache.new[0])

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


def test_other_caches_run_their_own_forward():
    step, x = step_of("Mamba"), tokens(2, 5)
    layer = step.model.backbone.layers[0].mixer
    with torch.no_grad():
        hidden = step.model.get_input_embeddings()(x)
        assert torch.equal(layer(hidden), type(layer).forward.__wrapped__(layer, hidden))


@pytest.mark.parametrize("name", [*LAYERS, "NemotronH", "Qwen3_5", "OlmoHybrid"])
@torch.no_grad()
def test_what_is_around_a_module_or_in_its_place_counts(name):
    x = tokens(2, 9)
    for way in WAYS:
        model = build(name)
        plain = model(x).logits
        for above, layer in list(model.named_modules()):
            if type(layer).__name__ in RECURRENT:
                for part, _ in reversed(list(layer.named_modules(prefix=above))[1:]):
                    way(model, part)
        wanted = model(x).logits
        assert (wanted - plain).abs().max() > 1e-3
        found, _ = in_pieces(mnemos.functional(model), x, [4, 1, 4])
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("name", [*LAYERS, "NemotronH", "Qwen3_5", "OlmoHybrid"])
@torch.no_grad()
def test_the_activation_of_the_configuration(name):
    model, x = build(name, **{"mamba_hidden_act" if name == "NemotronH" else "hidden_act": "gelu"}), tokens(2, 9)
    found, _ = in_pieces(mnemos.functional(model), x, [4, 1, 4])
    torch.testing.assert_close(found, model(x).logits, rtol=1e-4, atol=2e-5)
