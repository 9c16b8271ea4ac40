"""Random recipes and command lines: they run, or end with exit code 2 and one line, and leave no half-written run.

The commands are called in this process, as `mnemos` calls them. Exit code 1 (training failed, memory does not suffice)
is allowed with one line too: a learning rate of 1e30 is no wrong input.
"""

import contextlib
import io
import json
import math
import os
import shutil
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from hypothesis import strategies as st
from random_cases import cases

from mnemos import registry
from mnemos.config import to_dict
from mnemos.lab.cli import main
from mnemos.lab.cli.verbs import VERBS

SHOWN, TRAINED, OTHERS = 1000, 300, 2000
# Small data that are generated here; one update, and evaluations of few rows.
FEW = "--train.steps 1 --train.batch-size 2 --train.valid-rows 2 --train.test-rows 2 --train.accelerator cpu"
LISTOPS = "--data.train-size 8 --data.valid-size 4 --data.test-size 4 --model.dim 8 --model.layers 1 --model.mlp 8"
FAMILIES = {
    "short-listops": LISTOPS,
    "short-listops-cached": LISTOPS,
    "demo": "--data.rows 4 --model.dim 8 --model.layers 1 --model.mlp 8",
    "demo-memformer": "--data.rows 4 --model.dim 8",
}
NUMBERS = "0 -1 1 2 3 7 0.5 -0.5 1e-30 1e30 nan inf -inf 2147483648 9223372036854775807 1e400 0x10 1_000 ٣"
NUMBERS = [*NUMBERS.split(), "1" + "0" * 30]
WORDS = "none None True false null [] {} -- - é \udcff \x1b[31m linear softmax delta paper mnemos cosine all ../.. / %s"
WORDS = [*WORDS.split(), "'", '"', "$HOME", "", " ", "\t", "a b", "a\nb", "x" * 300]
PATHS = ". / /dev/null /dev/full /proc/self/mem nowhere nowhere/deeper \udcff - --help file.txt folder broken-link hf:"
PATHS += " timm: hf:no/such empty.json list.json half.json recipe.py raises.py recipe.py:NONE ~ file.txt/below"
PATHS = [*PATHS.split(), "run-without-anything", "", "a\nb", "x" * 300, "/" + "y/" * 2500]
OPTIONS = "--out --top --length --count --prompt --temperature --seed --to --last --rows --split --seeds --jobs"
OPTIONS += " --vary --equal --rates --against --resume --from --plugin --score --beams --samples --size --text"
OPTIONS = f"{OPTIONS} --state --tokens --no-such -x --minutes".split()


class Ended(NamedTuple):
    """How a command ended: its exit code, or the traceback that came out of it."""

    code: int | None
    error: str
    said: str


def call(words: list[str]) -> Ended:
    """Run a command line in this process."""
    out = io.TextIOWrapper(io.BytesIO(), "utf-8", "strict")  # as Python opens them
    err = io.TextIOWrapper(io.BytesIO(), "utf-8", "backslashreplace")
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            code, raised = main(words), ""
        except Exception:
            code, raised = None, traceback.format_exc()
    for file in (out, err):
        file.seek(0)
    return Ended(code, raised or err.read(), out.read())


def problem(words: list[str], ended: Ended, folder: Path | None = None) -> str | None:
    """What is wrong with how a command ended; None if nothing is. folder: of the run that it would write."""
    if ended.code is None:
        return "a traceback: " + ended.error.strip().splitlines()[-1][:200]
    if ended.code not in (0, 1, 2):
        return f"exit code {ended.code}"
    lines = [line for line in ended.error.split("\n") if line]
    if "Traceback" in ended.error or (ended.code and sum(line.startswith("mnemos: ") for line in lines) < 1):
        return f"exit code {ended.code} with {lines[:3]}"
    if ended.code == 2 and len(lines) != 1:
        return f"{len(lines)} lines: {lines[:3]}"
    if folder is not None and ended.code == 2 and folder.exists():
        return f"exit code 2 and a folder with {sorted(path.name for path in folder.iterdir())}"
    if folder is not None and ended.code == 0 and not (folder / "result.json").exists():
        return "exit code 0 without a result"
    return None


class Found:
    """Counts what ran, and keeps the first command line of each different problem."""

    def __init__(self, say: Callable[[str], None] = lambda _: None) -> None:
        self.codes: Counter[str] = Counter()
        self.problems: dict[str, str] = {}
        self.say = say

    def add(self, kind: str, words: list[str], ended: Ended, folder: Path | None = None) -> None:
        self.codes[f"{kind}, exit code {ended.code}"] += 1
        if what := problem(words, ended, folder):
            place = [line.strip() for line in ended.error.splitlines() if line.strip().startswith('File "')]
            self.problems.setdefault(f"{kind}: {what} {place[-1] if place and ended.code is None else ''}", repr(words))
        self.say(f"{sum(self.codes.values()):,} command lines, {len(self.problems)} problems")

    @property
    def failed(self) -> list[str]:
        return [f"{what}; {words:.500}" for what, words in self.problems.items()]


