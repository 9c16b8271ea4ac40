"""`mnemos export RUN --to hf`: what Transformers loads writes as the run's own model does, with the run's numbers."""

import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from contract_cases import ModelCase

import mnemos
from mnemos.config import to_dict
from mnemos.lab.cli import main
from mnemos.lab.evaluate.predict import predict
from mnemos.lab.run.export import export_run, export_run_programs, exported_tokenizers, model_card
from mnemos.lab.run.files import Provenance, Result
from mnemos.lab.tasks.text import TextPreprocessing
from mnemos.lab.tasks.text_classes import TextClassesPreprocessing
from mnemos.lab.tasks.vocabulary import Bytes, SubWords, Words
from mnemos.lab.translation.translate import TranslationPreprocessing, beam_config
from mnemos.lab.translation.translation_vocabulary import SubWordTokens
from mnemos.libraries import tokenizers, transformers
from mnemos.models.transformer import TransformerConfig
from mnemos.types import InputError

TEXT = "Ā héllo\n <|start|> 日本 x\ty  </s> z\r\n"
PROMPTS = ("the cat sat", "on")


@pytest.fixture(scope="module")
def exported(text_run, tmp_path_factory) -> tuple[Path, Path]:
    """(a finished run, its checkpoint)."""
    out = tmp_path_factory.mktemp("export") / "hf"
    assert main(["export", str(text_run), "--to", "hf", "--out", str(out)]) == 0
    return text_run, out


def test_a_pipeline_writes_what_predict_writes(exported, tmp_path, monkeypatch):
    folder, checkpoint = exported
    transformers()
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    files = [tmp_path / f"{i}.txt" for i in range(len(PROMPTS))]
    for file, prompt in zip(files, PROMPTS, strict=True):
        file.write_text(prompt)
    expected = [found.text for found in predict(folder, files, length=5)]
    pipeline = transformers().pipeline("text-generation", model=str(checkpoint), trust_remote_code=True)
    # In one batch, so the shorter prompt is padded on the left.
    found = pipeline(list(PROMPTS), max_new_tokens=5, do_sample=False, batch_size=2, return_full_text=False)
    tokens = pipeline.tokenizer(list(PROMPTS), return_tensors="pt", padding=True)
    drawn = pipeline.model.generate(**tokens, max_new_tokens=5, do_sample=False)[:, tokens.input_ids.shape[1] :]
    assert [bytes(row.tolist()).decode(errors="replace") for row in drawn] == expected
    assert [one[0]["generated_text"] for one in found] == expected
    result, card = Result.read(folder), (checkpoint / "README.md").read_text()
    for metric in ("bits per byte", "accuracy"):
        assert f"| {metric} | {result.valid[metric]:.6g} | {result.test[metric]:.6g} |" in card
    assert f"with the attention `{mnemos.load(folder).config.attention.name}`" in card
    assert str(folder) not in card  # folders of this machine are no part of it


def test_the_numbers_and_the_origin_on_a_card():
    scores = {"valid": {"loss": 1.25}, "test": {"loss": 2.0, "f1": 0.125}, "reference": {"a guess": 0.1}}
    result = Result(**scores, scored_rows={"valid": 1000, "test": 20}, steps=1500)
    data = {"sha256": "ff", "count": 1200, "files": [{"name": name} for name in "abcdef"]}
    made = Provenance(commit="c", versions={"mnemos": "1", "torch": "2"}, device="cpu", cpu="AVX", threads=4, seed=3)
    config, kind = TransformerConfig(8, 8), "MnemosForSequenceClassification"
    about = "Code: mnemos 1, commit c, PyTorch 2, 4 threads of AVX, device cpu.\n"
    for names, shown in (("abcdef", "(a, b, c, d, e, …)"), ("ab", "(a, b)")):
        data |= {"files": [{"name": name} for name in names], "count": 1200 if len(names) > 5 else 2}
        card = model_card("x", config, kind, {"name": "text"}, result, replace(made, data=data), True)
        assert card.split("\n\n")[8:] == [
            "## Numbers",
            "| | valid (1,000 rows) | test (20 rows) |\n|---|---|---|\n| loss | 1.25 | 2 |\n| f1 |  | 0.125 |\n"
            "| a guess | | 0.1 |",
            "## Origin",
            f"Recipe `text`, seed 3, 1,500 updates.\nData: {data['count']:,} files {shown}; SHA-256 ff.\n{about}",
        ]
        assert "pipeline_tag: text-classification\n" in card
        assert "model.generate" not in card
    alone = model_card("x", config, "MnemosForCausalLM", {}, None, made, False)
    assert f"## Origin\n\nRecipe `None`, seed 3, 0 updates.\n{about}" in alone
    assert "AutoTokenizer" not in alone
    assert "pipeline" not in alone


def test_without_the_library_the_shipped_file_says_what_to_install(exported, monkeypatch):
    monkeypatch.setitem(sys.modules, "mnemos.hugging_face", None)
    with pytest.raises(ImportError, match=r"pip install '.\[hf\]' in a clone"):
        exec((exported[1] / "modeling_mnemos.py").read_text(), {})


def test_programs_have_the_tokenizer_of_their_run(exported, tmp_path, monkeypatch):
    """The programs themselves are tested in tests/programs."""
    made = []
    monkeypatch.setattr("mnemos.lab.run.export.export", lambda model, out, to: made.append((model, to)) or out.mkdir())
    folder = export_run_programs(exported[0], "onnx", tmp_path / "programs")
    tokenizer = tokenizers().Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.encode(PROMPTS[0]).ids == [0, *PROMPTS[0].encode()]
    ((model, to),) = made
    assert to == "onnx"
    assert model.config == mnemos.load(exported[0]).config


