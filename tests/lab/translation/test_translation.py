"""The task of translation: what is read, cleaned and batched; its loss; its scores."""

import gzip
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import sacrebleu
import torch
from translation_standins import sentences, write_pairs

from mnemos.lab.compare.budgets import samples_per_update
from mnemos.lab.run.recipe import OptimConfig, Recipe, TrainConfig
from mnemos.lab.tasks.batch import IGNORE
from mnemos.lab.translation.translate import beam_config, pad, search
from mnemos.lab.translation.translation import TranslationConfig, TranslationTask
from mnemos.lab.translation.translation_scores import BLEU, CHRF, TOKENISED, Scorer
from mnemos.lab.translation.translation_vocabulary import END, PAD, START, SubWordTokens
from mnemos.models import EncoderDecoder
from mnemos.models.encoder_decoder import EncoderDecoderConfig
from mnemos.types import InputError

SHARED = Path(__file__).parents[3] / "../shared/data/multi30k-en-de"


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> TranslationConfig:
    folder = write_pairs(tmp_path_factory.mktemp("pairs"))
    return TranslationConfig(path=str(folder), subwords=80, longest=40, batch_tokens=300)


@pytest.fixture(scope="module")
def task(config) -> TranslationTask:
    return config.build()


def texts(task: TranslationTask, batch) -> list[tuple[str, str]]:
    source, target = task.vocabularies
    rows = zip(batch.inputs.source.tolist(), batch.targets.tolist(), strict=True)
    return [(source.decode(one), target.decode([t for t in other if t != IGNORE])) for one, other in rows]


def test_the_samples_of_an_update_are_the_pairs_of_a_batch_that_tokens_limit(task, config):
    for size in (4, 64):
        recipe = Recipe(EncoderDecoderConfig(), config, OptimConfig(), TrainConfig(batch_size=size))
        found = [len(task.train_batch(i, size, 0).targets) for i in range(int(task.epoch(size)))]
        assert samples_per_update(recipe) == pytest.approx(np.mean(found))
    assert np.mean(found) < 64 / 2, "tokens limit the batches"


def test_batches_hold_the_pairs_with_their_special_tokens(task):
    seen = []
    for i in range(int(task.epoch(64))):
        batch = task.train_batch(i, 64, 0)
        seen += texts(task, batch)
        targets, mask = batch.targets, batch.mask if batch.mask is not None else batch.targets != IGNORE
        assert (batch.inputs.target[:, 0] == START).all()
        assert (batch.inputs.target[:, 1:] == torch.where(mask, targets, PAD)[:, :-1]).all()
        assert ((targets == END).sum(1) == 1).all()
        valid = batch.inputs.mask if batch.inputs.mask is not None else batch.inputs.source != PAD
        assert ((batch.inputs.source == END).sum(1) == 1).all()
        assert (valid == (batch.inputs.source != PAD)).all()
        assert (mask == (targets != IGNORE)).all()
        assert task.count(batch) == int(mask.sum())
        assert task.tokens(batch) == int(mask.sum() + valid.sum())
    assert sorted(seen) == sorted(sentences(300, 0))
    held = [pair for batch in task.batches("test", 64) for pair in texts(task, batch)]
    assert sorted(held) == sorted(sentences(16, 2))
    test = task.corpora["test"]
    assert [*zip(test.sources, test.references, strict=True)] == sentences(16, 2), "what scores are counted against"
    assert task.size("test") == sum(task.count(batch) for batch in task.batches("test", 5))


def test_cleaning_is_counted_and_said(tmp_path):
    folder = write_pairs(tmp_path)
    more = [("", "eins."), ("one", "eins " * 50), ("one two three four five six seven eight", "x"), ("two.", "zwei!")]
    for side, language in enumerate(("en", "de")):
        text = gzip.decompress((folder / f"train.{language}.gz").read_bytes()).decode()
        text += "".join(pair[side] + "\n" for pair in more)
        (folder / f"train.{language}.gz").write_bytes(gzip.compress(text.encode()))
    task = TranslationConfig(path=str(folder), subwords=80, longest=40, ratio=3.0).build()
    assert "301 of 304 pairs; left out: 1 with an empty side, 1 with more than 40 sub-words, " in task.about[0]
    assert "1 with more than 3 times as many sub-words on one side" in task.about[0]
    assert len(task.corpora["train"]) == 301
    any_ratio = TranslationConfig(path=str(folder), subwords=80, longest=40, ratio=0.0).build()
    assert len(any_ratio.corpora["train"]) == 302


