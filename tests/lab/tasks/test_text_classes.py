"""Texts in class folders: their splits and rows, and a run from folder to prediction."""

import json
from pathlib import Path

import pytest
from refusals import refuses

from mnemos.lab.cli import main
from mnemos.lab.run import flops
from mnemos.lab.tasks.text_classes import TextClassesConfig


def write(folder: Path, **texts: str) -> Path:
    for name, text in texts.items():
        file = folder / f"{name.replace('__', '/')}.txt"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return folder


def tokenizer(path: Path) -> str:
    """Words, with [CLS] and [SEP] around each text."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    words = ["[UNK]", "[CLS]", "[SEP]", "a", "b", "c", "d", "e"]
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, "[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
    made.save(str(path))
    return str(path)


def test_rows_have_segments_with_special_tokens(tmp_path):
    for split in ("train", "valid", "test"):
        write(tmp_path / "texts", **{f"{split}__one__text": "a b c d e a b", f"{split}__two__text": "e d"})
    words = tokenizer(tmp_path / "words.json")
    task = TextClassesConfig(path=str(tmp_path / "texts"), length=8, segment=4, tokens=words).build()
    assert task.sizes == {"vocab_size": 8, "classes": 2, "max_length": 8, "segment": 4}
    batch = task.train_batch(0, 3, seed=0)
    rows = {
        tuple(r[:n].tolist()): int(t) for r, t, n in zip(batch.inputs, batch.targets, batch.mask.sum(1), strict=True)
    }
    assert rows == {(1, 3, 4, 2, 1, 5, 6, 2): 0, (1, 7, 3, 2, 1, 4, 2): 0, (1, 7, 6, 2): 1}
    assert task.preprocessing().names == ("one", "two")
    (tmp_path / "none.txt").touch()
    (none,) = task.preprocessing().predict(None, [tmp_path / "none.txt"], {"top": 1})
    assert none.problem == f"{tmp_path / 'none.txt'}: expected text, found none; add text to it"


def test_splits_are_of_each_class(tmp_path):
    texts = {f"{c}__{i}": f"{c} {i}\n" * 9 for c in ("one", "two") for i in range(10)}
    task = TextClassesConfig(path=str(write(tmp_path / "many", **texts)), length=128, held_out=0.2).build()
    assert [task.size(split) for split in ("train", "valid", "test")] == [12, 4, 4]
    assert sorted(next(task.batches("test", 9)).targets.tolist()) == [0, 0, 1, 1]
    named = {f"{c}__{split}": f"{c} {split}" for c in ("one", "two") for split in ("train", "valid", "test")}
    task = TextClassesConfig(path=str(write(tmp_path / "named", **named)), length=128).build()
    assert bytes(next(task.batches("test", 1)).inputs[0].tolist()).decode() in ("one test", "two test")


def test_other_texts_are_scored_whole_or_their_split(tmp_path):
    texts = {f"{c}__{i}": f"{c} {i}\n" * 9 for c in ("one", "two") for i in range(10)}
    task = TextClassesConfig(path=str(write(tmp_path / "many", **texts)), length=128).build_to_score("test")
    assert (task.size("test"), task.whole) == (20, True)
    assert task.about == ("scored: all texts, 20 rows of 2 classes: one, two",)
    tests = {f"{split}__{c}__text": f"{c} {split}" for c in ("one", "two") for split in ("valid", "test")}
    config = TextClassesConfig(path=str(write(tmp_path / "named", **tests)), length=128)
    task = config.build_to_score("valid")
    assert (task.size("valid"), task.whole) == (2, False)
    assert bytes(next(task.batches("valid", 1)).inputs[0].tolist()).decode() in ("one valid", "two valid")
    (tmp_path / "named/valid").rename(tmp_path / "named/train")
    refuses("expected a valid split, found the splits .*; choose one", config.build_to_score, "valid")


@pytest.mark.parametrize(
    ("texts", "fields", "match"),
    [
        ({"one__a": "text"}, {}, "at least two folders of texts"),
        ({"one__a": "text", "two__b": "text", "lost": "text"}, {}, r"lost\.txt: expected texts in folders of classes"),
        ({"one__a": "text", "two__b": "text"}, {"segment": 3}, "found segment 3 and length 512"),
        ({"train__one__a": "x", "train__two__b": "x", "test__one__a": "x"}, {}, "test split: .* the class two"),
        ({"one__a": "text", "two__b": "text"}, {"segment": 0}, "more than 0 special tokens, .* found segment 0"),
        ({"one__a": "text", "two__b": "text"}, {"length": 0, "segment": 1}, "found segment 1 and length 0"),
        ({"one__a": "text", "two__b": "text"}, {"held_out": 0.0}, "0 < held_out < 0.5, found held_out 0.0"),
    ],
)
@pytest.mark.each_value
def test_folders_that_do_not_fit(tmp_path, texts, fields, match):
    refuses(match, TextClassesConfig(path=str(write(tmp_path / "texts", **texts)), **fields).build)


def test_a_folder_is_learned_and_predicted(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(flops, "_COUNTED", 1)  # of more shapes of batches the count takes longer than the run
    texts = {f"{c}__{i}": f"{c} " * 20 for c in ("ab", "xy") for i in range(6)}
    write(tmp_path / "texts", **texts)
    words = "--data.path texts --data.length 64 --data.segment 16 --model.cache.length 4 --train.steps 6"
    words += " --train.batch-size 4 --optim.lr 3e-3 --out run"
    assert main(["train", "texts-last-cached", *words.split()]) == 0
    assert json.loads((tmp_path / "run/result.json").read_text())["test"]["accuracy"] == 1
    capsys.readouterr()
    assert main(["predict", "run", "texts/xy/0.txt"]) == 0
    assert "xy 0." in capsys.readouterr().out


def test_what_is_left_out_is_said(tmp_path):
    texts = {f"{c}__{i}": f"{c} {i}\n" * 9 for c in ("one", "two") for i in range(10)}
    folder = write(tmp_path / "many", **texts, one__driving_licence="a licence\n" * 9, two__LICENSE="not a text\n")
    (folder / "one" / "utf16.txt").write_bytes("another".encode("utf-16"))
    about = TextClassesConfig(path=str(folder), length=128, held_out=0.2).build().about
    assert about[-1] == "left out: one/utf16.txt, two/LICENSE.txt"
