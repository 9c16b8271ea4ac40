"""Which rows a quick run scores: the same for every seed and model, and a random part where the order is not random."""

from dataclasses import replace

import pytest
import torch
from trained_runs import texts

from mnemos.lab.compare.equal import scored_alike
from mnemos.lab.run.checks import complete
from mnemos.lab.run.progress import NoProgress
from mnemos.lab.run.recipe import Recipe, RolloutConfig, TrainConfig
from mnemos.lab.run.scored_batches import part, scored_batches
from mnemos.lab.tasks.batch import Batch
from mnemos.lab.tasks.task import Task
from mnemos.lab.tasks.text import TextConfig
from mnemos.models.lstm import LSTMConfig


class Numbered(Task):
    """40 rows that hold their own number, in batches; streams: batches say which rows are reset."""

    def __init__(self, shuffled: bool = False, streams: bool = False) -> None:
        self.shuffled, self.streams = shuffled, streams

    def batches(self, split, batch_size):
        for rows in torch.arange(40).split(batch_size):
            reset = torch.zeros(len(rows), dtype=torch.bool) if self.streams else None
            yield Batch(rows[:, None], rows, None, reset)

    def size(self, split):
        return 40


def numbers(task: Task, rows: int) -> list[int]:
    return [n for batch in part(task, "test", 4, rows) for n in batch.targets.tolist()]


def test_a_part_is_random_and_always_the_same():
    found = numbers(Numbered(), 10)
    assert len(found) == 12  # whole batches of four
    assert found == sorted(found) == numbers(Numbered(), 10)
    assert found != list(range(12))
    assert set(numbers(Numbered(), 6)) < set(found)
    assert numbers(Numbered(), 1000) == list(range(40))


def test_the_first_rows_are_taken_of_a_random_order_and_of_streams():
    assert numbers(Numbered(shuffled=True), 10) == list(range(12))
    assert numbers(Numbered(streams=True), 10) == list(range(12))


def scored(split: str, config: TrainConfig) -> list[int]:
    return [n for batch in scored_batches(Numbered(), split, config, NoProgress()) for n in batch.targets.tolist()]


def test_each_split_has_its_own_number_of_rows():
    config = TrainConfig(batch_size=4, valid_rows=4, test_rows=0)
    assert len(scored("valid", config)) == 4
    assert len(scored("test", config)) == 40
    assert scored("valid", replace(config, seed=1, steps=7)) == scored("valid", config)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    data = TextConfig(texts(tmp_path_factory.mktemp("text") / "texts", "abcdefghijkl"), segment=32)
    train = TrainConfig(steps=6, batch_size=2, eval_every=4, valid_rows=-1, test_rows=-1)
    return Recipe(LSTMConfig(vocab_size=0, dim=8, layers=1), data, train=train, name="a")


def of(recipe: Recipe, **train) -> Recipe:
    return replace(recipe, train=replace(recipe.train, **train))


def rows(recipe: Recipe) -> tuple[int, int]:
    return recipe.train.valid_rows, recipe.train.test_rows


def test_a_short_run_scores_no_more_than_it_trains(text):
    task = text.data.build()
    held = {split: [len(batch.inputs) for batch in task.batches(split, 2)] for split in ("valid", "test")}
    assert {split: task.rows_of_batches(split, 2) for split in held} == held
    assert rows(complete(text, task)) == (8, 6)  # updates of 2 rows: 4 between evaluations, and half of all 6
    assert rows(complete(of(text, rollout=RolloutConfig(segments=3), eval_every=1), task)) == (6, 18)
    assert rows(complete(of(text, steps=5000, eval_every=500), task)) == (0, 0)
    assert rows(complete(of(text, valid_rows=3, test_rows=0), task)) == (3, 0)


def test_all_recipes_of_a_comparison_are_scored_on_the_same_rows(text):
    longer = replace(of(text, steps=8), name="b")
    fixed, partly = of(text, valid_rows=3, test_rows=0), of(longer, test_rows=4)
    assert scored_alike([fixed]) == [fixed]
    for compared, expected in (
        ([text, longer], (8, 6)),
        ([text, of(longer, batch_size=4)], (0, 0)),
        ([text, partly], (8, 4)),
        ([partly, text], (8, 4)),
    ):
        assert [rows(one) for one in scored_alike(compared)] == [expected] * 2
