"""The training of a linearised decoder: it learns, it resumes exactly, and its teacher is the model itself."""

import json
import re
import signal
from dataclasses import fields, replace

import pytest
import torch
from torch.nn import functional as F

import mnemos
from mnemos.errors import InputError
from mnemos.lab.cli import main
from mnemos.lab.errors import Interrupted
from mnemos.lab.linearised import train
from mnemos.lab.linearised.original import original
from mnemos.lab.linearised.pieces import Teacher, divergence
from mnemos.lab.linearised.settings import LinearisedConfig
from mnemos.lab.linearised.train import Training, transfer_gradients
from mnemos.lab.linearised.weights import GRID, fit_weights

TEXT = {"a": "".join(chr(97 + i * i % 23) for i in range(3000))}
SETTINGS = LinearisedConfig(
    window=8,
    sinks=2,
    rank=2,
    context=64,
    length=32,
    transfer_length=32,
    transfer_tokens=64 * 8,
    tokens=64 * 5,
    top=8,
    decay=0.3,
    rate=1e-2,
    transfer_rate=8e-2,
)


def decoder():
    mnemos.libraries.transformers()
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    sizes = {"hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=40, num_key_value_heads=2, **sizes))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)  # attention that is not even
    return model


def tokenizer(text, **_):
    return {"input_ids": [ord(c) % 40 for c in text]}


def begin(folder, **changes):
    return Training(decoder(), tokenizer, TEXT, replace(SETTINGS, **changes), folder, quiet=True)


def weights(training):
    return [value.detach().clone() for value in training.trained.values()]


def errors(training):
    """The mean relative error of the attentions' outputs, and KL, on a row of the text."""
    ids = training.pieces[0][1][None]
    changed = {one.name: training.model.get_submodule(one.name) for one in training.report.changed}
    error = transfer_gradients(training.model, changed, ids)
    training.model.zero_grad()
    with torch.no_grad():
        found = training.model(ids).logits.log_softmax(-1)
        with original(training.model):
            wanted = training.model(ids).logits.log_softmax(-1)
    return error, float(F.kl_div(found, wanted, log_target=True, reduction="batchmean")) / ids.shape[1]


def test_it_learns_and_continues_bit_for_bit_after_a_kill_and_with_more_tokens(tmp_path, monkeypatch):
    monkeypatch.setattr(train, "_SAVED", 0.0)
    first = begin(tmp_path / "whole", tokens=0)
    before = errors(first)
    first.run()
    between = errors(first)
    whole = begin(tmp_path / "whole")
    whole.run()
    after = errors(whole)
    assert between[0] < 0.9 * before[0]
    assert after[1] < 0.9 * between[1]

    every = train.groups
    for dies in (2, 3):  # in stage 1, then in stage 2

        def dying(*given, dies=dies):
            for i, group in enumerate(every(*given)):
                if i == dies:
                    raise KeyboardInterrupt
                yield group

        monkeypatch.setattr(train, "groups", dying)
        try:
            begin(tmp_path / "killed").run()
        except KeyboardInterrupt:
            monkeypatch.setattr(train, "groups", every)
    killed = begin(tmp_path / "killed")
    killed.run()
    assert all(map(torch.equal, weights(whole), weights(killed)))

    begin(tmp_path / "longer", tokens=64 * 3).run()
    longer = begin(tmp_path / "longer")
    longer.run()
    assert all(map(torch.equal, weights(whole), weights(longer)))


@pytest.mark.parametrize(("at", "kept"), [(7, 6), (10, 10)])  # the first of two updates of a group; the last of all
def test_a_signal_ends_it_after_the_update_and_it_continues(at, kept, tmp_path, monkeypatch):
    monkeypatch.setattr(train, "_SAVED", 0.0)
    update, done = train._Stage._update, []

    def signalled(self, number):
        done.append(number)
        if len(done) == at:
            signal.raise_signal(signal.SIGTERM)
        return update(self, number)

    monkeypatch.setattr(train._Stage, "_update", signalled)
    few = {"tokens": 0, "transfer_tokens": 64 * 5}
    with pytest.raises(Interrupted, match=f"continues from update {kept} of 10"):
        begin(tmp_path / "ended", **few).run()
    assert done == [*range(1, at + 1)]
    ended, whole = begin(tmp_path / "ended", **few), begin(tmp_path / "whole", **few)
    ended.run()
    assert done[at:] == [*range(kept + 1, 11)]
    whole.run()
    assert all(map(torch.equal, weights(whole), weights(ended)))


def test_the_command_refuses_in_one_line_before_it_loads(tmp_path, capsys):
    (tmp_path / "empty.txt").touch()
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    for words, said in (
        ("nowhere --text x", "nowhere: expected the folder of a saved model of Transformers, or hf:NAME of the hub"),
        ("nowhere --text x --window 0", "window: expected at least 1, found 0"),
        ("nowhere --text x --half-life 1048577", "half_life: expected at most 1,048,576 tokens, found 1,048,577"),
        ("nowhere --text x --length 100", "length: expected a divisor of the context of 4096 tokens, found 100"),
        (f"{tmp_path} --text {tmp_path}/no", "found no such file or folder; check --text"),
        (f"{tmp_path} --text {tmp_path}/empty.txt", "found none in it; check --text"),
    ):
        assert main(["linearise", *words.split(), "--out", str(tmp_path / "run")]) == 2
        lines = capsys.readouterr().err.splitlines()
        assert said in lines[-1]
        assert not (tmp_path / "run").exists()
    with pytest.raises(InputError, match=r"4,096 tokens \(--context\) or more, found 3,000 in the longest"):
        begin(tmp_path / "run", context=4096)
    assert main(["linearise", "--help"]) == 0
    options = re.findall(r"^ +--([\w-]+)", told := capsys.readouterr().out, re.M)
    assert {one.name.replace("_", "-") for one in fields(LinearisedConfig)} <= {*options}
    assert not re.search(r"--\S+ \S+\s+\(", told)  # every option has a meaning before its default


def test_a_run_of_another_model_or_of_more_tokens_is_kept_as_it_is(tmp_path):
    begin(tmp_path, transfer_tokens=0, tokens=64 * 2).run()
    before = {path.name: path.read_bytes() for path in tmp_path.glob("*.json")}
    with pytest.raises(InputError, match="expected at least the 128 tokens of the run so far, found 64"):
        begin(tmp_path, transfer_tokens=0, tokens=64)
    begin(tmp_path / "mistyped", transfer_tokens=0, tokens=64 * 50)
    begin(tmp_path / "mistyped", transfer_tokens=0, tokens=64)
    other = decoder()
    with torch.no_grad():
        other.lm_head.weight[0, 0] += 1
    few = replace(SETTINGS, transfer_tokens=0, tokens=64 * 2)
    with pytest.raises(InputError, match="of this model and text, found one of others"):
        Training(other, tokenizer, TEXT, few, tmp_path, quiet=True)
    with pytest.raises(InputError, match="expected the teacher of this model and text"):
        Training(other, tokenizer, TEXT, few, tmp_path / "other", teacher=tmp_path / "teacher", quiet=True)
    assert not (tmp_path / "other").exists()
    with pytest.raises(InputError, match="expected a training with window 9, found one with 8"):
        train.train_folder("hf:not-loaded", [], replace(few, window=9), tmp_path)
    assert before == {path.name: path.read_bytes() for path in tmp_path.glob("*.json")}

    old = json.loads((path := tmp_path / train.SETTINGS).read_text())
    del old["version"]
    path.write_text(json.dumps(old | {"settings": old["settings"] | {"fit_tokens": 0}}))
    for read in (lambda: begin(tmp_path, transfer_tokens=0, tokens=64 * 3), lambda: train.load(decoder(), tmp_path)):
        with pytest.raises(InputError, match="expected a training of version 2, found one of version 1"):
            read()


def test_settings_that_the_decoder_does_not_allow_are_refused_first(tmp_path):
    for changes, said in (
        ({"top": 41}, "top: expected at most the 40 tokens of the vocabulary"),
        ({"context": 2112, "length": 64, "transfer_length": 64}, "context: expected at most the 2,048 positions"),
        ({"window": 70, "transfer_tokens": 0}, "context: expected more than the 72 tokens of window and sinks"),
        ({"window": 30}, "transfer_length: expected more than the 32 tokens of window and sinks, found 32"),
        ({"rate": float("nan")}, "rate: expected at least 0, found nan"),
    ):
        with pytest.raises(InputError, match=said):
            begin(tmp_path / "run", **changes)
        assert not (tmp_path / "run").exists()
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "text.txt").write_text(name)
    with pytest.raises(InputError, match=r"found a second text\.txt; rename one"):
        train.read_texts([tmp_path / "a/text.txt", tmp_path / "b/text.txt"])


