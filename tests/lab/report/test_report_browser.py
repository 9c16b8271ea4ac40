"""A report in a real browser: switches, keys, sorting, widths, colours, no errors."""

import csv
import io
import json
import re

import pytest
from browser import browser
from synthetic_runs import edited, write_comparison

from mnemos.lab.report import page as pages
from mnemos.lab.report import report

HOSTILE = '=</script><img src=x onerror="window.hacked=1"><b>\'\n\u202ertl'
CHART = "document.querySelector('.chart')"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = write_comparison(tmp_path_factory.mktemp("runs") / "cmp", seeds=(0, 1), variants=("demo", "demo-wider"))
    for place in folder.glob("demo-?/recipe.json"):
        edited(place, about=HOSTILE)
    found = json.loads((folder / "comparison.json").read_text())
    for row in found["rows"]:
        row["name"] = row["name"].replace("demo-wider", HOSTILE)
    found["runs"][HOSTILE] = found["runs"].pop("demo-wider")
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

        def switch(kind):
            drawn = seen.run(f"+{CHART}.dataset.drawn")
            seen.run(f"document.querySelector('{kind}').focus()")
            seen.key("Space")
            seen.wait(f"+{CHART}.dataset.drawn > {drawn}")

        whole = marks()
        assert whole == 4, "two variants, two seeds each"
        switch(".variant")
        assert marks() == 2
        switch(".seed")
        assert marks() == 1
        switch(".seed")
        switch(".variant")
        assert marks() == 4
        seen.run("URL.createObjectURL = (blob) => ((window.saved = blob.text()), '#saved')")
        seen.run("document.querySelector('.csv').click()")
        head, first, *_, last = csv.reader(io.StringIO(seen.run("window.saved"), newline=""))
        assert head == ["chart", "variant", "run", "test accuracy"]
        assert first[1:] == ["demo", "seed 0", "0.482"]
        assert last[1] == f"'{HOSTILE}", "a spreadsheet runs no formula"
        # The keyboard alone: from the page's beginning through its switches, charts, tables and sections, all seen.
        seen.run("(document.activeElement.blur(), getSelection().setPosition(document.body, 0))")
        reached, focused = [], "(one => [one.className || one.tagName, getComputedStyle(one).outlineStyle])"
        while not reached or (reached[-1][0] != "SUMMARY" and len(reached) < 60):
            seen.key("Tab")
            reached.append(seen.run(f"{focused}(document.activeElement)"))
        assert {"variant", "seed", "log-x", "csv", "chart", "BUTTON", "A", "fold", "SUMMARY"} <= {
            name for name, _ in reached
        }
        assert all(outline != "none" for _, outline in reached), reached
        seen.key("Enter")
        assert seen.run("document.activeElement.parentElement.open")
        seen.run(f"{CHART}.focus()")
        read = "document.querySelector('.readout').textContent"
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
        # Every chart that is opened reads its values by keys.
        for place in range(
            seen.run("(document.querySelector('.fold').click(), document.querySelectorAll('.chart').length)")
        ):
            one = f"document.querySelectorAll('.chart')[{place}]"
            seen.run(f"{one}.focus()")
            seen.wait(f"{one}.dataset.drawn && !{one}.nextElementSibling.querySelector('.hint')")
            said = seen.run(f"{one}.nextElementSibling.textContent")
            for key in ("End", "ArrowUp", "Home"):
                seen.key(key)
            assert seen.run(f"{one}.nextElementSibling.textContent").strip(), said
        assert place >= 2
        seen.run("document.querySelector('.variants thead th:nth-child(2) button').focus()")
        seen.key("Enter")
        order = (
            "[...document.querySelectorAll('.variants tbody td:nth-child(2)')].map(one => parseFloat(one.textContent))"
        )
        values = seen.run(order)
        assert values == sorted(values, reverse=True)
        for width in (420, 900, 1400):
            seen.size(width, 1000)
            assert seen.run("document.documentElement.scrollWidth") <= width
            cut = "[...document.querySelectorAll('.scroll')].filter(one => one.scrollWidth > one.clientWidth)"
            assert width > 420 or seen.run(f"{cut}.length") == 0
        assert seen.run("document.querySelector('.variants tbody th').getClientRects().length") == 1
        seen.open(page.as_uri(), scripts=False, dark=True)
        assert seen.errors == []
