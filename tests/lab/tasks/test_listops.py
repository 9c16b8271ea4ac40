import csv
import dataclasses
import os
import time

import numpy as np
import pytest
import torch
from listops_oracle import evaluate, to_text, write_tsv

from mnemos import DataConfig, config, registry
from mnemos.lab.tasks import listops
from mnemos.lab.tasks.batch import IGNORE
from mnemos.lab.tasks.listops import EQUALS, FILES, ZERO, ListOpsAnswersConfig, ListOpsConfig, Rules, generate, read_tsv
from mnemos.types import InputError

SHORT = ListOpsConfig(4, 25, 3, 4, 0.5, train_size=2000, valid_size=200, test_size=300)
RULES = Rules(4, 25, 3, 4, 0.5)


def texts(rows):
    return [rows.row(i).tobytes() for i in range(len(rows))]


def test_registered_and_written_as_json():
    assert registry.load("data", "listops") is ListOpsConfig
    assert config.from_dict(DataConfig, config.to_dict(SHORT)) == SHORT


def test_the_task():
    task = dataclasses.replace(SHORT, bucketed=False).build()
    assert (task.metrics[0].name, task.vocab_size, task.classes, task.max_length, task.carries_state) == (
        "accuracy", 16, 10, 24, False,
    )  # fmt: skip
    assert [task.size(split) for split in ("train", "valid", "test")] == [2000, 200, 300]
    batch = task.train_batch(3, 32, 0)
    assert batch.inputs.dtype == batch.targets.dtype == torch.int64
    assert batch.inputs.shape[0] == 32
    assert batch.targets.shape == (32,)
    assert batch.reset is None
    for tokens, label, mask in zip(batch.inputs, batch.targets, batch.mask, strict=True):
        assert (tokens[~mask] == 0).all()
        assert (tokens[mask] > 0).all()
        assert evaluate(to_text(tokens[mask].numpy())) == label


def test_majority_is_the_test_splits():
    task = SHORT.build()
    labels = torch.cat([batch.targets for batch in task.batches("test", 64)])
    assert task.reference["majority class"] == pytest.approx(labels.bincount().max().item() / 300)


def test_splits_share_nothing_and_a_larger_training_split_changes_no_other():
    splits = SHORT.generate()
    everything = [text for rows in splits.values() for text in texts(rows)]
    assert len(set(everything)) == len(everything) == 2500
    larger = dataclasses.replace(SHORT, train_size=4000).generate()
    assert texts(larger["test"]) == texts(splits["test"])
    assert texts(larger["valid"]) == texts(splits["valid"])
    assert texts(larger["train"])[:2000] == texts(splits["train"])


def test_seeds():
    rows = SHORT.generate()["train"]
    assert texts(dataclasses.replace(SHORT, seed=1).generate()["train"]) != texts(rows)


def test_reads_the_folder_of_long_range_arena(tmp_path):
    for split, rows in SHORT.generate().items():
        write_tsv(tmp_path / FILES[split], rows)
    made, read = SHORT.build(), dataclasses.replace(SHORT, path=str(tmp_path)).build()
    for a, b in zip(made.batches("valid", 7), read.batches("valid", 7), strict=True):
        assert torch.equal(a.inputs, b.inputs)
        assert torch.equal(a.targets, b.targets)
    assert torch.equal(made.train_batch(5, 16, 2).inputs, read.train_batch(5, 16, 2).inputs)
    assert read.max_length == max(read_tsv(tmp_path / file).lengths.max() for file in FILES.values())


def test_buckets_save_padding():
    padded = {}
    for bucketed in (True, False):
        task = dataclasses.replace(SHORT, bucketed=bucketed).build()
        masks = [task.train_batch(i, 32, 0) for i in range(60)]
        padded[bucketed] = np.mean([0.0 if b.mask is None else 1 - b.mask.float().mean().item() for b in masks])
    assert padded[True] < 0.1 < padded[False]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"train_size": 0}, "train_size 0"),
        ({"max_length": 5}, "max_length 5"),
        ({"seed": -1}, "data.seed.*found -1"),
        ({"path": "no/such/folder"}, "no/such/folder/basic_train.tsv: .*No such file"),
    ],
)
def test_wrong_settings(change, words):
    with pytest.raises(InputError, match=words) as error:
        dataclasses.replace(SHORT, **change).build()
    assert "\n" not in str(error.value)


