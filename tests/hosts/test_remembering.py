"""remember: against the decoder's own inputs_embeds, under replay, with padding, of named parts."""

import copy
from types import SimpleNamespace

import pytest
import torch
from decoder_models import FAMILIES, FURTHER, config, ids, plain
from hosts import close
from refusals import refuses
from torch import nn
from torch.nn import functional as F

import mnemos
from mnemos.hosts.remembering import _KNOWN, Remembering
from mnemos.libraries import transformers
from mnemos.memory import TokenState
from mnemos.types import Advances, RecurrentModel, leaves, reset

EXPERTS = ("Mixtral", "Qwen2Moe", "Qwen3Moe")  # their kernel takes no float64
FAMILY = [*FAMILIES, *(pytest.param(name, marks=pytest.mark.exhaustive) for name in FURTHER)]


def host(name: str = "gpt2", **options) -> nn.Module:
    if name in ("mistral", "gemma3"):
        options = {"sliding_window": 32, **options}
    if name in EXPERTS:  # made in float32
        kind, sizes = config(name, **options)
        return kind(sizes).eval()
    return plain(name, **options)


def remembering(name: str = "gpt2", tokens: int = 3, **options) -> Remembering:
    torch.manual_seed(0)
    found = mnemos.remember(host(name, **options), tokens)
    with torch.no_grad():
        found.memory.start += 0.3 * torch.randn(found.memory.start.shape, dtype=found.memory.start.dtype)
    return found


@pytest.mark.parametrize("name", FAMILY)
def test_it_is_the_decoder_with_memory_around_the_tokens(name):
    """Two segments are calls of the whole model with the embeddings written out, with the gradient of the start."""
    network = remembering(name)
    model, tolerance = network.model, 1e-4 if name in EXPERTS else 1e-10
    state, memory = None, network.memory.start.expand(3, -1, -1)
    for seed, t in ((2, 7), (3, 5)):
        x = ids(3, t, seed)
        embeds = torch.cat([memory, model.get_input_embeddings()(x), memory], 1)
        out = model(inputs_embeds=embeds, output_hidden_states=True, use_cache=False)
        memory = out.hidden_states[-1][:, 3 + t :]
        advanced = network.advance(x, state)
        logits, state = network(x, state)
        close(logits, out.logits[:, 3 : 3 + t], tolerance)
        close(state.tokens, memory, tolerance)
        close(advanced.tokens, memory, tolerance)
    assert state.writes.tolist() == [2, 2, 2]
    found, expected = (
        torch.autograd.grad(y.square().sum(), network.memory.start, retain_graph=True)[0]
        for y in (logits, out.logits[:, 3 : 3 + t])
    )
    size = expected.abs().max()
    assert size > 1e-3
    close(found / size, expected / size, tolerance)
    assert (network(x)[0] - logits).abs().max() > 1e-3, "the memory is read"


def test_replay_trains_it_in_three_lines():
    network = remembering("llama").train()
    segments = list(ids(2, 16).split(4, 1))

    def step(segment, memory):
        logits, memory = network(segment[:, :-1], memory)
        return F.cross_entropy(logits.flatten(0, 1), segment[:, 1:].flatten()), memory

    out = mnemos.replay(step, segments, advance=lambda segment, memory: network.advance(segment[:, :-1], memory))
    found = [p.grad.clone() for p in network.parameters()]
    network.zero_grad()
    total, state = torch.zeros((), dtype=torch.float64), None
    for segment in segments:
        loss, state = step(segment, state)
        total = total + loss / len(segments)
    total.backward()
    close(out.loss, total.detach())
    for mine, p in zip(found, network.parameters(), strict=True):
        close(mine, p.grad)
    assert network.memory.start.grad.abs().max() > 1e-6


def test_segments_are_in_the_mode_of_the_model_and_the_decoder_keeps_its_own():
    model = mnemos.remember(plain("gpt2"), tokens=2)
    assert mnemos.hosts.Segmented(model, 4).training
    assert not model.model.training
    network = mnemos.hosts.Segmented(model.eval(), 4)
    assert not network.training
    only = torch.rand(3, 7) < 0.4
    close(network(ids(3, 7), only=only)[0], network(ids(3, 7))[0][only])


@torch.no_grad()
def test_segments_read_a_padded_row_as_alone():
    """Outputs, state and the next call, wherever the padding is; also where a mask hides nothing."""
    network = mnemos.hosts.Segmented(remembering(), 4)
    x, later = ids(5, 10), ids(5, 3, 7)
    mask = torch.ones_like(x, dtype=torch.bool)
    mask[1, 5:], mask[2, :2], mask[3, 3:7], mask[4] = False, False, False, False
    logits, state = network(torch.where(mask, x, 1), None, mask)
    assert network(x.int(), None, mask)[1].tokens.dtype == torch.int64
    after = network(later, state)[0]
    for row in range(4):
        wanted, alone = network(x[row : row + 1, mask[row]])
        close(logits[row, mask[row]], wanted[0])
        for found, one in zip(leaves(state), leaves(alone), strict=True):
            close(found[row], one[0])
        close(after[row], network(later[row : row + 1], alone)[0][0])
    close(after[4], network(later[4:])[0][0])
    for found, one in zip(leaves(network(x, None, mask | True)[1]), leaves(network(x)[1]), strict=True):
        assert torch.equal(found, one)
    refuses("T at least 1", network, x[:, :0])


