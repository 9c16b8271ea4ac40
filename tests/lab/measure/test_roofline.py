import torch
from torch.nn import functional as F

from mnemos import GRC
from mnemos.attention import GatedCacheAttention
from mnemos.lab.measure.flops import count_flops
from mnemos.lab.measure.roofline import Machine, Work, measure, operations

N, K, M = 5, 7, 11


def total(found: list[Work]) -> tuple[int, int]:
    return sum(w.flops for w in found), sum(w.bytes for w in found)


def test_views_and_allocations_cost_nothing():
    a = torch.randn(N, K)
    assert operations(lambda: a.t()[1:].unsqueeze(0).expand(4, K - 1, N)) == []
    assert operations(lambda: torch.empty_like(a)) == []


def test_elementwise_work_by_hand():
    a, row = torch.randn(N, K), torch.randn(K)
    assert total(operations(lambda: a + row)) == (0, 4 * (2 * N * K + K))
    # What is expanded is stored once.
    assert total(operations(lambda: a + row.expand(N, K))) == (0, 4 * (2 * N * K + K))
    assert total(operations(lambda: a.add_(1.0))) == (0, 4 * 2 * N * K), "in place: read and written"
    assert total(operations(lambda: a.copy_(row.expand(N, K)))) == (0, 4 * (N * K + K)), "overwritten, and not read"


def test_products_and_a_composite_by_hand():
    a, b = torch.randn(N, K), torch.randn(K, M)
    assert operations(lambda: a @ b) == [Work("mm", 2 * N * K * M, 4 * (N * K + K * M + N * M))]
    x, w, b = torch.randn(2, N, K), torch.randn(M, K), torch.randn(M)
    assert total(operations(lambda: F.linear(x, w, b))) == (2 * 2 * N * K * M, 4 * (2 * N * K + K * M + M + 2 * N * M))


def test_an_optimiser_step_is_traffic():
    p = torch.nn.Parameter(torch.randn(N, K))
    p.grad = torch.randn(N, K)
    optimizer = torch.optim.SGD([p], 0.1, foreach=False)
    # p is read and written, its gradient read.
    assert total(operations(optimizer.step)) == (0, 4 * 3 * N * K)


def test_it_counts_the_flops_that_the_counter_counts():
    layer = GatedCacheAttention(24, 2, grc=GRC(length=9, ratio=0.5, convolution=True, preset="official"), grid=(4, 5))
    x = torch.randn(3, 20, 24, requires_grad=True)

    def step() -> None:
        layer(x)[0].sum().backward()

    assert total(operations(step))[0] == count_flops(step) > 0


def test_a_machines_time_is_the_slower_of_two_each_time():
    found = [Work("product", 100, 10), Work("sum", 0, 40)]
    assert Machine(10.0, 10.0).seconds(found) == 10.0 + 4.0
    machine = measure(size=64, megabytes=1, rounds=2)
    assert machine.flops > 1e6
    assert machine.bytes > 1e6
