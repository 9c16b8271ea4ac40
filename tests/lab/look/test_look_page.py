"""The page of a look: its size, its escaping, and its switches in a browser."""

import base64
import json
import re
import shutil

import numpy as np
import pytest
import torch

import mnemos
from mnemos.lab.look.effects import Change, Effect, Place
from mnemos.lab.look.memories import Memory, Sources
from mnemos.lab.look.pack import LEVELS, dense, strongest
from mnemos.lab.look.page import page
from mnemos.lab.look.record import Document, Recording
from mnemos.lab.look.viewer import Look

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
    memories.append(
        Memory("window", "window", (), "", received=some((segments, 2 * length)), keys=some(n), norms=some(n))
    )
    words = tuple((HOSTILE if i == 3 else f"word{i % 99}", 1) for i in range(n))
    effects = [Effect(Change(HOSTILE, 0, 1), np.array([0.1]))]
    place = Place(n, 1, 0.9, 1, 0.9, HOSTILE, HOSTILE, [segments - 1], effects)
    sources = [Sources(HOSTILE, ("this segment", "cache"), some((n, 2)))]
    document = Document((1,) * n, words, (-1,) * n, HOSTILE)
    return Recording(HOSTILE, HOSTILE, document, length, memories, sources, some(n), some(n), [place])


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


def test_what_a_data_set_says_stays_text():
    text = page([made()])
    assert "<img" not in text
    assert len(re.findall("</script", text)) == len(re.findall("<script", text)) == 2
    assert not re.search(r"(src|href)=.?(http|//)|@import|url\(", text)
    (data,) = re.findall(r'<script type="application/json" class="look-run">(.*?)</script>', text)
    assert json.loads(data)["words"][3] == HOSTILE
    for one in ("In short", "What is lost when a part is emptied"):  # readable without scripts
        assert one in text
    assert text == page([made()])


def test_a_thousand_segments_are_below_five_megabytes():
    assert len(page([made(1000, 64, 16, 2)]).encode()) < 5e6


def test_a_notebook_shows_the_page_of_a_stream():
    torch.manual_seed(0)
    sizes = {"vocab_size": 9, "dim": 8, "encoder_layers": 1, "decoder_layers": 1, "num_heads": 2, "mlp": 8}
    model = mnemos.Memformer(**sizes, segment=4).eval()
    stream = mnemos.Stream(model).prefill(torch.randint(9, (1, 6)))
    found = mnemos.look(stream, [1, 2, 3], words=lambda tokens: [(HOSTILE, 1) for _ in tokens])
    assert isinstance(found, Look)
    assert found.recordings[0].document.tokens == (int(stream.last), 1, 2, 3)
    assert found._repr_html_().count("<") == 2  # the frame alone


FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
STEP = """() => {
  const begin = performance.now();
  for (let i = 0; i < 200; i++) { mnemosLook.go((i * 37) % 1000); document.body.offsetHeight; }
  return (performance.now() - begin) / 200;
}"""


@pytest.mark.slow
def test_the_viewer_in_a_browser(tmp_path):
    if (chromium := shutil.which("chromium")) is None:
        pytest.skip("no chromium on this machine")
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    path = Look([made(1000, 32, 8), made()]).write(tmp_path / "look.html")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=chromium, args=FLAGS)
        view = browser.new_page(viewport={"width": 420, "height": 900}, color_scheme="dark")
        said, asked = [], []
        view.on("console", lambda message: said.append(message.text))
        view.on("pageerror", lambda error: said.append(str(error)))
        view.on("request", lambda request: asked.append(request.url))
        view.goto(path.as_uri())
        for width in (420, 900, 1400):
            view.set_viewport_size({"width": width, "height": 900})
            assert view.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
        place = view.locator(".look-bar output")
        assert place.inner_text().startswith("segment 1 of 1000")
        # By the keyboard alone: Tab reaches every control, and arrows move the slider and the chosen word.
        reached = set()
        name = "(document.activeElement.getAttribute('aria-label') || document.activeElement.textContent).trim()"
        for _ in range(40):
            view.keyboard.press("Tab")
            reached.add(view.evaluate(name)[:40])
        assert {"segment", "the next segment", "▶ play", "memory that shades the text"} <= reached
        assert {"unit of layer 1, cache", "curve of layer 1, cache", "word that is predicted"} <= reached
        view.locator("input[type=range]").focus()
        view.keyboard.press("ArrowRight")
        assert place.inner_text().startswith("segment 2 of 1000")
        text = view.locator(".look-text")
        text.focus()
        chosen = []
        for _ in range(2):
            view.keyboard.press("ArrowRight")
            chosen.append(text.get_attribute("aria-activedescendant"))
        assert None not in chosen
        assert len({*chosen}) == 2
        view.locator("select[aria-label='unit of layer 1, cache']").select_option("3")
        assert view.get_by_text("slot 4, segment 2:").is_visible()
        assert view.evaluate(STEP) < 1000 / 30  # milliseconds for a step, with the layout of the page
        view.locator("input[name=look-model]").nth(1).check()
        assert "of 3" in place.inner_text()
        assert said == []
        assert [url for url in asked if not url.startswith(("file:", "data:"))] == []
        browser.close()
