"""The LSTM language model against the equations of its cell, and its state."""

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


def oracle(network: LSTM, row: list[int], h: list[torch.Tensor], c: list[torch.Tensor]) -> tuple:
    """Hochreiter and Schmidhuber's cell with a forget gate, written out; h and c: a vector a layer."""
    logits, weights = [], dict(network.lstm.named_parameters())
    h, c = list(h), list(c)
    for token in row:
        x = network.embedding.weight[token]
        for n in range(len(h)):
            gates = weights[f"weight_ih_l{n}"] @ x + weights[f"bias_ih_l{n}"]
            gates = gates + weights[f"weight_hh_l{n}"] @ h[n] + weights[f"bias_hh_l{n}"]
            i, f, g, o = gates.chunk(4)
            c[n] = f.sigmoid() * c[n] + i.sigmoid() * g.tanh()
            x = h[n] = o.sigmoid() * c[n].tanh()
        logits.append(network.head.weight @ x + (0 if network.head.bias is None else network.head.bias))
    return torch.stack(logits), h, c


@pytest.mark.parametrize("tied", [False, True])
def test_is_the_cells_equations_from_any_state_and_skips_padding(tied):
    network, x = model(tied=tied), ids()
    assert (network.head.weight is network.embedding.weight) == (network.head.bias is None) == tied
    mask = torch.tensor([[1] * 7, [0, 1, 1, 0, 1, 1, 0], [0] * 7]).bool()
    start = LSTMState(*torch.randn(2, 3, 2, 6, generator=torch.Generator().manual_seed(2), dtype=torch.float64))
    for leaf in start:
        leaf.requires_grad_()
    logits, end = network(x, start, mask)
    sources, wanted, found = [*start, *network.parameters()], [], []
    for row in range(3):
        valid = x[row][mask[row]].tolist()
        if valid:
            said, h, c = oracle(network, valid, list(start.h[row]), list(start.c[row]))
            torch.testing.assert_close(logits[row][mask[row]], said)
            wanted.append(said.square().sum())
            found.append(logits[row][mask[row]].square().sum())
        else:
            h, c = list(start.h[row]), list(start.c[row])
        torch.testing.assert_close(end.h[row], torch.stack(h))
        torch.testing.assert_close(end.c[row], torch.stack(c))
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
    for fields, message in (
        ({"dim": 0}, "dim: .* found 0"),
        ({"dropout": 1.0}, "dropout"),
        ({"layers": "2"}, "model.layers"),
        ({"layer": 2}, "LSTM.*'layer'.*layers"),
    ):
        refuses(message, model, **fields)
    network = model()
    refuses(r"\(3, 2, 6\)", network, ids(), network.initial_state(2))
    refuses("found tuple", network, ids(), (1, 2))
    refuses("0 to 10, found 9", network, ids() + 9)
