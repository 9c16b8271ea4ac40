"""The report: one self-contained HTML file, whose first screen answers what was asked."""

from collections.abc import Callable, Sequence
from pathlib import Path

from mnemos import registry
from mnemos.atomic import check_output_file, write_text
from mnemos.errors import plural
from mnemos.lab.evaluate.records import flat

from . import curves, gated_caches, memory_use, outputs, provenance, scores
from .markup import contents, escape, folded, listed, own_ids, paragraph, prose
from .read import Results, read_tasks, task_differences
from .shell import chart_library, html_page, script
from .verdict import caveats, headline, summary_table

Section = Callable[[Results], str]
# The first of these that a report has stands on its first screen.
PICTURES: tuple[Section, ...] = (curves.by_x_figure, scores.seeds, curves.section)
SECTIONS: tuple[tuple[str, str, Section], ...] = (
    ("results", "Results", scores.section),
    ("seeds", "Seeds", scores.seeds),
    ("along", "How far it reaches", curves.by_x_table),
    ("curves", "Learning curves", curves.section),
    ("memory", "Was the memory used?", memory_use.section),
    ("pictures", "Generated images", outputs.picture_section),
    ("detections", "Detections", outputs.detection_section),
    ("examples", "Examples", outputs.example_section),
    ("gates", "The gates", gated_caches.gate_section),
    ("maps", "Self-attention and memory", gated_caches.map_section),
    ("costs", "What it costs", scores.costs),
    ("provenance", "Provenance", provenance.section),
)
_NAMED = 2  # variants at most that a title names; the others are named by the first table


def report(folders: Sequence[Path], out: Path | None = None) -> Path:
    """Write one self-contained HTML report of runs and return its path.

    folders: run folders, or comparison folders. Runs whose data, splits or metrics differ are not ranked: each task has
    its own part. out: the file to write; by default report.html in the first folder. The same input gives the same
    bytes. Raises InputError, with file and line, for input that is missing or malformed.
    """
    if out is not None:
        check_output_file(out)
    tasks = read_tasks(folders)
    out = Path(folders[0]) / "report.html" if out is None else Path(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_text(out, assemble(tasks))
    return out


def assemble(tasks: Sequence[Results]) -> str:
    """The report as HTML, with a part for each task."""
    if len(tasks) == 1:
        opening, body = _parts(tasks[0])
    else:
        lead = (
            f"These runs have {len(tasks)} tasks, so they are shown side by side and not ranked: a number of one task "
            "says nothing about a number of another."
        )
        why = (
            f"The tasks differ in data, splits, starting weights or metric: {task_differences(tasks)}. Each task has "
            "its own part below, with its own axes."
        )
        links = contents((f"task-{i + 1}-task", _title([one])) for i, one in enumerate(tasks))
        opening = "\n".join([paragraph(lead, "lead"), paragraph(why), links])
        parts = []
        for i, one in enumerate(tasks):
            own, sections = _parts(one)
            part = f'<section id="task"><h2>{escape(_title([one]))}</h2>\n{own}</section>\n{sections}'
            parts.append(own_ids(part, f"task-{i + 1}"))
        body = "\n".join(parts)

    # --- what is asked: the first line of the documentation of each task that this program knows ---
    names = [name for name in _data_names(tasks) if name in registry.names("data")]
    questions = "".join(paragraph(f"“{name}”: {registry.about('data', name)}", "question") for name in names)
    return html_page(
        _title(tasks),
        f'<section id="verdict" class="opening">\n{opening}</section>\n{body}',
        f"{questions}{paragraph(_byline(tasks), 'byline')}",
        [chart_library(), script("page.js")],
    )


def _parts(results: Results) -> tuple[str, str]:
    """The first screen, and the sections; one without content is left out, and so is the picture's."""
    html = {make: make(results) for make in dict.fromkeys([*PICTURES, *(make for _, _, make in SECTIONS)])}
    picture = next((make for make in PICTURES if html[make]), None)
    shown = [(slug, name, html[make]) for slug, name, make in SECTIONS if html[make] and make is not picture]
    warnings = "".join(f"<li>{prose(text)}</li>" for text in caveats(results))
    opening = [
        paragraph(headline(results), "lead"),
        html[picture] if picture else "",
        summary_table(results),
        f'<ul class="caveats">{warnings}</ul>' if warnings else "",
        contents((slug, name) for slug, name, _ in shown),
    ]
    return "\n".join(filter(None, opening)), "\n".join(folded(slug, name, text) for slug, name, text in shown)


def _data_names(tasks: Sequence[Results]) -> list[str]:
    runs = (run for one in tasks for run in one.all_runs())
    return list(dict.fromkeys(str(name) for run in runs if (name := flat(run.recipe).get("data.is"))))


def _title(tasks: Sequence[Results]) -> str:
    names = [f"“{name}”" for name in _data_names(tasks)]
    where = f" on the {'task' if len(names) == 1 else 'tasks'} {listed(names)}" if names else ""
    variants = list(dict.fromkeys(name for one in tasks for name in one.names))
    return f"{listed(variants) if len(variants) <= _NAMED else f'{len(variants)} variants'}{where}"


def _byline(tasks: Sequence[Results]) -> str:
    runs, rows = [run for one in tasks for run in one.all_runs()], [row for one in tasks for row in one.rows]
    seeds = {row.seeds for row in rows}
    parts = [plural(len(runs) or sum(row.seeds for row in rows), "run")]
    parts += [f"{max(seeds)} seeds of each variant"] if len(seeds) == 1 and max(seeds) > 1 and len(rows) > 1 else []
    steps = {run.result.steps if run.result else None for run in runs}
    if len(steps) == 1 and (number := steps.pop()):
        parts.append(plural(number, "update") + (" each" if len(runs) > 1 else ""))
    about = [run.provenance for run in runs if run.provenance]
    parts += [f"finished {end[:10]}" for end in sorted(one.finished for one in about if one.finished)[-1:]]
    commits = list(dict.fromkeys(one.commit[:10] for one in about if one.commit))
    return " · ".join([*parts, *([f"commit {listed(commits)}"] if commits else [])])
