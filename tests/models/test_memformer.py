"""Memformer: against its equations, split anywhere, streamed, advanced, with every ablation a value."""

import math
import sys
from pathlib import Path

import pytest
import torch

import mnemos
from mnemos import InputError, Memformer, SlotsConfig
from mnemos.lab.evaluate.write_attention import writing
from mnemos.lab.measure.flops import forward_flops, step_flops
from mnemos.types import detach, leaves, reset

sys.path.insert(0, str(Path(__file__).parent))
import memformer_oracle as oracle
from segment_cases import T, close, cut, holes, ids, same, stirred, stored_forked_and_joined

SMALL = {"vocab_size": 11, "dim": 12, "encoder_layers": 2, "decoder_layers": 2, "num_heads": 3, "mlp": 10, "segment": 4}
SMALL |= {"buckets": 8, "max_distance": 6}
KINDS = {
    "paper": {"preset": "paper", "memory": SlotsConfig(slots=3)},
    "paper, forgetting off": {"preset": "paper", "memory": SlotsConfig(slots=3, forgetting=False)},
    "reads": {"memory": SlotsConfig(slots=5, self_logit=1.0), "decoder_reads": True, "tied": True},
    "cls": {"memory": SlotsConfig(slots=2, num_heads=1, temperature=1.0), "cls": 3, "bos": 7},
    "one slot": {"memory": SlotsConfig(slots=1, forgetting=False)},
    "no memory": {"memory": SlotsConfig(slots=0)},
    "never written": {"memory": SlotsConfig(slots=3, write=False), "encoder_layers": 1, "decoder_layers": 3},
}


def model(kind: str = "reads", **fields) -> Memformer:
    torch.manual_seed(0)
    return stirred(Memformer(**SMALL | KINDS[kind] | fields))


@pytest.mark.parametrize("kind", KINDS)
def test_the_forward_is_the_equations(kind):
    network, x, mask = model(kind), ids(4), holes()
    whole = network(x)[0]
    close(whole[0], oracle.logits(network.state_dict(), network.config, x[0].tolist(), [True] * T))
    padded = network(x, None, mask)[0]
    for row in range(4) if kind == "reads" else (3,):
        wanted = oracle.logits(network.state_dict(), network.config, x[row].tolist(), mask[row].tolist())
        close(padded[row, mask[row]], wanted[mask[row]])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["paper, forgetting off", "cls"])
def test_the_gradients_are_those_of_the_equations(kind):
    """Of every weight and of M_0, through three writes; with the paper's settings and with ours."""
    network, x = model(kind), ids(1)
    mask = holes()[3:]
    weight = torch.randn(T, 11, dtype=torch.float64)
    (network(x, None, mask)[0][0] * weight)[mask[0]].sum().backward()
    named = {name: p.detach().clone().requires_grad_() for name, p in network.named_parameters()}
    said = oracle.logits(network.state_dict() | named, network.config, x[0].tolist(), mask[0].tolist())
    (said * weight)[mask[0]].sum().backward()
    for name, p in network.named_parameters():
        close(p.grad, named[name].grad, 1e-9)
        assert p.grad.abs().max() > 1e-9, name


def test_the_papers_preset_is_the_papers_settings():
    """ρ = 1, forgetting or not, and CLS tokens; a switch that is set wins, and the default is none of it."""
    for forgetting in (True, False):
        network = Memformer(**SMALL, preset="paper", memory=SlotsConfig(slots=3, forgetting=forgetting))
        assert (network.config.cls, network.encoder.cls.shape, network.config.decoder_reads) == (2, (2, 12), False)
        _, state = network(ids())
        close(state.memory.slots.norm(dim=-1), torch.ones(3, 3), 1e-5)
        close(network.memory.start().norm(dim=-1), torch.ones(3), 1e-5)
    own = Memformer(**SMALL, preset="paper", cls=0, memory=SlotsConfig(slots=3, radius=2.0)).config
    assert (own.cls, own.memory.radius) == (0, 2.0)
    ours = Memformer(**SMALL, memory=SlotsConfig(slots=3))
    assert (ours.config.cls, ours.encoder.cls, ours.memory.radius) == (0, None, math.sqrt(12))
    assert mnemos.models.MemformerConfig(preset="paper").resolved().resolved().memory.radius == 1


