"""The batches of tokens that a task refuses, and metrics."""

import math

import pytest
import torch
from refusals import refuses

from mnemos import SumMetric
from mnemos.lab.tasks import metrics
from mnemos.lab.tasks.batch import Batch
from mnemos.lab.tasks.metrics import ACCURACY, BITS, PERPLEXITY, TOP5, bounds_json, bounds_of, sum_functions, values
from mnemos.lab.tasks.token_task import TokenTask


class Tokens(TokenTask):
    vocab_size, max_length = 10, 4


class Classes(Tokens):
    classes = 3


class Carried(Tokens):
    carries_state = True


@pytest.mark.parametrize(
    ("task", "inputs", "targets", "words"),
    [
        (Tokens, [[0, 9, 1, 1]], [[9, 0, -100, 1]], None),
        (Tokens, [[0, 9, 1, 1, 1]], [[9, 0, 1, 1, 1]], r"T up to 4 and targets \[1, 5\], found \[1, 5\] and \[1, 5\]"),
        (Tokens, [[0, 0]], [[0]], r"targets \[1, 2\], found \[1, 2\] and \[1, 1\]"),
        (Tokens, [[0, 10]], [[0, 0]], "expected tokens 0 to 9, found 0 to 10"),
        (Tokens, [[0, 0]], [[-1, 0]], "expected targets 0 to 9, found -1 to 0"),
        (Classes, [[9, 9]] * 2, [2, -100], None),
        (Classes, [[9, 9]], [3], "expected targets 0 to 2, found 3 to 3"),
        (Classes, [[9, 9]], [[2, 2]], r"targets \[1\], found"),
        (Carried, [[0, 0]], [[0, 0]], "expected a tensor `reset`, because the task carries its state, found None"),
    ],
)
@pytest.mark.each_value
def test_batches_of_tokens_are_checked(task, inputs, targets, words):
    batch = Batch(torch.tensor(inputs), torch.tensor(targets))
    if words is None:
        task().check(batch, "here")
    else:
        refuses(f"^here: .*{words}", task().check, batch, "here")


def test_values_of_metrics():
    assert metrics.find_metrics([ACCURACY, "top5"]) == (ACCURACY, TOP5)
    refuses("found 'acuracy' in it; did you mean 'accuracy'", metrics.find_metrics, ["acuracy"])
    own = SumMetric("own", True, sums=lambda model, outputs, batch: (outputs.sum(),))
    assert sum_functions([own, BITS, TOP5]) == {own.sums: 2, TOP5.sums: 2}
    assert sum_functions([own, TOP5], training=True) == {own.sums: 2}, "top5 is not measured in training"
    assert values([BITS, PERPLEXITY, own], {own.sums: (3.0, 4.0)}, (2.0, 2)) == pytest.approx(
        {"bits": 1 / math.log(2), "perplexity": math.e, "own": 0.75}
    )
    assert values([BITS, own], {own.sums: (3.0, 0.0)}) == {"own": 0.0}, "without a loss, and of nothing counted"
    assert [PERPLEXITY.value((nats, 1)) for nats in (708.9, 709)] == [math.exp(708.9), math.inf]
    logits, targets = torch.arange(7.0).expand(3, 7), torch.tensor([6, 2, 1])
    assert [int(one) for one in TOP5.sums(None, logits, Batch(None, targets))] == [2, 3]
    assert [int(one) for one in TOP5.sums(None, logits[:, :3], Batch(None, targets.clamp(max=2)))] == [3, 3]
    words, targets = torch.eye(7).flip(0).expand(2, 7, 7), torch.tensor([[6, 5, 4, 3, 0, 0, -100], [-100] * 7])
    top, shares = words + torch.arange(7.0) / 9, torch.eye(7)[targets[0, :3]]  # the classes 2 to 6, and the likeliest
    assert [int(one) for one in TOP5.sums(None, top, Batch(None, targets))] == [4, 6], "of each token"
    assert [int(one) for one in TOP5.sums(None, top[:, :5], Batch(None, targets[:, :5]))] == [4, 5], "as long as five"
    assert [int(one) for one in TOP5.sums(None, top[0, 4:], Batch(None, shares))] == [3, 3], "of probabilities"
    for ends in ((1.0, math.inf), (-math.inf, 2.0)):
        assert bounds_of(bounds_json(ends)) == ends
    assert bounds_of(None) == bounds_of((None, math.nan)) == (-math.inf, math.inf)


@pytest.mark.parametrize(
    ("sums", "words"),
    [
        ((1.0, 2.0), "found float, float"),
        ((torch.ones(3), torch.ones(3)), r"found a tensor \[3\], a tensor \[3\]"),
        (torch.tensor(1.0), r"found a tensor \[\]"),
        ((torch.tensor(1.0),), r"found a tensor \[\]; return such as .* or set SumMetric\(width=\)"),
    ],
)
def test_what_a_metric_returns_must_be_sums(sums, words):
    refuses(f"metric: expected 2 scalar tensors of .*, {words}", metrics.called, lambda *_: sums, 2, None, 0, 0)


def test_targets_must_be_as_many_as_the_outputs():
    batch = Batch(torch.zeros(2, 5), torch.zeros(2, 5, dtype=torch.int64))
    loss = metrics.negative_log_likelihood
    assert loss(torch.nn.Identity(), torch.zeros(2, 5, 3), batch) == pytest.approx(10 * math.log(3))
    refuses(
        r"for each of the outputs \[2\], found \[2, 5\]; .*head\.classes",
        loss,
        None,
        torch.zeros(2, 3, 1)[..., 0],
        batch,
    )
