"""What the numbers allow one to say: which variant is better than which, and whether the memory is the reason.

The memory is credited only with what a variant gains over its never-written baseline: the same model, of equal
parameters, over a cache that nothing is stored in. A gain over a model without a cache may be that of the cached
branch, and emptying a cache shows only that the trained model depends on it.
"""

import json
import math
import shlex
from pathlib import PurePath

from mnemos import registry
from mnemos.config import to_dict
from mnemos.lab.tasks.no_learning import BIGRAMS, no_better
from mnemos.types import InputError, JSONObject

from .differences import Difference, differences, differences_of_best, effect, memory_effect
from .markup import decimal, listed, plural
from .origins import command, flat, longer
from .results import Comparison, Control, Row, RunRecord
from .roles import EQUAL, memory, noun, role

_SEEDS = 5  # of the command that a report of one seed proposes


def verdict(comparison: Comparison) -> list[str]:
    """Paragraphs of plain text: what the results mean, in a few sentences; the caveats, once; then the numbers."""
    rows = [row for row in comparison.rows if math.isfinite(row.mean)]
    if not rows:
        return ["No variant has a test result yet."]
    cached = [row for row in rows if memory(comparison, row.name) == "written"]
    claims = [claim for row in cached if (claim := _conclusion(comparison, row, _beside(row, rows, cached)))]
    ranked = [_reached(comparison, rows[0])] if len(rows) == 1 else [_ranked(comparison, rows)]
    seeds = _one_seed(rows)
    learned = no_better({row.name: row.mean for row in rows}, *_known(comparison))
    nothing = len(rows) > 1 and _nothing_learned(comparison, rows)  # then there is nothing to rank
    grounds = []
    for row in cached if len(rows) > 1 else ():
        against = _against(comparison, row, _beside(row, rows, cached))
        grounds.append(" ".join([_reached(comparison, row), *against, _emptied(comparison, row)]).strip())
    if len(rows) == 1 and cached:
        grounds.append(_emptied(comparison, cached[0]))
    if 1 < len(cached) < len(rows) and claims and not nothing:
        best, parts = _ahead(comparison, cached)
        grounds.append(f"Of the variants with a memory, {best.name} {parts}.")
    caveats = [seeds, *_alone(comparison, rows, cached), _missing(comparison, cached, rows)]
    if len(rows) > 1 and not (claims or nothing):  # an order is told: what it is worth belongs beside it
        ranked, caveats = [*ranked, *filter(None, [seeds])], caveats[1:]
    paragraphs = [
        " ".join([*([] if nothing else claims or ranked), *learned]),
        " ".join(filter(None, caveats)),
        *grounds,
    ]
    return [text for text in [*paragraphs, "" if learned else _scale(comparison)] if text]


def _beside(row: Row, rows: list[Row], cached: list[Row]) -> list[Row]:
    """What a variant with a memory is compared with: those without one that is written."""
    return [other for other in rows if other is not row and other not in cached]


def _alone(c: Comparison, rows: list[Row], cached: list[Row]) -> list[str]:
    """What there is nothing to compare with."""
    if len(rows) == 1:
        return ["There is one variant and no other to compare it with."]
    return ["No two variants here differ by a memory alone."] if not cached or len(cached) == len(rows) else []


def _one_seed(rows: list[Row]) -> str:
    single = [row.name for row in rows if row.seeds < 2]
    if not single:
        return ""
    everyone = len(single) == len(rows) > 1
    who = "Every variant" if everyone else listed(single)
    was = "was" if everyone or len(single) == 1 else "were"
    return (
        f"{who} {was} run with one seed, and another seed may give another order, so no difference is shown yet: "
        f"--seeds {_SEEDS} tells."
    )


def _reached(c: Comparison, row: Row) -> str:
    return f"{row.name} reaches a {c.scored} {c.metric} of {mean_and_spread(row)} ({plural(row.seeds, 'seed')})."


def mean_and_spread(row: Row | Control) -> str:
    """0.559 ± 0.007, or the one value of one seed, unbroken over lines."""
    several = row.seeds > 1 and math.isfinite(row.std)
    return f"{decimal(row.mean)}\u00a0±\u00a0{decimal(row.std)}" if several else decimal(row.mean)


def _ranked(c: Comparison, rows: list[Row]) -> str:
    """The best variant compared with each other one."""
    best, parts = _ahead(c, rows)
    return f"{_reached(c, best)} It {parts}."


def _ahead(c: Comparison, rows: list[Row]) -> tuple[Row, str]:
    """The best of several variants, and what it is to each other one: "is better than A (0.5) and B (0.6)"."""
    named: dict[str, list[str]] = {}
    best, others = differences_of_best(rows, c.higher_is_better)
    for other, d in others:
        named.setdefault(_word(d), []).append(f"{other.name} ({mean_and_spread(other)})")
    return best, listed([f"{word} {listed(names)}" for word, names in named.items()])


