"""Beam search against enumeration, a plain search over lists, greedy decoding and teacher-forced log-likelihoods."""

import itertools
from dataclasses import replace

import pytest
import torch
from contract_cases import scatter
from refusals import refuses

import mnemos
from mnemos import BeamConfig, EncoderDecoder, MemformerConfig, Pair, TransformerConfig, beam_search, native
from mnemos.attention.linear import LinearConfig
from mnemos.attention.softmax import SoftmaxConfig
from mnemos.generate.beam import is_done, top_tokens
from mnemos.models import HeadConfig, LSTMConfig, RMTConfig

VOCABULARY, EOS = 7, 2


def translator(vocabulary=VOCABULARY, **fields):
    torch.manual_seed(0)
    sizes = {"vocab_size": vocabulary, "dim": 8, "num_heads": 2, "mlp": 8, "encoder_layers": 1, "decoder_layers": 2}
    return scatter(EncoderDecoder(**sizes | fields)).eval()


SIZES = {"vocab_size": VOCABULARY, "dim": 8, "num_heads": 2}
PLAIN = SIZES | {"layers": 2, "mlp": 8}
LANGUAGE_MODELS = {
    "softmax": TransformerConfig(**PLAIN),
    "window": TransformerConfig(**PLAIN, attention=SoftmaxConfig(window=3)),
    "rotary": TransformerConfig(**PLAIN, position="rotary"),
    "linear": TransformerConfig(**PLAIN, attention=LinearConfig()),
    "cached": TransformerConfig(**PLAIN, cache=mnemos.GRC(length=2, scope="stream")),
    "adaptive": TransformerConfig(**PLAIN, head=HeadConfig(tied=True, cutoffs=(4,))),
    "memformer": MemformerConfig(**SIZES, encoder_layers=1, decoder_layers=1, mlp=8, segment=3),
    "rmt": RMTConfig(**PLAIN, segment=3),
    "lstm": LSTMConfig(vocab_size=VOCABULARY, dim=8, layers=2),
}


def log_probs(model, source, tokens):
    """log p of every next token [T, V] after tokens [T], for a source [1, S] or a language model."""
    with torch.no_grad():
        x = torch.tensor([tokens])
        outputs = model(x if source is None else Pair(source, x))[0][0]
        likelihood = mnemos.types.likelihood_of(model)
        return outputs.log_softmax(-1) if likelihood is None else likelihood.log_prob(outputs)


def sources(rows, length=5, seed=1, vocabulary=VOCABULARY):
    return torch.randint(vocabulary, (rows, length), generator=torch.Generator().manual_seed(seed))


def as_lists(found):
    return [[(h.tokens.tolist(), h.score, h.log_prob, h.finished) for h in hypotheses] for hypotheses in found]


def same(found, expected):
    """Hypotheses with the same tokens, and scores to rounding."""
    for ours, theirs in zip(as_lists(found), as_lists(expected), strict=True):
        assert [h[0] for h in ours] == [h[0] for h in theirs]
        assert [h[3] for h in ours] == [h[3] for h in theirs]
        for i in (1, 2):
            assert [h[i] for h in ours] == pytest.approx([h[i] for h in theirs], rel=1e-9)


def searched(model, source, prefix, config, **given):
    return beam_search(model, model.encode(source), prefix, config, **given)


@pytest.mark.parametrize("penalty", [0.0, 1.0, 2.5])
def test_a_wide_beam_finds_what_enumeration_finds(penalty):
    model, source, longest, beams = translator(4), sources(1, vocabulary=4), 4, 40
    every = []
    for length in range(1, longest + 1):
        for tokens in itertools.product(range(4), repeat=length):
            ended = tokens[-1] == EOS
            if EOS not in tokens[:-1] and (ended or length == longest):
                table = log_probs(model, source, [0, *tokens[:-1]])
                total = float(sum(table[i, token] for i, token in enumerate(tokens)))
                every.append((total / length**penalty, list(tokens), total, ended))
    every.sort(reverse=True)
    config = BeamConfig(
        eos=EOS, beams=beams, n_best=beams, max_length=longest, length_penalty=penalty, stopping="never"
    )
    found = as_lists(searched(model, source, torch.zeros(1, 1, dtype=torch.int64), config))[0]
    assert [h[0] for h in found] == [h[1] for h in every[:beams]]
    for i, j in ((1, 0), (2, 2)):
        assert [h[i] for h in found] == pytest.approx([h[j] for h in every[:beams]], rel=1e-9)
    assert [h[3] for h in found] == [h[3] for h in every[:beams]]


