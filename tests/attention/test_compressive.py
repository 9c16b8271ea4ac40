"""The Compressive Transformer's attention against its equations, a public implementation, and where gradient goes."""

import functools
import math

import pytest
import torch

from mnemos import GRC, InputError, Stream, Transformer, collect_auxiliary_losses, replay
from mnemos.attention import CompressedSegments, CompressiveAttention, CompressiveConfig, GatedCacheAttention
from mnemos.ops.relative_position.reference import reference_sinusoid
from mnemos.types import leaves, reset, select

DIM, HEADS = 6, 2
COMPRESSIONS = ["convolution", "mean", "max"]
sinusoid = functools.cache(lambda distance: reference_sinusoid(distance, DIM))
SIZES = [4, 1, 9, 2, 12, 3]  # of calls: shorter and longer than a group and the memory


def layer(**settings) -> CompressiveAttention:
    torch.manual_seed(0)
    settings = {"memory": 7, "compressed": 5, "ratio": 3} | settings
    module = CompressiveConfig(**settings).build(DIM, HEADS).double()
    for parameter in (module.content_bias, module.position_bias):
        torch.nn.init.normal_(parameter)
    return module


def tokens(t: int = sum(SIZES), seed: int = 1, rows: int = 2) -> torch.Tensor:
    return torch.randn(DIM, t, rows, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).permute(
        2, 1, 0
    )


def padding(t: int = sum(SIZES)) -> torch.Tensor:
    return torch.rand(2, t, generator=torch.Generator().manual_seed(3)) > 0.3


def called(module, x, mask=None, sizes=SIZES, resets=()):
    """Outputs, auxiliary losses and the last state of calls of these sizes. resets: calls before which row 1 is new."""
    state, outputs, losses = None, [], []
    masks = [None] * len(sizes) if mask is None else mask.split(sizes, 1)
    for n, (part, valid) in enumerate(zip(x.split(sizes, 1), masks, strict=True)):
        if n in resets:
            state = reset(state, torch.tensor([False, True]))
        with collect_auxiliary_losses() as found:
            y, state = module(part, state, valid)
        outputs.append(y)
        losses += found
    return torch.cat(outputs, 1), losses, state


