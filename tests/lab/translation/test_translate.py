"""Sentences translated by a model that was never trained, and scores of runs that hold a few translations."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import sacrebleu
import torch
from refusals import refuses
from translation_standins import sentences

import mnemos
from mnemos.config import to_dict
from mnemos.lab.tasks.preprocessing import Preprocessing
from mnemos.lab.tasks.text import TextPreprocessing
from mnemos.lab.translation import translate as module
from mnemos.lab.translation.translate import TrainedTranslator, TranslationPreprocessing, beam_config, search
from mnemos.lab.translation.translation_scores import NAMES, Scorer, score_systems
from mnemos.lab.translation.translation_vocabulary import END, SubWordTokens
from mnemos.models import EncoderDecoder
from mnemos.models.encoder_decoder import EncoderDecoderConfig

LINES = [side for pair in sentences(200, 0) for side in pair]
TOKENS, OTHER = (SubWordTokens.train(LINES, size) for size in (80, 60))
ABOUT = TranslationPreprocessing("en", "de", TOKENS.content, "", 12, 3, 0.7)
SAID = ["one two", "", "three  four\tfive six.", "one", "seven zero nine."]


def test_every_sentence_is_translated_as_alone_and_progress_is_told(tmp_path, monkeypatch):
    torch.manual_seed(1)
    sizes = {"dim": 16, "num_heads": 2, "mlp": 16, "max_length": 13, "encoder_layers": 1, "decoder_layers": 1}
    model, told = EncoderDecoder(vocab_size=80, **sizes).eval(), []
    mnemos.save(model, tmp_path)
    (tmp_path / "preprocessing.json").write_text(json.dumps(to_dict(ABOUT)))
    monkeypatch.setattr(module, "CHUNK", 2)
    ours = mnemos.translate(tmp_path, SAID, n_best=2, progress=lambda *counts: told.append(counts))
    assert ours[1] == [("", 0.0)]
    for said, found in zip(SAID[:1] + SAID[2:], ours[:1] + ours[2:], strict=True):
        row = torch.tensor([[*TOKENS.encode([" ".join(said.split())])[0], END]])
        with torch.no_grad():
            best = search(model, row, None, beam_config(12, 3, 2, 0.7))[0]
        assert [one.text for one in found] == [TOKENS.decode(one.tokens.tolist()) for one in best]
        assert [one.score for one in found] == pytest.approx([one.score for one in best], rel=1e-4)
    assert told == [(number, 5) for number in range(1, 6)]
    opened = TrainedTranslator(tmp_path)
    assert opened.decoding(None, 1, None) == beam_config(12, 3, 1, 0.7)
    assert opened.decoding(4, 2, 0.0) == beam_config(12, 4, 2, 0.0)
    assert beam_config(12).max_length == 13
    exact = " ".join(["one"] * 12)
    assert len(TOKENS.encode([exact])[0]) == 12 == len(opened.vocabularies.source.encode([exact])[0])
    assert mnemos.translate(opened, [exact], beams=1)
    refuses(r"^sentence 2: .* at most 12 sub-words, .* found 13", mnemos.translate, opened, ["one", exact + " one"])
    refuses("expected a list of sentences, found a text", mnemos.translate, opened, "one")
    assert mnemos.translate(opened, ["", " \n"]) == [[("", 0.0)]] * 2
    assert mnemos.translate(opened, []) == []
    (tmp_path / "preprocessing.json").write_text(json.dumps(to_dict(TextPreprocessing(8))))
    refuses("expected a run whose task is translation, found one of text; use mnemos", TrainedTranslator, tmp_path)


def test_runs_of_other_sub_words_and_languages_are_told_apart():
    apart = replace(ABOUT, target_tokenizer=OTHER.content)
    config = EncoderDecoderConfig(vocab_size=60, source_vocab_size=80)
    assert [one.size for one in apart.vocabularies(SimpleNamespace(config=config))] == [80, 60]
    assert ABOUT.vocabularies(SimpleNamespace(config=SimpleNamespace(vocab_size=80))).joint
    for about, sizes, found in (
        (ABOUT, {"vocab_size": 79}, "79 sub-words of the source, as the model has, found a tokenizer of 80"),
        (apart, {"vocab_size": 80}, "80 sub-words of the target, as the model has, found a tokenizer of 60"),
        (apart, {"vocab_size": 60, "source_vocab_size": 81}, "81 sub-words of the source, .* a tokenizer of 80"),
    ):
        refuses(found, about.vocabularies, SimpleNamespace(config=EncoderDecoderConfig(**sizes)))
    upper = replace(ABOUT, tokenizer=SubWordTokens.train([line.upper() for line in LINES], 80).content)
    for other, found in (
        (replace(ABOUT, beams=9), None),
        (replace(ABOUT, target="fr"), "from en to de, as the run has, found en to fr"),
        (replace(ABOUT, source="nl"), "from en to de, as the run has, found nl to de"),
        (apart, "another tokenizer"),
        (upper, "another tokenizer"),
        (Preprocessing(names=("a",)), "classes of the run"),
    ):
        assert ABOUT.difference(other) is None if found is None else found in ABOUT.difference(other)
    for other in (ABOUT, apart, Preprocessing()):  # those of another number are not taken over
        assert ABOUT.start_problem(other) is None
    assert "the 80 sub-words of the data, found one" in ABOUT.start_problem(upper)


def test_runs_and_files_are_scored_beside_each_other(tmp_path, capsys):
    wanted = ["one two three four five six.", "seven eight nine zero.", "two two two four."]
    worse, file = ["one two three.", "seven eight nine zero.", "two."], tmp_path / "c.txt"
    for name, texts in (("a", worse), ("b", wanted), ("d", wanted[:1])):
        (tmp_path / name).mkdir()
        (tmp_path / name / "preprocessing.json").write_text(json.dumps(to_dict(ABOUT)))
        rows = [{"source": y, "reference": y, "translation": x} for x, y in zip(texts, wanted, strict=False)]
        (tmp_path / name / "translations.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    a, b, other = (tmp_path / name for name in "abd")
    file.write_text("\n".join(worse))
    score_systems([a, b, file], samples=2)
    said, scorer = capsys.readouterr().out.splitlines(), Scorer("de")
    scores = [", ".join(f"{name} {scorer.score(name, x, wanted):.2f}" for name in NAMES) for x in (worse, wanted)]
    assert [said[0], said[1], said[5]] == [f"{a}: {scores[0]}", f"{b}: {scores[1]}", f"{file}: {scores[0]}"]
    assert said[6] == "  BLEU +0.00 against the first; p = 1.000 by paired bootstrap"
    more = 100 - sacrebleu.corpus_bleu(worse, [wanted]).score
    assert said[2].startswith(f"  BLEU {more:+.2f} against the first; p = ")
    assert said[9:] == [f"{name}: {scorer.signatures[name]}" for name in NAMES]
    score_systems([b], samples=1)  # the least number
    file.write_text("one\n")
    (b / "translations.jsonl").unlink()
    for paths, samples, words in (
        ([a], 0, "--samples: expected at least 1, found 0"),
        ([file], 9, "expected at least one run, whose test split has the references"),
        ([a, file], 9, r"c\.txt: expected a line for each of the 3 test sentences of .*a, found 1 lines"),
        ([b], 9, "b: expected a finished run whose task is translation, found no translations.jsonl"),
        ([a, other], 9, "d: expected translations of the sentences of .*a, found others"),
    ):
        refuses(words, score_systems, paths, samples)
