"""Where the numbers come from: the fields in which recipes differ, the commits of the runs, and the commands."""

import json
import math
import shlex

from mnemos.errors import plural
from mnemos.lab.evaluate.records import flat
from mnemos.lab.run.files import Provenance
from mnemos.types import JSONObject

from .markup import count, escape, missing, table, table_of
from .read import Results
from .run_records import RunRecord

_MOST = 80  # characters of a value in a table
_LISTED = 12  # fields at most that are listed open
_ABSENT = object()


def section(results: Results) -> str:
    """The differences between the variants' recipes, the runs, and the commands to repeat them."""
    return "\n".join([_recipes(results), _runs(results), _commands(results)])


def _recipes(results: Results) -> str:
    recipes = {name: flat(runs[0].recipe) for name in results.names if (runs := results.runs_of(name))}
    if len(recipes) < 2:
        return ""

    def value(recipe: JSONObject, field: str) -> object:
        """A field of a flat recipe; null where the part that would have it is."""
        while "." in field and field not in recipe:
            field = field.rpartition(".")[0]
        return recipe.get(field, _ABSENT)

    def cell(value: object) -> str:
        if value is _ABSENT:
            return "–"
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        return escape(text if len(text) <= _MOST else text[: _MOST - 1] + "…")

    fields = dict.fromkeys(key for one in recipes.values() for key in one if key not in ("name", "about", "train.seed"))
    rows = [
        [f"<code>{escape(field)}</code>", *(cell(value(one, field)) for one in recipes.values())]
        for field in fields
        if len({repr(one.get(field, _ABSENT)) for one in recipes.values()}) > 1
        and any(one.get(field) not in (None, [], {}) for one in recipes.values())
    ]
    if not rows:
        return missing("The recipes do not differ.")
    caption = "Every field in which the recipes differ. From recipe.json of each variant's first run."
    listing = table(caption, ["field", *recipes], rows, "fields")
    title = f"The {plural(len(rows), 'field')} in which the recipes differ"
    return listing if len(rows) <= _LISTED else f"<details><summary>{title}</summary>{listing}</details>"


def _runs(results: Results) -> str:
    def commits(about: Provenance) -> str:  # of its start, and of what continued it
        processes = [{"commit": about.commit, "dirty": about.dirty}, *about.resumed]
        names = (str(one["commit"])[:10] + "+" * bool(one.get("dirty")) for one in processes if one.get("commit"))
        return ", ".join(dict.fromkeys(names))

    def steps(run: RunRecord) -> str:
        done = run.cost("steps")
        return count(done if math.isfinite(done) else float(run.train["step"][-1]) if run.train["step"].size else 0.0)

    def moment(value: str | None) -> str:
        return escape(value[:16].replace("T", " ")) if value else "–"

    runs = [(name, run, run.provenance or Provenance()) for name in results.names for run in results.runs_of(name)]
    if not runs:
        return missing("No run folder is named in comparison.json.")
    return table_of(
        "The runs, each with the commit that trained it (+: with uncommitted changes to tracked files of the package, "
        "so that the commit alone does not reproduce it). From run.json and result.json of each.",
        runs,
        {
            "run": lambda one: f"<code>{escape(one[1].label)}</code>",
            "variant": lambda one: escape(one[0]),
            "seed": lambda one: escape(one[1].seed),
            "commit": lambda one: f"<code>{escape(commits(one[2]) or '–')}</code>",
            "steps": lambda one: steps(one[1]),
            "started": lambda one: moment(one[2].started),
            "finished": lambda one: moment(one[2].finished) if one[1].result else "not finished",
        },
        "runs",
    )


def _commands(results: Results) -> str:
    own = results.provenance.get("command")
    lines = [own] if isinstance(own, list) else [run.provenance.command for run in results.all_runs() if run.provenance]
    commands = dict.fromkeys(shlex.join(map(str, words)) for words in lines if words)
    if not commands:
        return missing("No run.json gives the command, so the report cannot name it.")
    return f"<h3>Commands</h3><pre>{escape(chr(10).join(commands))}</pre>"
