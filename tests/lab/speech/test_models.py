"""CTC against the sum over all paths, edit distance against its recursion, and the models that are scored by them."""

import functools
import itertools
import warnings

import pytest
import torch
from refusals import refuses

from mnemos import registry
from mnemos.lab.evaluate.scores import evaluate, metrics_text
from mnemos.lab.speech.ctc import best_path, edit_distance
from mnemos.lab.speech.models import BiLSTMConfig, SpeechConfig, SpeechRecogniser
from mnemos.lab.tasks.batch import Batch
from mnemos.lab.tasks.metrics import ACCURACY, TOKEN_ERROR_RATE
from mnemos.lab.tasks.task import Task
from mnemos.ops.positions import sinusoids

NAN = float("nan")


def joined(path: tuple[int, ...], blank: int) -> tuple[int, ...]:
    return tuple(token for token, _ in itertools.groupby(path) if token != blank)


def oracle(logits: torch.Tensor, target: tuple[int, ...], blank: int) -> torch.Tensor:
    """−log of the sum, over every path that is the target once joined, of its probability. logits [T, C]."""
    p = logits.exp() / logits.exp().sum(-1, keepdim=True)
    total = torch.zeros((), dtype=logits.dtype)
    for path in itertools.product(range(logits.shape[1]), repeat=logits.shape[0]):
        if joined(path, blank) == target:
            total = total + p[range(len(path)), path].prod()
    return -total.log()


