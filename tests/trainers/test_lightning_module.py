"""RolloutModule in Lightning, beside plain back-propagation through time; resumed, in processes and refused."""

import processes
import pytest
import torch
from refusals import refuses

from mnemos import libraries
from mnemos.trainers import RolloutBatches, RolloutModule
from mnemos.trainers.batches import Segment
from mnemos.trainers.reader import Reader

libraries.torchvision()  # torchmetrics imports it
pytest.importorskip("pytorch_lightning")
from lightning_standins import Language, batches, distributed, lightning, trainer  # noqa: E402
from trainer_standins import SEGMENT, back_propagated, documents, loss_of_each_alone, made  # noqa: E402


def test_gradients_are_those_of_back_propagation_through_time(tmp_path):
    module, other = Language("cached").double(), made("cached").double()
    trainer(tmp_path, max_steps=3).fit(module, batches())
    optimizer = torch.optim.AdamW(other.parameters(), 1e-2)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    expected = back_propagated(other, batches(), 3, lambda: (optimizer.step(), schedule.step()))
    for own, wanted in (*zip(module.gradients, expected, strict=True), (module.parameters(), other.parameters())):
        torch.testing.assert_close(list(own), list(wanted), rtol=1e-6, atol=1e-9)


def test_resumed_it_is_bit_identical(tmp_path):
    """With dropout; in the middle of an epoch of five updates, and in the second one."""
    whole = Language()
    trainer(tmp_path / "whole", max_steps=7).fit(whole, batches())
    for name in ("epoch=0-step=2", "epoch=1-step=6"):
        torch.manual_seed(9)
        resumed = Language()
        trainer(tmp_path / name, max_steps=7).fit(resumed, batches(), ckpt_path=tmp_path / "whole" / f"{name}.ckpt")
        assert all(map(torch.equal, resumed.parameters(), whole.parameters()))
    first = tmp_path / "whole" / "epoch=0-step=2.ckpt"
    kept = torch.load(first, weights_only=False)
    own = kept["mnemos_rollouts"]
    refuses("rows", trainer(tmp_path, max_steps=7).fit, Language(), batches(1), ckpt_path=first)
    torch.save({**kept, "mnemos_rollouts": {**own, "rows": own["rows"] * 2}}, tmp_path / "two.ckpt")
    fit = trainer(tmp_path).fit
    refuses("2 processes, .* found 1; resume with", fit, Language(), batches(), ckpt_path=tmp_path / "two.ckpt")
    weights, others = Language.load_from_checkpoint(first), batches(1)
    for index in (1, 2):  # the rows of the checkpoint are not those of these data; a second fit goes on
        trainer(tmp_path / "others", max_steps=1).fit(weights, others)
        assert weights._rows.state_dict()["next"] == index


def test_schedulers_step_by_their_frequency_and_plateaus_by_their_owner(tmp_path):
    class Scheduled(Language):
        def configure_optimizers(self):
            optimizer, kinds = super().configure_optimizers()["optimizer"], torch.optim.lr_scheduler
            self.schedules = [kinds.ExponentialLR(optimizer, 0.5), kinds.ReduceLROnPlateau(optimizer)]
            self.schedules += [kinds.ExponentialLR(optimizer, 0.5) for _ in range(2)]
            options = [
                {"interval": "step", "frequency": 2},
                *({"interval": "epoch", "frequency": n} for n in (1, 1, 2)),
            ]
            return [optimizer], [{"scheduler": s, **o} for s, o in zip(self.schedules, options, strict=True)]

    module = Scheduled()
    trainer(tmp_path, max_epochs=1).fit(module, batches())
    assert module.trainer.global_step == 5
    assert [schedule.last_epoch for schedule in module.schedules] == [2, 0, 1, 0]


def test_resuming_leaves_running_statistics_as_they_were(tmp_path):
    class Normed(Language):
        def __init__(self):
            super().__init__("linear")
            self.norm = torch.nn.BatchNorm1d(1)

        def segment_loss(self, segment, state, count):
            self.norm(segment.input_ids.float().view(-1, 1))
            return super().segment_loss(segment, state, count)

    modules = [Normed() for _ in range(2)]
    for module, start in zip(modules, (None, tmp_path / "epoch=0-step=2.ckpt"), strict=True):
        trainer(tmp_path, max_steps=3).fit(module, batches(), ckpt_path=start)
    assert all(map(torch.equal, *(module.norm.buffers() for module in modules)))


