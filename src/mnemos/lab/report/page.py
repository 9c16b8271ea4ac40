"""The report: one self-contained HTML file."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mnemos.atomic import write_text

from . import (
    attention_maps,
    caches,
    costs,
    curves,
    gates,
    image_grids,
    memory_use,
    outputs,
    provenance,
    slot_attention,
    table,
)
from .markup import escape, html_page, listed, own_ids, paragraph, plural
from .read import Results, read_tasks, task_differences
from .style import style_sheet
from .table import side_by_side
from .verdict import verdict

Section = Callable[[Results], str]
PICTURES: tuple[Section, ...] = (
    curves.along_section,
    table.seeds,
    curves.section,
)  # the first that a report has opens it, below what it means
SECTIONS: tuple[tuple[str, str, Section], ...] = (
    ("results", "Results", table.section),
    ("seeds", "Seeds", table.seeds),
    ("quality-cost", "Quality against cost", costs.quality_section),
    ("along", "How far it reaches", curves.along_section),
    ("curves", "Learning curves", curves.section),
    ("memory", "Was the memory used?", memory_use.section),
    ("pictures", "Generated images", image_grids.section),
    ("detections", "Detections", outputs.detection_section),
    ("examples", "Examples", outputs.example_section),
    ("alignments", "Attention to the source", outputs.alignment_section),
    ("gates", "The gates", gates.section),
    ("maps", "Self-attention and memory", attention_maps.section),
    ("caches", "The caches", caches.content_section),
    ("slots", "What the slots hold", caches.slot_section),
    ("write-attention", "What the slots attend to", slot_attention.section),
    ("costs", "What it costs", costs.cost_section),
    ("provenance", "Provenance", provenance.section),
)


def report(folders: Sequence[Path], out: Path | None = None) -> Path:
    """Write one self-contained HTML report of runs and return its path.

    folders: run folders (recipe.json, metrics.jsonl, …) and comparison folders (comparison.json). Runs whose data,
    splits or metrics differ are not ranked: one table has all of them side by side, and each task has its own part.
    out: the file to write; by default report.html in the folder of the comparison, otherwise of the first run.
    The file is replaced atomically, and the same input gives the same bytes. Takes a few seconds.
    Raises InputError, with file and line, for input that is missing or malformed.
    """
    folders = [Path(folder) for folder in folders]
    comparisons = read_tasks(folders)
    if out is None:
        out = next((f for f in folders if (f / "comparison.json").is_file()), folders[0]) / "report.html"
    out = Path(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_text(out, assemble(comparisons))
    return out


def assemble(comparisons: Sequence[Results]) -> str:
    """The report as HTML, with a part for each task."""
    title = _title(comparisons)
    if len(comparisons) == 1:
        lead, body = _parts(comparisons[0])
    else:
        lead = "\n".join(paragraph(text, "lead" if i == 0 else "") for i, text in enumerate(_apart(comparisons)))
        parts = [_section("tasks", "All runs", side_by_side(comparisons))]
        for i, one in enumerate(comparisons):
            own, sections = _parts(one)
            part = _section("task", _title([one]), own) + "\n" + sections
            parts.append(own_ids(part, f"task-{i + 1}"))
        body = "\n".join(parts)
    header = f"\n{paragraph(_byline(comparisons), 'byline')}"
    opening = f'<section id="verdict" class="abstract"><h2>In short</h2>\n{lead}</section>'
    return html_page(title, style_sheet(), header, f"{opening}\n{body}")


def _parts(comparison: Results) -> tuple[str, str]:
    """What the results mean, the picture of it and the caveats; and the sections of the task.

    A section without content is left out, so that a report shows only what its runs have, and so is the picture's.
    """
    made = {make: make(comparison) for _, _, make in SECTIONS}
    shown = next(make for make in PICTURES if made[make])
    means, *rest = verdict(comparison)
    lead = "\n".join([paragraph(means, "lead"), made[shown], *map(paragraph, rest)])
    sections = (_section(slug, name, made[make]) for slug, name, make in SECTIONS if made[make] and make is not shown)
    return lead, "\n".join(sections)


def _section(slug: str, name: str, text: str) -> str:
    return f'<section id="{slug}"><h2>{escape(name)}</h2>\n{text}</section>'


def _apart(comparisons: Sequence[Results]) -> list[str]:
    """Why runs of several tasks are not ranked."""
    return [
        f"These runs have {len(comparisons)} tasks, so they are shown side by side and not ranked: "
        "a number of one task says nothing about a number of another.",
        f"The tasks differ in data, splits, starting weights or metric: {task_differences(comparisons)}. "
        "Each task has its own part below, with its own axes.",
    ]


_NAMED = 6  # variants at most that a title names


def _title(comparisons: Sequence[Results]) -> str:
    runs = [run for one in comparisons for run in one.all_runs()]
    tasks = dict.fromkeys(str(t) for run in runs if (t := _field(run.recipe, "data", "is")))
    where = f" on {listed(list(tasks))}" if tasks else ""
    variants = list(dict.fromkeys(name for one in comparisons for name in one.names))
    return f"{listed(variants) if len(variants) <= _NAMED else f'{len(variants)} variants'}{where}"


def _byline(comparisons: Sequence[Results]) -> str:
    """One line: the number of runs, their updates, when they finished and at which commit."""
    runs = [run for one in comparisons for run in one.all_runs()]
    rows = [row for one in comparisons for row in one.rows]
    parts = [plural(len(runs), "run")] if runs else [plural(sum(row.seeds for row in rows), "run")]
    steps = list(dict.fromkeys(run.result.steps for run in runs if run.result and run.result.steps))
    parts += [f"{steps[0]:,.0f} updates each"] if len(steps) == 1 else []
    about = [run.provenance.to_json() for run in runs if run.provenance] or [one.provenance for one in comparisons]
    ends = sorted(str(a["finished"])[:10] for a in about if a.get("finished"))
    parts += [f"finished {ends[-1]}"] if ends else []
    commits = list(dict.fromkeys(str(a["commit"])[:10] for a in about if a.get("commit")))
    parts += [f"commit {listed(commits)}"] if commits else []
    return " · ".join(parts)


def _field(value: object, *keys: str) -> Any:
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value
