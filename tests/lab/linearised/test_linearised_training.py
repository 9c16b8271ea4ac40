"""The training of a linearised decoder: it learns, it resumes exactly, and its teacher is the model itself."""

import importlib
import json
import math
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from refusals import refuses
from tiny_decoder import llama
from torch.nn import functional as F

import mnemos
from mnemos.errors import InputError
from mnemos.hosts.ranking import WindowLoss
from mnemos.lab.cli import main
from mnemos.lab.cli.linearising import linearise
from mnemos.lab.errors import Interrupted, TrainingFailed
from mnemos.lab.linearised import ranked, train
from mnemos.lab.linearised.settings import LinearisedConfig
from mnemos.lab.linearised.stages import Teacher, divergence, original, transfer_loss
from mnemos.lab.linearised.text_batches import read_texts
from mnemos.lab.linearised.train import Training
from mnemos.lab.run import checkpoint, loop

TEXT = {"a": "".join(chr(97 + i * i % 23) for i in range(3000))}
SIZES = {"window": 8, "sinks": 2, "rank": 2, "context": 64, "length": 32, "transfer_length": 32, "top": 8}
SIZES |= {"transfer_tokens": 64 * 4, "tokens": 64 * 5}
FEW = {"tokens": 64, "transfer_tokens": 64}
SETTINGS = LinearisedConfig(**SIZES, decay=0.3, rate=1e-2, transfer_rate=8e-2)


