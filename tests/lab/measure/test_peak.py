"""The most bytes of tensors that a call has at one time."""

import torch

from mnemos.lab.measure.peak import live_peak_of


def test_tensors_count_while_they_live():
    before = torch.ones(1000)

    def run():
        a = before + 1  # 4,000 bytes
        b = a.view(10, 100).t().add_(1)  # the same storage
        c = a + 1  # two at one time
        del a, b
        d = c * 2  # two again
        return d + before[:10].sum()  # 4 bytes, a view of what was there, and a third storage

    assert live_peak_of(run) == 3 * 4000 + 4
    assert live_peak_of(lambda: before.add_(1).view(-1)) == 0


def test_a_backward_pass_counts_what_it_kept():
    weight = torch.ones(100, 100, requires_grad=True)
    x = torch.ones(50, 100)
    kept = live_peak_of(lambda: (x @ weight).exp().exp().sum().backward())
    assert weight.grad is not None
    assert kept >= 3 * 4 * 50 * 100  # the two results of exp, which are kept, and a gradient
