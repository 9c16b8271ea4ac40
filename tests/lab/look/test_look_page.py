"""The page of a look: its size, its escaping, and its switches in a browser."""

import base64
import json
import math
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from browser import browser

import mnemos
from mnemos.lab.look.effects import Change, Effect, Prediction
from mnemos.lab.look.memories import Memory, Sources
from mnemos.lab.look.pack import LEVELS, dense, pack, strongest
from mnemos.lab.look.page import page
from mnemos.lab.look.record import Document, Recording
from mnemos.lab.look.viewer import TOKENS, Look
from mnemos.lab.report.markup import decimal

HOSTILE = "</script><img src=x onerror=alert(1)>&'\"\u2028"


def made(segments=3, length=32, units=8, layers=1):
    """A recording of random numbers."""
    random = np.random.default_rng(0)
    n, some = segments * length, random.random
    memories = [
        Memory(
            *(f"layer {i + 1}, cache", "cache", tuple(f"slot {u + 1}" for u in range(units)), HOSTILE),
            moved=some((segments, units)),
            values={name: some((segments, units)) for name in ("update", "reset", "candidate")},
            written=some((segments, units, length)),
            readers=some((segments, length, units)),
        )
        for i in range(layers)
    ]
    memories.append(Memory("window", "window", (), "", received=some((segments, 2 * length))))
    memories.append(Memory("layer 1, window", "sums", (), ""))  # nothing but shares
    words = tuple((HOSTILE if i == 3 else f"word{i % 99}", 1) for i in range(n))
    effects = [Effect(Change(HOSTILE, 0, 1, alone), np.array([0.1])) for alone in (False, True)]
    last = Prediction(n, 1, 0.9, 1, 0.9, HOSTILE, HOSTILE, [segments - 1], effects)
    sources = [Sources(HOSTILE, ("this segment", "cache"), some((n, 2)))]
    document = Document((1,) * n, words, (-1,) * n, HOSTILE)
    return Recording(HOSTILE, HOSTILE, document, length, memories, sources, some(n), {"caches": some(n)}, [last])


def values(packed):
    return np.frombuffer(base64.b64decode(packed["bytes"]), np.uint8) / LEVELS * packed["most"]


def test_arrays_are_kept_to_half_a_level():
    array = np.random.default_rng(0).random((4, 3, 10))
    np.testing.assert_allclose(values(dense(array)), array.ravel(), atol=array.max() / LEVELS / 2 + 1e-9)
    few = strongest(array, 0.4)
    places = np.frombuffer(base64.b64decode(few["places"]), np.uint8).reshape(4, 3, few["top"])
    assert (places[..., 0] == array.argmax(-1)).all()
    np.testing.assert_allclose(values(few).reshape(4, 3, -1)[..., 0], array.max(-1), atol=array.max() / LEVELS)
    assert len(base64.b64decode(few["places"]) + base64.b64decode(few["bytes"])) <= 0.4 * array.size


def test_a_short_last_segment_is_read_in_the_mean_of_its_own_words():
    one = made(2, 4, 2)
    one.document = Document((1,) * 6, (("a", 1),) * 6, (-1,) * 6)
    one.memories[0].readers[1, 2:] = 0
    found = values(pack(one)["memories"][0]["curves"]["read"]).reshape(2, 2)
    np.testing.assert_allclose(found[1], one.memories[0].readers[1, :2].mean(0), atol=0.01)


def test_a_memory_has_its_part_in_the_sources_of_its_own_layer():
    one = made(layers=2)
    one.sources = [replace(one.sources[0], name=f"layer {i}") for i in (1, 2)]
    one.memories = [replace(memory, own=("cache",)) for memory in one.memories[:2]]
    assert [memory["sources"] for memory in pack(one)["memories"]] == [[[0, 1]], [[1, 1]]]


def test_what_a_data_set_says_stays_text():
    text = page([made()])
    assert "<img" not in text
    assert len(re.findall("</script", text)) == len(re.findall("<script", text)) == 2
    assert not re.search(r"(src|href)=.?(http|//)|@import|url\(", text)
    (data,) = re.findall(r'<script type="application/json" class="look-run">(.*?)</script>', text)
    assert json.loads(data)["words"][3] == HOSTILE
    for one in ("In short", "Predictions with a part emptied"):  # readable without scripts
        assert one in text
    assert text == page([made()])


