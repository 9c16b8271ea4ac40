"""Cached Hugging Face models on disk: the stock class reads the host, ours reads everything."""

import json
import logging
from functools import partial

import decoder_models
import hosts
import pytest
import torch
from hosts import ZOO, Example, close, few, loss, open_caches, run
from torch import nn

import mnemos
from mnemos import GRC, InputError
from mnemos.hosts import from_pretrained
from mnemos.libraries import transformers
from mnemos.memory.gated_cache import caches

NAMES = [name for name in ZOO if name.startswith("hf_") and not name.endswith(("eager", "short"))]


def build(name: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    """In the precision that files are read in, unless told otherwise."""
    return hosts.build(name, dtype)


def example(name: str, rows: int = 3, seed: int = 2, dtype: torch.dtype = torch.float32) -> Example:
    return hosts.example(name, rows, seed, dtype)


def trained(name: str, dtype: torch.dtype = torch.float32, **grc) -> nn.Module:
    """A cached model with something learned, stored and pending."""
    model = build(name, dtype)
    torch.manual_seed(4)
    mnemos.cache(model, GRC(**{"preset": "paper", "length": 3, **grc}))
    open_caches(model)
    for seed in (1, 2):
        loss(model.train(), example(name, seed=seed, dtype=dtype)).backward()
    return model


def equal(model: nn.Module, other: nn.Module) -> None:
    mine, theirs = model.state_dict(), other.state_dict()
    assert list(mine) == list(theirs)
    for key, value in mine.items():
        assert value.dtype == theirs[key].dtype, key
        assert torch.equal(value, theirs[key]), key


@pytest.mark.parametrize("name", few(NAMES))
def test_the_stock_class_reads_the_host(name, tmp_path):
    model = trained(name).eval()
    model.save_pretrained(tmp_path)
    stock = type(model).from_pretrained(tmp_path)
    assert not caches(stock)
    mnemos.uncache(model)
    assert "mnemos" not in model.config.to_dict()
    equal(stock, model)
    close(run(stock, example(name)), run(model, example(name)), 1e-5)


def gpt2() -> nn.Module:
    """Its class has a list of weights of its own that are no surprise."""
    model = decoder_models.plain("gpt2")
    mnemos.cache(model, GRC(length=3, scope="stream"))
    return model


@pytest.mark.parametrize(
    ("make", "auto"), [(partial(trained, "hf_vit"), "ImageClassification"), (gpt2, "CausalLM")], ids=["ViT", "GPT-2"]
)
def test_the_weights_of_caches_are_no_surprise(make, auto, tmp_path):
    """The library prints a table of weights that the class does not know; ours knows those of the caches."""
    model = make()
    model.save_pretrained(tmp_path)
    said = []
    logger, handler = logging.getLogger("transformers.modeling_utils"), logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logger.addHandler(handler)
    try:
        from_pretrained(type(model), tmp_path)
        from_pretrained(getattr(transformers(), f"AutoModelFor{auto}"), tmp_path)
        assert said == []
        type(model).from_pretrained(tmp_path)
        assert ".grc." in said[0]
    finally:
        logger.removeHandler(handler)


def test_several_lengths_and_several_files(tmp_path):
    model = trained("hf_pvt", preset="official", length=(5, 2))
    model.save_pretrained(tmp_path, max_shard_size="10KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    again = from_pretrained(type(model), tmp_path)
    assert [b.cache.shape[0] for b in caches(again)] == [5, 2]
    equal(again, model)


def test_types_of_the_file_and_of_the_call(tmp_path):
    model = trained("hf_vit")
    model.save_pretrained(tmp_path)
    again = from_pretrained(type(model), tmp_path, dtype=torch.bfloat16)
    assert {p.dtype for p in again.parameters()} == {torch.bfloat16}
    for a, b in zip(again.parameters(), model.parameters(), strict=True):
        assert torch.equal(a, b.bfloat16())
    run(again.train(), example("hf_vit", dtype=torch.bfloat16)).sum().backward()
    again.save_pretrained(tmp_path / "half")
    equal(from_pretrained(type(model), tmp_path / "half", dtype=torch.bfloat16), again)


def test_a_base_model_and_a_model_with_a_head(tmp_path):
    """Each class reads what the other has saved, as the library's own do."""
    model = trained("hf_vit").eval()
    model.save_pretrained(tmp_path / "head")
    alone = from_pretrained(type(model.vit), tmp_path / "head")
    for a, b in zip(caches(alone), caches(model), strict=True):
        equal(a, b)
    (pixels,) = example("hf_vit").args
    close(alone(pixels).last_hidden_state, model.vit(pixels).last_hidden_state, 1e-5)
    alone.save_pretrained(tmp_path / "base")
    whole = from_pretrained(type(model), tmp_path / "base")
    for a, b in zip(caches(whole), caches(model), strict=True):
        equal(a, b)


def test_a_part_that_was_cached(tmp_path):
    """cache() of the encoder inside, save_pretrained of the whole."""
    model = build("hf_vit")
    mnemos.cache(model.vit, GRC(length=3))
    open_caches(model)
    model.save_pretrained(tmp_path)
    equal(from_pretrained(type(model), tmp_path), model)


def test_what_an_example_said_is_not_asked_again(tmp_path):
    model, images = build("hf_pvt2"), torch.randn(2, 3, 64, 64)
    mnemos.cache(model, GRC(length=(4, 4), resample="grid"), example=images[:1])
    open_caches(model)
    model.save_pretrained(tmp_path)
    again = from_pretrained(type(model), tmp_path)
    assert [b.grid for b in caches(again)] == [b.grid for b in caches(model)] == [(16, 16), (8, 8)]
    close(run(again, Example((images,))), run(model, Example((images,))), 1e-5)


def test_modules_that_the_user_named(tmp_path):
    model = build("hf_bert")
    mnemos.cache(model, GRC(length=3), where="encoder.layer.*.attention", example=example("hf_bert", 1).kwargs)
    open_caches(model)
    model.save_pretrained(tmp_path)
    again = from_pretrained(type(model), tmp_path)
    equal(again, model)
    close(run(again, example("hf_bert")), run(model, example("hf_bert")), 1e-5)


def test_what_is_not_there_is_said(tmp_path):
    model = build("hf_vit")
    model.save_pretrained(tmp_path / "plain")
    with pytest.raises(InputError, match="found none recorded"):
        from_pretrained(type(model), tmp_path / "plain")
    mnemos.cache(model, GRC(length=3))
    model.save_pretrained(tmp_path / "cached")
    record = json.loads((tmp_path / "cached" / "config.json").read_text())["mnemos"]
    assert record[0]["grc"]["length"] == 3
    mnemos.uncache(model)
    model.config.mnemos = record
    model.save_pretrained(tmp_path / "bare")  # the record without the weights
    with pytest.raises(InputError, match=r"weights of 'vit.*found weights of no cache"):
        from_pretrained(type(model), tmp_path / "bare")
    model.config.mnemos = [{**record[0], "caches": {"nowhere": next(iter(record[0]["caches"].values()))}}]
    model.save_pretrained(tmp_path / "elsewhere")
    with pytest.raises(InputError, match="a module 'nowhere'"):
        from_pretrained(type(model), tmp_path / "elsewhere")


@pytest.mark.parametrize("text", ['[{"grc": {}', "[3]", "[{}]", '[{"grc": {}, "caches": {"a": 3}}]', "[" * 100_000])
def test_a_damaged_record_is_refused(text, tmp_path):
    mnemos.hosts.save(trained("hf_vit"), tmp_path)
    (tmp_path / "caches.json").write_text(text)
    with pytest.raises(InputError, match=r"caches\.json: expected"):
        mnemos.hosts.load(build("hf_vit"), tmp_path)
