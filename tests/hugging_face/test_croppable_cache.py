"""Assisted decoding of recurrent models of Transformers: the tokens of decoding without drafts."""

import pytest
import torch
from functional_models import build, tokens

import mnemos
from mnemos.hugging_face import CroppableCache
from mnemos.libraries import cache_name
from mnemos.types import InputError

# With 5.23 `generate` drafts for no model that has another name for its cache, as Mamba-2 then has.
NAMES = ["Qwen3Next", "KimiLinear", *(["Mamba2"] if cache_name() == "cache" else [])]
OPTIONS = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}


@pytest.mark.each_value
@pytest.mark.parametrize("name", NAMES)
def test_drafts_from_the_prompt_give_the_same_tokens(name):
    model, prompt = build(name), tokens(1, 9).repeat(1, 2)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.mul_(1.5)  # so that tokens depend on tokens, and drafts are rejected
    options = OPTIONS | {"max_new_tokens": 24, "attention_mask": torch.ones_like(prompt)}
    expected, lengths = model.generate(prompt, **options), []
    with mnemos.fast(model), CroppableCache(model) as cache:
        crop, stateful = cache.crop, model._is_stateful
        cache.crop = lambda n: (lengths.append(-n), crop(n))[1]
        found = model.generate(prompt, prompt_lookup_num_tokens=4, **{cache_name(): cache}, **options)
    assert torch.equal(found, expected)
    assert {1, 2, 3} & set(lengths)  # of four drafted tokens some were accepted, and others not
    assert not stateful
    assert "_is_stateful" not in vars(model)


@pytest.mark.skipif("Mamba2" in NAMES, reason="its cache has the common name")
def test_a_model_that_takes_no_such_cache_is_refused():
    with pytest.raises(InputError, match="found Mamba2ForCausalLM"):
        CroppableCache(build("Mamba2"))


@pytest.mark.each_value
@pytest.mark.parametrize("name", ["Qwen3Next", "Bamba"])
@torch.no_grad()
def test_the_states_are_those_of_the_kept_tokens_and_others_are_refused(name):
    model, x, places = build(name), tokens(2, 14), torch.arange(14).expand(2, -1)

    def read(a, b, cache):  # with positions: Bamba takes them from its first layer, which counts none
        return model(x[:, a:b], position_ids=places[:, a:b], **{cache_name(): cache}).logits

    with mnemos.fast(model), CroppableCache(model) as cache:
        cache.activate_past_recording()
        read(0, 6, cache)
        read(6, 11, cache)
        cache.crop(-3)
        with pytest.raises(InputError, match="crop"):
            cache.crop(-1)
        whole = model(x, use_cache=False).logits
        torch.testing.assert_close(read(8, 14, cache), whole[:, 8:], rtol=1e-4, atol=2e-5)


@torch.no_grad()
@pytest.mark.parametrize(("name", "fast"), [("Qwen3Next", False), ("Jamba", True)])
def test_layers_that_are_not_on_kernels_of_ours_from_their_state_are_refused(name, fast):
    """Transformers gives the scan of Mamba-1 no state: what is left of a call would lack what was read before."""
    model, x = build(name), tokens(1, 9)
    if fast:
        mnemos.fast(model)
    with CroppableCache(model) as cache:
        cache.activate_past_recording()
        for part in x.split(6, 1):
            model(part, **{cache_name(): cache})
        assert fast or not cache.is_croppable
        with pytest.raises(InputError, match="crop"):
            cache.crop(-1)
