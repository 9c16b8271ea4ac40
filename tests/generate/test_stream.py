"""Streams: reading and writing tokens from a state, forked, batched, saved and gone on with."""

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from contract_cases import scatter
from refusals import refuses

import mnemos
from mnemos import GRC, Stream, Transformer, TransformerConfig, registry
from mnemos.attention import CompressiveConfig, LinearConfig, RelativeConfig, SoftmaxConfig
from mnemos.generate.sampling import draw
from mnemos.models import LSTMConfig
from mnemos.models.transformer import HeadConfig
from mnemos.types import leaves

KINDS = {
    "linear": {"attention": LinearConfig()},
    "favor": {"attention": LinearConfig(feature_map="favor", features=12)},
    "softmax": {},
    "window": {"attention": SoftmaxConfig(window=5)},
    "cached": {"attention": SoftmaxConfig(window=5), "cache": GRC(length=3, block=4, scope="stream")},
}


def model(kind: str = "linear", **fields) -> Transformer:
    torch.manual_seed(0)
    small = {"vocab_size": 11, "dim": 16, "layers": 2, "num_heads": 2, "mlp": 24, "max_length": 40}
    return Transformer(**small | KINDS[kind] | fields).double().eval()


ALONE = {"position": "none", "vocab_size": 11, "dim": 16, "num_heads": 2, "mlp": 24}
# Beside these Transformers: every other kind of memory, and of models with a state.
OTHERS = {
    "relative": TransformerConfig(**ALONE, attention=RelativeConfig(memory=5, same_length=True)),
    "compressive": TransformerConfig(**ALONE, attention=CompressiveConfig(memory=4, compressed=3, ratio=2)),
    **{
        name: TransformerConfig(**ALONE, attention=registry.load("attention", name)())
        for name in ("delta", "gated-delta", "kimi-delta", "gla", "retention", "mamba2")
    },
    **{
        name: registry.load("model", name)(vocab_size=11, dim=16, num_heads=2, mlp=24, segment=4)
        for name in ("memformer", "rmt", "armt")
    },
    "lstm": LSTMConfig(vocab_size=11, dim=16, layers=2),
}


