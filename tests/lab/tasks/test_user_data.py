import pytest
import torch
from torch.utils.data import DataLoader, Dataset, SequentialSampler, SubsetRandomSampler

from mnemos.lab.tasks.batch import IGNORE, Batch
from mnemos.lab.tasks.user_data import BatchSource, OwnTask, RowSource, source
from mnemos.types import InputError


class Noisy(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.rand(2), index


def test_what_a_data_set_draws_is_a_function_of_seed_and_batch():
    draws = {key: source(Noisy()).batch(key[0], 8, key[1]).inputs for key in ((0, 0), (1, 0), (0, 1))}
    assert torch.equal(draws[0, 0], source(Noisy()).batch(0, 8, 0).inputs)
    assert len(torch.stack([*draws.values()]).flatten(1).unique(dim=0)) == 3


@pytest.mark.parametrize(
    ("options", "cls"),
    [
        ({}, RowSource),
        ({"shuffle": True}, RowSource),
        ({"sampler": SequentialSampler(range(4))}, RowSource),
        ({"sampler": SubsetRandomSampler([1, 3])}, BatchSource),  # its order and choice are the loader's own
    ],
)
def test_rows_are_read_one_by_one_where_the_loaders_order_is_known(options, cls):
    assert type(source(DataLoader(torch.arange(4), **options))) is cls


class _Labelled(torch.nn.Module):
    def forward(self, input_ids, labels):
        raise NotImplementedError


@pytest.mark.parametrize(
    ("model", "loss", "count"),
    [
        (torch.nn.Linear(5, 5), None, 8),
        (torch.nn.Linear(5, 5), torch.nn.MSELoss(), 2),
        (_Labelled(), None, 8),
    ],
)
def test_a_callers_loss_is_a_mean_over_rows_and_others_over_targets(model, loss, count):
    x = torch.ones(2, 5)
    targets = x.long()
    targets[0, :2] = IGNORE
    batch = Batch({"input_ids": x} if isinstance(model, _Labelled) else x, targets)
    assert OwnTask(model, source([batch]), source([batch]), 2, loss).count(batch) == count


def test_a_loaders_own_batches_are_evaluated():
    """Their rows may carry a state."""
    task = OwnTask(torch.nn.Linear(1, 1), source([Batch(torch.ones(1, 1), torch.ones(1))]), source(DataLoader(
        torch.utils.data.TensorDataset(torch.ones(5, 1), torch.ones(5)), 2)), 4, torch.nn.MSELoss())  # fmt: skip
    assert [len(batch.targets) for batch in task.batches("valid", 4)] == [2, 2, 1]


class _Damaged(Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, row):
        raise RuntimeError("row 0 cannot be read")


def test_an_error_of_the_data_in_a_worker_is_their_own():
    with pytest.raises(RuntimeError, match="row 0 cannot be read") as error:
        list(source(DataLoader(_Damaged(), num_workers=1)).once(1))
    assert not isinstance(error.value, InputError)
