"""Replay counts the auxiliary losses of a step once: values and gradients of a loop with the losses added by hand."""

import pytest
import torch
from replay_standins import Cell, agree, begin, gradients, plain, segments

from mnemos import InputError, add_auxiliary_loss, collect_auxiliary_losses, replay


class Balanced(Cell):
    """A cell with an auxiliary loss on its critical path, so that `advance` adds one too, and one beside it."""

    by_hand: list | None = None

    def add(self, loss):
        if self.by_hand is None:
            add_auxiliary_loss(loss)
        else:
            self.by_hand.append(loss)

    def walk(self, x, state):
        outputs, new = super().walk(x, state)
        self.add(0.3 * self.drop(new["h"]).square().mean())
        return outputs, new

    def forward(self, x, state):
        loss, new = super().forward(x, state)
        self.add(self.read.weight.abs().sum())
        return loss, new

    def added(self, x, state):
        """The oracle's step: the same losses, summed without the channel."""
        self.by_hand = []
        loss, new = self(x, state)
        loss, self.by_hand = loss + sum(self.by_hand), None
        return loss, new


@pytest.mark.parametrize("options", [{}, {"checkpoints": 2}, {"truncate_every": 3, "checkpoints": "sqrt"}])
@pytest.mark.parametrize("advance", [False, True])
def test_auxiliary_losses_count_once(options, advance):
    torch.manual_seed(0)
    model, weights = Balanced(dropout=0.0 if advance else 0.3).double(), [0.0, 0.5, -2.0, 1.0, 3.0, 1.0, 0.25]
    every = options.get("truncate_every", 10**9)
    torch.manual_seed(3)
    total, losses, end = plain(model.added, segments(), begin(), weights=weights, every=every)
    expected = gradients(model)
    torch.manual_seed(3)
    with collect_auxiliary_losses() as outer:
        out = replay(model, segments(), begin(), weights=weights, advance=model.advance if advance else None, **options)
    agree(gradients(model), expected, 1e-12)
    agree((out.loss, list(out.losses), out.state), (total, losses, end), 1e-12)
    assert len(outer) == 0


def test_a_replay_compares_the_loss_with_its_auxiliary_losses():
    """Only the auxiliary loss differs between the first pass and the replay."""
    calls = iter(range(100))

    def step(x, state):
        add_auxiliary_loss(x.new_tensor(float(next(calls))))
        return x.sum() * weight, state

    weight = torch.ones((), dtype=torch.float64, requires_grad=True)
    with pytest.raises(InputError, match=r"step 2: .*loss"):
        replay(step, segments(4), begin())
