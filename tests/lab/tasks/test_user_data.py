import pickle
from types import SimpleNamespace

import pytest
import torch
from refusals import refuses
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
)

from mnemos.lab.tasks.batch import Batch
from mnemos.lab.tasks.user_data import BatchSource, OwnTask, RowSource, source
from mnemos.types import InputError


def test_rows_are_read_one_by_one_where_the_loaders_order_is_known():
    rows = torch.arange(4)
    for loader in (DataLoader(rows, shuffle=True), DataLoader(rows, sampler=SequentialSampler(range(4)))):
        assert type(source(loader)) is RowSource
    for sampler in (SubsetRandomSampler([1, 3]), RandomSampler(rows, True), RandomSampler(rows, num_samples=2)):
        assert type(source(DataLoader(rows, sampler=sampler))) is BatchSource, "order and choice are the loader's own"
        batches = BatchSampler(sampler, 2, drop_last=False)
        assert type(source(DataLoader(rows, batch_sampler=batches))) is BatchSource, "also in batches of the user's own"
    few = SequentialSampler(rows[:2])
    assert type(source(DataLoader(rows, sampler=few))) is BatchSource
    data = torch.utils.data.TensorDataset(rows, rows)
    for sampler, shuffled in ((RandomSampler(data), True), (SequentialSampler(data), False)):
        read = source(DataLoader(data, batch_sampler=BatchSampler(sampler, 3, drop_last=False)))
        assert (type(read), read.batch_size) == (RowSource, 3)
        first = [read.batch(0, 4, seed).inputs.tolist() for seed in range(4)]
        assert (first != [[0, 1, 2, 3]] * 4) == shuffled


def test_a_loaders_own_batches_are_evaluated():
    """Their rows may carry a state."""
    task = OwnTask(torch.nn.Linear(1, 1), source([Batch(torch.ones(1, 1), torch.ones(1))]), source(DataLoader(
        torch.utils.data.TensorDataset(torch.ones(5, 1), torch.ones(5)), 2)), 4, torch.nn.MSELoss())  # fmt: skip
    assert [len(batch.targets) for batch in task.batches("valid", 4)] == [2, 2, 1]


def test_batches_of_an_iterable_are_read_pass_after_pass():
    read = source([(torch.full((2, 1), i), torch.full((2,), i)) for i in range(3)])
    assert [int(read.batch(i, 2, 0).inputs[0]) for i in (7, 8, 1, 0, 0, 3, 4)] == [1, 2, 1, 0, 0, 0, 1]
    assert (read.epoch(2), read.described()) == (3.0, "builtins.list of 3 batches")


class Own(torch.nn.Module):
    def forward(self, input_ids, attention_mask=None, labels=None): ...


def test_a_loss_is_a_mean_over_rows_or_over_labels():
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


ROWS = [(torch.ones(2, 1), torch.ones(2, dtype=torch.int64))]


class _Masked(torch.nn.Linear):
    def forward(self, x, mask=None):
        return super().forward(x)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: source(7), "a data set or an iterable of batches, found int; put rows in a DataLoader"),
        (lambda: source(iter(ROWS)), "expected data that can be iterated again, found a list_iterator that ends"),
        (lambda: source([]).batch(0, 1, 0), "expected training data of at least one batch, found none"),
        (lambda: source([(1, 2, 3)]).batch(0, 1, 0), r"expected batches \(inputs, targets\), .*, found tuple;"),
        (lambda: source([{"inputs": 1}]).batch(0, 1, 0), "found a mapping with inputs; make such"),
        (lambda: source(DataLoader([])), "expected data of at least one row, found an empty list"),
    ],
)
@pytest.mark.each_value
def test_data_that_cannot_be_read_are_refused(call, words):
    refuses(words, call)


@pytest.mark.parametrize(
    ("model", "batch", "loss", "words"),
    [
        (torch.nn.Linear, Batch(*ROWS[0]), None, None),
        (torch.nn.Linear, Batch(*ROWS[0], torch.ones(2, 1)), None, "a model that takes a mask, found one without"),
        (_Masked, Batch(*ROWS[0], torch.ones(2, 1)), None, None),
        (torch.nn.Linear, Batch(ROWS[0][0], torch.ones(2)), None, "int64 for cross-entropy, found torch.float32"),
        (torch.nn.Linear, Batch(ROWS[0][0], torch.ones(2)), torch.nn.MSELoss(), None),
    ],
)
@pytest.mark.each_value
def test_batches_that_do_not_fit_the_model_or_its_loss_are_refused(model, batch, loss, words):
    task = OwnTask(model(1, 2), source([batch]), source([batch]), 2, loss)
    if words is None:
        task.check(batch, "here")
    else:
        refuses(f"^here: .*{words}", task.check, batch, "here")


