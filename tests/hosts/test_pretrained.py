"""Cached models on disk: the stock class of Hugging Face reads the host, ours reads everything."""

import copy
import gc
import json
import logging
from functools import partial

import decoder_models
import hosts
import pytest
import torch
from hosts import ZOO, close, few, loss, open_caches, run, twice
from refusals import refuses
from safetensors.torch import save_file
from torch import nn

import mnemos
from mnemos import GRC
from mnemos.errors import InputError
from mnemos.hosts import from_pretrained, load, save
from mnemos.libraries import transformers
from mnemos.memory.gated_cache import caches

NAMES = [name for name in ZOO if name.startswith("hf_") and not name.endswith(("eager", "short"))]


# In the precision that files are read in, unless told otherwise.
build, example = (partial(make, dtype=torch.float32) for make in (hosts.build, hosts.example))


def trained(name: str, **grc) -> nn.Module:
    """A cached model with something learned, stored and pending."""
    model = hosts.cached(name, "paper", torch.float32, **{"length": 3, **grc}).train()
    for seed in (1, 2):
        loss(model, example(name, seed=seed)).backward()
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


@pytest.mark.parametrize("kinds", [("cache", "cache"), ("linearise", "linearise"), ("cache", "linearise")])
def test_models_of_one_configuration_keep_their_own_settings(kinds, tmp_path):
    """As a cached model and its never-written twin do, which are made from the same one."""
    one, ids = decoder_models.plain("llama").float(), torch.arange(18).view(2, 9)
    pair = {"one": one, "two": type(one)(one.config).eval()}
    assert pair["two"].config is one.config
    for model, kind, size in zip(pair.values(), kinds, (2, 3), strict=True):
        if kind == "cache":
            mnemos.cache(model, GRC(length=size, scope="stream", block=2))
        else:
            mnemos.linearise(model, window=size)
    for name, model in pair.items():
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.1 * torch.randn_like(parameter)
        model.save_pretrained(tmp_path / name)
        loaded = from_pretrained(type(model), tmp_path / name).eval()
        assert torch.equal(loaded(ids).logits, model(ids).logits)
    (mnemos.uncache if kinds[0] == "cache" else mnemos.unlinearise)(one)
    assert pair["two"].model.config is pair["two"].config
    pair["two"].save_pretrained(tmp_path / "again")
    from_pretrained(type(one), tmp_path / "again")


def test_a_part_of_a_model_keeps_the_configuration_that_its_parent_has():
    """Also where a stock class has read what a model before it had noted there."""
    model = decoder_models.plain("llama")
    model.config.mnemos = [{}]
    mnemos.cache(model.model, GRC(length=2, scope="stream", block=2))
    assert model.model.config is model.config
    assert len(model.config.mnemos[0]["caches"]) == 2


def test_what_a_model_that_is_gone_has_noted_is_not_saved(tmp_path):
    one = decoder_models.plain("llama").float()
    two = type(one)(one.config).eval()
    mnemos.cache(one, GRC(length=2, scope="stream", block=2))
    del one
    gc.collect()
    mnemos.linearise(two, window=3)
    two.save_pretrained(tmp_path)
    assert from_pretrained(type(two), tmp_path).model.layers[0].self_attn.linearised is not None


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


CACHED = {
    "several lengths": ("hf_pvt", lambda model: mnemos.cache(model, GRC(preset="official", length=(5, 2)))),
    "the paper's length": ("hf_swin", lambda model: mnemos.cache(model, GRC(preset="paper", length="paper"))),
    "a part": ("hf_vit", lambda model: mnemos.cache(model.vit, GRC(length=3))),
    "with an example": (
        "hf_pvt2",
        lambda model: mnemos.cache(model, GRC(length=(4, 4), resample="grid"), example=torch.randn(1, 3, 64, 64)),
    ),
    "named by the user": (
        "hf_bert",
        lambda model: mnemos.cache(
            model, GRC(length=3), where="encoder.layer.*.attention", example=example("hf_bert", 1).kwargs
        ),
    ),
}


@pytest.mark.parametrize("case", CACHED)
def test_what_cache_was_told_is_read_from_several_files(case, tmp_path):
    name, cache = CACHED[case]
    model = build(name)
    cache(model)
    open_caches(model)
    model.save_pretrained(tmp_path, max_shard_size="10KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    again = from_pretrained(type(model), tmp_path)
    for a, b in zip(caches(again), caches(model), strict=True):
        assert (a.grc, a.grid, a.windows) == (b.grc, b.grid, b.windows)
    equal(again, model)
    close(run(again, example(name)), run(model, example(name)), 1e-5)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("timm_vit", torch.float64), ("torch_padded", torch.float64), ("hf_bert", torch.float64), ("hf_bert", None)],
)
def test_all_settings_are_saved(name, dtype, tmp_path):
    """By mnemos, or by the library itself: in single precision, as files are read."""
    model = twice(name).to(dtype or torch.float32).train()
    loss(model, example(name, seed=1, dtype=dtype or torch.float32)).backward()
    if dtype is None:
        model.save_pretrained(tmp_path)
        again = from_pretrained(type(model), tmp_path).train()
    else:
        save(model, tmp_path / "new")
        again = load(build(name, dtype=dtype), tmp_path / "new").train()
        save(copy.deepcopy(again), tmp_path / "copy")
        records = [json.loads((tmp_path / folder / "caches.json").read_text()) for folder in ("new", "copy")]
        assert records[0] == records[1]
    assert [branch.grc for branch in caches(again)] == [branch.grc for branch in caches(model)]
    for seed in (2, 3):
        found, expected = (loss(m, example(name, seed=seed, dtype=dtype or torch.float32)) for m in (again, model))
        close(found, expected, 1e-5 if dtype is None else 1e-10)


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


