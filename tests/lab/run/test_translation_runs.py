"""A run that translates: trained, scored, resumed, and used from Python and the command line."""

import io
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import sacrebleu
from sacrebleu.metrics import CHRF
from train_standins import train
from trained_runs import equal, lines, result, stopped
from translation_standins import sentences, write_pairs

import mnemos
from mnemos import InputError, registry
from mnemos.lab.cli import main
from mnemos.lab.report import report
from mnemos.lab.report.outputs import differing
from mnemos.lab.run import devices
from mnemos.lab.run.checks import complete
from mnemos.lab.run.learner import Learner
from mnemos.lab.run.loop import update
from mnemos.lab.run.recipe import Recipe
from mnemos.lab.run.session import run
from mnemos.lab.translation.translation_vocabulary import SubWordTokens


def recipe(folder: Path, cached: bool = False) -> Recipe:
    made = registry.load("recipe", "multi30k-en-de" + "-cached" * cached)()
    return replace(
        made,
        model=replace(made.model, dim=32, encoder_layers=1, decoder_layers=1, num_heads=2, mlp=32, dropout=0.1),
        data=replace(made.data, path=str(folder), subwords=80, longest=40, batch_tokens=400, valid_translated=6),
        optim=replace(made.optim, schedule=replace(made.optim.schedule, warmup=10)),
        train=replace(made.train, steps=16, eval_every=8, checkpoint_every=6, average=2, log_every=4),
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_pairs(tmp_path_factory.mktemp("pairs"))


@pytest.fixture(scope="module")
def plain(folder, tmp_path_factory) -> Path:
    run(recipe(folder), out := tmp_path_factory.mktemp("runs") / "plain", quiet=True)
    return out


@pytest.fixture(scope="module")
def cached(folder, tmp_path_factory) -> Path:
    made = recipe(folder, cached=True)
    made = replace(made, train=replace(made.train, steps=4, eval_every=4, average=0))
    run(made, out := tmp_path_factory.mktemp("runs") / "cached", quiet=True)
    return out


def rows(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "translations.jsonl").read_text().splitlines()]


def test_scores_are_those_of_the_translations_that_are_kept(plain, folder):
    ended, found = result(plain), rows(plain)
    assert [row["source"] for row in found] == (folder / "test.en").read_text().splitlines()
    sides = [row["translation"] for row in found], [[row["reference"] for row in found]]
    assert ended["test"]["BLEU"] == pytest.approx(sacrebleu.corpus_bleu(*sides, lowercase=True).score)
    assert ended["test"]["chrF"] == pytest.approx(CHRF(lowercase=True).corpus_score(*sides).score)
    assert "case:lc" in ended["signatures"]["BLEU"]
    assert "case:lc" in ended["metrics"]["BLEU"]["about"]
    assert ended["cleaning"]["train"] == {"read": 300, "empty": 0, "long": 0, "uneven": 0, "kept": 300}
    first, *_, last = lines(plain)
    assert last["loss"] < first["loss"] - 0.2


def test_an_interrupted_run_continues_bit_for_bit(plain, tmp_path):
    run(None, stopped(plain, tmp_path / "run", 16), resume=True, quiet=True)
    equal(mnemos.load(tmp_path / "run").state_dict(), mnemos.load(plain).state_dict())
    assert rows(tmp_path / "run") == rows(plain)


def test_sentences_are_translated_from_python_and_the_command_line(plain, monkeypatch, tmp_path, output, refused):
    found = rows(plain)[:5]
    sentences = [row["source"] for row in found]
    done = []
    ours = mnemos.translate(plain, [*sentences, ""], progress=lambda *count: done.append(count))
    assert [one[0].text for one in ours] == [*(row["translation"] for row in found), ""]
    assert [one[0].score for one in ours[:5]] == pytest.approx([row["score"] for row in found], abs=1e-3)
    assert done[-1] == (6, 6)
    several = mnemos.translate(mnemos.TrainedTranslator(plain), sentences, beams=4, n_best=3)
    assert all(len(one) == 3 and one[0].score >= one[1].score >= one[2].score for one in several)

    class Given:
        buffer = io.BytesIO("\n".join(sentences).encode())

    monkeypatch.setattr(sys, "stdin", Given)
    assert output("translate", plain).splitlines() == [row["translation"] for row in found]
    (tmp_path / "a.txt").write_text("\n".join(sentences))
    said = output("translate", plain, tmp_path / "a.txt", "--beams", "4", "--n-best", "3").splitlines()
    assert [line.split(" ||| ")[:2] for line in said[3:6]] == [["1", one.text] for one in several[1]]
    assert "found one that translates; use mnemos translate" in refused("predict", plain, tmp_path / "a.txt")
    (tmp_path / "a.txt").write_text("one\u2028two\nthree\x0cfour.\n", encoding="utf-8")
    assert output("translate", plain, tmp_path / "a.txt").count("\n") == 2  # neither is a line's end


