"""An adapter: the trained states of a linearised decoder in a file of their own."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from decoder_models import plain
from refusals import refuses

import mnemos
from mnemos.hosts import load_adapter, save_adapter


def trained() -> Any:
    """A hybrid whose new parameters are all other numbers than at the start."""
    model = plain("llama").float()
    mnemos.linearise(model, window=6, sinks=2, rank=2, full="model.layers.0.self_attn")
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, value in model.named_parameters():
            if ".linearised." in name:
                value += 0.3 * torch.randn(value.shape, generator=generator)
    return model


@torch.no_grad()
def test_a_decoder_with_the_adapter_is_the_trained_one(tmp_path: Any) -> None:
    model, path = trained(), tmp_path / "adapter.safetensors"
    ids = torch.randint(3, 40, (2, 30), generator=torch.Generator().manual_seed(1))
    save_adapter(model, path, {"name": "tiny", "texts": ["a"]})
    other = plain("llama").float()
    assert load_adapter(other, path) == {"name": "tiny", "texts": ["a"]}
    assert torch.equal(other(ids).logits, model(ids).logits)
    assert path.stat().st_size < 0.9 * sum(4 * value.numel() for value in model.parameters())
    assert not any("lm_head" in name for name in mnemos.tree_file.read(path, "mnemos state-adapter 1")["weights"])

    model.save_pretrained(tmp_path)  # an adapter may lie beside the model, whose base is read too
    base = mnemos.hosts.from_pretrained(type(model.model), tmp_path)
    assert torch.equal(base(ids).last_hidden_state, model.model(ids).last_hidden_state)

    halved = plain("llama").bfloat16()  # rounded weights are those of the decoder
    load_adapter(halved, path)
    torch.testing.assert_close(halved(ids).logits.float(), model(ids).logits, rtol=0.2, atol=0.2)
    packed = plain("llama").float()  # as 4-bit weights are stored
    weight = packed.model.layers[1].mlp.up_proj.weight
    integers = torch.full((weight.numel() // 2, 1), 200, dtype=torch.uint8)
    packed.model.layers[1].mlp.up_proj.weight = torch.nn.Parameter(integers, requires_grad=False)
    assert load_adapter(packed, path)["name"] == "tiny"


def test_what_is_refused_leaves_the_model_as_it_was(tmp_path: Any) -> None:
    path = tmp_path / "adapter.safetensors"
    save_adapter(trained(), path, {"name": "tiny"})
    different = plain("llama").float()
    with torch.no_grad():
        for value in different.parameters():
            value.copy_(torch.randn(value.shape, generator=torch.Generator().manual_seed(9)))
    for other, words in (
        (trained(), "found a linearised one"),
        (plain("gpt2"), "another architecture"),
        (plain("llama", num_hidden_layers=3), "another architecture .*layers.2"),
        (different, r"at a distance of \d+\.\d\d of their size; load tiny"),
    ):
        names = list(other.state_dict())
        refuses(words, load_adapter, other, path)
        assert list(other.state_dict()) == names
    model = plain("llama")
    mnemos.linearise(model, window=6, where="model.layers.0.self_attn")
    mnemos.linearise(model, window=8, where="model.layers.1.self_attn")
    save_adapter(model, path)
    for number in (0, 1):  # the first state can be made, the second cannot
        other = plain("llama")
        other.model.layers[number].self_attn.forward = other.model.layers[number].self_attn.forward
        refuses(rf"layers\.{number}\.self_attn was left \(its forward was replaced", load_adapter, other, path)
        assert not any("linearised" in name for name, _ in other.named_modules())
        assert not hasattr(other.config, "mnemos_linearised")
    mnemos.unlinearise(model)
    mnemos.linearise(model, window=6)
    save_adapter(model, path)
    kept = mnemos.tree_file.read(path, "mnemos state-adapter 1")
    name, value = next(iter(kept["weights"].items()))
    for weights, words in (({"other": value}, "other"), ({name: value.flatten()[:-1]}, "must match the size")):
        mnemos.tree_file.write(tmp_path / "changed", {**kept, "weights": weights}, "mnemos state-adapter 1")
        fresh = plain("llama")
        refuses(f"expected weights that fit its own states, .*{words}", load_adapter, fresh, tmp_path / "changed")
        assert not any("linearised" in name for name, _ in fresh.named_modules())
    refuses(r"linearise model\.layers\.1\.self_attn, found that its forward was replaced", load_adapter, other, path)
    assert not any("linearised" in name for name, _ in other.named_modules())
    refuses("found none of its states", save_adapter, plain("llama"), tmp_path / "no")
    torch.save({}, tmp_path / "other")
    refuses("expected a state-adapter", load_adapter, plain("llama"), tmp_path / "other")


@pytest.mark.parametrize(("file", "whole"), [("hybrid-8", 8), ("constant", 0)])
def test_the_adapters_of_the_examples_leave_the_attentions_whole_that_are_ranked_first(file: str, whole: int) -> None:
    root = Path(__file__).parents[2]
    path = root / "examples" / "smollm2" / f"{file}.safetensors"
    kept = mnemos.tree_file.read(path, "mnemos state-adapter 1")
    ranking = json.loads((root / "results" / "attention_ranking.json").read_text())
    changed = {name for one in kept["states"] for name in one["names"]}
    assert changed == set(ranking["names"]) - set(ranking["order"][:whole])
    assert path.stat().st_size < 12e6