@pytest.mark.parametrize(
    ("language", "line", "found"),
    [
        ("en", "one " * 50, "5[0-9]; correct the line, or remove it in both languages, or raise data.longest$"),
        ("de", "", "an empty line; correct the line, or remove it in both languages$"),
    ],
)
def test_a_held_out_sentence_that_cannot_be_scored_is_named(tmp_path, language, line, found):
    folder = write_pairs(tmp_path)
    lines = (folder / f"test.{language}").read_text().splitlines()
    lines[4] = line
    (folder / f"test.{language}").write_text("\n".join(lines))
    said = rf"test\.{language}: line 5: expected a sentence of 1 to 40 sub-words, .* found {found}"
    with pytest.raises(InputError, match=said):
        TranslationConfig(path=str(folder), subwords=80, longest=40).build()


def test_every_nth_training_pair_may_be_the_validation_split(config):
    task = replace(config, held_out=10).build()
    whole = sentences(300, 0)
    valid = task.corpora["valid"]
    assert list(zip(valid.sources, valid.references, strict=True)) == whole[9::10]
    assert len(task.corpora["train"]) == 270
    assert "one pair in 10" in task.about[1]


def test_separate_sub_words_and_those_of_files(config, task, tmp_path):
    apart = replace(config, joint=False, subwords=50).build()
    assert not apart.vocabularies.joint
    assert apart.sizes == {"vocab_size": 50, "max_length": 41, "source_vocab_size": 50}
    assert task.sizes == {"vocab_size": 80, "max_length": 41}
    task.vocabularies.source.write(tmp_path / "both.json")
    again = replace(config, tokenizer=str(tmp_path / "both.json")).build()
    assert again.preprocessing() == task.preprocessing()
    assert again.config.files()[-1] == tmp_path / "both.json"
    assert "another tokenizer" in apart.preprocessing().difference(task.preprocessing())
    assert task.preprocessing().difference(config.build().preprocessing()) is None


def test_a_tokenizer_of_a_file_lower_cases_where_the_recipe_does(config, task, tmp_path):
    lines = [side for pair in sentences(300, 0) for side in pair]
    for name, lowercase in (("lower", True), ("cased", False)):
        SubWordTokens.train(lines, 80, lowercase).write(tmp_path / f"{name}.json")
    given = replace(config, tokenizer=str(tmp_path / "lower.json"), lowercase=True).build()
    assert given.scorer.signatures[BLEU].startswith("nrefs:1|case:lc")
    cased = replace(config, tokenizer=str(tmp_path / "cased.json"))
    assert "case:mixed" in cased.build().scorer.signatures[BLEU]
    with pytest.raises(InputError, match=r"cased\.json, which keeps the case; make it with mnemos tokenizer"):
        replace(cased, lowercase=True).build()


def test_some_pairs_are_translated_greedily_in_training_and_all_by_the_beam_in_the_end(config):
    task = replace(config, valid_translated=6).build()
    beams = {split: torch.cat([b.beams for b in task.batches(split, 8)]).tolist() for split in ("valid", "test")}
    assert sorted(beams["valid"]) == [0] * 18 + [1] * 6
    assert set(beams["test"]) == {5}
    numbers = {split: sorted(n for b in task.batches(split, 8) for n in b.rows.tolist()) for split in beams}
    assert numbers == {"valid": [*range(24)], "test": [*range(24, 40)]}, "no two pairs have one number"


