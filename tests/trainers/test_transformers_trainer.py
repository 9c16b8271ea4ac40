"""RolloutTrainer beside plain back-propagation through time; killed, resumed, accumulated and refused."""

import re
import signal

import processes
import pytest
import torch
from refusals import refuses
from torch.nn import functional as F

import mnemos
from mnemos.hugging_face import MnemosConfig, MnemosForCausalLM, MnemosForSeq2SeqLM
from mnemos.libraries import transformers
from mnemos.memory_replay import rollout
from mnemos.trainers import RolloutBatches
from mnemos.trainers.batches import RowStates, Segment
from mnemos.trainers.reader import Reader
from mnemos.types import InputError, leaves

pytest.importorskip("accelerate")
from trainer_standins import (
    LINEAR,
    MODELS,
    ROLLOUT,
    SEGMENT,
    RolloutTrainer,
    accumulated,
    arguments,
    back_propagated,
    distributed,
    documents,
    killed,
    loss_of_each_alone,
    made,
    of_two_rows,
    own_step,
    read_again,
    trainer_of,
)


@pytest.mark.parametrize("verify", [True, False])
def test_the_first_update_is_verified(tmp_path, monkeypatch, verify):
    calls, original = [], rollout.compare
    monkeypatch.setattr(rollout, "compare", lambda *given: calls.append(None) or original(*given))
    named = {"args": arguments(tmp_path, max_steps=3), "train_dataset": documents()}
    RolloutTrainer(made("linear"), **named, segment=SEGMENT, rollout=2, verify=verify).train()
    assert len(calls) == verify  # the first of two steps


class Recorded(transformers().TrainerCallback):
    """The gradients of every update."""

    def __init__(self):
        self.updates = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **named):
        self.updates.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])


def test_one_process_counts_its_targets_whatever_is_averaged_over_processes(tmp_path):
    found = []
    for across in (True, False):
        recorded, settings = Recorded(), arguments(tmp_path, max_steps=1, average_tokens_across_devices=across)
        named = {"model": made("linear"), "args": settings, "train_dataset": documents(), "callbacks": [recorded]}
        RolloutTrainer(**named, segment=SEGMENT, rollout=2).train()
        found.append(recorded.updates[0])
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)


@pytest.mark.parametrize(
    "name", [n if n in ("cached", "memformer") else pytest.param(n, marks=pytest.mark.exhaustive) for n in MODELS]
)
def test_gradients_are_those_of_back_propagation_through_time(name, tmp_path):
    model, recorded = made(name).double(), Recorded()
    other = made(name).double()
    if name == "linear":  # dropout draws in another order
        for part in (*model.modules(), *other.modules()):
            if isinstance(part, torch.nn.Dropout):
                part.p = 0.0
    trainer = trainer_of(model, tmp_path, max_steps=3, max_grad_norm=0.0, learning_rate=0.0, weight_decay=0.0)
    trainer.add_callback(recorded)
    trainer.train()
    batches = RolloutBatches(documents(), 2, SEGMENT, ROLLOUT, seed=42)
    for found, wanted in zip(recorded.updates, back_propagated(other, batches, 3), strict=True):
        for grad, expected in zip(found, wanted, strict=True):
            if expected is not None:
                torch.testing.assert_close(grad, expected, rtol=1e-6, atol=1e-9)


def weights(trainer):
    return [p.detach().clone() for p in trainer.model.parameters()]


def test_killed_and_resumed_is_bit_identical(tmp_path):
    """After a kill in the middle of an epoch, and at the end of one; a checkpoint that is not whole is passed over."""
    whole = accumulated(tmp_path / "whole")
    whole.train()
    ended = processes.run(killed, tmp_path / "killed")
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    half = tmp_path / "killed" / "checkpoint-3"
    half.mkdir()  # it does not exist
    (half / "model.safetensors").write_bytes(b"half")
    for place in (True, str(tmp_path / "whole" / "checkpoint-3")):
        torch.manual_seed(9)  # what a checkpoint does not restore would differ
        resumed = accumulated(tmp_path / "killed")
        resumed.train(resume_from_checkpoint=place)
        assert all(map(torch.equal, weights(resumed), weights(whole)))


@pytest.mark.parametrize("name", ["mamba", "cached"])
def test_mixed_precision_is_resumed(name, tmp_path):
    """Some of the states are then in half precision, which those of new rows are not."""
    options = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1, "bf16": True}
    trainers = [trainer_of(made(name), tmp_path, **options) for _ in range(2)]
    for trainer, start in zip(trainers, (None, str(tmp_path / "checkpoint-1")), strict=True):
        trainer.train(start)
    assert all(map(torch.equal, *(trainer.model.parameters() for trainer in trainers)))


