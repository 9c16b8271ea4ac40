"""Hybrids that leave single key heads whole: each head is that of one of two models (see `test_linearising`)."""

from typing import Any

import pytest
import torch
from decoder_models import ids, in_parts, logits, plain
from refusals import refuses
from torch import Tensor

import mnemos
from mnemos.hosts.linearised_cache import DRAFT
from mnemos.libraries import transformers


def settle(model: Any) -> Any:
    """New parameters far from where they start, that depend on the key head alone."""
    with torch.no_grad():
        for name, module in model.named_modules():
            if name.endswith(".linearised"):
                for key, value in module.named_parameters():
                    generator = torch.Generator().manual_seed(len(key))
                    if key.startswith("updates."):
                        value += 0.1 * torch.randn(value.shape, generator=generator)
                        continue
                    groups, far = len(module.far_heads) + len(module.full_heads), [*module.far_heads]
                    every = torch.randn(groups, len(value) // len(far), *value.shape[1:], generator=generator)
                    value += 0.5 * every[far].flatten(0, 1)
                    if key == "log_gamma":
                        value += 3
    return model


def hybrid(name: str, full: Any, **options: Any) -> Any:
    model = plain(name).float()
    mnemos.linearise(model, window=7, sinks=2, full=full, **options)
    return settle(model)


def outputs_of_heads(model: Any, attention: str, projection: str, heads: int) -> Tensor:
    """What the heads of an attention give its output projection, [B, T, H, M]."""
    seen: list[Tensor] = []
    module = model.get_submodule(f"{attention}.{projection}")
    hook = module.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    with torch.no_grad():
        model(ids(), use_cache=False)
    hook.remove()
    return seen[0].unflatten(-1, (heads, -1))


@pytest.mark.each_value
@pytest.mark.parametrize("state", ["none", "linear", "hedgehog", "delta"])
@pytest.mark.parametrize(
    ("name", "attention", "projection", "heads", "group", "full"),
    [
        ("llama", "model.layers.0.self_attn", "o_proj", 4, 2, [1]),
        ("gpt2", "transformer.h.0.attn", "c_proj", 3, 1, [0, 2]),
        ("phi", "model.layers.0.self_attn", "dense", 3, 1, [1]),
    ],
)
def test_each_head_is_that_of_softmax_or_of_the_window_with_its_state(
    name: str, attention: str, projection: str, heads: int, group: int, full: list[int], state: str
) -> None:
    given = f"{attention}:{','.join(map(str, full))}"
    softmax, linearised, both = plain(name).float(), hybrid(name, (), state=state), hybrid(name, given, state=state)
    found = [outputs_of_heads(model, attention, projection, heads) for model in (softmax, linearised, both)]
    whole = [i // group in full for i in range(heads)]
    apart = (found[0] - found[1]).abs().amax((0, 1, 3))
    assert bool((apart > 1e-2).all())
    for i, is_whole in enumerate(whole):
        torch.testing.assert_close(found[2][:, :, i], found[not is_whole][:, :, i], rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(
    ("name", "types", "full"),
    [
        ("mistral", ["sliding_attention"] * 2, ("model.layers.0.self_attn", "model.layers.1.self_attn:1")),
        ("mistral", ["sliding_attention"] * 2, ("model.layers.*.self_attn:1",)),
        (
            "gemma3",
            ["sliding_attention", "full_attention", "sliding_attention"],
            ("model.layers.0.self_attn", "model.layers.1.self_attn:0", "model.layers.2.self_attn:1"),
        ),
    ],
)
@torch.no_grad()
def test_whole_heads_keep_their_own_sliding_window(name: str, types: list[str], full: tuple[str, ...]) -> None:
    """Whether the layers beside them have theirs or not; what is kept has an end, and a draft is taken back."""
    options = {"layer_types": types} if name == "gemma3" else {}
    model = plain(name, sliding_window=20, num_hidden_layers=len(types), **options).float()
    mnemos.linearise(model, window=7, sinks=2, full=full)
    settle(model)
    x = ids(t=110)
    whole = logits(model, x)
    for ends in ((15, *range(70, 110)), (3, 30, 31, 50), (25,)):
        torch.testing.assert_close(in_parts(model, x, ends), whole, rtol=2e-5, atol=2e-5)
    cache = transformers().DynamicCache(config=model.config)
    logits(model, x[:, :105], None, cache)
    if type(cache.layers[0]).__name__ == "LinearisedLayer":  # Transformers' own layer cannot go back
        logits(model, torch.cat([x[:, 105:106], x[:, :3]], 1), None, cache)
        cache.crop(-3)
        torch.testing.assert_close(logits(model, x[:, 106:], None, cache), whole[:, 106:], rtol=2e-5, atol=2e-5)
    sizes = [layer.keys.shape[2] for layer, kind in zip(cache.layers, types, strict=True) if kind != "full_attention"]
    assert max(sizes) <= 19 + DRAFT


@torch.no_grad()
def test_caches_of_other_heads_are_refused_and_an_emptied_one_is_new() -> None:
    x, cache = ids(), transformers().DynamicCache()
    model = hybrid("llama", "model.layers.0.self_attn:1")
    expected = logits(model, x)
    logits(model, x[:, :5], None, cache)
    cache.crop(-5)
    torch.testing.assert_close(logits(model, x, None, cache), expected, rtol=2e-5, atol=2e-5)
    none, first, second = (), "model.layers.0.self_attn:0", "model.layers.0.self_attn:1"
    made = {full: hybrid("llama", full, state="none") for full in (none, first, second)}
    for one, other in ((none, second), (second, first)):
        for a, b in ((one, other), (other, one)):
            cache = transformers().DynamicCache()
            logits(made[a], x[:, :20], None, cache)
            refuses(r"with the key heads \(\d,\) whole.* give a new", logits, made[b], x[:, 20:], None, cache)
    step = mnemos.functional(model)
    _, state = step(x)
    mnemos.unlinearise(model)
    mnemos.linearise(model, window=7, sinks=2)
    refuses("begin with state=None", step, x, state)


def test_names_of_heads_and_the_report() -> None:
    report = mnemos.linearise(plain("llama"), full=["model.layers.0.self_attn:0", "model.layers.1.self_attn:0,1"])
    assert [(one.name, one.full_heads) for one in report.changed] == [("model.layers.0.self_attn", (0,))]
    assert [one.name for one in report.left] == ["model.layers.1.self_attn"]
    assert "  left key heads 0 of 2 of model.layers.0.self_attn: full= leaves them whole" in str(report)
    assert "beside the keys and values of what is left" in str(report)
    alone = mnemos.linearise(plain("llama", num_key_value_heads=1), full=["model.layers.0.self_attn:0"])
    assert [one.name for one in alone.left] == ["model.layers.0.self_attn"]  # the only key head is the whole attention
    assert report.changed[0].state_bytes == mnemos.linearise(plain("llama")).changed[0].state_bytes // 2
    for full, words in (
        ("model.layers.0.self_attn:2", r"expected key heads 0 to 1 of model\.layers\.0\.self_attn, found .* with 2"),
        ("model.layers.7.self_attn:0", "names no module"),
        ("model.layers.0.self_attn:0-1", r'key heads as in "NAME:0,2", found .*:0-1'),
        ("model.layers.1.mlp:0", r"found 'model\.layers\.1\.mlp', which is none"),
    ):
        refuses(words, mnemos.linearise, plain("llama"), full=full)
