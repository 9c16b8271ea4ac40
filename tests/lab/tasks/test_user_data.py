from types import SimpleNamespace

import pytest
import torch
from refusals import refuses
from torch.utils.data import DataLoader, Dataset, SequentialSampler, SubsetRandomSampler

from mnemos.lab.tasks.batch import Batch
from mnemos.lab.tasks.user_data import BatchSource, OwnTask, RowSource, source
from mnemos.types import InputError


@pytest.mark.parametrize(
    ("options", "cls"),
    [
        ({"shuffle": True}, RowSource),
        ({"sampler": SequentialSampler(range(4))}, RowSource),
        ({"sampler": SubsetRandomSampler([1, 3])}, BatchSource),  # its order and choice are the loader's own
    ],
)
def test_rows_are_read_one_by_one_where_the_loaders_order_is_known(options, cls):
    assert type(source(DataLoader(torch.arange(4), **options))) is cls


def test_a_loaders_own_batches_are_evaluated():
    """Their rows may carry a state."""
    task = OwnTask(torch.nn.Linear(1, 1), source([Batch(torch.ones(1, 1), torch.ones(1))]), source(DataLoader(
        torch.utils.data.TensorDataset(torch.ones(5, 1), torch.ones(5)), 2)), 4, torch.nn.MSELoss())  # fmt: skip
    assert [len(batch.targets) for batch in task.batches("valid", 4)] == [2, 2, 1]


def test_batches_of_an_iterable_are_read_pass_after_pass():
    read = source([(torch.full((2, 1), i), torch.full((2,), i)) for i in range(3)])
    assert [int(read.batch(i, 2, 0).inputs[0]) for i in (7, 8, 1, 0, 0, 3, 4)] == [1, 2, 1, 0, 0, 0, 1]
    assert (read.epoch(2), read.described()) == (3.0, "builtins.list of 3 batches")


def test_a_loss_is_a_mean_over_rows_or_over_labels():
    class Own(torch.nn.Module):
        def forward(self, input_ids, attention_mask=None, labels=None): ...

    ids, labels = torch.ones(2, 3, dtype=torch.int64), torch.tensor([[5, -100, 3], [4, -100, -100]])
    for targets, mask, loss, count, tokens in (
        (labels, ids * torch.tensor([0, 1, 1]), 1.5, 3, 4),
        (torch.ones(2), ids[:, :2], 1.0, 2, 6),  # a mask of another shape counts nothing
    ):
        data = source([{"input_ids": ids, "attention_mask": mask, "labels": targets}])
        task = OwnTask(Own(), data, data, 2)
        read = task.train_batch(0, 2, 0)
        assert float(task.loss(None, SimpleNamespace(loss=torch.tensor(0.5)), read)) == loss
        assert (task.count(read), task.tokens(read), task.unit) == (count, tokens, "tokens")
    pair = torch.ones(2, 1), torch.ones(2)
    for own, loss in ((lambda x, y: x.sum() / 4, 1.0), (lambda x, y: x[:, 0] + 1, 4.0)):
        task = OwnTask(torch.nn.Linear(1, 1), source([pair]), source([pair]), 2, own)
        assert float(task.loss(None, pair[0], task.train_batch(0, 2, 0))) == loss
    for single, words in (((torch.tensor(1.0), torch.tensor(1.0)), "without axes"), (("a", "b"), "no tensor in")):
        refuses(words, OwnTask, Own(), source([single]), source([pair]), 2)


class _Damaged(Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, row):
        raise RuntimeError("row 0 cannot be read")


def test_an_error_of_the_data_in_a_worker_is_their_own():
    with pytest.raises(RuntimeError, match="row 0 cannot be read") as error:
        list(source(DataLoader(_Damaged(), num_workers=1)).once(1))
    assert not isinstance(error.value, InputError)
