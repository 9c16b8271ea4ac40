"""Speculative decoding: plain decoding's tokens and state, its distribution, and errors."""

import itertools

import pytest
import torch

import mnemos
from mnemos import GRC, InputError, Lookup, Stream, Transformer, TransformerConfig
from mnemos.attention.linear import LinearConfig
from mnemos.attention.softmax import SoftmaxConfig
from mnemos.generate import speculative
from mnemos.generate.rollback import without_last
from mnemos.generate.sampling import probabilities
from mnemos.generate.speculative import LookupDrafter, Settings, check_draft
from mnemos.libraries import transformers
from mnemos.models.transformer import HeadConfig
from mnemos.types import leaves

SIZES = {"vocab_size": 11, "dim": 16, "num_heads": 2, "mlp": 24}
BLOCKS = SIZES | {"layers": 2, "max_length": 60}


def llama() -> torch.nn.Module:
    hf = transformers()
    sizes = {"vocab_size": 11, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    return mnemos.functional(hf.LlamaForCausalLM(hf.LlamaConfig(**sizes, num_attention_heads=2)))


def mamba() -> torch.nn.Module:
    hf = transformers()
    config = hf.MambaConfig(vocab_size=11, hidden_size=16, num_hidden_layers=2, state_size=4)
    return mnemos.functional(hf.MambaForCausalLM(config))


def gpt2() -> torch.nn.Module:
    hf = transformers()
    sizes = {"vocab_size": 11, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 20}
    return mnemos.functional(hf.GPT2LMHeadModel(hf.GPT2Config(**sizes)))


def gated_delta() -> torch.nn.Module:
    """One layer of the gated delta rule and one of attention: a state of which keys and values are a part."""
    hf = transformers()
    sizes = {"vocab_size": 11, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 8}
    sizes |= {
        "num_key_value_heads": 1,
        "layer_types": ["linear_attention", "full_attention"],
        "mlp_only_layers": [0, 1],
    }
    sizes |= {"linear_num_value_heads": 2, "linear_num_key_heads": 2, "linear_key_head_dim": 4}
    config = hf.Qwen3NextConfig(**sizes, linear_value_head_dim=4, intermediate_size=24)
    return mnemos.functional(hf.Qwen3NextForCausalLM(config))


MODELS = {
    "linear": lambda: Transformer(**BLOCKS, attention=LinearConfig()),
    "softmax": lambda: Transformer(**BLOCKS),
    "window": lambda: Transformer(**BLOCKS, attention=SoftmaxConfig(window=9)),
    "cached": lambda: Transformer(
        **BLOCKS, attention=SoftmaxConfig(window=5), cache=GRC(length=3, block=4, scope="stream")
    ),
    "relative": lambda: Transformer(
        **BLOCKS, attention=mnemos.RelativeConfig(memory=9, same_length=True), position="none"
    ),
    "adaptive": lambda: Transformer(**BLOCKS, attention=LinearConfig(), head=HeadConfig(cutoffs=(6,))),
    "memformer": lambda: mnemos.Memformer(**SIZES, encoder_layers=1, decoder_layers=1, segment=5),
    "rmt": lambda: mnemos.RMT(**SIZES, layers=2, segment=5),
    "armt": lambda: mnemos.ARMT(**SIZES, layers=2, segment=5),
    "forgetting": lambda: Transformer(**BLOCKS, attention="kimi-delta"),
    "lstm": lambda: mnemos.LSTMConfig(vocab_size=11, dim=12).build(),
    "llama": llama,
    "mamba": mamba,
    "gated delta": gated_delta,
}


GOES_BACK = ("linear", "softmax", "window", "adaptive", "forgetting", "llama", "gated delta")


BOUNDED = {"learned": lambda: Transformer(**SIZES, layers=1, max_length=20, position="learned"), "gpt2": gpt2}


def built(kind: str, noise: float = 0.0) -> torch.nn.Module:
    """A model with random weights; noise: another one, which often agrees with it."""
    torch.manual_seed(0)
    model = (MODELS | BOUNDED)[kind]().double().eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:  # so that the outputs depend on the tokens
                weight.mul_(4)
            weight.add_(noise * weight.abs().mean() * torch.randn(weight.shape, generator=generator))
    return model


def ids(rows: int, t: int) -> torch.Tensor:
    return torch.randint(11, (rows, t), generator=torch.Generator().manual_seed(1))


@pytest.mark.each_value
@pytest.mark.parametrize("kind", MODELS)
def test_greedy_tokens_and_all_states_are_those_of_plain_decoding(kind):
    model, draft = built(kind), built(kind, noise=0.03)
    for prompt, small in ((ids(3, 7), True), (ids(1, 7), False)):
        stream = Stream(model).prefill(prompt)
        given = Stream(draft).prefill(prompt) if small else Lookup(prompt, 2, 1)
        wanted, after = stream.generate(17, temperature=0)
        found = mnemos.speculate(stream, given, 17, drafted=4, temperature=0)
        assert torch.equal(found.tokens, wanted)
        torch.testing.assert_close(found.stream.predict(), after.predict(), rtol=1e-8, atol=1e-8)
        shapes = [[x.shape for x in leaves(one.state)] for one in (found.stream, after)]
        assert shapes[0] == shapes[1]  # no keys of rejected tokens, and no padding, are left
        statistics = found.statistics
        assert statistics.tokens == 17 * len(prompt)
        assert 0 < statistics.accepted < statistics.drafted  # some were rejected
        assert statistics.calls - statistics.again < 17
        assert kind not in GOES_BACK or not statistics.again  # though rows keep different numbers of tokens
        more = mnemos.speculate(found.stream, found.draft, 6, temperature=0).tokens
        assert torch.equal(more, after.generate(6, temperature=0)[0])
        if small:
            read = Stream(draft).prefill(torch.cat([prompt, wanted], 1))
            torch.testing.assert_close(found.draft.predict(), read.predict(), rtol=1e-8, atol=1e-8)
        again = stream.generate(17, temperature=0)[1]  # what was given has not changed
        torch.testing.assert_close(again.predict(), after.predict(), rtol=0, atol=0)


@pytest.mark.parametrize("small", [True, False])
def test_rows_end_as_in_plain_decoding(small):
    """At a token, at a sequence that begins in an earlier call, or not at all; then stream and draft go on."""
    model, prompt = built("linear"), ids(4, 7)
    draft = Stream(built("linear", noise=0.03)).prefill(prompt) if small else Lookup(prompt, 2, 1)
    stream = Stream(model).prefill(prompt)
    free = stream.generate(17, temperature=0)[0]
    ends = {"eos": [int(free[0, 4])], "stop": [free[1, 5:8].tolist()]}
    wanted, after = stream.generate(17, temperature=0, **ends)
    found = mnemos.speculate(stream, draft, 17, drafted=4, temperature=0, **ends)
    assert len({row.index(ends["eos"][0]) if ends["eos"][0] in row else 17 for row in wanted.tolist()}) > 2
    assert torch.equal(found.tokens, wanted)
    assert torch.equal(found.stream.last, after.last)
    torch.testing.assert_close(found.stream.predict(), after.predict())
    more = mnemos.speculate(found.stream, found.draft, 6, drafted=4, temperature=0)
    assert torch.equal(more.tokens, after.generate(6, temperature=0)[0])


@pytest.mark.parametrize("kind", BOUNDED)
def test_rows_may_come_to_the_last_position_at_different_times(kind):
    """A draft for rows that need more tokens is read by all rows: none may read beyond its own positions."""
    model, draft = built(kind), built(kind, noise=0.3)
    for prompts in (ids(6, 9).split(1), [ids(1, n) for n in (5, 9, 4)]):
        stream, small = (Stream.join([Stream(one).prefill(prompt) for prompt in prompts]) for one in (model, draft))
        wanted, _ = stream.generate(12, temperature=0)
        found = mnemos.speculate(stream, small, 12, drafted=6, temperature=0)
        assert torch.equal(found.tokens, wanted)
        assert 0 < found.statistics.accepted < found.statistics.drafted
        with pytest.raises(InputError, match="positions"):
            mnemos.speculate(stream, small, 13, drafted=6, temperature=0)


@torch.no_grad()
def test_keys_of_rejected_tokens_are_overwritten_in_place():
    model = built("softmax")
    before = Stream(model).prefill(ids(1, 9)).generate(2, temperature=0)[1].state  # with room in its buffers
    keys = before.layers[0].k.clone()
    after = without_last(before, model(ids(1, 3), before)[1], [1], 3)
    wanted = model(ids(1, 1), before)[1]
    following = model(ids(1, 2), after)[1].layers[0]
    assert following._buffer is before.layers[0]._buffer
    torch.testing.assert_close(following.k, model(ids(1, 2), wanted)[1].layers[0].k)
    assert torch.equal(before.layers[0].k, keys)


def joint(model: torch.nn.Module, prompt: torch.Tensor, **settings) -> torch.Tensor:
    """The probability [V, V, V] of the next three tokens."""
    found, size = torch.ones(()), model.config.vocab_size
    for n in range(3):
        tails = torch.tensor(list(itertools.product(range(size), repeat=n)), dtype=torch.int64).view(size**n, n)
        logits = model(torch.cat([prompt.expand(len(tails), -1), tails], 1))[0][:, -1]
        found = found[..., None] * probabilities(logits, **settings).view(*[size] * (n + 1))
    return found


def surprise(tokens: torch.Tensor, chances: torch.Tensor) -> float:
    """Pearson's χ² of triples, as a quantile of the normal distribution (Wilson and Hilferty 1931)."""
    size = chances.shape[0]
    counts = (tokens @ torch.tensor([size * size, size, 1])).bincount(minlength=size**3)
    wanted = len(tokens) * chances.flatten().double()
    assert not counts[wanted == 0].any()
    rare = wanted < 5  # one cell, as the test needs five in each
    counts, wanted = (torch.cat([x[~rare], x[rare].sum()[None]]) for x in (counts, wanted))
    counts, wanted = counts[wanted > 0], wanted[wanted > 0]
    df = len(wanted) - 1
    chi2 = float(((counts - wanted) ** 2 / wanted).sum())
    return ((chi2 / df) ** (1 / 3) - (1 - 2 / (9 * df))) / (2 / (9 * df)) ** 0.5


@torch.no_grad()
@pytest.mark.each_value
@pytest.mark.parametrize("draft", ["model", "lookup"])
@pytest.mark.parametrize(
    "settings", [{"temperature": 2.0}, {"temperature": 1.5, "top_k": 4, "top_p": 0.9, "min_p": 0.1}]
)
def test_drawn_tokens_have_the_distribution_of_plain_sampling(draft, settings, monkeypatch):
    torch.manual_seed(0)
    sizes = {"vocab_size": 5, "dim": 16, "layers": 1, "num_heads": 2, "mlp": 24, "attention": LinearConfig()}
    model, other = (TransformerConfig.classic(**sizes).build().eval() for _ in range(2))
    prompt = torch.tensor([[1, 4, 4, 1, 4, 1, 4, 4, 1, 1, 4]])
    chances, rows = joint(model, prompt, **settings), prompt.expand(2000, -1)
    given = Lookup(rows) if draft == "lookup" else Stream(other).prefill(rows)

    def drawn(seed: int) -> float:
        generator = torch.Generator().manual_seed(seed)
        stream = Stream(model).prefill(rows)
        found = mnemos.speculate(stream, given, 3, drafted=2, **settings, generator=generator)
        assert 0.1 < found.statistics.acceptance < 0.9
        return surprise(found.tokens, chances)

    assert max(map(abs, map(drawn, range(3)))) < 3.5

    def wrong(scores, proposal, settings):
        """A rejected token is replaced by one drawn from p, and not from max(0, p − q)."""
        accepted, _ = check_draft(scores, proposal, settings)
        p = settings.probabilities(scores)
        chosen = p[torch.arange(len(p)), torch.tensor(accepted)]
        return accepted, torch.multinomial(chosen, 1, generator=settings.generator)[:, 0]

    monkeypatch.setattr(speculative, "check_draft", wrong)
    assert drawn(0) > 10


def test_rows_without_a_place_to_look_up_go_on_alone():
    model, prompt = built("linear"), torch.tensor([[1, 2, 3, 1, 2], [0, 1, 2, 3, 4]])
    stream = Stream(model).prefill(prompt)
    found = mnemos.speculate(stream, Lookup(prompt, 2, 2), 1, temperature=0)
    assert found.statistics.drafted == 0  # a single token needs no draft
    proposal = LookupDrafter(Lookup(prompt, 2, 2)).propose(prompt[:, -1:], 5, Settings(0, 0, 1, None))
    assert proposal.counts == [5, 0]
    assert proposal.tokens[0].tolist() == [3, 1, 2, 3, 1]  # the copy goes on with what it has copied
    # What fills the row up was not drafted: its own token may come next.
    scores = torch.zeros(2, 6, 11)
    scores[:, :, 4] = 9
    for temperature in (0, 1):
        settings = Settings(temperature, 0, 1.0, torch.Generator().manual_seed(0))
        accepted, following = check_draft(scores, proposal, settings)
        assert (accepted, following.tolist()) == ([0, 0], [4, 4])


def test_what_cannot_be_speculated_is_one_line():
    model, prompt = built("linear"), ids(2, 7)
    stream = Stream(model).prefill(prompt)

    def refused(words: str, stream=stream, draft=None, **fields) -> None:
        with pytest.raises(InputError, match=words) as found:
            mnemos.speculate(stream, Lookup(prompt) if draft is None else draft, **{"length": 5} | fields)
        assert "\n" not in str(found.value)

    refused("new one", Stream(model))
    refused("expected a Stream, found Transformer", model)
    refused("draft.*new one", draft=Stream(model))
    refused("found 5 and 0", drafted=0)
    refused("-1", length=-1)
    refused("whole numbers, found 5 and 2.5", drafted=2.5)
    refused("temperature", temperature=-1)
    refused("3 rows", draft=Lookup(ids(3, 7)))
    refused("last token", draft=Lookup(prompt + 1))
    refused("Tensor", draft=prompt)
    refused(
        "vocabulary of 11 tokens, found 12",
        draft=Stream(Transformer(**BLOCKS | {"vocab_size": 12}).eval()).prefill(prompt),
    )
    refused(
        "eval mode",
        draft=Stream(built("linear")).prefill(prompt),
        stream=Stream(model.train(), state=stream.state, last=stream.last),
    )
    model.eval()
    cut = Transformer(**BLOCKS, attention=mnemos.RelativeConfig(memory=9), position="none").eval()
    refused("same_length", Stream(cut).prefill(prompt))
    mixture = Transformer(**BLOCKS | {"vocab_size": 256}, attention=LinearConfig(), head=HeadConfig(mixture=2)).eval()
    refused("log_prob", Stream(mixture).prefill(prompt))
    for fields in ({"longest": 1}, {"shortest": 0}):
        with pytest.raises(InputError, match="shortest"):
            Lookup(prompt, **fields)
    with pytest.raises(InputError, match="prompt"):
        Lookup(prompt[0])