class Row:
    """One row by the paper's algorithm 1: tokens and slots in lists, one query, head and key at a time."""

    def __init__(self, module):
        self.module, self.c = module, module.config
        self.seen, self.slots = 0, []  # slots: (vector or None if all its tokens were padding)
        self.tokens = []  # those that are not compressed: [vector, valid], oldest first

    def call(self, x: list, valid: list[bool]):
        """The outputs of a segment; then what is older than the memory is compressed. Returns them and the errors."""
        if not all(valid):  # padding is not there
            outputs, errors = self.call(
                [vector for vector, ok in zip(x, valid, strict=True) if ok], [True] * sum(valid)
            )
            outputs = iter(outputs)
            return [
                next(outputs) if ok else torch.zeros_like(vector) for vector, ok in zip(x, valid, strict=True)
            ], errors
        c, m, start = self.c, self.module, self.seen
        new = [[vector, bool(ok)] for vector, ok in zip(x, valid, strict=True)]
        everything = [*self.tokens, *new]
        first = start - len(self.tokens)
        slots = self.slots[-c.compressed :]
        outputs = []
        reach = c.memory + c.compressed if c.same_length else start + len(x) + c.memory + c.compressed
        for i, query in enumerate(x):
            at = start + i
            keys = [(s, start - c.memory - len(slots) + n) for n, s in enumerate(slots) if s is not None]
            keys = [(s, place) for s, place in keys if at - place <= reach]
            read = [(n, t) for n, t in enumerate(everything) if first + n <= at and (t[1] or first + n == at)]
            read = [(n, t) for n, t in read if at - first - n <= reach]
            keys += [(t[0], first + n) for n, t in read]
            heads = self.attend(query, [k for k, _ in keys], [at - place for _, place in keys])
            outputs.append(m.output.weight @ heads)
        self.tokens, self.seen = everything, start + len(x)
        return outputs, self.compress(x, valid)

    def attend(self, query, keys, distances):
        """Heads next to each other."""
        m, d, heads = self.module, DIM // HEADS, []
        for h in range(HEADS):
            part = slice(h * d, (h + 1) * d)
            q, k = m.query.weight[part] @ query, torch.stack(keys) @ m.key_value.weight[:DIM][part].T
            r = torch.stack([sinusoid(min(x, self.c.clamp or x)) for x in distances]) @ m.position.weight[part].T
            scores = ((q + m.content_bias[h]) * k + (q + m.position_bias[h]) * r).sum(1) / math.sqrt(d)
            weights = torch.softmax(scores, 0)
            values = torch.stack(keys) @ m.key_value.weight[DIM:][part].T
            heads.append((weights[:, None] * values).sum(0))
        return torch.cat(heads)

    def compress(self, x, valid):
        """Move the groups that have a token older than the memory; the errors of the reconstruction, one per query."""
        moved = []
        while len(self.tokens) > self.c.memory:
            moved.append(self.tokens[: self.c.ratio])
            del self.tokens[: self.c.ratio]
        new = [self.slot(group) for group in moved]
        self.slots += new
        if not self.c.detached:  # the loss alone must not go on into the inputs
            moved = [[[t[0].detach(), t[1]] for t in group] for group in moved]
            new = [self.slot(group) for group in moved]
        # Older ones would be dropped at once.
        new = [slot for slot in new[-self.c.compressed :] if slot is not None]
        old = [t[0].detach() for group in moved[-self.c.compressed :] for t in group if t[1]]
        if not old:
            return []
        return [self.error(q.detach(), old, new) for q, ok in zip(x, valid, strict=True) if ok]

    def held(self, token):
        vector, valid = token[:2]
        return None if not valid else vector.detach() if self.c.detached else vector

    def slot(self, group):
        kind, compressor = self.c.compression, self.module.compressor
        found = [self.held(token) for token in group]
        if all(vector is None for vector in found):
            return None
        if kind == "mean":
            return sum(v for v in found if v is not None) / sum(v is not None for v in found)
        if kind == "max":
            return torch.stack([v for v in found if v is not None]).max(0).values
        found = [torch.zeros(DIM, dtype=torch.float64) if v is None else v for v in found]
        kernel = compressor.linear.weight.view(DIM, len(group), DIM)
        return sum(kernel[:, n] @ v for n, v in enumerate(found)) + compressor.linear.bias

    def error(self, query, old, new):
        """|attend(query, old) − attend(query, new)|² per channel, by contents only; only `new` has gradient."""
        heads = [[], []]
        d, m = DIM // HEADS, self.module
        weight = m.key_value.weight.detach()
        for h in range(HEADS):
            part = slice(h * d, (h + 1) * d)
            q = m.query.weight[part].detach() @ query
            for read, keys in zip(heads, (old, new), strict=True):
                scores = torch.stack(keys) @ weight[:DIM][part].T @ q / math.sqrt(d)
                values = torch.stack(keys) @ weight[DIM:][part].T
                read.append((torch.softmax(scores, 0)[:, None] * values).sum(0))
        return (torch.cat(heads[0]).detach() - torch.cat(heads[1])).square().mean()


def expected(module, x, mask, sizes=SIZES, resets=()):
    """What `called` returns, without the state."""
    rows, outputs, losses = [Row(module), Row(module)], [[], []], []
    for n, (part, valid) in enumerate(zip(x.split(sizes, 1), mask.split(sizes, 1), strict=True)):
        if n in resets:
            rows[1] = Row(module)
        errors = []
        for row, found, segment, ok in zip(rows, outputs, part, valid, strict=True):
            if module.config.detached:
                row.tokens = [[t[0].detach(), *t[1:]] for t in row.tokens]
                row.slots = [slot if slot is None else slot.detach() for slot in row.slots]
            y, more = row.call(list(segment), ok.tolist())
            found += y
            errors += more
        if errors and module.config.compression == "convolution":
            losses.append(sum(errors) / len(errors))
    return torch.stack([torch.stack(found) for found in outputs]), losses


def same(module, x, mask, **how):
    """Values, losses, and gradients to x and every parameter, all at odd sizes."""
    found, losses, _ = called(module, x, mask, **how)
    wanted, others = expected(module, x, mask, **how)
    torch.testing.assert_close(found[mask], wanted[mask], rtol=1e-6, atol=1e-6)  # the sinusoids are float32
    losses = [loss for loss in losses if loss != 0]
    assert len(losses) == len(others)
    sources = [x, *module.parameters()]
    gradients = []
    for y, more in ((found, losses), (wanted, others)):
        total = y[mask].square().sum() + sum(10.0**n * loss for n, loss in enumerate(more))
        gradients.append(torch.autograd.grad(total, sources, allow_unused=True, materialize_grads=True))
    for loss, other in zip(losses, others, strict=True):
        torch.testing.assert_close(loss, other, rtol=1e-6, atol=1e-6)
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.each_value
@pytest.mark.parametrize("detached", [True, False])
@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_equals_the_equations(compression, detached):
    x = tokens().requires_grad_()
    same(layer(compression=compression, detached=detached), x, padding(), resets=(3,))