def by_lists(model, source, config):
    """fairseq's search for one sentence, over lists of tokens, with every log-probability from the whole sequence."""
    running, finished, k = [([0], 0.0)], [], config.beams
    for step in range(config.max_length):
        found = []
        for tokens, score in running:
            table = log_probs(model, source, tokens)[-1].tolist()
            for token, value in enumerate(table):
                short, full = step < config.min_length, step + 1 == config.max_length
                if token in config.forbidden or (token == EOS and short) or (token != EOS and full):
                    continue
                found.append(([*tokens, token], score + value))
        found.sort(key=lambda one: -one[1])
        for tokens, score in found[:k]:
            if tokens[-1] == EOS and len(finished) < k:
                finished.append((score / (step + 1) ** config.length_penalty, tokens[1:], score))
        if len(finished) == k:
            break
        running = [one for one in found[: 2 * k] if one[0][-1] != EOS][:k]
    return sorted(finished, reverse=True)


def test_equals_fairseqs_search_of_each_sentence_alone():
    """In a batch of sentences of different lengths, of which some are finished early."""
    model = translator(head_bias=True, position="none")
    with torch.no_grad():
        model.head.bias[EOS] += 1.5
    source, lengths = sources(5), [5, 3, 4, 1, 2]
    mask = torch.arange(5) < torch.tensor(lengths)[:, None]
    prefix = torch.zeros(5, 1, dtype=torch.int64)
    for settings in ({}, {"length_penalty": 0.3, "min_length": 2}, {"beams": 2, "forbidden": (3,), "max_length": 6}):
        config = BeamConfig(**{"eos": EOS, "beams": 3, "n_best": 2, "max_length": 9} | settings)
        found = as_lists(beam_search(model, model.encode(source, mask), prefix, config))
        for i, length in enumerate(lengths):
            expected = by_lists(model, source[i : i + 1, :length], config)[:2]
            assert [h[0] for h in found[i]] == [one[1] for one in expected]
            assert [h[1] for h in found[i]] == pytest.approx([one[0] for one in expected], rel=1e-9)
            assert [h[2] for h in found[i]] == pytest.approx([one[2] for one in expected], rel=1e-9)


@pytest.mark.parametrize("name", LANGUAGE_MODELS)
def test_language_models_beams_and_samples_have_teacher_forced_scores(name):
    """Models of every kind of state; beam 1 is greedy decoding; the state given is not changed."""
    torch.manual_seed(0)
    model = scatter(LANGUAGE_MODELS[name].build()).eval()
    prompt = sources(2, 4, 3)
    greedy, _ = mnemos.Stream(model).prefill(prompt).generate(6, temperature=0)
    one = beam_search(model, None, prompt, BeamConfig(beams=1, max_length=6))
    assert [h[0].tokens.tolist() for h in one] == greedy.tolist()
    for settings in ({}, {"temperature": 1.0, "top_k": 4}):
        config = BeamConfig(eos=EOS, beams=3, n_best=3, max_length=6, length_penalty=0.5, **settings)
        found = beam_search(model, None, prompt, config, torch.Generator().manual_seed(5))
        for i, hypotheses in enumerate(found):
            assert len(hypotheses) == 3
            for h in hypotheses:
                table = log_probs(model, None, [*prompt[i].tolist(), *h.tokens.tolist()])
                total = sum(float(table[3 + j, token]) for j, token in enumerate(h.tokens.tolist()))
                assert h.log_prob == pytest.approx(total, rel=1e-6)
                assert h.score == pytest.approx(total / len(h.tokens) ** 0.5, rel=1e-6)
                assert h.finished == (h.tokens[-1] == EOS)
                assert h.finished or settings  # fairseq's running ones take the end token at last


def test_prefixes_of_different_lengths_give_what_each_gives_alone():
    model = translator()
    source = sources(3)
    prefix = torch.tensor([[0, 4, 5], [0, -100, -100], [0, EOS, -100]])
    for settings in ({}, {"stopping": "heuristic"}, {"no_repeat_ngram": 2, "min_length": 2}):
        config = BeamConfig(**{"eos": EOS, "beams": 3, "n_best": 3, "max_length": 7} | settings)
        found = searched(model, source, prefix, config)
        for i, length in enumerate((3, 1, 2)):
            same([found[i]], searched(model, source[i : i + 1], prefix[i : i + 1, :length], config))
    samples = searched(model, source, prefix, BeamConfig(eos=EOS, max_length=7, temperature=0.7, n_best=5))
    assert all(len(h.tokens) <= 7 for hypotheses in samples for h in hypotheses)


