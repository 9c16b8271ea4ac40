"""What one does with a finished run: load its model, score it on other data, start from it, extend it.

Then a run in words: scored at other lengths, on other text.
"""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from train_standins import train
from trained_runs import equal, lines, result, stopped, texts, trained, weights
from trained_runs import text_recipe as recipe

import mnemos
from mnemos import GRC, InputError, Transformer
from mnemos.lab.cli import main
from mnemos.lab.run import checkpoint
from mnemos.lab.run.recipe import OptimConfig
from mnemos.lab.run.recipe_files import read_recipe
from mnemos.lab.run.session import run
from mnemos.lab.run.trained import evaluate_run
from mnemos.lab.run.weights import Start
from mnemos.models.transformer import HeadConfig


def test_a_run_is_scored_on_other_data(text_run, tmp_path, output, refused):
    own = evaluate_run(text_run)["as trained"]
    other = texts(tmp_path / "other", "xyzuvw")
    said = output("eval", text_run, "--data.path", other, "--data.held_out=0.3")
    assert said.startswith("scored: the whole text, 6 files, 7,200 bytes: 0.txt, 1.txt, 2.txt, 3.txt and 2 more\n")
    assert "text-linear, all 7,200 targets" in said
    assert f"loss {own['loss']:.4f}" not in said
    assert json.loads((text_run / "recipe.json").read_text())["data"]["path"] != other
    for words, expected in (
        (["--model.dim", "8"], "that an evaluation may change (--model.max_length), found --model.dim; "),
        (["--data.segment", "128"], "fit the run's model: model.max_length is 64, but the data needs at least 128; c"),
    ):
        assert expected in refused("eval", text_run, *words)


def test_the_own_data_of_a_run_keep_its_splits_and_those_that_it_has_read_are_named(text_run, tmp_path, output):
    own = text_run.parent / "texts"
    moved = shutil.copytree(own, tmp_path / "moved")
    scores = []
    for path in (own, moved):
        said = output("eval", text_run, "--data.path", path)
        assert "test split of 1,200 targets" in said, "three quarters of the text were trained on"
        scores.append(said.split("loss ")[1][:6])
    assert scores[0] == scores[1]
    (moved / "0.txt").unlink()
    (moved / "new.txt").write_text("new " * 150)
    said = output("eval", text_run, "--data.path", moved)
    assert "all 4,200 targets" in said
    assert "warning: 1.txt and 2 more are among the files that the run has read" in said


def test_a_run_starts_from_the_weights_of_another(text_run, tmp_path, capsys, refused):
    asked = recipe(str(text_run.parent / "texts"), init_from=str(text_run), steps=2)
    run(asked, tmp_path / "next")
    said = capsys.readouterr()
    assert f"starts with the weights of {text_run}\n" in said.out
    about = json.loads((tmp_path / "next/run.json").read_text())["weights"]
    wanted = checkpoint.digest(weights(text_run, 4), "")
    assert about == {"run": str(text_run), "sha256": wanted, "tensors": 13}
    assert "weights" not in json.loads((text_run / "run.json").read_text())
    complete = read_recipe(text_run).model
    model = complete.build()
    Start.of(str(text_run), model).load(model)
    equal(model.state_dict(), weights(text_run, 4))
    (before, *first), untrained = lines(tmp_path / "next"), lines(text_run)
    assert first[0]["loss"] < untrained[0]["loss"] - 0.1
    assert (before["kind"], before["step"], before["loss"]) == ("valid", 0, untrained[-1]["loss"])
    assert "before training: valid loss" in said.err
    deeper = Start.of(str(text_run), replace(complete, layers=2).build())
    assert "; 9 of the 22 tensors, which it does not have, are new: blocks.1" in deeper.about
    new = ("train", "text", "--out", tmp_path / "other", "--from")
    assert "expected a folder after --out and --from" in refused(*new, "")
    assert "expected a run of a similar model" in refused(*new, text_run, "--data.path", asked.data.path)
    none = tmp_path / "none"
    said = refused(*new, none, "--data.path", asked.data.path)
    assert f"train.init_from: {none}: expected the folder of a run, found no such folder" in said
    assert not (tmp_path / "other").exists()


