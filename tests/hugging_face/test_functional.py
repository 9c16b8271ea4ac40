"""`mnemos.functional`: every family equals its own full forward, wherever it is cut, padded, forked and joined."""

import copy
import functools
import pickle

import pytest
import torch
import torch.nn.functional as F
from functional_models import FAMILIES, FURTHER, build, copied, in_pieces, step_of, tokens
from module_surgery import WAYS
from torch.autograd import gradcheck

import mnemos
from mnemos import BeamConfig, InputError, Stream
from mnemos.hosts import HostBranch
from mnemos.hugging_face.functional_cache import RECURRENT, FunctionalCache
from mnemos.libraries import transformers
from mnemos.memory.key_values import KeyValues
from mnemos.types import RecurrentModel, leaves

EACH = pytest.mark.parametrize("name", FAMILIES)

CLOSE = {"rtol": 0, "atol": 1e-5}


@EACH
@torch.no_grad()
def test_pieces_of_any_length_equal_their_whole_forward(name):
    step, x = step_of(name), tokens(2, 70)[:, : 64 if name == "GPT2" else 70]
    whole, end = step(x)
    torch.testing.assert_close(whole, step.model(x).logits, **CLOSE)
    y, state = in_pieces(step, x[:, :9], [1, 5, 2, 1])
    before = copied(state)
    rest, after = in_pieces(step, x[:, 9:], [x.shape[1] - 12, 3], state)
    torch.testing.assert_close(torch.cat([y, rest], 1), whole, **CLOSE)
    torch.testing.assert_close(leaves(after), leaves(end), rtol=1e-4, atol=1e-5)
    again, _ = step(x[:, 9:11], state)  # a fork of a state that is not the newest
    torch.testing.assert_close(again, whole[:, 9:11], **CLOSE)
    assert all(torch.equal(a, b) for a, b in zip(before, leaves(state), strict=True))
    empty, same = step(x[:, :0], state)
    assert empty.shape == (2, 0, whole.shape[2])
    assert same is state


@EACH
@torch.no_grad()
def test_padding_anywhere_leaves_rows_and_states_alone(name):
    step, x = step_of(name), tokens(4, 15)
    mask = torch.ones(4, 15, dtype=torch.bool)
    mask[1, 6:9], mask[2, 3:], mask[3, [0, 3, 4, 8, 13]] = False, False, False
    alone = [step(x[i : i + 1, mask[i]]) for i in range(4)]
    y, state = step(x[:, :6], None, mask[:, :6])
    rest, state = step(x[:, 6:], state, mask[:, 6:].long())  # row 2 is all padding
    y = torch.cat([y, rest], 1)
    assert not y[~mask].any()
    assert state.seen.tolist() == mask.sum(1).tolist()
    _, idle = step(x[:, :5], state, torch.zeros(4, 5, dtype=torch.bool))
    assert [z.shape for z in leaves(idle)] == [z.shape for z in leaves(state)]
    assert all(part.k.shape[1] <= 15 for part in state.parts if isinstance(part, KeyValues))
    more = tokens(4, 3, seed=1)
    for i, (own, own_state) in enumerate(alone):
        torch.testing.assert_close(y[i, mask[i]], own[0], **CLOSE)
        torch.testing.assert_close(step(more, idle)[0][i], step(more[i : i + 1], own_state)[0][0], **CLOSE)


@EACH
def test_gradients_through_states_equal_those_of_the_whole(name):
    model, x = build(name), tokens(2, 12)
    step = mnemos.functional(model)

    def gradients(y):
        model.zero_grad()
        F.cross_entropy(y[:, :-1].flatten(0, 1), x[:, 1:].flatten()).backward()
        return {key: p.grad for key, p in model.named_parameters() if p.grad is not None}

    whole, cut = gradients(model(x, use_cache=False).logits), gradients(in_pieces(step, x, [4, 1, 7])[0])
    torch.testing.assert_close(cut, whole, rtol=1e-4, atol=2e-5)
    mask = torch.rand(2, 12, generator=torch.Generator().manual_seed(0)) < 0.6
    padded = gradients(step(x, None, mask)[0])
    assert padded.keys() == whole.keys()
    assert all(g.isfinite().all() for g in padded.values())


