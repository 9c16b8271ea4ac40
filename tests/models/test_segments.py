"""Memformer, Memory Transformer, RMT and ARMT against their equations, at any places of their segments.

Segments have four tokens; every ablation is a value.
"""

import itertools
import math

import memformer_oracle
import memory_tokens_oracle
import pytest
import torch
from refusals import refuses

import mnemos
from mnemos import Memformer, SlotsConfig
from mnemos.lab.evaluate.write_attention import writing
from mnemos.lab.measure.flops import forward_flops
from mnemos.memory import AssociationsConfig, TokensConfig
from mnemos.models import ARMT, RMT, MemoryTransformer
from mnemos.types import leaves, reset, select

T = 15  # three segments, and three tokens of a fourth
HALVES = {"vocab_size": 11, "dim": 12, "encoder_layers": 2, "decoder_layers": 2, "num_heads": 3, "mlp": 10}
HALVES |= {"segment": 4, "buckets": 8, "max_distance": 6}
MEMFORMERS = {
    "paper": {"preset": "paper", "memory": SlotsConfig(slots=3)},
    "paper, forgetting off": {"preset": "paper", "memory": SlotsConfig(slots=3, forgetting=False)},
    "reads": {"memory": SlotsConfig(slots=5, self_logit=1.0), "decoder_reads": True, "tied": True},
    "cls": {"memory": SlotsConfig(slots=2, num_heads=1, temperature=1.0), "cls": 3, "bos": 7},
    "one slot": {"memory": SlotsConfig(slots=1, forgetting=False)},
    "no memory": {"memory": SlotsConfig(slots=0)},
    "never written": {"memory": SlotsConfig(slots=3, write=False), "encoder_layers": 1, "decoder_layers": 3},
}
SMALL = {"vocab_size": 11, "dim": 12, "layers": 2, "num_heads": 3, "mlp": 10, "segment": 4, "position": "sinusoidal"}
SMALL |= {"norm": "pre", "activation": "gelu"}
ROTARY = {"position": "rotary", "num_heads": 2}
OTHERS = {
    "mt": (MemoryTransformer, {"memory_tokens": 3}),
    "mt, causal, learned": (MemoryTransformer, {"memory_tokens": 2, "causal_memory": True, "position": "learned"}),
    "rmt": (RMT, {"memory": TokensConfig(tokens=3)}),
    "rmt, causal, learned": (RMT, {"memory": TokensConfig(tokens=3, causal=True), "position": "learned"}),
    "rmt, rotary, post": (RMT, ROTARY | {"memory": TokensConfig(tokens=1), "norm": "post"}),
    "rmt, rotary": (RMT, ROTARY | {"memory": TokensConfig(tokens=2), "tied": True}),
    "armt": (ARMT, {"memory": AssociationsConfig(tokens=3, key_dim=5)}),
    "armt, causal": (ARMT, {"memory": AssociationsConfig(tokens=2, key_dim=3, nu=1, causal=True), "position": "none"}),
    "armt, as published": (ARMT, {"memory": AssociationsConfig(tokens=3, key_dim=5, bounded=False)}),
    "armt, post": (ARMT, {"memory": AssociationsConfig(tokens=1, key_dim=4), "norm": "post", "activation": "relu"}),
}
KINDS = {kind: (Memformer, HALVES | fields) for kind, fields in MEMFORMERS.items()}
KINDS |= {kind: (cls, SMALL | fields) for kind, (cls, fields) in OTHERS.items()}


def fresh(kind, **fields):
    torch.manual_seed(0)
    cls, settings = KINDS[kind]
    return cls(**settings | fields)


def model(kind, **fields):
    """In float64 and eval mode, every parameter away from where it starts."""
    network = fresh(kind, **fields).double()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, dtype=torch.float64)
    return network.eval()


def ids(rows=3, t=T):
    return torch.randint(11, (rows, t), generator=torch.Generator().manual_seed(1))


def holes():
    mask = torch.ones(4, T, dtype=torch.bool)
    mask[0, 9:] = False  # padding behind
    mask[1, :2] = False  # in front
    mask[2, 4:8] = False  # a segment of padding alone
    mask[3, [1, 6, 7, 13]] = False  # here and there
    return mask


def said(network, x, mask=None, weights=None):
    """What the equations say of the valid tokens of a row, and its memory."""
    oracle = memformer_oracle if isinstance(network, Memformer) else memory_tokens_oracle
    tokens = x if mask is None else x[mask]
    return oracle.logits(weights or network.state_dict(), network.config, tokens.tolist())


