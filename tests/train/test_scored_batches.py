"""Which rows a quick run scores: the same for every seed and model, and a random part where the order is not random."""

from dataclasses import replace

import torch

from mnemos.data.batch import Batch
from mnemos.data.task import Task
from mnemos.train.progress import NoProgress
from mnemos.train.recipe import TrainConfig
from mnemos.train.scored_batches import part, scored_batches


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


def numbers(task: Task, rows: int, batch_size: int = 4) -> list[int]:
    return [n for batch in part(task, "test", batch_size, rows) for n in batch.targets.tolist()]


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
