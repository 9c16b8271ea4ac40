"""Rows of told facts: every answer was told before, far enough; training learns them and continues exactly."""

import torch
from torch import nn

from mnemos.generators import generator
from mnemos.lab.linearised import told
from mnemos.lab.linearised.told import FORMS, NAMES, TellingConfig, ToldRows, train_told
from mnemos.lab.tasks.haystack import PEOPLE, PLACES

FILL = torch.arange(1000, 3000)  # tokens of text, which are no letters


def tokenizer(text, **_):
    return {"input_ids": [ord(c) for c in text]}


def test_answers_were_told_before_and_no_word_is_that_of_the_measurement():
    rows = ToldRows(tokenizer, FILL, gap=50)
    for i in range(20):
        row = rows.row(generator(0, i), 700, 3)
        assert len(row.ids) == len(row.answers) == 700
        assert row.answers.sum() == 3
        fill = row.ids[row.ids >= 1000]
        assert torch.equal(fill, fill[0] + torch.arange(len(fill)))
        text = "".join(chr(i) if i < 1000 else "#" for i in row.ids.tolist())
        for place, target in zip(row.answers.nonzero().flatten().tolist(), row.targets.tolist(), strict=True):
            assert text[place + 1] == chr(target) == " "
            words = text[: place + 1].rpartition("? ")[2]  # "Anna has the", which was told before with its value
            value = text[place + 1 :].partition(".")[0]
            fact = f"\n{words}{value}.\n"
            assert text.count(fact) == 1
            assert text[text.index(fact) + len(fact) : place].count("#") >= 50
    words = {word for form in FORMS for word in form[2]} | set(NAMES)
    assert not words & {*PEOPLE, *PLACES}
    assert all("{n} is in the" not in part for form in FORMS for part in form[:2])


def test_training_goes_on_from_its_checkpoint_bit_for_bit(tmp_path, monkeypatch):
    rows = ToldRows(tokenizer, FILL[:400] - 800, gap=50)
    settings = TellingConfig(updates=24, stages=((500, 3),), warmup=2, language=0.1)

    def train(folder, updates):
        torch.manual_seed(0)
        table = nn.Embedding(129, 600)

        def predict(row):
            if len(seen) == updates:
                raise KeyboardInterrupt
            seen.append(1)
            return table(row.ids.clamp(max=128))

        seen = []
        try:
            found = train_told(predict, [(0.3, {"table": table.weight})], rows, settings, folder)
        except KeyboardInterrupt:
            found = None
        return table.weight.detach(), found

    whole, found = train(tmp_path / "whole", 24)
    assert found["right"] > 0.5
    assert found["loss"] < 4
    assert found["text"] < 6.5  # 7.5 where the text is not learned
    train(tmp_path / "parts", 22)  # after the checkpoint of 20 updates
    again, _ = train(tmp_path / "parts", 24)
    assert torch.equal(whole, again)
    assert told.checkpoint.newest(tmp_path / "parts")[0] == 24
