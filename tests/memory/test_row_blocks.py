"""Rows of valid tokens in blocks: equal to a loop over each row's tokens, whatever padding stands between them."""

import functools

import pytest
import torch
from torch import Tensor

from mnemos.memory.grid import Unfinished, stretches
from mnemos.memory.row_blocks import CacheState, RowBlocks

SLOTS, WIDTH, BLOCK, HEADS = 3, 4, 5, 2
close = functools.partial(torch.testing.assert_close, rtol=1e-10, atol=1e-10)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


START = random(SLOTS, WIDTH, seed=1)


def advance(tokens: Tensor, cache: Tensor) -> Tensor:
    """An update in which the order of tokens and of blocks matters."""
    return torch.tanh(2 * cache + tokens[:, :SLOTS] - 0.7 * tokens[:, -SLOTS:].flip(1))


def read(query: Tensor, cache: Tensor, own: None = None) -> Tensor:
    """[B, T, H, d] over [B, Tm, Dm]: linear attention without normalisation."""
    heads = cache.unflatten(-1, (HEADS, -1))
    return torch.einsum("bthd,bkhd,bkhe->bthe", query, heads.expand(len(query), -1, -1, -1), heads)


def run(source: Tensor, valid: Tensor | None = None, state: CacheState | None = None) -> tuple[Tensor, RowBlocks]:
    blocks = RowBlocks(source, valid, state, START, BLOCK, advance)
    return blocks.read(read, blocks.caches, source.unflatten(-1, (HEADS, -1)), None), blocks


@pytest.mark.parametrize("cuts", [(17,), (5, 5, 7), (1, 1, 1, 1, 1, 1, 11), (12, 1, 4)])
def test_tokens_without_padding_are_a_loop_over_tokens(cuts):
    source = random(2, 17, WIDTH)
    state, outputs, start = None, [], 0
    for size in cuts:
        found, blocks = run(source[:, start : start + size], None, state)
        outputs.append(found)
        state, start = blocks.after(), start + size
        assert blocks.written.all() == (start % BLOCK < size)
    cache, expected = START.expand(2, -1, -1), []
    for n in range(17):
        expected.append(read(source[:, n : n + 1].unflatten(-1, (HEADS, -1)), cache))
        if n % BLOCK == BLOCK - 1:
            cache = advance(source[:, n + 1 - BLOCK : n + 1], cache)
    close(torch.cat(outputs, 1), torch.cat(expected, 1))
    close(state.cache, cache)
    close(state.partial[:, :2], source[:, 15:])
    assert not state.partial[:, 2:].any()
    assert state.seen.tolist() == [17, 17]


def padded() -> tuple[Tensor, Tensor]:
    """Rows of 17 places with padding before, between and after their tokens, one empty; padding holds NaN."""
    valid = torch.ones(5, 17, dtype=torch.bool)
    valid[1, :4] = False
    valid[2, 9:] = False
    valid[3, ::3] = False
    valid[4] = False
    return random(5, 17, WIDTH).masked_fill(~valid[..., None], torch.nan), valid


@pytest.mark.parametrize("cuts", [(17,), (7, 1, 1, 8), (1,) * 17])
def test_a_row_is_its_valid_tokens(cuts):
    """In one call and in several, where rows are at different places; the state too."""
    source, valid = padded()
    state, outputs, start = None, [], 0
    for size in cuts:
        piece = slice(start, start + size)
        found, blocks = run(source[:, piece], valid[:, piece], state)
        state, start = blocks.after(), start + size
        outputs.append(found)
        for row in range(len(source)):
            expected = run(source[row : row + 1, :start][:, valid[row, :start]])[1].after()
            for mine, theirs in zip(state, expected, strict=True):
                close(mine[row : row + 1], theirs)
    for row in range(len(source)):
        close(torch.cat(outputs, 1)[row, valid[row]], run(source[row : row + 1, valid[row]])[0][0])


def test_gradients_of_padded_rows_are_those_of_the_rows_alone():
    source, valid = padded()
    source = source.nan_to_num()
    weight = random(5, 17, HEADS, WIDTH // HEADS, seed=3) * valid[..., None, None]
    together = source.clone().requires_grad_()
    (run(together, valid)[0] * weight).sum().backward()
    apart = source.clone().requires_grad_()
    for row in range(len(source)):
        taken = valid[row]
        (run(apart[row : row + 1, taken])[0] * weight[row, taken]).sum().backward()
    close(together.grad, apart.grad)
    assert together.grad[~valid].abs().sum() == 0


def test_without_reading_values_the_result_is_the_same(monkeypatch):
    """As under torch.compile: the number of blocks and the finished rows come from shapes and tensors alone."""
    source, valid = padded()
    expected, blocks = run(source, valid)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    found, compiled = run(source, valid)
    close(found[valid], expected[valid])
    for mine, theirs in zip(compiled.after(), blocks.after(), strict=True):
        close(mine, theirs)


def test_calls_are_cut_wherever_the_block_of_a_row_ends():
    """Rows of tokens as lists; a call without a mask has as many tokens of every row. Padding may hold anything."""
    held: list[list[float]] = [[], [], []]
    unfinished, number = Unfinished(torch.zeros(3, 4, 2), torch.zeros(3, 4, dtype=torch.bool)), 0
    for counts in (
        [3, 1, 0],
        [1, 1, 1],
        [1, 1, 1],
        [1, 6, 5],
        [4, 4, 4],
        [9, 9, 9],
        [0, 2, 0],
        [13, 0, 4],
        [4, 4, 4],
        [0, 0, 0],
    ):
        t = max(counts)
        x = number + 1 + torch.arange(3 * t * 2.0).view(3, t, 2)
        mask = torch.arange(t) < torch.tensor(counts)[:, None]
        x, number, end = x.masked_fill(~mask[..., None], torch.nan), number + 3 * t * 2, 0
        for start, stop, before, after, done in stretches([len(row) for row in held], counts, 4):
            assert end == start < stop
            assert before == [len(row) for row in held]
            held = [row + x[i, start : min(stop, counts[i])].tolist() for i, row in enumerate(held)]
            assert stop == t or any(done), "no cut without a reason"
            valid = None if mask.all() else mask[:, start:stop]
            unfinished = unfinished.with_more(x[:, start:stop], valid, before)
            for emptied in (False, True):
                if emptied:
                    assert done == [len(row) == 4 for row in held]
                    held = [[] if len(row) == 4 else row for row in held]
                    unfinished = unfinished.emptied(torch.tensor(done))
                assert unfinished.tokens.tolist() == [row + [[0.0, 0.0]] * (4 - len(row)) for row in held]
                assert unfinished.valid.sum(1).tolist() == [len(row) for row in held]
            assert after == [len(row) for row in held]
            end = stop
        assert end == t
