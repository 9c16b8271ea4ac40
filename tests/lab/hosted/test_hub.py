"""Models of Hugging Face by name or folder: their Python code is run only where asked for, and damage is one line."""

import ast
import builtins
import json
import os
import shutil
from pathlib import Path

import pytest
import tiny_decoder
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

import mnemos
from mnemos.errors import InputError
from mnemos.lab.hosted import hub

ROOT = Path(__file__).parents[3]
OURS = {"mnemos.hosts.from_pretrained", "from_pretrained", "super().from_pretrained", "nn.Embedding.from_pretrained"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_decoder.save(tmp_path_factory.mktemp("hub") / "llama")


def test_every_call_that_may_load_code_says_whether_it_may():
    """Without the argument Transformers asks on the standard input, which may be somebody's prompts."""
    missing, loading = [], ("from_pretrained", "from_config", "pipeline", "load_dataset")
    for path in (path for part in ("src", "tools", "examples", "benchmarks") for path in (ROOT / part).rglob("*.py")):
        text = path.read_text()
        for node in ast.walk(ast.parse(text)) if any(word in text for word in loading) else ():
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute | ast.Name):
                continue
            name = ast.unparse(node.func)
            loads = name.rpartition(".")[2] in loading
            given = any(one.arg in ("trust_remote_code", None) for one in node.keywords)  # None: **options
            if loads and name not in OURS and not given:
                missing.append(f"{path.relative_to(ROOT)}:{node.lineno}: {name}")
    assert not missing


@pytest.fixture
def strange(tmp_path, monkeypatch, folder):
    """A folder that brings Python code for its configuration, model and tokenizer; the code leaves a file RAN."""
    strange = shutil.copytree(folder, tmp_path / "strange")
    code = f"open({str(tmp_path / 'RAN')!r}, 'w').close()\nfrom transformers import LlamaConfig, LlamaForCausalLM\n"
    code += "class C(LlamaConfig):\n    model_type = 'strange'\n"
    code += "class M(LlamaForCausalLM):\n    config_class = C\n"
    code += "from transformers import PreTrainedTokenizerFast\nclass T(PreTrainedTokenizerFast):\n    pass\n"
    (strange / "code.py").write_text(code)
    config = json.loads((strange / "config.json").read_text())
    config |= {"model_type": "strange", "auto_map": {"AutoConfig": "code.C", "AutoModelForCausalLM": "code.M"}}
    (strange / "config.json").write_text(json.dumps(config))
    tokenizer = json.loads((strange / "tokenizer_config.json").read_text())
    tokenizer |= {"tokenizer_class": "T", "auto_map": {"AutoTokenizer": [None, "code.T"]}}
    (strange / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    monkeypatch.setattr(builtins, "input", lambda *_: "y")
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    return strange


def test_code_of_a_folder_is_not_run(strange, tmp_path):
    auto = mnemos.libraries.transformers().AutoModelForCausalLM
    for read in (
        lambda: hub.language_model(str(strange)),
        lambda: hub.read_config(str(strange)),
        lambda: hub.read_tokenizer(str(strange)),
        lambda: hub.read_decoder(str(strange)),
        lambda: hub.settings_of(str(strange)),
        lambda: hub.host_weights("AutoModelForCausalLM", str(strange)),
    ):
        with pytest.raises(InputError, match="Python code of its own, found one that brings some"):
            read()
    with pytest.raises(InputError, match="choose a model that Transformers has itself"):  # training runs no such code
        hub.host_weights("AutoModelForCausalLM", str(strange))
    with pytest.raises(ValueError, match="trust_remote_code"):
        mnemos.hosts.from_pretrained(auto, strange)
    assert not (tmp_path / "RAN").exists()


def test_code_of_a_folder_is_run_where_that_is_asked_for(strange, tmp_path, folder):
    model, _ = hub.language_model(str(strange), trust_remote_code=True)
    assert (tmp_path / "RAN").exists()
    ids = torch.arange(6)[None]
    assert torch.equal(model(ids).logits, hub.language_model(str(folder))[0](ids).logits)


def change(at, **settings):
    about = json.loads((at / "config.json").read_text())
    (at / "config.json").write_text(json.dumps(about | settings))


def pickle(at):
    (at / "model.safetensors").unlink()
    (at / "pytorch_model.bin").write_text("damaged")


def half(at):
    weights = {name: x for name, x in load_file(at / "model.safetensors").items() if "layers.1" not in name}
    save_file(weights, at / "model.safetensors", {"format": "pt"})


def pipe(at):
    (at / "tokenizer_config.json").unlink()
    os.mkfifo(at / "tokenizer_config.json")


@pytest.mark.parametrize(
    "error",
    [
        SafetensorError("Cannot allocate memory (os error 12)"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes."),
        MemoryError(),
    ],
)
def test_memory_that_does_not_suffice_is_no_damage(error, folder, monkeypatch):
    def read(*arguments, **named):
        raise error

    monkeypatch.setattr(tiny_decoder.library.AutoModelForCausalLM, "from_pretrained", read)
    with pytest.raises(MemoryError, match=str(folder)) as found:
        hub.language_model(str(folder))
    assert "files" not in str(found.value)


DAMAGES = {
    "cut": lambda at: os.truncate(at / "model.safetensors", 20_000),
    "pickle": pickle,
    "shapes": lambda at: change(at, vocab_size=299),
    "half": half,
    "pipe": pipe,
    "kinds": lambda at: change(at, hidden_size="wide", num_hidden_layers=None),
    "tokens": lambda at: (at / "tokenizer.json").write_text('{"version": 1'),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_folder_is_one_line(damage, folder, tmp_path, capfd):
    shutil.copytree(folder, tmp_path / "host")
    DAMAGES[damage](tmp_path / "host")
    with pytest.raises(InputError, match=str(tmp_path)) as error:
        hub.language_model(str(tmp_path / "host"))
    assert "\n" not in str(error.value)
    assert capfd.readouterr().err == ""