def cut(network, x, cuts, state=None, mask=None):
    """Logits and state of a call for each piece."""
    parts = []
    for a, b in itertools.pairwise([0, *cuts, x.shape[1]]):
        y, state = network(x[:, a:b], state, None if mask is None else mask[:, a:b])
        parts.append(y)
    return torch.cat(parts, 1), state


def close(a, b, tolerance=1e-10):
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def same(a, b):
    for x, y in zip(leaves(a), leaves(b), strict=True):
        close(x, y)


@pytest.mark.parametrize("kind", KINDS)
def test_the_forward_and_the_memory_are_the_equations_wherever_they_are_cut(kind):
    network, x, mask = model(kind), ids(4), holes()
    whole, end = network(x)
    close(whole[0], said(network, x[0])[0])
    padded, after = network(x, None, mask)
    for row in range(4) if kind in ("reads", "rmt", "armt") else (2, 3):
        logits, memory = said(network, x[row], mask[row])
        close(padded[row, mask[row]], logits)
        for found, wanted in zip(leaves(after.memory), leaves(memory), strict=False):  # behind them, how many writes
            close(found[row], wanted)
    for cuts, m, y, state in (([3, 12], None, whole, end), ([1, 2, 6, 7, 13], mask, padded, after)):
        parts, found = cut(network, x, cuts, None, m)
        close(parts, y)
        same(found, state)


@pytest.mark.parametrize("kind", ["reads", "mt", "rmt", "rmt, rotary", "armt"])
def test_a_short_call_is_the_equations_in_one_call_and_token_by_token(kind):
    network, x, mask = model(kind), ids(2, 7), torch.ones(2, 7, dtype=torch.bool)
    mask[1, [0, 3]] = False
    whole, end = network(x, None, mask)
    for row in range(2):
        logits, memory = said(network, x[row], mask[row])
        close(whole[row, mask[row]], logits)
        for found, wanted in zip(leaves(end.memory), leaves(memory), strict=False):
            close(found[row], wanted)
    parts, found = cut(network, x, range(1, 7), None, mask)
    close(parts, whole)
    same(found.memory, end.memory)
    close(network(x, found)[0], network(x, end)[0])
    close(network(x, None, mask, mask)[0], whole[mask])
    close(network(x[:1])[0], whole[:1])
    nothing, still = network(x[:, :1], None, mask[:, :1] & False)
    assert nothing.isfinite().all()
    assert still.seen.tolist() == [0, 0]


@pytest.mark.parametrize("kind", ["paper, forgetting off", "cls", *OTHERS])
def test_the_gradients_are_those_of_the_equations(kind):
    """Of every weight and of what the memory starts from, through three writes; also cut where no segment ends."""
    network, x, mask = model(kind), ids(4)[3:], holes()[3:]
    weight = torch.randn(T, 11, dtype=torch.float64)[mask[0]]
    named = {name: p.detach().clone().requires_grad_() for name, p in network.named_parameters()}
    (said(network, x[0], mask[0], network.state_dict() | named)[0] * weight).sum().backward()
    for cuts in ([], [3, 9]):
        network.zero_grad()
        (cut(network, x, cuts, None, mask)[0][0, mask[0]] * weight).sum().backward()
        for name, p in network.named_parameters():
            close(p.grad, named[name].grad, 1e-9)
            assert p.grad.abs().max() > 1e-9, name


@pytest.mark.parametrize("kind", ["paper", "reads", "mt", "rmt", "rmt, rotary", "armt"])
def test_rows_at_different_places_are_the_equations(kind):
    """Row 1 is reset inside its second segment; from there on it is elsewhere in its segments than the others."""
    network, x, mask = model(kind), ids(3, 17), torch.ones(3, 17, dtype=torch.bool)
    mask[0, 9:12], mask[1, 11] = False, False
    first, state = network(x[:, :6], None, mask[:, :6])
    state = reset(state, torch.tensor([False, True, False]))
    whole, end = network(x[:, 6:], state, mask[:, 6:])
    split, also = cut(network, x[:, 6:], [1, 2, 5, 9], state, mask[:, 6:])
    close(whole, split)
    same(end.memory, also.memory)
    for row, start in ((0, 0), (1, 6), (2, 0)):
        valid = mask[row, start:]
        close(torch.cat([first[row, start:], whole[row]])[valid], said(network, x[row, start:], valid)[0])
    everything = reset(state, torch.ones(3, dtype=torch.bool))
    same(network(x[:, :9], everything)[1], network(x[:, :9])[1])  # no cache of the old rows is left


