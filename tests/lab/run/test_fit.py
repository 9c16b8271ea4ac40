"""`mnemos.fit`: a user's model and data, of several kinds; the same loss as a plain loop, and resumed exactly."""

import copy
import json
from dataclasses import replace

import pytest
import torch
from refusals import refuses
from tiny_decoder import library, llama
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, get_worker_info
from trained_runs import equal, numbers, stopped, weights

import mnemos
from mnemos.lab.compare.comparison import summarise
from mnemos.lab.evaluate.scores import evaluate
from mnemos.lab.report.read import read_tasks
from mnemos.lab.run.recipe import OptimConfig, ScheduleConfig, TrainConfig
from mnemos.lab.run.trained import open_run
from mnemos.lab.tasks.metrics import LOSS
from mnemos.types import InputError

SETTINGS = TrainConfig(log_every=1, eval_every=4, checkpoint_every=2, keep=9, accelerator="cpu")


def classifier() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 16), nn.Dropout(0.2), nn.Tanh(), nn.Linear(16, 3))


def rows(count: int = 22) -> TensorDataset:
    x = torch.randn(count, 5, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x[:, :3].argmax(1))


def fit(folder, model=None, data=None, valid_data=None, steps=2, **settings):
    """`mnemos.fit`, of the classifier and its rows where nothing else is given."""
    settings = {"train": SETTINGS, "quiet": True, **settings}
    data, valid_data = (rows() if given is None else given for given in (data, valid_data))
    return mnemos.fit(model or classifier(), data, valid_data, folder, steps, **settings)


class Noisy(Dataset):
    """Rows that are augmented from the generator that all share."""

    def __init__(self) -> None:
        self.rows = rows()

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int):
        x, y = self.rows[index]
        return x + 0.1 * torch.randn(5), y


class Endless(IterableDataset):
    def __iter__(self):
        for _ in range(5):
            x = torch.randn(5)
            yield x, x[:3].argmax()


DATA = {
    "shuffled": lambda: DataLoader(rows(), 4, shuffle=True),
    "a data set that draws": Noisy,
    "workers": lambda: DataLoader(Noisy(), 4, shuffle=True, num_workers=1),
    "a stream": lambda: DataLoader(Endless(), 5),
    "a list of batches": lambda: [{"inputs": x, "targets": y} for x, y in DataLoader(rows(24), 4)],
}


@pytest.mark.parametrize("name", DATA)
def test_resume_is_exact(tmp_path, name):
    """Stopped after update 6 of 8, in the second pass over the data."""
    whole = fit(tmp_path / "whole", None, DATA[name](), rows(9), 8)
    stopped(tmp_path / "whole", tmp_path / "run", 8)
    torch.rand(7)
    again = fit(tmp_path / "run", None, DATA[name](), rows(9), 8, resume=True)
    assert again["valid"] == whole["valid"]
    assert numbers(tmp_path / "run") == numbers(tmp_path / "whole")
    equal(weights(tmp_path / "run", 8), weights(tmp_path / "whole", 8))


def test_it_trains_as_a_plain_loop_does(tmp_path, capsys):
    """In the loader's order, by the loss that PyTorch computes; the model is trained in place."""
    model, own = classifier().double(), classifier().double()
    for one in (model, own):
        one[1].p = 0.0
    x, y = rows(24).tensors
    loader = DataLoader(TensorDataset(x.double(), y), 4)
    optim = OptimConfig(name="adamw", weight_decay=0.0, grad_clip=0.0)
    settings = TrainConfig(log_every=1, eval_every=9, accelerator="cpu", precision="64-true")
    result = mnemos.fit(model, loader, loader, tmp_path / "run", 9, 1e-2, optim=optim, train=settings)
    optimiser = torch.optim.AdamW(own.parameters(), 1e-2, weight_decay=0.0)
    for (inputs, targets), line in zip([*loader, *loader], numbers(tmp_path / "run", "train"), strict=False):
        loss = nn.functional.cross_entropy(own(inputs), targets)
        assert line["loss"] == pytest.approx(loss.item(), rel=1e-6)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    # The loop above made three updates more than the nine.
    assert len(numbers(tmp_path / "run", "train")) == 9
    score = evaluate(model, [mnemos.Batch(x.double(), y)], Plain())
    assert result["valid"]["accuracy"] == score["accuracy"]
    assert result["flops"] == 2 * (5 * 16 + 16 * 3)
    assert "test" not in result, "no test data were given"
    assert "valid loss " in (said := capsys.readouterr().out)
    assert "test" not in said.replace(str(tmp_path), "")
    assert read_tasks([tmp_path / "run"])[0].split == "validation"
    assert summarise({"own": [tmp_path / "run"]}, tmp_path).rows[0].mean == score["accuracy"]


