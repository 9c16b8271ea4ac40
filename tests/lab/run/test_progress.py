"""What is said while a run trains, and at its end."""

import signal
import threading
from types import SimpleNamespace

from mnemos.lab.run import progress
from mnemos.lab.run.files import Result
from mnemos.lab.run.progress import BarProgress, LogProgress
from mnemos.lab.run.session import _print_summary
from mnemos.lab.run.stopping import calling
from mnemos.lab.tasks.metrics import ACCURACY, LOSS

UPDATE = {"loss": 1.25, "lr": 1e-3}


def test_speed_and_time_left_are_those_of_this_process(monkeypatch, capsys):
    now = [1000.0]
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(progress, "INTERVAL", 30.0)
    display, bar = LogProgress("text", 9100, 40), BarProgress("text", 100, 40)
    for seconds, step in ((20, 60), (49, 61), (50, 65), (51, 9100)):
        now[0] = 1000.0 + seconds
        display.updated(step, UPDATE, lambda: 3 * 2**20)
    assert capsys.readouterr().err.splitlines() == [
        "text 60/9100 loss 1.2500 lr 1.00e-03 1.0 steps/s 2:30:40 of training left 3 MiB",
        "text 65/9100 loss 1.2500 lr 1.00e-03 0.5 steps/s 5:01:10 of training left 3 MiB",
        "text 9100/9100 loss 1.2500 lr 1.00e-03 177.6 steps/s 0:00:00 of training left 3 MiB",
    ]
    for _ in display.evaluation("valid", 10, [4, 3, 3, 2], lambda batch: batch, "rows"):
        now[0] += 15
    assert capsys.readouterr().err == "text evaluating valid 7/10 rows 0:00:13 left\n"
    bar.updated(50, UPDATE, lambda: 2**20)
    (task,) = bar.bar.tasks
    assert (task.completed, task.total, task.fields["facts"]) == (50, 100, "loss 1.2500  0.1/s  1 MiB")
    seen = [bar.bar.tasks[1].completed for _ in bar.evaluation("test", 9, [4, 5], lambda batch: batch)]
    assert (seen, len(bar.bar.tasks)) == ([0, 4], 1)
    with bar:
        bar.message("[bold]scoring\x1b[2J")
    said = capsys.readouterr().err
    assert "[bold]scoring\\x1b[2J\n" in said, "a name in it is shown as it is"
    assert "50/100 loss 1.2500  0.1/s  1 MiB" in said


def test_signals_call_the_main_thread_alone():
    called, before = [], signal.getsignal(signal.SIGTERM)

    def inside():
        with calling(lambda: called.append(1)):
            called.append(signal.getsignal(signal.SIGTERM) is before)

    thread = threading.Thread(target=inside)
    thread.start()
    thread.join()
    inside()
    with calling(lambda: called.append("asked")):
        signal.raise_signal(signal.SIGTERM)
    assert called == [True, False, "asked"]
    assert signal.getsignal(signal.SIGTERM) is before


def test_the_end_of_a_run_is_summed_up(tmp_path, capsys):
    scores, other = {"loss": 0.5, "accuracy": 0.25}, {"loss": 0.5, "accuracy": 0.75}
    steps = {"averaged_steps": [1500, 1400, 1300], "best_step": 1200, "stopped_early": True, "steps": 1600}
    task = SimpleNamespace(metrics=(ACCURACY, LOSS), reference={"a guess": 0.5})
    both = Result("text", test=scores, valid=other, before=scores, controls={"closed": other}, **steps)
    _print_summary(both, task, tmp_path)
    _print_summary(Result("text", valid=other, epoch_seconds=2.34), task, tmp_path)
    assert capsys.readouterr().out.splitlines() == [
        "text: test loss 0.5000, accuracy 0.2500 (a guess 0.5000); caches closed accuracy 0.7500; weights of step "
        "1,200, the best on the validation split; weights averaged over the checkpoints of 3 steps, 1,300 to 1,500; "
        "stopped early after 1,600 steps",
        "on the validation split accuracy 0.2500 before training, accuracy 0.7500 after",
        "caches closed (every gate closed, with the trained weights)",
        "No better than a guess, 0.500 accuracy: text 0.250.",
        *(str(tmp_path), "text: valid loss 0.5000, accuracy 0.7500 (a guess 0.5000); 2.3 s per epoch", str(tmp_path)),
    ]