@pytest.mark.parametrize("stopping", ["fairseq", "never"])
def test_limits_of_sentences_give_what_each_gives_alone(stopping):
    model, source = translator(), sources(4)
    limits = torch.tensor([9, 2, 5, 1])
    config = BeamConfig(eos=EOS, beams=3, n_best=3, stopping=stopping)
    start = torch.ones(4, 1, dtype=torch.int64)
    found = beam_search(model, model.encode(source), start, config, limits=limits)
    for i, limit in enumerate(limits.tolist()):
        one = replace(config, max_length=limit)
        same(found[i : i + 1], beam_search(model, model.encode(source[i : i + 1]), start[:1], one))
    assert all(h.finished for one in found for h in one) == (stopping == "fairseq")
    for wrong, said in ((limits[:2], r"limits \[4\] of int64"), (limits - 1, "limits of at least 1, found 0")):
        refuses(said, beam_search, model, model.encode(source), start, config, limits=wrong)


def test_repeats_are_limited():
    model = translator(head_bias=True)
    with torch.no_grad():
        model.head.bias[[EOS, 5]] += 4
    prefix = torch.zeros(3, 1, dtype=torch.int64)
    for n in (1, 2, 3):
        config = BeamConfig(eos=EOS, max_length=7, min_length=4, n_best=5, no_repeat_ngram=n, stopping="never")
        for h in itertools.chain(*searched(model, sources(3), prefix, config)):
            tokens = [0, *h.tokens.tolist()]
            assert 6 <= len(tokens) <= 8
            grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
            assert len(set(grams)) == len(grams)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_where_no_token_may_come_next_only_what_ended_before_is_found(temperature):
    """No token twice: of seven tokens, one of them the prefix, at most six come after it."""
    config = BeamConfig(eos=EOS, beams=6, n_best=6, max_length=9, no_repeat_ngram=1, temperature=temperature)
    prefix = torch.zeros(2, 1, dtype=torch.int64)
    found = searched(translator(), sources(2), prefix, config, generator=torch.Generator().manual_seed(0))
    assert all(found)
    assert all(h.finished and len(h.tokens) <= 6 for hypotheses in found for h in hypotheses)
    assert searched(translator(), sources(2), prefix, replace(config, eos=None)) == [[], []]


def test_finished_sentences_leave_the_batch():
    model = translator(head_bias=True, decoder=LinearConfig())
    with torch.no_grad():
        model.head.bias[EOS] += 2.5
    seen = []

    def step(tokens, state):
        seen.append(len(tokens))
        return model(tokens, state)

    prefix, config = torch.zeros(8, 1, dtype=torch.int64), BeamConfig(eos=EOS, beams=2, max_length=40)
    source = sources(8, seed=4)
    found = searched(model, source, prefix, config, step=step)
    assert seen[0] == 16
    assert seen[-1] < 16
    assert all(later <= earlier and later % 2 == 0 for earlier, later in itertools.pairwise(seen))
    for i in range(8):
        same([found[i]], searched(model, source[i : i + 1], prefix[:1], config))


@pytest.mark.parametrize("name", ["linear", "softmax"])
def test_faster_steps_find_what_the_model_finds(name):
    """In float32: the fused kernel, or packed matrices."""
    torch.manual_seed(0)
    model, prompt = LANGUAGE_MODELS[name].build().eval(), sources(3, 4, 3)
    config = BeamConfig(eos=EOS, beams=3, n_best=3, max_length=8)
    assert mnemos.fused_step(model).fused == (native.library() is not None)
    found, expected = (beam_search(model, None, prompt, config, step=step) for step in (None, model))
    for ours, theirs in zip(as_lists(found), as_lists(expected), strict=True):
        assert [h[0] for h in ours] == [h[0] for h in theirs]
        assert [h[1] for h in ours] == pytest.approx([h[1] for h in theirs], rel=1e-4)


def test_samples_follow_the_models_distribution_and_their_generator():
    model = translator()
    source, prefix = sources(1), torch.zeros(1, 1, dtype=torch.int64)
    config = BeamConfig(eos=EOS, beams=4000, n_best=4000, max_length=1, temperature=1.0)
    found = searched(model, source, prefix, config, generator=torch.Generator().manual_seed(0))[0]
    share = torch.bincount(torch.cat([h.tokens for h in found]), minlength=VOCABULARY) / 4000
    assert (share - log_probs(model, source, [0])[0].exp()).abs().max() < 0.03
    again = searched(model, source, prefix, config, generator=torch.Generator().manual_seed(0))[0]
    assert [h.score for h in again] == [h.score for h in found]


