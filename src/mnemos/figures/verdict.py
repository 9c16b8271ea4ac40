"""What the numbers allow one to say: is the memory arm better, than what, and is it the memory that pays?

Two arms are told apart where the 95 % interval of the difference of their means (Welch's, from the spread
between seeds) leaves out zero. The runs under a control are the same trained models, so their difference is
taken run by run.
"""

import math
from dataclasses import dataclass

from .markup import decimal, listed, plural
from .results import Comparison, Control, Row, spread

EQUAL = 0.05  # arms whose parameters differ by less than this share count as of equal size
# Student's t, 97.5 % point, by degrees of freedom 1, 2, …
_STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)


@dataclass(frozen=True)
class Difference:
    """How much better the first is than the second (worse: negative), and the 95 % interval; NaN without spread."""

    value: float
    low: float
    high: float

    @property
    def says(self) -> str:
        """better, worse, alike (the interval holds zero) or unknown (no spread to judge by)."""
        if not (math.isfinite(self.low) and math.isfinite(self.high)):
            return "unknown"
        return "better" if self.low > 0 else "worse" if self.high < 0 else "alike"


def difference(a: Row | Control, b: Row | Control, higher_is_better: bool) -> Difference:
    """a against b, whose runs are independent: Welch's interval."""
    value = (a.mean - b.mean) * (1 if higher_is_better else -1)
    if a.seeds < 2 or b.seeds < 2 or not math.isfinite(a.std) or not math.isfinite(b.std):
        return Difference(value, math.nan, math.nan)
    va, vb = a.std**2 / a.seeds, b.std**2 / b.seeds
    if va + vb == 0:
        return Difference(value, value, value)
    freedom = (va + vb) ** 2 / (va**2 / (a.seeds - 1) + vb**2 / (b.seeds - 1))
    reach = _student(freedom) * math.sqrt(va + vb)
    return Difference(value, value - reach, value + reach)


def effect(comparison: Comparison, name: str, control: str = "emptied") -> Difference | None:
    """What a control does to an arm (worse where the memory is used): run by run where the runs tell, else by means."""
    sign = 1 if comparison.higher_is_better else -1
    metric = comparison.metric
    pairs = [(r.tested(metric, control), r.tested(metric)) for r in comparison.runs.get(name, ())]
    mean, std, n = spread([sign * (without - intact) for without, intact in pairs])
    if n:
        reach = _student(n - 1) * std / math.sqrt(n) if n > 1 else math.nan
        return Difference(mean, mean - reach, mean + reach)
    for row in comparison.controls:
        if (row.name, row.control) == (name, control) and math.isfinite(row.mean):
            intact = next(r for r in comparison.rows if r.name == name)
            return difference(row, intact, comparison.higher_is_better)
    return None


def _student(freedom: float) -> float:
    """The 97.5 % point of Student's t; fractional degrees of freedom are rounded down, which widens the interval."""
    whole = max(1, int(freedom + 1e-9))
    if whole <= len(_STUDENT):
        return _STUDENT[whole - 1]
    z = 1.959964
    return z + (z**3 + z) / (4 * whole) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * whole**2)


def verdict(comparison: Comparison) -> list[str]:
    """Paragraphs of plain text: first what may be claimed from these numbers, then the numbers it rests on."""
    rows = [row for row in comparison.rows if math.isfinite(row.mean)]
    if not rows:
        return ["No arm has a test result yet, so there is nothing to say."]
    memory = [row for row in rows if row.name in comparison.with_memory()]
    plain = [row for row in rows if row not in memory]
    claims, grounds = [_one_seed(rows)], []
    if len(rows) == 1:
        claims.append("There is one arm and no other to compare it with.")
    elif not memory or not plain:
        grounds.append(_ranked(comparison, rows))
    for row in memory:
        claims.append(_conclusion(comparison, row, plain))
        grounds.append(
            " ".join([_reached(comparison, row), *_against(comparison, row, plain), _emptied(comparison, row)])
        )
    if len(rows) == 1 and not memory:
        grounds.append(_reached(comparison, rows[0]))
    return [text for text in [" ".join(filter(None, claims)), *grounds, _majority(comparison, rows)] if text]


def _one_seed(rows: list[Row]) -> str:
    single = [row.name for row in rows if row.seeds < 2]
    if not single:
        return ""
    who = "Every arm" if len(single) == len(rows) > 1 else listed(single)
    return f"{who} {_was(single, rows)} run with one seed: there is no spread to judge by, and nothing can be claimed."


def _was(single: list[str], rows: list[Row]) -> str:
    return "was" if len(single) in (1, len(rows)) else "were"


def _reached(c: Comparison, row: Row) -> str:
    return f"{row.name} reaches a test {c.metric} of {mean_and_spread(row)} ({plural(row.seeds, 'seed')})."


def mean_and_spread(row: Row | Control) -> str:
    """0.559 ± 0.007, or the one value of one seed, unbroken over lines."""
    several = row.seeds > 1 and math.isfinite(row.std)
    return f"{decimal(row.mean)}\u00a0±\u00a0{decimal(row.std)}" if several else decimal(row.mean)