def test_label_smoothing_is_its_definition_in_training_alone(config, task):
    batch = task.train_batch(0, 8, 0)
    logits = torch.randn(*batch.targets.shape, task.vocab_size, dtype=torch.float64)
    model = torch.nn.Identity()
    log_p = logits.log_softmax(-1)[batch.targets != IGNORE]
    right = batch.targets[batch.targets != IGNORE]
    nll = -log_p.gather(1, right[:, None]).sum()
    smooth = -(log_p.sum(1) / task.vocab_size).sum()
    assert torch.allclose(task.loss(model.train(), logits, batch), 0.9 * nll + 0.1 * smooth)
    assert torch.allclose(task.loss(model.eval(), logits, batch), nll)
    plain = replace(config, label_smoothing=0.0).build()
    assert torch.allclose(plain.loss(model.train(), logits, batch), nll)


def test_a_translation_does_not_depend_on_the_sentences_of_its_batch():
    torch.manual_seed(3)
    model = EncoderDecoder(vocab_size=30, dim=32, encoder_layers=1, decoder_layers=1, num_heads=2, mlp=32).eval()
    short, long = (torch.randint(4, 30, (1, length)) for length in (3, 60))
    both, mask = pad([short[0].tolist(), long[0].tolist()])
    with torch.no_grad():
        alone = search(model, short, None, beam_config(99))[0][0]
        beside = search(model, both, mask, beam_config(99))[0][0]
    assert len(alone.tokens) == 13  # 1.2 × 3 + 10: this model ends nothing by itself
    assert torch.equal(alone.tokens, beside.tokens)
    assert alone.score == pytest.approx(beside.score, rel=1e-5)


REFERENCES = ["Ein Mann, der nicht lacht.", "Zwei Hunde (braun) spielen.", "Eine Frau liest."]
OURS = ["Ein Mann, der lacht.", "Zwei Hunde (schwarz) spielen!", "Eine Frau liest ein Buch."]


def test_scores_are_those_of_sacrebleu_with_their_signatures():
    scorer = Scorer("de")
    assert scorer.score(BLEU, OURS, REFERENCES) == sacrebleu.corpus_bleu(OURS, [REFERENCES]).score
    assert scorer.score(CHRF, OURS, REFERENCES) == sacrebleu.corpus_chrf(OURS, [REFERENCES]).score
    assert scorer.tokens("Ein Mann (alt), z. B. er.") == "Ein Mann ( alt ) , z. B. er ."
    tokens = [[scorer.tokens(line) for line in side] for side in (OURS, REFERENCES)]
    found = sacrebleu.corpus_bleu(tokens[0], [tokens[1]], tokenize="none", force=True).score
    assert scorer.score(TOKENISED, OURS, REFERENCES) == found
    assert "tok:13a" in scorer.signatures[BLEU]
    assert all(word in scorer.signatures[TOKENISED] for word in ("tok:none", "sacremoses"))
    upper = [line.upper() for line in REFERENCES]
    assert Scorer("de", lowercase=True).score(BLEU, upper, REFERENCES) == pytest.approx(100)
    assert scorer.score(BLEU, upper, REFERENCES) < 50


def test_the_paired_bootstrap_tells_systems_apart():
    found = Scorer("de").paired(BLEU, [["Ein Hund."] * 60, OURS * 20, ["Ein Hund."] * 60], REFERENCES * 20, 100)
    (worse, _), (better, p), same = found
    assert better == pytest.approx(sacrebleu.corpus_bleu(OURS * 20, [REFERENCES * 20]).score)
    assert better > worse + 10
    assert p < 0.05
    assert same == (worse, 1.0)  # sacrebleu's own p of equal systems is the least there is


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"target": "en"}, r"data\.target: expected target != source"),
        (
            {"valid": "dev"},
            r"expected dev\.en and dev\.de .* found no valid split .* among test\.de, .* data\.valid, or correct",
        ),
        ({"held_out": 10, "valid": "val"}, r"data\.valid: expected not .valid and held_out."),
    ],
)
def test_settings_that_do_not_fit(config, changed, message):
    with pytest.raises(InputError, match=message):
        replace(config, **changed).build().train_batch(0, 8, 0)
