"""Documents as rows of segments: whole batches, sets and processes, epochs, and states that go on with the rows."""

import copy

import pytest
import torch
from refusals import refuses
from trainer_standins import ROLLOUT, SEGMENT, documents

from mnemos.trainers import RolloutBatches
from mnemos.trainers.batches import RowStates, segments


def test_rows_read_one_document_after_the_other():
    """Segments of three: the document with most of them first, then in their order; one of a single token is none."""
    long, none = {"input_ids": list(range(20, 28)), "labels": [-100] * 4 + list(range(64, 68))}, [-100] * 6
    first, last = batches = RolloutBatches([[10, 11], long, [30], list(range(40, 44))], 2, 3, 2, seed=None)
    assert len(batches) == 2
    for batch, ids, targets, valid, resets in (
        (
            first,
            [[20, 21, 22, 23, 24, 25], [10, 0, 0, 40, 41, 42]],
            [[-100, -100, -100, 64, 65, 66], [11, -100, -100, 41, 42, 43]],
            ["111111", "100111"],
            ["10", "11"],
        ),
        (last, [[26, 0, 0, 0, 0, 0], [0] * 6], [[67, *none[1:]], none], ["100000", "000000"], ["01", "11"]),
    ):
        assert (batch["input_ids"].tolist(), batch["targets"].tolist()) == (ids, targets)
        assert batch["mask"].tolist() == [[digit == "1" for digit in row] for row in valid]
        assert batch["resets"].tolist() == [[digit == "1" for digit in row] for row in resets]
    assert (first["index"], last["index"]) == (0, 1)
    assert len(RolloutBatches([list(range(10))], 1, 3, 3, seed=None)) == 1, "three segments, three a batch"
    assert [part.mask.tolist() for part in segments(last, 3)] == [
        [[True, False, False], [False] * 3],
        [[False] * 3] * 2,
    ]
    assert "mask" not in (whole := RolloutBatches([[40, 41, 42, 43]], 1, 3, seed=None)[0])
    assert segments(whole, 3)[0].mask is None


def test_a_document_is_looked_up_once_while_a_row_reads_it():
    """A data set of the library `datasets` decodes all of a document at each look-up. Copies look up by themselves."""
    looked_up = []

    class Documents(list):
        def __getitem__(self, number):
            looked_up.append(number)
            return super().__getitem__(number)

    batches = RolloutBatches(Documents(documents()), 2, SEGMENT, ROLLOUT, 0)
    looked_up.clear()
    found = list(batches)
    assert len(looked_up) == sum(int(batch["resets"].sum()) for batch in found), "a row that begins a document"
    assert torch.equal(copy.deepcopy(batches)[3]["input_ids"], found[3]["input_ids"])


@pytest.mark.parametrize("seed", [None, 3])
def test_sets_and_processes_have_rows_of_their_own(seed):
    whole = RolloutBatches(documents(), 4, SEGMENT, ROLLOUT, seed)
    parts = [RolloutBatches(documents(), 1, SEGMENT, ROLLOUT, seed, sets=2) for _ in range(2)]
    for rank, part in enumerate(parts):
        part.process = rank, 2
    assert [len(whole), *map(len, parts)] == [3, 6, 6]  # 28 segments by four rows, three at a time
    for index in range(5):
        for name in ("input_ids", "targets", "resets"):
            rows = [part[2 * index + number][name] for part in parts for number in range(2)]
            assert torch.equal(torch.cat(rows), whole[index][name])


def test_batches_go_on_from_a_saved_place():
    """With a seed in the next epoch; without one they begin again."""
    for seed in (0, None):
        made, other = (RolloutBatches(documents(), 2, SEGMENT, ROLLOUT, seed) for _ in range(2))
        assert [batch["index"] for batch in made] == list(range(5))
        second, start = iter(made), 5 if seed == 0 else 0
        assert [next(second)["index"] for _ in range(2)] == [start, start + 1]
        other.load_state_dict(made.state_dict())
        assert [batch["index"] for batch in other] == list(range(start + 2, start + 5))
        assert next(iter(other))["index"] == 2 * start
        assert next(iter(made))["index"] == (start + 2 if start else 0)