def test_targets_are_the_classes_that_the_model_has():
    model, (x, _) = torch.nn.Linear(1, 3), ROWS[0]
    for targets, words in (([0, 2], None), ([-100, 2], None), ([1, 3], "found 3"), ([-1, 0], "found -1")):
        batch = Batch(x, torch.tensor(targets))
        task = OwnTask(model, source([batch]), source([batch]), 2)
        found = task.forward(model, batch, None)[0]
        if words is None:
            assert task.loss(model, found, batch).isfinite()
        else:
            refuses(f"targets 0 to 2, as the model has 3 classes, {words};", task.loss, model, found, batch)


def test_what_models_and_losses_return_must_fit():
    class Stateful(torch.nn.Module):
        def __init__(self, returned):
            super().__init__()
            self.returned = returned

        def forward(self, x, state=None):
            return self.returned

    data = source([{"input_ids": torch.ones(2, 3), "labels": torch.ones(2, 3, dtype=torch.int64)}])
    task, batch = OwnTask(Own(), data, data, 2), data.batch(0, 2, 0)
    for outputs, form in (
        (SimpleNamespace(loss=torch.ones(2)), "a SimpleNamespace"),
        (torch.ones(2, 3), r"a tensor of shape \(2, 3\)"),
        ((1, 2, 3), "a tuple of 3"),
    ):
        refuses(f"a scalar `loss` from a model .*, found {form};", task.loss, None, outputs, batch)
    data = source(ROWS)
    task, batch = OwnTask(Stateful(None), data, data, 2), data.batch(0, 2, 0)
    for returned, form in ((torch.ones(2), "a tensor"), ((1, 2, 3), "a tuple of 3"), ([1, 2], "a list")):
        refuses(rf"expected \(outputs, state\) .*, found {form}", task.forward, Stateful(returned), batch, None)
    assert task.forward(Stateful((1, 2)), batch, None) == (1, 2)
    task = OwnTask(torch.nn.Linear(1, 1), data, data, 2, lambda x, y: torch.ones(2, 1))
    refuses(r"one value per row \[2\], found shape \(2, 1\)", task.loss, None, torch.ones(2, 1), batch)


def test_rows_can_be_sent_to_a_process_that_is_not_forked():
    read = source(DataLoader(torch.utils.data.TensorDataset(torch.arange(5), torch.arange(5)), 2, num_workers=1))
    assert read.batch(1, 2, 0).inputs.tolist() == [2, 3]
    copy = pickle.loads(pickle.dumps(read))  # and not the process that reads ahead
    read.close()
    copy.workers = 0
    assert [batch.inputs.tolist() for batch in copy.once(3)] == [[0, 1], [2, 3], [4]], "the loader's own batches"


def test_pictures_of_several_sizes_are_no_rows_in_lists():
    def task(*seen):
        data = source([{"input_ids": torch.ones(2, 3), "seen": list(seen), "labels": torch.ones(2, dtype=torch.int64)}])
        return OwnTask(Own(), data, data, 2)

    assert task(torch.ones(3, 3), torch.ones(4, 4)).metrics[0].name == "accuracy"
    refuses("expected a tensor .* as seen, found a list", task, torch.ones(2), torch.ones(2))


def test_tensors_whose_first_axis_is_no_row_are_refused():
    """An update would take the first rows of each: of the boxes of a picture as many as there are pictures."""
    pictures, boxes = torch.ones(2, 3, 4, 4), [{"boxes": torch.ones(n, 4)} for n in (2, 5)]
    model, words = torch.nn.Linear(1, 1), r"^here: expected rows .*, 2 as of the first one, found \[5, 4\]; pad"
    for batch, loss in (((pictures, boxes), lambda x, y: x.mean()), ({"input_ids": pictures, "labels": boxes}, None)):
        data = source([batch])
        task = OwnTask(model if loss else Own(), data, data, 2, loss)
        assert task.metrics[0].name == "loss"
        refuses(words, task.check, data.batch(0, 2, 0), "here")
    alike = source([(pictures, [torch.ones(2, 4), torch.ones(1, 4)])])  # one for all rows is left whole
    OwnTask(model, alike, alike, 2, lambda x, y: x.mean()).check(alike.batch(0, 2, 0), "here")


def test_a_mask_among_the_inputs_is_the_models():
    class Masked(torch.nn.Module):
        def forward(self, x, mask=None, labels=None):
            return x, mask, labels

    mask, labels = torch.tensor([[1.0], [0.0]]), torch.tensor([0, 1])
    data = source([{"x": torch.ones(2, 1), "mask": mask, "labels": labels}])
    task = OwnTask(Masked(), data, data, 2)
    _, *seen = task.forward(Masked(), data.batch(0, 2, 0), None)[0]
    assert seen[0] is mask
    assert seen[1] is labels