@EACH
@torch.no_grad()
def test_a_stream_of_padded_prompts_generates_as_they_do_for_each(name):
    step, prompts = step_of(name), tokens(2, 9)
    mask = torch.ones(2, 9, dtype=torch.bool)
    mask[1, :3] = False
    library = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "eos_token_id": None}
    theirs = []
    for row, valid in zip(prompts, mask, strict=True):  # alone
        prompt = row[valid][None]
        options = {**library, "attention_mask": torch.ones_like(prompt)}
        theirs.append(step.model.generate(prompt, **options)[0, prompt.shape[1] :])
    state = step(prompts[:, :-1], None, mask[:, :-1])[1]
    stream = Stream(step, state=state, last=prompts[:, -1:])
    assert torch.equal(stream.generate(4, temperature=0)[0], torch.stack(theirs))
    assert torch.equal(Stream(step).prefill(prompts[:1], chunk=4).generate(4, temperature=0)[0][0], theirs[0])
    assert isinstance(step, RecurrentModel)


@pytest.mark.parametrize("name", FURTHER)
@torch.no_grad()
def test_models_whose_layers_take_the_same_steps(name):
    step, x = mnemos.functional(build(name)), tokens(2, 12)
    mask = torch.ones(2, 12, dtype=torch.bool)
    mask[1, 5:8] = False
    y, state = step(x[:, :5])
    rest, state = step(x[:, 5:], state, mask[:, 5:])
    torch.testing.assert_close(torch.cat([y, rest], 1)[:1], step.model(x[:1]).logits, **CLOSE)
    torch.testing.assert_close(rest[1, 3:], step.model(x[1:, mask[1]]).logits[0, 5:], **CLOSE)


@pytest.mark.parametrize("name", ["Jamba", "Qwen3Next", "Gemma2"])
@torch.no_grad()
def test_rows_are_selected_reset_joined_and_saved(name, tmp_path):
    step, x = step_of(name), tokens(3, 8)
    state, more = step(x)[1], tokens(3, 4, seed=1)
    y = step(more, state)[0]
    rows = torch.tensor([2, 0, 2])
    torch.testing.assert_close(step(more[rows], mnemos.select(state, rows))[0], y[rows], **CLOSE)
    new = mnemos.reset(state, torch.tensor([False, True, False]))
    torch.testing.assert_close(step(more, new)[0], torch.stack([y[0], step(more)[0][1], y[2]]), **CLOSE)
    both = mnemos.join([step(x[:1, :3])[1], mnemos.select(state, rows[:1]), step.initial_state(1)])
    pasts = zip((x[:1, :3], x[2:], x[:1, :0]), more.split(1), strict=True)
    expected = [step(torch.cat(pair, 1))[0][0, -4:] for pair in pasts]
    torch.testing.assert_close(step(more, both)[0], torch.stack(expected), **CLOSE)
    Stream(step).prefill(x).save(tmp_path / "stream")
    kept = Stream.restore(step, tmp_path / "stream")
    assert torch.equal(kept.generate(5, temperature=0)[0], Stream(step).prefill(x).generate(5, temperature=0)[0])


