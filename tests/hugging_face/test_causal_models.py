"""Every registered causal language model in `generate` of Transformers: as our own streams and searches, row by row."""

import copy
import functools

import pytest
import torch
from contract_cases import MODELS, SMALL, VOCABULARY, ModelCase, scatter
from refusals import refuses

import mnemos
from mnemos.attention import CompressiveConfig, LinearConfig, RelativeConfig
from mnemos.hugging_face import MnemosConfig, MnemosForCausalLM, StateCache, remembering_model
from mnemos.lab.hosted.decoder import HostedDecoderConfig
from mnemos.libraries import CACHE_NAMES, cache_name, transformers

PROMPT, NEW, SEGMENT = 7, 5, 3
SIZES = {name: SMALL[name] for name in ("vocab_size", "dim", "layers", "num_heads", "mlp")}
OTHERS = {
    "linear, float32": mnemos.TransformerConfig(attention=LinearConfig(), **SIZES),
    "transformer-xl": mnemos.TransformerConfig(attention=RelativeConfig(memory=4), position="none", **SIZES),
    "compressive": mnemos.TransformerConfig(
        attention=CompressiveConfig(memory=4, compressed=2, ratio=2), position="none", **SIZES
    ),
    "adaptive softmax": mnemos.LSTMConfig(vocab_size=VOCABULARY, dim=12, layers=1, tied=True, cutoffs=(4, 8)),
}
CASES = {str(case): case for case in MODELS if case.predicts and case.inputs == "tokens"} | OTHERS
# Of a model with gated caches, that with one of each row: its state has all parts.
STATES = [
    name
    for name in CASES
    if "-shared-" not in name and not ("-plain-" in name and name.replace("plain", "stream") in CASES)
]
EACH_STATE = pytest.mark.parametrize("pair", STATES, indirect=True)
IDS = torch.randint(VOCABULARY, (2, PROMPT), generator=torch.Generator().manual_seed(5))
MASK = torch.ones_like(IDS)
MASK[1, :3] = 0  # row 1 has four tokens, on the right


@functools.cache
def built(name):
    """(our model, the same one in Transformers)."""
    torch.manual_seed(0)
    case = CASES[name]
    ours = (case.build() if isinstance(case, ModelCase) else scatter(case.build())).eval()
    ours = ours.float() if "float32" in name else ours
    return ours, MnemosForCausalLM.of(ours, segment=SEGMENT)


def rows():
    """Each row by itself, without padding."""
    return [row[valid.bool()][None] for row, valid in zip(IDS, MASK, strict=True)]


@pytest.fixture(params=CASES)
def pair(request):
    return built(request.param)


def test_generate_is_a_stream_and_padding_changes_nothing(pair):
    ours, model = pair
    found = model.generate(IDS, attention_mask=MASK, max_new_tokens=NEW, do_sample=False)
    for row, tokens in zip(rows(), found[:, PROMPT:], strict=True):
        expected, _ = mnemos.Stream(ours).prefill(row, SEGMENT).generate(NEW, temperature=0)
        assert tokens.tolist() == expected[0].tolist()


@EACH_STATE
def test_beams_are_those_of_our_own_search(pair):
    ours, model = pair
    if ours.splits != "anywhere":
        pytest.skip("our search reads a prompt as one segment, generate as a stream does")
    options = {"num_beams": 3, "num_return_sequences": 2, "do_sample": False, "max_new_tokens": NEW, "eos_token_id": 2}
    found = model.generate(IDS, attention_mask=MASK, pad_token_id=2, **options)[:, PROMPT:].unflatten(0, (2, 2))
    config = mnemos.BeamConfig(eos=2, beams=3, n_best=2, max_length=NEW, stopping="heuristic")
    for row, sequences in zip(rows(), found.tolist(), strict=True):
        for sequence, hypothesis in zip(sequences, mnemos.beam_search(ours, None, row, config)[0], strict=True):
            expected = hypothesis.tokens.tolist()
            assert sequence == expected + [2] * (len(sequence) - len(expected))


