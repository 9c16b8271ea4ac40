"""A run in words from end to end: trained, evaluated with resets and carried, at other lengths, on other text."""

from pathlib import Path

import pytest
from trained_runs import trained

from mnemos.lab.cli import main
from mnemos.lab.run.trained import evaluate_run
from mnemos.models.transformer import HeadConfig

ARTICLE = " \n = {0} = \n \n The {0} is a {0} of two words , one of which is {0} . \n"


def texts(folder: Path, names: str) -> Path:
    folder.mkdir()
    for split in ("train", "valid", "test"):
        (folder / f"wiki.{split}.tokens").write_text("".join(ARTICLE.format(name) for name in names.split()) * 5)
    return folder


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("words")
    model = {"dim": 16, "layers": 1, "num_heads": 2, "mlp": 16, "head": HeadConfig(tied=True, cutoffs=(4, 8))}
    data = {"path": str(texts(folder / "texts", "owl elk fox cat")), "segment": 8, "articles": True}
    return trained("text-words", folder / "run", model, data, steps=3, eval_every=3, log_every=1)


def test_a_run_is_scored_with_resets_and_carried(finished, capsys):
    scores = evaluate_run(finished)
    said = capsys.readouterr().out
    assert list(scores) == ["as trained", "carried"]
    assert scores["carried"]["loss"] != scores["as trained"]["loss"]
    assert {"bits per byte", "perplexity"} < scores["carried"].keys()
    assert "memory reset at the beginning of each document\n" in said
    assert "memory carried from document to document\n" in said
    lines = (finished / "metrics.jsonl").read_text().splitlines()
    assert '"bits per byte"' in lines[0]
    assert '"accuracy"' not in lines[0], "no second pass over all words in training"


def test_some_rows_are_scored(finished, capsys):
    whole = evaluate_run(finished, rows=0)
    assert "--rows 0 scores all" not in capsys.readouterr().out
    assert main(["eval", str(finished), "--rows", "2"]) == 0
    said = capsys.readouterr().out
    counted = int(said.split("text-words, ")[1].split(" targets of test split of")[0])
    assert 0 < counted <= 2 * 8
    for name in whole:
        assert f"  {name:11} loss {whole[name]['loss']:.4f}" not in said
    assert main(["eval", str(finished), "--rows", "-1"]) == 2
    assert "--rows: expected at least 1, or 0 for all, found -1" in capsys.readouterr().err


def test_a_run_is_scored_at_other_lengths(finished, capsys):
    own = evaluate_run(finished)["as trained"]["loss"]
    assert evaluate_run(finished, fields=["--model.attention.memory", "64"])["as trained"]["loss"] == own, (
        "an article is no longer than the memory of 64 that the model has"
    )
    short = ["--data.segment", "4", "--model.attention.memory", "2", "--model.attention.same-length", "True"]
    capsys.readouterr()
    assert evaluate_run(finished, fields=[*short, "--model.attention.clamp", "1"])["as trained"]["loss"] != own
    assert "changed: model.attention.memory 2 instead of 64\n" in capsys.readouterr().out
    may = r"(--model.max_length, --model.attention.memory, --model.attention.same_length, --model.attention.clamp)"
    for words, expected in (
        (["--model.layers", "2"], f"settings of the model that an evaluation may change {may}, found --model.layers"),
        (["--model.head.cutoffs", "4", "9"], "found --model.head.cutoffs; train a run with it"),
        (["--model.attention.clamp", "-1"], "mnemos: expected memory and clamp of at least 0, found memory 64, clamp"),
        (["--train.steps", "3"], "settings of the data or the model, --data.FIELD value or --model.FIELD value"),
        (["--data.words", "9"], "expected the vocabulary that the run's model was trained with (words), found another"),
        (["--data.tokens", "bytes"], "found another one of bytes; leave data.tokens and data.words out"),
    ):
        assert main(["eval", str(finished), *words]) == 2
        said = capsys.readouterr().err
        assert expected in said
        assert said.count("\n") == 1


def test_other_text_is_read_with_the_runs_vocabulary(finished, tmp_path, capsys):
    assert main(["eval", str(finished), "--data.path", str(texts(tmp_path / "other", "owl owl ape"))]) == 0
    said = capsys.readouterr().out
    assert "in the vocabulary: test 330 (6.06% unknown)\n" in said
    strange = tmp_path / "strange.txt"
    strange.write_text("ein ganz anderer Text\n" * 60)
    assert main(["eval", str(finished), "--data.path", str(strange), "--data.articles", "False"]) == 2
    assert "found 80% of the test split's words unknown to the run's vocabulary" in capsys.readouterr().err


def test_it_writes_words(finished, tmp_path, capsys):
    assert main(["sample", str(finished), "--prompt", "The owl", "--length", "5", "--top-k", "3"]) == 0
    assert capsys.readouterr().out.startswith("The owl ")
    (tmp_path / "a.txt").write_text("The owl is")
    assert main(["predict", str(finished), str(tmp_path / "a.txt"), "--length", "2"]) == 0
    assert capsys.readouterr().out.startswith(f"{tmp_path / 'a.txt'}: ")