def test_it_declares_what_our_models_declare():
    network = remembering()
    assert isinstance(network, RecurrentModel)
    assert isinstance(network, Advances)
    assert (network.splits, network.state_kind, network.rows_independent) == ("segments", "constant", True)
    _, state = network(ids(3, 7))
    fresh = reset(state, torch.tensor([True, False, True]))
    close(network(ids(3, 7), fresh)[0][[0, 2]], network(ids(3, 7))[0][[0, 2]])
    other = copy.deepcopy(network)
    with torch.no_grad():
        other.model.transformer.wte.weight += 1
    assert (other(ids(3, 7))[0] - network(ids(3, 7))[0]).abs().max() > 1e-3, "a copy has parts of its own"


class Foreign(nn.Module):
    """A decoder of no known library: an embedding, a running mean of embeddings, a head."""

    def __init__(self, causal: bool = True) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(50, 6), nn.Linear(6, 50)
        self.body = Mean(causal)


class Mean(nn.Module):
    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.map, self.causal = nn.Linear(6, 6), causal

    def forward(self, inputs_embeds):
        x = self.map(inputs_embeds)
        return (x.cumsum(1) if self.causal else x.sum(1, keepdim=True).expand_as(x),)


def test_a_decoder_of_unknown_layout_needs_the_names_of_its_parts():
    model, x = Foreign(), ids(2, 5)
    refuses(r"is known \(Cohere2.*GPT2LM.*LlamaFor.*found Foreign; name its parts", mnemos.remember, model)
    network = mnemos.remember(model, 2, embedding="table", decoder="body", head="head")
    logits, state = network(x)
    embeds = torch.cat([network.memory.start.expand(2, -1, -1), model.table(x)], 1)
    close(logits, model.head(model.body(embeds)[0])[:, 2:], 1e-5)
    assert state.tokens.shape == (2, 2, 6)
    assert "UnknownForCausalLM" not in _KNOWN
    for wrong, message in (
        (lambda: mnemos.remember(model, embedding="table"), "found none for decoder, head"),
        (lambda: mnemos.remember(model, 2, "table", "bodi", "head"), "found 'bodi'; it has table, head, body"),
        (lambda: mnemos.remember(Foreign(False), 2, "table", "body", "head"), "decoder='body': expected a causal"),
        (lambda: mnemos.remember(model, 2, "table", "head", "head"), "takes inputs_embeds=, found Linear"),
    ):
        refuses(message, wrong)


NAMED = {  # class: the names of its parts, and settings
    "CohereForCausalLM": ("model.embed_tokens", "model", "lm_head", {"logit_scale": 0.3}),
    "GraniteForCausalLM": (
        *("model.embed_tokens", "model", "lm_head"),
        {"logits_scaling": 3.0, "embedding_multiplier": 2.0, "residual_multiplier": 0.5},
    ),
    "Gemma2ForCausalLM": ("model.embed_tokens", "model", "lm_head", {"final_logit_softcapping": 2.0, "head_dim": 6}),
    "BartForCausalLM": (
        *("model.decoder.embed_tokens", "model.decoder", "lm_head"),
        {"d_model": 24, "decoder_layers": 2, "decoder_attention_heads": 4},
    ),
    "MptForCausalLM": ("transformer.wte", "transformer", "lm_head", {"d_model": 24, "n_layers": 2, "n_heads": 3}),
    "MambaForCausalLM": ("backbone.embeddings", "backbone", "lm_head", {"state_size": 4}),
}