@EACH_STATE
def test_a_cache_goes_on_from_call_to_call_and_takes_drafts_back(pair):
    ours, model = pair
    ids = rows()[1]
    expected = model.generate(ids, max_new_tokens=9, do_sample=False)
    cache = StateCache()
    first = model.generate(ids, max_new_tokens=4, do_sample=False, cache=cache)
    assert cache.get_seq_length() == first.shape[1] - 1  # the last token is not read yet
    kept = cache.fork()
    assert torch.equal(model.generate(first, max_new_tokens=5, do_sample=False, cache=cache), expected)
    assert torch.equal(model.generate(first, max_new_tokens=5, do_sample=False, cache=kept), expected)
    if ours.splits != "anywhere":
        refuses("assisted decoding", model.generate, ids, max_new_tokens=3, prompt_lookup_num_tokens=2)
        return
    _, draft = built("lstm-plain-causal")  # it is rarely right, so most of its drafts are taken back
    draft.generation_config.assistant_confidence_threshold = 0.0  # else scikit-learn is imported, which takes seconds
    assert torch.equal(model.generate(ids, max_new_tokens=9, do_sample=False, assistant_model=draft), expected)


def test_what_the_last_update_wrote_is_saved(tmp_path):
    model = MnemosForCausalLM.of(mnemos.Transformer(cache=mnemos.GRC(preset="paper", length=3), **SIZES)).train()
    model(IDS)
    model.save_pretrained(tmp_path)
    loaded = transformers().AutoModelForCausalLM.from_pretrained(tmp_path)
    cached, saved = (one.model.blocks[0].attention.cache for one in (model, loaded))
    assert saved.count_nonzero()
    assert torch.equal(saved, cached)


def test_what_is_saved_is_loaded(pair, tmp_path):
    _, model = pair
    model.save_pretrained(tmp_path)
    loaded = transformers().AutoModelForCausalLM.from_pretrained(tmp_path)  # registered with this library
    assert type(loaded) is MnemosForCausalLM
    assert loaded.config.of_model() == model.model.config
    with torch.no_grad():
        # Padding on the right, in one call without a cache, and with one, by the lengths of rows.
        mask = MASK.flip(1)
        expected = model(IDS, attention_mask=mask, use_cache=False).logits
        torch.testing.assert_close(loaded(IDS, attention_mask=mask, use_cache=False).logits, expected, rtol=0, atol=0)
        if "anywhere" in model.model.splits:
            carried = loaded(IDS, attention_mask=mask, use_cache=True).logits
            torch.testing.assert_close(carried, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["lstm-plain-causal", "transformer-plain-causal"])
def test_padding_on_the_right_is_read_over(name):
    """The first new token follows the last valid one."""
    _, model = built(name)
    mask, row = MASK.flip(1), IDS[1:, :4]
    found = model.generate(IDS, attention_mask=mask, max_new_tokens=NEW, do_sample=False)[1, PROMPT:]
    assert torch.equal(found, model.generate(row, max_new_tokens=NEW, do_sample=False)[0, 4:])
    # Padding has the outputs of the token before it, and 0 before the first one.
    between = torch.tensor([[1] * PROMPT, [0, 0, 1, 1, 0, 1, 0], [0] * PROMPT])
    three = IDS[[0, 1, 1]]
    alone = model(IDS[1:, [2, 3, 5]]).logits[0]
    none = torch.zeros_like(alone[:1])
    wanted = torch.cat([none, none, alone[:2], alone[1:], alone[2:]])
    for carries, keep in ((False, 0), (False, 4), (True, 0), (True, 4)):
        found = model(three, attention_mask=between, use_cache=carries, logits_to_keep=keep).logits
        torch.testing.assert_close(found[1], wanted[-keep:])
        torch.testing.assert_close(found[0], model(IDS[:1]).logits[0, -keep:])
        assert not found[2].any()
    some = model(three[2:, :2], attention_mask=between[2:, :2], use_cache=True).logits
    assert (some.shape, int(some.count_nonzero())) == ((1, 2, VOCABULARY), 0)


