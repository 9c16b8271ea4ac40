import pytest
import torch
import torch.nn.functional as F
from refusals import refuses
from torch import nn

from mnemos.lab.evaluate.scores import CountedElsewhere, evaluate
from mnemos.lab.tasks.batch import IGNORE, Batch, counted
from mnemos.lab.tasks.metrics import ACCURACY, TOP5, CorpusMetric, negative_log_likelihood, right_predictions
from mnemos.lab.tasks.task import Task


class Summing(nn.Module):
    """Logits from a table, shifted by the sum of all the tokens so far: the state [B] counts it."""

    def __init__(self, classes: bool = False) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(7, 7, generator=torch.Generator().manual_seed(0)))
        self.dropout = nn.Dropout(0.9)
        self.frozen = nn.Dropout(0.9).eval()
        self.classes = classes

    def forward(self, x, state=None, mask=None):
        state = torch.zeros(x.shape[0]) if state is None else state
        total = state[:, None] + x.cumsum(1)
        logits = self.dropout(self.table[x]) * torch.cos(total)[..., None]
        return (logits.mean(1) if self.classes else logits), total[:, -1]


def stream(pieces: list[int], reset_at: int = -1) -> tuple[list[Batch], torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 7, (2, sum(pieces) + 1), generator=generator)
    inputs, targets = tokens[:, :-1], tokens[:, 1:].clone()
    targets[0, 3:5] = IGNORE
    batches, first = [], 0
    for i, piece in enumerate(pieces):
        span = slice(first, first + piece)
        fresh = torch.tensor([i == 0, i in (0, reset_at)])
        batches.append(Batch(inputs[:, span], targets[:, span], None, fresh))
        first += piece
    return batches, inputs, targets


def test_every_target_weighs_the_same_however_the_stream_is_cut():
    model = Summing()
    batches, inputs, targets = stream([8])
    model.eval()
    logits = model(inputs)[0]
    counted = targets != IGNORE
    found = evaluate(model, batches)
    assert found["count"] == 14
    assert found["loss"] == pytest.approx(F.cross_entropy(logits[counted], targets[counted]).item(), rel=1e-6)
    assert found["accuracy"] == pytest.approx((logits.argmax(-1) == targets)[counted].float().mean().item())
    for pieces in ([1, 7], [3, 3, 2], [1] * 8):
        assert evaluate(model, stream(pieces)[0]) == pytest.approx(found, rel=1e-6)


def test_rows_are_reset():
    model = Summing().eval()
    cut, inputs, targets = stream([3, 5], reset_at=1)
    found = evaluate(model, cut)["loss"]
    logits = model(inputs)[0]
    again = model(inputs[1:, 3:])[0]
    logits = torch.cat([logits[:1], torch.cat([logits[1:, :3], again], 1)])
    assert found == pytest.approx(F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE).item())
    assert found != pytest.approx(evaluate(model, stream([3, 5])[0])["loss"])


def test_classification_carries_nothing_and_weighs_rows():
    model = Summing(classes=True)
    generator = torch.Generator().manual_seed(2)
    inputs, targets = torch.randint(0, 7, (5, 4), generator=generator), torch.tensor([0, 1, 2, IGNORE, 4])
    whole = evaluate(model, [Batch(inputs, targets)])
    assert whole["count"] == 4
    cut = [Batch(inputs[a:b], targets[a:b]) for a, b in ((0, 3), (3, 5))]
    assert evaluate(model, cut) == pytest.approx(whole, rel=1e-6)


def test_the_model_is_left_as_it_was():
    model = Summing()
    evaluate(model, stream([4])[0])
    assert model.training
    assert model.dropout.training
    assert not model.frozen.training
    assert model.table.grad is None

    def failing():
        yield stream([4])[0][0]
        raise KeyError

    with pytest.raises(KeyError):
        evaluate(model, failing())
    assert model.training


def test_nothing_to_score():
    refuses("at least one target", evaluate, Summing(), [])
    nothing = torch.full((1, 2), IGNORE)
    refuses("at least one target", evaluate, Summing(), [Batch(nothing * 0, nothing)])


