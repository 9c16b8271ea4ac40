"""Tokens, padding and comparisons for models that read in segments of four tokens."""

import itertools

import torch

from mnemos.types import leaves

T = 15  # three segments, and three tokens of a fourth


def ids(rows: int = 3, t: int = T, seed: int = 1) -> torch.Tensor:
    return torch.randint(11, (rows, t), generator=torch.Generator().manual_seed(seed))


def holes() -> torch.Tensor:
    mask = torch.ones(4, T, dtype=torch.bool)
    mask[0, 9:] = False  # padding behind
    mask[1, :2] = False  # in front
    mask[2, 4:8] = False  # a segment of padding alone
    mask[3, [1, 6, 7, 13]] = False  # here and there
    return mask


def cut(network, x, cuts, state=None, mask=None):
    """Logits and state of a call for each piece."""
    parts = []
    for a, b in itertools.pairwise([0, *cuts, x.shape[1]]):
        y, state = network(x[:, a:b], state, None if mask is None else mask[:, a:b])
        parts.append(y)
    return torch.cat(parts, 1), state


def stirred(network):
    """In float64 and eval mode, every parameter away from where it starts."""
    network = network.double()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, dtype=torch.float64)
    return network.eval()


def close(a, b, tolerance=1e-10):
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def same(a, b):
    for x, y in zip(leaves(a), leaves(b), strict=True):
        close(x, y)


def stored_forked_and_joined(network, folder):
    """Streams at different places of their segments go on together, in forks and from a file as they do alone."""
    from mnemos import Stream

    long, short = Stream(network).prefill(ids(2, 13), 5), Stream(network).prefill(ids(1, 7, seed=2))
    alone = [s.generate(9, temperature=0)[0] for s in (long, short)]
    both = Stream.join([long, short])
    tokens, after = both.generate(9, temperature=0)
    assert torch.equal(tokens, torch.cat(alone))
    close(after.predict()[:2], network(torch.cat([ids(2, 13), tokens[:2]], 1))[0][:, -1])
    assert torch.equal(both.select(torch.tensor([2, 2, 0])).generate(9, temperature=0)[0], tokens[[2, 2, 0]])
    after.save(folder / "stream.safetensors")
    back = Stream.restore(network, folder / "stream.safetensors")
    assert torch.equal(back.generate(5, temperature=0)[0], after.generate(5, temperature=0)[0])
