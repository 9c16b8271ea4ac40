"""Benchmarks of memory: each drawn row against its published definition, by a slow and independent reading."""

import itertools
import re
from collections import Counter
from dataclasses import fields, replace

import numpy as np
import pytest
import torch

import mnemos
from mnemos.lab.tasks import mad
from mnemos.lab.tasks.batch import IGNORE
from mnemos.lab.tasks.fact_recall import ToldConfig
from mnemos.lab.tasks.metrics import right_predictions
from mnemos.lab.tasks.recall import MQARConfig, RecallConfig
from mnemos.lab.tasks.task import Task
from mnemos.models.lstm import LSTMConfig
from mnemos.models.transformer import TransformerConfig
from mnemos.types import InputError, leaves


def rows(settings, split="test"):
    batch = next(settings.build().batches(split, settings.rows))
    return list(zip(batch.inputs.tolist(), batch.targets.tolist(), strict=True))


def places_of(targets):
    return [i for i, target in enumerate(targets) if target != IGNORE]


def drawn_as(counts, probabilities):
    """χ² of counts against probabilities, in standard deviations above its mean."""
    counts, probabilities = np.asarray(counts), np.asarray(probabilities)
    expected = counts.sum() * probabilities / probabilities.sum()
    freedom = len(counts) - 1
    return (((counts - expected) ** 2 / expected).sum() - freedom) / (2 * freedom) ** 0.5


FORGETTING = [
    MQARConfig(48, 8, 41, rewritten=3, rows=600),
    MQARConfig(54, 6, 41, rewritten=6, rows=500),
    MQARConfig(60, 4, 61, rewritten=2, key_tokens=2, rows=500),
]


