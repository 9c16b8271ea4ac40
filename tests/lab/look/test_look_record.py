"""What the viewer records is what the model computed: observed weights, hand-made sums, gates, and emptied parts."""

import json
import math
import re

import numpy as np
import pytest
import tiny_decoder
import torch
from refusals import refuses
from tiny_decoder import llama

import mnemos
from mnemos._compat import pytree
from mnemos.lab.evaluate.write_attention import writing
from mnemos.lab.look import effects, viewer
from mnemos.lab.look.memories import nodes
from mnemos.lab.look.observe import Added, Attended, CacheWritten, Mixed, SlotsWritten, Summed, Windowed, observing
from mnemos.lab.look.readers import readers_of
from mnemos.lab.look.record import SEGMENT, Document, record, segment_length
from mnemos.lab.look.sums import LinearisedReader
from mnemos.lab.look.viewer import choose_row
from mnemos.lab.run import checkpoint
from mnemos.lab.tasks.batch import Batch
from mnemos.lab.tasks.fact_recall import ToldConfig
from mnemos.lab.tasks.task import SPLITS, Question, Task
from mnemos.lab.tasks.text import TextTask
from mnemos.memory.gated_cache import GRC
from mnemos.memory.row_blocks import CacheState
from mnemos.ops.linear import LinearState

SIZES = {"vocab_size": 30, "dim": 16, "num_heads": 2, "mlp": 24}
TOKENS = torch.randint(30, (1, 21), generator=torch.Generator().manual_seed(0))


def memformer():
    more = {"encoder_layers": 1, "decoder_layers": 1, "segment": 5, "decoder_reads": True}
    return mnemos.Memformer(**SIZES, **more, memory=mnemos.SlotsConfig(slots=3))


def transformer(attention=None, cache=None):
    attention = attention or mnemos.SoftmaxConfig(window=6)
    return mnemos.Transformer(**SIZES, layers=2, max_length=99, position="none", attention=attention, cache=cache)


MODELS = {
    "memformer": memformer,
    "window": transformer,
    "grouped": lambda: transformer(mnemos.SoftmaxConfig(window=6, kv_heads=1)),
    "cached": lambda: transformer(cache=GRC(length=3, block=5, scope="stream")),
    "linear": lambda: transformer(mnemos.LinearConfig()),
    "delta": lambda: transformer(mnemos.DeltaConfig()),
    "rmt": lambda: mnemos.RMT(**SIZES, layers=1, segment=5, memory=mnemos.TokensConfig(tokens=3)),
}


@pytest.fixture(autouse=True)
def _without_gradients():
    with torch.no_grad():
        yield


def build(name):
    torch.manual_seed(1)
    return MODELS[name]().eval()


