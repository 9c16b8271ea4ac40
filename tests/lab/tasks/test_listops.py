"""ListOps: the vectorised generator against a recursive one and exact probabilities; the task."""

import dataclasses
import hashlib
import math
import random

import numpy as np
import pytest
from refusals import refuses

from mnemos.lab.tasks import listops
from mnemos.lab.tasks.batch import IGNORE
from mnemos.lab.tasks.listops import VOCABULARY, ListOpsAnswersConfig, ListOpsConfig, Rules, generate, generate_block

CONFIG = ListOpsConfig(4, 25, 3, 4, 0.5, train_size=2000, valid_size=200, test_size=300)
SHORT = Rules(4, 25, 3, 4, 0.5)
LONG = Rules()


def evaluate(source):
    """The value (0 to 9) of a ListOps text."""
    open_lists = [[]]
    for word in source.split():
        if word.startswith("["):
            open_lists.append([word])
            continue
        if word == "]":
            operator, *arguments = open_lists.pop()
            word = apply(operator, sorted(arguments))
        open_lists[-1].append(int(word))
    ((value,),) = open_lists
    return value


def apply(operator, ordered):
    if operator == "[SM":
        return sum(ordered) % 10
    middle = len(ordered) // 2
    median = ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) // 2
    return {"[MIN": ordered[0], "[MAX": ordered[-1], "[MED": median}[operator]


def to_text(tokens):
    """The text of one sample's tokens [T]."""
    return " ".join(VOCABULARY[token] for token in tokens)


def texts(rows):
    return [rows.row(i).tobytes() for i in range(len(rows))]


def samples(rules, blocks, seed=0):
    made = [generate_block(rules, seed, block) for block in range(blocks)]
    return np.concatenate([b.lengths for b in made]), np.concatenate([b.labels for b in made])


def naive(rules, source, depth=1):
    """A tree as the specification describes it, by recursion: its words, and nothing shared with the package."""
    if depth == rules.max_depth or source.random() < rules.digit_probability:
        return [str(source.randrange(10))]
    words = [source.choice(["[MIN", "[MAX", "[MED", "[SM"])]
    for _ in range(source.randint(2, rules.max_arguments)):
        words += naive(rules, source, depth + 1)
    return [*words, "]"]


def exact_lengths(rules):
    """P(length) of a draw for every length below max_length, by convolution from the deepest level up."""
    below = np.zeros(rules.max_length)
    below[1] = 1.0
    for _ in range(rules.max_depth - 1):
        power, total = below, np.zeros(rules.max_length)
        for _ in range(2, rules.max_arguments + 1):
            size = 2 * rules.max_length
            power = np.fft.irfft(np.fft.rfft(power, size) * np.fft.rfft(below, size), size)[: rules.max_length]
            total += power / (rules.max_arguments - 1)
        below = np.zeros(rules.max_length)
        below[1] = rules.digit_probability
        below[2:] += (1 - rules.digit_probability) * total[:-2]
    return below


def too_unlikely(statistic, freedom):
    """Whether χ² lies more than five standard deviations above its mean (seeds are fixed: it never flickers)."""
    return statistic > freedom + 5 * math.sqrt(2 * freedom)


@pytest.mark.parametrize(
    "rules", [SHORT, Rules(0, 40, 4, 3, 0.3), Rules(9, 60, 5, 10, 0.75), LONG, Rules(0, 2), Rules(2, 9, 2)]
)
def test_labels_and_lengths_are_those_of_the_text(rules):
    block = generate_block(rules, 3, 1)
    assert len(block.lengths) == len(block.labels) > 0
    assert block.lengths.sum() == len(block.tokens)
    ends = np.cumsum(block.lengths)
    for end, length, label in zip(ends, block.lengths, block.labels, strict=True):
        text = to_text(block.tokens[end - length : end])
        assert rules.min_length < length < rules.max_length
        assert length == len(text.split())
        assert evaluate(text) == label


def test_distribution_equals_the_naive_generators():
    lengths, labels = samples(SHORT, 8)
    source, expected = random.Random(0), []
    while len(expected) < len(lengths):
        words = naive(SHORT, source)
        if SHORT.min_length < len(words) < SHORT.max_length:
            expected.append(10 * len(words) + evaluate(" ".join(words)))
    ours = np.bincount(10 * lengths + labels, minlength=260)
    theirs = np.bincount(expected, minlength=260)
    cells = ours + theirs >= 10
    statistic = ((ours - theirs)[cells] ** 2 / (ours + theirs)[cells]).sum()
    assert cells.sum() > 150
    assert not too_unlikely(statistic, cells.sum() - 1)


@pytest.mark.parametrize(("rules", "blocks", "bins"), [(Rules(0, 40, 4, 3, 0.3), 30, 39), (LONG, 10, 30)])
def test_lengths_have_their_exact_probabilities(rules, blocks, bins):
    lengths, _ = samples(rules, blocks, seed=1)
    exact = exact_lengths(rules)
    exact[: rules.min_length + 1] = 0
    drawn = blocks * listops.draws(rules)
    edges = np.linspace(rules.min_length + 1, rules.max_length, bins + 1).astype(int)
    probability = np.add.reduceat(exact, edges[:-1])
    observed = np.add.reduceat(np.bincount(lengths, minlength=rules.max_length), edges[:-1])
    used = probability > 0
    assert observed[~used].sum() == 0
    expected = drawn * probability[used]
    rejected = drawn - len(lengths), drawn * (1 - exact.sum())
    statistic = ((observed[used] - expected) ** 2 / expected).sum() + (rejected[0] - rejected[1]) ** 2 / rejected[1]
    assert not too_unlikely(statistic, used.sum())


