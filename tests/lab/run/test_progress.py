"""What is said while a run trains, and at its end."""

from types import SimpleNamespace

import pytest

from mnemos.lab.run import progress
from mnemos.lab.run.files import Result
from mnemos.lab.run.progress import BarProgress, LogProgress
from mnemos.lab.run.session import _print_summary
from mnemos.lab.tasks.metrics import ACCURACY, LOSS

UPDATE = {"loss": 1.25, "lr": 1e-3}


@pytest.fixture
def now(monkeypatch):
    """The time, which a test sets."""
    now = [1000.0]
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


def test_lines_have_speed_and_time_left_of_this_process(now, capsys):
    display = LogProgress("text", 9100, 40)
    for seconds, step in ((20, 60), (20 + progress.INTERVAL - 1, 61), (20 + progress.INTERVAL, 70), (300, 9100)):
        now[0] = 1000.0 + seconds
        display.updated(step, UPDATE, lambda: 3 * 2**20)
    assert capsys.readouterr().err.splitlines() == [
        "text 60/9100 loss 1.2500 lr 1.00e-03 1.0 steps/s 2:30:40 of training left 3 MiB",
        f"text 70/9100 loss 1.2500 lr 1.00e-03 {30 / (20 + progress.INTERVAL):.1f} steps/s "
        f"{progress.clock(9030 / 30 * (20 + progress.INTERVAL))} of training left 3 MiB",
        "text 9100/9100 loss 1.2500 lr 1.00e-03 30.2 steps/s 0:00:00 of training left 3 MiB",
    ]
    read = []
    for batch in display.evaluation("valid", 10, [4, 3, 3, 2], lambda batch: batch, "rows"):
        read.append(batch)
        now[0] += progress.INTERVAL / 2
    assert read == [4, 3, 3, 2]
    left = progress.clock(progress.INTERVAL / 7 * 3)
    assert capsys.readouterr().err == f"text evaluating valid 7/10 rows {left} left\n"


def test_a_bar_shows_the_same(now):
    with BarProgress("text", 100, 40) as display:
        now[0] += 5
        display.updated(50, UPDATE, lambda: 2**20)
        (task,) = display.bar.tasks
        assert (task.completed, task.total, task.fields["facts"]) == (50, 100, "loss 1.2500  2.0/s  1 MiB")
        seen = [display.bar.tasks[1].completed for _ in display.evaluation("test", 9, [4, 5], lambda batch: batch)]
        assert (seen, len(display.bar.tasks)) == ([0, 4], 1)


def test_the_end_of_a_run_is_summed_up(tmp_path, capsys):
    scores, other = {"loss": 0.5, "accuracy": 0.25}, {"loss": 0.5, "accuracy": 0.75}
    averaged = {"averaged_steps": [1500, 1400, 1300], "best_step": 1200, "stopped_early": True, "steps": 1600}
    result = Result("text", test=scores, valid=other, before=scores, controls={"closed": other}, **averaged)
    task = SimpleNamespace(metrics=(ACCURACY, LOSS), reference={"a guess": 0.5})
    _print_summary(result, task, tmp_path)
    assert capsys.readouterr().out.splitlines() == [
        "text: test loss 0.5000, accuracy 0.2500 (a guess 0.5000); caches closed accuracy 0.7500; weights of step "
        "1,200, the best on the validation split; weights averaged over the checkpoints of 3 steps, 1,300 to 1,500; "
        "stopped early after 1,600 steps",
        "on the validation split accuracy 0.2500 before training, accuracy 0.7500 after",
        "caches closed (every gate closed, with the trained weights)",
        "No better than a guess, 0.500 accuracy: text 0.250.",
        str(tmp_path),
    ]
    _print_summary(Result("text", valid=other, epoch_seconds=2.34), task, tmp_path)
    assert capsys.readouterr().out.splitlines() == [
        "text: valid loss 0.5000, accuracy 0.7500 (a guess 0.5000); 2.3 s per epoch",
        str(tmp_path),
    ]
