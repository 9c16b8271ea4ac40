"""The task of translation: what is read, cleaned and batched; its loss; its scores."""

import gzip
import json
import math
import unicodedata
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import sacrebleu
import torch
from refusals import refuses
from translation_standins import sentences, write_pairs

from mnemos.lab.compare.budgets import samples_per_update
from mnemos.lab.run.recipe import OptimConfig, Recipe, TrainConfig
from mnemos.lab.tasks.batch import IGNORE
from mnemos.lab.translation.parallel_corpus import Corpus
from mnemos.lab.translation.parallel_text import SentencePair
from mnemos.lab.translation.translate import Translator, beam_config, pad, search
from mnemos.lab.translation.translation import TranslationConfig, TranslationTask
from mnemos.lab.translation.translation_scores import BLEU, CHRF, TOKENISED, Scorer
from mnemos.lab.translation.translation_vocabulary import END, PAD, START, SubWordTokens
from mnemos.models import EncoderDecoder
from mnemos.models.encoder_decoder import EncoderDecoderConfig

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
        assert samples_per_update(recipe) == (pytest.approx(np.mean(found)), "rows")
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
    pair = SentencePair("one two three", "eins.", (folder, 1), (folder, 1))
    sizes = [len(side.encode([text])[0]) for side, text in zip(task.vocabularies, pair[:2], strict=True)]
    for ratio, kept in ((max(sizes) / min(sizes), 1), (0.99 * max(sizes) / min(sizes), 0)):
        assert len(Corpus([pair], task.vocabularies, 40, ratio, strict=False)) == kept
    most = max(int(corpus.lengths.max()) for corpus in any_ratio.corpora.values()) - 1
    assert len(replace(any_ratio.config, longest=most).build().corpora["train"]) == 302


@pytest.mark.parametrize(
    ("language", "line", "found"),
    [("en", "one " * 50, "5[0-9]; .*, or raise data.longest$"), ("de", "", "an empty line; .* in both languages$")],
)
def test_a_held_out_sentence_that_cannot_be_scored_is_named(tmp_path, language, line, found):
    file = write_pairs(tmp_path) / f"test.{language}"
    lines = file.read_text().splitlines()
    file.write_text("\n".join([*lines[:4], line, *lines[5:]]))
    said = rf"test\.{language}: line 5: expected a sentence of 1 to 40 sub-words, .* found {found}"
    refuses(said, TranslationConfig(path=str(tmp_path), subwords=80, longest=40).build)


@pytest.mark.parametrize(("split", "lines"), [("train", 5), ("test", 0)])
def test_a_split_of_which_no_pair_is_left_is_refused_by_its_name(tmp_path, task, split, lines):
    folder = write_pairs(tmp_path)
    (tmp_path / "tokenizer.json").write_text(task.vocabularies.source.content)
    for language in ("en", "de"):
        for old in folder.glob(f"{split}.{language}*"):
            old.unlink()
        (folder / f"{split}.{language}").write_text("\n" * lines)
    config = TranslationConfig(path=str(folder), tokenizer=str(tmp_path / "tokenizer.json"), longest=40)
    words = f"expected a {split} split of at least one pair, found that none of its {lines} is left; give more text"
    refuses(words, config.build)
    if not lines:
        refuses(words, config.build_to_score, "test")


def test_every_nth_training_pair_may_be_the_validation_split(config):
    task = replace(config, held_out=10).build()
    whole = sentences(300, 0)
    valid = task.corpora["valid"]
    assert list(zip(valid.sources, valid.references, strict=True)) == whole[9::10]
    train = [task.vocabularies.source.decode(row) for row in task.corpora["train"].source]
    assert train == [one for number, (one, _) in enumerate(whole, 1) if number % 10]
    assert "one pair in 10" in task.about[1]
    scored = config.build_to_score("valid", replace(config, subwords=60).build().preprocessing())
    assert (scored.size("valid"), scored.vocab_size) == (sum(len(x) for x in scored.corpora["valid"].target) + 24, 60)
    words = r"expected none\.en and none\.de .* found no test split .*, or correct data.source and data.target$"
    refuses(words, replace(config, test="none").build_to_score, "test")