class Plain(mnemos.Task):
    def forward(self, model, batch, state):
        return model(batch.inputs), None


def test_a_loss_and_metrics_of_ones_own(tmp_path):
    x = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(x, x.sum(1, keepdim=True))

    def distance(model, outputs, batch):
        return (outputs - batch.targets).abs().sum(), torch.tensor(float(len(outputs)))

    worst = mnemos.CorpusMetric(
        "worst", False, collect=lambda m, y, b: (y - b.targets).abs().flatten().tolist(), value=max
    )
    metrics = (mnemos.SumMetric("distance", False, sums=distance), worst)
    found = {}
    for name, loss in {"mean": nn.MSELoss(), "by row": lambda y, t: (y - t).square().mean(1)}.items():
        torch.manual_seed(0)
        model = nn.Linear(4, 1)
        result = mnemos.fit(model, data, data, tmp_path / name, 15, 0.1, loss, metrics, train=SETTINGS)
        assert (result["metric"], result["metrics"]["worst"]["higher_is_better"]) == ("distance", False)
        assert result["valid"]["distance"] == pytest.approx((model(x) - x.sum(1, keepdim=True)).abs().mean().item())
        assert result["valid"]["worst"] == pytest.approx((model(x) - x.sum(1, keepdim=True)).abs().max().item())
        first, *_, last = numbers(tmp_path / name, "train")
        assert last["distance"] < first["distance"]
        found[name] = result["valid"]["loss"]
    assert found["mean"] == pytest.approx(found["by row"], rel=1e-5)
    alone = mnemos.fit(nn.Linear(4, 1), data, data, tmp_path / "alone", 2, loss=nn.MSELoss(), train=SETTINGS)
    assert alone["metric"] == LOSS.name


def test_a_state_is_carried_where_batches_say_so(tmp_path):
    seen = []

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(5, 5)

        def forward(self, x, state=None):
            if self.training and torch.is_grad_enabled():
                seen.append([0] * len(x) if state is None else state.long().tolist())
            return self.table(x), torch.full((len(x),), float(x.shape[1])) + (0 if state is None else state)

    tokens = torch.randint(5, (3, 2, 4), generator=torch.Generator().manual_seed(0))
    fresh = torch.tensor([[True, True], [False, False], [False, True]])
    batches = [mnemos.Batch(x, x, None, start) for x, start in zip(tokens, fresh, strict=True)]
    fit(tmp_path / "run", Counting(), batches, batches, 3)
    assert seen == [[0, 0], [4, 4], [8, 0]]
    batches[2] = mnemos.Batch(*(x[:1] for x in (tokens[2], tokens[2])), None, fresh[2, :1])
    words = "expected 2 rows in every training batch, because a state is carried from one to the next, found 1; "
    refuses(words, fit, tmp_path / "short", Counting(), batches, batches[:2], 3)


def test_a_model_in_eval_mode_is_trained_in_training_mode_and_left_in_its_own(tmp_path):
    found = []
    for mode in (True, False):
        model = classifier().train(mode)
        fit(tmp_path / f"run-{mode}", model)
        assert model.training is mode
        found.append(model.state_dict())
    equal(*found)  # both with dropout


def test_a_model_of_ours_is_loaded_from_its_run(tmp_path):
    torch.manual_seed(0)
    model = mnemos.Transformer(vocab_size=9, dim=8, layers=1, num_heads=2, attention="linear")
    tokens = torch.randint(9, (8, 6))
    rows = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(tokens[:, :-1], tokens[:, 1:]), 4)
    mnemos.fit(model, rows, rows, out=tmp_path / "run", steps=1, quiet=True)
    equal(mnemos.load(tmp_path / "run").state_dict(), model.state_dict())


