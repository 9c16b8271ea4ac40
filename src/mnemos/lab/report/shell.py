"""The shell of a page: one HTML file with its palette, style, data and scripts, which asks for nothing."""

import base64
import functools
import hashlib
import json
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from mnemos import libraries

from .markup import escape

# The licence of these libraries asks for this line in what is distributed with them.
_LICENCE = "Vega, Vega-Lite and Vega-Embed: copyright University of Washington Interactive Data Lab, BSD-3-Clause."
# (light, dark). The variants' six keep a distance of ΔE 14 and more under simulated deuteranopia and protanopia.
VARIANTS = (
    ("#4b515a", "#c4c9d0"),
    ("#c8461a", "#f2794a"),
    ("#2f7fc1", "#63aef0"),
    ("#0f8f6c", "#2fb58c"),
    ("#cf9e17", "#f2cf63"),
    ("#8b3f8f", "#b877c9"),
)
# An ordered ramp for layers, first to last: lightness rises, so it survives grey print and colour blindness.
RAMP = (
    ("#3b1f5e", "#9a88cf"),
    ("#3c4a86", "#6f8cc4"),
    ("#2f7192", "#5fa9c9"),
    ("#27968c", "#55c2b4"),
    ("#5bb26f", "#86d493"),
    ("#a9bf3f", "#cfdf6d"),
)
# Heads have no order: as many hues as keep apart, then the same in other shapes.
HEADS = (*VARIANTS[1:], VARIANTS[0], ("#d0699a", "#f09cc2"), ("#7d5630", "#bd9063"))
INK, MUTED, RULE = ("#211f1b", "#dedad2"), ("#6d675d", "#9c978d"), ("#d9d4c8", "#3a3a3c")
NEGATIVE, POSITIVE = ("#2a6fb5", "#5ba3ea"), ("#c8521f", "#f0824c")
VARIABLES = {
    **{"ink": INK, "muted": MUTED, "rule": RULE, "negative": NEGATIVE, "positive": POSITIVE},
    **{f"variant-{i}": pair for i, pair in enumerate(VARIANTS)},
    **{f"layer-{i}": pair for i, pair in enumerate(RAMP)},
}


def variant_name(index: int, name: str) -> str:
    """The name of the variant at `index` in a table: HTML, with a dot of its colour."""
    return f'<i class="dot" style="color:var(--variant-{index % len(VARIANTS)})"></i>{escape(name)}'


def layer_variable(index: int, count: int) -> str:
    """The style sheet variable of layer `index` of `count`; with more than six layers, neighbours share a colour."""
    few = 1 < count < len(RAMP)
    return f"layer-{round(index * (len(RAMP) - 2) / (count - 1)) if few else index * len(RAMP) // max(count, 1)}"


def html_page(title: str, body: str, header: str = "", scripts: Sequence[str] = (), style: str = "") -> str:
    """A page that needs no other file.

    title: plain text. header: HTML below the title. scripts: their texts, which alone the page's policy allows, by
    their hashes, so that text that was not escaped cannot run. style: CSS after that of all pages.
    """
    if broken := next((text[:60] for text in scripts if "</script" in text.lower()), None):
        raise ValueError(f"expected scripts without </script>, found one: {broken}")
    digests = (base64.b64encode(hashlib.sha256(one.encode()).digest()).decode() for one in scripts)
    allowed = " ".join(f"'sha256-{one}'" for one in digests) or "'none'"
    policy = (
        "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'; "
        f"script-src {allowed}"
    )
    light, dark = ("".join(f"--{name}:{pair[i]};" for name, pair in VARIABLES.items()) for i in (0, 1))
    colours = f":root{{{light}}}\n@media screen and (prefers-color-scheme:dark){{:root{{{dark}}}}}"
    run = "".join(f"\n<script>{one}</script>" for one in scripts)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{escape(title)}</title>\n<style>\n{colours}{script('page.css')}{style}\n</style></head>\n<body><main>\n"
        f"<header><h1>{escape(title)}</h1>\n{header}</header>\n{body}\n</main>{run}</body></html>\n"
    )


def embedded(value: Any, name: str = "data") -> str:
    """JSON that scripts of the page read: an element of the class `name`. Raises ValueError for NaN and infinity.

    `<`, `>` and `&` are written as escapes of JSON, so no text in it can end the element.
    """
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for letter in "<>&\u2028\u2029":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return f'<script type="application/json" class="{escape(name)}">{text}</script>'


def script(name: str, package: str = "mnemos.lab.report") -> str:
    """The text of a script or a style sheet beside this module, or in another package."""
    return files(package).joinpath(name).read_text(encoding="utf-8")


@functools.cache
def chart_library() -> str:
    """Vega-Lite with Vega and Vega-Embed as one script of 0.9 MB, which defines `vegaEmbed`. Takes about 2 s, once."""
    return f"/* {_LICENCE} */\n{libraries.vl_convert().javascript_bundle()}"
