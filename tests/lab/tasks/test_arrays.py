import numpy as np
import pytest
import torch

from mnemos.lab.tasks.arrays import ArrayTask, Rows


def ragged(count, seed=0, longest=9):
    random = np.random.default_rng(seed)
    lengths = random.integers(1, longest + 1, count)
    return Rows.ragged(
        random.integers(1, 7, lengths.sum()).astype(np.uint8), lengths, (np.arange(count) % 3).astype(np.uint8)
    )


def test_a_batch_is_padded_at_its_end():
    rows = Rows.ragged(np.array([1, 2, 3, 4, 5, 6], np.uint8), np.array([3, 1, 2]), np.array([0, 1, 2], np.uint8))
    batch = rows.batch(np.array([2, 0, 1, 0]))
    assert batch.inputs.tolist() == [[5, 6, 0], [1, 2, 3], [4, 0, 0], [1, 2, 3]]
    assert batch.mask.tolist() == [[True, True, False], [True] * 3, [True, False, False], [True] * 3]
    assert batch.targets.tolist() == [2, 0, 1, 0]
    assert rows.batch(np.array([0, 0])).mask is None


@pytest.mark.parametrize("bucketed", [True, False])
@pytest.mark.parametrize("batch_size", [1, 4, 50])
def test_evaluation_visits_every_row_once(bucketed, batch_size):
    rows = ragged(13, 2)
    made = ArrayTask({"train": ragged(50), "test": rows}, vocab_size=7, classes=3, max_length=9, bucketed=bucketed)
    expected = sorted((rows.row(i).tolist(), int(rows.labels[i])) for i in range(13))
    found = []
    for batch in made.batches("test", batch_size):
        mask = torch.ones_like(batch.inputs, dtype=torch.bool) if batch.mask is None else batch.mask
        found += [(x[m].tolist(), int(y)) for x, y, m in zip(batch.inputs, batch.targets, mask, strict=True)]
    assert sorted(found) == expected
    lengths = [len(x) for x, _ in found]
    assert lengths == (sorted(lengths) if bucketed else rows.lengths.tolist())