def test_when_a_cache_is_made_and_what_is_returned():
    _, model = built("lstm-plain-causal")
    cache, name = StateCache(), cache_name()
    for given, made in (
        ({}, True),
        ({"labels": IDS}, False),
        ({"labels": IDS, "use_cache": True}, True),
        ({"use_cache": False}, False),
        ({"cache": cache, "labels": IDS}, True),
    ):
        assert (model(IDS, **given).get(name) is not None) == made
    assert model(IDS, cache=cache)[name] is cache
    assert cache.length == 2 * PROMPT
    model.train()
    assert model(IDS).get(name) is None
    whole, chosen = model.eval()(IDS, return_dict=False)[0], torch.tensor([0, 5, 2])
    assert whole.shape == (2, PROMPT, VOCABULARY)
    assert torch.equal(model(IDS, logits_to_keep=chosen).logits, whole[:, chosen])
    for keep in (0, PROMPT, PROMPT + 1):
        assert torch.equal(model(IDS, logits_to_keep=keep).logits, whole)
    options = {"max_new_tokens": 2, "do_sample": False, "return_dict_in_generate": True}
    assert isinstance(model.generate(IDS, **options)[name], StateCache)
    assert name not in model.generate(IDS, use_cache=False, **options)
    given = StateCache()
    assert model.generate(IDS, cache=given, **options)[name] is given
    remembering_model.register()  # as where `transformers serve` imports it again
    mapping = transformers().models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    assert [mapping[kind] for kind in ("mnemos", "mnemos-remembering")] == [
        "MnemosForCausalLM",
        "RememberingForCausalLM",
    ]


