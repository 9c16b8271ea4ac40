"""The LSTM language model against torch's LSTM of each row's valid tokens, and its state."""

import pytest
import torch
from refusals import refuses

import mnemos
from mnemos.models.lstm import LSTM, LSTMState


def model(**fields) -> LSTM:
    torch.manual_seed(0)
    return LSTM(**{"vocab_size": 11, "dim": 6, "layers": 2} | fields).double()


def ids(rows: int = 3, t: int = 7, seed: int = 1) -> torch.Tensor:
    return torch.randint(11, (rows, t), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("tied", [False, True])
def test_reads_each_rows_valid_tokens_alone_from_any_state(tied):
    network, x = model(tied=tied), ids()
    assert (network.head.weight is network.embedding.weight) == (network.head.bias is None) == tied
    mask = torch.tensor([[1] * 7, [0, 1, 1, 0, 1, 1, 0], [0] * 7]).bool()
    start = LSTMState(*torch.randn(2, 3, 2, 6, generator=torch.Generator().manual_seed(2), dtype=torch.float64))
    for leaf in start:
        leaf.requires_grad_()
    logits, end = network(x, start, mask)
    sources, wanted, found = [*start, *network.parameters()], [], []
    for row in range(3):
        valid, h, c = x[row][mask[row]], start.h[row], start.c[row]
        if len(valid):
            y, (h, c) = network.lstm(network.embedding.weight[valid], (h, c))
            said = torch.nn.functional.linear(y, network.head.weight, network.head.bias)
            torch.testing.assert_close(logits[row][mask[row]], said)
            wanted.append(said.square().sum())
            found.append(logits[row][mask[row]].square().sum())
        torch.testing.assert_close(end.h[row], h)
        torch.testing.assert_close(end.c[row], c)
    assert logits.isfinite().all()
    for a, b in zip(*(torch.autograd.grad(sum(losses), sources) for losses in (found, wanted)), strict=True):
        torch.testing.assert_close(a, b)


def test_autocast_stays_close_and_no_kernel_steps():
    network, x = model(layers=1, dropout=0.3).eval().float(), ids(1, 20)
    assert "LSTM" in mnemos.fused_step(network).why
    with torch.autocast("cpu", torch.bfloat16):
        low = network(x, network(x)[1])[0]
    wanted = network(x, network(x)[1])[0]
    assert (low.float() - wanted).abs().max() < 0.05 * wanted.abs().max()


def test_refuses_what_does_not_fit():
    refuses("dropout", model, dropout=1.0)
    refuses("LSTM.*'layer'.*layers", model, layer=2)
    network = model()
    refuses(r"\(3, 2, 6\)", network, ids(), network.initial_state(2))
    refuses("found tuple", network, ids(), (1, 2))
    refuses("0 to 10, found 9", network, ids() + 9)
