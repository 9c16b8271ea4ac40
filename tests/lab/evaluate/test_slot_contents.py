import pytest
import torch
from cached_images import VIT, cached, layers

import mnemos
from mnemos import GRC
from mnemos.lab.evaluate.explain import SHOWN, candidates_for, compare_slots
from mnemos.ops.gated_cache.reference import reference_update


@pytest.mark.parametrize("candidate", ["linear", "layernorm_gelu"])
def test_candidates_are_the_update_with_its_gate_wide_open(candidate):
    layer = next(iter(layers(cached(VIT, preset="mnemos", candidate=candidate)).values()))
    tokens = torch.randn(5, layer.cache_dim)
    weights = {}
    for name, part in (("u", "update_gate"), ("r", "reset_gate"), ("c", "candidate")):
        linear = getattr(layer, part)
        weights[f"W_{name}"], weights[f"b_{name}"] = linear.weight.detach(), linear.bias.detach()
    weights["W_u"], weights["b_u"] = torch.zeros_like(weights["W_u"]), torch.full_like(weights["b_u"], 100.0)
    if layer.candidate_norm is not None:
        weights["gain"], weights["shift"] = layer.candidate_norm.weight.detach(), layer.candidate_norm.bias.detach()
    with torch.no_grad():
        found = candidates_for(layer, tokens, 3)
    for token, one in zip(tokens, found, strict=True):
        torch.testing.assert_close(reference_update(token[None], layer.cache[3:4], weights, candidate)[0], one)


def planted(width=32, slots=12, images=40):
    """A layer whose candidate is a linear map of the token alone, and a token of every picture for each slot."""
    torch.manual_seed(0)
    layer = mnemos.attention.GatedCacheAttention(2 * width, 2, grc=GRC(length=slots, preset="paper")).requires_grad_(
        False
    )
    layer.candidate.weight[:, width:] = 0
    slot = torch.arange(slots).repeat(images)
    image = torch.arange(images).repeat_interleave(slots)
    tokens = torch.randn(slots * images, width) + 0.5 * torch.randn(slots, width)[slot]
    return layer, tokens, slot, image


def test_slots_that_hold_a_token_are_found_to():
    layer, tokens, slot, image = planted()
    held = torch.tensor([(7 * i + 3) % len(tokens) for i in range(12)])
    layer.cache.copy_(candidates_for(layer, tokens[held], 0))
    found = compare_slots(layer, tokens, slot, image)
    assert found.slots.tolist() == [0, 2, 3, 5, 6, 8, 9, 11][:SHOWN]
    assert found.token[:, 0].tolist() == held[found.slots].tolist()
    assert found.numbers["cosine"] == pytest.approx(1, abs=1e-5)
    assert found.numbers["chance"] < 0.8
    assert found.numbers["raw_cosine"] < 0.8
    assert found.numbers["distinct"] == pytest.approx(12)
    assert 0.7 < found.numbers["distance"] < 1.3
    for row in found.token:  # a picture gives one token at most
        assert len(set(image[row].tolist())) == len(row)


def test_slots_that_average_their_place_are_found_to():
    layer, tokens, slot, image = planted()
    every = candidates_for(layer, tokens, 0)
    layer.cache.copy_(torch.stack([every[slot == i].mean(0) for i in range(12)]))
    numbers = compare_slots(layer, tokens, slot, image).numbers
    assert numbers["place"] > 0.99
    assert numbers["cosine"] < 0.9
    assert numbers["distance"] < 0.6
    layer.cache.copy_(every.mean(0) + 1e-3 * torch.randn(12, 32))
    numbers = compare_slots(layer, tokens, slot, image).numbers
    assert numbers["distance"] < 0.01
    assert numbers["place"] < 0.1


def test_an_empty_cache_holds_nothing():
    layer, tokens, slot, image = planted()
    assert compare_slots(layer, tokens, slot, image) == "its stored cache is empty"
