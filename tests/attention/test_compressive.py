"""The Compressive Transformer's attention against its equations, a public implementation, and where gradient goes."""

import functools
import math

import pytest
import torch

from mnemos import InputError, collect_auxiliary_losses, replay
from mnemos.attention import CompressiveAttention, CompressiveConfig
from mnemos.ops.relative_position.reference import reference_sinusoid
from mnemos.types import leaves, reset

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


def by_heads(x):
    """Heads next to each other."""
    return x.unflatten(-1, (HEADS, -1))


def keys_values(keys, weight):
    return [by_heads(torch.stack(keys) @ part.T) for part in weight.chunk(2)]


def weighed(products, values):
    """Of [N, heads, channels], for one query."""
    weights = torch.softmax(products.sum(2) / math.sqrt(DIM // HEADS), 0)
    return (weights[..., None] * values).sum(0).flatten()


class Row:
    """One row by the paper's algorithm 1: tokens and slots in lists, one query at a time."""

    def __init__(self, module):
        self.module, self.c = module, module.config
        self.seen, self.slots, self.tokens = 0, [], []  # tokens: those that are not compressed, oldest first

    def call(self, x: list):
        """The outputs of a segment; then what is older than the memory is compressed. Returns them and the errors."""
        slots, tokens, outputs = self.slots[-self.c.compressed :], [*self.tokens, *x], []
        places = [self.seen - self.c.memory - len(slots) + n for n in range(len(slots))]
        places += [self.seen - len(self.tokens) + n for n in range(len(tokens))]
        reach = self.c.memory + self.c.compressed if self.c.same_length else math.inf
        for at, query in enumerate(x, self.seen):
            read = [(key, at - place) for key, place in zip([*slots, *tokens], places, strict=True)]
            read = [(key, distance) for key, distance in read if 0 <= distance <= reach]
            outputs.append(self.module.output.weight @ self.attend(query, *zip(*read, strict=True)))
        self.tokens, self.seen = tokens, self.seen + len(x)
        return outputs, self.compress(x)

    def attend(self, query, keys, distances):
        m = self.module
        k, v = keys_values(keys, m.key_value.weight)
        r = by_heads(torch.stack([sinusoid(min(x, self.c.clamp or x)) for x in distances]) @ m.position.weight.T)
        q = by_heads(m.query.weight @ query)
        return weighed((q + m.content_bias) * k + (q + m.position_bias) * r, v)

    def compress(self, x):
        """Move the groups that have a token older than the memory; the errors of the reconstruction, one per query."""
        moved = []
        while len(self.tokens) > self.c.memory:
            moved.append(self.tokens[: self.c.ratio])
            del self.tokens[: self.c.ratio]
        self.slots += [self.slot(group) for group in moved]
        # The loss alone must not go on into the inputs. Older slots would be dropped at once.
        moved = [[vector.detach() for vector in group] for group in moved[-self.c.compressed :]]
        old, new = [vector for group in moved for vector in group], [self.slot(group) for group in moved]
        return [self.error(query.detach(), old, new) for query in x] if old else []

    def slot(self, group):
        if self.c.detached:
            group = [vector.detach() for vector in group]
        if self.c.compression == "mean":
            return sum(group) / len(group)
        if self.c.compression == "max":
            return torch.stack(group).max(0).values
        linear = self.module.compressor.linear
        kernel = linear.weight.view(DIM, len(group), DIM)
        return sum(kernel[:, n] @ vector for n, vector in enumerate(group)) + linear.bias

    def error(self, query, old, new):
        """|attend(query, old) − attend(query, new)|² per channel, by contents only; only `new` has gradient."""
        m = self.module
        q, weight = by_heads(m.query.weight.detach() @ query), m.key_value.weight.detach()
        read = [weighed(q * k, v) for k, v in (keys_values(keys, weight) for keys in (old, new))]
        return (read[0].detach() - read[1]).square().mean()


def expected(module, x, mask, resets=()):
    """What `called` returns, of the valid tokens and without the state: padding is not there."""
    rows, outputs, losses = [Row(module), Row(module)], [[], []], []
    for n, (part, valid) in enumerate(zip(x.split(SIZES, 1), mask.split(SIZES, 1), strict=True)):
        if n in resets:
            rows[1] = Row(module)
        errors = []
        for row, found, segment, ok in zip(rows, outputs, part, valid, strict=True):
            if module.config.detached:
                row.tokens, row.slots = ([vector.detach() for vector in kept] for kept in (row.tokens, row.slots))
            y, more = row.call(list(segment[ok]))
            found += y
            errors += more
        if errors and module.config.compression == "convolution":
            losses.append(sum(errors) / len(errors))
    return torch.stack(outputs[0] + outputs[1]), losses


SETTINGS = [
    {},
    {"detached": False},
    {"compression": "mean", "detached": False},
    {"compression": "max"},
    {"ratio": 5, "clamp": 4, "compressed": 2},
    {"compression": "mean", "ratio": 1},
    {"same_length": True},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_equals_the_equations(settings):
    """Values, losses, and gradients to x and every parameter, with padding and a row that is new in between."""
    module, x, mask = layer(**settings), tokens().requires_grad_(), padding()
    found, losses, _ = called(module, x, mask, resets=(3,))
    wanted, others = expected(module, x, mask, resets=(3,))
    found = found[mask]
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)  # the sinusoids are float32
    losses = [loss for loss in losses if loss != 0]
    gradients = []
    for y, more in ((found, losses), (wanted, others)):
        total = y.square().sum() + sum(10.0**n * loss for n, loss in enumerate(more))
        sources = [x, *module.parameters()]
        gradients.append(torch.autograd.grad(total, sources, allow_unused=True, materialize_grads=True))
    for loss, other in zip(losses, others, strict=True):
        torch.testing.assert_close(loss, other, rtol=1e-6, atol=1e-6)
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_slots_are_the_same_wherever_the_inputs_are_cut(compression):
    """The memory is on an absolute grid: calls of one token lose none."""
    module, x, mask = layer(compression=compression).eval(), tokens(), padding()
    wanted = called(module, x, mask)[2]
    for sizes in ([31], [1] * 31, [8, 7, 7, 9]):
        for a, b in zip(leaves(called(module, x, mask, sizes)[2]), leaves(wanted), strict=True):
            torch.testing.assert_close(a, b)
    assert wanted.filled.any(1).all()


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


@pytest.mark.parametrize("t", [1, 3])
def test_few_queries_read_the_memory_itself_and_find_the_same(t):
    module = layer(memory=40, compressed=20).eval()
    with torch.no_grad():
        _, _, state = called(module, tokens(130), sizes=[130])
        found = [module.read_few, module.read_many]
        x, context = tokens(t, 5), torch.cat([state.slots, state.x, tokens(t, 5)], 1)
        valid = torch.cat([state.filled, state.valid, torch.ones(2, t, dtype=torch.bool)], 1)
        torch.testing.assert_close(*(way(x, context, valid) for way in found))


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


def test_refuses_what_does_not_fit():
    module = layer()
    for words, call in (
        ("ratio of at least 1", lambda: layer(ratio=0)),
        ("at least 1 compressed slot", lambda: layer(compressed=0)),
        ("memory of at least as many tokens", lambda: layer(memory=2, ratio=3)),
        ("reconstruction: expected a weight of at least 0, found -1", lambda: layer(reconstruction=-1.0)),
        ("something that trains it", lambda: layer(reconstruction=0.0)),
        ("compression", lambda: layer(compression="best")),
        ("expected causal=True", lambda: CompressiveConfig().build(DIM, HEADS, causal=False)),
        ("expected a state of slots", lambda: module(tokens(3), layer(memory=8).initial_state(2))),
        ("expected a state of slots", lambda: module(tokens(3), module.initial_state(3))),
    ):
        with pytest.raises(InputError, match=words):
            call()
    assert layer(memory=3, ratio=3, compressed=1).initial_state(2).x.shape == (2, 3, DIM)