def test_separate_sub_words_and_those_of_files(config, task, tmp_path):
    apart = replace(config, joint=False, subwords=50).build()
    assert not apart.vocabularies.joint
    assert apart.sizes == {"vocab_size": 50, "max_length": 41, "source_vocab_size": 50}
    assert task.sizes == {"vocab_size": 80, "max_length": 41}
    assert task.about[-1] == "en-de, sub-words: 80, shared, learned from the training split"
    assert apart.about[-1] == "en-de, sub-words: 50 and 50, learned from the training split"
    task.vocabularies.source.write(tmp_path / "both.json")
    again = replace(config, tokenizer=str(tmp_path / "both.json")).build()
    assert again.preprocessing() == task.preprocessing()
    assert again.config.files()[-1] == tmp_path / "both.json"
    assert again.config.build_to_score("test", apart.preprocessing()).vocab_size == 80
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
    refuses(r"cased\.json, which keeps the case; make it with mnemos tokenizer", replace(cased, lowercase=True).build)


def test_some_pairs_are_translated_greedily_in_training_and_all_by_the_beam_in_the_end(config):
    task = replace(config, valid_translated=6).build()
    beams = {split: torch.cat([b.beams for b in task.batches(split, 8)]).tolist() for split in ("valid", "test")}
    rows = torch.cat([b.rows for b in task.batches("valid", 8)]).tolist()
    greedy = {row for row, beam in zip(rows, beams["valid"], strict=True) if beam == 1}
    assert (greedy, beams["valid"].count(0)) == ({0, 4, 9, 13, 18, 23}, 18)
    assert set(beams["test"]) == {5}
    numbers = {split: sorted(n for b in task.batches(split, 8) for n in b.rows.tolist()) for split in beams}
    assert numbers == {"valid": [*range(24)], "test": [*range(24, 40)]}, "no two pairs have one number"


def test_a_split_is_translated_shown_and_scored(config, tmp_path):
    task = replace(config, beams=1).build()
    torch.manual_seed(0)
    sizes = {"dim": 16, "encoder_layers": 1, "decoder_layers": 1, "num_heads": 2, "mlp": 16}
    model, pairs = EncoderDecoder(vocab_size=80, max_length=41, **sizes).eval(), sentences(16, 2)
    ours = [*Translator(model, task.vocabularies, 40).translate([one for one, _ in pairs], task.decoding)]
    found = task.artifacts(model, tmp_path, "test")
    text = (tmp_path / "translations.jsonl").read_text(encoding="utf-8")
    assert "fünf" in text, "as it is read"
    rows = [json.loads(line) for line in text.splitlines()]
    wanted = [(*pair, one.text, round(one.score, 4)) for pair, (one,) in zip(pairs, ours, strict=True)]
    assert [tuple(row.values()) for row in rows] == wanted
    shown = [wanted[row][:3] for row in (0, 2, 4, 6, 8, 10, 12, 15)]
    assert [tuple(row.values()) for row in found["translations"]] == shown
    about = found["examples"]["translations"]
    assert (about["compared"], about["exact"]) == (True, False)
    assert found["cleaning"]["test"] == {"read": 16, "empty": 0, "long": 0, "uneven": 0, "kept": 16}
    names = "source      ", "reference   ", "translation "
    lines = ["\n".join(f"  {name}{part}" for name, part in zip(names, one, strict=True)) for one in shown]
    assert task.show(model, "test") == [
        *lines,
        *(f"  {name}: {task.scorer.signatures[name]}" for name in (CHRF, TOKENISED)),
    ]
    with torch.no_grad():
        records = [record for batch in task.batches("test", 5) for record in task.translated(model, None, batch)]
    assert sorted(records) == [(24 + row, one[2]) for row, one in enumerate(wanted)]
    assert task.metrics[1].value(records[:3]) == pytest.approx(
        task.scorer.score(CHRF, [text for _, text in records[:3]], [pairs[number - 24][1] for number, _ in records[:3]])
    )
    (batch, *_) = replace(config, valid_translated=1).build().batches("valid", 2)
    assert task.translated(model, None, batch._replace(beams=0 * batch.beams)) == []
    sizes = [len(task.train_batch(i, 8, 0).rows) for i in range(int(task.epoch(8)))]
    assert (task.mean_rows(8), task.fewest_rows(8)) == (np.mean(sizes), min(sizes))
    assert [one.higher_is_better for one in task.metrics] == [True, True, True, False]
    assert task.example().inputs.source.shape == task.example().targets.shape == (1, 41)


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
    short, long = (torch.randint(4, 30, (1, length)) for length in (5, 60))
    both, mask = pad([short[0].tolist(), long[0].tolist()])
    with torch.no_grad():
        alone = search(model, short, None, beam_config(99))[0][0]
        beside = search(model, both, mask, beam_config(99))[0][0]
    assert len(alone.tokens) == 16  # 1.2 × 5 + 10: this model ends nothing by itself
    assert torch.equal(alone.tokens, beside.tokens)
    assert alone.score == pytest.approx(beside.score, rel=1e-5)


