"""The states of attentions by themselves: what they keep, append, share and select."""

import copy
import pickle
import threading

import pytest
import torch
from refusals import refuses

from mnemos.memory import AssociationsConfig, key_values
from mnemos.memory.associations import AssociativeMemory
from mnemos.memory.key_values import BranchedKeyValues, Buffer, Encoded, KeyValues, Segments
from mnemos.memory.tokens import TokenMemory
from mnemos.types import Rows, leaves, select


def test_an_append_leaves_what_a_graph_has_kept():
    """Keys without gradient under queries with one, as with an adapter on the queries alone."""
    q, state, total = torch.ones(1, 1, 1, 2, requires_grad=True), KeyValues.empty(1, 1, 2), 0.0
    for t in range(1, 6):
        new = torch.full((1, 1, 1, 2), float(t))
        state = state.append(new, new, torch.ones(1, 1, dtype=torch.bool))
        total = total + (q * state.k).sum()
    total.backward()
    assert torch.equal(q.grad, torch.full_like(q, 5 * 1 + 4 * 2 + 3 * 3 + 2 * 4 + 5))


def test_appends_carry_tangents():
    valid = torch.ones(1, 1, dtype=torch.bool)

    def total(x):
        state, sum_of = KeyValues.empty(1, 1, 2), 0.0
        for _ in range(4):
            state = state.append(x, x, valid)
            sum_of = sum_of + state.k.sum()
        return sum_of

    x = torch.ones(1, 1, 1, 2)
    assert torch.func.jvp(total, (x,), (x,))[1] == 20


@pytest.mark.parametrize("n", [2, 3, 4, 6])
def test_a_padded_state_has_at_least_as_many_tokens(n):
    k = torch.randn(2, 3, 1, 4)
    padded = KeyValues(k, k, torch.ones(2, 3, dtype=torch.bool), torch.full((2,), 3)).pad_to(n)
    assert padded.valid.tolist() == [[False] * (n - 3) + [True] * 3] * 2
    assert torch.equal(padded.k, torch.cat([torch.zeros(2, max(0, n - 3), 1, 4), k], 1))


def same(found, wanted):
    assert [x.tolist() for x in leaves(found)] == [x.tolist() for x in leaves(wanted)]


@torch.no_grad()
def test_room_for_a_token_is_an_append_of_it():
    k, v, mask = torch.randn(2, 3, 1, 2), torch.randn(2, 3, 1, 2), torch.tensor([[True, True, False], [True] * 3])
    state = whole = KeyValues.empty(2, 1, 2).append(k, v, mask)
    for t in range(5):
        state, whole = state.with_room(), whole.append(k[:, t % 3 :][:, :1], v[:, t % 3 :][:, :1])
        state.k[:, -1], state.v[:, -1] = k[:, t % 3], v[:, t % 3]
        same(state, whole)
    same(whole, KeyValues(whole.k, whole.v, whole.valid, torch.tensor([7, 8])))


@torch.no_grad()
def test_threads_that_go_on_from_one_state_write_to_places_of_their_own(monkeypatch):
    """The second thread goes on while the first looks for room, as long as it is let."""
    one, two = torch.full((1, 1, 1, 2), 1.0), torch.full((1, 1, 1, 2), 2.0)
    state, found = KeyValues.empty(1, 1, 2).append(one, one).append(one, one), []
    other = threading.Thread(target=lambda: found.append(state.append(two, two)))

    def look(buffer):
        used = vars(buffer)["used"]
        if other.ident is None:
            other.start()
            other.join(0.05)
        return used

    monkeypatch.setattr(Buffer, "used", property(look, lambda buffer, n: vars(buffer).update(used=n)), raising=False)
    mine = state.append(one, one)
    other.join()
    assert (mine.k[0, :, 0, 0].tolist(), found[0].k[0, :, 0, 0].tolist()) == ([1, 1, 1], [1, 1, 2])


@torch.no_grad()
def test_a_pickle_holds_every_token_once_and_goes_on():
    new = torch.randn(1, 500, 2, 8)
    state = KeyValues.empty(1, 2, 8).append(new, new).append(new[:, :1], new[:, :1])  # in a buffer of twice its tokens
    for other in pickle.loads(pickle.dumps(state)), copy.deepcopy(state):
        same(other.append(new, new), state.append(new, new))
    assert len(pickle.dumps(state)) < 2.1 * sum(x.nbytes for x in leaves(state))


