"""`mnemos.functional`: every family equals its own full forward, wherever it is cut, padded, forked and joined."""

import copy
import pickle

import pytest
import torch
from functional_models import (
    CACHED,
    CAUSAL,
    FAMILIES,
    FURTHER,
    TOGETHER,
    build,
    copied,
    in_pieces,
    short,
    step_of,
    tokens,
)
from module_surgery import WAYS
from refusals import refuses

import mnemos
from mnemos import BeamConfig, InputError, Stream
from mnemos.hugging_face.functional_cache import RECURRENT
from mnemos.memory.key_values import KeyValues
from mnemos.types import RecurrentModel, leaves

EACH = pytest.mark.parametrize("name", [*FAMILIES, *CACHED])
APART = ("Roberta", "Bloom")  # of other classes; positions of each row can be set
CLOSE = {"rtol": 0, "atol": 1e-5}
RECURRENTS = ["Mamba", "FalconMamba", "Jamba", "Mamba2", "Qwen3Next", "NemotronH", "Qwen3_5", "OlmoHybrid"]


def equal(found, expected, **bounds):
    """To rounding. bounds: those of single precision."""
    double = leaves(expected)[0].dtype == torch.float64
    torch.testing.assert_close(found, expected, **({"rtol": 1e-9, "atol": 1e-10} if double else bounds or CLOSE))


@pytest.mark.parametrize("name", [*FAMILIES, *CACHED, *CAUSAL])
@torch.no_grad()
def test_pieces_of_any_length_equal_their_whole_forward(name):
    step, x = step_of(name), tokens(2, 30 if name in CAUSAL else 64 if name.startswith("GPT2") else 70)
    whole, end = step(x)
    equal(whole, step.model(x, use_cache=False).logits)
    equal(step(step.model.get_input_embeddings()(x))[0], whole)
    y, state = in_pieces(step, x[:, :9], [1, 5, 2, 1])
    before = copied(state)
    rest, after = in_pieces(step, x[:, 9:], [x.shape[1] - 12, 3], state)
    equal(torch.cat([y, rest], 1), whole)
    equal(leaves(after), leaves(end), rtol=1e-4, atol=1e-5)
    again, _ = step(x[:, 9:11], state)  # a fork of a state that is not the newest
    equal(again, whole[:, 9:11])
    empty, same = step(x[:, :0], state)
    assert empty.shape == (2, 0, whole.shape[2])
    for one in (state, same):
        assert all(torch.equal(a, b) for a, b in zip(before, leaves(one), strict=True))


@pytest.mark.parametrize("name", [*FAMILIES, *CACHED, *APART, *FURTHER])
@torch.no_grad()
def test_padding_anywhere_leaves_rows_and_states_alone(name):
    step, x = step_of(name), tokens(4, 15)
    mask = torch.ones(4, 15, dtype=torch.bool)
    mask[1, 6:9], mask[2, 3:], mask[3, [0, 3, 4, 8, 13]] = False, False, False
    alone = [step(x[i : i + 1, mask[i]]) for i in range(4)]
    y, state = step(x[:, :6], None, mask[:, :6])
    rest, state = step(x[:, 6:], state, mask[:, 6:].long())  # row 2 is all padding
    y = torch.cat([y, rest], 1)
    equal(y[:1], step.model(x[:1], use_cache=False).logits)
    assert not y[~mask].any()
    embeddings = step.model.get_input_embeddings()(x).masked_fill(~mask[..., None], torch.nan)
    equal(step(embeddings, None, mask)[0], y)
    assert state.seen.tolist() == mask.sum(1).tolist()
    _, idle = step(x[:, :5], state, torch.zeros(4, 5, dtype=torch.bool))
    assert [z.shape for z in leaves(idle)] == [z.shape for z in leaves(state)]
    assert all(part.k.shape[1] <= 15 for part in state.parts if isinstance(part, KeyValues))
    more = tokens(4, 3, seed=1)
    for i, (own, own_state) in enumerate(alone):
        equal(y[i, mask[i]], own[0])
        equal(step(more, idle)[0][i], step(more[i : i + 1], own_state)[0][0])


