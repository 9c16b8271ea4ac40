"""The results of `mnemos bench-memory`: bytes of state, and memories that did not learn."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from mnemos.lab.bench import run
from mnemos.lab.bench.memories import Sizes
from mnemos.lab.bench.page import _cells, _head, unlearned
from mnemos.lab.bench.run import most_bytes
from mnemos.lab.bench.tasks import BENCHMARKS
from mnemos.lab.run.checks import complete
from mnemos.lab.tasks.recall import MQARConfig

SMALL = replace(BENCHMARKS["mqar"], data=MQARConfig(16, 2, 16, rows=2), sizes=Sizes(8, 4, 2, 1, 0))
KEYS_AND_VALUES = 2 * 2 * 8 * 4  # bytes per token, of 2 layers, 8 channels in float32


@pytest.mark.parametrize(
    ("memory", "at_segments", "tokens"),
    [("softmax", 16 * KEYS_AND_VALUES, 0), ("window", 3 * KEYS_AND_VALUES, 0), ("rmt", 4 * 8 * 4, 4 + 3)],
)
def test_state_counts_keys_and_values_within_a_segment(memory, at_segments, tokens):
    # A window of 4 reads 3 earlier tokens. An RMT keeps 4 memory tokens, and within a segment of 4 the keys and values
    # of them and of 3 tokens. Marks and counters are less than 100 bytes.
    task = SMALL.data.build()
    recipe = complete(run.recipe(memory, SMALL, 1e-3, 0), task)
    model = recipe.model.build().eval()
    between = most_bytes(model, task, recipe.train.rollout.segment_length)
    assert 0 <= between - at_segments < 100
    assert 0 <= most_bytes(model, task, 1) - between - tokens * KEYS_AND_VALUES < 100


class Reader(nn.Module):
    """Answers the first or the last value that followed a key in the row."""

    def __init__(self, last):
        super().__init__()
        self.last, self.unused = last, nn.Parameter(torch.zeros(()))

    def forward(self, x, state=None, mask=None):
        logits = torch.zeros(*x.shape, 64)
        for row, tokens in zip(logits, x.tolist(), strict=True):
            held = {}
            for t, (token, following) in enumerate(zip(tokens, [*tokens[1:], 0], strict=True)):
                if 0 < token < 32 <= following and (self.last or token not in held):
                    held[token] = following
                row[t, held.get(token, 0)] = 1
        return logits, state


@pytest.mark.parametrize(("last", "found"), [(True, [1.0, 1.0, 1.0, 0.0]), (False, [0.5, 0.5, 0.0, 1.0])])
def test_answers_with_old_values_are_counted(last, found, monkeypatch, tmp_path):
    whole = BENCHMARKS["mqar-rewritten"]
    benchmark = replace(whole, data=replace(whole.data, rows=30), beyond=({"length": 96},))
    monkeypatch.setattr(run, "read_recipe", lambda folder: run.recipe("softmax", benchmark, 1e-3, 0))
    monkeypatch.setattr(run, "trained_model", lambda folder, recipe: Reader(last))
    monkeypatch.setattr(run, "_state", lambda folder: {})
    monkeypatch.setattr(run, "_controls", lambda runs: {})
    for _ in range(2):  # measured, and read again
        measured = run.measure_runs([tmp_path], benchmark)
        assert [one["mean"] for one in [*measured["beyond"], *measured["beside"].values()]] == found
        monkeypatch.setattr(run, "trained_model", None)
    assert [*measured["beside"]] == ["rewritten keys", "their old values"]
    row = {"name": "a", "mean": 0.5, "std": None, "rate": 1e-3, "state_bytes": 1, "segment_state_bytes": 1}
    row |= {"parameters": 1, "flops": 1, "seconds": 1.0, **measured}
    assert _cells(row)[-2:] == [f"{value:.3f}" for value in found[2:]]
    assert len(_cells(row)) == len(_head({"rows": [row]}))


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([("a", 0.5, 0.1), ("b", 0.9, None)], ""),
        (
            [("a", 0.24, 0.1), ("b", 0.9, 0.0)],
            "Not learned: a. A task counts as learned if the score is above that of guessing (0.125)",
        ),
        ([("a", 0.25, 0.01), ("b", 0.14, None)], "Not learned: b. "),
        ([("a", 0.12, 0.01), ("b", 0.9, 0.1), ("c", 0.13, 0.1)], "Not learned: a and c. "),
        ([("a", 0.12, 0.01), ("b", 0.1, 0.1)], "Not learned: every memory. "),
    ],
)
def test_memories_that_did_not_learn_are_named(rows, said):
    entry = {
        "keyless": 0.0,
        "chance": 0.125,
        "rows": [{"name": name, "mean": mean, "std": std} for name, mean, std in rows],
    }
    assert unlearned(entry).startswith(said)
    assert bool(unlearned(entry)) == bool(said)


def test_a_score_that_needs_no_key_is_not_learned():
    rows = [{"name": name, "mean": mean, "std": 0.0} for name, mean in (("a", 0.36), ("b", 0.9), ("c", 0.2))]
    entry = {"keyless": 0.0, "chance": 0.125, "rows": rows}
    assert unlearned(entry) == ""
    known = unlearned(entry | {"keyless": 0.355})
    assert known.startswith("Not learned: a and c. ")
    assert "above that of ignoring what is asked (0.355)" in known
