"""HTML elements that the sections use, and number formatting. All text is escaped here."""

import base64
import html
import io
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

import numpy as np

from mnemos.lab.tasks.pictures import pillow

T = TypeVar("T")
_UNKNOWN = {"", "–"}
OPERATIONS = "FLOPs: floating-point operations, in millions (M), 10⁹ (G) or 10¹² (T)."  # of what `operations` writes
# Characters that reorder the text after them (Unicode's embeddings, overrides and isolates) are shown, not obeyed.
_REORDERING = {code: f"[U+{code:04X}]" for code in (*range(0x202A, 0x202F), *range(0x2066, 0x206A))}


def escape(text: object) -> str:
    """Text for HTML content and quoted attributes."""
    return html.escape(str(text).translate(_REORDERING), quote=True)


def prose(text: str) -> str:
    """Sentences for HTML content: escaped, with a typeset apostrophe."""
    return escape(text.replace("'", "\u2019"))


def _class(style: str) -> str:
    return f' class="{escape(style)}"' if style else ""


def paragraph(text: str, style: str = "") -> str:
    """A paragraph of plain text."""
    return f"<p{_class(style)}>{prose(text)}</p>"


def missing(text: str) -> str:
    """A line that says why a section, or a part of it, has no data."""
    return paragraph(text, "missing")


def figure(panels: Sequence[str], caption: str, style: str = "") -> str:
    """Panels side by side where there is room, and a numbered caption in plain text."""
    body = "\n".join(f'<div class="panel">{p}</div>' for p in panels)
    return (
        f'<figure{_class(style)}>\n<div class="panels">{body}</div>\n<figcaption>{prose(caption)}</figcaption></figure>'
    )


def table(caption: str, head: Sequence[str], rows: Iterable[Sequence[str]], style: str = "") -> str:
    """A numbered table. `head` and `caption` are plain text; cells are HTML, and the first cell of a row is its name.

    Rows and columns in which nothing is known are left out; "" for a table of these alone.
    """
    filled = [row for row in rows if not {*row[1:]} <= _UNKNOWN]
    shown = [i for i in range(len(head)) if not i or any(row[i] not in _UNKNOWN for row in filled)]
    if not filled:
        return ""
    names = "".join(f'<th scope="col">{escape(head[i])}</th>' for i in shown)
    body = "\n".join(
        f'<tr><th scope="row">{row[0]}</th>'
        + "".join(f'<td data-head="{escape(head[i])}">{row[i]}</td>' for i in shown[1:])
        + "</tr>"
        for row in filled
    )
    return (
        f'<div class="scroll"><table{_class(style)}><caption>{prose(caption)}</caption>\n'
        f"<thead><tr>{names}</tr></thead>\n<tbody>\n{body}\n</tbody></table></div>"
    )


def table_of(caption: str, items: Iterable[T], columns: Mapping[str, Callable[[T], str]], style: str = "") -> str:
    """A table with a row for each item. columns: by heading, what makes an item's cell; the first one is its name."""
    rows = [[cell(one) for cell in columns.values()] for one in items]
    return table(caption, list(columns), rows, style)


def folded(slug: str, name: str, text: str, opened: bool = False) -> str:
    """A section that opens and closes. A link to #slug opens it: browsers open what a link's target is inside of."""
    return (
        f'<details class="section"{" open" if opened else ""}><summary><h2>{escape(name)}</h2></summary>\n'
        f'<section id="{escape(slug)}" tabindex="-1">\n{text}</section></details>'
    )


def contents(entries: Iterable[tuple[str, str]]) -> str:
    """The table of contents: (slug, name) of each section. The button is shown where scripts run."""
    links = "".join(f'<li><a href="#{escape(slug)}">{escape(name)}</a></li>' for slug, name in entries)
    button = '<button type="button" class="fold" hidden>open all sections</button>'
    return f'<nav class="contents" aria-label="Contents"><ul>{links}</ul>{button}</nav>' if links else ""