@pytest.mark.parametrize("kind", ["paper", "reads"])
def test_resets_in_mid_stream_are_the_equations(kind):
    """Row 1 is reset inside its second segment, and from there on stands elsewhere in its segments than the others."""
    network, x = model(kind), ids(3, 17)
    first, state = network(x[:, :6])
    state = reset(state, torch.tensor([False, True, False]))
    whole, _ = network(x[:, 6:], state)
    split, _ = cut(network, x[:, 6:], [1, 2, 5, 9], state)
    close(whole, split)
    for row, start in ((0, 0), (1, 6)):
        tokens = x[row, start:].tolist()
        wanted = oracle.logits(network.state_dict(), network.config, tokens, [True] * len(tokens))
        close(torch.cat([first[row, start:], whole[row]]), wanted)


@pytest.mark.each_value
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("masked", [False, True])
def test_split_anywhere_equals_whole(kind, masked):
    network, x = model(kind), ids(4)
    mask = holes() if masked else None
    whole, end = network(x, None, mask)
    for cuts in ([4], [3, 12], range(1, T)):
        parts, state = cut(network, x, cuts, None, mask)
        close(parts, whole)
        same(state, end)
    close(network(x, network.initial_state(4), mask)[0], whole)


def test_gradients_are_the_derivatives():
    """Through two writes, to the slots that a stream comes with."""
    network, x = model("reads"), ids(2, 10)
    _, state = network(ids(2, 8, seed=5))
    state = detach(state)
    slots = state.memory.slots.clone().requires_grad_()

    def said(slots):
        y, after = network(x, state._replace(memory=state.memory._replace(slots=slots)))
        return y, after.memory.slots

    assert torch.autograd.gradcheck(said, slots, fast_mode=True)


def test_a_bias_the_wrong_way_round_is_noticed():
    """The oracle tells before from behind: with directions swapped it agrees no more."""
    network, x = model("paper"), ids(1)
    wanted = oracle.logits(network.state_dict(), network.config, x[0].tolist(), [True] * T)
    for part, both in (("encoder.bias", True), ("decoder.own_bias", False), ("decoder.read_bias", False)):
        bias = network.get_submodule(part)
        right, table = network(x)[0][0], bias.table.clone()
        close(right, wanted)
        n = len(table) // 2
        bias.table.copy_(torch.cat([table[n:], table[:n]]) if both else table.flip(0))
        assert (network(x)[0][0] - wanted).abs().max() > 1e-3, part
        bias.table.copy_(table)


@pytest.mark.parametrize("kind", ["paper", "reads", "no memory"])
def test_advance_is_the_forward_without_the_decoder(kind):
    network = model(kind, dropout=0.3).train()
    x, mask = ids(4, 12), torch.ones(4, 12, dtype=torch.bool)
    mask[0, 4:8] = mask[2, 4::2] = mask[3] = False  # each row completes its segments
    torch.manual_seed(3)
    _, state = network(x[:, :4], None, mask[:, :4])
    at = torch.get_rng_state()
    for given, m in ((None, None), (None, mask[:, 4:12]), (state, mask[:, 4:12])):
        torch.set_rng_state(at)
        _, wanted = network(x[:, 4:], given, m)
        torch.set_rng_state(at)
        calls = []
        hook = network.decoder.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        found = network.advance(x[:, 4:], given, m)
        hook.remove()
        assert not calls
        assert all(torch.equal(a, b) for a, b in zip(leaves(found), leaves(wanted), strict=True))