def test_a_run_starts_from_one_with_the_same_sub_words_alone(plain, folder, tmp_path):
    made = recipe(folder)
    made = replace(made, train=replace(made.train, steps=1, average=0, init_from=str(plain)))
    train(made, tmp_path / "same", quiet=True)
    SubWordTokens.train([text for pair in sentences(100, 9) for text in pair], 80).write(tmp_path / "other.json")
    other = replace(made, data=replace(made.data, tokenizer=str(tmp_path / "other.json"), lowercase=False))
    with pytest.raises(InputError, match=r"^train\.init_from: expected a run with the 80 sub-words of the data"):
        train(other, tmp_path / "other", quiet=True)
    assert not (tmp_path / "other").exists()


def test_a_sentence_that_is_too_long_writes_nothing(plain, tmp_path, capsys):
    (tmp_path / "a.txt").write_text("one.\n" * 3 + "one " * 60)
    assert main(["translate", str(plain), str(tmp_path / "a.txt")]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert "a.txt: line 4: expected a sentence of at most 40 sub-words" in said.err
    with pytest.raises(InputError, match="n_best: expected at most beams, 5, found 6; lower it"):
        mnemos.translate(plain, ["one"], n_best=6)
    assert main(["translate", str(tmp_path / "nothing")]) == 2
    assert "nothing: expected" in (said := capsys.readouterr().err)
    assert "no such folder" in said


def test_micro_batches_of_unequal_size_give_the_same_update(folder, tmp_path):
    """Batches by tokens have any number of rows; the loss is the mean over all targets, however rows are divided."""
    base = recipe(folder)
    base, task = replace(base, model=replace(base.model, dropout=0.0)), base.data.build()
    found = []
    for fields in ({}, {"accumulate": 5}, {"precision": "bf16-mixed"}):
        made = replace(base, train=replace(base.train, batch_size=30, **fields))
        learner = Learner(devices.connect(made.train), complete(made, task), task)
        found.append([(done["loss"], done["grad_norm"]) for done in (update(learner), update(learner))])
    few = replace(base, train=replace(base.train, batch_size=20, accumulate=20))
    with pytest.raises(InputError, match=r"data\.batch_tokens: expected training batches of at least 20 rows"):
        train(few, tmp_path / "few", quiet=True)
    assert not (tmp_path / "few").exists()
    assert any(len(task.train_batch(i, 30, 0).rows) % 5 for i in range(2))
    assert found[1] == [pytest.approx(one, rel=1e-4) for one in found[0]]
    assert found[2] == [pytest.approx(one, rel=0.05) for one in found[0]]


def test_a_report_shows_sources_and_marks_where_variants_differ(plain, cached, tmp_path):
    page = report([plain, cached], tmp_path / "page.html").read_text()
    part = page[page.index("Sentences of the test split") :]
    assert rows(plain)[0]["source"] in part
    assert "words that the first variant does not have there" in part
    assert "Validation BLEU" in page
    assert differing("a b x d", "a b c d e") == "a b <b>x</b> d"


def test_runs_averaged_models_and_files_are_scored_beside_each_other(plain, cached, tmp_path, output, refused):
    first, second = result(plain)["test"], result(cached)["test"]
    averaged, written = tmp_path / "averaged", tmp_path / "out.de"
    (tmp_path / "test.en").write_text("".join(row["source"] + "\n" for row in rows(plain)))
    assert main(["average", str(plain), "--last", "2", "--out", str(averaged)]) == 0  # the run's model is this one
    written.write_text(output("translate", averaged, tmp_path / "test.en"))
    said = output("score", plain, cached, written, "--samples", "50").splitlines()
    for line, path, test in ((0, plain, first), (1, cached, second), (5, written, first)):
        assert said[line].startswith(f"{path}: BLEU {test['BLEU']:.2f}, chrF {test['chrF']:.2f}, tokenised BLEU ")
    assert said[2].startswith(f"  BLEU {second['BLEU'] - first['BLEU']:+.2f} against the first; p = ")
    assert said[6] == "  BLEU +0.00 against the first; p = 1.000 by paired bootstrap"
    assert "sacremoses" in said[-1]
    assert "found no translations.jsonl; train one to its end, or write a file" in refused("score", averaged)


def test_a_run_is_evaluated_on_its_own_and_on_other_text(plain, tmp_path, output, refused):
    assert "nrefs:1|case:lc" in output("eval", plain, "--split", "valid")
    other = write_pairs(tmp_path / "other", rows=50)
    (other / "val.de").unlink()
    assert "expected val.de beside val.en" in refused("eval", plain, "--data.path", other, "--split", "valid")
    assert "BLEU" in output("eval", plain, "--data.path", other)
