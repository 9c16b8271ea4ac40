"""Where the numbers come from: what all runs share, how variants and runs differ, and the commands."""

import json
import math
import shlex
from collections.abc import Iterable

from mnemos.lab.evaluate.records import number
from mnemos.lab.run.files import Provenance, Result
from mnemos.types import JSONObject

from .markup import count, escape, listed, missing, paragraph, plural, table
from .read import Results
from .run_records import flat

_VERSIONS = "versions."
_PER_RUN = {"seed", "command", "started", "finished", "resumed", "argv", "reported"}
_MOST = 80  # characters of a value in a table
_LISTED = 12  # fields at most that are listed open


def section(results: Results) -> str:
    """The recipes of the variants, the machine and data of the runs, and the commands to repeat them."""
    parts = [_recipes(results), _shared(results), _data(results), _runs(results), _reproduce(results)]
    return "\n".join(filter(None, parts))


def _recipes(results: Results) -> str:
    """The fields in which the recipes differ, and every recipe in full in a collapsed element."""
    recipes = {name: runs[0].recipe for name in results.names if (runs := results.runs_of(name))}
    if not recipes:
        return missing("The comparison has no run folders, so the recipes of its variants are unknown.")
    flattened = {name: flat(recipe) for name, recipe in recipes.items()}
    fields = dict.fromkeys(key for one in flattened.values() for key in one)
    skip = {"name", "about", "train.seed"}
    absent = object()
    differing = [f for f in fields if f not in skip and len({repr(o.get(f, absent)) for o in flattened.values()}) > 1]
    parts = []
    if len(recipes) > 1 and differing:
        rows = [
            [f"<code>{escape(f)}</code>", *(_cell(_value(one, f, absent), absent) for one in flattened.values())]
            for f in differing
            if any(one.get(f) not in (None, [], {}) for one in flattened.values())
        ]
        caption = "Every field in which the recipes differ. From recipe.json of each variant's first run."
        listing = table(caption, ["field", *recipes], rows, "fields")
        title = f"The {plural(len(rows), 'field')} in which the recipes differ"
        parts.append(listing if len(rows) <= _LISTED else f"<details><summary>{title}</summary>{listing}</details>")
    elif len(recipes) > 1:
        parts.append(missing("The recipes do not differ."))
    for name, recipe in recipes.items():
        rolled = rollout(recipe, results.runs_of(name)[0].result)
        parts += [paragraph(f"{name}: {rolled}")] if rolled else []
        text = json.dumps(recipe, indent=2, ensure_ascii=False)
        parts.append(f"<details><summary>{escape(name)}</summary><pre>{escape(text)}</pre></details>")
    return "\n".join(parts)


def _value(recipe: JSONObject, field: str, absent: object) -> object:
    """A field of a flat recipe; null where the part that would have it is."""
    while "." in field and field not in recipe:
        field = field.rpartition(".")[0]
    return recipe.get(field, absent)


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


def _cell(value: object, absent: object) -> str:
    if value is absent:
        return "–"
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return escape(text if len(text) <= _MOST else text[: _MOST - 1] + "…")


def _shared(results: Results) -> str:
    """What all runs have in common, and a warning for everything that weakens the numbers."""
    runs = results.all_runs()
    known = [_kept(run.provenance.to_json()) for run in runs if run.provenance]
    if not known and results.provenance:
        known = [_kept(results.provenance)]
    if not known:
        return missing("There is no run.json: these numbers have no provenance.")
    fields = dict.fromkeys(key for one in known for key in one)
    common = {f: known[0].get(f) for f in fields if len({repr(one.get(f)) for one in known}) == 1}
    facts = {f: _cell(v, None) for f, v in common.items() if v not in (None, [], {}) and not f.startswith(_VERSIONS)}
    versions = [f"{f.removeprefix(_VERSIONS)} {v}" for f, v in common.items() if f.startswith(_VERSIONS) and v]
    facts |= {"versions": escape(", ".join(versions))} if versions else {}
    items = "".join(f"<dt>{escape(f)}</dt><dd>{v}</dd>" for f, v in facts.items())
    parts = [f'<dl class="facts">{items}</dl>'] if items else []
    without = sum(not run.provenance for run in runs)
    if without:
        parts.append(missing(f"{plural(without, 'run')} of {len(runs)} without run.json: no provenance for those."))
    if changed := [run.label for run in runs if any(process.get("dirty") for process in _processes(run.provenance))]:
        which = "Every run" if len(changed) == len(runs) else listed(changed)
        was = "was" if "Every run" in which or len(changed) == 1 else "were"
        what = "trained from source with uncommitted changes: the commit alone does not reproduce the numbers."
        parts.append(missing(f"{which} {was} {what}"))
    apart = [f for f in fields if f not in common]
    if apart:
        values = "; ".join(f"{f}: {', '.join(dict.fromkeys(str(o.get(f, '–')) for o in known))}" for f in apart)
        parts.append(missing(f"Not the same in every run: {values}."))
    return "\n".join(parts)


