"""The shell of a page: one HTML file with its style, data and scripts, which asks for nothing."""

import base64
import functools
import hashlib
import json
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from mnemos import libraries

from .markup import escape
from .style import style_sheet

# The licence of these libraries asks for this line in what is distributed with them.
NONE, SELF = "'none'", "'self'"
_LICENCE = "Vega, Vega-Lite and Vega-Embed: copyright University of Washington Interactive Data Lab, BSD-3-Clause."


def html_page(
    title: str, body: str, header: str = "", scripts: Sequence[str] = (), style: str = "", served: bool = False
) -> str:
    """A page that needs no other file.

    title: plain text. header: HTML below the title. scripts: the texts of scripts, in the order in which they run; the
    page's policy allows these alone, by their hashes, so that text that was not escaped cannot run. style: CSS after
    that of all pages. served: whether scripts may ask the server that the page came from.
    """
    if broken := next((text[:60] for text in scripts if "</script" in text.lower()), None):
        raise ValueError(f"expected scripts without </script>, found one: {broken}")
    hashes = " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(one.encode()).digest()).decode()}'" for one in scripts)
    policy = (
        "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'; "
        f"script-src {hashes or NONE}; connect-src {SELF if served else NONE}"
    )
    run = "".join(f"\n<script>{one}</script>" for one in scripts)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{escape(title)}</title>\n<style>\n{style_sheet()}{style}\n</style></head>\n<body><main>\n"
        f"<header><h1>{escape(title)}</h1>\n{header}</header>\n{body}\n</main>{run}</body></html>\n"
    )


def embedded(value: Any, kind: str = "data") -> str:
    """JSON that scripts of the page read: an element of the class `kind`. Raises ValueError for NaN and infinity.

    `<`, `>` and `&` are written as escapes of JSON, so no text in it can end the element.
    """
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for letter in "<>&\u2028\u2029":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return f'<script type="application/json" class="{escape(kind)}">{text}</script>'


def script(name: str, package: str = "mnemos.lab.report") -> str:
    """The text of a script or a style sheet beside this module, or in another package."""
    return files(package).joinpath(name).read_text(encoding="utf-8")


@functools.cache
def chart_library() -> str:
    """Vega-Lite with Vega and Vega-Embed as one script of 0.9 MB, which defines `vegaEmbed`. Takes about 2 s, once."""
    return f"/* {_LICENCE} */\n{libraries.vl_convert().javascript_bundle()}"
