"""The results of `mnemos bench-memory`: bytes of state, and memories that did not learn."""

from dataclasses import replace

import pytest

from mnemos.lab.bench import run
from mnemos.lab.bench.memories import Sizes
from mnemos.lab.bench.page import unlearned
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
    entry = {"chance": 0.125, "rows": rows}
    assert unlearned(entry) == ""
    known = unlearned(entry | {"keyless": 0.355})
    assert known.startswith("Not learned: a and c. ")
    assert "above that of ignoring what is asked (0.355)" in known
