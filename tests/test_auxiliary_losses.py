"""The channel of auxiliary losses: who collects, what is dropped, and what compilers and checkpointing make of it."""

import contextlib
import threading

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from mnemos import InputError, add_auxiliary_loss, collect_auxiliary_losses


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        y = self.linear(x)
        add_auxiliary_loss(y.square().mean())
        return torch.tanh(y)


def test_the_innermost_collector_of_the_thread_takes_the_losses_in_order():
    one, two, three = (torch.tensor(float(i)) for i in (1, 2, 3))
    add_auxiliary_loss(one)  # dropped
    with collect_auxiliary_losses() as outer:
        add_auxiliary_loss(one)
        with contextlib.suppress(KeyError), collect_auxiliary_losses() as inner:
            add_auxiliary_loss(two[None])
            assert inner[0].shape == ()
            raise KeyError
        thread = threading.Thread(target=add_auxiliary_loss, args=(two,))
        thread.start()
        thread.join()
        add_auxiliary_loss(three)
        assert [float(x) for x in outer] == [1, 3]
    add_auxiliary_loss(one)
    assert [float(x) for x in inner] == [2]
    assert (len(outer), float(sum(outer)), float(outer[-1])) == (2, 4, 3)


@pytest.mark.parametrize("wrong", [3.0, torch.zeros(2), torch.zeros((), dtype=torch.int64)])
def test_what_is_not_a_scalar_of_floats_is_refused(wrong):
    with pytest.raises(InputError, match="scalar"):
        add_auxiliary_loss(wrong)


def gradients(model, run):
    """Of Σ output + Σ auxiliary losses, which are `count` of them."""
    model.zero_grad()
    torch.manual_seed(1)
    x = torch.randn(3, 4)
    with collect_auxiliary_losses() as found:
        y = run(x)
    (y.sum() + sum(found)).backward()
    return len(found), [p.grad for p in model.parameters()]


def compared(model, run):
    plain = gradients(model, model)
    found = gradients(model, run)
    assert found[0] == plain[0] == len(model)
    torch.testing.assert_close(found[1], plain[1])


def test_activation_checkpointing_counts_a_loss_once():
    model = nn.Sequential(Layer(), Layer())
    compared(model, lambda x: checkpoint(model, x, use_reentrant=False))


def test_compiled_layers_add_their_losses_without_a_graph_break():
    model = nn.Sequential(*[Layer() for _ in range(4)])
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    compared(model, torch.compile(model, backend=backend, fullgraph=True))
    compared(model, torch.compile(model, backend=backend, fullgraph=True))
    assert len(graphs) == 1
    each = [torch.compile(layer, backend=backend, fullgraph=True) for layer in model]
    graphs.clear()
    compared(model, nn.Sequential(*each))
    assert len(graphs) <= 2  # a layer's place in the model is no reason to compile it again
