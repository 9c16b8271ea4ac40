import dataclasses
import time

import numpy as np
import pytest
import torch

from mnemos import config, registry
from mnemos.lab.tasks.batch import IGNORE
from mnemos.lab.tasks.listops import EQUALS, FILES, ListOpsAnswersConfig, ListOpsConfig, evaluate, read_tsv, to_text
from mnemos.lab.tasks.listops_generate import ZERO
from mnemos.types import InputError

SHORT = ListOpsConfig(4, 25, 3, 4, 0.5, train_size=2000, valid_size=200, test_size=300)


def texts(rows):
    return [rows.row(i).tobytes() for i in range(len(rows))]


def test_registered_and_written_as_json():
    assert registry.load("data", "listops") is ListOpsConfig
    assert config.from_dict(config.DataConfig, config.to_dict(SHORT)) == SHORT


def test_defaults_are_long_range_arenas():
    fields = dataclasses.asdict(ListOpsConfig())
    assert (fields["min_length"], fields["max_length"], fields["max_depth"], fields["max_arguments"]) == (
        500,
        2000,
        10,
        10,
    )
    assert (fields["train_size"], fields["valid_size"], fields["test_size"]) == (96_000, 2_000, 2_000)
    assert fields["digit_probability"] == 0.75


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


def test_seeds_and_workers():
    rows = SHORT.generate()["train"]
    assert texts(dataclasses.replace(SHORT, workers=2).generate()["train"]) == texts(rows)
    assert texts(dataclasses.replace(SHORT, seed=1).generate()["train"]) != texts(rows)


def test_export_then_read_from_the_folder(tmp_path):
    SHORT.export(tmp_path / "new")
    assert sorted(file.name for file in (tmp_path / "new").iterdir()) == sorted(FILES.values())
    made, read = SHORT.build(), dataclasses.replace(SHORT, path=str(tmp_path / "new")).build()
    for a, b in zip(made.batches("valid", 7), read.batches("valid", 7), strict=True):
        assert torch.equal(a.inputs, b.inputs)
        assert torch.equal(a.targets, b.targets)
    assert torch.equal(made.train_batch(5, 16, 2).inputs, read.train_batch(5, 16, 2).inputs)
    assert read.max_length == max(read_tsv(tmp_path / "new" / file).lengths.max() for file in FILES.values())


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
        ({"train_size": 0}, "data.train_size .*found 0"),
        ({"max_length": 5}, "min_length 4 and max_length 5"),
        ({"seed": -1}, "data.seed.*found -1"),
        ({"path": "no/such/folder"}, "no/such/folder/basic_train.tsv: .*No such file"),
    ],
)
def test_wrong_settings(change, words):
    with pytest.raises(InputError, match=words) as error:
        dataclasses.replace(SHORT, **change).build()
    assert "\n" not in str(error.value)


def test_a_hundred_thousand_short_samples_in_a_moment():
    start = time.perf_counter()
    dataclasses.replace(SHORT, train_size=100_000, seed=11).build()
    assert time.perf_counter() - start < 5  # a fifth of a second where this was written


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


@pytest.mark.parametrize("field", ["examples", "rows"])
def test_answers_without_expressions_are_refused(field):
    with pytest.raises(InputError, match=f"data.{field}: expected at least 1 expression, found 0"):
        ListOpsAnswersConfig(**{field: 0}).build()