def test_the_samples_of_a_seed_never_change():
    """Stored values: a data set named by its seed is the same on every machine and in every version."""
    rows = generate(SHORT, 0, 3)
    assert [(to_text(rows.row(i)), rows.labels[i]) for i in range(3)] == [
        ("[MAX [MED 2 8 9 3 ] [SM 8 6 ] 0 [MED 9 3 0 ] ]", 5),
        ("[MAX [MED 4 8 9 7 ] [MIN 9 1 ] [SM 6 7 2 ] [SM 2 0 0 5 ] ]", 7),
        ("[MIN [MIN 0 6 1 3 ] 6 6 [MAX 2 5 3 4 ] ]", 0),
    ]
    rows = generate(LONG, 0, 1000)
    digest = hashlib.sha256(rows.tokens.tobytes() + rows.labels.tobytes()).hexdigest()
    assert digest == "d8dc86be3ca7474040a8dad4249219336cffa86ef8615f0d785c7c9e6b0b5a69"
    assert texts(generate(SHORT, 1, 3)) != texts(generate(SHORT, 0, 3))


def test_no_sample_comes_twice(monkeypatch):
    monkeypatch.setattr(listops, "PATIENCE", 1)  # in many blocks, none of which is without a new sample
    rows = texts(generate(SHORT, 0, 20_000))
    assert len(set(rows)) == len(rows) == 20_000


def test_too_many_samples_raise(monkeypatch):
    monkeypatch.setattr(listops, "PATIENCE", 3)
    assert sorted(generate(Rules(0, 2, 1), 0, 10).labels) == list(range(10))
    refuses(r"expected 11 distinct .*found 10, then none in 3 blocks", generate, Rules(0, 2, 1), 0, 11)


def test_the_longest_possible_sample_is_generated():
    assert set(generate(Rules(5, 7, 2, 4, 0.0), 0, 50).lengths) == {6}
    refuses(r"data\.min_length: expected less than 6, .*found 6; lower it", generate, Rules(6, 9, 2, 4, 0.0), 0, 1)


def test_the_task():
    task = dataclasses.replace(CONFIG, bucketed=False).build()
    assert (task.vocab_size, task.classes, task.max_length, task.carries_state) == (16, 10, 24, False)
    assert [task.size(split) for split in ("train", "valid", "test")] == [2000, 200, 300]
    batch = task.train_batch(3, 32, 0)
    assert batch.targets.shape == (32,)
    for tokens, label, mask in zip(batch.inputs, batch.targets, batch.mask, strict=True):
        assert (tokens[~mask] == 0).all()
        assert (tokens[mask] > 0).all()
        assert evaluate(to_text(tokens[mask].numpy())) == label


def test_splits_share_nothing_and_a_larger_training_split_changes_no_other():
    splits = CONFIG.generate()
    everything = [text for rows in splits.values() for text in texts(rows)]
    assert len(set(everything)) == len(everything) == 2500
    larger = dataclasses.replace(CONFIG, train_size=4000).generate()
    assert texts(larger["test"]) == texts(splits["test"])
    assert texts(larger["valid"]) == texts(splits["valid"])
    assert texts(larger["train"])[:2000] == texts(splits["train"])


def test_buckets_save_padding():
    padded = {}
    for bucketed in (True, False):
        task = dataclasses.replace(CONFIG, bucketed=bucketed).build()
        masks = [task.train_batch(i, 32, 0) for i in range(60)]
        padded[bucketed] = np.mean([0.0 if b.mask is None else 1 - b.mask.float().mean().item() for b in masks])
    assert padded[True] < 0.1 < padded[False]


def test_answers_are_the_values_of_the_same_expressions():
    task = ListOpsAnswersConfig(4, 25, 3, 4, 0.5, examples=300, rows=50).build()
    source = dataclasses.replace(CONFIG, train_size=300, valid_size=50, test_size=50).generate()
    batches = [*task.batches("valid", 20), *(task.train_batch(i, 30, 1) for i in range(10))]  # one epoch
    found = []
    for inputs, targets, *_ in batches:
        assert inputs.shape == targets.shape
        for tokens, answers in zip(inputs.tolist(), targets.tolist(), strict=True):
            end = tokens.index(listops.EQUALS)
            assert not any(tokens[end + 1 :])
            assert answers[:end] + answers[end + 1 :] == [IGNORE] * (len(answers) - 1)
            assert evaluate(to_text(np.array(tokens[:end]))) == answers[end] - listops.ZERO
            found.append(bytes(tokens[:end]))
    assert sorted(found) == sorted(texts(source["valid"]) + texts(source["train"]))
    assert (task.vocab_size, task.max_length, task.size("test")) == (17, 25, 50)
    shares = [(task.train_batch(i, 5, 0).inputs > 0).float().mean().item() for i in range(20)]
    assert np.mean(shares) > 0.85, "rows of a batch have similar lengths"


def test_wrong_settings():
    refuses("data.seed.*found seed -1", dataclasses.replace(CONFIG, seed=-1).build)
    refuses("max_length 5", dataclasses.replace(CONFIG, max_length=5).build)
    many = dataclasses.replace(CONFIG, min_length=500, max_length=2000, max_arguments=10)
    refuses("data.min_length: expected .*found", many.build)