@EACH
def test_gradients_of_pieces_replayed_and_padded_equal_those_of_the_whole(name):
    model, x = build(name), tokens(2, 12)
    step = mnemos.functional(model)

    def loss(*outputs):
        return sum(y.square().sum() for y in outputs) / x.numel()

    def replayed(piece, state):
        y, state = step(piece, state)
        return loss(y), state

    def gradients(backward):
        model.zero_grad()
        backward()
        return {key: p.grad for key, p in model.named_parameters() if p.grad is not None}

    whole = gradients(loss(model(x, use_cache=False).logits).backward)
    equal(gradients(loss(in_pieces(step, x, [4, 1, 7])[0]).backward), whole, rtol=1e-4, atol=2e-5)
    again = gradients(lambda: mnemos.replay(replayed, x.split([4, 1, 7], 1), weights=[1.0] * 3, module=model))
    equal(again, whole, rtol=1e-4, atol=2e-5)
    mask = torch.rand(2, 12, generator=torch.Generator().manual_seed(0)) < 0.6
    first, state = step(x[:, :5], None, mask[:, :5])
    y = torch.cat([first, step(x[:, 5:], state, mask[:, 5:])[0]], 1)
    alone = [model(row[valid][None], use_cache=False).logits for row, valid in zip(x, mask, strict=True)]
    equal(gradients(loss(y[mask]).backward), gradients(loss(*alone).backward), rtol=1e-4, atol=2e-5)


@EACH
@torch.no_grad()
def test_a_stream_of_padded_prompts_generates_as_they_do_for_each(name):
    step, prompts, mask = step_of(name), tokens(2, 9), torch.arange(9) >= torch.tensor([[0], [3]])
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


@pytest.mark.parametrize("name", ["Jamba", "Qwen3Next", "Gemma2", "GPT2, cached", *APART])
@torch.no_grad()
def test_rows_are_selected_reset_joined_and_saved(name, tmp_path):
    step, x = step_of(name), tokens(3, 8)
    state, more = step(x)[1], tokens(3, 4, seed=1)
    y = step(more, state)[0]
    rows = torch.tensor([2, 0, 2])
    equal(step(more[rows], mnemos.select(state, rows))[0], y[rows])
    new = mnemos.reset(state, torch.tensor([False, True, False]))
    equal(step(more, new)[0], torch.stack([y[0], step(more)[0][1], y[2]]))
    both = mnemos.join([step(x[:1, :3])[1], mnemos.select(state, rows[:1]), step.initial_state(1)])
    pasts = zip((x[:1, :3], x[2:], x[:1, :0]), more.split(1), strict=True)
    expected = [step(torch.cat(pair, 1))[0][0, -4:] for pair in pasts]
    equal(step(more, both)[0], torch.stack(expected))
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
    refuses(r"mnemos\.functional\(model\)", Stream.restore, loaded, tmp_path / "stream")
    if other is not None:
        refuses("another configuration", Stream.restore, mnemos.functional(build(name, **other)), tmp_path / "stream")


def test_changes_to_another_model_of_one_configuration_leave_a_stream_readable(tmp_path):
    model, x = build("Llama"), tokens(1, 6)
    other = type(model)(model.config).eval()
    assert other.config is model.config
    Stream(mnemos.functional(model)).prefill(x).save(tmp_path / "stream")
    mnemos.linearise(other, window=5)
    assert torch.equal(Stream.restore(mnemos.functional(model), tmp_path / "stream").last, x[:, -1:])
    mnemos.linearise(model, window=5)
    refuses("another configuration", Stream.restore, mnemos.functional(model), tmp_path / "stream")


