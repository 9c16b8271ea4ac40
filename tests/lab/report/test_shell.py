"""The shell of pages: what may run in one, and that no text ends the element of its data."""

import base64
import hashlib
import json
import re

import pytest

from mnemos.lab.report.markup import table
from mnemos.lab.report.shell import embedded, html_page

HOSTILE = '</script><!--<script>&"\u2028'


def test_only_the_scripts_of_the_page_may_run():
    page = html_page(HOSTILE, "<p>body</p>", scripts=["let a = 1;"])
    (policy,) = re.findall('http-equiv="Content-Security-Policy" content="(.*?)"', page)
    digest = base64.b64encode(hashlib.sha256(b"let a = 1;").digest()).decode()
    assert policy.endswith(f"script-src 'sha256-{digest}'")
    assert policy.startswith("default-src 'none'")
    assert HOSTILE not in page
    assert "script-src 'none'" in html_page("a", "b")
    with pytest.raises(ValueError, match="</script>"):
        html_page("a", "b", scripts=[HOSTILE])


def test_data_end_no_element():
    text = embedded({HOSTILE: [1.5, None]})
    inside = re.fullmatch(r'<script type="application/json" class="data">(.*)</script>', text)[1]
    assert not {*"<>&\u2028"} & {*inside}
    assert json.loads(inside) == {HOSTILE: [1.5, None]}
    with pytest.raises(ValueError, match="JSON"):
        embedded(float("nan"))


def test_a_table_has_no_row_and_no_column_of_nothing():
    text = table("a", ["name", "known", "unknown"], [["x", "1", "–"], ["y", "–", ""]])
    assert "unknown" not in text
    assert ">y<" not in text
    assert table("a", ["name", "value"], [["x", "–"]]) == ""
