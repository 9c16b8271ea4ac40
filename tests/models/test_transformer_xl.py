"""Transformers of relative and compressive attention over segments: what a gated cache in them reads and remembers."""

import pytest
import torch
from contract_cases import scatter

from mnemos import GRC, Stream, Transformer, TransformerConfig
from mnemos.attention import CompressiveConfig, RelativeConfig
from mnemos.memory import hold_caches

MEMORY, WIDTH, HEADS = 5, 8, 2


def model(attention, **settings) -> Transformer:
    torch.manual_seed(0)
    sizes = {"vocab_size": 11, "dim": WIDTH, "layers": 2, "num_heads": HEADS, "mlp": 12, "max_length": 16}
    return scatter(TransformerConfig.classic(attention=attention, position="none", **sizes, **settings).build())


def ids(t: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(11, (2, t), generator=torch.Generator().manual_seed(seed))


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
