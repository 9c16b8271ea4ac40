import html
import html.parser
import json
import math
import re

import pytest
from refusals import refuses
from synthetic_runs import LAYERS, edited, read, write_comparison, write_run

from mnemos.lab.report import report
from mnemos.lab.report.gated_caches import map_section


@pytest.fixture(scope="module")
def comparison(tmp_path_factory):
    return write_comparison(tmp_path_factory.mktemp("runs") / "demo")


@pytest.fixture(scope="module")
def page(comparison):
    return report([comparison]).read_text()


class Parsed(html.parser.HTMLParser):
    """The tags, ids and references of a page."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.ids, self.references = [], [], []
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        for name, value in attributes:
            if name == "id":
                self.ids.append(value)
            if name in ("src", "href", "xlink:href", "srcset", "data", "action"):
                self.references.append(value)
            self.references += re.findall(r"url\(['\"]?([^)'\"]+)", value or "")


def text_of(page):
    """What a page says, with spaces between."""
    text = re.sub(r"(?s)<(style|script)\b.*?</\1>|<[^>]*>", " ", page)
    return re.sub(r"\s+", " ", html.unescape(text))  # also of spaces that do not break


@pytest.mark.slow
def test_report_holds_every_section_and_number(page):
    text = text_of(page)
    for section in (
        "Results",
        "Learning curves",
        "The gates",
        "Self-attention and memory",
        "What it costs",
        "Commands",
    ):
        assert section in text
    assert "demo-cached 0.559, demo-wider 0.552, demo 0.512; 0 of 2 differences to demo shown" in text
    assert "70,282" in text
    assert "mnemos compare demo demo-cached demo-wider" in text
    assert all(layer.removesuffix(".attention") in text for layer in LAYERS)
    assert page.count("<figure") == page.count("<figcaption>") == 6


@pytest.mark.slow
def test_report_needs_nothing_but_itself(page):
    parsed = Parsed(page)
    assert parsed.references
    assert all(r.startswith(("#", "data:image/png;base64,")) for r in parsed.references)
    assert not {"link", "iframe", "object", "base"} & set(parsed.tags)
    assert parsed.tags.count("script") == 2 + page.count('class="chart-data"'), "the two scripts, and data"
    assert "://" not in page.replace("http://www.w3.org/2000/svg", "")
    assert "@import" not in page
    assert len(parsed.ids) == len(set(parsed.ids)), "ids of different pictures collide"
    assert {r[1:] for r in parsed.references if r.startswith("#")} <= set(parsed.ids)


def test_report_follows_the_reader_s_colours(page):
    assert "prefers-color-scheme:dark" in page.replace(" ", "")
    drawings = re.findall(r"<svg.*?</svg>", page, re.S)
    assert len(drawings) >= 12
    # Every colour of a line or a letter is the style sheet's: a fixed one would vanish on the other background.
    fixed = r"(?:stroke|fill)(?:: |=\")(#[0-9a-f]{3,6}|black|white)"
    assert not [c for d in drawings for c in re.findall(fixed, d)]
    named = {"updates", "test accuracy", "seconds of updates"}
    ticked = [d for d in drawings if 'role="presentation"' in d]
    assert len(ticked) >= 10
    assert all(named & {*re.findall(r"<text[^>]*>([^<]*)</text>", d)} for d in ticked), "every axis has a name"


def test_the_same_input_gives_the_same_bytes(tmp_path):
    run = write_run(tmp_path / "run", seed=5)
    assert report([run], tmp_path / "again.html").read_text() == report([run]).read_text()


@pytest.mark.slow
def test_runs_of_different_tasks_are_side_by_side_and_not_ranked(tmp_path):
    runs = [write_run(tmp_path / name, name) for name in ("demo", "demo-wider")]
    other = write_run(tmp_path / "pixels", "demo-cached", explained=False)
    edited(other / "recipe.json", name="pixels", data={"is": "mnist"})
    path = report([*runs, other])
    assert path == runs[0] / "report.html"
    page = path.read_text()
    parsed = Parsed(page)
    text = text_of(page)
    assert "2 tasks" in text
    assert "data.is: listops and mnist" in text
    assert len(parsed.ids) == len(set(parsed.ids))
    assert {r[1:] for r in parsed.references if r.startswith("#")} <= set(parsed.ids)
    first, second = (page.index(f'id="task-{i}-task"') for i in (1, 2))
    assert "pixels" not in page[first:second]
    assert "demo" not in re.sub("<pre>.*?</pre>", "", page[second:], flags=re.S).replace("demo-cached", "")
    assert page.count("Validation accuracy") >= 2


def test_unfinished_run_says_what_is_missing(tmp_path):
    records = [
        *({"kind": "train", "step": i, "loss": loss} for i, loss in ((1, math.nan), (2, 2.0), (3, math.inf))),
        {"kind": "valid", "step": 2, "loss": None},
        {"kind": "gates", "step": 2, "layers": [{"name": "only", "mix": [0.5, math.inf]}]},
        {"kind": "something else", "step": 2},
    ]
    run = write_run(tmp_path / "run", "demo-cached", metrics=records, finished=False)
    (run / "run.json").unlink()
    text = report([run]).read_text()
    assert "missing, NaN or infinite in 2 of 3 records, first at step 1" in text
    assert "not finished" in text


def test_report_tells_what_the_caches_do(page):
    """Correlations of −0.75, 0.25, 0.5 and 0.125 in each of two layers."""
    assert "3 × 5 0.550 0.250 +0.031 −0.750 to +0.500 0.875 0.125" in text_of(page)


def test_the_report_draws_what_was_recorded(page):
    section = page[page.index('id="maps"') : page.index('id="costs"')]
    pictures = re.findall(r"data:image/png;base64,([A-Za-z0-9+/=\s]+)", section)
    assert len(pictures) == 4 + 2 * 2 * 4  # the pictures, and two maps of each in two layers


def test_maps_that_were_not_recorded_are_missing_with_the_reason(tmp_path):
    run = write_run(tmp_path / "run", "demo-cached")
    found = json.loads((run / "explain.json").read_text())
    found["layers"][0]["maps"] = {"left": "its 17 tokens form no known grid"}
    (run / "explain.json").write_text(json.dumps(found | {"middle": 1}))
    assert "Left out: blocks.0: its 17 tokens form no known grid." in map_section(read([run]))


def test_comparison_without_its_runs_still_has_a_table_which_a_failed_report_leaves(tmp_path):
    folder = write_comparison(tmp_path / "cmp", with_runs=False)
    path = report([folder])
    text = path.read_text()
    assert "0.559" in text
    assert "No run folder is named in comparison.json." in text
    assert '<section id="curves"' not in text, "a section that says nothing"
    (folder / "comparison.json").write_text("{")
    refuses(r"comparison\.json", report, [folder])
    assert path.read_text() == text


@pytest.mark.slow
def test_all_text_is_escaped(tmp_path):
    run = write_run(tmp_path / "<script>alert(1)<b>", "demo-cached", explained=False)
    bad = '<script>alert("1")</script>&\'\n\u202ertl'
    edited(run / "recipe.json", **{"name": bad, "about": bad, bad: bad})
    edited(run / "run.json", command=[bad], device=bad, started=bad, versions={bad: bad})
    lines = (run / "metrics.jsonl").read_text().replace(LAYERS[0], "<i>layer</i>")
    (run / "metrics.jsonl").write_text(lines)
    page = report([run]).read_text()
    assert "b" not in Parsed(page).tags
    assert "<script>alert" not in page
    assert "<i>layer" not in page
    assert "&lt;script&gt;alert(1)&lt;b&gt;" in page, "the folder"
    assert "&lt;/script&gt;&amp;&#x27;\n[U+202E]rtl" in page, "a character that reorders what follows it is shown"
    assert "\u202e" not in re.sub(r"<script.*?</script>|<svg.*?</svg>", "", page, flags=re.DOTALL)
