"""The matrix of hosts: the architectures that no other test runs over, and what docs/hosts.md says of all."""

import json
import sys
from pathlib import Path

import pytest
from matrix import CHECKS, ZOO
from more_hosts import MORE

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.filterwarnings("ignore")  # of the hosts


@pytest.mark.parametrize("name", MORE)
def test_with_the_gate_closed_the_host_is_what_it_was_and_padding_does_not_matter(name):
    CHECKS["closed gate"](name)
    CHECKS["padding"](name)


@pytest.mark.each_value
@pytest.mark.parametrize("check", [check for check in CHECKS if check != "compile"])
@pytest.mark.parametrize("name", MORE)
def test_every_other_check(name, check):
    CHECKS[check](name)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ZOO)
def test_compiled(name):
    CHECKS["compile"](name)


def test_the_page_says_what_was_measured():
    sys.path.insert(0, str(ROOT / "tools"))
    from host_matrix import BEGIN, END, RESULTS, table

    rows = json.loads(RESULTS.read_text())["rows"]
    assert list(rows) == list(ZOO), "run tools/host_matrix.py"
    page = (ROOT / "docs" / "hosts.md").read_text()
    assert page[page.index(BEGIN) + len(BEGIN) : page.index(END)].strip() == table(rows).strip()
    passing = [name for name, row in rows.items() if not any(said.startswith("no: ") for said in row.values())]
    assert len(passing) >= 45