def levenshtein(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    @functools.cache
    def between(i: int, j: int) -> int:
        if not i or not j:
            return i + j
        return min(between(i - 1, j) + 1, between(i, j - 1) + 1, between(i - 1, j - 1) + (a[i - 1] != b[j - 1]))

    return between(len(a), len(b))


def scored(vocab_size: int, stack: int = 1) -> SpeechRecogniser:
    return SpeechRecogniser(vocab_size=vocab_size, stack=stack, bands=2, dim=4, num_heads=1, layers=1, mlp=4)


def test_score_is_the_sum_over_all_paths_and_so_is_its_gradient():
    torch.manual_seed(0)
    lengths, targets = (5, 3, 4, 2), ((0, 0, 2), (1,), (2, 1), ())
    padded = torch.full((4, 6), -100)  # wider than any of them
    for row, target in enumerate(targets):
        padded[row, : len(target)] = torch.tensor(target, dtype=torch.int64)
    logits = torch.randn(5, 4, 4, dtype=torch.float64).transpose(0, 1).requires_grad_()  # not contiguous
    again = logits.detach().clone().requires_grad_()
    mask = torch.arange(5) < torch.tensor(lengths)[:, None]
    poisoned = torch.where(mask[..., None], logits, NAN)
    loss = scored(3).loss(poisoned, padded, mask)
    tokens = scored(3).right(poisoned, padded, mask)[1]
    # The last row has no tokens and counts for nothing.
    expected = sum(oracle(again[row, : lengths[row]], targets[row], 3) for row in range(3))
    torch.testing.assert_close(loss, expected)
    assert tokens == 6
    assert [int(n) for n in scored(3).right(poisoned[3:], padded[3:], mask[3:])] == [0, 0]
    upstream = torch.tensor(1.7, dtype=torch.float64)
    (loss * upstream).backward()
    (expected * upstream).backward()
    torch.testing.assert_close(logits.grad[mask], again.grad[mask])


def test_best_path_and_edits_by_hand():
    torch.manual_seed(1)
    logits = torch.randn(20, 9, 4)
    lengths = torch.randint(0, 10, (20,))
    heard, counts = best_path(logits, lengths, 3)
    rows = [tuple(heard[i, : counts[i]].tolist()) for i in range(20)]
    assert rows == [joined(tuple(logits[i, : lengths[i]].argmax(-1).tolist()), 3) for i in range(20)]
    said = torch.randint(0, 3, (20, 7))
    long = torch.randint(0, 8, (20,))
    found = edit_distance(said, long, heard, counts)
    assert found.tolist() == [levenshtein(tuple(said[i, : long[i]].tolist()), rows[i]) for i in range(20)]
    assert edit_distance(heard, counts, said, long).tolist() == found.tolist()


def test_more_edits_than_tokens_is_an_error_rate_above_one():
    logits = torch.nn.functional.one_hot(torch.tensor([[0, 1, 0, 1]]), 3) * 9.0
    right, tokens = scored(2).right(logits, torch.tensor([[1, -100]]), None)
    assert (int(right), int(tokens)) == (-2, 1)


@pytest.mark.parametrize(("target", "frames", "stack"), [((1, 1), 2, 1), ((0, 1, 0), 2, 1), ((1, 1), 6, 3)])
def test_more_tokens_than_frames_can_say_are_refused(target, frames, stack):
    model = scored(3, stack)
    mask = torch.arange(12) < torch.tensor([[12], [frames]])
    logits = model(torch.randn(2, 12, 2), None, mask=mask)[0]
    targets = torch.full((2, 3), -100)
    targets[:, : len(target)] = torch.tensor(target)
    refuses(rf"row 1: expected at least {3}", model.loss, logits, targets, mask)
    model.loss(logits[:1], targets[:1], mask[:1])


MODELS = {
    "transformer": SpeechConfig(vocab_size=4, bands=5, stack=3, dim=12, layers=2, num_heads=2, mlp=8),
    "recurrent": BiLSTMConfig(vocab_size=4, bands=5, stack=3, dim=6, layers=2),
}


@pytest.mark.parametrize("name", MODELS)
def test_padding_is_never_read(name):
    """Rows of every length, alone and together; stacked frames may be half padding."""
    torch.manual_seed(0)
    model = MODELS[name].build().double().eval()
    x = torch.randn(7, 11, 5, dtype=torch.float64)
    lengths = torch.tensor([11, 10, 9, 7, 4, 2, 1])
    mask = torch.arange(11) < lengths[:, None]
    outputs = model(torch.where(mask[..., None], x, NAN), None, mask=mask)[0]
    heard = model.transcribe(x, mask)
    for i, n in enumerate(lengths.tolist()):
        alone = model(x[i : i + 1, :n])[0]
        assert alone.shape == (1, -(-n // 3), 5)
        torch.testing.assert_close(outputs[i, : alone.shape[1]], alone[0])
        assert model.transcribe(x[i : i + 1, :n]) == [heard[i]]
    targets = torch.randint(0, 4, (7, 1))

    def score(outputs, targets, mask):
        return model.loss(outputs, targets, mask), *model.right(outputs, targets, mask)

    together = score(outputs, targets, mask)
    apart = [score(model(x[i : i + 1, :n])[0], targets[i : i + 1], None) for i, n in enumerate(lengths.tolist())]
    for whole, parts in zip(together, zip(*apart, strict=True), strict=True):
        torch.testing.assert_close(whole, sum(parts))
    empty = mask.clone()
    empty[3] = False
    assert model(x, None, mask=empty)[0].isfinite().all()


@pytest.mark.parametrize("name", MODELS)
def test_bad_frames_are_refused(name):
    model = MODELS[name].build()
    for x in (torch.randn(2, 3, 4), torch.randn(2, 5), torch.zeros(2, 3, 5, dtype=torch.int64), torch.randn(2, 0, 5)):
        refuses(r"expected frames \[B, T, 5\]", model, x)
    for mask in (torch.ones(2, 3), torch.ones(2, 4, dtype=torch.bool)):
        refuses("expected a mask", model, torch.randn(2, 3, 5), None, mask=mask)
    behind = torch.tensor([[True, True, False], [True, False, True]])
    refuses("valid frames of a row before its padding", model, torch.randn(2, 3, 5), None, mask=behind)
    refuses("state", model, torch.randn(2, 3, 5), torch.zeros(2, 3))


@pytest.mark.parametrize("kind", [SpeechConfig, BiLSTMConfig])
def test_the_least_sizes_are_one_and_dropout_acts_between_layers(kind):
    names = ["vocab_size", "bands", "stack", "layers", "mlp" if kind is SpeechConfig else "dim"]
    least = dict.fromkeys(names, 1)
    more = {"dim": 4, "num_heads": 1} if kind is SpeechConfig else {}
    with warnings.catch_warnings(action="error"):
        model = kind(**least, **more, dropout=0.5).build()
    assert model(torch.randn(2, 3, 1))[0].shape == (2, 3, 2)
    for name in least:
        refuses(name, kind(**least | {name: 0}, **more).build)
    model, x = kind(**least | {"layers": 2}, **more, dropout=0.5).build(), torch.randn(2, 30, 1)
    assert not torch.equal(model(x)[0], model(x)[0])


def test_without_what_blocks_add_the_outputs_are_of_frames_and_positions():
    model = MODELS["transformer"].build().double()
    with torch.no_grad():
        for parameter in model.blocks.parameters():
            parameter.zero_()
        x = torch.randn(2, 9, 5, dtype=torch.float64)
        entered = model.entry(x.unflatten(1, (3, 3)).flatten(2))
        expected = model.head(torch.nn.functional.layer_norm(entered + sinusoids(torch.arange(3), 12), (12,)))
        torch.testing.assert_close(model(x)[0], expected)


def test_every_attention_of_the_registry_fits_or_is_causal_only_and_refused():
    for name in registry.names("attention"):
        attention = registry.load("attention", name)()
        sizes = {"dim": 12, "layers": 1, "num_heads": 2, "mlp": 8, "bands": 5, "attention": name}
        if False in attention.causal_modes:
            assert SpeechRecogniser(**sizes)(torch.randn(2, 9, 5))[0].shape == (2, 9, 11)
        else:
            refuses("its only mode", SpeechRecogniser, **sizes)


def test_evaluate_counts_errors_over_all_tokens():
    torch.manual_seed(0)
    model = MODELS["transformer"].build()
    batches = [Batch(torch.randn(3, 30, 5), torch.randint(0, 4, (3, n))) for n in (1, 4)]
    edits = 0
    for batch in batches:
        for said, heard in zip(batch.targets.tolist(), model.transcribe(batch.inputs), strict=True):
            edits += levenshtein(tuple(said), tuple(heard))
    task = Task()
    task.metrics = (TOKEN_ERROR_RATE, ACCURACY)
    found = evaluate(model, batches, task)
    assert found["count"] == 15
    assert found["token error rate"] == pytest.approx(edits / 15)
    assert found["accuracy"] == pytest.approx(1 - edits / 15)
    assert metrics_text(task, found) == f"token error rate {edits / 15:.4f}  accuracy {1 - edits / 15:.4f}"