@pytest.mark.each_value
@pytest.mark.parametrize("name", MODELS)
def test_a_recording_is_of_the_models_own_forward(name):
    model = build(name)
    modules = dict(model.named_modules())
    plain, _ = model(TOKENS)
    with observing(model) as calls:
        seen, _ = model(TOKENS)
    torch.testing.assert_close(seen, plain, rtol=1e-5, atol=1e-5)
    for module, found in calls.items():
        for call in found:
            if isinstance(call, Attended):  # its weights give what the attention gave
                heads = torch.einsum("bhtn,bnhm->bthm", call.weights(), call.v)
                given = (call.visible, call.causal) if hasattr(modules[module], "dropout") else ()
                torch.testing.assert_close(heads, modules[module].attend(call.q, call.k, call.v, *given))
    assert all("attend" not in vars(one) for one in model.modules())  # the observers are taken off again
    found = record(model, Document.of_text(TOKENS[0].tolist()), name)
    wanted = -torch.log_softmax(plain[0, :-1], -1).gather(1, TOKENS[0, 1:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(found.surprise[1:]).float(), wanted, rtol=1e-4, atol=1e-4)
    assert math.isnan(found.surprise[0])
    assert found.memories
    for one in found.memories:
        assert not one.moved.size or one.moved.shape == (found.segments, len(one.units))
        assert not one.readers.size or one.readers.max() <= 1 + 1e-5
    for source in found.sources:
        assert source.share.shape == (21, len(source.parts))
    assert torch.equal(model(TOKENS)[0], plain)


def test_slots_are_recorded_as_the_writer_wrote_them():
    model = build("memformer")
    found = record(model, Document.of_text(TOKENS[0].tolist()))
    weights, state = writing(model, TOKENS[:, :20])
    (slots,) = [one for one in found.memories if one.kind == "slots"]
    wanted = weights[0].mean(1)  # [S, K, 1 + L]
    torch.testing.assert_close(torch.tensor(slots.values["keeps"][:4]), wanted[..., 0])
    torch.testing.assert_close(torch.tensor(slots.written[:4]), wanted[..., 1:])
    old, new = (model.slots(one.memory)[0] for one in (model(TOKENS[:, :15])[1], state))
    torch.testing.assert_close(torch.tensor(slots.moved[3]), (new - old).norm(dim=1) / new.norm(dim=1))
    # The words of the second segment read the slots after the first.
    _, before = model(TOKENS[:, :5])
    with observing(model) as calls:
        model(TOKENS[:, 5:10], before)
    q, k = calls["decoder.blocks.0.reads.1"][0][:2]
    scores = torch.softmax(torch.einsum("bthd,bkhd->bhtk", q, k) / 8**0.5, -1)
    torch.testing.assert_close(torch.tensor(slots.readers[1]), scores[0].mean(0))
    assert slots.readers[4, 0].any()
    assert not slots.readers[4, 1:].any(), "the last segment has one token"
    parts = [calls[f"decoder.blocks.0.{part}"] for part in ("attention", "reads.0", "reads.1")]
    lengths = torch.stack([next(x for x in part if isinstance(x, Added)).length[0] for part in parts], -1)
    (decoder,) = [one for one in found.sources if one.name == "decoder, layer 1"]
    torch.testing.assert_close(torch.tensor(decoder.share[5:10]), lengths / lengths.sum(-1, keepdim=True))
    assert {type(call) for one in calls.values() for call in one} == {Added, Attended, SlotsWritten}


def test_gates_are_those_of_the_equations():
    model = build("cached")
    layer = model.blocks[0].attention
    with observing(model) as calls:
        model(TOKENS[:, :5])
    (write,) = [call for call in calls["blocks.0.attention"] if isinstance(call, CacheWritten)]
    place = torch.arange(3) * 5 // 3  # slot i takes token floor(i·T/Tm)
    gate = torch.sigmoid(layer.update_gate(torch.cat([write.source[0][place], write.before[0]], -1))).mean(-1)
    found = record(model, Document.of_text(TOKENS[0].tolist()))
    cache = next(one for one in found.memories if one.kind == "cache")
    torch.testing.assert_close(torch.tensor(cache.values["update"][0]), gate)
    wanted = torch.zeros(3, 5)
    wanted[torch.arange(3), place] = gate
    torch.testing.assert_close(torch.tensor(cache.written[0]), wanted)
    (lengths,) = [call for call in calls["blocks.0.attention"] if isinstance(call, Mixed)]
    share = lengths.memory[0] / (lengths.own[0] + lengths.memory[0])
    torch.testing.assert_close(torch.tensor(found.sources[0].share[:5, 2]), share)


def cached(share):
    """A model of ours whose mix gives the cache this share."""
    model = build("cached")
    for block in model.blocks:
        block.attention.mix.fill_(share)
    return model


def gpt2():
    """The step of a decoder of Transformers with a cache."""
    library = mnemos.libraries.transformers()
    torch.manual_seed(0)
    sizes = {"vocab_size": 30, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 99}
    model = library.GPT2LMHeadModel(library.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)).eval()
    mnemos.cache(model, GRC(length=3, block=5, scope="stream", gate_init=2.0))
    return mnemos.functional(model)


def without(node):
    return node._replace(cache=0 * node.cache) if isinstance(node, CacheState) else node


