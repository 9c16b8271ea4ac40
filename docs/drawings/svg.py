"""Parts of drawings: boxes, text, arrows and matrices on a card that is light or dark as the reader's system is."""

from collections.abc import Sequence
from html import escape
from pathlib import Path

# Light and dark values of each colour. The card has its own background, so that a drawing can be read on any page.
COLOURS = {
    "card": ("#ffffff", "#161b22"),
    "ink": ("#1f2328", "#e6edf3"),
    "soft": ("#656d76", "#9198a1"),
    "line": ("#8c959f", "#7d8590"),
    "plain": ("#eaeef2", "#2b323b"),
    "blue": ("#cfe3ff", "#1f4480"),
    "green": ("#c8ecd2", "#1d5731"),
    "orange": ("#ffe0c2", "#7a4113"),
    "red": ("#ffd4d2", "#7d2a2a"),
    "strong": ("#2f6feb", "#6ea8ff"),
}


class Drawing:
    """A drawing of `width` × `height` pixels; `title` is read aloud in its place."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.width, self.height, self.title = width, height, title
        self.parts: list[str] = []

    def box(self, x: float, y: float, w: float, h: float, text: str = "", fill: str = "plain", size: int = 13) -> None:
        """A rounded box with centred lines of text."""
        self.parts.append(f'<rect class="{fill} edge" x="{x}" y="{y}" width="{w}" height="{h}" rx="5"/>')
        lines = text.split("\n") if text else []
        for i, line in enumerate(lines):
            self.text(
                x + w / 2, y + h / 2 + (i - (len(lines) - 1) / 2) * (size + 4) + size * 0.35, line, "middle", size
            )

    def text(
        self,
        x: float,
        y: float,
        text: str,
        anchor: str = "start",
        size: int = 13,
        colour: str = "ink",
        bold: bool = False,
    ) -> None:
        """A line of text whose baseline is at y; `_3`, `^T`: an index and an exponent of one character; `__`: _."""
        weight = ' font-weight="600"' if bold else ""
        spans, i, back = "", 0, 0.0  # back: how far the next characters are to return to the line
        while i < len(text):
            plain = text[i : i + 2] == "__"
            shifted = text[i] in "_^" and i + 1 < len(text) and not plain
            letter = escape(text[i + 1] if shifted else text[i])
            shift = ({"_": 0.25, "^": -0.4}[text[i]] * size) if shifted else 0.0
            height = size * 0.72 if shifted else size
            moved = f'<tspan dy="{shift + back:.1f}" font-size="{height:.0f}">{letter}</tspan>'
            spans += moved if shift + back else letter
            back = -shift
            i += 2 if shifted or plain else 1
        where = f'x="{x}" y="{y}" text-anchor="{anchor}" font-size="{size}"{weight}'
        self.parts.append(f'<text class="{colour}" {where}>{spans}</text>')

    def arrow(self, *points: tuple[float, float], dashed: bool = False, strong: bool = False) -> None:
        """An arrow through points."""
        path = "M" + " L".join(f"{x},{y}" for x, y in points)
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        kind = "strong" if strong else "line"
        self.parts.append(f'<path class="stroke-{kind}" d="{path}" fill="none"{dash} marker-end="url(#{kind})"/>')

    def line(self, x1: float, y1: float, x2: float, y2: float, strong: bool = False, dashed: bool = False) -> None:
        """A line without a head."""
        dash = ' stroke-dasharray="4 4"' if dashed else ""
        kind = "strong" if strong else "line"
        self.parts.append(f'<line class="stroke-{kind}" x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}"{dash}/>')

    def dot(self, x: float, y: float, r: float = 4) -> None:
        """A filled dot."""
        self.parts.append(f'<circle class="strong" cx="{x}" cy="{y}" r="{r}"/>')

    def cells(self, x: float, y: float, rows: Sequence[str], size: float = 16, colours: str = "") -> None:
        """A matrix of squares, a character each; of `colours` the letter of a square's fill (p, b, g, o, r)."""
        names = {"p": "plain", "b": "blue", "g": "green", "o": "orange", "r": "red", " ": ""}
        for i, row in enumerate(rows):
            for j, letter in enumerate(row):
                if names[letter]:
                    at = f'x="{x + j * size}" y="{y + i * size}" width="{size}" height="{size}"'
                    self.parts.append(f'<rect class="{names[letter]} edge" {at}/>')

    def write(self, name: str) -> None:
        """Write docs/NAME.svg."""
        light, dark = (
            "".join(
                f".{name}{{fill:{pair[i]}}}.stroke-{name}{{stroke:{pair[i]};stroke-width:1.5}}"
                for name, pair in COLOURS.items()
            )
            + f".edge{{stroke:{COLOURS['line'][i]};stroke-width:1}}"
            for i in (0, 1)
        )
        heads = "".join(
            f'<marker id="{name}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
            f'<path class="{name}" d="M0,0 L8,4 L0,8 z"/></marker>'
            for name in ("line", "strong")
        )
        size = f'viewBox="0 0 {self.width} {self.height}" width="{self.width}"'
        fonts = "system-ui,-apple-system,Segoe UI,Helvetica,Arial,sans-serif"
        Path(__file__).parents[1].joinpath(f"{name}.svg").write_text(
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" font-family="{fonts}">'
            f"<title>{escape(self.title)}</title>"
            f"<style>{light}@media(prefers-color-scheme:dark){{{dark}}}</style><defs>{heads}</defs>"
            f'<rect class="card" width="{self.width}" height="{self.height}" rx="8"/>{"".join(self.parts)}</svg>\n',
            encoding="utf-8",
        )
