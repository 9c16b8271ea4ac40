import pytest
import torch
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


class _Damaged(Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, row):
        raise RuntimeError("row 0 cannot be read")


def test_an_error_of_the_data_in_a_worker_is_their_own():
    with pytest.raises(RuntimeError, match="row 0 cannot be read") as error:
        list(source(DataLoader(_Damaged(), num_workers=1)).once(1))
    assert not isinstance(error.value, InputError)
