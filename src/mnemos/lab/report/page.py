"""The report: one self-contained HTML file, whose first screen answers what was asked."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mnemos import registry
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
from .markup import contents, escape, folded, listed, own_ids, paragraph, plural, prose
from .read import Results, read_tasks, task_differences
from .shell import chart_library, html_page, script
from .table import side_by_side
from .verdict import arms, caveats, headline

Section = Callable[[Results], str]
# The first of these that a report has stands on its first screen.
PICTURES: tuple[Section, ...] = (curves.along_figure, table.seeds, curves.section)
SECTIONS: tuple[tuple[str, str, Section], ...] = (
    ("results", "Results", table.section),
    ("seeds", "Seeds", table.seeds),
    ("quality-cost", "Quality against cost", costs.quality_section),
    ("along", "How far it reaches", curves.along_table),
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
    return write_report(folders, out)[0]


def write_report(folders: Sequence[Path], out: Path | None = None) -> tuple[Path, str]:
    """As `report`; returns the path, and a sentence that says what to look at first."""
    folders = [Path(folder) for folder in folders]
    comparisons = read_tasks(folders)
    if out is None:
        out = next((f for f in folders if (f / "comparison.json").is_file()), folders[0]) / "report.html"
    out = Path(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_text(out, assemble(comparisons))
    return out, _first(comparisons)


def _first(comparisons: Sequence[Results]) -> str:
    """What to look at first."""
    if len(comparisons) > 1:
        return "Look first at the table of all runs; each task has a part of its own below."
    found = curves.read_along(comparisons[0])
    if found is not None:
        picture = f"the picture of {found.metric} by {found.x}"
    elif len(comparisons[0].all_runs()) > 1:
        picture = "the picture of the score of every seed"
    else:
        picture = "the learning curves"
    return f"Look first at {picture}. {headline(comparisons[0])}"


def assemble(comparisons: Sequence[Results], watched: str = "") -> str:
    """The report as HTML, with a part for each task. watched: HTML above it, of a page that is served and kept new."""
    if len(comparisons) == 1:
        opening, body = _parts(comparisons[0])
    else:
        opening = "\n".join(paragraph(text, "lead" if i == 0 else "") for i, text in enumerate(_apart(comparisons)))
        opening += "\n" + contents((f"task-{i + 1}-task", _title([one])) for i, one in enumerate(comparisons))
        parts = [folded("tasks", "All runs", side_by_side(comparisons), opened=True)]
        for i, one in enumerate(comparisons):
            own, sections = _parts(one)
            part = f'<section id="task"><h2>{escape(_title([one]))}</h2>\n{own}</section>\n{sections}'
            parts.append(own_ids(part, f"task-{i + 1}"))
        body = "\n".join(parts)
    return html_page(
        _title(comparisons),
        f'<section id="verdict" class="opening">\n{opening}</section>\n{body}',
        f"{_tasks(comparisons)}{paragraph(_byline(comparisons), 'byline')}{watched}",
        [chart_library(), script("page.js"), *([script("watch.js")] if watched else [])],
        served=bool(watched),
    )


def _parts(comparison: Results) -> tuple[str, str]:
    """The first screen (one sentence, its picture, a row for each variant, caveats, contents), and the sections.

    A section without content is left out, so that a report shows only what its runs have, and so is the picture's.
    """
    made = {make: make(comparison) for make in dict.fromkeys([*PICTURES, *(make for _, _, make in SECTIONS)])}
    shown = next((make for make in PICTURES if made[make]), None)
    texts = {slug: made[make] for slug, _, make in SECTIONS if made[make] and make is not shown}
    warned = "".join(f"<li>{prose(text)}</li>" for text in caveats(comparison))
    opening = [
        paragraph(headline(comparison), "lead"),
        made[shown] if shown else "",
        arms(comparison),
        f'<ul class="caveats">{warned}</ul>' if warned else "",
        contents((slug, name) for slug, name, _ in SECTIONS if slug in texts),
    ]
    sections = (folded(slug, name, texts[slug]) for slug, name, _ in SECTIONS if slug in texts)
    return "\n".join(filter(None, opening)), "\n".join(sections)


def _apart(comparisons: Sequence[Results]) -> list[str]:
    """Why runs of several tasks are not ranked."""
    return [
        f"These runs have {len(comparisons)} tasks, so they are shown side by side and not ranked: "
        "a number of one task says nothing about a number of another.",
        f"The tasks differ in data, splits, starting weights or metric: {task_differences(comparisons)}. "
        "Each task has its own part below, with its own axes.",
    ]


_NAMED = 2  # variants at most that a title names; the others are named by the first table


def _title(comparisons: Sequence[Results]) -> str:
    runs = [run for one in comparisons for run in one.all_runs()]
    tasks = dict.fromkeys(str(t) for run in runs if (t := _field(run.recipe, "data", "is")))
    kinds = [f"“{task}”" for task in tasks]
    where = f" on the {'task' if len(kinds) == 1 else 'tasks'} {listed(kinds)}" if kinds else ""
    variants = list(dict.fromkeys(name for one in comparisons for name in one.names))
    return f"{listed(variants) if len(variants) <= _NAMED else f'{len(variants)} variants'}{where}"


def _tasks(comparisons: Sequence[Results]) -> str:
    """What is asked: the first line of the documentation of each task that this program knows."""
    runs = (run for one in comparisons for run in one.all_runs())
    kinds = dict.fromkeys(str(name) for run in runs if (name := _field(run.recipe, "data", "is")))
    known = registry.names("data")
    said = [f"“{kind}”: {registry.about('data', kind)}" for kind in kinds if kind in known]
    return "".join(paragraph(text, "question") for text in said)


def _byline(comparisons: Sequence[Results]) -> str:
    """One line: the number of runs, their updates, when they finished and at which commit."""
    runs = [run for one in comparisons for run in one.all_runs()]
    rows = [row for one in comparisons for row in one.rows]
    parts = [plural(len(runs), "run")] if runs else [plural(sum(row.seeds for row in rows), "run")]
    seeds = {row.seeds for row in rows}
    parts += [f"{max(seeds)} seeds of each variant"] if len(seeds) == 1 and max(seeds) > 1 and len(rows) > 1 else []
    steps = {run.result.steps if run.result else None for run in runs}
    parts += [f"{steps.pop():,.0f} updates each"] if len(steps) == 1 and all(steps) else []
    about = [run.provenance.to_json() for run in runs if run.provenance] or [one.provenance for one in comparisons]
    tested = {run.result.scored_rows.get("test", 0) for run in runs if run.result}
    parts += [plural(tested.pop(), "test row")] if len(tested) == 1 and max(tested) else []
    ends = sorted(str(a["finished"])[:10] for a in about if a.get("finished"))
    parts += [f"finished {ends[-1]}"] if ends else []
    commits = list(dict.fromkeys(str(a["commit"])[:10] for a in about if a.get("commit")))
    parts += [f"commit {listed(commits)}"] if commits else []
    return " · ".join(parts)


def _field(value: object, *keys: str) -> Any:
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value
