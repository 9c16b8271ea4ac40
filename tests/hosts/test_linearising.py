"""Linearised decoders of Hugging Face: the window is the model bit for bit, and any cut of a text gives the same."""

import copy
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from decoder_models import FAMILIES, FURTHER, ids, in_parts, logits, plain
from hosts import build
from refusals import refuses
from torch import Tensor, nn

import mnemos
from mnemos.hosts import adapters, hooks, linearised
from mnemos.libraries import transformers
from mnemos.types import leaves

SERVED = [name for name in (*FAMILIES, *FURTHER) if not name.startswith("falcon")]
DIFFERENT = ("llama", "phi", "gemma3", "opt", "Cohere2", "Glm4")  # families whose rotary positions or layers differ
ALIKE = [pytest.param(name, marks=pytest.mark.exhaustive) for name in SERVED if name not in DIFFERENT]
WHOLE = "model.layers.0.self_attn:1"  # a key head of llama that linearise leaves as it is
FULL = {
    "gpt2-full": ("transformer.h.0.attn:0,2", "transformer.h.1.attn"),
    "phi-full": ("model.layers.*.self_attn:1",),
    "opt-full": ("model.decoder.layers.0.self_attn:3", "model.decoder.layers.0.self_attn:0"),
}


def decoder(name: str, gamma: float | None = None, **options: Any) -> Any:
    """A decoder in float32; linearised if γ is given, with a state that is not the default one."""
    model = plain(name, **({"sliding_window": 20} if name == "mistral" else {})).float()
    if gamma is not None:
        report = mnemos.linearise(model, **{"window": 7, "sinks": 2, "state": "hedgehog", "rotary": True, **options})
        with torch.no_grad():
            for key, parameter in report.maps.items():
                if key.endswith("log_gamma"):
                    parameter.fill_(gamma)
                elif key.endswith("_map"):
                    parameter += 0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3))
            for key, parameter in report.updates.items():
                if key.endswith(".up"):  # they begin with zero
                    parameter += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(4))
    return model


def new_cache(model: Any = None) -> Any:
    return transformers().DynamicCache(**({} if model is None else {"config": model.config}))


@pytest.mark.each_value
@pytest.mark.parametrize("name", [*DIFFERENT, *ALIKE])
@torch.no_grad()
def test_within_the_window_the_model_is_as_before(name: str) -> None:
    """Outputs, also of padded rows, of a call and of calls with a cache: bit for bit, and without it again."""
    model = decoder(name)
    if "Moe" in name or name == "Mixtral":
        model.set_experts_implementation("eager")
    x, mask = ids(t=19), torch.arange(19) >= torch.tensor([[0], [4]])
    names = [key for key, _ in model.named_parameters()]

    def outputs() -> list[Tensor]:
        cache = new_cache(model)
        parts = [logits(model, x[:, part], None, cache) for part in (slice(0, 9), slice(9, 10), slice(10, 19))]
        alone = model(x, use_cache=False).logits
        return [alone, model(x).logits, logits(model, x, mask), *parts]

    before = outputs()
    report = mnemos.linearise(model, window=19, sinks=3, rank=2, state="hedgehog" if len(name) % 2 else "delta")
    after = outputs()
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert len(report.changed) + len(report.left) == 2
    mnemos.unlinearise(model)
    assert all(torch.equal(a, b) for a, b in zip(before, outputs(), strict=True))
    assert names == [key for key, _ in model.named_parameters()]
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.each_value
@pytest.mark.parametrize("name", [*DIFFERENT, *ALIKE, *FULL])
@pytest.mark.parametrize("state", ["none", "linear", "hedgehog", "delta"])
@pytest.mark.parametrize(("rotary", "half_life"), [(True, 0), (False, 5)])
@torch.no_grad()
def test_any_cut_and_left_padding(name: str, state: str, rotary: bool, half_life: int) -> None:
    options = {"state": state, "rotary": rotary, "half_life": half_life, "full": FULL.get(name)}
    model, x = decoder(name.removesuffix("-full"), -1.0 if state != "delta" else 0.5, **options), ids()
    whole = logits(model, x)
    for ends in ((3, 5, *range(17, 31)), (20, 21)):
        torch.testing.assert_close(in_parts(model, x, ends), whole, rtol=2e-5, atol=2e-5)
    mask = torch.arange(33) >= torch.tensor([[0], [4]])
    padded = torch.cat([x[:1], torch.cat([x[1:, :4], x[1:, :-4]], 1)])
    for found in (
        logits(model, padded, mask),
        in_parts(model, padded, (6, *range(20, 33)), mask, new_cache()),
    ):
        torch.testing.assert_close(found[1, 4:], whole[1, :-4], rtol=2e-5, atol=2e-5)