def test_parts_of_a_model_are_read_with_theirs(tmp_path):
    """What a part has is noted in its own configuration."""
    library, sizes = transformers(), {"hidden_size": 16, "intermediate_size": 8, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 2}
    pictures = library.CLIPVisionConfig(**sizes, image_size=8, patch_size=4)
    texts = library.LlamaConfig(**sizes, vocab_size=20)
    both = library.LlavaConfig(vision_config=pictures, text_config=texts, image_token_id=19)
    model = library.LlavaForConditionalGeneration(both).eval()
    mnemos.cache(model.model.vision_tower, GRC(length=3))
    mnemos.linearise(model.model.language_model, window=4, sinks=1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(tmp_path)
    loaded, about = from_pretrained(type(model), tmp_path, output_loading_info=True)
    assert not about["missing_keys"]
    assert len(caches(loaded)) == 2
    equal(loaded, model)
    given = {"pixel_values": torch.rand(1, 3, 8, 8), "input_ids": torch.tensor([[1, *[19] * 4, *range(2, 9)]])}
    close(loaded.eval()(**given).logits, model(**given).logits, 1e-5)


def test_what_is_not_there_is_said(tmp_path):
    model = build("hf_vit")
    refuses(r"cache.. was called on, found none", save, model, tmp_path)
    refuses(r"expected caches.json and model.safetensors", load, model, tmp_path)
    model.save_pretrained(tmp_path / "plain")
    refuses("found none recorded", from_pretrained, type(model), tmp_path / "plain")
    mnemos.cache(model, GRC(length=3))
    model.save_pretrained(tmp_path / "cached")
    record = json.loads((tmp_path / "cached" / "config.json").read_text())["mnemos"]
    assert record[0]["grc"]["length"] == 3
    mnemos.uncache(model)
    model.config.mnemos = record
    model.save_pretrained(tmp_path / "bare")  # the record without the weights
    refuses(r"weights of 'vit.*found weights of no cache", from_pretrained, type(model), tmp_path / "bare")
    model.config.mnemos = [{**record[0], "caches": {"nowhere": next(iter(record[0]["caches"].values()))}}]
    model.save_pretrained(tmp_path / "elsewhere")
    refuses("a module 'nowhere'", from_pretrained, type(model), tmp_path / "elsewhere")


def test_weights_of_some_caches_alone_are_missed(tmp_path):
    model = trained("hf_vit")
    names = [name for name, module in model.named_modules() if isinstance(module, mnemos.hosts.HostBranch)]
    some = {key: value for key, value in model.state_dict().items() if not key.startswith(names[1])}
    lacking = [key for key in model.state_dict() if key.startswith(names[1])]
    assert model.load_state_dict(some, strict=False).missing_keys == lacking
    none = {key: value for key, value in some.items() if not key.startswith(names[0])}
    assert model.load_state_dict(none).missing_keys == []  # of the host alone
    model.save_pretrained(tmp_path)
    save_file(some, tmp_path / "model.safetensors", {"format": "pt"})
    refuses(f"the weights of '{names[1]}' .*found none; save .* again", from_pretrained, type(model), tmp_path)


def test_weights_of_another_model_and_damaged_ones_are_refused(tmp_path):
    save(trained("timm_vit"), tmp_path)
    other = build("timm_vit")
    head, other.head = other.head, nn.Linear(24, 6)
    nn.init.normal_(other.cls_token)
    before = {key: value.clone() for key, value in other.state_dict().items()}
    refuses("found others .*size mismatch for head.weight.*; build it as saved", load, other, tmp_path)
    assert all(map(torch.equal, other.state_dict().values(), before.values()))
    assert list(other.state_dict()) == list(before)
    other.head = nn.Sequential()
    lacks = r"found others \(2 names in the file unknown to the model, such as head\.bias\); build it as saved"
    refuses(lacks, load, other, tmp_path)
    other.head = head
    record = json.loads((tmp_path / "caches.json").read_text())
    (tmp_path / "caches.json").write_text(
        json.dumps([*record, {**record[0], "caches": {"no": next(iter(record[0]["caches"].values()))}}])
    )
    with pytest.raises(InputError):  # after the first of two calls
        load(other, tmp_path)
    assert list(other.state_dict()) == list(before)
    (tmp_path / "caches.json").write_text(json.dumps(record))
    assert caches(load(other, tmp_path))
    held = caches(other)
    with pytest.raises(InputError):  # it has them
        load(other, tmp_path)
    assert caches(other) == held
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    refuses("this model's weights, found others .*not fully covered", load, build("timm_vit"), tmp_path)


@pytest.mark.parametrize("text", ['[{"grc": {}', "[3]", "[{}]", '[{"grc": {}, "caches": {"a": 3}}]', "[" * 100_000])
def test_a_damaged_record_is_refused(text, tmp_path):
    save(trained("hf_vit"), tmp_path)
    (tmp_path / "caches.json").write_text(text)
    refuses(r"caches\.json: expected", load, build("hf_vit"), tmp_path)
