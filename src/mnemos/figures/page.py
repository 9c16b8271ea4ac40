"""The report: one self-contained HTML file."""

from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from mnemos.atomic import write_text

from . import (
    attention_maps,
    cache_slots,
    caches,
    costs,
    curves,
    examples,
    gates,
    image_grids,
    origins,
    slot_attention,
    table,
)
from .markup import escape, listed, paragraph, plural
from .read import read
from .results import Comparison
from .style import style_sheet
from .verdict import verdict

SECTIONS = (
    ("results", "Results", table.section),
    ("curves", "Learning curves", curves.section),
    ("pictures", "Generated images", image_grids.section),
    ("examples", "Examples", examples.section),
    ("gates", "The gates", gates.section),
    ("maps", "Self-attention and memory", attention_maps.section),
    ("caches", "The caches", caches.section),
    ("slots", "What the slots hold", cache_slots.section),
    ("write-attention", "What the slots attend to", slot_attention.section),
    ("costs", "What it costs", costs.section),
    ("provenance", "Provenance", origins.section),
)


def report(folders: Sequence[Path], out: Path | None = None) -> Path:
    """Write one self-contained HTML report of runs and return its path.

    folders: run folders (recipe.json, metrics.jsonl, …) and at most one comparison folder (comparison.json).
    out: the file to write; by default report.html in the folder of the comparison, otherwise of the first run.
    The file is replaced atomically, and the same input gives the same bytes. Takes a few seconds.
    Raises InputError, with file and line, for input that is missing or malformed.
    """
    folders = [Path(folder) for folder in folders]
    comparison = read(folders)
    if out is None:
        out = next((f for f in folders if (f / "comparison.json").is_file()), folders[0]) / "report.html"
    out = Path(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_text(out, assemble(comparison))
    return out


def assemble(comparison: Comparison) -> str:
    """The report as HTML."""
    title = _title(comparison)
    style = style_sheet() + files(__package__).joinpath("page.css").read_text(encoding="utf-8")
    made = ((slug, name, make(comparison)) for slug, name, make in SECTIONS)
    # A section without content is left out, so that a report shows only what applies to its runs.
    body = "\n".join(
        f'<section id="{slug}"><h2>{escape(name)}</h2>\n{text}</section>' for slug, name, text in made if text
    )
    lead = "\n".join(paragraph(text, "lead" if i == 0 else "") for i, text in enumerate(verdict(comparison)))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{escape(title)}</title>\n<style>\n{style}\n</style></head>\n<body><main>\n"
        f"<header><h1>{escape(title)}</h1>\n{paragraph(_byline(comparison), 'byline')}</header>\n"
        f'<section id="verdict" class="abstract"><h2>In short</h2>\n{lead}</section>\n{body}\n'
        "</main></body></html>\n"
    )


_NAMED = 6  # variants at most that a title names


def _title(comparison: Comparison) -> str:
    tasks = dict.fromkeys(str(t) for run in comparison.all_runs() if (t := _field(run.recipe, "data", "is")))
    where = f" on {listed(list(tasks))}" if tasks else ""
    variants = comparison.variants
    return f"{listed(variants) if len(variants) <= _NAMED else f'{len(variants)} variants'}{where}"


def _byline(comparison: Comparison) -> str:
    """One line: the number of runs, their updates, when they finished and at which commit."""
    runs = comparison.all_runs()
    parts = [plural(len(runs), "run")] if runs else [plural(sum(row.seeds for row in comparison.rows), "run")]
    steps = list(dict.fromkeys(int(n) for run in runs if (n := _field(run.result, "steps"))))
    parts += [f"{steps[0]:,} updates each"] if len(steps) == 1 else []
    about = [run.provenance for run in runs if run.provenance] or [comparison.provenance]
    ends = sorted(str(a["finished"])[:10] for a in about if a.get("finished"))
    parts += [f"finished {ends[-1]}"] if ends else []
    commits = list(dict.fromkeys(str(a["commit"])[:10] for a in about if a.get("commit")))
    parts += [f"commit {listed(commits)}"] if commits else []
    return " · ".join(parts)


def _field(value: object, *keys: str) -> Any:
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value
