"""Memory Transformer, RMT and ARMT: against their equations, at any places of their segments, streamed and advanced."""

import sys
from pathlib import Path

import pytest
import torch

from mnemos import InputError
from mnemos.memory import AssociationsConfig, TokensConfig
from mnemos.models import ARMT, RMT, MemoryTransformer
from mnemos.types import leaves, reset, select

sys.path.insert(0, str(Path(__file__).parent))
import memory_tokens_oracle as oracle
from segment_cases import T, close, cut, holes, ids, same, stirred, stored_forked_and_joined

SMALL = {"vocab_size": 11, "dim": 12, "layers": 2, "num_heads": 3, "mlp": 10, "segment": 4, "position": "sinusoidal"}
SMALL |= {"norm": "pre", "activation": "gelu"}
ROTARY = {"position": "rotary", "num_heads": 2}
KINDS = {
    "mt": (MemoryTransformer, {"memory_tokens": 3}),
    "mt, causal, learned": (MemoryTransformer, {"memory_tokens": 2, "causal_memory": True, "position": "learned"}),
    "rmt": (RMT, {"memory": TokensConfig(tokens=3)}),
    "rmt, causal, learned": (RMT, {"memory": TokensConfig(tokens=3, causal=True), "position": "learned"}),
    "rmt, rotary, post": (
        RMT,
        {"memory": TokensConfig(tokens=1), "position": "rotary", "num_heads": 2, "norm": "post"},
    ),
    "rmt, rotary": (RMT, {"memory": TokensConfig(tokens=2), "position": "rotary", "tied": True, "num_heads": 2}),
    "armt": (ARMT, {"memory": AssociationsConfig(tokens=3, key_dim=5)}),
    "armt, causal": (ARMT, {"memory": AssociationsConfig(tokens=2, key_dim=3, nu=1, causal=True), "position": "none"}),
    "armt, as published": (ARMT, {"memory": AssociationsConfig(tokens=3, key_dim=5, bounded=False)}),
    "armt, post": (ARMT, {"memory": AssociationsConfig(tokens=1, key_dim=4), "norm": "post", "activation": "relu"}),
}


def model(kind: str = "rmt", **fields):
    torch.manual_seed(0)
    cls, settings = KINDS[kind]
    return stirred(cls(**SMALL | settings | fields))


def said(network, x, mask=None, weights=None):
    """What the equations say of one row."""
    valid = [True] * len(x) if mask is None else mask.tolist()
    return oracle.logits(weights or network.state_dict(), network.config, x.tolist(), valid)


@pytest.mark.parametrize("kind", KINDS)
def test_the_forward_and_the_memory_are_the_equations(kind):
    network, x, mask = model(kind), ids(4), holes()
    y, state = network(x, None, mask)
    for row in range(4) if kind in ("rmt", "armt") else (2, 3):
        wanted, memory = said(network, x[row], mask[row])
        close(y[row, mask[row]], wanted[mask[row]])
        if kind.startswith("rmt"):
            close(state.memory.tokens[row], memory)
        if kind.startswith("armt"):
            for found, (a, z) in zip(state.memory, memory, strict=True):
                close(found.matrix[row], a)
                close(found.normaliser[row], z)
    close(network(x[:1])[0][0], said(network, x[0])[0])


@pytest.mark.parametrize("kind", KINDS)
def test_the_gradients_are_those_of_the_equations(kind):
    """Of every weight, through three writes, with padding; and cut where no segment ends."""
    network, x, mask = model(kind), ids(4)[3:], holes()[3:]
    weight = torch.randn(T, 11, dtype=torch.float64)
    named = {name: p.detach().clone().requires_grad_() for name, p in network.named_parameters()}
    wanted, _ = said(network, x[0], mask[0], network.state_dict() | named)
    (wanted * weight)[mask[0]].sum().backward()
    for cuts in ([], [3, 9]):
        network.zero_grad()
        (cut(network, x, cuts, None, mask)[0][0] * weight)[mask[0]].sum().backward()
        for name, p in network.named_parameters():
            close(p.grad, named[name].grad, 1e-9)
            assert p.grad.abs().max() > 1e-9, name