def test_answers_are_the_values_of_the_same_expressions():
    task = ListOpsAnswersConfig(4, 25, 3, 4, 0.5, examples=300, rows=50).build()
    source = dataclasses.replace(SHORT, train_size=300, valid_size=50, test_size=50).generate()
    batches = [*task.batches("valid", 20), *(task.train_batch(i, 30, 1) for i in range(10))]  # one epoch
    found = []
    for inputs, targets, *_ in batches:
        assert inputs.shape == targets.shape
        for tokens, answers in zip(inputs.tolist(), targets.tolist(), strict=True):
            end = tokens.index(EQUALS)
            assert not any(tokens[end + 1 :])
            assert answers[:end] + answers[end + 1 :] == [IGNORE] * (len(answers) - 1)
            assert evaluate(to_text(np.array(tokens[:end]))) == answers[end] - ZERO
            found.append(bytes(tokens[:end]))
    assert sorted(found) == sorted(texts(source["valid"]) + texts(source["train"]))
    assert (task.vocab_size, task.max_length, task.size("test")) == (17, 25, 50)
    assert task.written([11, 2, 3, 15, EQUALS, 0]) == "[MIN 1 2 ] ="


def test_a_batch_of_answers_is_of_similar_lengths():
    task = ListOpsAnswersConfig(4, 60, 4, 5, 0.5, examples=4000, rows=10).build()
    shares = [(task.train_batch(i, 16, 0).inputs > 0).float().mean().item() for i in range(20)]
    assert sum(shares) / 20 > 0.85


def test_a_dead_worker_is_an_error_not_a_short_answer(monkeypatch):
    monkeypatch.setattr(listops, "generate_block", lambda *rules: os._exit(1) if rules[-1] else time.sleep(0.3))
    with pytest.raises(InputError, match=r"data.workers: .*died.*; set fewer workers$"):  # 0 would be one per core
        generate(RULES, 0, 10, workers=2)


# The stream of distinct samples.


def test_samples_do_not_depend_on_the_number_of_workers():
    alone, other = (generate(RULES, 7, 3000, workers=workers) for workers in (1, 2))
    assert texts(alone)[:500] == texts(generate(RULES, 7, 500))
    assert texts(alone) == texts(other)
    assert np.array_equal(alone.labels, other.labels)


def test_no_sample_comes_twice(monkeypatch):
    monkeypatch.setattr(listops, "PATIENCE", 1)  # in many blocks, none of which is without a new sample
    rows = texts(generate(RULES, 0, 20_000))
    assert len(set(rows)) == len(rows) == 20_000


def test_too_many_samples_raise(monkeypatch):
    monkeypatch.setattr(listops, "PATIENCE", 3)
    assert sorted(generate(Rules(0, 2, 1), 0, 10).labels) == list(range(10))
    with pytest.raises(InputError, match=r"expected 11 distinct .*found 10, then none in 3 blocks"):
        generate(Rules(0, 2, 1), 0, 11)


@pytest.mark.parametrize(
    "rules",
    [
        Rules(-1, 20),
        Rules(10, 11),
        Rules(max_depth=0),
        Rules(max_arguments=1),
        Rules(digit_probability=1.5),
        Rules(500, 2000, max_depth=3, max_arguments=10),
    ],
)
def test_impossible_rules_raise(rules):
    with pytest.raises(InputError, match=r"data.\w+: expected .*found") as error:
        generate(rules, 0, 1)
    assert "\n" not in str(error.value)


def test_the_longest_possible_sample_is_generated():
    rows = generate(Rules(5, 7, 2, 4, 0.0), 0, 50)
    assert set(rows.lengths) == {6}
    with pytest.raises(InputError, match=r"data\.min_length: expected less than 6, .*found 6; lower it"):
        generate(Rules(6, 9, 2, 4, 0.0), 0, 1)