def test_a_cache_is_cropped_to_any_recorded_length():
    """Of states that say how many tokens were read, and tokens that say where they are."""
    text = torch.arange(40).expand(2, 40) + torch.tensor([[0], [100]])
    valid = torch.rand(2, 40, generator=torch.Generator().manual_seed(0)) < 0.8
    cache = StateCache(torch.full((2,), 3), 3)
    cache.activate_past_recording()

    def read(cache, n):
        end = cache.length + n
        tokens, mask = cache.with_unread(text[:, end - n : end], valid[:, end - n : end] if n > 1 else None)
        assert torch.equal(tokens, text[:, int(cache.state[0]) : end])
        cache.read(tokens, mask, torch.full((2,), end))

    for n in (5, *[1] * 13, 4, 2, *[1] * 6):
        read(cache, n)
        sizes = [one.tokens.shape[1] for one in cache.reads]
        assert [one.length for one in cache.reads] == [3 + sum(sizes[:i]) for i in range(len(sizes))]
        assert 3 + sum(sizes) == cache.length
        for i in range(len(sizes) - 1):  # two calls are one where that is no longer than what follows
            assert sizes[i] + sizes[i + 1] > sum(sizes[i + 2 :])
    end = cache.length
    for length in range(3, end + 1):
        for first in (0, (length - end) // 2):
            one = cache.fork()
            one.crop(first)
            one.crop(length - end - first)
            start = int(one.state[0])
            assert one.length == one.get_seq_length() == length
            assert end - length >= length - start >= 0  # at most as many are read again as were taken back
            if one.unread is not None:
                mask = one.unread[1]
                assert torch.equal(one.unread[0], text[:, start:length])
                assert mask is None or torch.equal(mask | valid[:, start:length], mask)
            read(one, 1 + length % 2)
            assert (one.length, one.unread) == (length + 1 + length % 2, None)
    refuses("at least the 3 tokens before those that were recorded, found 2;", cache.fork().crop, 2 - end)
    refuses("a negative number of tokens, found 1", cache.crop, 1)
    cache.crop(-2)
    cache.reorder_cache(torch.tensor([1, 0]))
    assert torch.equal(cache.with_unread(text[:, :1], None)[0][:, :-1], text.flip(0)[:, int(cache.state[0]) : end - 2])
    assert all(torch.equal(one.tokens[0], one.tokens[1] + 100) for one in cache.reads)
    cache.batch_repeat_interleave(3)
    assert (cache.batch_size, cache.is_initialized, cache.get_mask_sizes(4, 0)) == (6, True, (end + 2, 0))
    other = copy.deepcopy(cache)
    other.crop(-1)
    assert (cache.length, other.length) == (end - 2, end - 3)
    cache.batch_select_indices(torch.tensor([5]))
    assert cache.batch_size == 1
    cache.reset()
    assert (cache.batch_size, cache.length, cache.is_initialized, cache.reads) == (-1, 0, False, [])


def test_auxiliary_losses_count_once_for_accumulated_calls():
    """What Trainer does: the losses of two calls are added, each with the number of targets of both."""
    torch.manual_seed(0)
    model = MnemosForCausalLM.of(OTHERS["compressive"].build()).train()
    ids = torch.randint(VOCABULARY, (2, 2, 12))
    means = [model(part, labels=part).loss for part in ids]
    added = [model(part, labels=part, num_items_in_batch=torch.tensor(44)).loss for part in ids]
    torch.testing.assert_close(sum(added), sum(means) / 2)
    model.eval()
    assert all(abs(model(part, labels=part).loss - mean) > 1e-6 for part, mean in zip(ids, means, strict=True))


def test_sampling_draws_as_a_stream_does():
    ours, model = built("memformer-plain-causal")
    torch.manual_seed(3)
    found = model.generate(IDS, do_sample=True, top_k=0, max_new_tokens=NEW, temperature=0.7)
    torch.manual_seed(3)
    expected, _ = mnemos.Stream(ours).prefill(IDS).generate(NEW, temperature=0.7)
    assert torch.equal(found[:, PROMPT:], expected)


def test_loss_counts_labels_whose_context_is_valid():
    ours, model = built("transformer-plain-causal")
    labels = IDS.masked_fill(MASK == 0, -100)
    output = model(IDS, attention_mask=MASK, labels=labels)
    count = labels[:, 1:].ne(-100).sum()  # Trainer's: the first token after padding is among them
    for given, part in ((count, 1.0), (2 * count, 0.5)):
        loss = model(IDS, attention_mask=MASK, labels=labels, num_items_in_batch=given).loss
        torch.testing.assert_close(loss, part * output.loss)
    logp = [ours(row)[0].log_softmax(-1)[0, :-1].gather(1, row[0, 1:, None]) for row in rows()]
    torch.testing.assert_close(output.loss, -torch.cat(logp).mean().to(output.loss), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(model(IDS, logits_to_keep=2).logits, model(IDS).logits[:, -2:])
    masked = {"attention_mask": torch.tensor([[1], [0]])}  # more than there are: all, also beside a row of padding
    assert torch.equal(model(IDS[:, :1], logits_to_keep=2, **masked).logits, model(IDS[:, :1], **masked).logits)
    output.loss.backward()
    assert all(p.grad is not None for p in model.parameters())
    model.zero_grad()


def test_the_loss_of_an_adaptive_softmax_is_that_of_its_log_probabilities():
    _, model = built("adaptive softmax")
    labels = IDS.masked_fill(MASK == 0, -100)
    logp = model(IDS, attention_mask=MASK).logits[:, :-1].gather(2, IDS[:, 1:, None])[..., 0]
    expected = -logp[MASK[:, :-1] * MASK[:, 1:] > 0].mean()
    for training in (False, True):
        output = model.train(training)(IDS, attention_mask=MASK, labels=labels)
        torch.testing.assert_close(output.loss, expected)
        assert (output.logits is None) is training
    model.eval()


def test_a_configuration_says_the_sizes_of_its_model():
    sizes = mnemos.TransformerConfig(position="learned", max_length=9, **SIZES)
    config = MnemosConfig(model=sizes, segment=1)
    assert (config.segment, config.max_position_embeddings, config.vocab_size) == (1, 9, VOCABULARY)
    assert (config.hidden_size, config.num_attention_heads) == (SIZES["dim"], SIZES["num_heads"])
    assert not hasattr(MnemosConfig(model=OTHERS["linear, float32"]), "max_position_embeddings")
    assert MnemosConfig().of_model() == mnemos.TransformerConfig()


def test_the_parts_that_other_libraries_ask_for():
    for name, linear in (("transformer-plain-causal", True), ("adaptive softmax", False)):
        ours, model = built(name)
        assert model.get_input_embeddings() is ours.embedding
        assert model.get_output_embeddings() is (ours.head if linear else None)
    hosted = HostedDecoderConfig().build()
    assert MnemosForCausalLM.of(hosted).get_input_embeddings() is hosted.host.get_input_embeddings()


def test_crop_returns_to_any_length():
    """Calls of several lengths, then back by steps: the state is that of the shorter text."""
    _, model = built("rmt-plain-causal")
    ids = torch.randint(VOCABULARY, (2, 40), generator=torch.Generator().manual_seed(7))
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    cache, place = StateCache(), 0
    cache.activate_past_recording()
    with torch.no_grad():
        for n in (6, 1, 1, 9, *[1] * 15):
            model(ids[:, place : place + n], attention_mask=mask[:, : place + n], cache=cache)
            place += n
        cache.crop(-22)
        cache.reorder_cache(torch.tensor([1, 0]))
        refuses("token ids", model, ids[:, :1] + VOCABULARY, cache=cache)  # a call that fails changes nothing
        new = model(ids[:, 10:12], attention_mask=mask[:, :12].flip(0), cache=cache)
        whole = model(torch.cat([ids[:, :10].flip(0), ids[:, 10:12]], 1), mask[:, :12].flip(0))
    torch.testing.assert_close(new.logits, whole.logits[:, -2:], rtol=1e-8, atol=1e-8)
    refuses("crop", model(ids, use_cache=True)[cache_name()].crop, -1)


def test_bad_input():
    _, model = built("lstm-plain-causal")
    other = transformers().DynamicCache()
    for given, words in [
        *(({"input_ids": IDS, name: other}, "StateCache") for name in CACHE_NAMES),
        ({"input_ids": IDS, "cache": StateCache(), "past_key_values": StateCache()}, "one cache, found another"),
        ({"input_ids": IDS, "position_ids": IDS}, "position_ids"),
        ({"inputs_embeds": torch.zeros(2, PROMPT, 8)}, r"inputs_embeds.*LoRA"),
        ({}, r"input_ids \[B, T\], found none"),
        ({"input_ids": IDS, "attention_mask": MASK[:, :3]}, "attention_mask"),
        ({"input_ids": IDS, "attention_mask": MASK.tolist()}, "attention_mask.*found list"),
        ({"input_ids": IDS, "labels": IDS.masked_fill(MASK == 0, -1)}, f"0 to {VOCABULARY - 1}.*found -1 to"),
    ]:
        refuses(words, model, **given)
    for network in (model, built("adaptive softmax")[1]):
        refuses(rf"expected \[2, {PROMPT}\].*found \[2, 3\]", network, IDS, attention_mask=MASK, labels=IDS[:, :3])
    refuses("gradient checkpointing", model.gradient_checkpointing_enable)
    refuses("the model's vocabulary, found another; build it", model.resize_token_embeddings, VOCABULARY + 1)
    refuses("of: expected a model of this library, found Linear", MnemosForCausalLM.of, torch.nn.Linear(2, 2))
    refuses("found one that stores keys and values; give it a DynamicCache", StateCache().update)
    for segment in (0, "4", 1.5):
        refuses(f"segment: expected at least 1 token, found {segment!r}; use", MnemosConfig, segment=segment)
    refuses("cache_implementation", model.generate, IDS, cache_implementation="static", max_new_tokens=1)
    for config, words in (
        (mnemos.EncoderDecoderConfig(), "MnemosForSeq2SeqLM"),
        (mnemos.registry.load("model", "vit")(), "of images"),
    ):
        refuses(words, lambda config=config: MnemosForCausalLM(MnemosConfig(model=config)))