@torch.no_grad()
def test_tokens_of_a_call_without_a_mask_are_valid() -> None:
    """In the window they see what was padding before them, as in Transformers; beyond it nothing does."""
    model, x, mask = plain("llama", num_hidden_layers=1).float(), ids(), torch.arange(33) >= torch.tensor([[0], [2]])
    mnemos.linearise(model, window=7, sinks=1)
    cache, places = new_cache(), mask.cumsum(1) - 1
    logits(model, x[:, :4], mask[:, :4], cache)
    logits(model, x[:, 4:6], None, cache, position_ids=places[:, 4:6])
    found = logits(model, x[:, 6:], None, cache, position_ids=places[:, 6:])
    torch.testing.assert_close(found, logits(model, x, mask)[:, 6:], rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(("state", "rotary"), [("hedgehog", True), ("delta", False)])
def test_gradients_flow_through_a_carried_cache(state: str, rotary: bool) -> None:
    model = decoder("llama", -1.0, rank=2, state=state, rotary=rotary)
    x, found = ids(), []
    for cuts in ((), (2, 9, 10)):
        loss = in_parts(model, x, cuts).square().sum()
        parameters = [p for p in model.parameters() if p.requires_grad]
        found.append(torch.autograd.grad(loss, parameters, allow_unused=True))
    for a, b in zip(*found, strict=True):
        assert a is not None
        torch.testing.assert_close(a, b, rtol=2e-4, atol=2e-5 * float(b.abs().max()) + 1e-6)


@pytest.mark.parametrize(
    ("state", "full", "cached", "options"),
    [
        ("hedgehog", None, False, {}),
        ("hedgehog", None, False, {"num_beams": 3}),
        ("hedgehog", WHOLE, False, {"prompt_lookup_num_tokens": 3}),
        ("delta", None, False, {"prompt_lookup_num_tokens": 3}),
        ("delta", WHOLE, False, {"num_beams": 3}),
        ("hedgehog", None, True, {"num_beams": 3}),
    ],
    ids=["greedy", "beams", "drafts", "delta", "full", "cached"],
)
@torch.no_grad()
def test_generate(state: str, full: str | None, cached: bool, options: dict[str, Any]) -> None:
    """Beyond the window, with padded rows: the tokens of a model that reads everything again for each token.

    Transformers reads a prompt and its first drafts in one call, of which the last tokens go back: here of a long one.
    """
    model = decoder("llama", -1.0, state=state, rotary=state == "hedgehog", full=full)
    if cached:
        mnemos.cache(model, mnemos.GRC(length=3, block=2, scope="stream"))
    x, mask = ids(t=12), torch.arange(12) >= torch.tensor([[0], [5]])
    if "prompt_lookup_num_tokens" in options:  # of one row in transformers
        x, mask = ids(1, 40).repeat(1, 2), torch.ones(1, 80)
    given = {"attention_mask": mask.long(), "max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False}
    short = model.generate(x, **given, **options)
    options.pop("prompt_lookup_num_tokens", None)
    again = model.generate(x, **given, **options, use_cache=False)
    assert torch.equal(short, again)


@pytest.mark.parametrize(("before", "back", "full"), [(3, 3, None), (25, 3, WHOLE), (25, 64, None), (0, 64, WHOLE)])
@torch.no_grad()
def test_the_last_call_is_taken_back(before: int, back: int, full: str | None) -> None:
    """Within the window and beyond it: as if the tokens had not been read. What grows are the whole heads alone."""
    model, x = decoder("llama", -1.0, rotary=False, full=full), ids(t=93)
    caches = [new_cache(), new_cache()]
    for cache in caches[: min(before, 1) * 2]:
        logits(model, x[:, :before], None, cache)
    logits(model, torch.cat([x[:, before : before + 9], x[:, :back]], 1), None, caches[0])
    refuses(r"at most 64 tokens, of the last call alone.* found 65", caches[0].crop, -65)
    caches[0].crop(-back)
    logits(model, x[:, before : before + 9], None, caches[1])
    assert caches[0].get_seq_length() == before + 9
    found = [logits(model, x[:, before + 9 :], None, cache) for cache in caches]
    torch.testing.assert_close(*found, rtol=2e-5, atol=2e-5)
    kept = [layer.keys for layer in caches[0].layers]
    assert full is None or (kept[0].shape == (2, 1, 93, 6) and kept[1] is None)


@torch.no_grad()
def test_without_rotary_positions_keys_are_kept_once() -> None:
    model, cache = decoder("gpt2", -1.0, rotary=False), new_cache()
    expected = logits(decoder("gpt2", -1.0), x := ids(), None, new_cache())
    assert torch.equal(logits(model, x, None, cache), expected)
    assert cache.layers[0].current().window.raw.numel() == 0
    sizes = [
        mnemos.linearise(plain("gpt2"), window=7, rotary=rotary).changed[0].state_bytes for rotary in (False, True)
    ]
    assert sizes[0] == sizes[1]


@torch.no_grad()
def test_the_cache_has_constant_size_and_survives_copies() -> None:
    model = decoder("llama", -1.0)
    x, sizes, cache = ids(t=60), [], new_cache(model)

    def size(cache: Any) -> int:
        kept = [value for layer in cache.layers for value in (layer.keys, layer.values, layer.raw, layer.state)]
        rings = [vars(layer.ring[0]).values() for layer in cache.layers if layer.ring is not None]
        kept += [value for ring in rings for value in ring if isinstance(value, Tensor)]
        storages = [leaf.untyped_storage() for value in kept for leaf in leaves(value)]
        return sum({one.data_ptr(): one.nbytes() for one in storages}.values())

    for part in (slice(0, 20), slice(20, 37), slice(37, 40), *(slice(t, t + 1) for t in range(40, 50))):
        logits(model, x[:, part], None, cache)
        sizes.append(size(cache))
    assert len(set(sizes[:3])) == 1
    assert len(set(sizes[3:])) == 1
    states = [leaf.numel() for layer in cache.layers for leaf in leaves(layer.current())]
    assert sizes[0] == 4 * sum(states) + 2 * 4 * 2  # `seen` is int64
    other = copy.deepcopy(cache)
    expected = logits(model, x[:, 50:], None, cache)
    assert torch.equal(logits(model, x[:, 50:], None, other), expected)
    for clone in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(logits(clone, x), logits(model, x))
        clone.get_decoder().layers[0].self_attn.linearised.log_gamma += 1
        assert not torch.equal(logits(clone, x), logits(model, x))


@pytest.mark.each_value
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama", {"state": "delta", "rotary": False}),
        ("llama", {"rank": 2, "full": (WHOLE, "model.layers.1.self_attn")}),
        ("gemma3", {}),
        ("phi", {"rotary": False}),
        ("gpt2", {"state": "none"}),
    ],
)
def test_functional_streams_and_replay(name: str, options: dict[str, Any]) -> None:
    """A state that is an argument: any cut, any padding."""
    model = decoder(name, -1.0, **options)
    step, x = mnemos.functional(model), ids(t=30)
    assert step.state_kind == ("growing" if "full" in options else "constant")
    with torch.no_grad():
        whole, mask = logits(model, x), torch.rand(2, 30, generator=torch.Generator().manual_seed(1)) > 0.3
        parts, state = [], None
        for part in (slice(0, 3), slice(3, 20), slice(20, 21), slice(21, 30)):
            y, state = step(x[:, part], state)
            parts.append(y)
        torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=2e-5, atol=2e-5)
        y, state = step(x[:, :20], None, mask[:, :20])
        y = torch.cat([y, step(x[:, 20:], state, mask[:, 20:])[0]], 1)
        torch.testing.assert_close(y[1][mask[1]], logits(model, x[1:, mask[1]])[0], rtol=2e-5, atol=2e-5)

    def advance(segment: Tensor, state: Any) -> Any:
        y, state = step(segment, state)
        return y.square().mean(), state

    mnemos.replay(advance, list(x.split(10, 1)), None)
    found = [p.grad for p in model.parameters()]
    model.zero_grad()
    loss, state = torch.zeros(()), None
    for segment in x.split(10, 1):
        part, state = advance(segment, state)
        loss = loss + part / 3
    loss.backward()
    for a, parameter in zip(found, model.parameters(), strict=True):
        torch.testing.assert_close(a, parameter.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("cls", "full"), [("AutoModelForCausalLM", None), ("LlamaForCausalLM", None), ("LlamaForCausalLM", WHOLE)]
)
@torch.no_grad()
def test_saved_and_loaded(cls: str, full: str | None, tmp_path: Any) -> None:
    model = decoder("llama", -1.0, where="model.layers.0.self_attn", rank=2, full=full)
    report = mnemos.linearise(model, window=9, sinks=0, state="linear", rotary=False)
    assert full or str(report).endswith("at any length")  # what is left keeps no keys and values either
    x = ids()
    expected = logits(model, x)
    for inside in ("inside", ""):
        model.save_pretrained(tmp_path / inside)
        model = mnemos.hosts.from_pretrained(getattr(transformers(), cls), tmp_path, subfolder=inside).eval()
        assert torch.equal(logits(model, x), expected)
    kind = getattr(transformers(), cls)
    path = tmp_path / "config.json"
    path.write_text(path.read_text().replace('"sinks"', '"sources": 1, "sinks"'))
    refuses("other settings than linearise", mnemos.hosts.from_pretrained, kind, tmp_path)
    mnemos.unlinearise(model)
    model.save_pretrained(tmp_path)
    refuses("saved with its caches or linearised", mnemos.hosts.from_pretrained, kind, tmp_path)