def test_a_folder_is_checked_before_it_is_trained(tmp_path, monkeypatch):
    transformers = mnemos.libraries.transformers()
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda *_, **named: tokenizer)
    text = tmp_path / "text.txt"
    text.write_text(TEXT["a"])
    model = decoder()
    model.save_pretrained(tmp_path / "model")
    with pytest.raises(InputError, match=r"--test text\.txt: expected at least 8,192 tokens, found 3,000"):
        train.train_folder(tmp_path / "model", [text], SETTINGS, tmp_path / "run", test=[text])
    mnemos.linearise(model, window=8)
    model.save_pretrained(tmp_path / "linearised")
    with pytest.raises(InputError, match="expected a decoder without a memory, found one that is linearised"):
        train.train_folder(tmp_path / "linearised", [text], SETTINGS, tmp_path / "run")
    assert not (tmp_path / "run").exists()
    (tmp_path / "strange" / "model").mkdir(parents=True)
    (tmp_path / "strange" / "model" / "config.json").symlink_to(text)  # Transformers would write through it
    with pytest.raises(InputError, match="found a link"):
        train.train_folder(tmp_path / "model", [text], SETTINGS, tmp_path / "strange")


def test_a_folder_becomes_a_decoder_whose_updates_are_in_its_weights(tmp_path, monkeypatch, capsys):
    class Tokenizer:
        def decode(self, ids):
            return "".join(chr(97 + int(i) % 26) for i in ids)

        def __call__(self, text, **options):
            return tokenizer(text, **options)

        def save_pretrained(self, folder):
            (folder / "tokenizer.json").write_text("{}")

    transformers = mnemos.libraries.transformers()
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda *_, **named: Tokenizer())
    (text := tmp_path / "text.txt").write_text(TEXT["a"])
    model, ids = decoder().eval(), torch.randint(40, (2, 30))
    model.save_pretrained(tmp_path / "model")
    monkeypatch.setattr(train, "plan_assessment", lambda *_: {"pieces": 2, "context": 64, "rows": 0, "distances": []})
    settings = replace(SETTINGS, transfer_tokens=64)
    found = train.train_folder(tmp_path / "model", [text], settings, tmp_path / "run", test=[text])
    assert found["test"] == json.loads((tmp_path / "run/assessed.json").read_text())
    assert found["test"]["text.txt"]["tokens"] == 128
    assert "measuring on text.txt" in capsys.readouterr().err
    made = mnemos.hosts.from_pretrained(type(model), tmp_path / "run/model").eval()
    assert not any(".updates." in name for name, _ in made.named_parameters())
    assert train.load(model, tmp_path / "run").rank == SETTINGS.rank
    with torch.no_grad():
        torch.testing.assert_close(made(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-4)
        mnemos.unlinearise(model)
        assert not torch.allclose(made(ids).logits, model(ids).logits, rtol=1e-3, atol=1e-3)


def test_original_is_the_model_before(tmp_path):
    model, ids = decoder().eval(), torch.randint(40, (2, 30))
    with torch.no_grad():
        before = model(ids).logits
        report = mnemos.linearise(model, window=8, sinks=2, rank=2)
        for parameter in (*report.maps.values(), *report.updates.values()):
            parameter.add_(0.1)
        student = model(ids).logits
        with original(model):
            assert torch.equal(model(ids).logits, before)
        assert torch.equal(model(ids).logits, student)
    assert not torch.equal(student, before)
    teacher = Teacher(model, tmp_path, 5, {})
    for _ in range(2):  # computed, then read
        tokens, probabilities, rest = teacher.of([4, 7], ids)
        expected = before.softmax(-1).topk(5)
        assert torch.equal(tokens, expected.indices)
        assert torch.allclose(probabilities, expected.values, rtol=2e-3)
        assert torch.allclose(probabilities.sum(-1) + rest, torch.ones(2, 30))


def test_divergence_is_that_of_the_kept_tokens_and_of_the_rest():
    logits = torch.randn(2, 3, 11, dtype=torch.float64).float().requires_grad_()
    p = torch.randn(2, 3, 11).softmax(-1)
    kept, tokens = p.topk(4)
    rest = 1 - kept.sum(-1)
    found = divergence(logits, tokens, kept, rest)
    weight = torch.randn(2, 3)
    (gradient,) = torch.autograd.grad((found * weight).sum(), logits)
    q = logits.softmax(-1)
    taken = q.gather(-1, tokens)
    direct = F.kl_div(taken.log(), kept, reduction="none").sum(-1)
    direct = direct + rest * (rest / (1 - taken.sum(-1))).log()
    (expected,) = torch.autograd.grad((direct * weight).sum(), logits)
    assert torch.allclose(found, direct, atol=1e-5)
    assert torch.allclose(gradient, expected, atol=1e-5)
    assert bool((found <= F.kl_div(q.log(), p, reduction="none").sum(-1) + 1e-6).all())


def test_gamma_is_fitted_to_the_outputs_of_each_head(tmp_path):
    training = begin(tmp_path)
    ids = training.pieces[0][1][None]
    changed = {one.name: training.model.get_submodule(one.name) for one in training.report.changed}
    fit_weights(training.model, changed, ids)
    for layer in training.model.model.layers:
        seen = []
        hook = layer.self_attn.o_proj.register_forward_pre_hook(lambda _, given, seen=seen: seen.append(given[0]))
        own = layer.self_attn.linearised
        fitted = own.log_gamma.detach().clone()
        with torch.no_grad():
            inputs = []
            keep = layer.self_attn.register_forward_pre_hook(
                lambda _, given, named, inputs=inputs: inputs.append((given, named)), with_kwargs=True
            )
            with original(training.model):
                training.model(ids, use_cache=False)
            keep.remove()
            errors = []
            for value in GRID:
                own.log_gamma.fill_(value)
                layer.self_attn(*inputs[0][0], **inputs[0][1])
                errors.append((seen[-1] - seen[0])[0, 8:].unflatten(-1, (4, 6)).square().sum((0, 2)))
        hook.remove()
        assert torch.equal(fitted, torch.tensor(GRID)[torch.stack(errors).argmin(0)])


def test_weights_of_one_number_a_head_learn_ten_times_as_fast_as_maps(tmp_path):
    training = begin(tmp_path)
    for part, rate in (("transfer", SETTINGS.transfer_rate), ("next_token", SETTINGS.map_rate)):
        stage = train._Stage(training, part, None)
        rates = {value: one["rate"] for one in stage.optimizer.param_groups for value in one["params"]}
        found = {name.rpartition(".")[2]: rates[value] / rate for name, value in training.maps.items()}
        assert found == pytest.approx({"log_gamma": 10, "rate": 10, "query_map": 1, "key_map": 1})