def decoder():
    sizes = {"hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = llama(40, 3, **sizes, num_key_value_heads=2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)  # attention that is not even
    return model


def tokenizer(text, **_):
    return {"input_ids": [ord(c) % 40 for c in text]}


def begin(folder, quiet=True, **changes):
    return Training(decoder(), tokenizer, TEXT, replace(SETTINGS, **changes), folder, quiet=quiet)


def weights(training):
    return [value.detach().clone() for value in training.trained.values()]


def errors(training):
    """The mean relative error of the attentions' outputs, and KL, on a row of the text."""
    ids = training.pieces.ids[training.pieces.group(0, 1)]
    changed = {one.name: training.decoder.get_submodule(one.name) for one in training.report.changed}
    with torch.no_grad():
        error = transfer_loss(training.decoder, changed, ids)
        found = training.decoder(ids).logits.log_softmax(-1)
        with original(training.decoder):
            wanted = training.decoder(ids).logits.log_softmax(-1)
    return float(error), float(F.kl_div(found, wanted, log_target=True, reduction="batchmean")) / ids.shape[1]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A training of both stages, the errors before it and between them, and its result."""
    training = begin(tmp_path_factory.mktemp("whole"))
    found = [errors(training)]
    stage_of = training.stage
    training.stage = lambda stage: found.append(errors(training)) or stage_of(stage)
    result = training.run()
    return training, found[0], found[2], result


def test_it_learns(whole):
    training, before, between, result = whole
    assert between[0] < 0.9 * before[0]
    assert errors(training)[1] < 0.9 * between[1]
    assert {name: stage["tokens"] for name, stage in result["stages"].items()} == {"transfer": 256, "next_token": 320}
    assert (training.folder / train.ADAPTER).is_file()


def test_a_training_that_is_killed_and_then_stopped_continues_bit_for_bit(whole, tmp_path, monkeypatch):
    update, done = loop.update, []

    def ending(learner):
        done.append(learner.count.step)
        if len(done) == 8 + 6:  # in stage 2, in the middle of a group
            raise KeyboardInterrupt
        if len(done) == 8 + 6 + 3:  # the first of two updates of a group, whose state is kept
            signal.raise_signal(signal.SIGTERM)
        return update(learner)

    monkeypatch.setattr(loop, "update", ending)
    with pytest.raises(KeyboardInterrupt):
        begin(tmp_path).run()
    with pytest.raises(Interrupted, match="the same command continues from update 7 of 10"):
        begin(tmp_path).run()
    ended = begin(tmp_path)
    ended.run()
    assert done[8:] == [*range(6), *range(4, 10)]
    assert all(map(torch.equal, weights(whole[0]), weights(ended)))


def test_more_tokens_go_on_from_before_the_rate_fell(whole, tmp_path, monkeypatch):
    begin(tmp_path, tokens=64 * 3).run()
    assert checkpoint.steps(tmp_path / "next_token/checkpoints") == [6, 5], "the rate falls after update 5"
    longer, update, done = begin(tmp_path), loop.update, []
    monkeypatch.setattr(loop, "update", lambda learner: done.append(learner.count.step) or update(learner))
    longer.run()
    assert done == [*range(5, 10)]
    assert all(map(torch.equal, weights(whole[0]), weights(longer)))


def test_it_says_how_long_it_will_take_and_changes_nothing_by_that(tmp_path, capsys):
    few = replace(SETTINGS, **FEW)
    quiet, training = (Training(decoder(), tokenizer, TEXT, few, tmp_path / str(q), quiet=q) for q in (True, False))
    quiet.run()
    assert capsys.readouterr().err == ""
    training.run()
    said = capsys.readouterr().err
    assert "transfer: 2 updates of 32 tokens, about" in said
    assert said.index("next token: ") < said.index(" in all, without the measurements after it")
    assert "rises for 8 updates and the training has 2" in said
    assert "optim." not in said  # the command has no such option
    assert all(map(torch.equal, weights(quiet), weights(training)))
    Training(decoder(), tokenizer, TEXT, few, tmp_path / "False").run()
    assert "about" not in capsys.readouterr().err, "nothing is left to do"


def test_a_loss_that_is_no_number_names_the_rates_of_the_command(tmp_path):
    with pytest.raises(TrainingFailed, match=r"expected a finite loss and gradient, .*; lower the rates"):
        begin(tmp_path, transfer_rate=1e30).run()


def test_rows_are_read_together_and_a_group_begins_with_no_state(tmp_path):
    training = begin(tmp_path, rows=2, loss="labels")
    recipe, task, parameters = training.stage("next_token")
    assert recipe.train.steps == 3 * 2
    batches = [task.train_batch(i, 2, 0) for i in range(4)]
    assert [batch.reset.tolist() for batch in batches] == [[True] * 2, [False] * 2] * 2
    ids = training.pieces.ids[training.pieces.group(1, 2)]
    assert torch.equal(torch.cat([batch.inputs for batch in batches[2:]], 1), ids)
    assert torch.equal(torch.cat([batch.labels for batch in batches[2:]], 1)[:, :-1], ids[:, 1:])
    with torch.no_grad():
        logits, state = task.forward(parameters, batches[0], None)
        more, _ = task.forward(parameters, batches[1], state)
        whole = training.decoder(training.pieces.ids[training.pieces.group(0, 2)]).logits
        fresh = mnemos.types.reset(state, batches[2].reset)
        again, anew = (task.forward(parameters, batches[2], one)[0] for one in (fresh, None))
    torch.testing.assert_close(torch.cat([logits, more], 1), whole, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(again, anew, rtol=1e-5, atol=1e-5)
    assert task.count(batches[0]) + task.count(batches[1]) == 2 * 63
    losses = [task.loss(parameters, *one) for one in ((logits, batches[0]), (more, batches[1]))]
    expected = F.cross_entropy(whole[:, :-1].mT, training.pieces.ids[training.pieces.group(0, 2)][:, 1:])
    torch.testing.assert_close(sum(losses) / (2 * 63), expected)


def test_the_command_refuses_in_one_line_before_it_loads(tmp_path, capsys):
    (tmp_path / "empty.txt").touch()
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    for words, said in (
        ("nowhere --text x", "nowhere: expected the folder of a saved model of Transformers, or hf:NAME of the hub"),
        ("nowhere --text x --window 0", "window: expected at least 1, found 0"),
        ("nowhere --text x --length 100", "length: expected a divisor of the context of 4096 tokens, found 100"),
        (f"{tmp_path} --text {tmp_path}/no", "found no such file or folder; check --text"),
        (f"{tmp_path} --text {tmp_path}/empty.txt", "found none in it; check --text"),
    ):
        assert main(["linearise", *words.split(), "--out", str(tmp_path / "run")]) == 2
        lines = capsys.readouterr().err.splitlines()
        assert said in lines[-1]
        assert not (tmp_path / "run").exists()
    refuses(r"4,096 tokens \(--context\) or more, found 3,000 in the longest", begin, tmp_path / "run", context=4096)


def test_a_run_of_another_model_or_of_more_tokens_is_left_as_it_is(whole, tmp_path):
    folder = whole[0].folder
    before = {path.name: path.read_bytes() for path in folder.glob("*.json")}
    model = decoder()
    with torch.no_grad():
        model.lm_head.weight[0, 0] += 1
    other = model, tokenizer, TEXT, SETTINGS
    for call, said in (
        (lambda: begin(folder, tokens=64), "at least the 320 tokens of the run so far, found 64"),
        (lambda: Training(*other, folder), "another model.model "),
        (
            lambda: Training(*other, tmp_path / "other", teacher=folder / "teacher"),
            "the teacher of this model and text",
        ),
        (
            lambda: train.train_folder("hf:not-loaded", [], replace(SETTINGS, window=9), folder),
            r"another settings.window \(8, not 9\)",
        ),
    ):
        refuses(said, call)
    assert not (tmp_path / "other").exists()
    assert before == {path.name: path.read_bytes() for path in folder.glob("*.json")}


def test_products_in_bfloat16_train_nearly_the_same_weights_in_float32(whole, tmp_path):
    training = begin(tmp_path / "half", precision="bf16-mixed")
    training.run()
    assert {value.dtype for value in weights(training)} == {torch.float32}
    assert not any(map(torch.equal, weights(training), weights(whole[0])))
    for before, after, wanted in zip(whole[1], errors(training), errors(whole[0]), strict=True):
        assert abs(after - wanted) < 0.1 * (before - wanted)


def test_settings_that_the_decoder_does_not_allow_are_refused_first(tmp_path):
    for changes, said in (
        ({"top": 41}, "top: expected at most the 40 tokens of the vocabulary"),
        ({"context": 2112, "length": 64, "transfer_length": 64}, "context: expected at most the 2,048 positions"),
        ({"window": 70, "transfer_tokens": 0}, "context: expected more than the 72 tokens of window and sinks"),
        ({"window": 30}, "transfer_length: expected more than the 32 tokens of window and sinks, found 32"),
        ({"transfer_rate": 0.0}, "transfer_rate: expected a finite rate above 0, found 0.0"),
        ({"transfer_rate": math.inf}, "transfer_rate: expected a finite rate above 0, found inf"),
        ({"map_rate": math.inf}, "map_rate: expected a finite rate, found inf"),
        ({"rate": 0.0, "map_rate": 0.0}, "rate: expected a rate above 0, or one of map_rate, found 0.0"),
        ({"rank": 0, "map_rate": 0.0}, "map_rate: expected a rate above 0, or a rank of updates, found 0.0"),
        ({"state": "none", "rate": 0.0}, "^rate: expected a rate above 0, found 0.0"),
    ):
        refuses(said, begin, tmp_path / "run", **changes)
        assert not (tmp_path / "run").exists()
    refuses("fewer than the 2 attentions of the decoder, found 2", begin, tmp_path / "two", full=("2",))
    refuses("fewer than the 4 key heads of the decoder, found 4", begin, tmp_path / "four", full=("4", "heads"))


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
    assert linearise(str(tmp_path / "model"), text=(text,), settings=settings, out=tmp_path / "run", test=(text,)) == 0
    found = json.loads((tmp_path / "run/assessed.json").read_text())["text.txt"]
    assert found["tokens"] == 128
    said = capsys.readouterr()
    assert "measuring on text.txt" in said.err
    first, second, measured, _, end = said.out.splitlines()
    assert first.startswith("transfer: 2 updates, 64 tokens, ")
    assert second.startswith("next token: 10 updates, 320 tokens, ")
    perplexity, bits = found["positions"]["0-64"]["perplexity"], found["bits_per_byte"]
    assert measured == f"text.txt: perplexity at positions 0-64 {perplexity:.2f}; {bits:.3f} bits per byte"
    assert end.startswith(f"{tmp_path / 'run/model'}: the decoder; ")
    made = mnemos.hosts.from_pretrained(type(model), tmp_path / "run/model").eval()
    assert not any(".updates." in name for name, _ in made.named_parameters())
    with torch.no_grad():
        assert mnemos.hosts.load_adapter(model, tmp_path / "run/adapter.safetensors")["name"] == "model"
        torch.testing.assert_close(made(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-4)
        mnemos.unlinearise(model)
        assert not torch.allclose(made(ids).logits, model(ids).logits, rtol=1e-3, atol=1e-3)


def test_a_hybrid_leaves_the_attentions_whole_that_the_text_needs_most(tmp_path, monkeypatch, capsys):
    """It is ranked once, on pieces that are read last; the run goes on with them, and is loaded with them."""
    training = begin(tmp_path / "one", full=("1",), **FEW)
    rows = [training.pieces.ids[i] for i in [*training.pieces.numbers[-2:], training.pieces.held_out]]
    ranking = mnemos.rank_attentions(decoder(), rows, window=8, sinks=2, first=16)
    assert training.full == ranking.full(1)
    assert [one.name for one in training.report.changed] == [one for one in ranking.names if one not in training.full]
    training.run()
    logits = training.decoder(training.pieces.ids[:1]).logits
    loaded = decoder()
    mnemos.hosts.load_adapter(loaded, tmp_path / "one/adapter.safetensors")
    assert torch.equal(loaded(training.pieces.ids[:1]).logits, logits)

    with monkeypatch.context() as patch:  # all losses are in the folder
        patch.setattr(WindowLoss, "__call__", lambda *_: pytest.fail("measured again"))
        assert begin(tmp_path / "one", full=("1",), **FEW).full == training.full
    refuses(r"another settings.full \(\['1'\], not \['2'\]\)", begin, tmp_path / "one", full=("2",), **FEW)
    (tmp_path / "one" / train.SETTINGS).unlink()  # it was interrupted while it ranked
    words = "ranking.json: expected losses of .*'window': 7.* found .*'window': 8"
    refuses(words, begin, tmp_path / "one", full=("1",), window=7, **FEW)
    assert begin(tmp_path / "none", full=("0",)).full == ()
    assert not (tmp_path / "none/ranking.json").exists()  # nothing is measured for it
    with monkeypatch.context() as patch:  # a window as long as what is read: twice as much is read
        patch.setattr(ranked, "LENGTH", 8)
        assert len(begin(tmp_path / "long", full=("1",)).full) == 1
    names = ("model.layers.0.*", "model.layers.1.self_attn:1")
    assert [one.name for one in begin(tmp_path / "named", full=names, quiet=False).report.changed] == [
        "model.layers.1.self_attn"
    ]
    assert capsys.readouterr().err == "left whole: model.layers.0.self_attn, model.layers.1.self_attn:1\n"


def test_a_ranking_that_is_interrupted_goes_on_with_the_losses_that_it_has(tmp_path, monkeypatch, capsys):
    measure, measured = WindowLoss.__call__, []

    def interrupted(self, *given, **named):
        if len(measured) == 2:
            measured.append("interrupted")
            raise KeyboardInterrupt
        measured.append(given)
        return measure(self, *given, **named)

    monkeypatch.setattr(WindowLoss, "__call__", interrupted)
    with pytest.raises(Interrupted, match=r"^interrupted; the same command continues after loss 1 of 4$"):
        begin(tmp_path, full=("1",), quiet=False)
    assert "ranking 2 attentions by 4 losses on 3 pieces of 64 tokens, kept in" in capsys.readouterr().err
    assert len(begin(tmp_path, full=("1",)).full) == 1
    assert len(json.loads((tmp_path / ranked.LOSSES).read_text())["losses"]) == 4


def test_a_hybrid_by_key_head(tmp_path):
    training = begin(tmp_path / "one", full=("2", "heads"), **FEW)
    rows = [training.pieces.ids[i] for i in [*training.pieces.numbers[-2:], training.pieces.held_out]]
    ranking = mnemos.rank_attentions(decoder(), rows, window=8, sinks=2, first=16, jointly=False, heads=True)
    assert training.full == ranking.full_heads(2)
    whole = sum(len(one.full_heads) for one in training.report.changed) + 2 * len(training.report.left)
    assert whole == 2
    training.run()
    loaded = decoder()
    mnemos.hosts.load_adapter(loaded, tmp_path / "one/adapter.safetensors")
    ids = training.pieces.ids[:1]
    assert torch.equal(loaded(ids).logits, training.decoder(ids).logits)
    for full in (("3 heads",), ("3", "head"), ("heads", "3"), ("-1",), ("2", "model.layers.0.self_attn")):
        refuses(f"a number and heads .*found '{' '.join(full)}'", replace, SETTINGS, full=full)


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
    for _ in range(2):  # computed, then read
        tokens, probabilities, rest = Teacher(model, tmp_path, 5, {}).predictions([4, 7], ids)
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


def test_a_transfer_of_the_first_tokens_alone_is_that_of_a_shorter_row(whole):
    training = whole[0]
    changed = {one.name: training.decoder.get_submodule(one.name) for one in training.report.changed}
    ids = training.pieces.ids[training.pieces.group(0, 2)]
    first = (torch.arange(ids.shape[1]) < 20).float().expand(2, -1)
    with torch.no_grad():
        found = transfer_loss(training.decoder, changed, ids, first)
        expected = transfer_loss(training.decoder, changed, ids[:, :20])
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(transfer_loss(training.decoder, changed, ids, 3 * first), found)


def test_texts_of_one_name_are_refused(tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "one.txt").write_text(f"{folder}\r\n")
    assert read_texts([tmp_path / "a"]) == {"one.txt": "a\n"}
    refuses("found a second one.txt; rename one", read_texts, [tmp_path / "a", tmp_path / "b" / "one.txt"])


def test_weights_of_one_number_a_head_learn_ten_times_as_fast_as_maps(whole):
    training = whole[0]
    for part, rate in (("transfer", SETTINGS.transfer_rate), ("next_token", SETTINGS.map_rate)):
        recipe, _, parameters = training.stage(part)
        found = {
            name.rpartition("/")[2]: recipe.optim.lr * scale / rate
            for name, scale in parameters.lr_scales.items()
            if "updates" not in name
        }
        assert found == pytest.approx({"log_gamma": 10, "rate": 10, "query_map": 1, "key_map": 1})


@pytest.mark.parametrize("kind", ["none", "cache", "remember"])
def test_the_benchmark_of_arms_trains_memories_beside_the_window(kind, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "benchmarks"))
    arms = importlib.import_module("linearised_arms")
    monkeypatch.setattr(arms, "TOKENS", 2)
    settings = replace(SETTINGS, state="none", transfer_tokens=0, tokens=64)
    training = arms.MemoryTraining(kind, decoder(), tokenizer, TEXT, settings, tmp_path, quiet=True)
    before = weights(training)
    assert training.run()["stages"]["next_token"]["updates"] == 2
    assert not all(map(torch.equal, before, weights(training)))
    assert (training.reader is training.decoder) == (kind != "remember")
