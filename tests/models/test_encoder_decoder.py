"""The encoder-decoder against its equations in float64, its state, and what its rows share."""

import math

import pytest
import torch
from contract_cases import close, holds_where, scatter
from refusals import refuses

import mnemos
from mnemos import GRC, EncoderDecoder, Pair
from mnemos.attention.linear import LinearConfig
from mnemos.attention.softmax import SoftmaxConfig
from mnemos.memory.key_values import KeyValues
from mnemos.types import leaves

SMALL = {"vocab_size": 17, "dim": 8, "num_heads": 2, "mlp": 12, "encoder_layers": 2, "decoder_layers": 2}


def build(**fields):
    torch.manual_seed(0)
    return scatter(EncoderDecoder(**SMALL | {"max_length": 24} | fields)).eval()


def tokens(rows, length, seed=1):
    return torch.randint(17, (rows, length), generator=torch.Generator().manual_seed(seed))


def oracle(model, source, target):
    """The logits [T, V] of one pair of sentences without padding, by Vaswani et al. 2017, §3, in plain operations."""
    w, c = dict(model.named_parameters(remove_duplicate=False)), model.config

    def affine(name, x):
        y = x @ w[f"{name}.weight"].T
        return y + w[f"{name}.bias"] if f"{name}.bias" in w else y

    def norm(name, x):
        centred = x - x.mean(-1, keepdim=True)
        scaled = centred / torch.sqrt((centred**2).mean(-1, keepdim=True) + 1e-5)
        return scaled * w[f"{name}.weight"] + w[f"{name}.bias"]

    def attention(q, k, v, causal):
        out = []
        for qh, kh, vh in zip(*(x.chunk(c.num_heads, -1) for x in (q, k, v)), strict=True):
            scores = qh @ kh.T / math.sqrt(qh.shape[-1])
            if causal:
                scores = scores + torch.full_like(scores, -torch.inf).triu(1)
            out.append(torch.softmax(scores, -1) @ vh)
        return torch.cat(out, -1)

    def part(name, x, function):
        return x + function(norm(name, x)) if c.norm == "pre" else norm(name, x + function(x))

    def block(name, x, memory):
        def own(z):
            q, k, v = affine(f"{name}.attention.qkv", z).chunk(3, -1)
            return affine(f"{name}.attention.output", attention(q, k, v, memory is not None))

        def other(z):
            k, v = affine(f"{name}.reads.0.key_value", memory).chunk(2, -1)
            found = attention(affine(f"{name}.reads.0.query", z), k, v, False)
            return affine(f"{name}.reads.0.output", found)

        def mlp(z):
            hidden = affine(f"{name}.mlp.expand", z)
            hidden = hidden.clamp(min=0) if c.activation == "relu" else hidden * torch.sigmoid(hidden)
            return affine(f"{name}.mlp.contract", hidden)

        x = part(f"{name}.attention_norm", x, own)
        if memory is not None:
            x = part(f"{name}.read_norms.0", x, other)
        return part(f"{name}.mlp_norm", x, mlp)

    def embedded(name, ids):
        where = torch.arange(len(ids), dtype=torch.float64)[:, None]
        angle = where / 10000 ** (2 * (torch.arange(c.dim) // 2) / c.dim)
        wave = torch.where(torch.arange(c.dim) % 2 == 0, angle.sin(), angle.cos())
        return w[f"{name}.weight"][ids] * math.sqrt(c.dim) + wave.float()  # the model's sinusoids are float32

    y, x = embedded("source_embedding", source), embedded("embedding", target)
    for i in range(c.encoder_layers):
        y = block(f"encoder.{i}", y, None)
    y = norm("encoder_norm", y) if c.norm == "pre" else y
    for i in range(c.decoder_layers):
        x = block(f"decoder.{i}", x, y)
    return affine("head", norm("decoder_norm", x) if c.norm == "pre" else x)


@pytest.mark.parametrize(
    "fields",
    [{}, {"norm": "post", "activation": "silu", "share": "none", "source_vocab_size": 19, "head_bias": True}],
    ids=["pre", "post"],
)
def test_equals_its_equations(fields):
    """Whole and padded; the source in front of padding of any content."""
    model = build(**fields)
    source, target = tokens(3, 7), tokens(3, 5, 2)
    mask = torch.arange(7) < torch.tensor([7, 4, 6])[:, None]
    found, _ = model(Pair(source, target, mask))
    for i, length in enumerate((7, 4, 6)):
        close(found[i], oracle(model, source[i, :length], target[i]))
    state, parts = model.encode(source, mask), []
    for one in target.split(1, 1):
        y, state = model(one, state)
        parts.append(y)
    close(torch.cat(parts, 1), found)


def test_a_closed_gate_equals_no_cache_and_an_open_one_does_not():
    plain, cached = build(), build(cache=GRC(length=3))
    inside = {f"encoder.{i}.attention.": f"encoder.{i}.attention.inner." for i in range(2)}
    weights = plain.state_dict()
    for before, after in inside.items():
        weights = {name.replace(before, after): x for name, x in weights.items()}
    assert not cached.load_state_dict(weights, strict=False).unexpected_keys
    pair = Pair(tokens(2, 6), tokens(2, 4, 2), torch.arange(6) < torch.tensor([6, 4])[:, None])
    assert not torch.allclose(plain(pair)[0], cached(pair)[0])
    for block in cached.encoder:
        torch.nn.init.constant_(block.attention.mix, -1000.0)
    close(cached(pair)[0], plain(pair)[0])


def test_an_attention_may_be_given_by_its_name():
    assert build(encoder="linear", decoder="softmax").config == build(encoder=LinearConfig()).config
    refuses("found 'liner'; did you mean 'linear'", build, decoder="liner")


def test_sharing_of_embeddings():
    for share, count in {"all": 1, "target": 2, "none": 3}.items():
        model = EncoderDecoder(**SMALL, share=share)
        found = {id(x) for x in (model.embedding.weight, model.source_embedding.weight, model.head.weight)}
        assert len(found) == count


def held(state):
    """Bytes of the storages of a state's tensors, each counted once."""
    return sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in leaves(state)}.values())