@pytest.mark.parametrize("kind", ["paper", "cls"])
def test_what_slots_listened_to(kind):
    network, x = model(kind), ids(2, 12)
    weights, state = writing(network, x)
    heads = network.memory.num_heads
    assert weights.shape == (2, 3, heads, network.config.memory.slots, 1 + 4 + network.config.cls)
    close(weights.sum(-1), torch.ones_like(weights[..., 0]))
    same(state, network.advance(x))
    assert not network.memory._forward_pre_hooks
    mask = torch.ones(2, 12, dtype=torch.bool)
    mask[0, 5] = mask[1, 3:8] = False
    padded = writing(network, x, None, mask)[0]
    for row, whole in enumerate((2, 1)):  # segments
        close(padded[row, :whole], writing(network, x[row : row + 1, mask[row]])[0][0])
    assert not padded[1, 1].any()


def test_a_stream_costs_the_same_at_any_token():
    network = model("reads")
    sizes, state = [], None
    with torch.no_grad():
        for token in ids(1, 40).T:
            _, state = network(token[None], state)
            sizes.append(sum(x.numel() for x in leaves(state)))
    assert sizes[:4] == sizes[4:8] == sizes[-4:]


def test_streams_write_fork_join_and_are_stored(tmp_path):
    stored_forked_and_joined(model("reads"), tmp_path)


@pytest.mark.parametrize("kind", ["paper", "reads"])
def test_bf16_stays_close_and_slots_stay_float32(kind):
    # Of fresh weights: `model`'s, large and random, make slots chaotic, where float32 strays from float64 as well.
    torch.manual_seed(0)
    network, x = Memformer(**SMALL | KINDS[kind]), ids(3, 32)
    exact, _ = network(x)
    with torch.autocast("cpu", torch.bfloat16):
        low, state = network(x)
    assert state.memory.slots.dtype == torch.float32
    assert (low.float() - exact).norm() < 0.05 * exact.norm()
    half = network.to(torch.bfloat16)
    _, state = half(x)
    assert state.memory.slots.dtype == torch.float32
    assert (half(x)[0].float() - exact).norm() < 0.05 * exact.norm()
    lengths = state.memory.slots.norm(dim=-1)
    torch.testing.assert_close(lengths, torch.full_like(lengths, network.memory.radius))


@pytest.mark.slow
def test_flops_are_counted_and_are_those_of_the_formulas():
    """Two whole segments, with BOS; a multiply-add counts 2."""
    network, x = Memformer(**SMALL, memory=SlotsConfig(slots=5)), ids(1, 8)
    d, length, k, v, mlp = 12, 4, 5, 11, 10

    def block(n, *sources):  # n tokens; of a source, how many, and whether it is attended to with n queries
        own = n * 4 * d * d + 2 * n * n * d + 2 * n * d * mlp
        return own + sum(n * 2 * d * d + m * 2 * d * d + 2 * n * m * d for m in sources)

    encoders = 2 * block(1, k) + 2 * 2 * block(length, k)
    decoders = 2 * 2 * block(length, length)
    writes = 2 * (k * 2 * d * d + length * 2 * d * d + 2 * k * length * d)
    assert forward_flops(network.eval(), x) == 2 * (encoders + decoders + writes + 8 * d * v)
    assert step_flops(network, x) > 2 * forward_flops(network, x)


@pytest.mark.slow
def test_bad_input():
    network, x = model("reads"), ids()
    _, state = network(x)
    for wrong, said in (
        (lambda: Memformer(dim=12, num_heads=4, memory=SlotsConfig(num_heads=5)), "dim must be divisible by num_heads"),
        (lambda: Memformer(bos=256), "bos: .* 0 to 255.* found 256"),
        (lambda: Memformer(buckets=32, max_distance=8), "max_distance 8"),
        (lambda: Memformer(preset="papers"), "model.preset: .* found 'papers'"),
        (lambda: SlotsConfig(temperature=0.0), "memory.temperature: .* found 0.0"),
        (lambda: network(x[:2], state), "2 rows.* found 3"),
        (lambda: network(x, model("reads", segment=5)(x)[1]), "another configuration"),
    ):
        with pytest.raises(InputError, match=said):
            wrong()
