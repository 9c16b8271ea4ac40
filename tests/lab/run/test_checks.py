"""What is refused before a run's first update, by the line that it gives."""

from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
from refusals import refuses
from train_standins import Toys

from mnemos.config import ModelConfig
from mnemos.lab.compare.compare import compare
from mnemos.lab.run.checks import check_settings, check_state, check_task, complete, schedule_warning, unresolved
from mnemos.lab.run.recipe import OWN, RolloutConfig, ScheduleConfig
from mnemos.lab.tasks.metrics import ACCURACY, LOSS
from mnemos.lab.vision.detection.coco import COCOConfig
from mnemos.models.transformer import TransformerConfig

RECIPE = Toys(model={"vocab_size": 11}).recipe()


@dataclass(frozen=True)
class OwnConfig(ModelConfig):
    name = OWN


def with_training(**settings):
    return replace(RECIPE, train=replace(RECIPE.train, **settings))


def task(**fields):
    given = {"inputs": RECIPE.model.inputs, "metrics": (ACCURACY,), "max_length": 12, "sizes": {}}
    return SimpleNamespace(**{**given, "splits_rows": True, "carries_state": False, **fields})


@pytest.mark.parametrize(
    ("rollout", "fields", "words"),
    [
        ({}, {"metrics": ()}, "expected at least one, found none; add mnemos.lab.tasks.metrics.LOSS"),
        ({}, {"metrics": (ACCURACY, LOSS, ACCURACY)}, "found 'accuracy', which another metric has; rename"),
        ({}, {"metrics": (replace(ACCURACY, name="lr"),)}, "found 'lr', which the trainer has; rename"),
        ({}, {"metrics": (replace(ACCURACY, name="loss"),)}, "found 'loss', which the trainer has; rename"),
        ({"segment_length": 4}, {"splits_rows": False}, "is 4, but this task's rows cannot be split .* use train"),
        ({"segment_length": 4}, {"carries_state": True}, "is 4, but the data are already in segments"),
        ({"segments": 2}, {}, "segments is 2, but the data's batches do not continue one another; use train.rollout.s"),
        ({"segments": 2}, {"splits_rows": False}, "segments is 2, but the data's batches .* one another; use 1"),
        ({"slide": 1}, {}, "slide is 1, but the data's batches do not continue one another; use 0"),
        ({"horizon": 4, "segment_length": 4}, {}, "at most 3, the segments of an update, found 4; use 3, or 0 for all"),
        ({}, {"inputs": "images"}, "toy takes tokens, but the data toy gives images; use another recipe$"),
        (
            {},
            {"sizes": {"vocab_size": 12}},
            "vocab_size is 11, but the data needs at least 12; use model.vocab_size 12",
        ),
        ({}, {"sizes": {"dim": 7}}, "model.dim is 8, but the data needs 7; use model.dim 7"),
        ({}, {"sizes": {"inputs": 3}}, "the data has inputs 3, but the model toy supports only inputs tokens; choose"),
        ({}, {"sizes": {"dim": 0}}, r"model.dim is 8, but the data needs none \(0\); use model.dim 0"),
    ],
)
def test_data_that_do_not_fit_are_refused(rollout, fields, words):
    refuses(words, check_task, with_training(rollout=RolloutConfig(**rollout)), task(**fields))