def test_no_word_is_special_where_the_vocabulary_lacks_unknown_words():
    tokenizer = exported_tokenizers(TextPreprocessing.of(8, "words", Words(["the", "cat", "<eos>"])))[""]
    assert tokenizer.decode(tokenizer("the cat the")["input_ids"][1:], skip_special_tokens=True) == "the cat the"


def test_a_classifier_of_texts_gives_the_run_s_logits(classifier_run, tmp_path):
    transformers()
    assert main(["export", str(classifier_run), "--out", str(tmp_path / "hf")]) == 0
    loaded = mnemos.hugging_face.MnemosForSequenceClassification.from_pretrained(tmp_path / "hf")
    ids = torch.randint(1, 10, (2, 9))
    assert torch.equal(loaded(ids).logits, mnemos.load(classifier_run)(ids)[0])
    assert "AutoTokenizer" not in (tmp_path / "hf/README.md").read_text()


def test_each_language_has_the_tokenizer_of_its_own():
    """And a task whose files are not read as tokens of a library has none."""
    source, target = (SubWordTokens.train([text] * 3, size) for text, size in (("the cat sat", 16), ("die katze", 18)))
    found = exported_tokenizers(TranslationPreprocessing("en", "de", source.content, target.content))
    assert [*found] == ["", "target_tokenizer"]
    for tokenizer, tokens in zip(found.values(), (source, target), strict=True):
        assert tokenizer("die cat")["input_ids"] == [*tokens.encode(["die cat"])[0], 2]
    assert exported_tokenizers(TextClassesPreprocessing(8, 8)) == {}


SENTENCES = ["the cat sat on the mat .", "x y z </s> start"] * 3
VOCABULARIES = {
    "bytes": Bytes,
    "words": lambda: Words.count([("a", b"the cat sat\non the mat\n")]),
    "sub-words": lambda: SubWords(SubWordTokens.train(SENTENCES, 40).content),
}


@pytest.mark.parametrize("name", VOCABULARIES)
def test_a_tokenizer_gives_the_run_s_tokens(name, tmp_path):
    vocabulary = VOCABULARIES[name]()
    tokenizer = exported_tokenizers(TextPreprocessing.of(8, name, vocabulary))[""]
    tokenizer.save_pretrained(tmp_path)
    loaded = transformers().AutoTokenizer.from_pretrained(tmp_path)
    text = TEXT.replace(" <|start|>", "") if name == "sub-words" else TEXT
    assert loaded(text)["input_ids"] == [vocabulary.start, *vocabulary.encode(text.encode(), "").tolist()]
    assert loaded.padding_side == "left"
    if name == "bytes":
        assert loaded.decode(loaded(text)["input_ids"][1:]) == text
    if name == "words":
        assert loaded.decode(vocabulary.encode(b"the cat\nsat", "")) == "the cat\n sat"


def test_a_translation_model_translates_the_same(tmp_path):
    tokens = SubWordTokens.train(["the cat sat on the mat .", "die katze sitzt </s>"] * 3, 40)
    model = ModelCase("encoder-decoder", None, True).build(vocab_size=40, max_length=40).float().eval()
    mnemos.save(model, tmp_path)
    about = TranslationPreprocessing("en", "de", tokens.content, longest=9, beams=3)
    (tmp_path / "preprocessing.json").write_text(json.dumps(to_dict(about)))
    assert main(["export", str(tmp_path), "--out", str(tmp_path / "hf")]) == 0
    loaded = transformers().AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "hf")
    tokenizer = transformers().AutoTokenizer.from_pretrained(tmp_path / "hf")
    sentences = ["the cat", "the mat sat on </s>"]
    rows = tokens.encode(sentences)
    inputs = tokenizer(sentences, return_tensors="pt", padding=True)
    for ids, row in zip(inputs.input_ids.tolist(), rows, strict=True):
        assert ids[: len(row) + 1] == [*row, 2]
    decoding = replace(beam_config(9, 3), stopping="early")
    found = loaded.generate(**inputs)
    for row, best in zip(rows, found.tolist(), strict=True):
        state = model.encode(torch.tensor([[*row, 2]]))
        expected = mnemos.beam_search(model, state, torch.tensor([[1]]), decoding)[0][0].tokens.tolist()
        assert best[1 : 1 + len(expected)] == expected
    with pytest.raises(InputError, match="decoder_start_token_id"):
        mnemos.hugging_face.MnemosForSeq2SeqLM.of(model)(inputs.input_ids, labels=inputs.input_ids)


def test_a_failure_leaves_no_half_checkpoint(exported, tmp_path, monkeypatch):
    def full(*given, **named):
        raise OSError("no space left")

    monkeypatch.setattr("mnemos.lab.run.export.model_card", full)
    (tmp_path / "empty").mkdir()
    for name in ("new", "empty"):
        with pytest.raises(OSError, match="no space left"):
            export_run(exported[0], tmp_path / name)
    assert [path.name for path in tmp_path.rglob("*")] == ["empty"]
    (tmp_path / "empty" / "kept").write_text("kept")
    for write in (export_run, partial(export_run_programs, to="torch")):
        with pytest.raises(InputError, match="new or empty folder"):
            write(exported[0], out=tmp_path / "empty")
    assert (tmp_path / "empty" / "kept").read_text() == "kept"


def test_a_model_that_reads_no_tokens_is_refused(tmp_path, refused):
    mnemos.save(ModelCase("vit", None, False).build(), tmp_path)
    assert "reads images" in refused("export", tmp_path, "--out", tmp_path / "out")
