"""`mnemos.functional` of a decoder with gated caches per stream: the cache of each row is a part of the state."""

import pytest
import torch
from torch.nn import functional as F

import mnemos
from mnemos.hosts import HostBranch
from mnemos.libraries import transformers

IDS = torch.randint(3, 30, (2, 15), generator=torch.Generator().manual_seed(1))


@pytest.fixture(params=["GPT2", "Mistral"])
def model(request):
    library = transformers()
    torch.manual_seed(0)
    if request.param == "GPT2":
        config = library.GPT2Config(vocab_size=30, n_embd=16, n_layer=2, n_head=2, n_positions=40)
        model = library.GPT2LMHeadModel(config)
    else:
        sizes = {"hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 2}
        config = library.MistralConfig(vocab_size=30, num_key_value_heads=1, sliding_window=4, **sizes)
        model = library.MistralForCausalLM(config)
    mnemos.cache(model, mnemos.GRC(length=4, block=3, scope="stream"))
    model = model.double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn_like(parameter)
        for part in model.modules():
            if isinstance(part, HostBranch):
                part.mix.fill_(0.5)  # the cache counts
    return model


def gradients(model, logits):
    model.zero_grad()
    F.cross_entropy(logits[:, :-1].flatten(0, 1), IDS[:, 1:].flatten()).backward()
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def test_cut_anywhere_it_is_the_model_in_values_and_gradients(model):
    step, state, outputs = mnemos.functional(model), None, []
    for part in IDS.split([4, 1, 7, 3], 1):
        y, state = step(part, state)
        outputs.append(y)
    whole, cut = model(IDS, use_cache=False).logits, torch.cat(outputs, 1)
    torch.testing.assert_close(cut, whole, rtol=1e-9, atol=1e-9)
    for found, expected in zip(gradients(model, cut), gradients(model, whole), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-10)
    caches = [part.cache for part in state.parts if hasattr(part, "cache")]
    assert [tuple(cache.shape) for cache in caches] == [(2, 4, 8)] * 2


def test_padding_and_other_rows_change_nothing(model):
    step = mnemos.functional(model)
    mask = torch.ones_like(IDS, dtype=torch.bool)
    mask[1, :4] = mask[1, 9] = mask[1, 13:] = False
    with torch.no_grad():
        y, state = step(IDS, None, mask)
        alone, own = step(IDS[1:][:, mask[1]])
        torch.testing.assert_close(y[1:][:, mask[1]], alone, rtol=1e-9, atol=1e-9)
        state = mnemos.reset(state, torch.tensor([True, False]))
        more, _ = step(IDS[:, :5], state)
        torch.testing.assert_close(more[1:], step(IDS[1:, :5], own)[0], rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(more[:1], step(IDS[:1, :5])[0], rtol=1e-9, atol=1e-9)


def test_a_stream_writes_what_generate_writes(model):
    tokens, _ = mnemos.Stream(mnemos.functional(model)).prefill(IDS).generate(8, temperature=0)
    theirs = model.generate(IDS, max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert torch.equal(tokens, theirs[:, IDS.shape[1] :])