def test_a_finished_run_that_is_resumed_loads_its_weights_into_the_model_and_goes_on_for_longer(tmp_path, capsys):
    """With a constant rate, 4 and then 4 more are 8."""
    constant = OptimConfig(schedule=ScheduleConfig(name="constant"))
    trained, fresh, longer, whole = (classifier() for _ in range(4))
    result = fit(tmp_path / "run", trained, steps=4, optim=constant)
    assert fit(tmp_path / "run", fresh, steps=4, optim=constant, resume=True, quiet=False) == result
    assert "fit(..., steps=N, resume=True) trains it for longer" in capsys.readouterr().out
    equal(fresh.state_dict(), trained.state_dict())
    assert json.loads((tmp_path / "run" / "recipe.json").read_text())["train"]["keep"] == SETTINGS.keep
    refuses(r"found one of mnemos.fit .* resume=True", mnemos.load, tmp_path / "run")
    expected = fit(tmp_path / "whole", whole, steps=8, optim=constant)
    result = fit(tmp_path / "run", longer, steps=8, optim=constant, resume=True)
    assert (result["steps"], result["valid"]) == (8, expected["valid"])
    equal(longer.state_dict(), whole.state_dict())


class Opened(Dataset):
    """Rows that a worker process opens, as of HDF5 or LMDB; and one that knows by which process they are read."""

    opened = None

    def __len__(self) -> int:
        return 22

    def __getitem__(self, index: int):
        info = get_worker_info()
        assert info.dataset is self
        return self.opened[index][0] + info.num_workers, self.opened[index][1]


def opens(worker: int) -> None:
    assert get_worker_info().id == worker
    get_worker_info().dataset.opened = rows()