class Fixed(nn.Module):
    """Logits by the image's number, which is its only pixel."""

    def __init__(self, logits: torch.Tensor) -> None:
        super().__init__()
        self.logits = nn.Parameter(logits)

    def forward(self, x, state=None, mask=None):
        assert x.dtype == self.logits.dtype
        return self.logits[x[:, 0, 0, 0].long()], None


FIVE = Task()
FIVE.metrics = (ACCURACY, TOP5)


def test_top5():
    logits = torch.rand(40, 9, generator=torch.Generator().manual_seed(3))
    targets = torch.arange(40) % 9
    targets[7] = IGNORE
    images = torch.arange(40.0).view(40, 1, 1, 1)
    batches = [Batch(images[a:b], targets[a:b]) for a, b in ((0, 13), (13, 40))]
    found = evaluate(Fixed(logits), batches, FIVE)
    right = [sum(logits[i] > logits[i, y]) < 5 for i, y in enumerate(targets.tolist()) if y != IGNORE]
    assert found["top5"] == pytest.approx(sum(right) / 39)
    assert 0.3 < found["top5"] < 0.8
    assert found["count"] == 39
    # Images follow the model's precision.
    assert evaluate(Fixed(logits.double()), batches, FIVE)["top5"] == found["top5"]
    doubled = evaluate(Fixed(logits), batches, FIVE, lambda sums: 2 * sums)
    assert doubled == {**found, "count": 78}


def test_targets_that_are_probabilities():
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(6, 5, generator=generator)
    targets = torch.rand(6, 5, generator=generator)
    targets /= targets.sum(1, keepdim=True)
    loss = negative_log_likelihood(None, logits, Batch(None, targets))
    right, count = right_predictions(None, logits, Batch(None, targets))
    assert loss.item() == pytest.approx(-(targets * logits.log_softmax(1)).sum().item(), rel=1e-6)
    assert right.item() == sum(int(logits[i].argmax() == targets[i].argmax()) for i in range(6))
    assert count.item() == counted(targets).item() == 6
    hard = torch.tensor([0, 4, 2, IGNORE, 1, 1])
    whole = hard != IGNORE
    one = F.one_hot(hard[whole], 5).float()
    expected = negative_log_likelihood(None, logits[whole], Batch(None, one)).item()
    assert negative_log_likelihood(None, logits, Batch(None, hard)).item() == pytest.approx(expected, rel=1e-6)
    assert counted(hard).item() == 5
    low = negative_log_likelihood(None, logits.bfloat16(), Batch(None, targets))
    assert low.dtype == torch.float32


def test_a_corpus_metric_collects_from_every_segment_with_any_number_of_processes():
    class Advancing(Fixed):
        def advance(self, x, state=None, mask=None):
            return None

    task = Task()
    task.metrics = (CorpusMetric("rows", True, collect=lambda model, outputs, batch: batch.targets.tolist()),)
    images, start = torch.arange(2.0).view(2, 1, 1, 1), torch.ones(2, dtype=torch.bool)
    parts = [Batch(images, targets, None, start) for targets in (torch.full((2,), IGNORE), torch.arange(2))]
    alone, several = (evaluate(Advancing(torch.eye(5)), parts, task, total) for total in (None, lambda sums: sums))
    assert alone == several
    assert alone["rows"] == 4


def test_a_corpus_metric_is_given_every_row_once_in_the_order_of_the_data():
    """Two processes share two batches; of the second one this process has no row and runs another's."""
    given: list = []

    def seen(records):
        given.extend(records)
        return torch.tensor(0.25)

    task = Task()
    task.metrics = (
        CorpusMetric("rows", True, collect=lambda model, outputs, batch: batch.targets.tolist(), value=len),
        CorpusMetric("seen", False, collect=lambda model, outputs, batch: batch.targets.tolist(), value=seen),
    )
    images, targets = torch.arange(5.0).view(5, 1, 1, 1), torch.arange(5)
    batches = [Batch(images[:2], targets[:2]), CountedElsewhere(Batch(images[4:], targets[4:]))]
    found = evaluate(Fixed(torch.eye(5)), batches, task, lambda sums: sums, lambda own: [own, [[2, 3], [4]]])
    assert given == [0, 1, 2, 3, 4]
    assert (found["rows"], found["count"]) == (5, 2)
    assert (found["seen"], type(found["seen"])) == (0.25, float)  # a number that JSON has