@pytest.mark.parametrize(
    ("name", "other"), [("Llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 9.0}}), ("Mamba", None)]
)
def test_a_stream_is_of_one_configuration(name, other, tmp_path):
    """Rotary positions are no weights: with others the same weights would go on from what is not their state."""
    model, x = build(name), tokens(1, 6)
    Stream(mnemos.functional(model)).prefill(x).save(tmp_path / "stream")
    model.save_pretrained(tmp_path / "model")
    loaded = type(model).from_pretrained(tmp_path / "model").eval()
    assert torch.equal(Stream.restore(mnemos.functional(loaded), tmp_path / "stream").last, x[:, -1:])
    with pytest.raises(mnemos.InputError, match=r"mnemos\.functional\(model\)"):
        Stream.restore(loaded, tmp_path / "stream")
    if other is not None:
        with pytest.raises(mnemos.InputError, match="another configuration"):
            Stream.restore(mnemos.functional(build(name, **other)), tmp_path / "stream")


@pytest.mark.parametrize("name", ["Mamba", "Bamba", "Llama"])
def test_beams_are_theirs(name):
    step, prompt = step_of(name), tokens(2, 5)
    library = {"max_new_tokens": 6, "num_beams": 3, "do_sample": False, "eos_token_id": None}
    theirs = step.model.generate(prompt, attention_mask=torch.ones_like(prompt), **library)[:, 5:]
    found = mnemos.beam_search(step, None, prompt, BeamConfig(eos=None, beams=3, max_length=6, stopping="heuristic"))
    assert torch.equal(torch.stack([best[0].tokens for best in found]), theirs)


@pytest.mark.parametrize("name", ["Mamba", "Qwen3Next", "GPT2"])
def test_replay_trains_through_the_state(name):
    model, x = build(name), tokens(2, 17)
    step = mnemos.functional(model)
    segments = list(zip(x[:, :-1].split(4, 1), x[:, 1:].split(4, 1), strict=True))

    def loss(segment, state):
        y, state = step(segment[0], state)
        return F.cross_entropy(y.transpose(1, 2), segment[1]), state

    out = mnemos.replay(loss, segments, module=model)
    replayed = {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    whole = F.cross_entropy(in_pieces(step, x[:, :-1], [4] * 4)[0].transpose(1, 2), x[:, 1:])
    whole.backward()
    torch.testing.assert_close(out.loss, whole.detach(), **CLOSE)
    torch.testing.assert_close({key: dict(model.named_parameters())[key].grad for key in replayed}, replayed, **CLOSE)


@pytest.mark.parametrize("name", ["Mamba", "GPT2"])
@torch.no_grad()
def test_copies_and_other_types(name):
    x = tokens(2, 6)
    step = step_of(name)
    for same in (copy.deepcopy(step), pickle.loads(pickle.dumps(step))):
        assert torch.equal(same(x)[0], step(x)[0])
        assert same.model is not step.model
    wide = mnemos.functional(build(name)).double()
    y, state = in_pieces(wide, x, [2, 4])
    assert state.parts[0][0].dtype == torch.float64 if name == "Mamba" else state.parts[0].k.dtype == torch.float64
    torch.testing.assert_close(y.float(), step(x)[0], rtol=0, atol=1e-4)
    embedded = step.model.get_input_embeddings()(x)
    torch.testing.assert_close(step(embedded)[0], step(x)[0], **CLOSE)


@pytest.mark.parametrize("name", ["Llama", "Qwen3Next"])
@torch.no_grad()
def test_a_state_goes_on_in_a_model_of_another_type(name):
    model, x = build(name), tokens(2, 8)
    step = mnemos.functional(model)
    whole, state = step(x)[0], step(x[:, :5])[1]
    model.bfloat16()
    mask = torch.tensor([[True] * 3, [False, True, True]])
    for given in (None, mask):
        y, after = step(x[:, 5:], state, given)
        bound = 0.05 * float(whole.abs().max())
        torch.testing.assert_close(y[:1].float(), whole[:1, 5:], rtol=0, atol=bound)
        kinds = {part.k.dtype for part in after.parts if isinstance(part, KeyValues)}
        assert kinds == {torch.bfloat16}


@torch.no_grad()
def test_a_model_without_a_head_returns_hidden_states():
    base = step_of("Llama").model.model
    step, x = mnemos.functional(base), tokens(2, 6)
    torch.testing.assert_close(in_pieces(step, x, [2, 4])[0], base(x).last_hidden_state, **CLOSE)
    assert not step.autoregressive
    with pytest.raises(mnemos.InputError, match="causal language model"):
        Stream(step).prefill(x)


def test_the_size_of_the_state_is_declared():
    kinds = {name: step_of(name).state_kind for name in ("Mamba", "Mistral", "Jamba", "Gemma2")}
    assert list(kinds.values()) == ["constant"] * 2 + ["growing"] * 2
    kept = [step_of("Mistral")(tokens(1, n))[1].parts[0].k.shape[1] for n in (2, 9, 30)]
    assert kept == [2, 3, 3]  # the next token is the fourth of the window


def low_rank(model):
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    adapted.eval()


def gated(model):
    mnemos.cache(model, mnemos.GRC(length=3, block=2, scope="stream", gate_init=0.0))


CHANGES = {
    "cache": [gated],
    "linearise": [lambda model: mnemos.linearise(model, window=3, sinks=1, state="hedgehog")],
    "other caches": [gated, mnemos.uncache, lambda m: mnemos.cache(m, mnemos.GRC(length=2, scope="stream"))],
    "back again": [lambda model: mnemos.linearise(model, window=3), mnemos.unlinearise],
    "adapters": [low_rank],
    "resized": [lambda model: model.resize_token_embeddings(19)],
}


@pytest.mark.filterwarnings("ignore::UserWarning:peft", "ignore::FutureWarning:transformers")
@pytest.mark.parametrize("change", CHANGES)
def test_a_model_may_be_changed_afterwards(change):
    model, x = build("Llama"), tokens(2, 12)
    step = mnemos.functional(model)
    before = step(x)[1]
    for one in CHANGES[change]:
        one(model)
    if change == "resized":
        step.eval()  # the new embedding is in training mode
        x[:, 3] = 18
        assert Stream(step).prefill(x).generate(2, temperature=0)[0].shape == (2, 2)
        assert step(x[:, :0])[0].shape == (2, 0, 19)
        assert step.config.vocab_size == 19
    wanted = model(x, use_cache=False).logits
    torch.testing.assert_close(in_pieces(step, x, [5, 1, 6])[0], wanted, **CLOSE)
    fresh = mnemos.functional(model)
    assert step.state_kind == fresh.state_kind
    torch.testing.assert_close(step(x[:, 5:], fresh(x[:, :5])[1])[0], wanted[:, 5:], **CLOSE)
    if change in ("cache", "linearise", "other caches"):
        with pytest.raises(mnemos.InputError):
            step(x, before)


@pytest.mark.parametrize("name", ["Llama", "Qwen3Next", "Mamba", "Mamba2"])
@pytest.mark.parametrize("first", [True, False])
def test_weights_may_be_offloaded(name, first):
    accelerate, model, x = pytest.importorskip("accelerate"), build(name), tokens(2, 9)
    wanted = model(x).logits
    step = mnemos.functional(model) if first else None
    accelerate.cpu_offload(model, execution_device="cpu")
    step = step or mnemos.functional(model)
    torch.testing.assert_close(in_pieces(step, x, [5, 1, 3])[0], wanted, **CLOSE)


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


ENCODER = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 32,
    "is_decoder": True,
    "pad_token_id": 1,
}

BART = {
    "d_model": 16,
    "encoder_layers": 1,  # which `num_hidden_layers` is another name of
    "decoder_layers": 2,
    "decoder_attention_heads": 2,
    "decoder_ffn_dim": 24,
    "max_position_embeddings": 32,
    "is_decoder": True,
    "is_encoder_decoder": False,
}

SIZES = {
    "RobertaForCausalLM": ENCODER,
    "BloomForCausalLM": {"hidden_size": 16, "n_layer": 2, "n_head": 2},
    "BartForCausalLM": BART,
    "RoFormerForCausalLM": {**ENCODER, "embedding_size": 16},
    "GitForCausalLM": {**ENCODER, "vision_config": {"image_size": 32, "patch_size": 16}},
}

TOGETHER = pytest.mark.parametrize("name", ["BartForCausalLM", "RoFormerForCausalLM", "GitForCausalLM"])


def build_causal(name):
    kind = getattr(transformers(), name)
    torch.manual_seed(0)
    model = kind(kind.config_class(vocab_size=17, **SIZES[name])).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape)
    return model


@functools.cache
def causal_step(name):
    return mnemos.functional(build_causal(name))


@pytest.mark.parametrize("name", SIZES)
@torch.no_grad()
def test_outputs_are_those_of_the_plain_forward(name):
    step, x = causal_step(name), tokens(2, 9)
    plain = step.model(x, use_cache=False).logits
    torch.testing.assert_close(step(x)[0], plain, **CLOSE)
    torch.testing.assert_close(in_pieces(step, x, [3, 1, 5])[0], plain, **CLOSE)
    torch.testing.assert_close(step(step.model.get_input_embeddings()(x))[0], plain, **CLOSE)


@pytest.mark.parametrize("name", ["RobertaForCausalLM", "BloomForCausalLM"])
@torch.no_grad()
def test_rows_apart_equal_the_plain_forward_of_each(name):
    step, x = causal_step(name), tokens(2, 9)
    mask = torch.ones(2, 9, dtype=torch.bool)
    mask[1, [0, 3, 8]] = False
    y, state = step(x, None, mask)
    torch.testing.assert_close(y[1, mask[1]], step.model(x[1:, mask[1]]).logits[0], **CLOSE)
    new = mnemos.reset(state, torch.tensor([True, False]))
    torch.testing.assert_close(step(x, new)[0][0], step.model(x[:1]).logits[0], **CLOSE)


@TOGETHER
@torch.no_grad()
def test_rows_apart_are_refused_where_positions_cannot_be_set(name):
    step, x = causal_step(name), tokens(2, 6)
    _, state = step(x[:, :4])
    apart = mnemos.reset(state, torch.tensor([True, False]))
    joined = mnemos.join([step(x[:1, :2])[1], mnemos.select(state, torch.tensor([1]))])
    for given, mask, found in (
        (None, torch.arange(6) >= torch.tensor([[0], [2]]), "a mask with padding"),
        (apart, None, "0 to 4 tokens"),
        (joined, None, "2 to 4 tokens"),
    ):
        with pytest.raises(InputError, match=found) as error:
            step(x, given, mask)
        assert "\n" not in str(error.value)
    assert not step.rows_apart


@TOGETHER
@torch.no_grad()
def test_rows_of_one_length_are_read_where_positions_cannot_be_set(name):
    step, x = causal_step(name), tokens(2, 9)
    plain = step.model(x, use_cache=False).logits
    _, state = step(x[:, :4], None, torch.ones(2, 4, dtype=torch.bool))
    new = mnemos.reset(state, torch.tensor([True, True]))  # its keys are those of four tokens
    torch.testing.assert_close(step(x, new)[0], plain, **CLOSE)
    short = mnemos.select(mnemos.join([state, step(x[:, :2])[1]]), torch.tensor([2, 3]))
    torch.testing.assert_close(step(x[:, 2:], short)[0], plain[:, 2:], **CLOSE)


def test_half_precision_does_not_hide_where_positions_come_from():
    kind = transformers().GitForCausalLM
    new = kind(kind.config_class(vocab_size=17, **SIZES["GitForCausalLM"]))  # its weights are small
    assert not mnemos.functional(new.bfloat16()).rows_apart


def test_other_positions_are_refused():
    model = build_causal("RobertaForCausalLM")
    model.config.pad_token_id = None  # of the configuration; its embeddings begin after token 1 as before
    with pytest.raises(InputError, match="expected positions from 0") as error:
        mnemos.functional(model)
    assert "\n" not in str(error.value)