REFERENCES = ["Ein Mann, der nicht lacht.", "Zwei Hunde (braun) spielen.", "Eine Frau liest."]
OURS = ["Ein Mann, der lacht.", "Zwei Hunde (schwarz) spielen!", "Eine Frau liest ein Buch."]


def test_forms_of_a_letter_are_one():
    """A vocabulary writes composed letters (NFC), references may be in others, as macOS has them."""
    composed = ["Das sind fünf große Bären im Wald.", "Schön, dass du heute hier bist."]
    apart = [unicodedata.normalize("NFD", one) for one in composed]
    assert apart != composed
    for name in (BLEU, CHRF, TOKENISED):
        assert Scorer("de").score(name, composed, apart) == pytest.approx(100)
    assert math.isnan(Scorer("de").score(BLEU, [], []))


def test_pairs_of_the_training_split_in_another_are_said(tmp_path, task):
    assert not any("warning" in line for line in task.about)
    folder = write_pairs(tmp_path)
    for language in ("en", "de"):
        lines = gzip.decompress((folder / f"train.{language}.gz").read_bytes()).splitlines(keepends=True)
        for path in folder.glob(f"test*.{language}*"):
            path.unlink()
        (folder / f"test.{language}").write_bytes(b"".join(lines[:3]))
    (line,) = [line for line in TranslationConfig(path=str(folder), subwords=80).build().about if "warning" in line]
    assert line.startswith("warning: 3 of 3 test pairs are in the training split too")


def test_scores_are_those_of_sacrebleu_with_their_signatures(capfd):
    scorer = Scorer("de")
    assert scorer.score(BLEU, OURS, REFERENCES) == sacrebleu.corpus_bleu(OURS, [REFERENCES]).score
    assert scorer.score(CHRF, OURS, REFERENCES) == sacrebleu.corpus_chrf(OURS, [REFERENCES]).score
    assert scorer.tokens("Ein Mann (alt), z. B. & er.") == "Ein Mann ( alt ) , z. B. & er ."
    tokens = [[scorer.tokens(line) for line in side] for side in (OURS, REFERENCES)]
    found = sacrebleu.corpus_bleu(tokens[0], [tokens[1]], tokenize="none", force=True).score
    assert scorer.score(TOKENISED, OURS, REFERENCES) == found
    assert "tok:13a" in scorer.signatures[BLEU]
    assert all(word in scorer.signatures[TOKENISED] for word in ("tok:none", "sacremoses"))
    upper = [line.upper() for line in REFERENCES]
    assert Scorer("de", lowercase=True).score(BLEU, upper, REFERENCES) == pytest.approx(100)
    assert scorer.score(BLEU, upper, REFERENCES) < 50
    capfd.readouterr()
    scorer.score(TOKENISED, 100 * ["Zwei Hunde."], 100 * ["Zwei Hunde."])
    assert capfd.readouterr() == ("", ""), "no warning that the text is tokenised, as it should be"


def test_the_paired_bootstrap_tells_systems_apart():
    systems = [["Ein Hund."] * 9, OURS * 3, ["Ein Hund."] * 9]
    (worse, _), (better, p), same = Scorer("de").paired(BLEU, systems, REFERENCES * 3, 30)
    assert better == pytest.approx(sacrebleu.corpus_bleu(OURS, [REFERENCES]).score)
    assert better > worse + 10
    assert p < 0.05
    assert same == (worse, 1.0)  # sacrebleu's own p of equal systems is the least there is


def test_settings_that_do_not_fit(config):
    refuses(r"data\.target: expected target != source", replace(config, target="en").build)
    refuses(r"data\.valid: expected not .valid and held_out.", replace(config, held_out=10, valid="val").build)
    words = r"expected dev\.en and dev\.de .* no valid split .* among test\.de, .* data\.valid, .*held_out$"
    refuses(words, replace(config, valid="dev").build)