@pytest.mark.parametrize(
    ("make", "credited"), [(lambda: cached(-math.inf), False), (lambda: cached(2.0), True), (gpt2, True)]
)
def test_a_cache_is_credited_with_what_it_alone_changes(make, credited):
    """The same tokens, positions, keys and values: a cache that gives nothing is not credited with the window's."""
    model, length, state = make(), 10, None
    found = record(model, Document.of_text(TOKENS[0].tolist()), length=length)
    for first in range(0, 20, length):
        x = TOKENS[:, first : first + length]
        emptied = pytree.tree_map(without, state, is_leaf=lambda node: isinstance(node, CacheState))
        outputs, after = model(x, state)
        for array, y in ((found.surprise, outputs), (found.emptied["caches"], model(x, emptied)[0])):
            values, targets = (x[first + 1 : first + length + 1] for x in (torch.tensor(array).float(), TOKENS[0]))
            wanted = -torch.log_softmax(y[0], -1).gather(1, targets[:, None])[:, 0]
            torch.testing.assert_close(values, wanted, rtol=1e-4, atol=1e-4)
        state = after
    changed = (found.emptied["caches"] - found.surprise)[1:]
    assert (np.abs(changed).max() > 1e-3) == credited
    assert bool(found.predictions) == bool(changed.max() > 0)
    if make is not gpt2:
        assert found.sources[0].share[:, 2].any() == credited, "the part of the cache in what a token took"
        assert np.abs(found.emptied["keys and values"] - found.surprise)[1:].max() > 1e-3


@pytest.mark.parametrize("position", ["rotary", "sinusoidal"])
def test_positions_stay_where_keys_and_values_are_emptied(position):
    torch.manual_seed(1)
    model = mnemos.Transformer(**SIZES, layers=1, max_length=99, position=position).eval()
    _, state = model(TOKENS[:, :8])
    (reader,) = readers_of(model, 9)
    found, _ = model(TOKENS[:, 8:], reader.emptied(state, None))
    wanted, _ = model(TOKENS[:, 8:], model.initial_state(1)._replace(seen=state.seen))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def test_what_did_not_happen_has_no_number():
    """The encoder does not read an unfinished segment, and no block of five tokens ends in a segment of three."""
    found = record(build("memformer"), Document.of_text(TOKENS[0].tolist()))
    (encoder,) = [one for one in found.sources if one.name == "encoder, layer 1"]
    assert np.isnan(encoder.share).all(1).tolist() == [False] * 20 + [True]
    one = record(build("cached"), Document.of_text(TOKENS[0, :6].tolist()), length=3).memories[1]
    assert np.isnan(one.values["update"]).all(1).tolist() == [True, False]
    first = record(build("linear"), Document.of_text(TOKENS[0].tolist()), length=7).memories[0]
    assert np.isnan(first.moved).all(1).tolist() == [True, False, False]
    rmt = build("rmt")
    moved = record(rmt, Document.of_text(TOKENS[0].tolist())).memories[0].moved[0]
    start, after = rmt.memory.start, rmt(TOKENS[:, :5])[1].memory.tokens[0]
    torch.testing.assert_close(torch.tensor(moved), (after - start).norm(dim=1) / after.norm(dim=1))


def test_directions_are_those_of_the_sum():
    model = build("linear")
    found = record(model, Document.of_text(TOKENS[0].tolist()), length=8)
    with observing(model) as calls:
        _, state = model(TOKENS)
    (call,) = [one for one in calls["blocks.0.attention"] if isinstance(one, Summed)]
    whole = torch.einsum("thd,thm->hdm", call.k[0], call.v[0])
    torch.testing.assert_close(nodes(state, LinearState)[0].s[0], whole, rtol=1e-4, atol=1e-4)
    u, sigma, w = torch.linalg.svd(whole)
    one = found.memories[0]
    torch.testing.assert_close(torch.tensor(one.values["strength"][2]), sigma[:, :3].flatten(), rtol=1e-4, atol=1e-4)
    loads = torch.einsum("hdr,thd->hrt", u[..., :3], call.k[0]) * torch.einsum("hrm,thm->hrt", w[:, :3], call.v[0])
    torch.testing.assert_close(loads.sum(-1), sigma[:, :3], rtol=1e-3, atol=1e-3)  # the tokens' parts are all of it
    wanted = (loads / sigma[:, :3, None]).abs().clamp(max=1).flatten(0, 1)[:, 16:]
    torch.testing.assert_close(torch.tensor(one.written[2][:, :5]), wanted, rtol=1e-3, atol=1e-3)
    assert not one.written[2][:, 5:].any(), "the last segment has five tokens"
    kernel = torch.einsum("thd,shd->hts", call.q[0], call.k[0]).tril()[:, 16:]
    earlier, this = kernel[..., :16].sum(-1).mean(0), kernel[..., 16:].sum(-1).mean(0)
    torch.testing.assert_close(torch.tensor(found.sources[0].share[16:, 1]), earlier / (earlier + this))


