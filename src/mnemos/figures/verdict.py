"""What the numbers allow one to say: which variant is better than which, and whether the memory is the reason.

The memory is credited only with what a variant gains over its never-written baseline: the same model, of equal
parameters, over a cache that nothing is stored in. A gain over a model without a cache may be that of the cached
branch, and emptying a cache shows only that the trained model depends on it.
"""

import math
import shlex
from pathlib import PurePath

from mnemos.data.metrics import UNIFORM

from .differences import Difference, differences, differences_of_best, effect, memory_effect
from .markup import decimal, listed, plural
from .origins import command, flat, longer
from .results import Comparison, Control, Row, RunRecord
from .roles import EQUAL, memory, noun, role

_SEEDS = 5  # of the command that a report of one seed proposes


def verdict(comparison: Comparison) -> list[str]:
    """Paragraphs of plain text: first what can be claimed from these numbers, then the numbers themselves."""
    rows = [row for row in comparison.rows if math.isfinite(row.mean)]
    if not rows:
        return ["No variant has a test result yet."]
    cached = [row for row in rows if memory(comparison, row.name) == "written"]
    claims, grounds = [_one_seed(rows)], []
    if len(rows) == 1:
        claims.append("There is one variant and no other to compare it with.")
    elif not cached or len(cached) == len(rows):
        grounds.append(_ranked(comparison, rows))
    for row in cached:
        others = [other for other in rows if other is not row and other not in cached]
        claims.append(_conclusion(comparison, row, others))
        grounds.append(
            " ".join(
                [
                    _reached(comparison, row),
                    *_against(comparison, row, others),
                    _emptied(comparison, row),
                    _missing(comparison, row, others),
                ]
            ).strip()
        )
    if 1 < len(cached) < len(rows):
        best, parts = _ahead(comparison, cached)
        grounds.append(f"Of the variants with a memory, {best.name} is {parts}.")
    if len(rows) == 1 and not cached:
        grounds.append(_reached(comparison, rows[0]))
    return [text for text in [" ".join(filter(None, claims)), *grounds, *_scale(comparison, rows)] if text]


def _one_seed(rows: list[Row]) -> str:
    single = [row.name for row in rows if row.seeds < 2]
    if not single:
        return ""
    everyone = len(single) == len(rows) > 1
    who = "Every variant" if everyone else listed(single)
    was = "was" if everyone or len(single) == 1 else "were"
    return f"{who} {was} run with one seed: without a spread between seeds, nothing can be claimed."


def _reached(c: Comparison, row: Row) -> str:
    return f"{row.name} reaches a test {c.metric} of {mean_and_spread(row)} ({plural(row.seeds, 'seed')})."


def mean_and_spread(row: Row | Control) -> str:
    """0.559 ± 0.007, or the one value of one seed, unbroken over lines."""
    several = row.seeds > 1 and math.isfinite(row.std)
    return f"{decimal(row.mean)}\u00a0±\u00a0{decimal(row.std)}" if several else decimal(row.mean)


def _ranked(c: Comparison, rows: list[Row]) -> str:
    """The best variant compared with each other one, when none is a baseline of another."""
    best, parts = _ahead(c, rows)
    return f"{_reached(c, best)} It is {parts}. No two variants here differ by a memory alone."


def _ahead(c: Comparison, rows: list[Row]) -> tuple[Row, str]:
    """The best of several variants, and what it is to each other one: "better than A (0.5), not ahead of B (0.6)"."""
    named: dict[str, list[str]] = {}
    best, others = differences_of_best(rows, c.higher_is_better)
    for other, d in others:
        named.setdefault(_word(d), []).append(f"{other.name} ({mean_and_spread(other)})")
    return best, listed([f"{word} {listed(names)}" for word, names in named.items()])


def _word(d: Difference) -> str:
    words = {"better": "better than", "worse": "worse than", "alike": "not distinguishable from"}
    return words.get(d.says, "ahead of" if d.value > 0 else "not ahead of")


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
                "unknown": f"It is {_word(d)} {name}.",
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
        return f"{decimal(value, signed=True)}, without a spread to compare it with"
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


def _missing(c: Comparison, row: Row, others: list[Row]) -> str:
    """Which run would tell what the memory adds, and the command for it, where it was not run."""
    if any(role(c, row, other) == "unwritten" for other in others):
        return ""
    return f"The never-written baseline of {row.name} is missing. This command adds it: {_unwritten_command(c)}"


def _unwritten_command(c: Comparison) -> str:
    """The command that made the comparison, with the never-written baselines; finished runs are not trained again."""
    words = shlex.split(command(c.provenance.get("command") or ""))
    if "compare" in words and "--unwritten" not in words:
        folder = [] if "--out" in words else ["--out", str(PurePath("runs") / PurePath(c.source).parts[0])]
        return shlex.join([*words, *folder, "--unwritten"])
    seeds = max(row.seeds for row in c.rows)
    last = ["--unwritten", "--seeds", str(seeds if seeds > 1 else _SEEDS)]
    runs = c.all_runs()
    own = shlex.split(command((runs[0].provenance or {}).get("command") or "")) if len(runs) == 1 else []
    if "train" in own and "--resume" not in own:
        return shlex.join(["mnemos", "compare", *_fields(own[own.index("train") + 1 :], runs[0]), *last])
    recipes = {name: every[0].recipe.get("name", name) for name, every in c.runs.items() if every}
    names = dict.fromkeys(str(recipes.get(row.name, row.name)) for row in c.rows)  # two runs may have one recipe
    return shlex.join(["mnemos", "compare", *names, *last])


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


def _scale(c: Comparison, rows: list[Row]) -> list[str]:
    """Which variants are no better than a score without learning: the most frequent class, or equally likely bytes."""
    known = [run.result.get("reference") for run in c.all_runs() if run.result and run.result.get("metric") == c.metric]
    shared = known[0] if known and isinstance(known[0], dict) and all(one == known[0] for one in known) else {}
    scores = {UNIFORM: float(shared[UNIFORM])} if UNIFORM in shared else {}
    if c.majority is not None and c.higher_is_better:
        scores = {"always answering the most frequent class": c.majority, **scores}
    sentences = []
    for name, value in scores.items():
        line = f"{name} ({decimal(value)})"
        low = [row.name for row in rows if (row.mean <= value if c.higher_is_better else row.mean >= value)]
        if low:
            does = "does" if len(low) == 1 else "do"
            sentences.append(f"{listed(low)} {does} no better than {line}: the task was not learned.")
        else:
            sentences.append(f"For scale: {line} is what no learning gives.")
    return sentences