def test_beams_share_the_keys_and_values_of_their_source():
    """Bytes of the state do not grow with the beams, and no select within beams copies a source or a token."""
    model, beams = build(), 5
    with torch.no_grad():
        start = model.encode(tokens(3, 20))
        prefix = tokens(3, 6, 2)
        _, start = model(prefix, start)
        copied = mnemos.select(start, torch.arange(3).repeat_interleave(beams))
        assert copied.source.layers[0][0].data_ptr() == start.source.layers[0][0].data_ptr()
        state = model.branch(start, beams)
        assert held(state) - held(start) < 1500  # marks of what is visible, and counts
        assert held(state.source) == held(start.source)
        rows = torch.tensor([4, 0, 0, 2, 1, 5, 6, 6, 6, 6, 14, 13, 12, 11, 10])
        moved = mnemos.select(state, rows)
        for one, other in zip(leaves((moved.source, moved.layers)), leaves((state.source, state.layers)), strict=True):
            assert one.numel() < 1000 or one.data_ptr() == other.data_ptr()
        assert moved.layers[0].k.data_ptr() == state.layers[0].k.data_ptr()
        fewer = mnemos.select(state, torch.arange(5, 15))
        assert held(fewer.source) == held(state.source) * 2 // 3


@pytest.mark.parametrize("attention", [SoftmaxConfig(), SoftmaxConfig(window=3), LinearConfig()], ids=str)
def test_branched_rows_branch_again_and_may_all_leave(attention):
    model = build(decoder=attention)
    with torch.no_grad():
        _, start = model(tokens(2, 3, 2), model.encode(tokens(2, 6)))
        state = model(tokens(6, 1, 3), model.branch(start, 3))[1]
        twice, copied = model.branch(state, 2), mnemos.select(state, torch.arange(6).repeat_interleave(2))
        for x in tokens(12, 1, 4), tokens(12, 2, 5):
            close(model(x, twice)[0], model(x, copied)[0])
        assert len(mnemos.select(state, torch.zeros(6, dtype=torch.bool)).seen) == 0