# The text.


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("7", 7),
        ("[MAX 2 9 [MIN 4 7 ] 0 ]", 9),
        ("( ( ( [MAX 2 ) 9 ) ] )", 9),
        ("[MIN 4 7 ]", 4),
        ("[SM 9 9 9 ]", 7),
        ("[MED 1 2 ]", 1),
        ("[MED 1 9 2 ]", 2),
        ("[MED 8 0 7 3 ]", 5),
        ("[MED 4 9 ]", 6),
        ("[SM [MED 3 4 ] [MAX 5 [MIN 9 8 ] ] 1 ]", 2),
        ("(([SM 1) 2) ]", 3),
    ],
)
def test_evaluate(text, value):
    assert evaluate(text) == value


def test_the_parentheses_are_long_range_arenas():
    tokens = np.array([12, 3, 11, 5, 8, 15, 10, 15], np.uint8)  # [MAX 2 [MIN 4 7 ] 9 ]
    assert to_text(tokens, parentheses=False) == "[MAX 2 [MIN 4 7 ] 9 ]"
    assert to_text(tokens) == "( ( ( ( [MAX 2 ) ( ( ( [MIN 4 ) 7 ) ] ) ) 9 ) ] )"
    assert to_text(tokens[1:2]) == "2"


@pytest.mark.parametrize("rules", [Rules(0, 30, 4, 4, 0.5), Rules()])
def test_round_trip(tmp_path, rules):
    rows = generate(rules, 5, 200)
    path = tmp_path / "basic_train.tsv"
    write_tsv(path, rows)
    back = read_tsv(path)
    assert np.array_equal(back.tokens, rows.tokens)
    assert np.array_equal(back.starts, rows.starts)
    assert np.array_equal(back.labels, rows.labels)
    assert [file.name for file in tmp_path.iterdir()] == ["basic_train.tsv"]
    with path.open(newline="") as file:
        read = list(csv.reader(file, delimiter="\t"))
    assert read[0] == ["Source", "Target"]
    assert [evaluate(source) for source, _ in read[1:]] == [int(target) for _, target in read[1:]] == list(rows.labels)


@pytest.mark.parametrize(
    "content",
    [
        "Source\tTarget\r\n( ( ( [MAX 2 ) 9 ) ] )\t9\r\n3\t3\r\n",
        "Source\tTarget\n[MAX 2 9 ]\t9\n3\t3",
        "Source\tTarget\n((([MAX 2) 9) ])\t 9 \n 3 \t3\n",
    ],
)
def test_reads_every_dress_of_the_format(tmp_path, content):
    path = tmp_path / "x.tsv"
    path.write_text(content, newline="")
    rows = read_tsv(path)
    assert [rows.row(i).tolist() for i in range(2)] == [[12, 3, 10, 15], [4]]
    assert rows.labels.tolist() == [9, 3]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "No such file"),
        ("", "line 1: .*header.*found ''"),
        ("[MAX 2 9 ]\t9\n", "line 1: .*header"),
        ("Source\tTarget\n", "samples.*header"),
        ("Source\tTarget\n1\t1\n\n2\t2\n", "line 3: .*tab"),
        ("Source\tTarget\n1\t1\n[MAX 2 9 ]", "line 3: .*tab"),
        ("Source\tTarget\n1\t1\n[MAX 2 9 \t9\n", "line 3: .*brackets"),
        ("Source\tTarget\n] [MAX\t9\n", "line 2: .*brackets"),
        ("Source\tTarget\n[MAX ]\t9\n", "line 2: .*empty list"),
        ("Source\tTarget\n[MAX 2 9 ]\t10\n", "line 2: .*label.*found the label '10'"),
        ("Source\tTarget\n[MAX 2 19 ]\t2\n", "line 2: .*found '19'"),
    ],
)
def test_refuses_by_file_and_line(tmp_path, content, words):
    path = tmp_path / "x.tsv"
    if content is not None:
        path.write_text(content)
    with pytest.raises(InputError, match=words) as error:
        read_tsv(path)
    assert str(error.value).startswith(str(path))
    assert "\n" not in str(error.value)
