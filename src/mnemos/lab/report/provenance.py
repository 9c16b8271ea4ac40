"""Where the numbers come from: what all runs share, how variants and runs differ, and the commands."""

import json
import math
import shlex

from mnemos.errors import plural
from mnemos.lab.evaluate.records import number
from mnemos.lab.run.files import Provenance, Result
from mnemos.types import JSONObject

from .markup import count, escape, listed, missing, paragraph, table, table_of
from .read import Results
from .run_records import RunRecord, flat

_VERSIONS = "versions."
_OF_ONE_RUN = {"seed", "command", "started", "finished", "resumed", "argv", "reported", "warnings"}
_MOST = 80  # characters of a value in a table
_LISTED = 12  # fields at most that are listed open
_ABSENT = object()


def section(results: Results) -> str:
    """The recipes of the variants, the machine and data of the runs, and the commands to repeat them."""
    parts = [_recipes(results), _shared(results), _data(results), _runs(results), _commands(results)]
    return "\n".join(filter(None, parts))


def _recipes(results: Results) -> str:
    first = {name: runs[0] for name in results.names if (runs := results.runs_of(name))}
    if not first:
        return missing("The comparison has no run folders, so the recipes of its variants are unknown.")
    recipes, parts = {name: flat(run.recipe) for name, run in first.items()}, []

    # --- the fields in which they differ ---
    def value(recipe: JSONObject, field: str) -> object:
        """A field of a flat recipe; null where the part that would have it is."""
        while "." in field and field not in recipe:
            field = field.rpartition(".")[0]
        return recipe.get(field, _ABSENT)

    fields = dict.fromkeys(key for one in recipes.values() for key in one if key not in ("name", "about", "train.seed"))
    rows = [
        [f"<code>{escape(field)}</code>", *(_cell(value(one, field)) for one in recipes.values())]
        for field in fields
        if len({repr(one.get(field, _ABSENT)) for one in recipes.values()}) > 1
        and any(one.get(field) not in (None, [], {}) for one in recipes.values())
    ]
    if rows:
        caption = "Every field in which the recipes differ. From recipe.json of each variant's first run."
        listing = table(caption, ["field", *recipes], rows, "fields")
        title = f"The {plural(len(rows), 'field')} in which the recipes differ"
        parts.append(listing if len(rows) <= _LISTED else f"<details><summary>{title}</summary>{listing}</details>")
    elif len(recipes) > 1:
        parts.append(missing("The recipes do not differ."))

    # --- every recipe in full, in a collapsed element ---
    for name, run in first.items():
        if sentence := rollout(run.recipe, run.result):
            parts.append(paragraph(f"{name}: {sentence}"))
        text = json.dumps(run.recipe, indent=2, ensure_ascii=False)
        parts.append(f"<details><summary>{escape(name)}</summary><pre>{escape(text)}</pre></details>")
    return "\n".join(parts)


def rollout(recipe: JSONObject, result: Result | None) -> str | None:
    """One sentence on how an update reads its segments; None if it has one segment."""
    about = flat(recipe.get("train")).get
    names = ("segment_length", "horizon", "slide", "segments")
    segment, horizon, slide, steps = (about(f"rollout.{name}") or 0 for name in names)
    steps = result.rollout_segments if result else steps or 1
    if (steps == 1 and not segment) or not all(isinstance(one, int) for one in (segment, horizon, slide, steps)):
        return None
    many = plural(steps, "segment") if steps > 1 else "segments"
    length = f" of {segment:,} tokens" if segment else ", one batch each"
    how = ", with memory replay" if about("rollout.replay") and horizon != 1 else ""
    cut = f"the gradient after every {plural(horizon, 'segment')}" if horizon else "no gradient between them"
    begins = f"the next update begins {plural(slide, 'segment')} later; " if 0 < slide < steps else ""
    return f"an update reads {many}{length}{how}; {begins}the trainer cuts {cut}."


def _cell(value: object) -> str:
    if value is _ABSENT:
        return "–"
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return escape(text if len(text) <= _MOST else text[: _MOST - 1] + "…")