def ids(rows: int, t: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(11, (rows, t), generator=torch.Generator().manual_seed(seed))


def seeded(seed: int = 3) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def close(a: Stream, b: Stream) -> None:
    torch.testing.assert_close(a.predict(), b.predict(), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_read_in_chunks_and_written_is_what_the_model_says(kind):
    network, prompt = model(kind), ids(3, 23)
    whole, read = network(prompt)[0][:, -1], Stream(network).prefill(prompt[:, :9], 4).prefill(prompt[:, 9:], 3)
    for stream in (read, *(Stream(network).prefill(prompt, chunk) for chunk in (1, 4, 7, 23, 100))):
        torch.testing.assert_close(stream.predict(), whole, rtol=1e-10, atol=1e-10)
    tokens, after = read.generate(5, generator=seeded())
    assert tokens.shape == (3, 5)
    generator, seen = seeded(), prompt
    for i in range(5):  # the slow way: everything anew for every token
        token = draw(network(seen)[0][:, -1], generator=generator)
        assert torch.equal(token, tokens[:, i])
        seen = torch.cat([seen, token[:, None]], 1)
    torch.testing.assert_close(after.predict(), network(seen)[0][:, -1], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", [*KINDS, *OTHERS])
def test_forked_batched_saved_and_gone_on_with(kind, tmp_path):
    network = model(kind) if kind in KINDS else scatter(OTHERS[kind].build()).eval()
    long, short = Stream(network).prefill(ids(2, 12), 5), Stream(network).prefill(ids(1, 7, seed=2))
    alone = [s.generate(4, temperature=0) for s in (long, short)]
    both = Stream.join([long, short])
    assert both.rows == 3
    tokens, both_after = both.generate(4, temperature=0)
    assert torch.equal(tokens, torch.cat([made for made, _ in alone]))
    wanted = torch.cat([after.predict() for _, after in alone])
    torch.testing.assert_close(both_after.predict(), wanted, rtol=1e-9, atol=1e-9)
    # A fork goes its own way, and the stream it came from does not notice.
    fork = both.select(torch.tensor([2, 2, 0]))
    fork.generate(3, generator=seeded())
    assert torch.equal(both.generate(4, temperature=0)[0], tokens)
    assert torch.equal(fork.generate(4, temperature=0)[0], tokens[[2, 2, 0]])
    file = tmp_path / "stream.safetensors"
    both_after.save(file)
    back = Stream.restore(network, file)
    assert all(torch.equal(a, b) for a, b in zip(leaves(back.state), leaves(both_after.state), strict=True))
    assert torch.equal(back.generate(3, generator=seeded())[0], both_after.generate(3, generator=seeded())[0])


def test_a_stream_whose_last_row_has_left_goes_on_without_rows():
    stream = Stream(model(next(iter(KINDS)))).prefill(ids(2, 5)).select(torch.tensor([False, False]))
    made, after = stream.generate(3)
    assert (made.shape, after.rows) == ((0, 0), 0)
    assert Stream.join([after, Stream(stream.model).prefill(ids(1, 4))]).rows == 1


def test_a_model_in_training_mode_is_refused_and_keeps_its_mode():
    """Threads share a model, so no stream may switch its mode."""
    network = model("linear", dropout=0.5)
    stream = Stream(network).prefill(ids(1, 6))
    network.blocks[0].train()
    for call in (stream.generate, stream.prefill, lambda _: stream.predict()):
        refuses(r"found training mode; call model\.eval", call, ids(1, 2) if call == stream.prefill else 1)
    assert not network.training
    assert network.blocks[0].training


def test_streams_in_threads_share_a_model():
    network = model("linear", dropout=0.5)
    streams = [Stream(network).prefill(ids(1, 6, seed)) for seed in range(4)]
    wanted = [s.generate(12, temperature=0)[0] for s in streams]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda s: s.generate(12, temperature=0)[0], streams))
    assert all(map(torch.equal, found, wanted))


@pytest.mark.parametrize("kind", ["linear", "softmax"])
def test_copied_and_pickled(kind):
    network = model(kind).float()
    stream = Stream(network).prefill(ids(2, 6))
    wanted = stream.generate(5, temperature=0)[0]
    for other in (copy.copy(stream), copy.deepcopy(stream), pickle.loads(pickle.dumps(stream)), Stream.join([stream])):
        assert other.step.fused == stream.step.fused
        assert other.step.model is other.model
        assert torch.equal(other.generate(5, temperature=0)[0], wanted)
    changed = copy.deepcopy(stream)
    with torch.no_grad():
        changed.model.head.weight.neg_()
    changed = Stream(changed.model, changed.step, changed.state, changed.last)
    assert not torch.equal(changed.generate(5, temperature=0)[0], wanted)
    assert torch.equal(stream.generate(5, temperature=0)[0], wanted)


def test_a_mixture_writes_brightnesses():
    network = model("linear", vocab_size=17, head=HeadConfig(mixture=3))
    tokens, after = Stream(network).prefill(ids(4, 3)).generate(20, generator=seeded())
    assert tokens.min() >= 0
    assert tokens.max() < 17
    assert after.predict().shape == (4, 9)
    refuses("use temperature", after.generate, 1, top_k=3)


def test_drawing():
    logits = torch.tensor([[0.0, 3.0, 2.0, -1.0]]).expand(20_000, 4)
    generator = seeded()
    share = torch.bincount(draw(logits, generator=generator), minlength=4) / 20_000
    torch.testing.assert_close(share, logits[0].softmax(-1), atol=0.02, rtol=0)
    assert set(draw(logits, top_k=2, generator=generator).tolist()) == {1, 2}
    assert set(draw(logits, top_p=0.5, generator=generator).tolist()) == {1}
    assert set(draw(logits, top_p=0.9, generator=generator).tolist()) == {1, 2}
    assert draw(logits, temperature=0).unique().tolist() == [1]
    cold = torch.bincount(draw(logits, temperature=0.5, generator=generator), minlength=4) / 20_000
    torch.testing.assert_close(cold, (2 * logits[0]).softmax(-1), atol=0.02, rtol=0)
    assert len(set(draw(torch.zeros(2000, 5), top_k=1, generator=generator).tolist())) == 1
    for temperature in (1e-39, 1e-60):  # less than float32 has
        assert draw(torch.tensor([[0.0, 9.0, 3.0]]), temperature).tolist() == [1]


def test_a_stream_shares_no_memory_with_what_was_given_or_returned():
    network, prompt = model("linear"), ids(2, 6)
    stream = Stream(network).prefill(prompt, 1)
    said = stream.predict()
    prompt.zero_()
    assert torch.equal(stream.predict(), said)
    tokens, after = stream.generate(5, generator=seeded())
    said = after.predict()
    tokens.zero_()
    assert torch.equal(after.predict(), said)


def _other_weights(network, how: str) -> None:
    with torch.no_grad():
        if how == "one number":
            network.head.weight[0, 0] += 1e-4
        elif how == "assigned":
            network.load_state_dict({n: x + 0.01 for n, x in network.state_dict().items()}, assign=True)
        elif how == "loaded":
            network.load_state_dict({n: x + 0.01 for n, x in network.state_dict().items()})
        elif how == "data":
            network.head.weight.data.mul_(1.1)
            network.head.weight.data = network.head.weight.data.clone()
    if "optimiser" in how:
        network.requires_grad_()
        for weight in network.parameters():
            weight.grad = torch.ones_like(weight)
        torch.optim.AdamW(network.parameters(), lr=0.1, fused=how == "fused optimiser").step()


@pytest.mark.parametrize("how", ["one number", "assigned", "loaded", "data", "optimiser", "fused optimiser"])
def test_a_state_belongs_to_the_weights_that_read_it(how, tmp_path):
    network = model("linear").float()
    stream = Stream(network).prefill(ids(2, 4).long())
    made = stream.tokens(3)
    next(made)
    copied = copy.deepcopy(stream)
    _other_weights(network, how)
    streams = [stream, made.stream, stream.select(torch.tensor([0])), copy.deepcopy(stream)]
    for old in (*streams, Stream.join([stream, stream]), pickle.loads(pickle.dumps(stream))):
        for name, given in (("save", tmp_path / "x"), ("generate", 1), ("prefill", ids(old.rows, 4))):
            refuses("weights that read", getattr(old, name), given)
    if how in ("one number", "loaded", "optimiser"):  # what a single token looks for
        for one in (stream, copy.deepcopy(stream)):
            refuses("weights that read", one.predict)
            refuses("weights that read", one.prefill, ids(one.rows, 1))
    refuses("read with the same weights", Stream.join, [stream, Stream(network).prefill(ids(2, 4))])
    assert not (tmp_path / "x").exists()
    copied.save(tmp_path / "x")  # its model has the old weights
    refuses("other weights", Stream.restore, network, tmp_path / "x")
    assert torch.equal(Stream.restore(copied.model, tmp_path / "x").predict(), copied.predict())
    Stream(network, state=stream.state, last=stream.last).generate(1)  # asked for


def test_a_stored_stream_belongs_to_the_bytes_of_the_weights(tmp_path, threads):
    network = model("linear", dim=256, mlp=512).float()
    file = tmp_path / "x"
    threads(1)
    Stream(network).prefill(ids(1, 4)).save(file)
    for count in (2, 3, 7):
        threads(count)
        Stream.restore(network, file)
    order = torch.randperm(512)
    with torch.no_grad():
        network.blocks[0].mlp.expand.weight.copy_(network.blocks[0].mlp.expand.weight[order])
    refuses("other weights", Stream.restore, network, file)


def test_tokens_of_any_integer_type():
    stream, x = Stream(model()), ids(2, 6)
    wanted = stream.prefill(x).prefill(x).generate(3, temperature=0)[0]
    for dtype in (torch.uint8, torch.int8, torch.int32, torch.uint16):
        found = stream.prefill(x.to(dtype)).prefill(x.to(dtype)).generate(3, temperature=0)[0]
        assert torch.equal(found, wanted)
    for dtype in (torch.bool, torch.complex64):
        refuses("of integers, T at least 1, found torch", stream.prefill, x.to(dtype))


def test_none_draws_from_all_and_other_settings_are_refused():
    stream = Stream(model("linear")).prefill(ids(4, 3))
    free, _ = stream.generate(9, generator=seeded())
    assert torch.equal(stream.generate(9, top_k=None, top_p=None, min_p=None, generator=seeded())[0], free)
    for name, value in (
        ("temperature", None), ("temperature", -1), ("temperature", torch.nan),
        ("top_k", 1.5), ("top_k", -1), ("top_p", "all"), ("top_p", 0.0), ("top_p", 1.5),
    ):  # fmt: skip
        refuses(rf"^{name}: expected a .*, found {value!r};", stream.generate, 1, **{name: value})


def test_bad_input(tmp_path):
    network, file, gone = model(), tmp_path / "stream.safetensors", tmp_path / "gone"
    classifier = Transformer(vocab_size=11, dim=16, num_heads=2, causal=False, head=HeadConfig(classes=3)).eval()
    stream = Stream(network)
    read = stream.prefill(ids(1, 3))
    read.save(file)
    assert read.generate(0)[0].shape == (1, 0)
    elsewhere = model(attention=LinearConfig(backend="chunked"))
    elsewhere.load_state_dict(network.state_dict())
    assert torch.equal(Stream.restore(elsewhere, file).last, read.last)
    gone.write_bytes(file.read_bytes()[:50])
    mnemos.save(network, tmp_path / "model")
    for words, call in (
        ("read", lambda: stream.generate(3)),
        ("read", lambda: stream.save(tmp_path / "x")),
        ("read", lambda: stream.select(torch.tensor([0]))),
        ("tokens", lambda: stream.prefill(torch.zeros(1, 0, dtype=torch.int64))),
        ("chunk", lambda: stream.prefill(ids(1, 3), 0)),
        ("whole number of at least 0, found -1", lambda: read.generate(-1)),
        ("whole number of at least 0, found 1.5", lambda: read.generate(1.5)),
        ("at least one stream, found none", lambda: Stream.join([])),
        ("without `draw` or `log_prob`", lambda: draw(torch.zeros(1, 3), likelihood=object())),
        (r"\[1, T\]", lambda: read.prefill(ids(3, 3))),
        ("of one model", lambda: Stream.join([read, Stream(model()).prefill(ids(1, 3))])),
        (r"language model.*mnemos\.functional", lambda: Stream(classifier).prefill(ids(1, 3))),
        ("another configuration", lambda: Stream.restore(model(dim=32), file)),
        ("no such file", lambda: Stream.restore(network, tmp_path / "none")),
        ("cannot be read", lambda: Stream.restore(network, gone)),
        ("another file", lambda: Stream.restore(network, tmp_path / "model" / "model.safetensors")),
    ):
        refuses(words, call)
