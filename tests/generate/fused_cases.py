"""What the tests of fused steps share: models, streams of single tokens, and comparisons with float64."""

import copy
import dataclasses

import torch

from mnemos import EncoderDecoder, Transformer, TransformerConfig
from mnemos.attention.linear import LinearConfig
from mnemos.types import leaves, map_state

SMALL = TransformerConfig.classic(
    vocab_size=11, dim=24, layers=3, num_heads=2, mlp=40, max_length=12, dropout=0.1, attention=LinearConfig()
)


def make(**fields) -> Transformer:
    torch.manual_seed(0)
    return stirred(Transformer(dataclasses.replace(SMALL, **fields)))


def translator(**fields) -> EncoderDecoder:
    torch.manual_seed(0)
    sizes = {"vocab_size": 30, "dim": 16, "num_heads": 2, "mlp": 24, "encoder_layers": 1, "decoder_layers": 2}
    return stirred(EncoderDecoder(**(sizes | fields)))


def stirred(model):
    """Every parameter away from where it starts, the norms' and biases' too."""
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p), alpha=0.1)
    return model.eval()


def ids(rows, length=6, vocab=11):
    return torch.randint(vocab, (rows, length), generator=torch.Generator().manual_seed(rows + length))


@torch.no_grad()
def stream(step, x, state=None):
    """The outputs of each token, and the state at the end."""
    outputs = []
    for i in range(x.shape[1]):
        y, state = step(x[:, i : i + 1], state)
        outputs.append(y)
    return torch.stack(outputs, 1), state


def exactly(thing):
    """A model or a state in float64."""
    if isinstance(thing, torch.nn.Module):
        return copy.deepcopy(thing).double()
    return map_state(lambda x: x.double() if x.is_floating_point() else x, thing)


def close(found, expected, tolerance=2e-6):
    for a, b in zip(leaves(found), leaves(expected), strict=True):
        assert a.shape == b.shape
        assert a.dtype == (torch.float32 if b.is_floating_point() else b.dtype)
        bound = tolerance * max(1.0, float(b.double().abs().max()))
        torch.testing.assert_close(a.double(), b.double(), rtol=0, atol=bound)


def equal(found, expected):
    return all(torch.equal(a, b) for a, b in zip(leaves(found), leaves(expected), strict=True))