def _shared(results: Results) -> str:
    runs = results.all_runs()
    abouts = [run.provenance.to_json() for run in runs if run.provenance] or [results.provenance]
    of_runs = []
    for about in filter(None, abouts):
        common = {key: value for key, value in about.items() if key not in _OF_ONE_RUN}
        if isinstance(common.get("data"), dict):  # a table of its own has the files
            common["data"] = {key: value for key, value in common["data"].items() if key != "files"}
        of_runs.append(flat(common))
    if not of_runs:
        return missing("There is no run.json: these numbers have no provenance.")

    # --- what is the same in all runs ---
    fields = dict.fromkeys(key for one in of_runs for key in one)
    same = {f: of_runs[0].get(f) for f in fields if len({repr(one.get(f)) for one in of_runs}) == 1}
    facts = {f: _cell(v) for f, v in same.items() if v not in (None, [], {}) and not f.startswith(_VERSIONS)}
    versions = [f"{f.removeprefix(_VERSIONS)} {v}" for f, v in same.items() if f.startswith(_VERSIONS) and v]
    facts |= {"versions": escape(", ".join(versions))} if versions else {}
    items = "".join(f"<dt>{escape(f)}</dt><dd>{v}</dd>" for f, v in facts.items())
    parts = [f'<dl class="facts">{items}</dl>'] if items else []

    # --- what is not ---
    if without := sum(not run.provenance for run in runs):
        parts.append(missing(f"{plural(without, 'run')} of {len(runs)} without run.json: no provenance for those."))
    if changed := [run.label for run in runs if any(process.get("dirty") for process in _processes(run.provenance))]:
        which = f"{listed(changed)} {'were' if changed[1:] else 'was'}"
        which = "Every run was" if len(changed) == len(runs) else which
        what = "trained from source with uncommitted changes: the commit alone does not reproduce the numbers."
        parts.append(missing(f"{which} {what}"))
    if apart := [f for f in fields if f not in same]:
        values = "; ".join(f"{f}: {', '.join(dict.fromkeys(str(o.get(f, '–')) for o in of_runs))}" for f in apart)
        parts.append(missing(f"Not the same in every run: {values}."))
    return "\n".join(parts)


def _data(results: Results) -> str:
    sets: dict[str, JSONObject] = {}
    of_runs = [run.provenance.data for run in results.all_runs() if run.provenance]
    for data in (results.provenance.get("data"), *of_runs):
        if isinstance(data, dict) and isinstance(data.get("files"), list):
            sets.setdefault(str(data.get("sha256")), data)
    parts = []
    for data in sets.values():
        columns = {
            "file": lambda one: f"<code>{escape(one.get('name'))}</code>",
            "bytes": lambda one: count(number(one.get("bytes"), "run.json", "bytes")),
            "SHA-256": lambda one: escape(one.get("sha256")),
        }
        listing = table_of("From run.json.", data["files"], columns, "files")
        size = count(number(data.get("bytes"), "run.json", "bytes"))
        title = f"The data: {plural(len(data['files']), 'file')} of {size} bytes"
        parts.append(f"<details><summary>{escape(title)}</summary>{listing}</details>")
    return "\n".join(parts)


def _processes(about: Provenance | None) -> list[JSONObject]:
    """The start of a run and its resumptions: {"commit", "dirty", …}."""
    return [] if about is None else [{"commit": about.commit, "dirty": about.dirty}, *about.resumed]


def _runs(results: Results) -> str:
    def commits(run: RunRecord) -> str:  # in order of its resumptions
        processes = [one for one in _processes(run.provenance) if one.get("commit")]
        return ", ".join(dict.fromkeys(str(one["commit"])[:10] + "+" * bool(one.get("dirty")) for one in processes))

    def steps(run: RunRecord) -> str:
        done = run.cost("steps")
        return count(done if math.isfinite(done) else float(run.train["step"][-1]) if run.train["step"].size else 0.0)

    def moment(value: str | None) -> str:
        return escape(value[:16].replace("T", " ")) if value else "–"

    runs = [(name, run, run.provenance or Provenance()) for name in results.names for run in results.runs_of(name)]
    if not runs:
        return missing("No run folder is named in comparison.json.")
    return table_of(
        "The runs, each with the commit that trained it (+: with uncommitted changes to tracked files of the package). "
        "From run.json and result.json of each.",
        runs,
        {
            "run": lambda one: f"<code>{escape(one[1].label)}</code>",
            "variant": lambda one: escape(one[0]),
            "seed": lambda one: escape(one[1].seed),
            "commit": lambda one: f"<code>{escape(commits(one[1]) or '–')}</code>",
            "steps": lambda one: steps(one[1]),
            "started": lambda one: moment(one[2].started),
            "finished": lambda one: moment(one[2].finished) if one[1].result else "not finished",
            "resumed": lambda one: str(len(one[2].resumed)),
        },
        "runs",
    )


def _commands(results: Results) -> str:
    abouts = [run.provenance for run in results.all_runs() if run.provenance]
    processes = [one for about in abouts for one in _processes(about)]
    own = results.provenance.get("command")
    lines = [own] if isinstance(own, list) else [about.command for about in abouts if about.command]
    commands = list(dict.fromkeys(shlex.join(map(str, words)) for words in lines))
    if not commands:
        return "<h3>Commands</h3>" + missing("No run.json gives the command, so the report cannot name it.")
    for one in processes:  # what continued a run up to another number of steps
        words = one.get("command")
        if isinstance(words, list) and "step" in one and any("--train.steps" in str(word) for word in words):
            commands.append(f"{shlex.join(map(str, words))}  # resumed after update {one['step']:,}")
    commits = list(dict.fromkeys(str(a["commit"]) for a in processes or [results.provenance] if a.get("commit")))
    checkout = [f"git checkout {commits[0]}"] if len(commits) == 1 else []
    return f"<h3>Commands</h3><pre>{escape(chr(10).join([*checkout, *commands]))}</pre>"