def test_a_validation_reads_each_document_alone(tmp_path):
    """The last batch has nothing but padding and tokens that do not count."""
    data = documents(1)
    short = data[7]["input_ids"][:9]
    data[7]["labels"] = short + [-100] * 24
    module = Language("memformer")
    fitted = trainer(tmp_path, max_steps=2, limit_train_batches=2)
    fitted.fit(module, batches(), RolloutBatches(data, 3, SEGMENT, seed=None))
    expected = loss_of_each_alone(module.model, [*data[:7], {"input_ids": short}])
    assert {*fitted.progress_bar_metrics} == {"train_loss", "val_loss"}
    assert float(fitted.callback_metrics["val_loss"]) == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_two_processes_are_two_rows(tmp_path):
    one, alone = Language("cached").double(), trainer(tmp_path / "one", max_steps=4)
    alone.fit(one, batches())
    (tmp_path / "two").mkdir()
    for ended in processes.launched(distributed, tmp_path / "two"):
        assert ended.returncode == 0, ended.stderr
    loss, *found = torch.load(tmp_path / "two" / "weights.pt")
    torch.testing.assert_close(loss, alone.callback_metrics["train_loss"])
    for a, b in zip(one.parameters(), found, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-9, atol=1e-9)


@pytest.mark.slow
def test_a_loss_of_ones_own(tmp_path):
    """Any recurrent model, by `segment_loss`."""

    class Sums(RolloutModule, lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.embedding, self.cell = torch.nn.Embedding(30, 4), torch.nn.GRU(4, 4, batch_first=True)
            self.head, self.seen = torch.nn.Linear(4, 30), []

        def segment_loss(self, segment, state, count):
            state = segment.input_ids.new_zeros(len(segment.input_ids), 4).float() if state is None else state
            self.seen.append(state.detach())
            y, state = self.cell(self.embedding(segment.input_ids), state[None])
            loss = torch.nn.functional.cross_entropy(self.head(y).transpose(1, 2), segment.targets, reduction="sum")
            return loss / count, state[0]

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    module = Sums()
    trainer(tmp_path, max_steps=2).fit(module, batches())
    assert module.cell.weight_hh_l0.grad.abs().sum() > 0
    assert module.seen[-1].abs().sum() > 0
    ends = RolloutBatches([{"input_ids": [*range(12)], "labels": [*range(4), *8 * [-100]]}], 1, 3, seed=None)
    again = trainer(tmp_path / "ends", max_steps=len(ends))
    again.fit(module, ends)
    assert again.callback_metrics["train_loss"] == 0, "the last batch has no targets"


@pytest.mark.slow
def test_several_optimisers_and_other_loaders_are_refused(tmp_path):
    class Two(Language):
        def configure_optimizers(self):
            return [torch.optim.SGD(self.parameters(), 0.1) for _ in range(2)]

    other = torch.utils.data.DataLoader([1, 2])
    for said, module, *loaders in (
        ("expected one optimiser, found 2", Two(), batches()),
        ("to train on, found DataLoader", Language(), other),
        ("one set of rows, found 2; use sets=1", Language(), RolloutBatches(documents(), 2, SEGMENT, 3, sets=2)),
        ("to validate on, found one with a seed", Language(), batches(), batches()),
        ("to validate on, found DataLoader", Language(), batches(), other),
    ):
        refuses(said, trainer(tmp_path, max_steps=1).fit, module, *loaders)


def test_a_module_that_lacks_a_part_is_refused():
    refuses("RolloutModule before LightningModule", type, "Reversed", (lightning.LightningModule, RolloutModule), {})
    module = Language()
    refuses(r"super\(\)\.on_train_start", module.training_step, batches()[0], 0)
    refuses(r"super\(\)\.on_validation_epoch_start", module.validation_step, batches()[0], 0)
    segment = Segment(*(batches()[0][name][:, :SEGMENT] for name in ("input_ids", "targets")))
    for name in ("linear", "mamba"):  # a model may be replaced
        module.model = made(name).eval()
        expected = Reader(module.model)(segment, None, 2.0)[0]
        assert torch.equal(module.segment_loss(segment, None, 2.0)[0], expected)
    module.model = torch.nn.GRU(2, 2)
    refuses(r"found GRU.*; another recurrent model overrides segment_loss", module.segment_loss, segment, None, 2.0)
    del module.model
    refuses(r"self\.model", module.segment_loss, None, None, torch.ones(()))