@pytest.mark.parametrize("width", [1024, 1100, 5000])
def test_the_fast_largest_values_are_the_largest(width):
    logits = torch.randn(6, width, generator=torch.Generator().manual_seed(width))
    logits[1] = -torch.inf
    logits[2, : width - 3] = -torch.inf  # the largest are in the last columns, of no whole block
    logits[3] = logits[3].sort().values
    for k in (1, 2, 10):
        values, places = top_tokens(logits, k)
        assert torch.equal(values, logits.topk(k).values)
        assert torch.equal(logits.gather(1, places), values)
        assert all(len(set(row)) == k for row in places[[0, 2, 3, 4, 5]].tolist())


@pytest.mark.parametrize(
    ("stopping", "best", "penalty", "done"),
    [
        ("fairseq", -1.0, 1.0, True),  # two have ended
        ("early", -1.0, 1.0, True),
        ("heuristic", -8.0, 1.0, True),  # −8/4 = −2: not better than the worst, −2
        ("heuristic", -7.9, 1.0, False),
        ("never", -8.0, 1.0, False),  # −8/10 would be better
        ("never", -20.0, 1.0, True),
        ("never", -2.0, 0.0, True),  # without a penalty the length has no effect
        ("never", -0.9, -0.5, False),  # −0.9·√4 = −1.8: shorter is better, so the present length bounds
        ("never", -1.0, -0.5, True),
    ],
)
def test_a_full_pool_is_done_as_the_convention_says(stopping, best, penalty, done):
    lengths, best = torch.tensor([[4, 10]]), torch.tensor([[best]])
    assert bool(is_done(torch.tensor([[-1.0, -2.0]]), best, lengths, stopping, penalty)) == done
    assert not is_done(torch.tensor([[-1.0, -torch.inf]]), best, lengths, stopping, penalty)
    assert is_done(torch.tensor([[-1.0, -torch.inf]]), torch.tensor([[-torch.inf]]), lengths, stopping, penalty)


def test_wrong_settings_and_inputs_are_refused_in_one_line():
    model, prefix = translator(), torch.zeros(2, 1, dtype=torch.int64)
    state = model.encode(sources(2))
    mixture = mnemos.Transformer(**PLAIN, head=HeadConfig(mixture=2)).eval()
    refused = {
        "beams: expected at least 1, found 0": lambda: BeamConfig(beams=0),
        "n_best: expected at least 1, found 0": lambda: BeamConfig(n_best=0),
        "max_length: expected at least 1, found 0": lambda: BeamConfig(max_length=0),
        "min_length: expected at least 0, found -1": lambda: BeamConfig(min_length=-1),
        "no_repeat_ngram: expected at least 0, found -1": lambda: BeamConfig(no_repeat_ngram=-1),
        "length_penalty: expected a finite number, found nan": lambda: BeamConfig(length_penalty=torch.nan),
        "after its tokens alone, found it between": lambda: beam_search(model, state, torch.tensor([[-100, 0]] * 2)),
        r"tokens from 0 to 6, found \[7\]": lambda: beam_search(model, state, prefix, BeamConfig(eos=VOCABULARY)),
        r"to 6, found \[6, -1\]": lambda: beam_search(model, state, prefix, BeamConfig(eos=6, forbidden=(-1,))),
        "a likelihood with `log_prob`, found LogisticMixture": lambda: beam_search(mixture, None, prefix),
        "n_best: expected at most beams": lambda: BeamConfig(n_best=6),
        "min_length: expected below": lambda: BeamConfig(min_length=9, max_length=9),
        "other than eos": lambda: BeamConfig(eos=1, forbidden=(1,)),
        "prefix .* of int64": lambda: beam_search(model, state, prefix.float()),
        "at least one token in every prefix": lambda: beam_search(model, state, torch.full((2, 1), -100)),
        "expected a state of 3 rows": lambda: beam_search(model, state, prefix.repeat(2, 1)[:3], BeamConfig(eos=1)),
        "returns .outputs, state., found Tensor of Bare": lambda: beam_search(Bare().eval(), None, prefix),
        "found training mode": lambda: beam_search(in_training(translator()), state, prefix),
        "found NaN": lambda: beam_search(diverged(model), state, prefix),
    }
    for text, call in refused.items():
        refuses(text, call)


class Bare(torch.nn.Module):
    """Without a state, and without a `config` that would say its vocabulary."""

    def forward(self, tokens, state):
        return torch.zeros(*tokens.shape, 5)


def in_training(model):
    model.decoder[1].train()
    return model


def diverged(model):
    with torch.no_grad():
        model.head.weight[0] = torch.nan
    return model