def _word(d: Difference) -> str:
    """Without a spread to judge by (one seed), only what the runs scored."""
    words = {"better": "is better than", "worse": "is worse than", "alike": "is not distinguishable from"}
    return words.get(d.says, "scored better than" if d.value > 0 else "did not score better than")


_ROLES = {
    "unwritten": "the same model with {memory} never written",
    "equal": "of equal parameters without a memory",
    "smaller": "a smaller model without a memory",
    "larger": "a larger model without a memory",
    "memory": "another model with a memory",
}


def _against(c: Comparison, row: Row, others: list[Row]) -> list[str]:
    """One sentence for each variant that is not a cached one."""
    sentences = []
    for other, d in zip(others, differences(row, others, c.higher_is_better), strict=True):
        what = _ROLES[role(c, row, other)].format(memory=_never(c, row))
        if what == _ROLES["memory"] and memory(c, other.name) == "unwritten":
            what += " that is never written"
        name = f"{other.name}, {what}, at {mean_and_spread(other)} ({_amount(c, d)})"
        sentences.append(
            {
                "better": f"It is better than {name}.",
                "worse": f"It is worse than {name}.",
                "alike": f"It cannot be distinguished from {name}: {_within(d)}.",
                "unknown": f"It {_word(d)} {name}.",
            }[d.says]
        )
    return sentences


def _within(d: Difference) -> str:
    """Why no difference is shown."""
    if d.low <= 0 <= d.high:
        return "the difference is within the spread between seeds"
    return f"corrected for the number of comparisons (Holm), p is {d.p_holm:.2g}"


def _amount(c: Comparison, d: Difference) -> str:
    """The difference as the metric counts it: a lower loss is a negative difference."""
    value, low, high = (d.value, d.low, d.high) if c.higher_is_better else (-d.value, -d.high, -d.low)
    if d.says == "unknown":
        return decimal(value, signed=True)
    return f"{decimal(value, signed=True)}, 95% interval {decimal(low, signed=True)} to {decimal(high, signed=True)}"


def _emptied(c: Comparison, row: Row) -> str:
    """What emptying the memory did: the cache on the whole test split, else that part of the state on some rows."""
    segments = noun(c, row.name) != "a cache"
    name, hold = (noun(c, row.name), "hold") if segments else ("cache", "holds")
    d = effect(c, row.name) or memory_effect(c, row.name, name, "emptied")
    if d is None:
        return "" if segments else "The cache was not emptied at evaluation."
    return {
        "worse": f"Emptying the {name} at evaluation hurts ({_amount(c, d)}). This shows that the trained model "
        f"depends on what its {name} {hold}, and not that the memory pays.",
        "alike": f"Emptying the {name} at evaluation makes no difference beyond the spread ({_amount(c, d)}).",
        "better": f"Emptying the {name} at evaluation improves the {c.metric} ({_amount(c, d)}).",
        "unknown": f"Emptying the {name} at evaluation changes the {c.metric} by {_amount(c, d)}.",
    }[d.says]


def _missing(c: Comparison, cached: list[Row], rows: list[Row]) -> str:
    """Which runs would tell what the memories add, and the command for them, where they were not made."""
    if any(row.baseline_of is None for row in c.rows):
        return ""
    lacking = [row.name for row in cached if not any(role(c, row, other) == "unwritten" for other in rows)]
    if not lacking:
        return ""
    several = len(lacking) > 1
    return (
        f"The never-written baseline{'s' * several} of {listed(lacking)} {'are' if several else 'is'} missing, so "
        f"nothing tells what {'these memories add' if several else 'the memory adds'}. This command adds "
        f"{'them' if several else 'it'}: {_unwritten_command(c)}"
    )


def _unwritten_command(c: Comparison) -> str:
    """The command that made the comparison, with the never-written baselines; finished runs are not trained again."""
    given = shlex.split(command(c.provenance.get("command") or ""))
    runs = c.all_runs()
    own = shlex.split(command((runs[0].provenance or {}).get("command") or "")) if len(runs) == 1 else []
    if "compare" in given and not {"--unwritten", "--baselines"} & set(given):
        words, folder = given, True
    elif "train" in own and "--resume" not in own:
        words, folder = ["mnemos", "compare", *_fields(own[own.index("train") + 1 :], runs[0])], False
    else:
        recipes = {name: every[0].recipe.get("name", name) for name, every in c.runs.items() if every}
        names = dict.fromkeys(str(recipes.get(row.name, row.name)) for row in c.rows)  # two runs may have one recipe
        words = ["mnemos", "compare", *names, *_changed(runs[0].recipe if runs else {}), *c.budget]
        folder = c.source.endswith("comparison.json") and "command" in c.provenance
    if folder and "--out" not in words:
        words = [*words, "--out", str(PurePath("runs") / PurePath(c.source).parts[0])]
    seeds = max(row.seeds for row in c.rows)
    more = [] if "--seeds" in words else ["--seeds", str(seeds if seeds > 1 else _SEEDS)]
    return shlex.join([*words, "--unwritten", *more])