def by_name(kind: str) -> Remembering:
    *names, options = NAMED[kind]
    library = transformers()
    of = getattr(library, kind)
    sizes = {"vocab_size": 60, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
    if kind == "MptForCausalLM":
        sizes = {"vocab_size": 60}
    torch.manual_seed(0)
    model = of(of.config_class(**sizes, **options)).double().eval()
    return mnemos.remember(model, 2, *names)


@pytest.mark.parametrize("name", ["gpt2", "qwen3", *NAMED])
@torch.no_grad()
def test_padding_takes_no_position_and_a_row_of_padding_keeps_its_memory(name):
    """What a class of named parts does after its head is done here too."""
    # Some of those by name compute a part in single precision.
    network, tolerance = (by_name(name), 1e-6) if name in NAMED else (remembering(name), 1e-10)
    x = ids(4, 8)
    embeds = torch.cat([network.memory.start.expand(4, -1, -1), network.parts[0](x)], 1)
    close(network(x)[0], network.model(inputs_embeds=embeds).logits[:, -8:].double(), tolerance)
    mask = torch.ones(4, 8, dtype=torch.bool)
    mask[1, 5:], mask[2, :2], mask[3] = False, False, False
    _, before = network(ids(4, 6, 5))
    logits, state = network(x, before, mask)
    for row, valid in ((0, slice(0, 8)), (1, slice(0, 5)), (2, slice(2, 8))):
        alone = TokenState(before.tokens[row : row + 1], before.writes[row : row + 1])
        wanted, after = network(x[row : row + 1, valid], alone)
        close(logits[row, valid], wanted[0], tolerance)
        close(state.tokens[row], after.tokens[0], tolerance)
    close(state.tokens[3], before.tokens[3], tolerance)
    assert state.writes.tolist() == [2, 2, 2, 1]
    close(network(torch.where(mask, x, 1), before, mask)[1].tokens, state.tokens, tolerance)


def test_parts_whose_logits_are_not_the_models_are_refused():
    model = plain("cohere")
    model.config.logit_scale = None  # no setting says it
    refuses("that they differ by up to", mnemos.remember, model, 2, "model.embed_tokens", "model", "lm_head")
    model = plain("gpt2")
    model.forward = lambda ids: torch.arange(480.0).view(2, 4, 60)
    refuses("that they differ by up to", mnemos.remember, model, 2, "transformer.wte", "transformer", "lm_head")


@pytest.mark.parametrize(
    ("forward", "message"),
    [
        (lambda a, b: a, "called with token ids .*, found TypeError: .*missing 1 required.*; use another model"),
        (lambda ids: ids.new_zeros(2, 4, 49).float(), r"logits are those of Foreign, found \(2, 4, 50\) and .*4, 49"),
        (lambda ids: "text", r"found \(2, 4, 50\) and str"),
    ],
)
def test_models_whose_own_call_is_another_are_refused(forward, message):
    model = Foreign()
    model.__class__ = type("Foreign", (Foreign,), {"forward": lambda self, *given: forward(*given)})
    refuses(message, mnemos.remember, model, 2, "table", "body", "head")


def test_hidden_states_of_another_shape_are_refused():
    model = Foreign()
    model.body.register_forward_hook(lambda module, args, output: (output[0][:, :-1],))
    words = r"hidden states \(2, 4, 6\), found .*2, 3, 6.*; name another"
    refuses(words, mnemos.remember, model, 2, "table", "body", "head")


def test_a_model_is_taken_that_returns_its_logits_first_or_by_name():
    x = ids(2, 5)
    for answer in (lambda y: y, lambda y: (y, None), lambda y: SimpleNamespace(logits=y)):
        model = Foreign()
        whole = lambda self, ids, answer=answer: answer(self.head(self.body(self.table(ids))[0]))  # noqa: E731
        model.__class__ = type("Foreign", (Foreign,), {"forward": whole})
        mnemos.remember(model, 2, "table", "body", "head")(x)


def test_bad_input():
    network, x = remembering(max_position_embeddings=20), ids(3, 7)
    _, state = network(x)
    segmented = mnemos.hosts.Segmented(network, 4)
    for wrong, message in (
        (lambda: mnemos.remember(network.model, 0), "whole number of at least 1, found 0"),
        (lambda: mnemos.hosts.Segmented(network, 0), "segment: expected at least 1 token, found 0"),
        (lambda: mnemos.hosts.Segmented(network, "4"), "segment: expected at least 1 token, found '4'"),
        (lambda: mnemos.remember(network.model.transformer), "with its head.*found GPT2Model"),
        (lambda: mnemos.remember(mnemos.cache(host())), "found Report; give the model itself"),
        (lambda: mnemos.remember(nn.Linear(2, 2)), "layout is known"),
        (lambda: mnemos.remember(mnemos.Transformer(dim=8, num_heads=2)), "found Transformer; .* use mnemos.RMT"),
        (lambda: network(x[:, :1].expand(3, 15)), "at most the 20 positions of the decoder, found 21: 15 tokens and 6"),
        (lambda: segmented(x, segmented(x)[1], x > 0), "mask: expected none where rows go on, found one"),
        (lambda: remembering("mistral", sliding_window=12)(x), "at most the 12 tokens of its window"),
        (lambda: network(x.tolist()), "a tensor of token ids .* found list; use torch.as_tensor"),
        (lambda: network(x - 1000), "token ids: expected 0 to"),
        (lambda: network(x, None, x), "mask of booleans"),
        (lambda: network(x, (1, 2)), "found tuple"),
    ):
        refuses(message, wrong)
    assert network(x[:, :1].expand(3, 14))[0].shape == (3, 14, 60)
    network.model.config.sliding_window = 0  # as configurations say that a window is not used
    close(network(x)[1].tokens, state.tokens)
