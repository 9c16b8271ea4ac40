"""Models of Hugging Face and timm as hosts of a recipe (`--model`): trained further, resumed, refused."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from tiny_decoder import llama
from train_standins import train
from trained_runs import equal, numbers, result, stopped, weights

import mnemos
from mnemos import libraries
from mnemos.config import to_dict
from mnemos.lab.cli import main
from mnemos.lab.compare.arguments import variants
from mnemos.lab.compare.baselines import with_unwritten
from mnemos.lab.hosted import hub
from mnemos.lab.hosted.decoder import HostedDecoderConfig
from mnemos.lab.run.hosted import with_host
from mnemos.lab.run.recipe_files import read_recipe
from mnemos.lab.tasks.image_task import IMAGENET

libraries.transformers()
SIZES = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
QUICK = "--train.steps 4 --train.eval-every 2 --train.checkpoint-every 2 --train.log-every 1 --train.batch-size 4"
TEXT = "--data.path text.txt --data.segment 16 --data.held-out .2 --train.valid-rows 4 --train.test-rows 4"
CACHE = "--model.cache.length 4 --model.cache.block 4"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with a text, a small Llama with its tokenizer, and a small ViT."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import PreTrainedTokenizerFast, ViTConfig, ViTForImageClassification

    folder = tmp_path_factory.mktemp("hosts")
    lines = [f"Line {i} of the text says that {i * i} is the square of {i}.\n" for i in range(370)]
    (folder / "text.txt").write_text("".join(lines))
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(lines, vocab_size=300, special_tokens=["<s>"], show_progress=False)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer._tokenizer, bos_token="<s>").save_pretrained(folder / "llama")
    sizes = {"num_hidden_layers": 2, "max_position_embeddings": 32, "bos_token_id": 0, "eos_token_id": None}
    llama(tokenizer.get_vocab_size(), **sizes).save_pretrained(folder / "llama")
    torch.manual_seed(1)
    vit = ViTConfig(image_size=16, patch_size=4, num_labels=3, **SIZES)
    ViTForImageClassification(vit).save_pretrained(folder / "vit")
    return folder


@pytest.fixture
def folder(made, tmp_path, monkeypatch):
    """A copy of it, which is the current folder."""
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_decoder_is_trained_further_resumed_exactly_and_needs_its_folder_no_more(folder, capsys):
    words = ["text-cached", "--model", "llama", *QUICK.split(), *TEXT.split(), *CACHE.split()]
    assert main(["train", *words, "--out", "run"]) == 0
    said = capsys.readouterr()
    new = "; 36 of the 57 tensors, which it does not have, are new: host.model.layers.0.self_attn.grc"
    assert f"starts with the weights of llama{new}" in said.out
    before = numbers(folder / "run")[0]
    assert (before["kind"], before["step"]) == ("valid", 0)
    assert f"text-cached 0: before training: valid loss {before['loss']:.4f}" in said.err
    assert f"validation split {before['bits per byte']:.4f} bits per byte before training" in said.out
    assert "scoring the test split with the caches closed" in said.err
    assert "caches closed (every gate closed" in said.out
    recipe = json.loads((folder / "run/recipe.json").read_text())
    assert recipe["model"]["is"] == "hosted-decoder"
    assert recipe["data"]["tokens"] == "llama/tokenizer.json"
    assert len(json.loads((folder / "run/run.json").read_text())["weights"]["sha256"]) == 64
    found = result(folder / "run")
    assert found["metric"] == "bits per byte"
    assert found["before"] == {name: value for name, value in before.items() if name not in ("kind", "step")}
    assert found["flops"] > 0
    stopped(folder / "run", folder / "stopped", 4)
    for path in (folder / "llama").iterdir():
        if path.name != "tokenizer.json":
            path.unlink()
    train(read_recipe(folder / "stopped"), folder / "stopped", resume=True, quiet=True)
    assert numbers(folder / "stopped") == numbers(folder / "run")
    again = result(folder / "stopped")
    assert (again["test"], again["before"]) == (found["test"], found["before"])
    equal(mnemos.load("run").state_dict(), weights(folder / "stopped", 4))


def test_a_decoder_begins_again_with_each_segment_and_its_cache_goes_on(folder):
    from transformers import AutoModelForCausalLM

    names = ["text-cached", "text"]
    cached, plain = variants(names, ["--model", "llama", *TEXT.split()], [])
    host = AutoModelForCausalLM.from_pretrained("llama").eval()
    sizes = {"vocab_size": host.config.vocab_size + 1, "max_length": 8}
    model = replace(plain.model, **sizes).build().eval()
    model.load_state_dict(model.pretrained("llama"))
    assert torch.equal(model.host.lm_head.weight[-1], host.lm_head.weight[0]), "the start token is the host's"
    x = torch.randint(host.config.vocab_size - 1, (3, 20))
    with torch.no_grad():
        whole, state = model(x)
        expected = torch.cat([host(part).logits for part in x.split(8, 1)], 1)
        torch.testing.assert_close(whole[..., :-1], expected)
        # Rows of unequal length: each is read as if it were alone.
        mask = torch.arange(20) < torch.tensor([20, 13, 6])[:, None]
        padded, state = model(x, None, mask)
        more, _ = model(x, state)
        for row, n in enumerate((20, 13, 6)):
            torch.testing.assert_close(padded[row, :n], whole[row, :n])
            alone = model(torch.cat([x[row : row + 1, :n], x[row : row + 1]], 1))[0][:, n:]
            torch.testing.assert_close(more[row : row + 1], alone)
        exported = mnemos.hugging_face.MnemosForCausalLM
        exported = exported(exported.config_class(model=to_dict(model.config))).eval()
        exported.model.load_state_dict(model.state_dict())
        written = exported.generate(x[:, :13], max_new_tokens=9, do_sample=False)[:, 13:]
        assert torch.equal(written, mnemos.Stream(model).prefill(x[:, :13]).generate(9, temperature=0)[0])
        unwritten = with_unwritten([cached])[1]
        for recipe, reads in ((cached, True), (unwritten, False)):
            torch.manual_seed(0)
            config = replace(recipe.model, cache=replace(recipe.model.cache, length=4, block=4), **sizes)
            other = config.build().eval()
            changed = torch.cat([x[:, :8] + 1, x[:, 8:]], 1)
            found = [other(tokens)[0][:, 16:] for tokens in (x, changed)]  # further than a block per layer
            assert torch.equal(*found) != reads


def test_the_recurrent_layers_of_a_hybrid_begin_again_with_each_segment():
    about = {"model_type": "jamba", "vocab_size": 40, **SIZES, "num_key_value_heads": 1, "num_experts": 1}
    about |= {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 9, "expert_layer_offset": 8}
    about |= {"mamba_dt_rank": 4, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    torch.manual_seed(0)
    model = HostedDecoderConfig(host=json.dumps(about), vocab_size=40, max_length=8).build().eval()
    x = torch.randint(40, (2, 20))
    mask = torch.arange(20) < torch.tensor([20, 13])[:, None]
    with torch.no_grad():
        expected = torch.cat([model(part)[0] for part in x.split(8, 1)], 1)
        torch.testing.assert_close(model(x)[0], expected)
        torch.testing.assert_close(model(x, None, mask)[0][mask], expected[mask])
        torch.testing.assert_close(model(x, None, mask, only=mask)[0], expected[mask])


def test_an_encoder_of_texts_starts_with_the_weights_and_the_tokens_of_the_model(folder):
    library = libraries.transformers()
    torch.manual_seed(0)
    host = library.BertModel(library.BertConfig(vocab_size=30, **SIZES)).eval()
    host.save_pretrained("bert")
    shutil.copy("llama/tokenizer.json", "bert")
    (texts,) = variants(["texts-last"], [], [])
    assert with_host(texts, "bert", own_tokens=True).data == texts.data
    made = with_host(texts, "bert")
    assert (made.data.tokens, made.train.init_from, made.optim.lr) == ("bert/tokenizer.json", "bert", 1e-4)
    model = replace(made.model, vocab_size=30, classes=2, segment=8).build()
    model.load_state_dict(model.pretrained("bert"), strict=False)
    x = torch.randint(30, (2, 8))
    expected = model.head(host(x).last_hidden_state.mean(1))
    torch.testing.assert_close(model.eval()(x)[0], expected)


@pytest.mark.parametrize("source", ["vit", pytest.param("timm:test_vit", marks=pytest.mark.exhaustive)])
def test_an_image_classifier_is_trained_further_on_other_images(folder, source, monkeypatch, output):
    library = libraries.timm()
    torch.manual_seed(2)
    trained = library.create_model("test_vit")
    create = library.create_model
    monkeypatch.setattr(library, "create_model", lambda *a, pretrained, **k: trained if pretrained else create(*a, **k))
    words = ["digits-vit-cached", "--model", source, *QUICK.split(), "--model.cache.length", "4", "--out", "run"]
    words += ["--train.steps", "1", "--train.valid-rows", "4", "--train.test-rows", "4"]
    said = output("train", *words)
    assert "are new: host.host." in said
    assert "starts with the weights of" in said
    recipe = json.loads((folder / "run/recipe.json").read_text())["model"]
    assert (recipe["is"], recipe["image"], recipe["channels"], recipe["classes"]) == ("hosted-classifier", 8, 1, 10)
    model = mnemos.load("run")
    start = hub.host_weights("AutoModelForImageClassification", source)
    ended = {name: model.state_dict()[f"host.host.{name}"] for name in start}
    moved = {name: (x - ended[name]).abs().max() for name, x in start.items() if x.shape == ended[name].shape}
    assert len(moved) == len(start) - 2, "all but the head"
    assert max(moved.values()) < 0.05


def test_photos_are_normalised_as_those_of_the_model_were(folder):
    (photos,) = variants(["photos-vit"], [], [])
    half = (0.5,) * 3
    given = {"image_mean": [0.1, 0.2, 0.3], "image_std": half}
    for source, saved, wanted in (
        ("timm:test_vit", None, (half, half)),
        ("vit", None, IMAGENET),  # which does not say
        ("vit", {"image_processor_type": "ViTImageProcessor"}, (half, half)),  # the class says
        ("vit", given, ((0.1, 0.2, 0.3), half)),
        ("vit", given | {"do_normalize": False}, ((0.0,) * 3, (1.0,) * 3)),
        ("vit", {"image_mean": 0.5, "image_std": 0.5, "rescale_factor": 1 / 127.5}, ((0.25,) * 3, (0.25,) * 3)),
        ("vit", {"image_mean": [51.0] * 3, "image_std": [51.0] * 3, "do_rescale": False}, ((0.2,) * 3, (0.2,) * 3)),
        ("vit", {"do_normalize": False, "rescale_factor": 1 / 127.5, "rescale_offset": True}, (half, half)),
    ):
        if saved:
            (folder / "vit/preprocessor_config.json").write_text(json.dumps(saved))
        data = with_host(photos, source).data
        assert data.mean == pytest.approx(wanted[0])
        assert data.std == pytest.approx(wanted[1])
    with pytest.raises(mnemos.InputError, match="nonesuch"):
        with_host(photos, "timm:test_vit.nonesuch")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["text", "--model", "nowhere"], "expected hf:NAME, timm:NAME or the folder"),
        (["text-linear", "--model", "llama"], "attention linear"),
        (["listops", "--model", "timm:test_vit"], "found listops of listops"),
        (["photos-vit", "--model", "timm:resnet1"], "did you mean timm:resnet1"),
        (["text", "--model", "hf:some/name"], "hf:some/name: expected a model of the Hugging Face hub"),
        (["text", "--model", "vit"], "vit: expected a tokenizer.json"),
        (["text", "--train.init-from", "llama"], "use --model llama"),
        (["text", "--model", "llama", "--data.segment", "64"], "at most the 32 positions"),
        (["text-cached", "--model", "llama", "--model.cache.scope", "shared"], "cache.scope: expected stream"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(folder, words, said, monkeypatch, refused):
    def unreachable(*args, **options):
        raise OSError("We couldn't connect to 'https://huggingface.co'\nto load the files")

    if "hf:some/name" in words:
        monkeypatch.setattr(libraries.transformers().AutoConfig, "from_pretrained", unreachable)
    data = ["--data.path", "text.txt"] if words[0].startswith("text") else []
    assert said in refused("train", *words, *data, "--out", "run")
    assert not (folder / "run").exists()
