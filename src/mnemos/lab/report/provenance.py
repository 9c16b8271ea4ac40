"""Where the numbers come from: the fields in which recipes differ, the commits of the runs, and the commands."""

import json
import shlex

from mnemos.lab.evaluate.records import flat
from mnemos.lab.run.files import Provenance
from mnemos.types import JSONObject

from .markup import count, escape, missing, short, table, table_of
from .read import Results
from .run_records import RunRecord

_MOST = 80  # characters of a value in a table


def section(results: Results) -> str:
    """The differences between the variants' recipes, the runs, and the commands to repeat them."""
    return "\n".join(filter(None, [_recipes(results), _runs(results), _commands(results)]))


def _recipes(results: Results) -> str:
    recipes = {name: flat(runs[0].recipe) for name in results.names if (runs := results.runs_of(name))}
    fields = dict.fromkeys(key for one in recipes.values() for key in one if key not in ("name", "about", "train.seed"))

    def cell(recipe: JSONObject, field: str) -> str:
        while "." in field and field not in recipe:  # null where the part that would have it is
            field = field.rpartition(".")[0]
        value = recipe.get(field, "–")
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        return escape(short(text, _MOST))

    rows = []
    for field in fields:
        values = [one.get(field) for one in recipes.values()]
        if any(value != values[0] for value in values) and any(value not in (None, [], {}) for value in values):
            rows.append([f"<code>{escape(field)}</code>", *(cell(one, field) for one in recipes.values())])
    caption = "Every field in which the recipes differ. From recipe.json of each variant's first run."
    return table(caption, ["field", *recipes], rows, "fields")


def _runs(results: Results) -> str:
    def commits(about: Provenance) -> str:  # of its start, and of what continued it
        processes = [{"commit": about.commit, "dirty": about.dirty}, *about.resumed]
        names = (str(one["commit"])[:10] + "+" * bool(one.get("dirty")) for one in processes if one.get("commit"))
        return ", ".join(dict.fromkeys(names))

    def moment(value: str | None) -> str:
        return escape(value[:16].replace("T", " ")) if value else "–"

    def steps(run: RunRecord) -> float:  # one that ended early may have done more than its last record says
        last = run.train["step"].max(initial=0)
        return last if run.result is None or run.result.steps is None else run.result.steps

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
            "machine": lambda one: escape(", ".join(filter(None, (one[2].device, one[2].cpu))) or "–"),
            "steps": lambda one: count(steps(one[1])),
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
        return ""
    return f"<h3>Commands</h3><pre>{escape(chr(10).join(commands))}</pre>"