@pytest.mark.parametrize("kind", ["paper", "reads", "rmt", "armt"])
def test_half_precision_stays_close_and_memories_stay_float32(kind):
    # Of fresh weights: `model`'s, large and random, make slots chaotic, where float32 strays from float64 as well.
    network, x = fresh(kind), ids(3, 22)
    exact, _ = network(x)
    with torch.autocast("cpu", torch.bfloat16):
        low, state = cut(network, x, [6, 7])
    half, after = cut(network.to(torch.bfloat16), x, [6, 7])
    for y, end in ((low, state), (half, after)):
        assert (y.float() - exact).norm() < 0.05 * exact.norm()
        if kind != "rmt":  # whose memory is the model's own tokens
            assert {leaf.dtype for leaf in leaves(end.memory)} <= {torch.float32, torch.int64}
    if isinstance(network, Memformer):
        lengths = after.memory.slots.norm(dim=-1)
        torch.testing.assert_close(lengths, torch.full_like(lengths, network.memory.radius))


@torch.no_grad()
@pytest.mark.parametrize("kind", ["paper", "rmt"])
def test_a_segment_that_began_under_autocast_is_read_on_without(kind):
    network, x = fresh(kind), ids(1, 8)
    wanted = network(x)[0][:, 6:]
    with torch.autocast("cpu", torch.bfloat16):
        state = network(x[:, :6])[1]
    found = network(x[:, 6:], state)[0]
    assert (found - wanted).norm() < 0.05 * wanted.norm()


# --- Memformer ---


def test_the_papers_preset_is_the_papers_settings():
    """ρ = 1, forgetting or not, and CLS tokens; a switch that is set wins, and the default is none of it."""
    for forgetting in (True, False):
        network = Memformer(**HALVES, preset="paper", memory=SlotsConfig(slots=3, forgetting=forgetting))
        assert (network.config.cls, network.encoder.cls.shape, network.config.decoder_reads) == (2, (2, 12), False)
        _, state = network(ids())
        close(state.memory.slots.norm(dim=-1), torch.ones(3, 3), 1e-5)
        close(network.memory.start().norm(dim=-1), torch.ones(3), 1e-5)
    own = Memformer(**HALVES, preset="paper", cls=0, memory=SlotsConfig(slots=3, radius=2.0)).config
    assert (own.cls, own.memory.radius) == (0, 2.0)
    ours = Memformer(**HALVES, memory=SlotsConfig(slots=3))
    assert (ours.config.cls, ours.encoder.cls, ours.memory.radius) == (0, None, math.sqrt(12))
    assert mnemos.models.MemformerConfig(preset="paper").resolved().resolved().memory.radius == 1


@pytest.mark.parametrize("kind", ["paper", "reads", "no memory"])
def test_advance_does_without_the_decoder(kind):
    network, x, mask = model(kind), ids(4, 12), torch.ones(4, 12, dtype=torch.bool)
    mask[0, 4:8] = mask[2, 4::2] = mask[3] = False  # each row completes its segments
    _, state = network(x, None, mask)
    same(network.advance(x[:, :6], None, mask[:, :6]), network(x[:, :6], None, mask[:, :6])[1])  # inside a segment
    network.decoder.forward = None
    same(network.advance(x, None, mask), state)


@pytest.mark.parametrize("kind", ["paper", "cls"])
def test_what_slots_listened_to(kind):
    network, x = model(kind), ids(2, 12)
    weights, state = writing(network, x)
    slots = network.config.memory.slots
    assert weights.shape == (2, 3, network.memory.num_heads, slots, 1 + 4 + network.config.cls)
    close(weights.sum(-1), torch.ones_like(weights[..., 0]))
    same(state, network.advance(x))