def test_a_direction_kept_alone_is_all_that_its_layer_holds():
    model = build("linear")
    _, state = model(TOKENS)
    first, second = nodes(state, LinearState)
    found, other = nodes(readers_of(model, 9)[0].alone(state, 4), LinearState)  # of 2 heads with 3 directions each
    u, sigma, w = torch.linalg.svd(first.s[0, 1])
    torch.testing.assert_close(found.s[0, 1], sigma[1] * torch.outer(u[:, 1], w[1]), rtol=1e-4, atol=1e-5)
    assert torch.equal(found.z[0, 1], first.z[0, 1])
    assert not found.s[0, 0].any()
    assert not found.z[0, 0].any()
    assert torch.equal(other.s, second.s)


def test_effects_that_say_nothing_more_are_left_out():
    def effect(p, *change):
        return effects.Effect(effects.Change(*change), np.array(p))

    place = effects.Prediction(9, 1, 0.9, 1, 0.9)
    kept = [effect([0.1, 0.1], effects.WHOLE), effect([0.1, 0.2], "slots", 0), effect([0.9, 0.8], "window", 1)]
    kept += [effect([0.9, 0.9], "slot 1", 0, 0, True), effect([0.5, 0.6], "all keys")]
    place.effects = [*kept, effect([0.1, 0.1], "unit", 1, 0, True)]
    assert effects.telling(place, ["slots", "window"]) == kept


def test_an_emptied_slot_is_its_start_and_nothing_else_changes(monkeypatch):
    monkeypatch.setattr(effects, "LOST", 1e9)  # every memory is needed
    model = build("memformer")
    document = Document(tuple(TOKENS[0].tolist()), (("w", 1),) * 21, (-1,) * 20 + (7,))
    (place,) = record(model, document).predictions
    assert (place.token, place.boundaries) == (21, [1, 2, 3, 4])
    plain, _ = model(TOKENS)
    assert math.isclose(place.probability, float(torch.softmax(plain[0, -1], -1)[7]), rel_tol=1e-4)
    _, state = model(TOKENS[:, :10])
    slots, alone = state.memory.slots.clone(), model.memory.start()[None].clone()
    slots[:, 1], alone[:, 1] = model.memory.start()[1], state.memory.slots[:, 1]
    for changed, is_alone in ((slots, False), (alone, True)):
        y, _ = model(TOKENS[:, 10:], state._replace(memory=state.memory._replace(slots=changed)))
        (effect,) = [one for one in place.effects if one.change[1:] == (0, 1, is_alone)]
        assert math.isclose(effect.probability[1], float(torch.softmax(y[0, -1], -1)[7]), rel_tol=1e-4)


def test_asking_does_not_change_the_segments_that_are_read():
    """Of a model whose cuts are part of the computation: each answer is that of a row in its own segments."""
    torch.manual_seed(0)
    attention = mnemos.RelativeConfig(memory=6)
    model = mnemos.Transformer(
        **SIZES, layers=2, attention=attention, cache=GRC(length=3, scope="stream", block=4)
    ).eval()
    row = TOKENS[0].tolist()
    document = Document(tuple(row), (("w", 1),) * 21, (-1,) * 20 + (7,), "", Question((2, 5), tuple(row[-2:]), 7))
    found = record(model, document, length=8)
    assert found.asked.after == [5, 6, 8, 10, 12, 14, 16, 18, 19]
    for after, p in zip(*found.asked, strict=True):
        state = None
        for part in torch.tensor([[*row[:after], *row[-2:]]]).split(8, 1):
            outputs, state = model(part, state)
        assert math.isclose(p, float(torch.softmax(outputs[0, -1], -1)[7]), rel_tol=1e-4)
    assert math.isclose(found.asked.probability[-1], found.predictions[0].probability, rel_tol=1e-4)