def _kept(about: JSONObject) -> JSONObject:
    """The part of a run's provenance that is compared between runs, flat; `_data` lists the files of the data."""
    kept = {key: value for key, value in about.items() if key not in _PER_RUN}
    if isinstance(kept.get("data"), dict):
        kept["data"] = {key: value for key, value in kept["data"].items() if key != "files"}
    return flat(kept)


def _data(results: Results) -> str:
    """The data files of the runs, one collapsed table for each set of files."""
    runs = [run.provenance for run in results.all_runs() if run.provenance]
    found = [results.provenance.get("data"), *(about.data for about in runs)]
    sets: dict[str, JSONObject] = {}
    for data in found:
        if isinstance(data, dict) and isinstance(data.get("files"), list):
            sets.setdefault(str(data.get("sha256")), data)
    parts = []
    for data in sets.values():
        rows = [
            [f"<code>{escape(one.get('name'))}</code>", count(_bytes(one)), escape(one.get("sha256"))]
            for one in data["files"]
            if isinstance(one, dict)
        ]
        listing = table("From run.json.", ["file", "bytes", "SHA-256"], rows, "files")
        title = f"The data: {plural(len(rows), 'file')} of {count(_bytes(data))} bytes"
        parts.append(f"<details><summary>{escape(title)}</summary>{listing}</details>")
    return "\n".join(parts)


def _bytes(data: JSONObject) -> float:
    return number(data.get("bytes"), "run.json", "bytes")


def _processes(about: Provenance | None) -> list[JSONObject]:
    """The start of a run and its resumptions: {"commit", "dirty", …}."""
    return [] if about is None else [{"commit": about.commit, "dirty": about.dirty}, *about.resumed]


def _commit(about: Provenance) -> str:
    """The commits that trained a run, in order of its resumptions; + marks uncommitted changes."""
    said = [str(one["commit"])[:10] + "+" * bool(one.get("dirty")) for one in _processes(about) if one.get("commit")]
    return ", ".join(dict.fromkeys(said)) or "–"


def _runs(results: Results) -> str:
    rows = []
    for name in results.names:
        for run in results.runs_of(name):
            about, steps = run.provenance or Provenance(), run.cost("steps")
            if not math.isfinite(steps):
                steps = run.train["step"][-1] if run.train["step"].size else 0
            rows.append(
                [
                    f"<code>{escape(run.label)}</code>",
                    escape(name),
                    escape(run.seed),
                    f"<code>{escape(_commit(about))}</code>",
                    count(float(steps)),
                    escape(_moment(about.started)),
                    escape(_moment(about.finished) if run.result else "not finished"),
                    escape(len(about.resumed)),
                ]
            )
    if not rows:
        return missing("No run folder is named in comparison.json.")
    head = ["run", "variant", "seed", "commit", "steps", "started", "finished", "resumed"]
    caption = (
        "The runs, each with the commit that trained it (+: with uncommitted changes to tracked files of the package). "
        "From run.json and result.json of each."
    )
    return table(caption, head, rows, "runs")


def _moment(value: str | None) -> str:
    """A time to the minute, as written."""
    return "–" if not value else value[:16].replace("T", " ")


def command(words: Iterable[object]) -> str:
    """A command line as a user types it."""
    return shlex.join(map(str, words))


def longer(resumed: JSONObject) -> str:
    """The command that continued a run up to another number of steps; "" for any other process of a run."""
    words = resumed.get("command")
    if not isinstance(words, list) or "step" not in resumed or not any("--train.steps" in str(word) for word in words):
        return ""
    return f"{command(words)}  # resumed after update {resumed['step']:,}"


def _reproduce(results: Results) -> str:
    runs = [run.provenance for run in results.all_runs() if run.provenance]
    processes = [one for about in runs for one in _processes(about)]
    given = results.provenance.get("command")
    own = dict.fromkeys(command(about.command) for about in runs if about.command)
    commands = [command(given)] if isinstance(given, list) else list(own)
    if not commands:
        return "<h3>Commands</h3>" + missing("No run.json gives the command, so the report cannot name it.")
    commands += [more for one in processes if (more := longer(one))]
    commits = list(dict.fromkeys(str(a["commit"]) for a in processes or [results.provenance] if a.get("commit")))
    lines = [f"git checkout {commits[0]}"] if len(commits) == 1 else []
    return f"<h3>Commands</h3><pre>{escape(chr(10).join([*lines, *commands]))}</pre>"
