"""What is read in steps: evaluation in pieces, settings that do not fit, and runs that were stopped."""

import contextlib
import dataclasses

import pytest
import torch
from test_resume import same
from test_rollout import run, toys, transformer
from train_standins import Toy, Toys, train

from mnemos import GRC, Transformer, TransformerConfig
from mnemos.attention import LinearConfig, RelativeConfig, SoftmaxConfig
from mnemos.lab.evaluate.scores import evaluate
from mnemos.lab.run.checks import check_settings, check_state, check_task
from mnemos.lab.tasks.batch import Batch, pieces
from mnemos.types import InputError


@pytest.mark.parametrize(("attention", "segment"), [(LinearConfig(), 7), (SoftmaxConfig(), 9), (LinearConfig(), 100)])
def test_evaluation_in_pieces_is_evaluation_whole(attention, segment):
    recipe = transformer(57, attention)
    torch.manual_seed(0)
    model, task = recipe.model.build().double(), recipe.data.build()
    seen = []
    model.register_forward_pre_hook(lambda _, given: seen.append(given[0].shape[1]))
    whole = evaluate(model, task.batches("test", 5))  # the last batch has one row
    split = evaluate(model, pieces(task.batches("test", 5), segment))
    assert max(seen[4:]) <= segment
    assert split.pop("loss") == pytest.approx(whole.pop("loss"), rel=1e-12)
    assert split == whole


def test_training_reads_no_more_than_a_segment_anywhere(tmp_path, monkeypatch):
    lengths = set()
    original = Toy.forward

    def forward(self, x, state=None, mask=None):
        lengths.add((self.training, x.shape[1]))
        return original(self, x, state, mask)

    monkeypatch.setattr(Toy, "forward", forward)
    run(tmp_path / "run", True, segment_length=5)
    assert lengths == {(True, 5), (True, 2), (False, 5), (False, 2)}


def test_pieces():
    mask = torch.ones(3, 7, dtype=torch.bool)
    batch = Batch(torch.arange(21).view(3, 7), -torch.arange(21).view(3, 7), mask)
    found = list(pieces([batch, batch], 3))
    assert [b.inputs.shape for b in found] == [(3, 3), (3, 3), (3, 1)] * 2
    assert [b.reset.tolist() for b in found] == [[first] * 3 for first in (True, False, False)] * 2
    for name in ("inputs", "targets", "mask"):
        assert torch.equal(torch.cat([getattr(b, name) for b in found[:3]], 1), getattr(batch, name))
    assert list(pieces([batch], 0)) == [batch]


@pytest.mark.parametrize(
    ("toys_", "words"),
    [
        (toys(False, horizon=-1), r"train\.rollout\.horizon: .*0, found -1"),
        (toys(True, segment_length=4, checkpoints=1), r"train\.rollout\.checkpoints: .*all, sqrt .*2, found 1"),
        (toys(False, segments=2, slide=3), r"train\.rollout\.slide: .*segments, 2, found 3"),
        (toys(True, segment_length=4, slide=1), r"train\.rollout\.slide is 1.*use 0"),
        (toys(True, segments=2), r"train\.rollout\.segments is 2.*use train\.rollout\.segment_length"),
        (
            toys(False, segment_length=4),
            r"train\.rollout\.segment_length is 4.*data\.segment.*train\.rollout\.segments",
        ),
        (toys(True, segment_length=5, horizon=4), r"train\.rollout\.horizon: .*3.*found 4"),
        (
            Toys(False, train={"rollout": {"segment_length": 4}}),
            r"train\.rollout\.segment_length is 4.*train\.rollout\.segment_length 0",
        ),
    ],
)
def test_settings_that_do_not_fit_are_named(toys_, words):
    def check():
        check_settings(recipe, processes=1)
        check_task(recipe, recipe.data.build())

    recipe = toys_.recipe()
    with pytest.raises(InputError, match=words) as error:
        check()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("attention", "grows", "cached"),
    [(SoftmaxConfig(), True, True), (SoftmaxConfig(window=8), False, True), (RelativeConfig(memory=8), False, False)],
)
def test_a_state_that_grows_is_refused_where_streams_have_no_end(attention, grows, cached):
    """Read from what the model declares, and so through a gated cache around the attention."""
    fields = {"vocab_size": 11, "dim": 8, "num_heads": 2, "layers": 1, "mlp": 8, "position": "none"}
    model = Transformer(attention=attention, cache=GRC(length=2) if cached else None, **fields)
    streams, rows = (toys_.recipe().data.build() for toys_ in (toys(False, segments=2), toys(True, segment_length=4)))
    assert streams.carries_state
    assert not rows.carries_state
    check_state(model, rows)
    with pytest.raises(InputError, match=r"model\.attention\.window") if grows else contextlib.nullcontext():
        check_state(model, streams)


def test_training_refuses_a_growing_state_before_it_writes(tmp_path):
    recipe = toys(False, segments=2).recipe()
    size = recipe.data.build().sizes["vocab_size"]
    model = TransformerConfig(vocab_size=size, dim=8, num_heads=2, layers=1, mlp=8, attention=SoftmaxConfig())
    with pytest.raises(InputError, match=r"model\.attention\.window"):
        train(dataclasses.replace(recipe, model=model), tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()


def test_a_model_without_a_state_is_refused(tmp_path, monkeypatch):
    original = Toy.forward
    monkeypatch.setattr(
        Toy, "forward", lambda self, x, state=None, mask=None: (original(self, x, state, mask)[0], None)
    )
    with pytest.raises(InputError, match="keeps a state"):
        run(tmp_path / "run", True, segment_length=4)


@pytest.mark.parametrize(
    ("toys_", "moment", "number"),
    [
        pytest.param(
            toys(True, {"cached": True}, "32-true", 2, segment_length=5), "mid-update", 6, marks=pytest.mark.exhaustive
        ),
        pytest.param(
            toys(False, {"cached": True}, "32-true", 2, segments=3, horizon=2),
            *("mid-update", 6),
            marks=pytest.mark.exhaustive,
        ),
        (toys(False, {"cached": True}, "16-mixed", 2, segments=3, slide=1, horizon=2), "SIGTERM", 7),
    ],
)
def test_killed_and_resumed(run_apart, tmp_path, toys_, moment, number):
    assert run_apart(tmp_path / "whole", toys_) == 0
    assert run_apart(tmp_path / "run", toys_, False, moment, number) == (130 if moment == "SIGTERM" else -9)
    assert run_apart(tmp_path / "run", toys_, True) == 0
    same(tmp_path / "run", tmp_path / "whole")