@pytest.mark.parametrize("rotary", [True, False])
def test_a_linearised_decoder_says_what_window_and_sums_gave(rotary):
    model = llama(30, num_key_value_heads=1).eval()
    mnemos.linearise(model, window=5, sinks=0, state="hedgehog", rotary=rotary, half_life=4)
    own = model.model.layers[0].self_attn.linearised
    own.log_gamma.fill_(-1.0)
    step = mnemos.functional(model)
    found = record(step, Document.of_text(TOKENS[0].tolist()))
    with observing(step) as calls:
        step(TOKENS)
    (call,) = [one.tokens for each in calls.values() for one in each if isinstance(one, Windowed)]
    q, k, far = call.q[0], call.k[0, 0], own.far()
    raw_q, raw_k = (call.q, call.k) if rotary else call.unrotated
    distance = torch.arange(21)[:, None] - torch.arange(21)
    scores = (q @ k.T * call.sizes.scale).masked_fill((distance < 0) | (distance >= 5), -torch.inf)
    near = torch.exp(scores - scores.amax(-1, keepdim=True))
    kernel = (far.query(raw_q)[0] @ far.key(raw_k)[0, 0].T) * 2 ** ((5 - distance) / 4)
    weights = near + kernel.masked_fill(distance < 5, 0) * far.gamma[:, None, None]
    weights = weights / weights.sum(-1, keepdim=True)
    place = torch.arange(21) - torch.arange(21)[:, None] // 5 * 5  # of each word, from the beginning of the segment
    assert found.length == 5
    for i, part in ((0, place >= 0), (1, (place < 0) & (place >= -5)), (3, place < -5)):
        share = weights.masked_fill(~part, 0).sum(-1).mean(0)
        torch.testing.assert_close(torch.tensor(found.sources[0].share[:, i]), share, rtol=1e-3, atol=1e-5)
    assert found.memories[0].kind == "sums"
    assert found.predictions


def test_states_without_feature_maps_of_their_own_are_read_too():
    model = llama(30, num_key_value_heads=2).eval()
    mnemos.linearise(model, window=5, sinks=2, state="none")
    found = record(mnemos.functional(model), Document.of_text(TOKENS[0].tolist()))
    assert [(one.name, one.units) for one in found.memories] == [("layer 1, window", ())]
    assert "last words alone" in found.memories[0].about
    assert not found.sources[0].share[:, 3].any()
    assert found.sources[0].share[7:, 2].all(), "the first two words stay"
    mnemos.unlinearise(model)
    mnemos.linearise(model, window=5, state="linear")
    found = record(mnemos.functional(model), Document.of_text(TOKENS[0].tolist()))
    assert found.memories[0].units[::3] == ("head 1, direction 1", "head 2, direction 1")


def test_a_streams_own_state_is_emptied_before_the_first_segment():
    model = build("memformer")
    stream = mnemos.Stream(model).prefill(TOKENS[:, :6])
    (place, *_) = mnemos.look(stream, TOKENS[0, 6:9].tolist()).recordings[0].predictions
    assert place.boundaries == [0]
    y, _ = model(TOKENS[:, 5 : 5 + place.token], None)
    (effect,) = [one for one in place.effects if one.change.name == "the whole state"]
    assert math.isclose(effect.probability[0], float(torch.softmax(y[0, -1], -1)[place.answer]), rel_tol=1e-4)


def test_a_row_of_one_segment_is_chosen_without_a_state():
    task = ToldConfig(distances=(8, 16), words=20, rows=4).build()
    batch = next(iter(task.batches("test", 4)))
    far = int(task.distances(batch.inputs).argmax())
    why = "the first of those told 16 tokens before the question"
    assert choose_row(task, [(build("window"), 99)], batch) == (far, why)


class Answers(torch.nn.Module):
    """Has "1" as the likeliest word once one of `hints` was read, by `sure`, and before that "0", by `other`."""

    def __init__(self, hints, sure, other=0.0):
        super().__init__()
        self.hints, self.sure, self.other = torch.tensor(hints), sure, other

    def forward(self, x, state=None):
        state = torch.zeros(len(x), 1) if state is None else state
        state = torch.maximum(state, torch.isin(x, self.hints).any(1, keepdim=True).float())
        logits = torch.zeros(*x.shape, 6)
        logits[..., 0], logits[..., 1] = self.other, self.sure * state
        return logits, state