def test_mqar_is_as_published():
    settings = MQARConfig(48, 5, 40, rows=3000)
    places = []
    for inputs, targets in rows(settings):
        keys, values = inputs[0:10:2], inputs[1:10:2]
        assert len({*keys}) == len({*values}) == 5
        assert all(1 <= key < 20 <= value < 40 for key, value in zip(keys, values, strict=True))
        told = dict(zip(keys, values, strict=True))
        asked = places_of(targets)
        assert len(asked) == 5
        assert all(i >= 10 and i % 2 == 0 for i in asked)
        assert {inputs[i] for i in asked} == {*keys}
        assert all(targets[i] == told[inputs[i]] for i in asked)
        assert all(inputs[i] == 0 for i in range(10, 48) if i not in asked)
        places.append([inputs.index(key, 10) for key in keys])
    # The first key takes gap g with probability p_g, the second with Σ_h p_h·p_g/(1 − p_h), h ≠ g.
    p = 0.01 * np.arange(1, 20) ** (0.01 - 1)
    p /= p.sum()
    second = [sum(p[h] * p[g] / (1 - p[h]) for h in range(19) if h != g) for g in range(19)]
    for number, expected in ((0, p), (1, second)):
        gaps = np.bincount([(row[number] - 10) // 2 for row in places], minlength=19)
        assert drawn_as(gaps, expected) < 5


def read_on(inputs, kinds):
    """What a reader answers after each token who knows the last value of each key; `kinds`: the first of each kind."""
    held, read = {}, []
    for token in inputs:
        kind = sum(token >= first for first in kinds)  # 0: blank; the last kind: a value
        if kind == len(kinds) and len(read) == kind - 1:
            held[tuple(read)] = token
        read = [*read[: kind - 1], token] if 0 < kind < len(kinds) and len(read) >= kind - 1 else []
        yield held.get(tuple(read))


@pytest.mark.parametrize("settings", FORGETTING)
def test_the_last_value_of_a_key_of_mqar_counts(settings):
    found = {counted: rows(replace(settings, counted=counted)) for counted in ("all", "rewritten", "old")}
    w = settings.key_tokens + 1
    kinds, chosen = [1, 20, 40][:w], []
    for (inputs, targets), (again, last), (third, old) in zip(*found.values(), strict=True):
        assert inputs == again == third
        asked = places_of(targets)
        assert len(asked) == settings.pairs
        answers = [*read_on(inputs, kinds)]
        assert [answers[i] for i in asked] == [targets[i] for i in asked]
        told = settings.pairs + settings.rewritten
        pairs = [(tuple(inputs[i : i + w - 1]), inputs[i + w - 1]) for i in range(0, told * w, w)]
        assert len({value for _, value in pairs}) == told
        first, new = dict(pairs[: settings.pairs]), dict(pairs[settings.pairs :])
        assert (len(first), len(new)) == (settings.pairs, settings.rewritten)
        keys = {i: tuple(inputs[i - w + 2 : i + 1]) for i in asked}
        assert {*keys.values()} == {*first}
        for i in range(settings.length):
            is_new = i in keys and keys[i] in new
            assert last[i] == (new[keys[i]] if is_new else IGNORE)
            assert old[i] == (first[keys[i]] if is_new else IGNORE)
        chosen.append([[*first].index(key) for key in new])
    for place in (0, -1):
        counts = np.bincount([one[place] for one in chosen], minlength=settings.pairs)
        assert drawn_as(counts, np.ones(settings.pairs)) < 5


def test_one_token_of_a_key_of_mqar_does_not_tell_its_value():
    alike = 0
    for inputs, targets in rows(MQARConfig(64, 9, 62, key_tokens=2, rows=2000)):
        pairs = [tuple(inputs[i : i + 3]) for i in range(0, 27, 3)]
        ones, twos, values = ({*column} for column in zip(*pairs, strict=True))
        assert (len(ones), len(twos), len(values), len({*pairs})) == (3, 3, 9, 9)
        assert {pair[:2] for pair in pairs} == {(one, two) for one in ones for two in twos}
        assert min(ones) >= 1
        assert max(ones) < 20 <= min(twos) <= max(twos) < 40 <= min(values) <= max(values) < 62
        told = {pair[:2]: pair[2] for pair in pairs}
        asked = places_of(targets)
        assert [targets[i] for i in asked] == [told[inputs[i - 1], inputs[i]] for i in asked]
        assert all(i % 3 == 1 and (i + 1 == 64 or inputs[i + 1] == 0) for i in asked)
        alike += pairs[0][0] == pairs[1][0]
    assert drawn_as([alike, 2000 - alike], [2, 6]) < 5, "two of the eight other pairs, in random order"


@pytest.mark.parametrize("noise", [0.0, 0.4])
def test_mad_recall(noise):
    settings = mad.MADRecallConfig(32, 8, noise, examples=0, rows=1500)
    hidden, probes = 0, Counter()
    for inputs, targets in rows(settings):
        told = {}
        assert len(inputs) == 31
        for i in range(0, 31, 2):
            key, value = inputs[i], targets[i] if i == 30 else inputs[i + 1]
            if key >= 8:
                hidden += 1
                assert 8 <= value < 24
                assert targets[i] == IGNORE
                assert noise
                continue
            assert 0 <= key < 4 <= value < 8
            assert targets[i] == (value if key in told else IGNORE)
            assert told.setdefault(key, value) == value
            assert i == 30 or targets[i + 1] == IGNORE
        probes[inputs[30]] += 1
    assert abs(hidden / (14 * 1500) - noise) < 0.02, "15 pairs, and one of them is spared"
    assert drawn_as([probes[i] for i in range(4)], np.ones(4)) < 5
    batch = settings.build().train_batch(0, 4, 0)
    assert (batch.inputs[:, 1:] == batch.targets[:, :-1]).all(), "training counts all next tokens"


def test_mad_fuzzy_recall():
    settings = mad.MADFuzzyRecallConfig(60, 12, 2, examples=0, rows=200)
    sizes = Counter()
    for inputs, targets in rows(settings):
        whole = [*inputs, targets[-1]]
        asked = [False, *(target != IGNORE for target in targets)]
        start = next(i for i, token in enumerate(whole) if token != 11)
        said = zip(whole[start:], asked[start:], strict=True)
        kinds = [("key" if token < 5 else "value", token, mark) for token, mark in said]
        assert max(whole[start:]) < 11
        groups = [(kind, list(group)) for kind, group in itertools.groupby(kinds, key=lambda one: one[0])]
        told = {}
        for (key_kind, key), (value_kind, value) in zip(groups[::2], groups[1::2], strict=True):
            assert (key_kind, value_kind) == ("key", "value")
            name, tokens = tuple(t for _, t, _ in key), tuple(t for _, t, _ in value)
            assert len({*name}) == len(name) == 2, "held-out keys have the full length"
            assert len({*tokens}) == len(tokens)
            known = name in told
            assert told.setdefault(name, tokens) == tokens
            assert [mark for _, _, mark in key] == [False] * 2
            assert [mark for _, _, mark in value] == [known] * len(tokens)
            sizes[len(tokens)] += 1
        assert value[0][2], "the probe was told before"
    assert abs(sizes[1] / sizes.total() - 0.5) < 0.05
    batch = settings.build().train_batch(0, 64, 0)
    assert (batch.inputs[:, 1:] == batch.targets[:, :-1]).all()


def test_mad_copying():
    settings = mad.MADCopyingConfig(40, 9, 6, examples=0, rows=2000)
    before = np.zeros(6)
    for inputs, targets in rows(settings):
        word = [token for token in inputs[:33] if token != 7]
        assert inputs[33:] == [8] + [7] * 6
        assert targets == [IGNORE] * 34 + word
        assert len(word) == 6
        assert max(word) < 7
        blanks = np.diff([-1, *(i for i, token in enumerate(inputs[:33]) if token != 7)]) - 1
        before += blanks
        assert sum(blanks) == 27
    assert drawn_as(before, np.ones(6)) < 5


def test_mad_compression_and_memorisation():
    for inputs, targets in rows(mad.MADCompressionConfig(8, 5, rows=50)):
        assert inputs[7:] == [4] * 7
        assert max(inputs[:7]) < 4
        assert targets == [IGNORE] * 7 + inputs[:7]
    settings = mad.MADMemorisationConfig(16, 12, rows=200)
    table = {}
    for split in ("valid", "test"):
        for inputs, targets in rows(settings, split):
            assert inputs[1::2] == [11] * 8
            assert targets[::2] == [IGNORE] * 8
            for key, value in zip(inputs[::2], targets[1::2], strict=True):
                assert 0 <= key < 5 <= value < 11
                assert table.setdefault(key, value) == value
    assert len(table) == len({*table.values()}) == 5


def test_a_fixed_training_set_is_read_once_an_epoch():
    task = mad.MADMemorisationConfig(8, 64, examples=10, rows=4).build()
    assert task.epoch(4) == 2.5
    assert task.size("train") == 40
    read = [tuple(row) for i in range(5) for row in task.train_batch(i, 4, 0).inputs.tolist()]
    assert sorted(read[:10]) == sorted(read[10:])
    assert read[:10] != read[10:], "in an order of its own"
    assert task.train_batch(3, 4, 0).inputs.tolist() == [list(row) for row in read[12:16]]
    assert sorted(tuple(r) for i in range(2) for r in task.train_batch(i, 5, 9).inputs.tolist()) == sorted(read[:10])


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        (RecallConfig(distance=4, distractors=0), "distractors"),
        (RecallConfig(distance=4, shortest=5), "shortest"),
        (MQARConfig(512, 64, 64), "vocabulary"),
        (MQARConfig(pairs=8, key_tokens=2), "key_tokens"),
        (MQARConfig(counted="old"), "counted"),
        (mad.MADFuzzyRecallConfig(motif=8), "motif"),
        (mad.MADCopyingConfig(32), "length"),
        (ToldConfig(distances=(2, 8)), "distances"),
        (ToldConfig(distances=(8.0, 16)), r"data.distances\[0\]"),
        (ToldConfig(distances=(100_000,)), "lower data.distances"),
    ],
)
@pytest.mark.each_value
def test_wrong_settings_are_named(settings, field):
    with pytest.raises(InputError, match=rf"expected .*{field}|{field}") as error:
        settings.build()
    said = str(error.value)
    assert "\n" not in said
    if said.endswith(("change it", "change one of these")):  # a rule, which names nothing but settings
        named = re.findall(r"(\w+) [^,;]+[,;]", said.split(", found ")[1])
        assert {*named} <= {one.name for one in fields(settings)}


