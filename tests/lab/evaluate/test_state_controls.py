"""The controls of a state, for every kind of memory, against a reading row by row; and where they have no meaning."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from mnemos import GRC, Memformer, SlotsConfig, Transformer
from mnemos.attention import LinearConfig, RelativeConfig, SoftmaxConfig
from mnemos.lab.evaluate import controls
from mnemos.lab.evaluate.controls import ROWS, SEGMENTS, WHOLE
from mnemos.lab.evaluate.recorded import ControlledMemory, Left, ScoredSegments, StateControls
from mnemos.lab.evaluate.records import to_json
from mnemos.lab.tasks.batch import IGNORE, Batch
from mnemos.lab.tasks.metrics import ACCURACY, TOP5
from mnemos.lab.tasks.recall import RecallConfig
from mnemos.lab.tasks.task import SPLITS, Task
from mnemos.lab.tasks.token_task import SegmentedTask
from mnemos.models.lstm import LSTM, LSTMConfig
from mnemos.models.transformer import HeadConfig

T, VOCABULARY = 4, 11
SIZES = {"vocab_size": VOCABULARY, "dim": 8, "layers": 2, "num_heads": 2, "mlp": 8, "max_length": T}


def state_controls(*arguments, **options):
    """What the controls score, as JSON."""
    return to_json(controls.state_controls(*arguments, **options))


def transformer(**fields):
    return Transformer(**SIZES, **fields)


def memformer(**slots):
    sizes = {"vocab_size": VOCABULARY, "dim": 8, "num_heads": 2, "mlp": 8, "encoder_layers": 1, "decoder_layers": 1}
    return Memformer(segment=T, memory=SlotsConfig(slots=3, **slots), **sizes)


MODELS = {
    "keys and values": lambda: transformer(attention=SoftmaxConfig(window=6)),
    "sums": lambda: transformer(attention=LinearConfig()),
    "segments": lambda: transformer(attention=RelativeConfig(memory=6), position="none"),
    "hidden state": lambda: LSTM(LSTMConfig(vocab_size=VOCABULARY, dim=8, layers=2)),
    "cache": lambda: transformer(attention=LinearConfig(), cache=GRC(length=2, block=2, scope="stream")),
    "slots": memformer,
}
NAMES = {"cache": [WHOLE, "sums", "cache"], "slots": [WHOLE, "slots"]}


def built(name):
    torch.manual_seed(0)
    model = MODELS[name]()
    with torch.no_grad():  # so large that the memory matters
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.5)
    return model.eval()


def task(*lengths, start=0):
    """A task whose test split has documents of these lengths."""
    random = np.random.default_rng(start)
    documents = [random.integers(1, VOCABULARY, n) for n in lengths]
    return SegmentedTask(dict.fromkeys(SPLITS, documents), VOCABULARY, T)


def part_of(state, name, model):
    """(the changed part's value for a row, how to put another in its place), written per model and not by tree."""
    if name == "slots":
        return state.memory, lambda new: state._replace(memory=new)
    if name == "cache":
        walks = [layer.updates for layer in state.layers]
        return walks, lambda new: state._replace(
            layers=tuple(layer._replace(updates=w) for layer, w in zip(state.layers, new, strict=True))
        )
    if name == "sums" and model.config.cache is not None:
        sums = [layer.inner.sums for layer in state.layers]
        return sums, lambda new: state._replace(
            layers=tuple(
                layer._replace(inner=layer.inner._replace(sums=s)) for layer, s in zip(state.layers, new, strict=True)
            )
        )
    return state, lambda new: new


@torch.no_grad()
def by_rows(model, given, memory, control):
    """Mean loss of segments 2, 3, … with the change, one row at a time: a different program for the same numbers."""
    batches = list(given.batches("test", ROWS))
    rows = range(len(batches[0].inputs))
    carried = {}
    for row in rows:
        state = None
        for i, batch in enumerate(batches):
            _, state = model(batch.inputs[row : row + 1], state)
            carried[row, i + 1] = state
    losses = []
    for row in rows:
        state = carried[row, 1]
        for i, batch in enumerate(batches[1:], start=1):
            source = {
                "emptied": model.initial_state(1),
                "exchanged": carried[(row - 1) % len(rows), i],
                "frozen": carried[row, 1],
                "carried": state,
            }[control]
            state = part_of(state, memory, model)[1](part_of(source, memory, model)[0])
            logits, state = model(batch.inputs[row : row + 1], state)
            losses.append(F.cross_entropy(logits[0], batch.targets[row]).item())
            if memory == WHOLE:
                state = carried[row, i + 1]
    return sum(losses) / len(losses)


@pytest.mark.parametrize("kind", MODELS)
def test_each_control_reads_what_it_says(kind):
    model, given = built(kind), task(4 * T, 4 * T, 4 * T)
    before = [tensor.clone() for tensor in model.state_dict().values()]
    model.train()
    random = torch.get_rng_state()
    found = state_controls(model, given)
    assert model.training
    assert torch.equal(random, torch.get_rng_state())
    assert all(torch.equal(a, b) for a, b in zip(before, model.state_dict().values(), strict=True))
    model.eval()
    assert (found["left"], found["rows"], found["segments"], found["targets"]) == (None, 3, [2, 3, 4], 9 * T)
    assert [entry["name"] for entry in found["memories"]] == NAMES.get(kind, [kind])
    carried = by_rows(model, given, WHOLE, "carried")
    assert found["carried"]["scores"]["loss"] == pytest.approx(carried, rel=1e-4)
    for entry in found["memories"]:
        for control in ("emptied", "exchanged", "frozen"):
            scores = entry[control]["scores"]
            assert scores["loss"] == pytest.approx(by_rows(model, given, entry["name"], control), rel=1e-4), control
            assert abs(scores["loss"] - carried) > 1e-4, "the weights are large enough for a change to matter"
            assert np.mean(entry[control]["by_segment"]) == pytest.approx(scores[found["metric"]], rel=1e-4)


def test_a_memory_that_is_never_written_changes_nothing_when_it_is_changed():
    torch.manual_seed(0)
    found = state_controls(memformer(write=False).eval(), task(4 * T, 4 * T))
    slots = found["memories"][1]
    assert {slots[control]["scores"]["loss"] for control in ("emptied", "exchanged", "frozen")} == {
        found["carried"]["scores"]["loss"]
    }


def test_a_model_that_says_nothing_of_its_state_and_returns_none_keeps_none():
    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(VOCABULARY, VOCABULARY)

        def forward(self, x, state=None, mask=None):
            return self.table(x), None

    assert state_controls(Plain(), task(3 * T, 3 * T)) == {"left": "the model keeps no state"}


def test_rows_that_end_leave_the_reading():
    """Three documents of 5, 4 and 2 segments: from segment 2, 2, 1 and 1 rows go on, and a single row is not read."""
    found = state_controls(built("hidden state"), task(5 * T, 4 * T - 1, 2 * T))
    assert found["segments"] == [2, 3, 4]
    assert found["targets"] == 3 * T + 2 * T + (2 * T - 1)
    assert found["rows"] == 3


def test_reading_stops_after_enough_segments(monkeypatch):
    found = state_controls(built("hidden state"), task(*[40 * T] * 9))
    assert found["segments"] == list(range(2, SEGMENTS + 1))
    assert found["rows"] == ROWS
    monkeypatch.setattr(controls, "READ", 10)  # also within a rollout of very many
    documents = [np.arange(80) % (VOCABULARY - 1) + 1] * 2
    long = SegmentedTask(dict.fromkeys(SPLITS, documents), VOCABULARY, 40)  # 40 segments of one token a batch
    assert state_controls(built("hidden state"), long, segment_length=1)["segments"] == list(range(2, 11))


def test_rows_that_are_read_in_one_call_are_cut():
    """Associative recall in one call: the answer is at the end, and the pairs are in the first of four pieces."""
    given = RecallConfig(pairs=2, symbols=4, queries=1, distance=10, rows=16).build()
    model = Transformer(vocab_size=given.vocab_size, dim=8, layers=1, num_heads=2, mlp=8, max_length=given.max_length)
    found = state_controls(model, given)
    assert (found["cut"], found["metric"]) == (4, "accuracy")
    assert found["segments"] == [4]
    assert found["targets"] == 16
    scores = found["carried"]["scores"]
    with torch.no_grad():
        batch = next(given.batches("test", 16))
        whole = F.cross_entropy(model.eval()(batch.inputs)[0].flatten(0, 1), batch.targets.flatten())
    assert scores["loss"] == pytest.approx(whole.item(), rel=1e-5)
    assert found["memories"][0]["frozen"]["scores"] != scores


class Advancing(Transformer):
    """A model that reads segments without a counted target by `advance`."""

    def forward(self, x, state=None, mask=None):
        self.whole = getattr(self, "whole", 0) + 1
        return super().forward(x, state, mask)

    def advance(self, x, state=None, mask=None):
        return Transformer.forward(self, x, state, mask)[1]


def test_segments_without_targets_are_read_by_advance_and_changed_too():
    given = RecallConfig(pairs=2, symbols=4, queries=1, distance=10, rows=4).build()
    settings = SIZES | {"vocab_size": given.vocab_size, "attention": LinearConfig()}
    found = []
    for kind in (Transformer, Advancing):
        torch.manual_seed(0)
        model = kind(**settings, cache=GRC(length=2, block=2, scope="stream"))
        found.append(state_controls(model, given, "test", segment_length=4))
    assert found[0] == found[1]
    # One batch of 4 segments; the last has the target: read as carried, and in 3 memories under 3 controls.
    assert model.whole == 1 + 9
    cache = found[0]["memories"][-1]
    assert cache["emptied"]["scores"]["loss"] != found[0]["carried"]["scores"]["loss"]


class Counting(nn.Module):
    """A model of another package: its state has no name, it declares nothing, and it draws random numbers."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(VOCABULARY, VOCABULARY))

    def forward(self, x, state=None, mask=None):
        state = {"sum": x.new_zeros(len(x), VOCABULARY, dtype=torch.float32)} if state is None else state
        seen = state["sum"] + F.one_hot(x, VOCABULARY).float().sum(1) + 0 * torch.rand(1)
        return (state["sum"] @ self.weight)[:, None].expand(-1, x.shape[1], -1), {"sum": seen}


class OneCall(Task):
    """Rows that end with their batch, and whose task cannot cut them."""

    metrics = ()

    def batches(self, split, batch_size):
        yield Batch(torch.ones(2, T, dtype=torch.int64), torch.ones(2, T, dtype=torch.int64))


class Silent(SegmentedTask):
    """A task that counts the targets of one segment of a row alone; with `alone`, rows are in batches of their own."""

    scored, alone = 0, False

    def batches(self, split, batch_size):
        for i, batch in enumerate(super().batches(split, 1 if self.alone else batch_size)):
            kept = batch.targets if i % 4 == self.scored else torch.full_like(batch.targets, IGNORE)
            yield batch._replace(targets=kept)


def test_a_state_without_a_name_is_changed_as_a_whole():
    torch.manual_seed(0)
    model = Counting()
    random = torch.get_rng_state()
    found = state_controls(model, task(3 * T, 3 * T))
    assert torch.equal(torch.get_rng_state(), random)
    assert [entry["name"] for entry in found["memories"]] == [WHOLE]
    losses = {found["memories"][0][control]["scores"]["loss"] for control in ("emptied", "exchanged", "frozen")}
    assert len({*losses, found["carried"]["scores"]["loss"]}) == 4


def test_where_a_control_has_no_meaning_the_result_says_why():
    plain = transformer(causal=False, head=HeadConfig(classes=2))
    assert "keeps no state" in state_controls(plain, task(3 * T))["left"]
    assert "one call" in state_controls(built("sums"), OneCall())["left"]
    documents = [np.ones(4 * T, np.int64)] * 2
    silent = Silent(dict.fromkeys(SPLITS, documents), VOCABULARY, T)
    assert "no segment that was read after a row's first" in state_controls(built("sums"), silent)["left"]
    longer = Silent(dict.fromkeys(SPLITS, [np.ones(8 * T, np.int64)] * 2), VOCABULARY, T)
    longer.scored = 3
    assert state_controls(built("sums"), longer, segments=2)["segments"] == [4, 8], "those that are scored count"
    silent.scored = 1  # of four segments, so that it is not said that a row has two
    (second,) = state_controls(built("sums"), silent)["memories"]
    assert "second segments alone were scored" in second["frozen"]["left"]
    silent.scored, silent.alone = 2, True  # of two rows, so that it is not said that there is one
    (alone,) = state_controls(built("sums"), silent)["memories"]
    assert "one at a time" in alone["exchanged"]["left"]
    assert "scores" in alone["frozen"]
    (short,) = state_controls(built("sums"), task(2 * T, 2 * T))["memories"]
    assert "second segments alone" in short["frozen"]["left"]
    assert "scores" in short["exchanged"]


def test_what_was_measured_as_lines():
    def scored(accuracy):
        return ScoredSegments({"loss": 2 * accuracy, "accuracy": accuracy}, np.zeros(3))

    given = Task()
    given.metrics = (TOP5, ACCURACY)
    slots = ControlledMemory("slots", scored(0.25), Left("with no other row"), scored(0.75))
    measured = StateControls(3, (2, 3, 5), 9, "accuracy", scored(0.5), (slots,))
    assert controls.control_lines(measured, given) == [
        "  state, segments 2 to 5 of 3 rows at once:",
        "    as carried       accuracy 0.5000",
        "    slots emptied    accuracy 0.2500 (-0.2500)  replaced by that of a new row",
        "    slots exchanged  with no other row",
        "    slots frozen     accuracy 0.7500 (+0.2500)  replaced by the row's own after its first segment",
    ]
    first, second, *_ = controls.control_lines(replace(measured, rows=1, segments=(2,), metric="loss"), given)
    assert (first, second) == ("  state, segment 2 of 1 row:", "    as carried       loss 1.0000")
    assert controls.control_lines(Left("why"), given) == ["  state: why"]