class Asks(Task):
    def question(self, tokens):
        return Question((0, 1), (5,), 1)


KNOWS, FAVOURS = Answers([3, 4], 9.0), Answers([2], 0.4, 0.2)  # the second never knows it
PLAIN, HINTED, FAVOURED = ([3, 0, hint, 0, 0, 0, 5] for hint in (0, 4, 2))


@pytest.mark.parametrize(
    ("models", "rows", "chosen", "said"),
    [
        ([KNOWS], [HINTED, PLAIN], 1, "not guessed without it"),  # guessed when the rest is read again
        ([FAVOURS, KNOWS], [FAVOURED, PLAIN], 1, "guessed without it"),
        ([FAVOURS, KNOWS], [FAVOURED], 0, "does not know it"),
        ([KNOWS], [FAVOURED, PLAIN], 0, "guessed without it"),
        ([FAVOURS], [FAVOURED, PLAIN], 0, "the first of those told 5 tokens before the question"),  # it is not known
    ],
)
def test_the_row_that_is_chosen_needs_the_state_and_has_no_favourite_word(models, rows, chosen, said):
    rows = torch.tensor(rows)
    row, why = choose_row(Asks(), [(one, 2) for one in models], Batch(rows, torch.ones_like(rows)))
    assert row == chosen
    assert why.endswith(said)


def test_a_document_is_chosen_by_its_number(tmp_path):
    told = ToldConfig(distances=(4, 8), words=20, rows=4).build()
    opened = viewer.Opened("a", "", build("window"), told, None, 6)
    every = [row for batch in told.batches("test", 4) for row in batch.inputs.tolist()]
    found = viewer.document_of([opened], 6, None, 3, 9)
    assert (found.tokens, found.about) == (tuple(every[3]), "row 3 of the test split")
    assert found.guess == told.reference["a guess"]
    assert viewer.document_of([opened], 6, None, 3, 2).tokens == tuple(every[3][:12]), "two segments at most"
    refuses("--document: expected a number below 4, found 4; lower it", viewer.document_of, [opened], 6, None, 4, 9)
    texts = [np.frombuffer(text, np.uint8) for text in (b"a longer one", b"short")]
    opened = opened._replace(task=TextTask(dict.fromkeys(SPLITS, texts), 4))
    for number, about in ((None, "document 0 of the test split, the first"), (1, "document 1 of the test split")):
        found = viewer.document_of([opened], 6, None, number, 9)
        assert (found.tokens, found.about) == ((0, *texts[number or 0][:-1].tolist()), about)
    refuses("--document: expected a number below 2, found 2; lower it", viewer.document_of, [opened], 6, None, 2, 9)
    (tmp_path / "text.txt").write_text("a text of its own")
    found = viewer.document_of([opened] * 2, 6, tmp_path / "text.txt", None, 2)
    assert (bytes(found.tokens), found.about) == (b"\0a text of i", "text.txt")
    for options in ({"segments": 0}, {"number": -1}):
        refuses("--segments, --document: expected at least 1 and 0", viewer.look_at_runs, [tmp_path], **options)


def test_a_decoder_of_transformers_is_looked_at_with_a_text(tmp_path, monkeypatch):
    folder = tiny_decoder.save(tmp_path / "decoder")
    (tmp_path / "text.txt").write_text("so be it")
    refuses("decoder: expected --text FILE beside a decoder of Transformers", viewer.look_at_runs, [folder])
    path = viewer.look_at_runs([folder], tmp_path / "text.txt", tmp_path / "new" / "look.html", segments=1)
    (data,) = re.findall('class="look-run">(.*?)</script>', path.read_text(encoding="utf-8"))
    assert "".join(json.loads(data)["words"]) == "so be it"
    opened = viewer.Opened("a", "", torch.nn.Linear(2, 2), Task(), None, 6, folder)
    refuses(f"^{folder}: expected a model that reads tokens with a state", opened.record, Document.of_text([1]))