def test_what_is_refused() -> None:
    llama = plain("llama")
    for model, options, words in (
        (plain("falcon"), {}, "computes attention itself"),
        (llama, {"state": "mamba"}, r"linearise\.state: expected 'none', .*found 'mamba'"),
        (llama, {"half_life": 10**9}, "half_life: expected at most 1,048,576, found 1000000000; 0 never"),
        (llama, {"window": 0}, "window: expected at least 1, found 0"),
        (llama.model.layers[0], {}, "a part of a decoder; pass the model of Transformers and choose with where="),
        (build("hf_bert"), {}, "encoder.layer.0.attention.self was left .it is no causal self-attention of a decoder"),
        (plain("gpt2", reorder_and_upcast_attn=True), {}, "reorder_and_upcast_attn=True computes attention itself"),
        (build("timm_vit"), {}, "it is no causal self-attention of a decoder"),
    ):
        refuses(words, mnemos.linearise, model, **options)
    refuses("nothing to undo", mnemos.unlinearise, llama)
    refuses("linearised already", mnemos.linearise, decoder("llama", -1.0), window=7)
    for window in (6, 7):
        report = mnemos.linearise(decoder("gemma3"), window=window)
        why = f"its own sliding window of 6 tokens is not longer than window={window}"
        assert [one.why for one in report.left] == [why]