def test_a_folder_that_is_no_run_is_refused_with_what_is_meant(text_run, tmp_path, refused):
    (tmp_path / "host").mkdir()
    (tmp_path / "host/config.json").write_text('{"model_type": "llama"}')
    mnemos.save(Transformer(vocab_size=7, dim=8, layers=1, num_heads=1, mlp=8, max_length=4), tmp_path / "alone")
    model, host, bare = text_run / "model", tmp_path / "host", stopped(text_run, tmp_path / "bare", 2, 4)
    for words, said in (
        (("train", text_run), f"found the folder of a run; mnemos train --resume {text_run} continues it, and"),
        (("train", "--resume", model), f"{model}: expected a run, found its model; name {text_run}"),
        (("train", "--resume", host), f"found a model of Transformers; mnemos chat {host} uses it"),
        (("train", "--resume", tmp_path / "alone"), "found a model without its run; mnemos.load reads it in Python"),
        (("train", "--resume", tmp_path), "found no recipe.json in it; name a folder that mnemos train wrote"),
        (("eval", bare), f"{bare}: expected a checkpoint, found none; train the run first"),
        (("eval", text_run, "--train.steps", "3"), "--data.FIELD value or --model.FIELD value, found --train.steps;"),
    ):
        assert said in refused(*words)


@pytest.mark.parametrize("cached", [True, False])
def test_a_cache_is_added_to_a_trained_model_or_removed(tmp_path, cached):
    """A relative attention and the cache around it have tensors of one name and shape, which are not mixed up."""
    settings = {"dim": 16, "layers": 1, "num_heads": 2, "mlp": 16, "attention": "relative", "position": "none"}
    models = [
        Transformer(**settings, cache=GRC(length=3, ratio=1.0, scope="stream") if on else None)
        for on in (cached, not cached)
    ]
    (tmp_path / "checkpoints").mkdir()
    checkpoint.write(checkpoint.path_of(tmp_path / "checkpoints", 1), {"model": dict(models[0].state_dict())})
    Start.of(str(tmp_path), models[1]).load(models[1])
    plain, inside = (model.state_dict() for model in (models if not cached else models[::-1]))
    inside = {
        name.replace(".inner.", "."): value
        for name, value in inside.items()
        if ".attention." not in name or ".inner." in name
    }
    equal(plain, inside)


def test_a_finished_run_is_trained_for_longer(text_run, tmp_path, capsys, output, refused):
    folder = tmp_path / "longer"
    shutil.copytree(text_run, folder)
    assert main(["train", "--resume", str(folder), "--train.steps", "8"]) == 0
    train(recipe(str(text_run.parent / "texts"), steps=8), tmp_path / "whole", quiet=True)
    equal(weights(folder, 8), weights(tmp_path / "whole", 8))
    found, wanted = result(folder), result(tmp_path / "whole")
    assert (found["steps"], found["test"]) == (8, wanted["test"])
    assert "this run had finished" not in capsys.readouterr().out
    assert "finished its 8 steps; --train.steps N trains it for longer" in output("train", "--resume", folder)
    for words, expected in (
        (["--train.steps", "8"], "expected more than 8"),
        (["--model.dim", "8"], "--resume RUN alone"),
    ):
        assert expected in refused("train", "--resume", folder, *words)


def test_a_longer_run_keeps_what_the_shorter_one_evaluated(text_run, tmp_path, refused):
    """Its old end is no multiple of eval_every, so that the evaluation there is not one of the longer run's own."""
    asked = recipe(str(text_run.parent / "texts"), steps=5, eval_every=3, checkpoint_every=2, keep_best=True, keep=9)
    asked = replace(asked, optim=OptimConfig(lr=0.3))  # so high that step 5 is the best
    folder = tmp_path / "run"
    assert run(asked, folder, quiet=True)["best_step"] == 5
    before = lines(folder, "valid")
    # A run that cannot go on, as its data are gone or others, keeps its recipe and result.
    there, away = text_run.parent / "texts", text_run.parent / "away"
    kept = [(folder / name).read_text() for name in ("recipe.json", "result.json")]
    there.rename(away)
    refused("train", "--resume", folder, "--train.steps", "7")
    away.rename(there)
    (there / "new.txt").write_text("new and " * 150)
    said = refused("train", "--resume", folder, "--train.steps", "7")
    (there / "new.txt").unlink()
    assert re.search("trained on, 4 files of .* found others, 5 files of .* --from", said)
    refused("train", "--resume", folder, "--train.steps", "0")
    assert [(folder / name).read_text() for name in ("recipe.json", "result.json")] == kept
    longer = run(None, folder, resume=True, quiet=True, steps=7)
    after = lines(folder, "valid")
    assert [line["step"] for line in after] == [3, 5, 6, 7]
    assert [line["loss"] for line in after[:2]] == [line["loss"] for line in before]
    assert (longer["best_step"], longer["valid"]["loss"]) == (5, before[-1]["loss"])
    equal(mnemos.load(folder).state_dict(), weights(folder, 5))
    # Until the longer run has ended, there is no model of it.
    (folder / "result.json").unlink()
    with pytest.raises(InputError, match=r"found no result.json"):
        mnemos.load(folder)