class Forgets(torch.nn.Module):
    """Attention whose state is no part of the model's."""

    state_kind, autoregressive = "constant", True

    def __init__(self, attention):
        super().__init__()
        self.embedding, self.layer = torch.nn.Embedding(30, 16), attention.build(16, 2, True)
        self.head = torch.nn.Linear(16, 30)

    def forward(self, x, state=None):
        return self.head(self.layer(self.embedding(x))[0]), torch.zeros(len(x), 1)


@pytest.mark.parametrize(
    ("make", "length", "emptied"),
    [
        (lambda: Forgets(mnemos.SoftmaxConfig()), 5, set()),
        (lambda: Forgets(mnemos.LinearConfig()), 5, set()),
        (lambda: mnemos.RMT(**SIZES, layers=1, segment=5, memory=mnemos.TokensConfig(3, write=False)), 5, set()),
        (lambda: transformer(mnemos.LinearConfig()), 5, {"sums"}),
    ],
)
def test_a_memory_that_is_not_in_the_state_is_not_emptied(make, length, emptied):
    torch.manual_seed(0)
    row = tuple(TOKENS[0].tolist())
    found = record(make().eval(), Document(row, (("w", 1),) * 21, (-1,) * 20 + (7,)), length=length)
    assert found.memories
    assert found.emptied.keys() == emptied
    (place,) = found.predictions
    assert any(one.change.memory is not None for one in place.effects) == bool(emptied)


@pytest.mark.parametrize(
    ("name", "trained", "length"),
    [("memformer", 7, 5), ("window", 7, 7), ("window", 0, 6), ("cached", 0, 5), ("linear", 0, SEGMENT)],
)
def test_the_segment_is_the_models_own_or_that_of_its_training(name, trained, length):
    assert segment_length(build(name), trained) == length


def test_what_our_kernels_attend_to_is_observed_too():
    torch.manual_seed(0)
    layer = mnemos.SoftmaxConfig(window=300).build(64, 1, True).eval()
    x = torch.randn(1, 512, 64)
    expected, state = layer(x)[0][:, 256:], layer(x[:, :256])[1]
    with observing(layer) as calls:
        torch.testing.assert_close(layer(x[:, 256:], state)[0], expected, rtol=1e-4, atol=1e-5)
    call = next(one for one in calls[""] if isinstance(one, Attended))
    heads = torch.einsum("bhtn,bnhm->bthm", call.weights(), call.v)
    torch.testing.assert_close(layer.project(heads), expected, rtol=1e-4, atol=1e-5)
    seen = (call.weights()[0, 0] > 0).nonzero()
    assert (256 + seen[:, 0] - seen[:, 1] + call.k.shape[1] - 512).max() == 299


def test_runs_of_different_data_and_of_no_tokens_are_refused(monkeypatch, tmp_path):
    def refused(words, *opened, text=None):
        runs = {one.name: one for one in opened}
        monkeypatch.setattr(viewer, "_open", lambda folder, _: runs[folder.name])
        refuses(words, viewer.look_at_runs, [*runs], text, tmp_path / "look.html")

    window = build("window")
    apart = [viewer.Opened(name, "", window, Task(), ToldConfig(rows=4, seed=i), 6) for i, name in enumerate("ab")]
    refused(r"same data.* a and b", *apart)
    for words, inputs in (("reads other inputs", torch.zeros(1, 3, 4, 4)), ("predicts something else", TOKENS[:1])):
        task = Task()
        task.example = lambda inputs=inputs: Batch(inputs, torch.zeros(1))
        refused(f"found one that {words}", viewer.Opened("a", "", torch.nn.Linear(2, 2), task, None, 6))


def test_the_runs_of_a_comparison_are_its_arms_first_seeds(tmp_path):
    for name in ("a/seed-0", "a/seed-1", "b/seed-0"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "recipe.json").touch()
    for name in ("comparison.json", "a/notes.txt", "b/.DS_Store"):
        (tmp_path / name).touch()
    assert viewer.find_runs(tmp_path) == [tmp_path / "a/seed-0", tmp_path / "b/seed-0"]
    (tmp_path / "comparison.json").unlink()  # it is not finished
    assert viewer.find_runs(tmp_path) == [tmp_path / "a/seed-0", tmp_path / "b/seed-0"]
    assert viewer.find_runs(tmp_path / "b/seed-0") == [tmp_path / "b/seed-0"]