def _ranked(c: Comparison, rows: list[Row]) -> str:
    """The best arm against each other one, where no arm is the memory's counterpart."""
    best = (max if c.higher_is_better else min)(rows, key=lambda row: row.mean)
    others = [row for row in rows if row is not best]
    named: dict[str, list[str]] = {}
    for other in others:
        named.setdefault(_word(difference(best, other, c.higher_is_better)), []).append(
            f"{other.name} ({mean_and_spread(other)})"
        )
    parts = [f"{word} {listed(names)}" for word, names in named.items()]
    return f"{_reached(c, best)} It is {listed(parts)}. No two arms here differ by a memory alone."


def _word(d: Difference) -> str:
    words = {"better": "better than", "worse": "worse than", "alike": "not to be told apart from"}
    return words.get(d.says, "ahead of" if d.value > 0 else "not ahead of")


def _role(row: Row, other: Row) -> str:
    """What `other` is to the memory arm `row`: plain (smaller), equal (in parameters) or other."""
    if not (math.isfinite(row.parameters) and math.isfinite(other.parameters)) or row.parameters <= 0:
        return "other"
    share = other.parameters / row.parameters - 1
    return "equal" if abs(share) <= EQUAL else "plain" if share < 0 else "other"


def _against(c: Comparison, row: Row, plain: list[Row]) -> list[str]:
    """One sentence for each arm without a memory."""
    sentences = []
    names = {"plain": "the smaller model without a memory", "equal": "of equal parameters and no memory"}
    for other in plain:
        d = difference(row, other, c.higher_is_better)
        role = names.get(_role(row, other), "without a memory")
        name = f"{other.name}, {role}, at {mean_and_spread(other)} ({_amount(c, d)})"
        sentences.append(
            {
                "better": f"It is better than {name}.",
                "worse": f"It is worse than {name}.",
                "alike": f"It cannot be told apart from {name}: the difference is within the spread between seeds.",
                "unknown": f"It is {_word(d)} {name}.",
            }[d.says]
        )
    return sentences


def _amount(c: Comparison, d: Difference) -> str:
    """The difference as the metric counts it: a lower loss is a negative difference."""
    value, low, high = (d.value, d.low, d.high) if c.higher_is_better else (-d.value, -d.high, -d.low)
    if d.says == "unknown":
        return f"{decimal(value, signed=True)}, with no spread to set it against"
    return f"{decimal(value, signed=True)}, 95% interval {decimal(low, signed=True)} to {decimal(high, signed=True)}"


def _emptied(c: Comparison, row: Row) -> str:
    """What emptying the cache did."""
    d = effect(c, row.name)
    if d is None:
        return "The cache was not emptied at evaluation."
    return {
        "worse": f"Emptying the cache at evaluation hurts ({_amount(c, d)}): the model uses what the cache holds.",
        "alike": f"Emptying the cache at evaluation makes no difference beyond the spread ({_amount(c, d)}).",
        "better": f"Emptying the cache at evaluation even helps ({_amount(c, d)}).",
        "unknown": f"Emptying the cache at evaluation changes the {c.metric} by {_amount(c, d)}.",
    }[d.says]


def _conclusion(c: Comparison, row: Row, plain: list[Row]) -> str:
    """What all comparisons together say of the memory; nothing where there is no spread, or nothing to compare with."""
    told: dict[str, list[str]] = {"equal": [], "plain": [], "other": []}
    for other in plain:
        told[_role(row, other)].append(difference(row, other, c.higher_is_better).says)
    says = [one for group in told.values() for one in group]
    control = effect(c, row.name)
    emptied = control.says if control else "not run"
    if not says or "unknown" in (*says, emptied):
        return ""
    if "better" not in says:
        used = " Its cache is used, but models without one do no worse." if emptied == "worse" else ""
        return f"No gain is shown for the memory of {row.name}.{used}"
    if not told["equal"]:
        return f"{row.name} gains, but no arm of equal parameters was run: its parameters may be why, not its memory."
    if any(one != "better" for one in told["equal"]):
        used = " Its cache is used, but equal parameters without one do no worse." if emptied == "worse" else ""
        return (
            f"The gain of {row.name} is no more than equal parameters give: none can be claimed for its memory.{used}"
        )
    if control is None:
        return f"{row.name} is better than equal parameters; whether by its memory, an emptied cache would tell."
    if emptied == "worse":
        return (
            f"{row.name} is better than equal parameters, and needs what its cache holds: here the memory itself pays."
        )
    return (
        f"{row.name} is better than equal parameters, yet no worse with an empty cache: the gain is not its memory's."
    )


def _majority(c: Comparison, rows: list[Row]) -> str:
    if c.majority is None or not c.higher_is_better:
        return ""
    low = [row.name for row in rows if row.mean <= c.majority]
    line = f"always answering the most frequent class ({decimal(c.majority)})"
    if low:
        return f"{listed(low)} {'does' if len(low) == 1 else 'do'} no better than {line}: the task was not learned."
    return f"For scale: {line} is what no learning gives."
