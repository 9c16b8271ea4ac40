"""A report in a real browser: switches, keys, sorting, widths, colours, no errors; and the time that 200 runs take."""

import json
import re
import time

import pytest
from browser import browser
from synthetic_runs import write_comparison

from mnemos.lab.report import page as pages
from mnemos.lab.report import report

HOSTILE = '</script><img src=x onerror="window.hacked=1"><b>'
CHART = "document.querySelector('.chart')"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = write_comparison(tmp_path_factory.mktemp("runs") / "cmp", seeds=(0, 1), variants=("demo", "demo-cached"))
    for place in folder.glob("demo-?/recipe.json"):
        place.write_text(json.dumps(json.loads(place.read_text()) | {"about": HOSTILE}))
    found = json.loads((folder / "comparison.json").read_text())
    for row in found["rows"]:
        row["name"] = row["name"].replace("demo-cached", HOSTILE)
    found["runs"][HOSTILE] = found["runs"].pop("demo-cached")
    found["controls"] = []
    (folder / "comparison.json").write_text(json.dumps(found))
    return folder


@pytest.fixture
def page(folder, tmp_path, monkeypatch, chart_library):
    monkeypatch.setattr(pages, "chart_library", lambda: chart_library)
    return report([folder], tmp_path / "<b>page</b>.html")


@pytest.mark.slow
def test_switches_keys_and_tables(page):
    with browser() as seen:
        seen.open(page.as_uri())
        seen.wait(f"{CHART}.dataset.drawn")
        assert seen.run("window.hacked") is None

        def marks():
            return seen.run(f"{CHART}.querySelectorAll('.role-mark.mark-symbol path').length")

        def switch(kind, name="click"):
            drawn = seen.run(f"+{CHART}.dataset.drawn")
            seen.run(f"document.querySelector('{kind}').{name}()")
            seen.wait(f"+{CHART}.dataset.drawn > {drawn}")

        whole = marks()
        assert whole == 6, "two variants and an emptied cache, two seeds each"
        switch(".arm")
        assert marks() == 4
        switch(".seed")
        assert marks() == 2
        switch(".seed")
        switch(".arm")
        assert marks() == 6
        # The keyboard alone: from the page's beginning to the chart, and through its values.
        for _ in range(40):
            seen.key("Tab")
            if seen.run("document.activeElement.className") == "chart":
                break
        else:
            raise AssertionError("Tab does not reach the chart")
        read = "document.querySelector('.readout').innerText"
        first = seen.run(read)
        assert "seed 0: 0.482" in first
        seen.key("ArrowDown")
        assert seen.run(read) != first
        assert HOSTILE in seen.run(read)
        # The switches of the learning curves, which are drawn once their section opens.
        seen.run("document.querySelector('#curves').parentElement.open = true")
        curve = "document.querySelector('#curves .chart')"
        seen.run(f"{curve}.scrollIntoView()")
        seen.wait(f"{curve}.dataset.drawn")
        title = f"[...{curve}.querySelectorAll('.role-axis-title')].map(one => one.textContent).join()"
        assert "updates" in seen.run(title)
        before = seen.run(f"{curve}.querySelector('.picture').innerHTML")
        seen.run(
            "{const one = document.querySelector('#curves .axis'); one.value = 'seconds'; "
            "one.dispatchEvent(new Event('change'))}"
        )
        seen.wait(f"+{curve}.dataset.drawn > 1")
        assert "seconds" in seen.run(title)
        seen.run("document.querySelector('#curves .log-x').click()")
        seen.wait(f"+{curve}.dataset.drawn > 2")
        assert seen.run(f"{curve}.querySelector('.picture').innerHTML") != before
        seen.run(f"{curve}.focus()")
        seen.key("End")
        assert re.search(r"seconds 52\.5", seen.run("document.querySelector('#curves .readout').innerText"))
        seen.run("document.querySelector('.arms thead th:nth-child(2) button').click()")
        order = "[...document.querySelectorAll('.arms tbody td:nth-child(2)')].map(one => parseFloat(one.textContent))"
        values = seen.run(order)
        assert values == sorted(values, reverse=True)
        for width in (420, 900, 1400):
            for dark in (False, True):
                seen.open(page.as_uri(), width=width, dark=dark)
                assert seen.run("document.documentElement.scrollWidth") <= width
        seen.open(page.as_uri(), scripts=False)
        assert seen.errors == []


@pytest.mark.exhaustive
def test_two_hundred_runs_open_in_two_seconds(tmp_path, monkeypatch, chart_library):
    monkeypatch.setattr(pages, "chart_library", lambda: chart_library)
    folder = write_comparison(tmp_path / "cmp", seeds=range(50), variants=("demo", "demo-wider", "demo-a", "demo-b"))
    found = report([folder], tmp_path / "page.html")
    assert found.stat().st_size < 5_000_000
    with browser() as seen:
        begin = time.monotonic()
        seen.open(found.as_uri())
        seen.wait(f"{CHART}.dataset.drawn")
        assert time.monotonic() - begin < 2