def test_flops_are_counted_and_are_those_of_the_formulas():
    """Two whole segments, with BOS; a multiply-add counts 2."""
    network, x = Memformer(**HALVES, memory=SlotsConfig(slots=5)), ids(1, 8)
    d, length, k, v, mlp = 12, 4, 5, 11, 10

    def block(n, *sources):  # n tokens; of a source, how many, and whether it is attended to with n queries
        own = n * 4 * d * d + 2 * n * n * d + 2 * n * d * mlp
        return own + sum(n * 2 * d * d + m * 2 * d * d + 2 * n * m * d for m in sources)

    encoders = 2 * block(1, k) + 2 * 2 * block(length, k)
    decoders = 2 * 2 * block(length, length)
    writes = 2 * (k * 2 * d * d + length * 2 * d * d + 2 * k * length * d)
    assert forward_flops(network.eval(), x) == 2 * (encoders + decoders + writes + 8 * d * v)


# --- memory tokens ---


def test_a_model_that_is_never_written_has_no_recurrence():
    """RMT is then a Memory Transformer, and ARMT a Transformer in segments; with no memory tokens, so is RMT."""
    x = ids()
    never = model("rmt", memory=TokensConfig(tokens=3, write=False))
    tokens = MemoryTransformer(**SMALL, memory_tokens=3).double()
    tokens.load_state_dict(never.state_dict())
    close(never(x)[0], tokens(x)[0])
    assert not never(x)[1].memory.writes.any()
    for network in (
        model("armt", memory=AssociationsConfig(write=False)),
        model("rmt", memory=TokensConfig(tokens=0, write=False)),
    ):
        close(network(x)[0][:, 4:8], network(x[:, 4:8])[0])
        assert leaves(network(x)[1].memory) == []


def test_memory_tokens_start_different_and_a_new_armt_reads_nothing():
    assert torch.pdist(RMT(**SMALL).memory.start.detach()).min() > 0.1
    torch.manual_seed(0)
    many, sizes = TokensConfig(tokens=50), {"dim": 64, "num_heads": 2}
    for started in (
        RMT(**sizes, memory=many).memory.start,
        ARMT(**sizes, memory=AssociationsConfig(tokens=50)).memory_tokens,
        Memformer(**sizes, cls=50).encoder.cls,
        mnemos.Transformer(**sizes, causal=False, head=mnemos.models.HeadConfig(classes=2)).cls,
        RMT(**sizes).embedding.weight,
    ):
        assert 0.8 < started.std() * 8 < 1.2, "as long as embeddings, whose variance is 1/D"
    network = ARMT(**SMALL)
    assert not network.associations[0].value.weight.any()
    _, state = network(ids())
    assert not any(layer.matrix.any() for layer in state.memory)
    assert all(layer.normaliser.any() for layer in state.memory)


def test_bad_input():
    reads, rmt, x = model("reads"), model("rmt"), ids()
    slots, tokens = reads(x)[1], rmt(x)[1]
    for words, call in (
        ("dim must be divisible by num_heads", lambda: Memformer(dim=12, num_heads=4, memory=SlotsConfig(num_heads=5))),
        ("bos: .* 0 to 255.* found 256", lambda: Memformer(bos=256)),
        ("bos: .* found -1", lambda: Memformer(bos=-1)),
        ("cls: expected at least 0, .* found -1", lambda: Memformer(cls=-1)),
        ("decoder_reads: expected slots", lambda: Memformer(decoder_reads=True, memory=SlotsConfig(slots=0))),
        ("max_distance 8", lambda: Memformer(buckets=32, max_distance=8)),
        ("model.preset: .* found 'papers'", lambda: Memformer(preset="papers")),
        ("memory.temperature: .* found 0.0", lambda: SlotsConfig(temperature=0.0)),
        ("2 rows.* found 3", lambda: reads(x[:2], slots)),
        ("another configuration", lambda: reads(x, model("reads", segment=5)(x)[1])),
        ("token ids: .* found", lambda: rmt(x + rmt.config.vocab_size)),
        ("token ids: .* found", lambda: rmt(x - rmt.config.vocab_size, tokens)),
        ("model.memory: expected a TokensConfig", lambda: RMT(memory=3)),
        ("memory.tokens: expected at least 1, found 0; .*write=False", lambda: TokensConfig(tokens=0)),
        ("memory_tokens: .* found -1", lambda: MemoryTransformer(memory_tokens=-1)),
        ("found TokenState", lambda: rmt(x, tokens.memory)),
        ("another configuration", lambda: model("mt")(x, model("mt", dim=24, num_heads=6)(x)[1])),  # heads as wide
        ("another configuration", lambda: rmt(x, model("rmt", memory=TokensConfig(tokens=5))(x)[1])),
    ):
        refuses(words, call)
    close(rmt(x, select(tokens, torch.arange(3)))[0], rmt(x, tokens)[0])