def own_ids(text: str, slug: str) -> str:
    """HTML or SVG whose ids, and the references to them, begin with `slug`; the same text may be in a page twice."""
    text = re.sub(r'\bid="', f'id="{slug}-', text)
    return text.replace("url(#", f"url(#{slug}-").replace('href="#', f'href="#{slug}-')


def img(pixels: np.ndarray, label: str = "") -> str:
    """An image [H, W, 1, 3 or 4] uint8 as an element whose pixels stay sharp."""
    source = base64.b64encode(png(pixels)).decode()
    return f'<img class="pixels" alt="{escape(label)}" src="data:image/png;base64,{source}">'


def png(pixels: np.ndarray) -> bytes:
    """An image [H, W, 1, 3 or 4] uint8 as a PNG file's bytes."""
    file = io.BytesIO()
    pillow().fromarray(pixels.squeeze(-1) if pixels.shape[-1] == 1 else pixels).save(file, "PNG", optimize=True)
    return file.getvalue()


def listed(names: Sequence[str], last: str = "and") -> str:
    """a, b and c."""
    return f" {last} ".join(filter(None, [", ".join(names[:-1]), names[-1]])) if names else ""


def capital(text: str) -> str:
    """The text with a capital at its beginning; the rest, such as BLEU, as it is."""
    return text[:1].upper() + text[1:]


def short(name: str, most: int = 24) -> str:
    """A name shortened to fit on one line."""
    return name if len(name) <= most else name[: most - 1] + "…"


def decimal(value: float, signed: bool = False) -> str:
    """A measured value with three decimals, fewer for large values, and a minus sign; an en dash for NaN."""
    if math.isnan(value):
        return "–"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    size, sign = abs(value), "+" if signed else ""
    digits = 3 if size < 10 else 2 if size < 100 else 1
    if 0 < size < 0.0005:
        return f"{value:{sign}.2g}".replace("-", "−")
    return f"{value:{sign}.{digits}f}".replace("-", "−")


def count(value: float) -> str:
    """A whole number with separated thousands."""
    return f"{value:,.0f}" if math.isfinite(value) else "–"


def scaled(value: float, units: Sequence[str], base: float) -> str:
    """Three digits and a unit: scaled(1.2e9, ("", "K", "M", "G"), 1000) is "1.2 G"."""
    if not math.isfinite(value):
        return "–"
    power = 0
    while round(abs(value)) >= base and power < len(units) - 1:
        value, power = value / base, power + 1
    text = f"{value:.3g}" if abs(value) < 999.5 else f"{value:,.0f}"  # at 999.5, .3g writes 1e+03
    return f"{text} {units[power]}".strip()


def operations(value: float) -> str:
    """Floating point operations."""
    return scaled(value, ("", "K", "M", "G", "T", "P", "E"), 1000)


def memory(value: float) -> str:
    """Bytes."""
    return scaled(value, ("B", "KiB", "MiB", "GiB", "TiB"), 1024)


def duration(value: float) -> str:
    """Seconds, as hours and minutes once they are long."""
    if not math.isfinite(value):
        return "–"
    if value < 100:
        return f"{value:.3g} s"
    minutes, seconds = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {seconds:02d} s"


def shortened(names: Sequence[str]) -> list[str]:
    """Names without their common parts: host.blocks.0.attn.grc and host.blocks.1.attn.grc become blocks.0 and blocks.1.

    The word before a number stays, so that no name is a bare number. A single name is returned unchanged.
    """
    split = [name.split(".") for name in names]
    if len(set(names)) < 2:
        return list(names)
    shortest = min(map(len, split))
    front = next((i for i in range(shortest) if len({parts[i] for parts in split}) > 1), shortest - 1)
    back = next((i for i in range(shortest) if len({parts[-1 - i] for parts in split}) > 1), shortest)
    back = min(back, shortest - front - 1)
    if front and any(parts[front].isdigit() for parts in split):
        front -= 1
    return [".".join(parts[front : len(parts) - back]) for parts in split]