def test_sets_of_rows_and_processes_are_rows_of_one_batch(tmp_path):
    one, two = of_two_rows(tmp_path / "one", 2, 1), of_two_rows(tmp_path / "two", 1, 2)
    one.train()
    two.train()
    (tmp_path / "processes").mkdir()
    for ended in processes.launched(distributed, tmp_path / "processes"):
        assert ended.returncode == 0, ended.stderr
    several = torch.load(tmp_path / "processes" / "weights.pt")
    for a, b, c in zip(weights(one), weights(two), several, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(c, a, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    "name", [n if n == "memformer" else pytest.param(n, marks=pytest.mark.exhaustive) for n in MODELS]
)
def test_an_evaluation_reads_each_document_alone(name, tmp_path):
    model = made(name)
    options = {"max_steps": 1, "per_device_eval_batch_size": 3, "eval_strategy": "steps", "eval_steps": 1}
    trainer = trainer_of(model, tmp_path, evaluated=documents(1), **options)
    trainer.train()
    expected = pytest.approx(loss_of_each_alone(model, documents(1)), rel=1e-5)
    assert trainer.evaluate()["eval_loss"] == expected
    assert trainer.state.log_history[0]["eval_loss"] == expected


def test_an_evaluation_counts_targets_alone(tmp_path):
    """Padding and labels of −100 are none; with none at all the mean is 0."""
    model, data = made("linear"), documents(1)
    trainer = trainer_of(model, tmp_path, evaluated=data, per_device_eval_batch_size=3)
    for given in (None, [{"input_ids": [4, 5]}]):
        expected = loss_of_each_alone(model, given or data)
        assert trainer.evaluate(given)["eval_loss"] == pytest.approx(expected, rel=1e-5)
    none = [{"input_ids": [4, 5, 6], "labels": [-100] * 3}]
    assert trainer.evaluate(none, metric_key_prefix="test")["test_loss"] == 0


@pytest.mark.parametrize("name", ["cached", pytest.param("remembering", marks=pytest.mark.exhaustive)])
def test_a_memory_is_saved_with_its_settings_and_read(name, tmp_path):
    trainer = trainer_of(made(name), tmp_path, max_steps=2)
    trainer.train()
    trainer.save_model(tmp_path / "saved")
    ids = torch.tensor([documents()[1]["input_ids"]])
    with torch.no_grad():
        found, expected = read_again(name, tmp_path / "saved")(ids).logits, trainer.model.eval()(ids).logits
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def stateless():
    model = made("memformer")
    model.model.state_kind = "none"  # as a model of another package may say
    return model


def shared():
    model = made("remembering").remembering.model
    mnemos.cache(model, mnemos.GRC(length=4))
    return model


def translator():
    sizes = {"vocab_size": 30, "dim": 8, "num_heads": 2, "encoder_layers": 1, "decoder_layers": 1, "mlp": 8}
    return MnemosForSeq2SeqLM(MnemosConfig(model=mnemos.EncoderDecoderConfig(**sizes)))


BERT = {"vocab_size": 30, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (lambda: transformers().BertForMaskedLM(transformers().BertConfig(**BERT)), "causal"),
        (lambda: made("remembering").remembering, "RememberingForCausalLM.of"),
        (lambda: made("linear").model, "MnemosForCausalLM.of"),
        (translator, "expected a causal language model, found MnemosForSeq2SeqLM; use transformers.Trainer"),
        (stateless, "keeps a state"),
        (lambda: made("mamba").backbone, "MambaModel, which has no output layer"),
        (shared, 'scope="stream"'),
    ],
)
def test_models_without_a_causal_state_are_refused(model, said, tmp_path):
    refuses(re.escape(said), trainer_of, model(), tmp_path)


def test_what_does_not_apply_is_refused(tmp_path):
    sizes = {"train_dataset": documents(), "segment": 4, "rollout": 1}
    refuses("data_collator", RolloutTrainer, made("linear"), arguments(tmp_path), data_collator=dict, **sizes)
    for name in ("activation_checkpointing", "fsdp"):
        given = arguments(tmp_path)
        setattr(given, name, True)
        for positional, named in (((), {"model": made("linear"), "args": given}), ((made("linear"), given), {})):
            refuses(f"without {name}, because", RolloutTrainer, *positional, **named, **sizes)


def test_loaders_give_the_batches_of_an_epoch_in_order(tmp_path):
    given = arguments(tmp_path, data_seed=5, gradient_accumulation_steps=2, per_device_eval_batch_size=3)
    sets = {"train_dataset": documents(), "eval_dataset": {"short": documents(1)}}
    trainer = RolloutTrainer(made("linear"), given, **sets, segment=SEGMENT, rollout=ROLLOUT)
    loader, expected = trainer.get_train_dataloader(), RolloutBatches(documents(), 2, SEGMENT, ROLLOUT, 5, 2)
    assert loader.dataset.describe() == expected.describe()
    count = len(expected)
    assert len(loader) == count
    for epoch in range(2):
        loader.set_epoch(epoch)
        assert [batch["index"] for batch in loader] == list(range(epoch * count, (epoch + 1) * count))
    for given in ("short", documents(1)):
        evaluated = trainer.get_eval_dataloader(given)
        assert evaluated.dataset.describe() == RolloutBatches(documents(1), 3, SEGMENT, 1, None).describe()
    trainer.train_dataset = trainer.eval_dataset = None
    refuses("train_dataset, a sequence of documents, found none", trainer.get_train_dataloader)
    refuses("eval_dataset, a sequence of documents, found none", trainer.get_eval_dataloader)
    refuses(r"evaluate\(documents\)", trainer.get_test_dataloader, documents())
    half = tmp_path / "checkpoint-9"
    with pytest.raises(ValueError, match="No valid checkpoint"):  # Trainer's own, where there is none at all
        trainer.train(True)
    half.mkdir()
    for written, text in (
        ("trainer_state.json", "{}"),
        ("rng_state.pth", ""),
        ("trainer_state.json", "{"),
        ("rows-0.safetensors", ""),
    ):
        (half / written).write_text(text)
        refuses(r"by 1 process\(es\), found none; name another, or remove", trainer.train, True)
        refuses("checkpoint-9: .* resume from another", trainer.train, str(half))