def test_the_best_weights_are_kept_and_a_run_stops_early(text_run, tmp_path, capsys):
    asked = recipe(str(text_run.parent / "texts"), steps=40, keep_best=True, patience=2, keep=99)
    asked = replace(asked, optim=OptimConfig(lr=0.3))  # far too high: the loss goes up and down
    whole = run(asked, tmp_path / "run", quiet=True)
    valid = {line["step"]: line["loss"] for line in lines(tmp_path / "run", "valid")}
    best = min(valid, key=valid.__getitem__)
    assert (whole["best_step"], whole["steps"], whole["stopped_early"]) == (best, best + 4, True)
    assert whole["valid"]["loss"] == valid[best]
    equal(mnemos.load(tmp_path / "run").state_dict(), weights(tmp_path / "run", best))
    assert evaluate_run(tmp_path / "run")["as trained"] == pytest.approx(whole["test"])
    # A killed run goes on with what it knew of the best evaluation.
    killed = stopped(tmp_path / "run", tmp_path / "killed", best + 3, best + 4)
    again = train(read_recipe(killed), killed, resume=True, quiet=True)
    assert all(again[key] == whole[key] for key in ("best_step", "steps", "test", "stopped_early"))
    assert main(["train", "--resume", str(tmp_path / "run"), "--train.steps", "90"]) == 2
    capsys.readouterr()
    run(None, tmp_path / "run", resume=True)
    assert f"had stopped early; --from {tmp_path / 'run'} starts another" in capsys.readouterr().out


TEXT = " \n = {0} = \n \n The {0} is a {0} of two words , one of which is {0} . \n"


def texts_about(folder: Path, names: str) -> Path:
    for split in ("train", "valid", "test"):
        (folder / split).mkdir(parents=True)
        for i, name in enumerate(names.split() * 5):
            (folder / split / f"{i:02}.txt").write_text(TEXT.format(name))
    return folder


@pytest.fixture(scope="module")
def words_run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("words")
    model = {"dim": 16, "layers": 1, "num_heads": 2, "mlp": 16, "head": HeadConfig(tied=True, cutoffs=(4, 8))}
    data = {"path": str(texts_about(folder / "texts", "owl elk fox cat")), "segment": 8}
    return trained("text-words", folder / "run", model, data, steps=3, eval_every=3, log_every=1)


def test_a_run_of_words_is_scored_in_bits_per_byte(words_run):
    assert {"bits per byte", "perplexity"} < evaluate_run(words_run)["as trained"].keys()
    first = lines(words_run)[0]
    assert "bits per byte" in first
    assert "accuracy" not in first, "no second pass over all words in training"


def test_some_rows_are_scored(words_run, capsys, output, refused):
    whole = evaluate_run(words_run, rows=0)
    assert "--rows 0 scores all" not in capsys.readouterr().out
    said = output("eval", words_run, "--rows", "2")
    counted = int(said.split("text-words, ")[1].split(" targets of test split of")[0])
    assert 0 < counted <= 2 * 8
    for name in whole:
        assert f"  {name:11} loss {whole[name]['loss']:.4f}" not in said
    assert "--rows: expected at least 1, or 0 for all, found -1" in refused("eval", words_run, "--rows", "-1")


def test_a_run_is_scored_at_other_lengths(words_run, capsys, refused):
    own = evaluate_run(words_run)["as trained"]["loss"]
    assert evaluate_run(words_run, fields=["--model.attention.memory", "64"])["as trained"]["loss"] == own, (
        "a document is no longer than the memory of 64 that the model has"
    )
    short = ["--data.segment", "4", "--model.attention.memory", "2", "--model.attention.same-length", "True"]
    capsys.readouterr()
    assert evaluate_run(words_run, fields=[*short, "--model.attention.clamp", "1"])["as trained"]["loss"] != own
    assert "changed: model.attention.memory 2 instead of 64\n" in capsys.readouterr().out
    may = r"(--model.max_length, --model.attention.memory, --model.attention.same_length, --model.attention.clamp)"
    for words, expected in (
        (["--model.layers", "2"], f"settings of the model that an evaluation may change {may}, found --model.layers"),
        (["--data.words", "9"], "expected the vocabulary that the run's model was trained with (words), found another"),
    ):
        assert expected in refused("eval", words_run, *words)


def test_other_text_is_read_with_the_runs_vocabulary(words_run, tmp_path, output):
    other = texts_about(tmp_path / "other", "owl owl ape")
    said = output("eval", words_run, "--data.path", other)
    assert "in the vocabulary: test 330 (6.06% unknown)\n" in said
    unfinished = stopped(words_run, tmp_path / "unfinished")
    shutil.rmtree(unfinished / "model")
    assert output("eval", unfinished, "--data.path", other) == said.replace(str(words_run), str(unfinished))
