"""Block-sparse attention against its definition: values, gradients, padding, the blocks drawn, cost, wrong input."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from mnemos.lab.measure.flops import COUNTED
from mnemos.lab.papers.baselines.bigbird.operator import block_sparse_attention, draw_random_blocks
from mnemos.lab.papers.baselines.bigbird.reference import reference_block_sparse
from mnemos.types import InputError


def inputs(t, b=2, h=2, d=5, m=3, dtype=torch.float64):
    g = torch.Generator().manual_seed(t)
    return [torch.randn(b, t, h, n, generator=g, dtype=dtype).requires_grad_() for n in (d, d, m)]


def holes(t, block):
    """The second row has no valid key in the first and the last block."""
    mask = torch.rand(2, t, generator=torch.Generator().manual_seed(4)) > 0.3
    mask[1, :block] = mask[1, -block:] = False
    return mask


def compare(found, expected, given):
    upstream = torch.randn(expected.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    gradients = [torch.autograd.grad(y, given, upstream) for y in (found, expected)]
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


CASES = [  # tokens, block, window, random blocks, global blocks
    (29, 2, 3, 3, 1),  # 15 blocks, the last one of one token
    (27, 3, 3, 3, 1),  # 9 blocks, one more than a block reads
    (24, 3, 3, 3, 1),  # 8 blocks: dense
    (1, 4, 3, 3, 1),
    (41, 2, 5, 1, 2),
    (13, 1, 1, 0, 1),  # blocks of one token
    (26, 3, 3, 1, 1),
]


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-tokens")
def test_equals_the_definition(case, masked):
    t, block, window, extra, ends = case
    given = inputs(t)
    mask = holes(t, block) if masked else None
    if masked:  # padding may hold anything
        given = [x.detach().masked_fill(~mask[..., None, None], torch.nan).requires_grad_() for x in given]
    drawn = draw_random_blocks(2, -(-t // block), extra, window, ends, seed=3)
    y = block_sparse_attention(*given, drawn, block, window, ends, mask)
    compare(y, reference_block_sparse(*given, drawn, block, window, ends, mask), given)


def test_one_table_for_all_heads_and_blocks_that_are_listed_twice():
    given = inputs(29)
    table = torch.tensor([[[0, 0, 3]]]).expand(1, 13, 3)
    y = block_sparse_attention(*given, table, 2)
    compare(y, reference_block_sparse(*given, table.expand(2, -1, -1), 2), given)


def test_a_sequence_shorter_than_the_pattern_is_softmax_attention():
    q, k, v = inputs(64)
    y = block_sparse_attention(q, k, v, draw_random_blocks(2, 8), 8)
    weights = (torch.einsum("bihd,bjhd->bhij", q, k) / 5**0.5).softmax(-1)
    torch.testing.assert_close(y, torch.einsum("bhij,bjhm->bihm", weights, v))
    beyond = inputs(65)
    assert not torch.allclose(
        block_sparse_attention(*beyond, draw_random_blocks(2, 9), 8), block_sparse_attention(*beyond, None, 65)
    )


def test_low_precision():
    given = [x.detach() for x in inputs(70, d=8, m=8, dtype=torch.bfloat16)]
    drawn = draw_random_blocks(2, 18)
    y = block_sparse_attention(*given, drawn, 4)
    assert y.dtype == torch.bfloat16
    expected = reference_block_sparse(*given, drawn, 4)
    torch.testing.assert_close(y.double(), expected, rtol=1e-2, atol=1e-2)


def test_dropout_has_the_mean_of_what_it_kept():
    given = [x.detach()[:1].repeat(2000, 1, 1, 1) for x in inputs(13)]
    drawn = draw_random_blocks(2, 13)
    torch.manual_seed(0)
    y = block_sparse_attention(*given, drawn, 1, dropout=0.5)
    exact = block_sparse_attention(*(x[:1] for x in given), drawn, 1)
    assert (y[0] - y[1]).abs().max() > 0.1
    torch.testing.assert_close(y.mean(0, keepdim=True), exact, rtol=0, atol=0.15)


@pytest.mark.parametrize(("blocks", "extra", "window", "ends"), [(9, 3, 3, 1), (40, 3, 5, 2), (33, 0, 3, 1)])
def test_random_blocks_are_distinct_and_neither_global_nor_near(blocks, extra, window, ends):
    drawn = draw_random_blocks(3, blocks, extra, window, ends, seed=1)
    assert drawn.shape == (3, blocks - 2 * ends, extra)
    for head in drawn.tolist():
        for row, found in enumerate(head, ends):
            assert len({*found}) == extra
            assert all(ends <= j < blocks - ends and abs(j - row) > window // 2 for j in found)


def test_random_blocks_are_uniform_and_repeat_from_the_seed():
    drawn = draw_random_blocks(1200, 14)
    counts = torch.zeros(12, 14).index_put_(
        (torch.arange(12)[None, :, None].expand(drawn.shape), drawn), torch.tensor(1.0), accumulate=True
    )
    for row, count in enumerate(counts, 1):
        expected = 1200 * 3 / (9 if 1 < row < 12 else 10)
        assert ((count[count > 0] - expected).abs() < 0.25 * expected).all(), row
    assert torch.equal(draw_random_blocks(2, 14, seed=5), draw_random_blocks(2, 14, seed=5))
    assert not torch.equal(draw_random_blocks(2, 14, seed=5), draw_random_blocks(2, 14, seed=6))
    assert not torch.equal(*draw_random_blocks(2, 14, seed=5))
    # As written when a checkpoint was trained: a change of these numbers changes trained models.
    assert draw_random_blocks(1, 12, seed=0)[0, :3].tolist() == [[8, 9, 6], [5, 7, 6], [7, 5, 10]]


def flops(t, backward=False):
    given = inputs(t, b=1, d=8, m=8, dtype=torch.float32)
    with FlopCounterMode(display=False, custom_mapping=COUNTED) as counter:
        y = block_sparse_attention(*given, draw_random_blocks(2, -(-t // 8)), 8)
        if backward:
            y.sum().backward()
    return counter.get_total_flops()


def test_flops_are_those_of_the_blocks_that_are_read():
    def scores(n):  # two global blocks, two blocks beside them, and the others
        return 8 * 8 * (2 * n + 2 * 7 + (n - 4) * 8)

    assert flops(8 * 20) == 2 * 2 * 2 * 8 * scores(20)
    assert flops(8 * 41 - 8) == 2 * 2 * 2 * 8 * scores(40)
    assert flops(8 * 20, backward=True) > 3 * flops(8 * 20)
    assert flops(8 * 8) == 2 * 2 * 2 * 8 * 64**2


def test_the_backward_keeps_memory_linear_in_the_length():
    kept = []
    for t in (512, 1024):
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x, saved=saved: saved.append(x) or x, lambda x: x):
            block_sparse_attention(*inputs(t, d=4, m=4), draw_random_blocks(2, t // 8), 8)
        kept.append(sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in saved}.values()))
    assert kept[1] < 2.3 * kept[0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block": 0}, "block and global_blocks of at least 1"),
        ({"window": 2}, "an odd window"),
        ({"random_blocks": torch.zeros(2, 5, 3, dtype=torch.int64)}, "expected random_blocks"),
        ({"random_blocks": torch.zeros(2, 13, 3)}, "expected random_blocks"),
        ({"random_blocks": torch.full((2, 13, 3), 14)}, "expected 0 to 13"),
        ({"v": torch.zeros(2, 8, 3, 4)}, "expected floating q and k"),
        ({"mask": torch.ones(2, 29)}, "mask of booleans"),
        ({"dropout": 1.0}, "dropout"),
    ],
)
def test_wrong_input_is_refused_in_one_line(change, message):
    q, k, v = inputs(29)
    given = {"q": q, "k": k, "v": v, "random_blocks": draw_random_blocks(2, 15), "block": 2}
    with pytest.raises(InputError, match=message) as error:
        block_sparse_attention(**given | change)
    assert "\n" not in str(error.value)