@torch.no_grad()
@pytest.mark.parametrize("of", ["keys", "inputs", "branched"])
def test_what_is_appended_gives_the_state_its_type(of):
    """Also with room in its buffer; but not under autocast, where a state stays as exact as it is."""

    def appended(state, dtype):
        x = torch.ones(1, 1, 1, 2, dtype=dtype)
        return state.append(x[:, 0], torch.ones(1, 1, dtype=torch.bool)) if of == "inputs" else state.append(x, x)

    state = Segments.empty(1, 2) if of == "inputs" else KeyValues.empty(1, 1, 2)
    state = BranchedKeyValues.of(state, 1) if of == "branched" else state
    for _ in range(3):
        state = appended(state, torch.bfloat16)
    assert {x.dtype for x in leaves(state) if x.is_floating_point()} == {torch.bfloat16}
    wide = appended(state, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        kept = appended(wide, torch.bfloat16)
    for one in wide, kept:
        assert {x.dtype for x in leaves(one) if x.is_floating_point()} == {torch.float32}


@torch.no_grad()
@pytest.mark.parametrize("shared", [0, 1, 4])
def test_branched_rows_are_rows_with_keys_of_their_own(shared, monkeypatch):
    """Appended to, reordered, merged, cut and forked; every number occurs once, so that none is taken for another."""
    monkeypatch.setattr(key_values, "MERGE", 2)
    numbers, drawn = iter(range(1, 10**6)), torch.Generator().manual_seed(0)

    def new(rows, t):
        return torch.tensor([next(numbers) for _ in range(rows * t * 6)]).view(rows, t, 2, 3) * 1.0

    start = KeyValues.empty(3, 2, 3)
    if shared:
        start = start.append(new(3, shared), new(3, shared), torch.arange(3)[:, None] != torch.arange(shared))
    state, rows = BranchedKeyValues.of(start, 4), select(start, torch.arange(3).repeat_interleave(4))
    assert state.fits(12, 2, 3)
    assert not any(state.fits(*sizes) for sizes in ((3, 2, 3), (12, 3, 3), (12, 2, 6)))
    merged = 0
    for step in range(12):
        k, v = new(len(rows.seen), 1), new(len(rows.seen), 1)
        before, fork = state, state.append(k, v)
        if state.k.shape[1]:
            fork.k[:, -4:] += 0.5  # another continuation of the same state, of which none below knows
            state = before.with_room(before.visible_after(), before.seen + 1)
            state.k[:, -4:], state.v[:, -4:] = (x.view(-1, 4, 2, 3) for x in (k, v))
        else:
            state = fork
        rows = rows.append(k, v)
        same(state.unshare(), rows)
        for n in (1, 3, shared + step, shared + step + 1):
            same(state.last(n).unshare(), rows.last(n))
        groups = torch.arange(len(rows.seen)) // 4 * 4
        index = groups + torch.randint(3, groups.shape, generator=drawn)  # never the last of a group
        index = index[:4] if step == 8 else index.flip(0) if step == 9 else index
        index = torch.cat([index[4:], index[:4]]) if step == 6 else index  # groups in another order
        since, state, rows = state.since, select(state, index), select(rows, index)
        same(state.unshare(), rows)
        if step not in (6, 8) and since % 2 == 0:
            common = (rows.k.unflatten(0, (-1, 4)) == rows.k[::4, None]).flatten(3).all(3).flatten(0, 1).all(0)
            assert state.shared == int(common.cumprod(0).sum())
            merged += state.since > 0 and state.shared > shared
    assert merged, "of some tokens and not of all"
    assert isinstance(select(state, torch.tensor([0, 0, 2])), KeyValues)


@pytest.mark.parametrize(
    ("rows", "copies", "kept"),
    [
        ([2, 0, 1, 3, 4, 5, 8, 7, 6], 3, True),
        ([0, 1, 3, 3, 6, 8], 2, True),
        ([3, 4, 3, 3, 3, 3, 6, 6, 6], 3, False),
        ([6, 0, 1, 2], 1, False),
        ([0, 1, 2, 3], 1, False),
        ([8, 8, 8], 3, False),
        ([], 1, False),
    ],
)
def test_sources_are_kept_once_for_rows_that_follow_each_other(rows, copies, kept):
    k, v, valid = torch.arange(24.0).view(3, 2, 2, 2), torch.arange(24.0).view(3, 2, 2, 2) + 50, torch.eye(3)[:, :2] > 0
    state, index = Encoded(((k, v), (v, k)), valid, 3), torch.tensor(rows, dtype=torch.int64)
    found = state.select_rows(Rows(index))
    assert (found.copies, found.rows) == (copies, len(rows))
    assert (found.layers[0][0] is k) == kept
    whole = (x.repeat_interleave(3, 0)[index] for x in (k, v, v, k, valid))
    assert [x.tolist() for x in leaves(found.unshare())] == [x.tolist() for x in whole]


@pytest.mark.parametrize("name", ["key_dim", "nu"])
def test_associations_have_a_width(name):
    assert AssociativeMemory(4, AssociationsConfig(**{name: 1})).features == {"key_dim": 6, "nu": 64}[name]
    refuses(f"memory.{name}: expected at least 1, found 0", AssociationsConfig, **{name: 0})


def test_rows_that_are_not_active_are_not_written():
    torch.manual_seed(0)
    tokens, active = torch.randn(3, 2, 4), torch.tensor([True, False, True])
    memory = TokenMemory(2, 4)
    once = memory.written(memory.initial_state(3), tokens, active)
    twice = memory.written(memory.written(once, tokens + 1, None), tokens + 2, active)
    assert torch.equal(memory.contents(once), torch.where(active[:, None, None], tokens, memory.start))
    assert torch.equal(twice.tokens, torch.stack([tokens[0] + 2, tokens[1] + 1, tokens[2] + 2]))
    assert (once.writes.tolist(), twice.writes.tolist()) == ([1, 0, 1], [3, 1, 3])
    associations = AssociativeMemory(4, AssociationsConfig(tokens=2, key_dim=3))
    torch.nn.init.normal_(associations.value.weight)
    first = associations.write(associations.initial_state(3), tokens, None)
    all_rows, some = (associations.write(first, tokens + 1, rows) for rows in (None, active))
    for before, everywhere, found in zip(first, all_rows, some, strict=True):
        assert torch.equal(found[active], everywhere[active])
        assert torch.equal(found[1], before[1])
        assert not torch.equal(everywhere[1], before[1])
