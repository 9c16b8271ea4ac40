"""The scripts of examples/ run with a tiny decoder, and what they print and write is right."""

import re
import runpy
from pathlib import Path
from shutil import copytree

import pytest
import tiny_decoder
import torch
from tiny_decoder import library

import mnemos

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_decoder.save(tmp_path_factory.mktemp("examples") / "llama")


@pytest.fixture
def text(tmp_path):
    (tmp_path / "text.txt").write_text("so be it, or so it may be. " * 72)
    return tmp_path / "text.txt"


def run(name, *words):
    runpy.run_path(str(ROOT / "examples" / f"{name}.py"))["main"]([str(word) for word in words])


def test_a_novel_is_read_with_a_state_that_does_not_grow(folder, text, tmp_path, capsys):
    run("stream_novel", folder, text, "--every", 500)
    grows = [float(x) for x in re.findall(r"state ([\d.]+) MiB", capsys.readouterr().out)]
    run("stream_novel", folder, text, "--window", 32, "--every", 500)
    said = capsys.readouterr().out
    constant = [float(x) for x in re.findall(r"state ([\d.]+) MiB", said)]
    assert len(grows) == len(constant) > 2
    assert grows == sorted(grows)
    assert grows[0] < grows[-1]
    assert len(set(constant)) == 1
    assert said.count("perplexity") == len(constant)

    saved = copytree(folder, tmp_path / "saved")
    model = library.AutoModelForCausalLM.from_pretrained(folder)
    mnemos.linearise(model, window=32, state="none")
    model.save_pretrained(saved)
    run("stream_novel", saved, text, "--every", 500)  # read as linearised
    assert re.findall(r"perplexity (\S+)", capsys.readouterr().out) == re.findall(r"perplexity (\S+)", said)


def test_the_gradients_are_those_of_one_graph(folder, text, capsys):
    run("exact_gradients", folder, text, "--tokens", 90, "--segment", 20, "--window", 16)
    found = capsys.readouterr().out
    assert "90 tokens in 5 segments" in found
    model = library.AutoModelForCausalLM.from_pretrained(folder)
    mnemos.linearise(model, window=16, sinks=4, state="none")
    tokenizer = library.AutoTokenizer.from_pretrained(folder)
    ids = torch.tensor([tokenizer(text.read_text())["input_ids"][:91]])
    losses = torch.nn.functional.cross_entropy(model(ids[:, :-1]).logits[0], ids[0, 1:], reduction="none")
    loss = torch.stack([part.mean() for part in losses.split(20)]).mean()
    loss.backward()
    norm = torch.stack([weight.grad.norm() for weight in model.parameters()]).norm()
    assert f"loss {loss:.4f}, norm of the gradient {norm:.4f}" in found


def test_caches_are_trained_saved_and_loaded(folder, text, tmp_path, capsys):
    run("finetune_memory", folder, text, "--out", tmp_path / "out", "--steps", 2, "--segment", 16, "--rollout", 2)
    model = mnemos.hosts.from_pretrained(library.AutoModelForCausalLM, tmp_path / "out").eval()
    before = library.AutoModelForCausalLM.from_pretrained(folder)
    weight = {name: one for name, one in before.named_parameters() if "q_proj" in name}
    assert all(torch.equal(one, model.get_parameter(name)) for name, one in weight.items())
    step = mnemos.functional(model)
    assert step.state_kind == "constant"
    assert any(type(part).__name__ == "CacheState" for part in step.initial_state(1).parts)