def test_padding_of_documents_is_left_out():
    """As a tokenizer pads them, on either side, with labels; a document that is all padding but a token is none."""
    data = documents()[:3]
    padded = []
    for i, one in enumerate(data):
        ids = list(one["input_ids"])
        labels = [-100, *ids[1:]]
        ends = (3, 0) if i % 2 else (0, 5)
        found = {"input_ids": ids, "labels": labels, "attention_mask": [1] * len(ids)}
        padded.append({k: [-100 if k == "labels" else 0] * ends[0] + v + [0] * ends[1] for k, v in found.items()})
    for values in padded[2].values():
        values[4:4] = [0, 0]  # and in between
    padded += [{"input_ids": [0] * 9, "attention_mask": [k == at for k in range(9)]} for at in (9, 8)]
    plain, cleaned = (RolloutBatches(one, 2, SEGMENT, ROLLOUT, seed=None) for one in (data, padded))
    assert len(plain) == len(cleaned)
    for mine, theirs in zip(cleaned, plain, strict=True):
        for name in {*mine, *theirs}:
            assert torch.equal(torch.as_tensor(mine[name]), torch.as_tensor(theirs[name])), name


@pytest.mark.parametrize("advances", [False, True])
def test_the_states_of_every_set_go_on_without_gradient(advances):
    """A sum that decays, of what a row has read of its document, beside one graph for each batch."""
    batches = RolloutBatches(documents(), 1, SEGMENT, 2, 1, 2)
    weight = torch.nn.Parameter(torch.tensor(0.9))

    def advance(segment, state):
        return weight * (0 if state is None else state) + segment.input_ids.sum(1) / 30

    def step(segment, state):
        state = advance(segment, state)
        return (state * (segment.targets >= 0).sum(1)).sum(), state

    rows, states = RowStates(batches), [None, None]
    for index in range(7):
        total, state = 0, states[index % 2]
        for t, segment in enumerate(segments(batches[index], SEGMENT)):
            state = None if state is None else state * ~batches[index]["resets"][:, t]
            loss, state = step(segment, state)
            total = total + loss
        (expected,) = torch.autograd.grad(total, weight)
        weight.grad = None
        found = rows.backward(step, batches[index], advance if advances else None)
        torch.testing.assert_close((found, weight.grad), (total.detach(), expected))
        states[index % 2] = state.detach()
    again = RowStates(batches)
    again.restore(rows.state_dict(), lambda: torch.zeros(1), torch.device("cpu"))
    again.follow()
    following = next(iter(batches))
    assert following["index"] == 7
    assert again.read(step, following) == rows.read(step, following)
    assert not rows.read(step, batches[8]).requires_grad
    refuses("expected batch 9 of the rows, .* found batch 8", rows.read, step, batches[8])
    assert again.read(step, batches[0]) == RowStates(batches).read(step, batches[0])  # all rows begin again


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ([{"text": "a b"}], "found dict; tokenise"),
        ([{"input_ids": "a b"}], "found .*; tokenise the text first"),
        (torch.arange(9), "found Tensor"),
        ({"input_ids": [[1, 2]]}, "found dict; give a list"),
        (iter([]), "length"),
        ([[1, 2], [[1, 2]]], "document 1: .* found a list of lists"),
        ([torch.ones(1, 9, dtype=torch.int64)], r"found \[1, 9\]"),
        ([[0.5, 1.5]], r"document 0: .* of integers, found torch.float32 \(2,\)"),
        ([{"input_ids": [5, 6, 7], "labels": [[5], [6], [7]]}], r"found torch.int64 \(3, 1\)"),
        ([{"input_ids": [5, 6, 7], "labels": [5, 6]}], "2 labels and 3 ids"),
        ([{"input_ids": [5, 6, 7], "attention_mask": [1, 0]}], "2 attention_mask and 3 ids"),
        ([[5], []], "at least two tokens, found none among 2"),
    ],
)
def test_other_data_are_refused(data, said):
    refuses(said, lambda: RolloutBatches(data, 1, SEGMENT)[0])


@pytest.mark.parametrize("name", ["rows", "segment", "rollout", "sets"])
def test_settings_below_one_are_refused(name):
    for value in (0, 1.5):
        sizes = {"rows": 1, "segment": 4, name: value}
        refuses(f"{name}: expected a whole number of at least 1, found {value};", RolloutBatches, documents(), **sizes)