def test_a_checkpoint_of_other_data_is_refused(tmp_path):
    options = {"max_steps": 1, "save_strategy": "steps", "save_steps": 1}
    trainer_of(made("linear"), tmp_path, **options).train()
    folder = str(tmp_path / "checkpoint-1")
    with pytest.raises(InputError, match=r"documents: expected '8, with lengths.*found '8, with"):
        trainer_of(made("linear"), tmp_path, [*documents()[1:], [1] * 9], **options).train(folder)
    with pytest.raises(InputError, match=r"rows: expected 2.*found 1"):
        trainer_of(made("linear"), tmp_path, per_device_train_batch_size=1, **options).train(folder)
    (tmp_path / "checkpoint-1" / "trainer_state.json").unlink()
    refuses("whole", trainer_of(made("linear"), tmp_path, **options).train, folder)


def test_labels_are_smoothed_in_training_alone():
    ids = torch.tensor([documents()[1]["input_ids"]])
    x, y = ids[:, :SEGMENT], ids[:, 1 : SEGMENT + 1]
    for smoothing in (0.3, 0.0):
        model = made("mamba").train(smoothing > 0)
        outputs = own_step(model)(x, None)[0].transpose(1, 2)
        expected = F.cross_entropy(outputs, y, reduction="sum", label_smoothing=smoothing) / 7
        torch.testing.assert_close(Reader(model, 0.3)(Segment(x, y), None, 7.0)[0], expected)


@pytest.mark.parametrize("name", ["mamba", "memformer"])
@torch.no_grad()
def test_padding_of_a_segment_leaves_the_state_alone(name):
    reader, x = Reader(made(name).eval()), torch.tensor([documents()[1]["input_ids"]])
    after, mask = Segment(x[:, 4:8], x[:, 5:9]), torch.arange(4)[None] < 3
    padded, plain = Segment(x[:, :4], torch.where(mask, x[:, 1:5], -100), mask), Segment(x[:, :3], x[:, 1:4])
    found, wanted = reader(padded, None, 3.0), reader(plain, None, 3.0)
    torch.testing.assert_close(found[0], wanted[0])
    states = [found[1], *([reader.advance(padded, None)] if reader.advances else [])]
    for state in states:
        torch.testing.assert_close(reader(after, state, 3.0)[0], reader(after, wanted[1], 3.0)[0])
    assert reader.advances == (name == "memformer")
    reader.model.train()
    fresh = reader.fresh(3, torch.device("cpu"))
    assert reader.model.training
    assert [len(leaf) for leaf in leaves(fresh)] == [3] * len(leaves(wanted[1]))


def test_a_model_may_be_made_by_the_trainer_or_exchanged(tmp_path):
    given = {"args": arguments(tmp_path), "eval_dataset": documents(1)[:2], "segment": SEGMENT, "rollout": ROLLOUT}
    trainer = RolloutTrainer(model_init=lambda: made("linear"), **given)
    for model in (made("linear"), made("mamba")):
        found = trainer.evaluate()["eval_loss"]
        assert found == pytest.approx(loss_of_each_alone(model, documents(1)[:2]), rel=1e-5)
        trainer.model = made("mamba")


def test_smoothed_labels_need_logits():
    head = mnemos.models.HeadConfig(tied=True, cutoffs=(4,))
    model = MnemosForCausalLM.of(mnemos.Transformer(**{**LINEAR, "head": head}))
    Reader(model)
    refuses("label_smoothing_factor: expected 0 for a model without logits, found 0.1", Reader, model, 0.1)


def test_a_state_of_another_model_is_refused():
    batches = RolloutBatches(documents(), 1, SEGMENT)
    states = {name: RowStates(batches) for name in ("mamba", "linear")}
    for name, rows in states.items():
        reader = Reader(made(name).eval())
        rows.read(lambda s, state, reader=reader: reader(s, state, 1.0), batches[0])
    other, device = Reader(made("mamba")), torch.device("cpu")
    with pytest.raises(InputError, match="state of this model"):
        states["mamba"].restore(states["linear"].state_dict(), lambda: other.fresh(1, device), device)