@pytest.mark.parametrize(
    "model",
    [
        TransformerConfig(1024, 8, 1, 2, 0),
        LSTMConfig(1024, 8, 1),
        mnemos.MemformerConfig(1024, 8, 1, 1, 2, 8, segment=4, memory=mnemos.SlotsConfig(2)),
        mnemos.RMTConfig(1024, 8, 1, 2, 8, segment=4, memory=mnemos.TokensConfig(2)),
    ],
)
def test_a_large_vocabulary_is_scored_where_targets_are(model):
    task = MQARConfig(16, 2, 1024, rows=6).build()
    assert len(places_of(task.example().targets[0].tolist())) == 2  # FLOPs are counted on it
    torch.manual_seed(0)
    built = model.build()
    batch = next(task.batches("test", 6))
    found = {}
    for name, forward in (("few", task.forward), ("all", lambda *given: Task.forward(task, *given))):
        built.zero_grad()
        outputs, state = forward(built, batch, None)
        loss = task.loss(built, outputs, batch)
        loss.backward()
        right = [x.item() for x in right_predictions(built, outputs, batch)]
        found[name] = outputs.shape, right, loss, [p.grad for p in built.parameters()], leaves(state)
    few, every = found["few"], found["all"]
    assert few[0] == (12, 1024)
    assert every[0] == (6, 16, 1024)
    assert few[1] == every[1] == [few[1][0], 12]
    torch.testing.assert_close(few[2:], every[2:])
    part = batch._replace(inputs=batch.inputs[:, :2], targets=batch.targets[:, :2])
    outputs, _ = task.forward(built, part, None)
    assert (outputs.shape, task.loss(built, outputs, part).item()) == ((0, 1024), 0), "a segment without targets"
