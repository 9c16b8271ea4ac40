import os
import time

import numpy as np
import pytest

from mnemos.lab.tasks import listops
from mnemos.lab.tasks.listops import Position, SampleStream, generate
from mnemos.lab.tasks.listops_generate import Rules
from mnemos.types import InputError

SHORT = Rules(4, 25, 3, 4, 0.5)


def same(a, b):
    return all(np.array_equal(x, y) for x, y in ((a.tokens, b.tokens), (a.starts, b.starts), (a.labels, b.labels)))


def texts(rows):
    return [rows.row(i).tobytes() for i in range(len(rows))]


@pytest.mark.slow
@pytest.mark.parametrize("rules", [SHORT, Rules()])
def test_samples_do_not_depend_on_the_number_of_workers(rules):
    alone = generate(rules, 7, 3000, workers=1)
    for workers in (2, 3):
        assert same(alone, generate(rules, 7, 3000, workers=workers))


def test_samples_do_not_depend_on_how_they_are_taken():
    with SampleStream(SHORT, 7) as stream:
        whole = stream.take(3000)
    with SampleStream(SHORT, 7, workers=2) as stream:
        pieces = [stream.take(n) for n in (1, 999, 1, 1500, 499)]
    assert texts(whole) == [text for piece in pieces for text in texts(piece)]


def test_no_sample_comes_twice():
    rows = texts(generate(SHORT, 0, 20_000))
    assert len(set(rows)) == len(rows) == 20_000


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("done", [0, 5, 1234, 2999])
def test_resumes_where_it_stopped(done, workers):
    expected = texts(generate(SHORT, 3, 3000))
    with SampleStream(SHORT, 3) as stream:
        if done:
            assert texts(stream.take(done)) == expected[:done]
        position = stream.position
    assert len(position.seen) == 16 * done
    with SampleStream(SHORT, 3, workers, position=Position(*position)) as stream:
        assert texts(stream.take(3000 - done)) == expected[done:]
        resumed = stream.position
    with SampleStream(SHORT, 3) as stream:
        stream.take(3000)
        assert stream.position == resumed


def test_too_many_samples_raise(monkeypatch):
    monkeypatch.setattr(listops, "PATIENCE", 3)
    with SampleStream(Rules(0, 2, 1), 0) as stream:
        assert sorted(stream.take(10).labels) == list(range(10))
        with pytest.raises(InputError, match=r"1 more .*found 0.* 3 blocks") as error:
            stream.take(1)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        (Rules(-1, 20), "min_length -1 and max_length 20"),
        (Rules(10, 11), "min_length 10 and max_length 11"),
        (Rules(max_depth=0), "found max_depth 0"),
        (Rules(max_arguments=1), "found .*max_arguments 1"),
        (Rules(digit_probability=1.5), "digit_probability .*found 1.5"),
        (
            Rules(500, 2000, max_depth=3, max_arguments=10),
            "min_length below 122,.*max_depth 3 .*max_arguments 10, found 500",
        ),
    ],
)
def test_impossible_rules_raise(rules, words):
    with pytest.raises(InputError, match=words) as error:
        SampleStream(rules, 0)
    assert "\n" not in str(error.value)


def test_the_longest_possible_sample_is_generated():
    rows = generate(Rules(5, 7, 2, 4, 0.0), 0, 50)
    assert set(rows.lengths) == {6}
    with pytest.raises(InputError, match=r"min_length below 6,.*found 6"):
        SampleStream(Rules(6, 9, 2, 4, 0.0), 0)


@pytest.mark.parametrize(("seed", "workers"), [(-1, 1), (0, 0)])
def test_wrong_seed_and_workers(seed, workers):
    with pytest.raises(InputError, match=f"data.seed, data.workers: .*found {seed} and {workers}"):
        SampleStream(SHORT, seed, workers)


def test_closing_ends_the_processes():
    with SampleStream(SHORT, 0, workers=2) as stream:
        stream.take(10)
        processes = list(stream._workers)
        assert [process.poll() for process in processes] == [None, None]
    assert all(process.poll() is not None for process in processes)


def test_a_worker_ends_when_its_pipe_is_closed():
    stream = SampleStream(SHORT, 0, workers=2)
    stream.take(1)
    for process in stream._workers:
        process.stdout.close()
        assert process.wait(timeout=20) == 0
    stream.close()


def test_a_dead_worker_is_an_error_not_a_short_answer():
    with SampleStream(Rules(), 0, workers=2) as stream:
        stream.take(1)
        for process in stream._workers:
            process.kill()
        with pytest.raises(EOFError, match="ended early"):
            stream.take(10**6)


def test_workers_are_used_where_they_pay(monkeypatch):
    used = []

    class Spy(SampleStream):
        def __init__(self, rules, seed, workers):
            used.append(workers)
            super().__init__(Rules(0, 20, 3), seed)

    monkeypatch.setattr(listops, "SampleStream", Spy)
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    for rules in (SHORT, Rules(500_000, 600_000)):
        generate(rules, 0, 100)
    assert used == [1, 3]


def test_progress_appears_after_two_seconds_on_standard_error(monkeypatch, capsys):
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    with listops._Progress("samples", 10) as progress:
        progress.advance(1)
        assert progress._bar is None
        now[0] = 2.5
        progress.advance(4)
        assert progress._bar.tasks[0].completed == 5
    assert progress._bar.live.is_started is False
    assert capsys.readouterr().out == ""