def test_a_decoder_that_was_changed_later_is_refused() -> None:
    model = decoder("llama", 0.0, rank=2)
    attention = model.model.layers[1].self_attn
    attention.forward = attention.forward
    refuses(r"linearise changed it; model\.layers\.1\.self_attn: its forward was replaced", mnemos.unlinearise, model)
    assert model.model.layers[0].self_attn.linearised is not None
    del attention.forward, attention.q_proj
    refuses("LlamaAttention: expected the projection q_proj of a low-rank update, found none", model, ids())


@pytest.mark.parametrize("full", [None, WHOLE])
@torch.no_grad()
def test_rows_of_a_cache_are_repeated_selected_and_begun_anew(full: str | None) -> None:
    model, x = decoder("llama", -1.0, full=full), ids()
    whole, cache = logits(model, x), new_cache(model)
    for size in (4, 20):  # within the window, and beyond it
        cache.reset()
        first = logits(model, x[:, :size], None, cache)
        torch.testing.assert_close(first, whole[:, :size], rtol=2e-5, atol=2e-5)
        for change, rows in (
            (lambda other: other.batch_repeat_interleave(2), [0, 0, 1, 1]),
            (lambda other: other.batch_select_indices(torch.tensor([1])), [1]),
            (lambda other: other.reorder_cache(torch.tensor([1, 1])), [1, 1]),
        ):
            change(other := copy.deepcopy(cache))
            found = logits(model, x[rows, size:], None, other)
            torch.testing.assert_close(found, whole[rows, size:], rtol=2e-5, atol=2e-5)


