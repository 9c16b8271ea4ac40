"""The long trials find what grows, and what is not in order; the trials themselves are `make soak`."""

import importlib.util
import re
from pathlib import Path

import pytest
import soak_commands
import soak_faults
import soak_tokens
import soak_updates
from usage import Usage, usage

ROOT = Path(__file__).parents[2]


def series(grow=0.0, slow=0.0, handles=0, threads=0):
    """A hundred samples of a process whose last ones have grown."""
    found, cpu = [], 0.0
    for i in range(100):
        part = i / 99
        cpu += 10 * (1 + slow * part)
        use = Usage(float(i), cpu, int(4e8 + grow * part), 5 + round(handles * part), 1 + round(threads * part))
        found.append((1000 * (i + 1), use))
    return found


@pytest.mark.parametrize(
    ("grown", "word"),
    [({"grow": 1e7}, "memory"), ({"slow": 0.7}, "processor"), ({"handles": 2}, "handles"), ({"threads": 2}, "threads")],
)
def test_what_grows_in_long_training_is_found(grown, word):
    report, failed = soak_updates.judge(series())
    assert report["updates"] == 100_000
    assert not failed
    (line,) = soak_updates.judge(series(**grown))[1]
    assert word in line


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc, which Linux has")
def test_a_process_is_read():
    before = usage()
    with open(__file__):
        after = usage()
    assert after.handles == before.handles + 1
    assert after.rss > 2**20
    assert after.cpu >= before.cpu


def test_a_state_that_grows_undeclared_is_found():
    row = {"state": "constant", "microseconds_per_token": [1.0, 1.0], "rss_mib": [300.0, 300.0]}
    assert not soak_tokens.judge(row, [16, 24, 16, 24], finite=True)
    assert len(soak_tokens.judge(row, [16, 24, 25, 24], finite=True)) == 1
    assert len(soak_tokens.judge({**row, "state": "growing"}, [16, 24, 25, 26], finite=True)) == 1
    assert len(soak_tokens.judge({**row, "rss_mib": [300.0, 305.0]}, [16] * 4, finite=False)) == 2


def test_every_registered_attention_and_stateful_model_is_streamed():
    names = {case.name for case in soak_tokens.cases()}
    assert {"transformer, linear", "transformer, relative, cached", "memformer", "lstm", "hosted-decoder"} <= names
    assert len(names) > 30


def test_random_command_lines_end_in_order(tmp_path):
    found = soak_commands.Found()
    with soak_commands.inside(tmp_path):
        soak_commands.shown(found, 1)
        soak_commands.trained(found, 1)
        soak_commands.others(found, 3)
    assert not found.failed
    assert sum(found.codes.values()) == 5


def test_what_is_not_in_order_is_found(tmp_path):
    ended, words = soak_commands.Ended, ["train", "x"]
    assert soak_commands.problem(words, ended(0, "", "")) is None
    assert soak_commands.problem(words, ended(2, "mnemos: expected\n", "")) is None
    assert "traceback" in soak_commands.problem(words, ended(None, "Traceback\nValueError: no", ""))
    assert "2 lines" in soak_commands.problem(words, ended(2, "mnemos: a\nb\n", ""))
    (tmp_path / "recipe.json").write_text("")
    assert "a folder with" in soak_commands.problem(words, ended(2, "mnemos: a\n", ""), tmp_path)


def test_every_promise_of_the_page_names_a_test_or_a_trial_that_exists():
    page = (ROOT / "docs/reliability.md").read_text()
    known = {
        name
        for path in (ROOT / "tests").rglob("*.py")
        for name in re.findall(r"^def (test_\w+)", path.read_text(), re.M)
    }
    assert not set(re.findall(r"`(test_\w+)`", page)) - known
    spec = importlib.util.spec_from_file_location("soak", ROOT / "tools/soak.py")
    soak = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(soak)
    trials = re.findall(r"soak: `(\w+)`", page)
    assert trials
    assert not [name for name in trials if name not in soak.PARTS and not hasattr(soak_faults, name)]
    rows = [line for line in page.splitlines() if line.startswith("| ") and not line.startswith("| promise")]
    assert rows
    assert all("`test_" in row for row in rows)
