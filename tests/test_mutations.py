"""The small faults by which the suite's power is measured."""

import importlib
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))
import reached
from mutations import faults

DELTA = Path(__file__).parents[1] / "src" / "mnemos" / "ops" / "delta"

SOURCE = '''"""Not 1 + 2."""

LIMIT = 3


class A:
    size: int = 4

    def f(self, x: "list[1 + 1]", n=5):
        """Nor 6."""
        assert x.shape[0] == 7
        if not n:
            raise ValueError(f"{n + 8}, found {n}")
        self.reset()
        total = é(x)[-1] + (n * 2.0)
        return total.detach() if n > 9 and total is not None else f"{n + 10}"
'''


def test_each_kind_of_fault_is_made_once_where_behaviour_rests():
    found = [(fault.line, fault.kind, fault.after) for fault in faults(SOURCE, "a.py")]
    value = 'return total.detach() if n > 9 and total is not None else f"{n + 10}"'
    assert found == [
        (12, "not", "if (n):"),
        (14, "statement dropped", "pass"),
        (15, "arithmetic", "total = (é(x)[-1] - n * 2.0)"),
        (15, "sign", "total = é(x)[1] + (n * 2.0)"),
        (15, "constant", "total = é(x)[-2] + (n * 2.0)"),
        (15, "arithmetic", "total = é(x)[-1] + ((n / 2.0))"),
        (15, "constant", "total = é(x)[-1] + (n * 4.0)"),
        (16, "no detach", value.replace("total.detach()", "(total)")),
        (16, "branches exchanged", "return (f'{n + 10}' if n > 9 and total is not None else total.detach())"),
        (16, "comparison", value.replace("n > 9", "(n >= 9)")),
        (16, "condition", value.replace("n > 9 and total is not None", "(n > 9 or total is not None)")),
        (16, "constant", value.replace("9", "10", 1)),
        (16, "comparison", value.replace("total is not None", "(total is None)")),
    ]


@pytest.mark.parametrize("path", sorted(DELTA.glob("*.py")), ids=lambda path: path.name)
def test_faults_are_other_programs(path):
    source = path.read_text()
    for fault in faults(source, path.name)[::40]:
        assert fault.changes(source)
        assert fault.before in source
        assert fault.after in fault.apply(source)


def test_probes_note_which_tests_reach_a_fault_and_change_no_value(tmp_path, monkeypatch):
    source = "def f(x):\n    y = [x]\n    y.reverse()\n    return x + 1 if x > 2 else x - 1\n"
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "probed.py").write_text(source)
    every = faults(source, "src/probed.py")
    reached.insert_probes(tmp_path, every)
    monkeypatch.syspath_prepend(tmp_path / "src")
    try:
        runs = reached.Tests(tmp_path)
        for name, x in (("t.py::test_high", 3), ("t.py::test_low", 0)):
            runs.begin(name)
            assert importlib.import_module("probed").f(x) == (4 if x == 3 else -1)
    finally:
        for name in ("probed", "mutant_probe"):
            sys.modules.pop(name, None)
    found = {fault.new: tests for fault, tests in zip(every, reached.tests_of(tmp_path, every), strict=True)}
    high, low = ["t.py::test_high"], ["t.py::test_low"]
    assert (found["(x - 1)"], found["(x + 1)"], found["(x >= 2)"], found["pass"]) == (high, low, high + low, high + low)
