"""The adaptive softmax against a full softmax that is written out from the same weights, in float64."""

import itertools

import pytest
import torch

import mnemos
from mnemos import Memformer, Transformer
from mnemos.generate.sampling import draw
from mnemos.lab.measure.flops import task_flops
from mnemos.lab.tasks.batch import IGNORE, Batch
from mnemos.lab.tasks.metrics import negative_log_likelihood, right_predictions
from mnemos.lab.tasks.task import SUPERVISED
from mnemos.models.lstm import LSTMConfig
from mnemos.models.transformer import HeadConfig

V, CUTOFFS = 40, (6, 15, 28)


SIZES = {"vocab_size": V, "dim": 16, "layers": 1, "num_heads": 2, "mlp": 16}


def model() -> Transformer:
    torch.manual_seed(0)
    found = Transformer(**SIZES, head=HeadConfig(tied=True, cutoffs=CUTOFFS)).double()
    with torch.no_grad():
        for p in found.head.parameters():
            p.add_(torch.randn_like(p) * 0.3)
        found.head.clusters.bias[-1] += 4  # the last cluster is often likely
    return found


def oracle(network: Transformer, hidden: torch.Tensor) -> torch.Tensor:
    """p(token) [.., V]: the softmax of the head, times the softmax within the token's cluster."""
    head, first = network.head, CUTOFFS[0]
    top = [hidden @ w + b for w, b in zip(head.weight[:first], head.bias[:first], strict=True)]
    top += [hidden @ w + b for w, b in zip(head.clusters.weight, head.clusters.bias, strict=True)]
    top = torch.stack(top, -1)
    parts = [
        torch.einsum("...d,vd->...v", hidden, head.weight[a:b]) + head.bias[a:b]
        for a, b in itertools.pairwise([*CUTOFFS, V])
    ]
    top = top.exp() / top.exp().sum(-1, keepdim=True)
    found = [top[..., :first]]
    for k, part in enumerate(parts):
        found.append(top[..., first + k, None] * part.exp() / part.exp().sum(-1, keepdim=True))
    return torch.cat(found, -1)


def batch(high: int = V) -> Batch:
    random = torch.Generator().manual_seed(1)
    x, targets = torch.randint(V, (3, 11), generator=random), torch.randint(high, (3, 11), generator=random)
    targets[0, :2] = IGNORE
    return Batch(x, targets)


@pytest.mark.parametrize("high", [V, CUTOFFS[0]])  # the shortlist alone
def test_it_is_the_softmax_of_its_weights(high):
    network, given = model(), batch(high)
    hidden, _ = network(given.inputs)
    p = oracle(network, hidden)
    torch.testing.assert_close(p.sum(-1), torch.ones_like(p[..., 0]))
    torch.testing.assert_close(network.likelihood.log_prob(hidden), p.log())
    counted = given.targets != IGNORE
    wanted = -p[counted].gather(-1, given.targets[counted][:, None]).log().sum()
    loss = negative_log_likelihood(network, hidden, given)
    torch.testing.assert_close(loss, wanted)
    parameters = list(network.parameters())
    found = torch.autograd.grad(loss, parameters, retain_graph=True)
    for a, b in zip(found, torch.autograd.grad(wanted, parameters), strict=True):
        torch.testing.assert_close(a, b)
    guess = p.argmax(-1)
    assert (guess >= CUTOFFS[0]).any(), "a token of a cluster is the likeliest somewhere"
    right, count = right_predictions(network, hidden, Batch(given.inputs, torch.where(counted, guess, IGNORE)))
    assert (right, count) == (31, 31)
    assert torch.equal(draw(hidden[:, -1], temperature=0, likelihood=network.likelihood), guess[:, -1])
    nothing = Batch(given.inputs, torch.full_like(given.targets, IGNORE))
    assert negative_log_likelihood(network, hidden, nothing) == 0
    assert [int(x) for x in right_predictions(network, hidden, nothing)] == [0, 0]


def test_under_autocast_it_is_computed_in_float32():
    network, given = model().float(), batch()
    hidden, _ = network(given.inputs)
    wanted = negative_log_likelihood(network, hidden, given)
    with torch.autocast("cpu", torch.bfloat16):
        found = negative_log_likelihood(network, hidden.bfloat16(), given)
        right, count = right_predictions(network, hidden.bfloat16(), given)
        drawn = draw(hidden[:, -1].bfloat16(), temperature=0, likelihood=network.likelihood)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, wanted, rtol=1e-2, atol=0)
    assert (count, drawn.shape) == (31, (3,))
    assert right <= count


def test_the_other_language_models_have_it(tmp_path):
    lstm = LSTMConfig(vocab_size=V, dim=8, layers=1, cutoffs=CUTOFFS, tied=True).build()
    sizes = {"dim": 8, "encoder_layers": 1, "decoder_layers": 1, "num_heads": 2, "mlp": 8, "segment": 4}
    memformer = Memformer(vocab_size=V, **sizes, tied=True, cutoffs=CUTOFFS)
    for network in (lstm, memformer):
        given = batch()
        hidden, _ = network(given.inputs)
        assert hidden.shape == (3, 11, 8)
        negative_log_likelihood(network, hidden, given).backward()
        assert all(p.grad is not None for name, p in network.named_parameters() if "head" in name)
        mnemos.save(network, tmp_path)
        assert torch.equal(mnemos.load(tmp_path)(given.inputs)[0], network.eval()(given.inputs)[0])
        tokens, _ = mnemos.Stream(network.eval()).prefill(given.inputs).generate(3, top_k=2)
        assert tokens.shape == (3, 3)


def test_its_products_are_counted():
    network, given = model(), batch(CUTOFFS[0])
    rows = int((given.targets != IGNORE).sum())
    head = 2 * rows * 16 * (CUTOFFS[0] + len(CUTOFFS))
    hidden = Transformer(**SIZES, head=HeadConfig(tied=True)).double()
    logits = 2 * given.inputs.numel() * 16 * V
    assert task_flops(network, SUPERVISED, given) - head == task_flops(hidden, SUPERVISED, given) - logits