@torch.no_grad()
def test_a_cache_may_be_passed_by_position() -> None:
    model = decoder("llama", -1.0)
    attention, x = model.model.layers[0].self_attn, torch.randn(2, 12, 24, generator=torch.Generator().manual_seed(0))
    angles, caches = model.model.rotary_emb(x, torch.arange(12)[None]), (new_cache(), new_cache())
    found = attention(x, angles, None, caches[0])[0]
    assert torch.equal(found, attention(x, angles, None, past_key_values=caches[1])[0])
    assert [cache.get_seq_length() for cache in caches] == [12, 12]


class Wrapped(nn.Module):
    """As PEFT's layers wrap a projection."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.base_layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * self.base_layer(x)


def wrap(model: Any) -> Any:
    for layer in model.get_decoder().layers:
        for name in ("q_proj", "v_proj"):
            setattr(layer.self_attn, name, Wrapped(getattr(layer.self_attn, name)))
    return model


@torch.no_grad()
def test_low_rank_updates_and_adapters() -> None:
    """Adapters may wrap projections before and after; none of theirs is named as a projection. Quantised ones are."""
    x, expected = ids(t=6), logits(wrap(decoder("llama")), ids(t=6))
    for first in (True, False):
        model = wrap(decoder("llama")) if first else decoder("llama")
        report = mnemos.linearise(model, rank=2)
        assert len(report.updates) == 16
        for parameter in report.updates.values():
            parameter += 1
        model = model if first else wrap(model)
        assert not torch.equal(logits(model, x), expected)
        mnemos.unlinearise(model)
        assert torch.equal(logits(model, x), expected)
    model = decoder("llama")
    for layer in model.get_decoder().layers:
        for child in layer.self_attn.children():
            child.weight = nn.Parameter(child.weight.to(torch.uint8), False)
    assert {p.dtype for p in mnemos.linearise(model, rank=2).updates.values()} == {torch.float32}
    said = r"weights \[24, 24\] of floating-point numbers, found q_proj \(Linear\) with \(24, 24\) in torch\.uint8;"
    refuses(said, mnemos.hosts.merge_updates, model)
    names = [name for name, _ in model.named_modules() if name.endswith(".q_proj")]
    assert not any("linearised" in name for name in names)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@torch.no_grad()
def test_updates_are_merged_into_the_weights(name: str, tmp_path: Path) -> None:
    model = decoder(name)
    report = mnemos.linearise(model, window=7, sinks=2, rank=3)
    for parameter in report.updates.values():
        parameter += 0.05 * torch.randn_like(parameter)
    x = ids()
    before = logits(model, x)
    mnemos.hosts.merge_updates(model)
    torch.testing.assert_close(logits(model, x), before, rtol=2e-5, atol=2e-5)
    assert not any(module._forward_hooks for module in model.modules())
    model.save_pretrained(tmp_path)
    loaded = mnemos.hosts.from_pretrained(type(model), tmp_path).eval()
    assert torch.equal(logits(loaded, x), logits(model, x))
    refuses("gave low-rank updates, found none", mnemos.hosts.merge_updates, model)
    mnemos.unlinearise(model)
    assert not torch.equal(logits(model, x[:, :7]), logits(decoder(name), x[:, :7]))


@pytest.mark.parametrize(
    ("package", "name", "options", "found"),
    [
        ("hunyuan_v1_dense", "HunYuanDenseV1", {}, "changed again after rotary"),
        ("gpt_oss", "GptOss", {"layer_types": ["full_attention"] * 2}, "the option 's_aux'"),
    ],
)
@torch.no_grad()
def test_attentions_of_other_forms_are_refused(
    package: str, name: str, options: dict[str, Any], found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of registered adapters, beyond the window, where their own function would not be called."""
    monkeypatch.setattr(adapters, "_registered", {})
    llama = adapters.ADAPTERS["transformers.models.llama.modeling_llama:LlamaAttention"]
    kind = f"transformers.models.{package}.modeling_{package}:{name}Attention"
    mnemos.register_host(replace(llama, kind=kind))
    model = plain(name, **options).float()
    model.set_attn_implementation("eager")
    mnemos.linearise(model, window=7)
    logits(model, ids(t=7))
    for cache in (None, new_cache()):
        refuses(found, logits, model, ids(), None, cache)