@pytest.mark.parametrize(
    "settings",
    [
        {"ratio": 5, "clamp": 4, "compressed": 2},
        {"compression": "mean", "ratio": 1},
        {"compression": "convolution", "same_length": True},
    ],
    ids=str,
)
def test_equals_the_equations_with_other_sizes(settings):
    x = tokens().requires_grad_()
    same(layer(**settings), x, torch.ones(2, sum(SIZES), dtype=torch.bool), resets=(2,))


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_slots_are_the_same_wherever_the_inputs_are_cut(compression):
    """The memory is on an absolute grid: calls of one token lose none."""
    module, x, mask = layer(compression=compression).eval(), tokens(), padding()
    wanted = called(module, x, mask)[2]
    for sizes in ([31], [1] * 31, [8, 7, 7, 9]):
        for a, b in zip(leaves(called(module, x, mask, sizes)[2]), leaves(wanted), strict=True):
            torch.testing.assert_close(a, b)
    assert wanted.filled.any(1).all()


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_rows_at_different_places_are_those_of_a_batch_of_one(compression):
    module, x = layer(compression=compression).eval(), tokens()
    wholes, states = [], []
    for row, first in enumerate((19, 14)):
        alone = x[row : row + 1]
        states.append(module(alone[:, :first])[1])
        wholes.append(called(module, alone[:, : first + 9], sizes=[first, 1, 1, 1, 6])[2])
    state = CompressedSegments(*(torch.cat(parts) for parts in zip(*states, strict=True)))
    for size in (1, 1, 1, 6):
        at = state.seen.tolist()
        _, state = module(torch.stack([x[row, n : n + size] for row, n in enumerate(at)]), state)
    for row, whole in enumerate(wholes):
        for a, b in zip(leaves(select(state, torch.tensor([row]))), leaves(whole), strict=True):
            torch.testing.assert_close(a, b)


def test_the_loss_reaches_the_compression_alone_and_the_output_all_but_it():
    module, x = layer(), tokens().requires_grad_()
    y, losses, _ = called(module, x)
    own = set(module.compressor.parameters())
    for value, wanted in ((sum(losses), own), (y.square().sum(), set(module.parameters()) - own)):
        found = torch.autograd.grad(value, [x, *module.parameters()], retain_graph=True, allow_unused=True)
        reached = {p for p, g in zip(module.parameters(), found[1:], strict=True) if g is not None and g.any()}
        assert reached == wanted
        assert (found[0] is None) == (wanted is own)


def test_through_time_the_gradient_reaches_the_compression():
    for detached in (True, False):
        module, x = layer(detached=detached), tokens().requires_grad_()
        y = called(module, x)[0]
        found = torch.autograd.grad(y[:, -3:].square().sum(), [x, module.compressor.linear.weight], allow_unused=True)
        assert (found[1] is None) == detached
        assert bool(found[0][:, 10:13].any()) != detached
        assert module.state_gradient != detached


@pytest.mark.parametrize("detached", [True, False])
def test_replay_gives_the_gradients_of_the_loop(detached):
    """Its first pass runs without gradient, and its losses, the auxiliary ones too, are compared with the second's."""
    module, parts = layer(detached=detached), list(tokens(30).split(5, 1))

    def step(x, state):
        y, state = module(x, state)
        return y.square().sum(), state

    replay(step, parts, truncate_every=1 if detached else None)
    found = [p.grad.clone() for p in module.parameters()]
    y, losses, _ = called(module, tokens(30), sizes=[5] * 6)
    wanted = torch.autograd.grad((y.square().sum() + sum(losses)) / 6, list(module.parameters()))
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b)


def small_model() -> tuple[Transformer, torch.Tensor]:
    torch.manual_seed(0)
    attention = CompressiveConfig(memory=4, compressed=3, ratio=2)
    sizes = {"vocab_size": 11, "dim": 8, "layers": 1, "num_heads": 2, "mlp": 12, "position": "none"}
    return Transformer(attention=attention, **sizes).eval(), torch.randint(11, (1, 17))


