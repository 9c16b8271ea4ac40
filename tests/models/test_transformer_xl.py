"""A whole Transformer-XL: two layers over three segments against its equations, with memories that are plain lists."""

import math

import pytest
import torch
from contract_cases import scatter

from mnemos import GRC, Stream, Transformer, TransformerConfig
from mnemos.attention import CompressiveConfig, RelativeConfig
from mnemos.memory import hold_caches
from mnemos.types import reset

MEMORY, WIDTH, HEADS = 5, 8, 2


def model(attention, **settings) -> Transformer:
    torch.manual_seed(0)
    sizes = {"vocab_size": 11, "dim": WIDTH, "layers": 2, "num_heads": HEADS, "mlp": 12, "max_length": 16}
    return scatter(TransformerConfig.classic(attention=attention, position="none", **sizes, **settings).build())


def ids(t: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(11, (2, t), generator=torch.Generator().manual_seed(seed))


def normed(x: torch.Tensor, norm: torch.nn.LayerNorm) -> torch.Tensor:
    centred = x - x.mean()
    return centred / torch.sqrt((centred**2).mean() + norm.eps) * norm.weight + norm.bias


def attended(layer, inputs: list[torch.Tensor], memory: list[torch.Tensor]) -> list[torch.Tensor]:
    """One layer's attention of a row: inputs of the segment behind those remembered, one query and head at a time."""
    width, context, outputs = WIDTH // HEADS, [*memory, *inputs], []
    key, value = layer.key_value.weight[:WIDTH], layer.key_value.weight[WIDTH:]
    for i in range(len(memory), len(context)):
        first = max(0, i - layer.config.memory) if layer.config.same_length else 0
        heads = []
        for h in range(HEADS):
            part = slice(h * width, (h + 1) * width)
            q = layer.query.weight[part] @ context[i]
            scores = []
            for j in range(first, i + 1):
                angles = [(i - j) / 10000 ** (2 * c / WIDTH) for c in range(WIDTH // 2)]
                sinusoid = torch.tensor([f(a) for a in angles for f in (math.sin, math.cos)], dtype=torch.float64)
                content = (q + layer.content_bias[h]) @ (key[part] @ context[j])
                place = (q + layer.position_bias[h]) @ (layer.position.weight[part] @ sinusoid)
                scores.append((content + place) / math.sqrt(width))
            weights = torch.stack(scores).exp()
            weights = weights / weights.sum()
            heads.append(sum(w * (value[part] @ context[first + n]) for n, w in enumerate(weights)))
        outputs.append(layer.output.weight @ torch.cat(heads))
    return outputs


def said(network: Transformer, tokens: list[int], memories: list[list[torch.Tensor]]) -> torch.Tensor:
    """Logits of a row's segment; `memories`, a list a layer, take in its inputs and forget the oldest."""
    pre = network.config.norm == "pre"
    row = [network.embedding.weight[token] for token in tokens]
    for block, memory in zip(network.blocks, memories, strict=True):
        inputs = [normed(x, block.attention_norm) for x in row] if pre else row
        attention = attended(block.attention, inputs, memory)
        memory.extend(x.detach() for x in inputs)
        del memory[: max(0, len(memory) - network.config.attention.memory)]
        row = [x + y for x, y in zip(row, attention, strict=True)]
        if not pre:
            row = [normed(x, block.attention_norm) for x in row]
        for n, x in enumerate(row):
            hidden = block.mlp.expand.weight @ (normed(x, block.mlp_norm) if pre else x) + block.mlp.expand.bias
            hidden = hidden * (1 + torch.erf(hidden / math.sqrt(2))) / 2
            y = x + block.mlp.contract.weight @ hidden + block.mlp.contract.bias
            row[n] = y if pre else normed(y, block.mlp_norm)
    if pre:
        row = [normed(x, network.final_norm) for x in row]
    return torch.stack([network.head.weight @ x + network.head.bias for x in row])


@pytest.mark.each_value
@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("same_length", [False, True])
@pytest.mark.parametrize("t", [3, 8])
def test_three_segments_with_a_reset_equal_the_equations(norm, same_length, t):
    """Row 1 starts a new document with segment 3; memory longer and shorter than the segment."""
    network, x = model(RelativeConfig(memory=MEMORY, same_length=same_length), norm=norm), ids(3 * t)
    memories = [[[] for _ in range(2)] for _ in range(2)]  # of each row, of each layer
    state, found, wanted = None, [], []
    for n, segment in enumerate(x.split(t, 1)):
        if n == 2:
            state = reset(state, torch.tensor([False, True]))
            memories[1] = [[], []]
        logits, state = network(segment, state)
        found.append(logits)
        wanted.append(torch.stack([said(network, segment[row].tolist(), memories[row]) for row in range(2)]))
    found, wanted = torch.cat(found, 1), torch.cat(wanted, 1)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)  # the sinusoids are float32
    parameters = dict(network.named_parameters())
    gradients = [torch.autograd.grad(y.log_softmax(-1)[..., 3].sum(), parameters.values()) for y in (found, wanted)]
    for name, a, b in zip(parameters, *gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5, msg=name)


SEGMENT, SEGMENTS = 6, 3
CACHES = [GRC(length=3, block=4, scope="stream"), GRC(length=3, block=2), GRC(length=3, block=2, preset="paper")]
MEMORIES = [RelativeConfig(memory=0), RelativeConfig(memory=MEMORY), CompressiveConfig(memory=4, compressed=3, ratio=2)]


def logits_of(network, x):
    """Of segments with the state carried between them; shared caches stay as they are."""
    state, found = None, []
    with hold_caches(network):
        for segment in x.split(SEGMENT, 1):
            y, state = network(segment, state)
            found.append(y)
    return torch.cat(found, 1)


@pytest.mark.each_value
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("cache", CACHES, ids=["stream", "shared", "paper"])
@pytest.mark.parametrize("attention", MEMORIES, ids=["no-memory", "memory", "compressive"])
def test_with_a_cache_no_token_is_read_before_its_turn_and_every_gate_is_trained(attention, cache, training):
    """Through the memory, the slots and the cache, within segments and across them."""
    network = model(attention, cache=cache).train(training)
    x = ids(SEGMENT * SEGMENTS)
    before = logits_of(network, x)
    for j in range(0, SEGMENT * SEGMENTS, 3):
        other = x.clone()
        other[:, j] = (other[:, j] + 1) % 11
        after = logits_of(network, other)
        torch.testing.assert_close(after[:, :j], before[:, :j])
        assert not torch.allclose(after[:, j], before[:, j])
    if training:
        before.log_softmax(-1)[..., 3].sum().backward()
        for name, parameter in network.named_parameters():
            if any(part in name for part in ("gate", "candidate", "mix")):
                assert parameter.grad.abs().max() > 0, name


def test_a_cache_remembers_further_than_the_memory_it_replaces():
    """Without either, the first segment is not read by the third."""
    x = ids(SEGMENT * SEGMENTS)
    other = x.clone()
    other[:, 1] = (other[:, 1] + 1) % 11
    for attention, cache, reads in (
        (RelativeConfig(memory=0), None, False),
        (RelativeConfig(memory=0), CACHES[0], True),
        (CompressiveConfig(memory=2, compressed=1, ratio=2), None, False),  # two layers reach 2 · (2 + 2) tokens back
        (CompressiveConfig(memory=2, compressed=6, ratio=2), None, True),
    ):
        network = model(attention, cache=cache).eval()
        same = torch.allclose(logits_of(network, x)[:, -1], logits_of(network, other)[:, -1], rtol=0, atol=1e-12)
        assert same != reads


def test_a_stream_without_same_length_is_read_in_the_pieces_it_is_given():
    network, x = model(RelativeConfig(memory=MEMORY)).eval(), ids(16)
    with torch.no_grad():
        state = None
        for part in x[:, :-1].split(5, 1):
            _, state = network(part, state)
        wanted = network(x[:, -1:], state)[0][:, 0]
    torch.testing.assert_close(Stream(network).prefill(x, 5).predict(), wanted)
