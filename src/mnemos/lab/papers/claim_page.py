"""The page of a reproduced claim: our tables beside the paper's, notes and figures, in the shell of all pages."""

import base64
from pathlib import Path

from mnemos.atomic import read_bytes, write_text
from mnemos.lab.report.markup import contents, escape, figure, folded, paragraph, plural, prose, table
from mnemos.lab.report.shell import html_page, script
from mnemos.types import JSONObject

from .findings import Finding, cell_text

_MOST = 4_000_000  # bytes of the figures of a page


def write_claim_page(result: JSONObject, finding: Finding, path: Path) -> None:
    """Write the page of one claim. result: what its JSON file holds. The file is replaced atomically."""
    first, *others = [_table(one.title, one.columns, one.rows) for one in finding.tables] or [""]
    notes = "".join(f"<li>{prose(note)}</li>" for note in finding.notes)
    figures = _figures([file for file in finding.files if file.suffix == ".png" and file.is_file()])
    written = [file for file in finding.files if file.suffix != ".png"]
    items = [f"<li><code>{escape(one)}</code></li>" for one in (*written, *finding.runs)]
    sections = {
        "tables": ("Further tables", "\n".join(filter(None, others))),
        "figures": ("Figures", figures),
        "runs": ("Pages and runs", f"<ul>{''.join(items)}</ul>" if items else ""),
        "provenance": ("Provenance", _facts(result)),
    }
    known = {slug: part for slug, part in sections.items() if part[1]}
    opening = [
        paragraph(f"The claim: {result['says']}", "lead"),
        first,
        f'<ul class="caveats">{notes}</ul>' if notes else "",
        contents((slug, name) for slug, (name, _) in known.items()),
    ]
    body = f'<section id="verdict" class="opening">\n{chr(10).join(filter(None, opening))}</section>\n'
    body += "\n".join(folded(slug, name, text, slug == "figures") for slug, (name, text) in known.items())
    title = f"{result['title']}: {result['about']}"
    byline = f"{result['paper']}/{result['claim']}"
    byline += f" · {plural(len(finding.runs), 'run')}" if finding.runs else ""
    write_text(path, html_page(title, body, paragraph(byline, "byline"), [script("page.js")]))


def _table(title: str, columns: list[str], rows: list) -> str:
    return table(title, columns, [[escape(cell_text(cell)) for cell in row] for row in rows], "claims")


def _figures(files: list[Path]) -> str:
    parts, size = [], 0
    for file in files:
        data = read_bytes(file)
        if size + len(data) > _MOST:
            parts.append(paragraph(f"{file}: left out, for the size of this page.", "missing"))
            continue
        size += len(data)
        picture = f'<img alt="{escape(file.stem)}" src="data:image/png;base64,{base64.b64encode(data).decode()}">'
        parts.append(figure([picture], file.name, "full"))
    return "\n".join(parts)


def _facts(result: JSONObject) -> str:
    facts = {**result["provenance"], "seconds": f"{result['seconds']:.1f}"}
    items = "".join(
        f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>"
        for name, value in facts.items()
        if value not in (None, [], {}) and not isinstance(value, dict | list)
    )
    return f'<dl class="facts">{items}</dl>'