def test_a_model_with_slots_is_joined_saved_and_restored_as_a_stream(tmp_path):
    model, x = small_model()
    streams = Stream(model).prefill(x, 5), Stream(model).prefill(x[:, :3])
    both = Stream.join(streams)
    alone = torch.cat([stream.generate(6, temperature=0)[0] for stream in streams])
    assert torch.equal(both.generate(6, temperature=0)[0], alone)
    both.save(tmp_path / "stream.safetensors")
    again = Stream.restore(model, tmp_path / "stream.safetensors")
    assert torch.equal(again.generate(6, temperature=0)[0], alone)


@pytest.mark.parametrize("t", [1, 3])
def test_few_queries_read_the_memory_itself_and_find_the_same(t):
    module = layer(memory=40, compressed=20).eval()
    with torch.no_grad():
        _, _, state = called(module, tokens(130), sizes=[130])
        found = [module.read_few, module.read_many]
        x, context = tokens(t, 5), torch.cat([state.slots, state.x, tokens(t, 5)], 1)
        valid = torch.cat([state.filled, state.valid, torch.ones(2, t, dtype=torch.bool)], 1)
        torch.testing.assert_close(*(way(x, context, valid) for way in found))


def test_a_cache_beside_the_memory():
    inner = layer()
    module = GatedCacheAttention(DIM, HEADS, inner, GRC(length=3, scope="stream", block=4), causal=True).double()
    _, losses, state = called(module, tokens())
    assert losses
    assert isinstance(state.inner, CompressedSegments)
    assert module.state_kind == "constant"
    y, state = module(tokens(6, 2), state)
    (y.square().sum() + sum(losses)).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in module.parameters())


@pytest.mark.parametrize("training", [True, False])
def test_equals_a_public_implementation_with_its_weights(training):
    """lucidrains' layer: outputs, memories, slots and loss. It has learned distances, and no u, v."""
    peer = pytest.importorskip("compressive_transformer_pytorch.compressive_transformer_pytorch")
    t, slots, ratio = 8, 6, 4
    ours = layer(memory=t, compressed=slots, ratio=ratio).train(training)
    theirs = peer.SelfAttention(DIM, t, t, slots, ratio, HEADS).double().train(training)
    with torch.no_grad():
        for bias in (ours.content_bias, ours.position_bias):
            bias.zero_()
        theirs.to_q.weight.copy_(ours.query.weight)
        theirs.to_kv.weight.copy_(ours.key_value.weight)
        theirs.to_out.weight.copy_(ours.output.weight)
        theirs.to_out.bias.zero_()
        theirs.compress_mem_fn.conv.weight.copy_(ours.compressor.linear.weight.view(DIM, ratio, DIM).transpose(1, 2))
        theirs.compress_mem_fn.conv.bias.copy_(ours.compressor.linear.bias)
        r = ours.position(ours.distances(slots + 2 * t, 0, tokens(1))).unflatten(-1, (HEADS, -1)).transpose(0, 1)
    state, memories, compressed = None, None, 0
    for n, x in enumerate(tokens(7 * t).split(t, 1)):
        with collect_auxiliary_losses() as losses:
            y, state = ours(x, state)
        wanted, memories, loss = theirs(x, memories, r)
        torch.testing.assert_close(y, wanted)
        memories = type(memories)(*(part.detach() for part in memories))
        compressed = memories.compressed_mem.shape[1]
        torch.testing.assert_close(state.x[state.valid], memories.mem.flatten(0, 1))
        torch.testing.assert_close(state.slots[:, slots - compressed :], memories.compressed_mem)
        if training and n:
            torch.testing.assert_close(losses[0], loss.squeeze())
            weights = ours.compressor.linear.weight, theirs.compress_mem_fn.conv.weight
            a, b = (torch.autograd.grad(v, w)[0] for v, w in zip((losses[0], loss), weights, strict=True))
            torch.testing.assert_close(a.view(DIM, ratio, DIM).transpose(1, 2), b)
    assert compressed == slots


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"ratio": 0}, "ratio of at least 1"),
        ({"compressed": 0}, "at least 1 compressed slot"),
        ({"reconstruction": 0.0}, "something that trains it"),
        ({"compression": "best"}, "compression"),
    ],
    ids=str,
)
def test_refuses_what_does_not_fit(settings, words):
    with pytest.raises(InputError, match=words):
        layer(**settings)


def test_refuses_other_states_and_modes():
    with pytest.raises(InputError, match="expected causal=True"):
        CompressiveConfig().build(DIM, HEADS, causal=False)
    module = layer()
    for state in (layer(memory=8).initial_state(2), module.initial_state(3), torch.zeros(2, 1)):
        with pytest.raises(InputError, match="expected a state of slots"):
            module(tokens(3), state)
