"""Facts told in real text: what a row holds, and the accuracy by distance."""

import re

import numpy as np
import pytest
import torch
from torch import nn

from mnemos.lab.tasks.batch import IGNORE
from mnemos.lab.tasks.fact_recall import ASKED, PEOPLE, PLACES, TOLD, ToldConfig

CONFIG = ToldConfig(distances=(4, 9, 20), people=2, words=50, rows=90, grow=10)


@pytest.fixture(scope="module")
def task():
    return CONFIG.build()


def rows(task):
    return [
        (task.written(x), y) for b in task.batches("test", 7) for x, y in zip(b.inputs.tolist(), b.targets, strict=True)
    ]


def test_a_row_tells_its_facts_and_asks_for_one(task):
    found = []
    for text, targets in rows(task):
        said = dict(re.findall(r"(\w+) is in the (\w+) \.", text))
        asked = re.fullmatch(r".*\. (.*) Where is (\w+) \?", text)
        found.append(len(asked[1].split()))
        assert len(said) == 2
        assert set(said) <= set(PEOPLE)
        assert set(said.values()) <= set(PLACES)
        assert (targets[:-1] == IGNORE).all()
        assert task.names[targets[-1]] == said[asked[2]]
    assert sorted(found) == sorted([4, 9, 20] * 30)  # every distance equally often
    assert task.reference == {"a guess": 0.1}  # of ten places
    batch = next(task.batches("test", 90))
    assert task.distances(batch.inputs).tolist() == found


def test_the_background_is_real_text_of_its_split(task):
    """Words of a row stand in the text in the same order; splits share no text."""
    whole = {split: " ".join(task.names[i] for i in words) for split, words in task.text.items()}
    for text, _ in rows(task)[:20]:
        assert text[: text.index(next(p for p in text.split() if p in PEOPLE))].strip() in whole["test"]
    assert sum(map(len, task.text.values())) > 50_000
    assert len(task.names) == task.vocab_size == 50 + 1 + 4 + 20


def test_training_begins_with_near_facts_in_short_rows(task):
    sizes = [task.train_batch(i, 64, seed=1).inputs.shape[1] for i in range(12)]
    assert sizes[0] == 8 + 4 + 3
    assert sizes[10] == sizes[11] == task.max_length
    assert sizes == sorted(sizes)
    batch, again = (task.train_batch(11, 2000, seed=1) for _ in range(2))
    assert torch.equal(batch.inputs, again.inputs)
    assert torch.equal(batch.targets, again.targets)
    distance = task.distances(batch.inputs).double()
    assert (distance.min(), distance.max()) == (4, 20)
    assert abs(distance.log().mean() - np.log(np.arange(4, 21)).mean()) > 0.1  # nearer ones are more frequent


class Near(nn.Module):
    """Answers right up to a distance of 9, and with the next place beyond."""

    def __init__(self, task):
        super().__init__()
        self.task, self.weight = task, nn.Parameter(torch.zeros(()))

    def forward(self, x, state=None, mask=None):
        answers = []
        for row, distance in zip(x, self.task.distances(x), strict=True):
            said = dict(re.findall(r"(\w+) is in the (\w+) \.", text := self.task.written(row.tolist())))
            place = self.task.names.index(said[text.split()[-2]])
            answers.append(place if distance <= 9 else place - 1)
        return nn.functional.one_hot(torch.tensor(answers), self.task.vocab_size)[:, None].float(), None


def test_the_accuracy_is_measured_at_each_distance(task, tmp_path):
    found = task.artifacts(Near(task), tmp_path, "test")
    assert found["along"]["values"] == [[4, 1.0], [9, 1.0], [20, 0.0]]
    assert found["along"]["chance"] == 0.1
    assert sum(found["along"]["rows"]) == sum(len(batch.inputs) for batch in task.batches("test", 64))
    answers = found["questions"]
    for one in answers:
        place, ago = one["the right answer"].split(", ")
        between = int(ago.split()[0])
        assert f"is in the {place} ." in one["told and asked"]
        assert re.fullmatch(
            rf"… (\S+ ){{{4 * (between < 20)}}}\w+ is in the .*\S+ Where is \w+ \?", one["told and asked"]
        )
        left_out = re.findall(r"\((\d+) more words?\)", one["told and asked"])  # four words stay on either side
        assert left_out == ([str(between - 8)] if between > 8 else [])
    assert {one["the right answer"].startswith(one["answered"]) for one in answers if "20 words" in str(one)} == {False}


def test_a_text_has_the_words_of_facts_whole(task):
    said = task.encode(b"Anna is  in\nthe garden. This is in theory\n there. Where is Anna?", "")
    assert [task.names[i] for i in said[:4]] == ["Anna", TOLD, "garden", "."]
    assert said.count(task.names.index(TOLD)) == said.count(task.names.index(ASKED)) == 1
    shown = task.encode(
        b"Then Anna is in the attic. Hugo is in the dairy. Anna is in the cellar. Then Where is Anna?", ""
    )
    anna, cellar = (task.names.index(name) for name in ("Anna", "cellar"))
    asked = task.names.index(ASKED), anna, task.names.index("?")
    assert task.question(shown) == ((9, 13), asked, cellar), "where she was said to be last"
    assert task.question(shown[9:13] + shown[-3:]) == ((0, 4), asked, cellar)
    for none in (shown[-6:], shown[:-1], [*shown[:-3], *shown[-2:], shown[-1]], shown[:9][5:] + shown[-3:]):
        assert task.question(none) is None


def test_the_distances_that_a_run_was_trained_on_are_said():
    assert [CONFIG.trained_on(updates).partition(" words up to ")[2] for updates in (1, 3, 20)] == [
        "4; greater ones were tested without training.",
        "a greatest one, which grew from 4 to 5 in 3 updates; greater ones were tested without training.",
        "a greatest one, which grew from 4 to 20 in 20 updates.",
    ]