def test_data_that_fit_and_states_that_grow():
    for rollout, fields in (
        ({"segment_length": 4, "horizon": 3}, {"sizes": {"vocab_size": 11, "dim": 8, "bands": 4}, "metrics": (LOSS,)}),
        ({"segments": 2, "slide": 1}, {"carries_state": True, "sizes": {"vocab_size": 10}}),
    ):
        check_task(with_training(rollout=RolloutConfig(**rollout)), task(**fields))
    learned = replace(RECIPE, model=TransformerConfig(11, 8, position="learned", max_length=12))
    check_task(learned, task())
    refuses("model.position: expected rotary, because", check_task, learned, task(carries_state=True))
    growing = SimpleNamespace(state_kind="growing")
    check_state(growing, task())
    check_state(SimpleNamespace(state_kind="constant"), task(carries_state=True))
    refuses("keeps every token; .* with model.attention.window 12", check_state, growing, task(carries_state=True))
    open_ = Toys(model={"vocab_size": 0}).recipe()
    assert complete(open_, task(sizes={"vocab_size": 9, "dim": 3})).model == replace(open_.model, vocab_size=9)
    whole = replace(RECIPE, model=replace(RECIPE.model, classes=3))
    assert [*map(unresolved, (open_, whole, with_training(test_rows=-1)))] == [True, False, True]
    assert unresolved(replace(whole, train=with_training(valid_rows=-1).train))
    refuses("toy takes tokens, but", complete, open_, task(sizes={"vocab_size": 9}, inputs="images"))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"steps": 0}, "train.steps: expected at least 1, found 0; raise it"),
        ({"seed": -1}, "train.seed: expected at least 0, found -1; raise it"),
        ({"valid_rows": -2}, "train.valid_rows: expected at least -1, found -2; use 0 for all rows"),
        ({"average": 2, "keep_best": True}, "train.average: expected 0 beside train.keep_best, found 2; use 0, or"),
        ({"batch_size": 10, "accumulate": 3}, r"a multiple of 6 \(2 process\(es\) × 3 micro-.* found 10; use 12"),
        ({"batch_size": 1}, "expected a multiple of 2 .* found 1; use 2"),
        ({"log": "tensorbord"}, "train.log: expected one of none, tensorboard, .* did you mean 'tensorboard'"),
        ({"rollout": RolloutConfig(segments=2, slide=3)}, "slide: expected at most train.rollout.segments, 2, found 3"),
        ({"rollout": RolloutConfig(checkpoints=1)}, "expected all, sqrt or an integer ≥ 2, found 1; use all"),
        ({"rollout": RolloutConfig(horizon=-1)}, "train.rollout.horizon: expected at least 0, found -1"),
    ],
)
def test_settings_out_of_range_are_refused(settings, words):
    refuses(words, check_settings, with_training(**settings), 2)


def test_nothing_is_chosen_by_a_test_split(tmp_path):
    """COCO's usual splits have no validation split of their own."""
    plateau = replace(RECIPE.optim, schedule=ScheduleConfig("plateau"))
    for data, choices in ((COCOConfig(valid_size=0), True), (COCOConfig(valid_size=9), False)):
        recipes = {
            "train.keep_best": replace(with_training(keep_best=True), data=data),
            "train.patience": replace(with_training(patience=3), data=data),
            "optim.schedule": replace(with_training(), data=data, optim=plateau),
        }
        for name, recipe in recipes.items():
            if choices:
                refuses(f"{name}: .* found the test split in its place; set data.valid_size", check_settings, recipe, 1)
            else:
                check_settings(recipe, 1)
    twice = [replace(with_training(), data=COCOConfig(), name=name) for name in "ab"]
    refuses("--rates: .* found the test split", compare, twice, tmp_path, rates=(1e-3, 1e-2))


def test_the_ends_of_ranges_are_in_them():
    rollout = RolloutConfig(segments=2, slide=2, checkpoints=2)
    check_settings(with_training(steps=1, valid_rows=-1, accumulate=2, seed=0, keep_best=True, rollout=rollout), 2)
    check_settings(with_training(batch_size=3), 1)
    schedule = replace(RECIPE.optim, schedule=ScheduleConfig(warmup=12))
    assert schedule_warning(replace(RECIPE, optim=schedule)) is None
    of_fit = replace(RECIPE, optim=schedule, train=replace(RECIPE.train, steps=3), model=OwnConfig())
    assert "rises for 12 updates and the training has 3: it ends at 0.25 times" in schedule_warning(of_fit)