class KeepsItsLoss(nn.Module):
    """As a mixture of experts keeps the balance of its training forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)

    def forward(self, x):
        y = self.layer(x)
        if self.training:
            self.balance = y.square().mean()
        return y


def test_gradients_generators_and_tensors_that_the_model_keeps_change_nothing(tmp_path):
    torch.manual_seed(3)
    model = KeepsItsLoss()
    before, other = torch.get_rng_state(), copy.deepcopy(model)
    model(rows()[:][0]).sum().backward()

    def loss(outputs, targets):
        return nn.functional.cross_entropy(outputs, targets) + model.balance * model.training

    found = fit(tmp_path / "one", model, loss=loss)
    assert found == fit(tmp_path / "one", model, loss=loss, resume=True)
    assert torch.equal(torch.get_rng_state(), before)
    model = other  # without gradients
    assert fit(tmp_path / "two", model, loss=loss)["valid"] == found["valid"]


def test_more_steps_with_another_setting_are_refused_and_nothing_is_lost(tmp_path):
    settings = replace(SETTINGS, steps=4)
    optim = OptimConfig(schedule=ScheduleConfig("trapezoid"))
    fit(tmp_path, steps=4, optim=optim, train=settings)
    names = sorted(tmp_path.rglob("*"))
    before = [path.read_bytes() for path in names if path.is_file()]
    more = {"steps": 8, "optim": optim, "train": settings, "resume": True}
    refuses("the run has another optim.lr", fit, tmp_path, lr=0.1, **more)
    assert sorted(tmp_path.rglob("*")) == names
    assert [path.read_bytes() for path in names if path.is_file()] == before
    fit(tmp_path, **more)
    assert (tmp_path / "checkpoints/step-00000008.safetensors").is_file()


def test_more_steps_after_an_early_stop_are_refused_by_what_fit_can_do(tmp_path):
    settings = replace(SETTINGS, eval_every=1, patience=1)
    assert fit(tmp_path, steps=20, lr=1e-30, train=settings)["stopped_early"]
    more = {"steps": 30, "lr": 1e-30, "train": settings, "resume": True}
    refuses(r"stopped early; start another with its weights by fit\(\.\.\.\) with this model", fit, tmp_path, **more)


def test_what_a_loader_says_of_its_processes_is_done(tmp_path):
    """What its worker_init_fn opens is there for every batch, also for the first one and for one out of turn."""
    loader = DataLoader(Opened(), 4, shuffle=True, num_workers=1, worker_init_fn=opens, prefetch_factor=3)
    plain = TensorDataset(rows().tensors[0] + 1, rows().tensors[1])
    fit(tmp_path / "loader", None, loader, loader, 4)
    fit(tmp_path / "plain", None, DataLoader(plain, 4, shuffle=True), plain, 4)
    assert numbers(tmp_path / "loader", "train") == numbers(tmp_path / "plain", "train")


class Returns(nn.Module):
    """A classifier whose outputs are what the function makes of the logits."""

    def __init__(self, function) -> None:
        super().__init__()
        self.inner, self.function = classifier(), function

    def forward(self, x, mask=None):
        return self.function(self.inner(x))


class ReturnsNoState(Returns):
    def forward(self, x, state=None):
        return self.inner(x)


def test_what_does_not_fit_is_refused_in_one_line(tmp_path):
    x, y = rows().tensors
    wrong = [(x[:4], y[:4]), (x[:4], torch.tensor([0, 1, -100, 3]))]
    floats = TensorDataset(torch.randn(4, 5), torch.randn(4, 3))
    last_of_two = [rows()[i : i + 4] for i in range(0, 22, 4)]
    per_token = lambda outputs, targets: torch.zeros(len(targets), 3)  # noqa: E731
    for i, (given, words) in enumerate(
        (
            ({"data": wrong}, r"^training batch 1: expected targets 0 to 2, .* 3 classes, found 3; "),
            (
                {"model": Returns(lambda y: (y, None))},
                r"^fit: expected logits \[32, classes\] .*, found a tuple of 2; ",
            ),
            ({"model": ReturnsNoState(None)}, r"^fit: expected \(outputs, state\) .*, found a tensor of shape"),
            ({"data": (batch for batch in last_of_two)}, "can be iterated again, found a generator"),
            ({"data": floats}, "expected targets of int64 for cross-entropy, found torch.float32; give fit a loss"),
            ({"data": Endless()}, "found a tensor without axes"),
            ({"data": DataLoader(rows(0), 4)}, "at least one row, found an empty TensorDataset"),
            (
                {"data": last_of_two, "steps": 6, "train": replace(SETTINGS, accumulate=4)},
                "^data: .* 4 rows .*, found 2",
            ),
            ({"loss": per_token}, r"one value per row \[\d+\], found shape"),
            ({"train": replace(SETTINGS, strategy="fsdp")}, "expected train.strategy 'auto' or 'ddp', found 'fsdp'"),
            ({"model": classifier().requires_grad_(False)}, "parameters to train, found none that require gradient"),
            ({"data": Plain()}, "expected a Task alone, found valid_data, loss or metrics too"),
        )
    ):
        with pytest.raises(InputError, match=words) as error:
            fit(tmp_path / str(i), **given)
        assert "\n" not in str(error.value)
    with pytest.raises(IndexError, match=r"^list index out of range$"):  # the model's own error
        fit(tmp_path / "own", loss=lambda outputs, targets: [][1])
    refuses("expected valid_data, found none", mnemos.fit, classifier(), rows(), None, tmp_path / "none", 2)
    refuses("expected `out` with resume=True, found none", fit, None, resume=True)
    fit(tmp_path / "other")
    refuses(r"continue it with: mnemos.fit\(.*, steps=2, resume=True\)", fit, tmp_path / "other")
    refuses(r"another data\.train", fit, tmp_path / "other", data=rows(21), resume=True)
    refuses(r"fit\(\.\.\., resume=True\)", open_run, tmp_path / "other")


@pytest.mark.parametrize("kind", ["Llama", "Bert"])
def test_a_model_of_transformers_is_trained_by_its_own_loss(tmp_path, kind):
    """Batches of a tokeniser: the loss is the model's, and a classifier has its accuracy."""
    library = mnemos.libraries.transformers()
    sizes = {"vocab_size": 11, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    torch.manual_seed(0)
    if kind == "Llama":
        model = llama(11, hidden_size=8)
    else:
        config = library.BertConfig(**sizes, intermediate_size=16, num_labels=3, hidden_dropout_prob=0.0)
        model = library.BertForSequenceClassification(config)
    ids = torch.randint(1, 11, (12, 6), generator=torch.Generator().manual_seed(0))
    mask = torch.arange(6) < torch.randint(3, 7, (12, 1), generator=torch.Generator().manual_seed(1))
    labels = ids.masked_fill(~mask, -100) if kind == "Llama" else ids[:, 0] % 3
    data = [
        {"input_ids": i, "attention_mask": m, "labels": y} for i, m, y in zip(ids, mask.long(), labels, strict=True)
    ]
    with torch.no_grad():
        before = model.eval()(input_ids=ids[:4], attention_mask=mask[:4].long(), labels=labels[:4]).loss.item()
    loader = DataLoader(data, 4)
    refuses(r"single row.*DataLoader", mnemos.fit, model, data, loader, tmp_path / "rows", 30, train=SETTINGS)
    in_lists = DataLoader([{name: x.tolist() for name, x in row.items()} for row in data], 4)
    words = r"as input_ids, found a list, .* rows that hold lists; .*with_format\('torch'\)"
    refuses(words, mnemos.fit, model, in_lists, loader, tmp_path / "lists", 30, train=SETTINGS)
    if kind == "Llama":
        refuses(
            r"expected the metric loss for labels \[B, T\], .* found accuracy; leave",
            *(mnemos.fit, model, loader, loader, tmp_path / "accuracy", 30),
            metrics=("accuracy",),
        )
    result = mnemos.fit(model, loader, loader, tmp_path / "run", 30, 1e-2, train=SETTINGS, quiet=True)
    dropout = 0.1 if kind == "Bert" else 0.0  # of the attentions
    assert numbers(tmp_path / "run", "train")[0]["loss"] == pytest.approx(before, rel=1e-5 + dropout)
    assert numbers(tmp_path / "run", "train")[-1]["loss"] < 0.9 * before
    assert result["metric"] == ("loss" if kind == "Llama" else "accuracy")
    assert (result["tokens"], result["unit"]) == (10 * int(mask.sum()), "tokens")  # ten passes over the data
    if kind == "Bert":
        with torch.no_grad():
            logits = model.eval()(input_ids=ids, attention_mask=mask.long()).logits
        assert result["valid"]["accuracy"] == pytest.approx((logits.argmax(-1) == labels).float().mean().item())


def test_a_model_that_fails_in_its_first_update_leaves_no_folder(tmp_path):
    """A corrected call may name the same one."""
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        fit(tmp_path / "run", nn.Linear(4, 3))
    assert fit(tmp_path / "run")["steps"] == 2


@pytest.mark.parametrize("kind", ["llama", "gpt2", "bart"])
def test_a_models_own_loss_is_a_mean_over_labels_however_rows_are_divided(tmp_path, kind):
    """GPT-2's loss has no name, and Bart's is called causal but compares with labels of the same position."""
    model = llama(9)
    if kind == "gpt2":
        off = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        model = library.GPT2LMHeadModel(library.GPT2Config(vocab_size=9, n_embd=8, n_layer=1, n_head=2, **off))
    elif kind == "bart":
        sizes = {"d_model": 8, "decoder_layers": 1, "decoder_attention_heads": 2, "decoder_ffn_dim": 8, "dropout": 0.0}
        model = library.BartForCausalLM(library.BartConfig(vocab_size=9, **sizes))
    ids = torch.arange(16).repeat(4, 1).add(torch.arange(4)[:, None]) % 9
    labels = ids.clone()
    labels[2:, 3:] = -100  # and the first of each row is not compared
    rows = [{"input_ids": x, "labels": y} for x, y in zip(ids, labels, strict=True)]
    with torch.no_grad():
        whole = float(model(input_ids=ids, labels=labels).loss)
    for size, accumulate in ((4, 1), (2, 1), (4, 2)):
        data = (DataLoader(rows, 4), DataLoader(rows, size))
        train = replace(SETTINGS, accumulate=accumulate, eval_every=1)
        out = tmp_path / f"{size}-{accumulate}"
        mnemos.fit(copy.deepcopy(model), *data, out, 1, 1e-9, train=train, quiet=True)
        first, *_ = (one for one in numbers(out) if one["kind"] == "train")
        assert first["loss"] == pytest.approx(whole, rel=1e-5)
        assert json.loads((out / "result.json").read_text())["valid"]["loss"] == pytest.approx(whole, rel=1e-5)


def test_a_batch_without_a_label_that_a_model_compares_changes_nothing(tmp_path):
    model = llama(9)
    ids = torch.arange(8)[None]
    batches = [{"input_ids": ids, "labels": ids}, {"input_ids": ids, "labels": ids.where(ids == 0, -100)}]
    found = mnemos.fit(model, batches, batches, tmp_path / "run", 2, train=SETTINGS, quiet=True)
    assert found["valid"]["loss"] > 0
    assert numbers(tmp_path / "run", "train")[1]["loss"] == 0