def run(share: float, folder: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """The three kinds of random command lines; what ran, and what failed."""
    found = Found(say)
    with inside(folder):
        shown(found, math.ceil(SHOWN * share))
        trained(found, math.ceil(TRAINED * share))
        others(found, math.ceil(OTHERS * share))
    return {
        "command_lines": sum(found.codes.values()),
        "ended": dict(sorted(found.codes.items())),
        "failed": found.failed,
    }


@contextlib.contextmanager
def inside(folder: Path) -> Iterator[None]:
    """Work in a folder with some hostile files."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        Path("file.txt").write_text("text\n")
        Path("folder").mkdir(exist_ok=True)
        Path("broken-link").symlink_to("nothing")
        Path("empty.json").write_text("")
        Path("list.json").write_text("[1, 2]")
        Path("half.json").write_text('{"name": "x", "model": {"is": "transformer"')
        Path("recipe.py").write_text("x = 1\n")
        Path("raises.py").write_text("raise RuntimeError('no')\n")
        run = Path("run-without-anything")
        run.mkdir(exist_ok=True)
        (run / "recipe.json").write_text("{}")
        yield
    finally:
        os.chdir(before)


def shown(found: Found, count: int) -> None:
    """`mnemos show RECIPE --field value …` over all recipes."""
    names = registry.names("recipe")
    lines = st.sampled_from(names).flatmap(lambda name: fields(name).map(lambda given: ["show", name, *given]))
    cases(count)(lines, lambda words: found.add("show", words, call(words)))


def trained(found: Found, count: int) -> None:
    """`mnemos train RECIPE --field value … --out DIR` of small recipes, with their values changed."""

    def train(words: list[str]) -> None:
        with tempfile.TemporaryDirectory() as place:
            out = Path(place) / "run"
            found.add("train", words, call([*words, "--out", str(out)]), out)

    def line(name: str) -> st.SearchStrategy[list[str]]:
        base = ["train", name, *FEW.split(), *FAMILIES[name].split()]
        return fields(name, costly=False).map(lambda given: [*base, *given])

    cases(count, 1)(st.sampled_from(list(FAMILIES)).flatmap(line), train)


def others(found: Found, count: int) -> None:
    """Every other command with paths and options that do not fit."""
    verbs = sorted(set(VERBS) - {"show", "verify", "reproduce", "bench-memory", "chat"})
    value = st.sampled_from(PATHS) | st.sampled_from(NUMBERS) | st.sampled_from(WORDS)
    pair = st.tuples(st.sampled_from(OPTIONS), value).map(list)
    line = st.tuples(
        st.sampled_from(verbs), st.lists(st.sampled_from(PATHS), max_size=3), st.lists(pair, max_size=3)
    ).map(lambda parts: [parts[0], *parts[1], *[word for one in parts[2] for word in one]])

    def other(words: list[str]) -> None:
        before = set(os.listdir())
        found.add(words[0], words, call(words))
        for name in set(os.listdir()) - before:
            shutil.rmtree(name) if os.path.isdir(name) and not os.path.islink(name) else os.unlink(name)

    cases(count, 2)(line, other)


_FIELDS: dict[str, dict[str, Any]] = {}


def fields(name: str, costly: bool = True) -> st.SearchStrategy[list[str]]:
    """Some settings of a recipe with values of any kind. costly: also those that only make a run long."""
    if name not in _FIELDS:
        _FIELDS[name] = dict(flat(to_dict(registry.load("recipe", name)())))
    known = _FIELDS[name]
    names = [field for field in known if costly or not long(field)]
    option = st.sampled_from(names).flatmap(lambda field: value(known[field]).map(lambda v: [option_of(field), *v]))
    misspelt = st.sampled_from(names).map(lambda field: option_of(field)[:-1] + "q")
    wrong = st.tuples(misspelt, value("")).map(lambda pair: [pair[0], *pair[1]])
    some = st.lists(st.one_of(option, option, option, wrong), min_size=1, max_size=3)
    return some.map(lambda parts: [word for part in parts for word in part])


def long(field: str) -> bool:
    """Whether a large value of a field asks for a long run, or for other programs and data."""
    return field.startswith(
        ("data.", "train.steps", "train.devices", "train.num_nodes", "train.accelerator")
    ) or field in ("train.batch_size", "train.compile", "train.log", "model.layers")


def option_of(field: str) -> str:
    return "--" + field.replace("_", "-")


def flat(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The settings of a recipe by their paths."""
    for name, one in value.items():
        if isinstance(one, dict):
            yield from flat(one, f"{path}{name}.")
        elif name != "is":
            yield f"{path}{name}", one


def value(now: Any) -> st.SearchStrategy[list[str]]:
    """Words after an option: mostly of the kind that it has now."""
    anything = st.sampled_from(NUMBERS + WORDS).map(lambda word: [word])
    if isinstance(now, bool):
        return st.sampled_from(["True", "False"]).map(lambda word: [word]) | anything
    if isinstance(now, int | float):
        usual = st.integers(-3, 40) if isinstance(now, int) else st.floats(0, 2)
        return usual.map(lambda x: [str(x)]) | st.sampled_from(NUMBERS).map(lambda word: [word]) | anything
    if isinstance(now, list):
        return st.lists(st.sampled_from(NUMBERS + WORDS), max_size=4)
    return st.just([json.loads(json.dumps(str(now)))]) | st.lists(st.sampled_from(WORDS), max_size=2)