@pytest.mark.parametrize("kind", ["mt", "rmt", "rmt, rotary", "armt"])
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
        wanted, _ = said(network, x[row, start:], valid)
        close(torch.cat([first[row, start:], whole[row]])[valid], wanted[valid])
    everything = reset(state, torch.ones(3, dtype=torch.bool))
    same(network(x[:, :9], everything)[1], network(x[:, :9])[1])  # no cache of the old rows is left


@pytest.mark.parametrize("kind", ["mt", "armt"])
def test_a_row_of_padding_alone_leaves_gradients_finite(kind):
    """Row 0 ends where a segment does, so that its padding has no key before it."""
    network, x, mask = model(kind), ids(2), torch.ones(2, T, dtype=torch.bool)
    mask[0, 8:] = False
    network(x, None, mask)[0][mask].square().sum().backward()
    assert all(p.grad.isfinite().all() for p in network.parameters())


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
    close(model("rmt")(x)[0][:, :4], model("rmt")(x[:, :4])[0])
    assert (model("rmt")(x)[0][:, 4:8] - model("rmt")(x[:, 4:8])[0]).abs().max() > 1e-3


def test_memory_tokens_start_different_and_a_new_armt_reads_nothing():
    start = RMT(**SMALL).memory.start
    assert torch.pdist(start.detach()).min() > 0.1
    network = ARMT(**SMALL)
    assert not network.associations[0].value.weight.any()
    _, state = network(ids())
    assert not any(layer.matrix.any() for layer in state.memory)
    assert all(layer.normaliser.any() for layer in state.memory)


@pytest.mark.parametrize("kind", ["rmt", "armt"])
def test_the_state_is_bounded_and_streams_fork_join_and_are_stored(kind, tmp_path):
    network, x = model(kind), ids(1, 24)
    sizes, state = [], None
    with torch.no_grad():
        for token in x.T:
            _, state = network(token[None], state)
            sizes.append(sum(leaf.numel() for leaf in leaves(state)))
    assert sizes[:4] == sizes[4:8] == sizes[-4:]
    f, width = network.front, network.config.dim
    assert sizes[2] - sizes[3] == 2 * (2 * (f + 3) * width) + 2 * (3 + 1) - 2  # keys, values, marks and counts
    stored_forked_and_joined(network, tmp_path)


@pytest.mark.parametrize("kind", ["rmt", "armt"])
def test_half_precision_is_close_and_matrices_stay_float32(kind):
    torch.manual_seed(0)
    cls, settings = KINDS[kind]
    network, x = cls(**SMALL | settings), ids(3, 22)
    exact, _ = network(x)
    with torch.autocast("cpu", torch.bfloat16):
        low, state = cut(network, x, [6, 7])
    assert (low.float() - exact).norm() < 0.05 * exact.norm()
    half, state = cut(network.to(torch.bfloat16), x, [6, 7])
    assert (half.float() - exact).norm() < 0.05 * exact.norm()
    assert all(layer.matrix.dtype == torch.float32 for layer in (state.memory if kind == "armt" else ()))


def test_bad_input():
    network, x = model("rmt"), ids()
    _, state = network(x)
    for wrong, message in (
        (lambda: RMT(segment=0), "segment: .* found 0"),
        (lambda: RMT(memory=3), "model.memory: expected a TokensConfig"),
        (
            lambda: TokensConfig(tokens=0),
            "memory.tokens: expected at least 1, found 0; .* use tokens=0 with write=False",
        ),
        (lambda: MemoryTransformer(memory_tokens=-1), "memory_tokens: .* found -1"),
        (lambda: network(x, state.memory), "found TokenState"),
        (lambda: network(x, model("rmt", memory=TokensConfig(tokens=5))(x)[1]), "another configuration"),
    ):
        with pytest.raises(InputError, match=message):
            wrong()
    close(network(x, select(state, torch.arange(3)))[0], network(x, state)[0])