def _changed(recipe: JSONObject) -> list[str]:
    """The options by which a run's data and steps differ from those of the registered recipe of its name."""
    try:
        usual = flat(to_dict(registry.load("recipe", str(recipe.get("name")))()))
    except InputError:
        return []
    found = {name: value for name, value in flat(recipe).items() if name.startswith("data.") or name == "train.steps"}
    words = []
    for name, value in found.items():
        if name != "data.is" and name in usual and value != json.loads(json.dumps(usual[name])):
            words += [f"--{name.replace('_', '-')}", *map(str, value if isinstance(value, list) else [value])]
    return words


def _fields(words: list[str], run: RunRecord) -> list[str]:
    """The recipe and the fields of the command that started a run, for the number of steps that the run was trained."""
    starts = _without(words, ("--out",))
    fields = [part for word in starts for part in (word.split("=", 1) if word.startswith("--from=") else [word])]
    fields = ["--train.init-from" if word == "--from" else word for word in fields]
    if not any(longer(process) for process in (run.provenance or {}).get("resumed") or ()):
        return fields
    return [*_without(fields, ("--train.steps",)), "--train.steps", str(flat(run.recipe).get("train.steps"))]


def _without(words: list[str], options: tuple[str, ...]) -> list[str]:
    """The words of a command without these options and their values."""
    return [
        word
        for before, word in zip(["", *words], words, strict=False)
        if before not in options and word not in options and not word.startswith(tuple(f"{o}=" for o in options))
    ]


def _conclusion(c: Comparison, row: Row, others: list[Row]) -> str:
    """What all differences together say of the memory; nothing where there is no spread, or nothing to compare with."""
    told = [
        (role(c, row, other), d.says, other.name)
        for other, d in zip(others, differences(row, others, c.higher_is_better), strict=True)
        if role(c, row, other) != "memory"
    ]
    if not told or any(says == "unknown" for _, says, _ in told):
        return ""
    unwritten = [says for kind, says, _ in told if kind == "unwritten"]
    better = [name for kind, says, name in told if kind != "unwritten" and says == "better"]
    if not unwritten:
        if not better:
            return f"No gain is shown for the memory of {row.name}."
        return (
            f"{row.name} is better than {listed(better)}, but nothing can be claimed for its memory: "
            "the gain may be its branch's, which only a never-written baseline would show."
        )
    if any(says != "better" for says in unwritten):
        does = "does better" if "worse" in unwritten else "does as well, within the spread between seeds"
        rest = f" What it gains over {listed(better)} is its branch's." if better else ""
        return f"No gain is shown for the memory of {row.name}: its never-written baseline {does}.{rest}"
    # A larger model may be as good without a memory; one that is not larger may not.
    if as_good := [name for kind, says, name in told if kind in ("equal", "smaller") and says != "better"]:
        return (
            f"The memory of {row.name} adds to its branch, but no gain is shown for the whole: "
            f"it is not better than {listed(as_good)}, without a memory."
        )
    without = [other for other in others if role(c, row, other) == "unwritten"]
    # Slots that are never written have no writer; a cache that is never written has the same parameters.
    fewer = noun(c, row.name) != "a cache" and any(other.parameters < row.parameters * (1 - EQUAL) for other in without)
    sizes = "which has fewer parameters, as it has no writer" if fewer else "of equal parameters"
    return (
        f"The memory itself pays in {row.name}: it is better than the same model with {_never(c, row)} never written, "
        f"{sizes}."
    )


def _never(c: Comparison, row: Row) -> str:
    """a cache that is, slots that are."""
    name = noun(c, row.name)
    return f"{name} that {'is' if name == 'a cache' else 'are'}"


def _known(c: Comparison) -> tuple[dict[str, float], str, bool]:
    """The scores without learning, the metric and whether higher is better: what `no_better` needs."""
    majority = {"always answering the most frequent class": c.majority} if c.majority is not None else {}
    return majority | c.reference, c.metric, c.higher_is_better


def _nothing_learned(c: Comparison, rows: list[Row]) -> bool:
    """Whether no variant is better than a guess, or than the frequencies of single tokens."""
    scores, metric, higher = _known(c)
    weakest = {what: value for what, value in scores.items() if not what.endswith(BIGRAMS)}
    return all(no_better({row.name: row.mean}, weakest, metric, higher) for row in rows)


def _scale(c: Comparison) -> str:
    """What no learning gives, for scale."""
    found = [f"{name} {decimal(value)}" for name, value in _known(c)[0].items()]
    return f"For scale, what no learning gives: {listed(found)}." if found else ""