@torch.no_grad()
def test_caches_of_others_are_refused() -> None:
    model, cache, x = decoder("llama", -1.0), new_cache(), ids(t=3)
    logits(decoder("llama"), x, None, cache)
    refuses("empty layer 0", logits, model, x, None, cache)
    cache = new_cache()
    logits(model, x, None, cache)
    refuses(r"window=9.*found one of.*window=7", logits, decoder("llama", -1.0, window=9), x, None, cache)
    refuses("found that of a linearised one", logits, decoder("llama"), x, None, cache)
    logits(model, ids(), None, cache)
    logits(model, x[:, :1], None, cache)
    for count, words in ((-2, "found 2 tokens"), (34, "a negative number, of tokens to take back, found 34")):
        refuses(words, cache.crop, count)  # the two tokens are of two calls
    model.generation_config.assistant_confidence_threshold = 0.0  # else scikit-learn is imported, which takes seconds
    drafts = {"max_new_tokens": 20, "do_sample": False, "assistant_model": model}  # token by token
    refuses("an assistant_model that is not linearised", decoder("llama").generate, ids(1), **drafts)


@torch.no_grad()
def test_states_and_streams_of_other_settings_are_refused(tmp_path: Path) -> None:
    """By an earlier function of the model too, which knows the settings of its day."""
    full = "model.layers.0.self_attn"
    for before, after in (({"window": 8}, {"window": 4}), ({"window": 4}, {"window": 8}), ({"sinks": 3}, {"sinks": 2})):
        model = decoder("llama")
        mnemos.linearise(model, **{"window": 6, **before})
        step = mnemos.functional(model)
        _, state = step(ids())
        mnemos.linearise(mnemos.unlinearise(model), **{"window": 6, **after})
        refuses("state of LlamaForCausalLM", step, ids(), state)
    steps = []
    for heads in ("0", "1"):
        steps.append(mnemos.functional(model := decoder("llama")))
        mnemos.linearise(model, window=6, full=f"{full}:{heads}")
    mnemos.Stream(steps[0]).prefill(ids()).save(tmp_path / "stream")
    refuses("configuration", mnemos.Stream.restore, steps[1], tmp_path / "stream")
    mnemos.linearise(model := decoder("llama"), window=6, full=f"{full}:0")
    mnemos.Stream.restore(mnemos.functional(model), tmp_path / "stream")


@torch.no_grad()
def test_a_mask_serves_other_rows_and_hides_no_packed_sequences_behind_padding() -> None:
    model, x = decoder("llama", 0.0), ids(2, 30)
    mask = torch.ones(1, 1, 30, 30, dtype=torch.bool).tril()
    mask[..., :5] = False
    one = model(x[:1], attention_mask=mask, use_cache=False).logits
    torch.testing.assert_close(model(x, attention_mask=mask, use_cache=False).logits[:1], one, rtol=1e-5, atol=1e-5)
    mask[..., 20:, :20] = mask[..., 20, :] = mask[..., 20] = False
    refuses("acked", model, x, attention_mask=mask, use_cache=False)
    apart = torch.zeros_like(mask)  # short sequences with long padding between
    for part in (slice(0, 11), slice(19, 30)):
        apart[0, 0, part, part] = torch.ones(11, 11, dtype=torch.bool).tril()
    refuses("acked", model, x, attention_mask=apart, use_cache=False)


@torch.no_grad()
def test_padding_longer_than_a_sliding_window_is_no_end_of_a_sequence() -> None:
    model, x = plain("mistral", sliding_window=8).float(), ids(1, 30)
    mask = torch.ones(1, 30, dtype=torch.long)
    mask[:, 5:20] = 0
    mnemos.linearise(model, window=6)
    assert model(x, attention_mask=mask, use_cache=False).logits.isfinite().all()


def test_the_calls_of_a_thread_are_its_own_before_the_first() -> None:
    """A compiled call guards on what it reads: an attribute that came with the first call made the second one fail."""
    assert all(vars(type(module._stack)()) == {"calls": ()} for module in (linearised, hooks))


@torch.no_grad()
def test_a_cache_with_gated_caches_too_is_pickled() -> None:
    model, cache = plain("llama").float(), new_cache()
    mnemos.cache(model, mnemos.GRC(length=4, scope="stream"))
    mnemos.linearise(model, window=8)
    model(ids(), past_key_values=cache)
    again = pickle.loads(pickle.dumps(cache))
    x = ids(2, 1)
    assert torch.equal(model(x, past_key_values=again).logits, model(x, past_key_values=cache).logits)
