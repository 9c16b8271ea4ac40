"""The site has every public name and every page; docstrings become text that Sphinx reads. Without Sphinx."""

import importlib
import re
from pathlib import Path

import pytest

from mnemos.face import read_face

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def site():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "tools" / "site"))
        yield {name: importlib.import_module(name) for name in ("docstrings", "reference", "pages")}


def test_the_reference_has_every_public_name_once(site):
    reference = site["reference"]
    text = "\n".join(reference.page(name) for name in reference.PAGES)
    entries = re.findall(r"^\.\. (?:auto|py:)\w+:: ([\w.]+)", text, re.MULTILINE)
    assert len(entries) == len(set(entries))
    public = {f"mnemos.{name}" for name, module in read_face("mnemos").items() if module != f"mnemos.{name}"}
    rooms = "ops attention memory models memory_replay hosts hugging_face testing trainers"
    for room in rooms.split():
        public |= {f"mnemos.{room}.{name}" for name in importlib.import_module(f"mnemos.{room}").__all__}
    public |= {"mnemos.registry.names", "mnemos.types.leaves", "mnemos.libraries.transformers"}
    described = {id(entry.what) for entry in reference.entries()}
    assert {name for name in public if id(reference.resolve(name)) not in described} == set()
    assert "mnemos.LinearConfig" in entries
    assert "mnemos.attention.LinearConfig" not in entries


def test_every_public_name_has_a_docstring_and_its_members_are_its_own(site):
    entries = {entry.path: entry for entry in site["reference"].entries()}
    assert [path for path, entry in entries.items() if not entry.documentation] == []
    assert "a pytree" in entries["mnemos.State"].documentation
    assert (entries["mnemos.State"].kind, entries["mnemos.InputError"].kind) == ("data", "exception")
    assert {"prefill", "generate"} <= {*entries["mnemos.Stream"].members}
    assert "parameters" not in entries["mnemos.Transformer"].members


def test_every_page_of_the_repository_is_in_a_section_and_links_lead_to_pages(site, tmp_path):
    pages = site["pages"]
    listed = {page for one in pages.sections().values() for page in one}
    assert {path.stem for path in (ROOT / "docs").glob("*.md")} - {"README"} <= listed
    assert {f"notebooks/{path.stem}" for path in ROOT.glob("examples/notebooks/*.ipynb")} <= listed
    made = pages.Site(tmp_path)
    for link, on_the_site in (
        ("[a](../src/mnemos/ops/linear/README.md#c)", "[a](operators/linear.md#c)"),
        ("[`a`](install.md) `[a](install.md)`", "[`a`](install.md) `[a](install.md)`"),
        ("[a](../results/demo.json)", "[a](files/results/demo.json)"),
        ("[a](../examples)", "[a](files/examples/index.md)"),
        ("[a](https://b.c) [a](#b)", "[a](https://b.c) [a](#b)"),
    ):
        assert made.with_links(link, ROOT / "docs" / "speed.md", "speed") == on_the_site
    assert (tmp_path / "files/results/demo.json").exists()
    assert "stream_novel.py" in (tmp_path / "files/examples/index.md").read_text()


DOCSTRING = """The sum of x* and y.

    y = x + 1

x, y [B, T] of any size. mask [B, T] bool, True = valid: a token
that is not `valid` is left out. scale: none < 0; see
1. of the paper. step(x) -> y: a function (x) -> bool. size=2: of both. Raises InputError for a wrong `x`s.
"""
TEXT = r"""The sum of x\* and y.

::

   y = x + 1

``x``, ``y``
   [B, T] of any size.

``mask`` [B, T] bool, True = valid
   a token that is not ``valid`` is left out.

``scale``
   none < 0; see 1. of the paper.

``step(x) -> y``
   a function (x) -> bool.

``size=2``
   of both.

Raises InputError for a wrong ``x``\ s."""


def test_a_docstring_becomes_text(site):
    assert site["docstrings"].text_of(DOCSTRING, {"x", "mask", "scale", "step", "size"}) == TEXT