@pytest.mark.parametrize("name", ["Mamba", "Bamba", "Llama"])
def test_beams_are_theirs(name):
    step, prompt = step_of(name), tokens(2, 5)
    library = {"max_new_tokens": 6, "num_beams": 3, "do_sample": False, "eos_token_id": None}
    theirs = step.model.generate(prompt, attention_mask=torch.ones_like(prompt), **library)[:, 5:]
    found = mnemos.beam_search(step, None, prompt, BeamConfig(eos=None, beams=3, max_length=6, stopping="heuristic"))
    assert torch.equal(torch.stack([best[0].tokens for best in found]), theirs)


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
    torch.testing.assert_close(y, wide(x)[0], rtol=1e-10, atol=1e-12)


@torch.no_grad()
def test_a_window_keeps_nothing_else_of_a_long_call_in_memory():
    _, state = step_of("Mistral")(tokens(1, 60))  # a window of 4
    for x in (state.parts[0].k, state.parts[0].v):
        assert x.untyped_storage().nbytes() <= 4 * x.nbytes


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
    refuses("causal language model", Stream(step).prefill, x)


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
        with pytest.raises(InputError):
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


def test_other_caches_run_their_own_forward():
    step, x = step_of("Mamba"), tokens(2, 5)
    layer = step.model.backbone.layers[0].mixer
    with torch.no_grad():
        hidden = step.model.get_input_embeddings()(x)
        assert torch.equal(layer(hidden), type(layer).forward.__wrapped__(layer, hidden))


@pytest.mark.parametrize("name", RECURRENTS)
@torch.no_grad()
def test_what_is_around_a_module_or_in_its_place_counts(name):
    x, first = tokens(2, 9), short(name)
    plain = first(x).logits
    for way in WAYS:
        model = copy.deepcopy(first)
        for above, layer in list(model.named_modules()):
            if type(layer).__name__ in RECURRENT:
                for part, _ in reversed(list(layer.named_modules(prefix=above))[1:]):
                    way(model, part)
        wanted = model(x).logits
        assert (wanted - plain).abs().max() > 1e-3
        found, _ = in_pieces(mnemos.functional(model), x, [4, 1, 4])
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("name", RECURRENTS)
@torch.no_grad()
def test_the_activation_of_the_configuration(name):
    model, x = build(name, **{"mamba_hidden_act" if name == "NemotronH" else "hidden_act": "gelu"}), tokens(2, 9)
    found, _ = in_pieces(mnemos.functional(model), x, [4, 1, 4])
    torch.testing.assert_close(found, model(x).logits, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("name", TOGETHER)
@torch.no_grad()
def test_rows_of_one_length_alone_are_read_where_positions_cannot_be_set(name):
    step, x = step_of(name), tokens(2, 9)
    plain = step.model(x, use_cache=False).logits
    _, state = step(x[:, :4], None, torch.ones(2, 4, dtype=torch.bool))
    new = mnemos.reset(state, torch.tensor([True, True]))  # its keys are those of four tokens
    torch.testing.assert_close(step(x, new)[0], plain, **CLOSE)
    joined = mnemos.join([state, step(x[:, :2])[1]])
    torch.testing.assert_close(step(x[:, 2:], mnemos.select(joined, torch.tensor([2, 3])))[0], plain[:, 2:], **CLOSE)
    assert not step.rows_apart
    for given, mask, found in (
        (None, torch.arange(9) >= torch.tensor([[0], [2]]), "a mask with padding"),
        (mnemos.reset(state, torch.tensor([True, False])), None, "0 to 4 tokens"),
        (mnemos.select(joined, torch.tensor([2, 1])), None, "2 to 4 tokens"),
    ):
        refuses(found, step, x, given, mask)


def test_half_precision_does_not_hide_where_positions_come_from():
    model = build("Git")
    new = type(model)(model.config)  # its weights are small
    assert not mnemos.functional(new.bfloat16()).rows_apart


def test_other_positions_are_refused():
    model = build("Roberta")
    model.config.pad_token_id = None  # of the configuration; its embeddings begin after token 1 as before
    refuses("expected positions from 0", mnemos.functional, model)