def test_reset_and_join_give_every_row_its_own_source():
    model = build()
    with torch.no_grad():
        state = model.branch(model(tokens(2, 3, 2), model.encode(tokens(2, 6)))[1], 2)
        fresh = mnemos.reset(state, torch.tensor([True, False, False, False]))
        x = tokens(4, 1, 3)
        y = model(x, fresh)[0]
        close(y[1:], model(x, state)[0][1:])
        close(y[:1], model(x[:1], model.initial_state(1))[0])
        holds_where(model)
        joined = mnemos.join([state, model.encode(tokens(1, 9))])
        assert isinstance(joined.layers[0], KeyValues)
        close(model(torch.cat([x, x[:1]]), joined)[0][:4], model(x, state)[0])


@torch.no_grad()
def test_a_saved_state_is_read_by_its_own_model_alone(tmp_path):
    """Of sources and targets of any length; and a stream."""
    model, x, file = build(), tokens(2, 3, 2), tmp_path / "state"
    mask = torch.arange(7) < torch.tensor([7, 4])[:, None]
    state = model(x, model.encode(tokens(2, 7), mask))[1]
    mnemos.save_state(state, file, model)
    for like in (None, model.encode(tokens(3, 5)), model.branch(state, 2)):
        assert torch.equal(model(x, mnemos.load_state(file, model, like))[0], model(x, state)[0])
    refuses("of another configuration", mnemos.load_state, file, build(num_heads=4))
    refuses("expected part .* as float64", mnemos.load_state, file, like=build(num_heads=4).initial_state(1))
    stream = mnemos.Stream(model, state=state, last=x[:, :1])
    stream.save(file)
    assert all(map(torch.equal, leaves(mnemos.Stream.restore(model, file).state), leaves(state)))


@torch.no_grad()
def test_a_callers_mask_may_be_used_again():
    model, x, mask = build(), tokens(1, 3, 2), torch.ones(1, 6, dtype=torch.bool)
    state = model.encode(tokens(1, 6), mask)
    y = model(x, state)[0]
    mask[:, 2:] = False
    assert torch.equal(model(x, state)[0], y)


@torch.no_grad()
@pytest.mark.parametrize("inside", [False, True])
def test_a_source_is_read_with_and_without_autocast(inside):
    model, x = build().float(), tokens(2, 3, 2)
    with torch.autocast("cpu", torch.bfloat16, enabled=not inside):
        state = model.encode(tokens(2, 6))
    with torch.autocast("cpu", torch.bfloat16, enabled=inside):
        y = model(x, state)[0]
    wanted = model(Pair(tokens(2, 6), x))[0]
    assert (y - wanted).norm() < 0.05 * wanted.norm()


def test_a_source_of_padding_alone_is_an_empty_one():
    model, x = build(), tokens(2, 3, 2)
    mask = torch.tensor([[1] * 6, [0] * 6], dtype=torch.bool)
    with torch.no_grad():
        found = [model(Pair(tokens(2, 6, seed), x, mask))[0][1] for seed in (3, 4)]
        found.append(model(x, model.initial_state(2))[0][1])
    for one in found[1:]:
        close(one, found[0])


def test_wrong_inputs_are_refused_in_one_line():
    model = build(share="target", source_vocab_size=5, position="learned", max_length=4)
    state = model.encode(tokens(2, 4) % 5)
    refused = {
        "found NoneType; use encode": lambda: model(tokens(2, 2)),
        "expected a state of 3 rows": lambda: model(tokens(3, 2), state),
        "as many sources as targets, found 2 and 3": lambda: model(Pair(tokens(2, 2) % 5, tokens(3, 2))),
        "expected a mask of booleans": lambda: model.encode(tokens(2, 4) % 5, torch.ones(2, 3, dtype=torch.bool)),
        "expected 0 or 17, as the embeddings are shared": lambda: build(source_vocab_size=5),
    }
    for text, call in refused.items():
        refuses(text, call)