def test_an_unfinished_run_is_looked_at_where_its_last_whole_checkpoint_is(tmp_path, capsys):
    recipe, task = mnemos.registry.load("recipe", "demo")(), ToldConfig(rows=4).build()
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints/step-00000050.safetensors").touch()  # damaged
    for kind, update in (("step", 40), ("best", 30)):
        checkpoint.write(checkpoint.path_of(tmp_path / "checkpoints", update, kind), {"model": {"w": torch.zeros(1)}})
        assert f"update {update} of {recipe.train.steps}" in viewer.trained(tmp_path, recipe, task)
        assert capsys.readouterr().err.startswith(f"mnemos: warning: {tmp_path}: not finished")


def test_folders_that_are_no_finished_run_are_refused(tmp_path):
    model = tmp_path / "model"
    marker = tmp_path / "linearised.json"
    marker.touch()
    refuses("finished run of mnemos linearise", viewer.look_at_runs, [tmp_path])
    model.mkdir()
    (model / "config.json").write_text("{}")
    for of in (marker, tmp_path / "recipe.json"):
        marker.unlink(missing_ok=True)
        of.write_text("{}")
        refuses(re.escape(f"{model}: expected the folder of a run, found its model; n"), viewer.look_at_runs, [model])
        assert not (model / viewer.PAGE).exists()


def test_a_text_without_a_word_is_refused(tmp_path):
    (tmp_path / "empty.txt").touch()
    (tmp_path / "text.txt").write_text("zyx")
    opened = viewer.Opened("a", "", build("window"), ToldConfig(rows=4).build(), None, 6)
    refuses(r"empty.txt: .* at least one word", viewer.document_of, [opened], 8, tmp_path / "empty.txt", None, 9)
    found = viewer.document_of([opened], 8, tmp_path / "text.txt", None, 9)
    assert found.words == ((found.other, 1),) == (("…", 1),)


def test_what_cannot_be_looked_at_is_refused():
    window, diverged = build("window"), [build(name) for name in ("memformer", "linear")]
    for model in diverged:
        next(model.parameters())[:] = math.nan
    for given, words, tokens in (
        (mnemos.Stream(window), "one row", None),
        (torch.nn.Linear(2, 2), "a state", None),
        (window, "one token", []),
        *((model, "finite outputs", TOKENS[0].tolist()) for model in diverged),
    ):
        refuses(words, mnemos.look, given, tokens)


def test_several_rows_are_not_looked_at_as_one():
    model, rows = build("linear"), TOKENS[0, :6].view(2, 3)
    for tokens, found in (
        (rows, r"torch.int64 of shape \(2, 3\); pass one row"),
        (rows.tolist(), "torch.int64 of shape"),
        (rows[:, :1], r"of shape \(2, 1\)"),
        (TOKENS[0] + 0.7, "torch.float32"),
        ("a text", "found str"),
    ):
        refuses(f"expected the token ids of one row, .*{found}", mnemos.look, model, tokens)
    for tokens in (rows[:1], rows[0].numpy(), rows[0].tolist(), list(rows[0])):
        assert mnemos.look(model, tokens).recordings[0].document.tokens == tuple(rows[0].tolist())


def test_heads_of_a_hybrid_have_their_own_numbers():
    model = llama(20, num_attention_heads=4, num_key_value_heads=2)
    mnemos.linearise(model, window=4, sinks=1, full="model.layers.0.self_attn:0")
    reader = LinearisedReader("", "layer 1", model.model.layers[0].self_attn.linearised, 0)
    assert [*reader.numbers(1)] == [2]
    assert reader.about.endswith("Not its key heads 1: these keep all words and are not shown.")


def test_control_characters_are_shown_as_escapes():
    text = "\0a\x1b[1m\u2400\x85 é\n\t"
    found = Document.of_text([1], lambda tokens: [(text, 1)])
    assert found.words == (("\\0a\\x1b[1m\\0\\x85 é\n\t", 1),)
    assert found.name(1) == found.words[0][0]