def test_the_longest_document_is_below_five_megabytes():
    """Six layers with sums, a window and five sources each, as a linearised decoder has them."""
    one = made(TOKENS // 512, 512, 4, 6)
    one.memories += [one.memories[-1]] * 5
    one.sources[:] = [Sources("layer", ("a", "b", "c", "d", "e"), one.sources[0].share.repeat(3, 1)[:, :5])] * 6
    assert len(page([one]).encode()) < 5e6


def test_the_table_of_emptied_parts_leaves_out_what_was_emptied_earlier_alone():
    one = made()
    early = [Effect(Change("early", 0, 1), np.array([0.1])), Effect(Change("late", 0, 2, True), np.array([0.625]))]
    late = [Effect(Change("late", 0, 2), np.array([np.nan, 0.25]))]
    one.predictions = [Prediction(90, 1, 0.9, 1, 0.9, "word", "word", [1, 2], early + late)]
    one.predictions.append(Prediction(91, 1, 0.9, 1, 0.9, "bare", "bare", [1, 2], early))
    text = page([one]).partition('<section id="emptied"')[2]
    assert "early" not in text
    assert re.search(r"late.*0?\.25.*–", text, re.DOTALL)
    assert ".625" not in text
    assert "bare" not in text, "nothing was emptied before its segment"


def test_a_notebook_shows_the_page_of_a_stream(tmp_path):
    torch.manual_seed(0)
    sizes = {"vocab_size": 9, "dim": 8, "encoder_layers": 1, "decoder_layers": 1, "num_heads": 2, "mlp": 8}
    model = mnemos.Memformer(**sizes, segment=4).eval()
    stream = mnemos.Stream(model).prefill(torch.randint(9, (1, 6)))
    found = mnemos.look(stream, [1, 2, 3], words=lambda tokens: [(HOSTILE, 1) for _ in tokens])
    assert isinstance(found, Look)
    assert found.recordings[0].document.tokens == (int(stream.last), 1, 2, 3)
    assert found._repr_html_().count("<") == 2  # the frame alone
    assert found.write(tmp_path / "new" / "look.html").read_text(encoding="utf-8") == found.html


NAME = """(() => {
  const one = document.activeElement;
  const said = one.ariaLabel || one.textContent || one.closest('label')?.textContent || '';
  return one.matches('summary') ? 'SUMMARY' : said;
})().trim().slice(0, 40)"""
OUTPUT = "document.querySelector('.look-bar output').textContent"
OUTLINE = "getComputedStyle(document.activeElement).outlineStyle"
LOOK = "document.getElementById('look').innerText"
TOO_WIDE = "document.documentElement.scrollWidth - innerWidth"


@pytest.fixture
def view():
    with browser() as view:
        yield view


def reach(view, name):
    """Go to a control with the key Tab."""
    for _ in range(80):
        if view.run(NAME) == name:
            assert view.run(OUTLINE) != "none"  # the focus can be seen
            return
        view.key("Tab")
    raise AssertionError(f"Tab does not reach {name!r}")


@pytest.mark.slow
def test_every_control_is_operated_by_keys_alone(tmp_path, view):
    path = Look([made(), made(2)]).write(tmp_path / "look.html")
    view.open(path.as_uri())
    for name, key, output in (("the next segment", "Enter", 2), ("the next segment", "ArrowLeft", 1)):
        reach(view, name)
        view.key(key)
        assert view.run(OUTPUT).startswith(f"segment {output} of 3")
    reach(view, "▶ play")
    view.key("Space")
    view.wait(f"{OUTPUT}.startsWith('segment 3 of 3')")
    view.wait("document.activeElement.getAttribute('aria-pressed') === 'false'")  # it stops at the end
    for name in ("unit that shades the text", "curve of layer 1, cache", "unit of layer 1, cache"):
        reach(view, name)
        before = view.run("document.activeElement.value")
        view.key("ArrowDown")
        assert view.run("document.activeElement.value") != before
    assert "slot 2, segment 3:" in view.run(LOOK)
    reach(view, "memory that shades the text")
    view.key("ArrowDown")
    assert view.run("mnemosLook.state.memory") == 1
    reach(view, "the words of the segment: arrow keys choose one"[:40])
    chosen = []
    for _ in range(2):
        view.key("ArrowRight")
        chosen.append(view.run("document.activeElement.getAttribute('aria-activedescendant')"))
    assert len({*chosen} - {None}) == 2
    reach(view, "emptied")
    view.key("ArrowRight")
    assert "is kept alone before segment" in view.run(LOOK)
    reach(view, "SUMMARY")
    view.key("Enter")
    assert not view.run("document.querySelector('#emptied details').open")
    assert view.errors == []  # the page's policy tells of requests here too


@pytest.mark.slow
def test_long_documents_long_segments_and_numbers_are_shown(tmp_path, view):
    first = made(200, 32, 8)
    path = Look([first, made(), made(1, 5000, 2)]).write(tmp_path / "look.html")
    view.open(path.as_uri(), 420, dark=True)
    for width in (420, 900, 1400):
        view.size(width, 900)
        assert view.run(TOO_WIDE) <= 0
    numbers = re.search(r"Its probability was (\S+), (\S+) with the caches emptied before this segment", view.run(LOOK))
    wanted = [math.exp(-array[31]) for array in (first.surprise, first.emptied["caches"])]  # of the last word
    assert [float(one) for one in numbers.groups()] == pytest.approx(wanted, abs=0.01)
    for number, text in ((3236.29, "3236"), (98765.4, "98770"), (12.3456, "12.35"), (9.99996, "10.00"), (0, "0.000")):
        assert view.run(f"mnemosLook.number({number}, 3)") == text
    for number in (1 / 16, 3 / 16, -1 / 16, 0.0624999, 0.0625001, 2.5, 0.9999):
        assert view.run(f"mnemosLook.number({number}, 3)") == decimal(number), "one rounding, of the report's"
    view.run("mnemosLook.go(199)")
    assert view.run(OUTPUT).startswith("segment 200 of 200")
    view.run("document.querySelectorAll('input[name=look-model]')[2].click()")
    late = "[...document.querySelectorAll('.look-text span')].slice(4500)"
    assert view.run(f"{late}.some((one) => parseInt(one.style.getPropertyValue('--w')) > 50)")
    assert view.errors == []
