"""The results of `mnemos bench-memory`: bytes of state, names in figures, and memories that did not learn."""

import itertools
from dataclasses import replace

import pytest
from matplotlib.figure import Figure

from mnemos.lab.bench import run
from mnemos.lab.bench.labels import Box, Point, label
from mnemos.lab.bench.measurements import most_bytes
from mnemos.lab.bench.memories import Sizes
from mnemos.lab.bench.page import unlearned
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


def test_names_cover_neither_each_other_nor_points_nor_lines():
    axes = Figure(figsize=(3.5, 2.3)).add_axes((0.12, 0.12, 0.85, 0.75))
    axes.set_xscale("log", base=2)
    axes.set_xlim(16, 512)
    axes.set_ylim(-0.14, 1.03)
    points = [Point(f"a memory {i}", 60 + i, 0.03, 0.01) for i in range(8)] + [Point("the best", 500, 1.0, 0.02)]
    boxes = label(axes, points, [0.03])
    assert len(boxes) == len(points)
    assert not any(one.meets(other) for one, other in itertools.combinations(boxes, 2))
    scale = 72 / axes.figure.dpi
    for point in points:
        x, y = axes.transData.transform((point.x, point.y)) * scale
        assert not any(box.meets(Box(x - 1, y - 1, x + 1, y + 1)) for box in boxes)
    _, guess = axes.transData.transform((20, 0.03)) * scale
    assert not any(box.low < guess < box.high for box in boxes)
    assert axes.texts[0].get_text() == "the best"


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
