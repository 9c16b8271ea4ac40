"""The command line: verbs only. Each verb calls the function of the library that does its work.

Exit codes: 0 done; 1 the work failed; 2 the input was wrong (one line, no traceback); 130 interrupted, saved.
"""

import argparse
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from . import registry
from .errors import InputError

USAGE = """mnemos: memory for transformers

  mnemos list                                  what there is: recipes, models, attentions, tasks
  mnemos show RECIPE [--field value ...]       a recipe, resolved, as JSON
  mnemos train RECIPE [--field value ...]      train it    [--out DIR]
  mnemos train --resume RUN                    go on where a run stopped, exactly
  mnemos eval RUN                              score a run's model, and again with its memory emptied
  mnemos sample RUN                            let its model write: pictures, text    [--count N] [--length N]
                                               [--prompt TEXT] [--temperature T] [--top-k K] [--top-p P] [--seed N]
  mnemos compare RECIPE RECIPE ... [--field value ...]
                                               same data, seeds and order    [--seeds N] [--out DIR] [--unwritten]
  mnemos report RUN ...                        one HTML page of runs or a comparison    [--out FILE]
  mnemos reproduce PAPER[/CLAIM]               a paper's table or figure beside ours    [--data DIR] [--steps N]
                                               [--seeds N] [--out DIR] [--run RUN] [--recipes-only]

Fields are those of the recipe, for example --model.dim 128 --train.steps 500;
`mnemos train RECIPE --help` lists them all, `mnemos VERB --help` what else a verb takes.
"""


class _Parser(argparse.ArgumentParser):
    """argparse, but an error is one line and ours."""

    def __init__(self, verb: str, about: str, **options: Any) -> None:
        super().__init__(f"mnemos {verb}", description=about, allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{self.prog}: {message}; see {self.prog} --help")


class _RecipeParser(_Parser):
    """Of verbs that take recipes and their fields: after a recipe's name, --help is for the fields."""

    def __init__(self, verb: str, about: str, takes: str) -> None:
        usage = f"mnemos {verb} {takes}"
        fields = f"Fields are the recipe's own: mnemos {verb} RECIPE --help lists them."
        super().__init__(verb, about, usage=usage, epilog=fields, add_help=False)

    def divided(self, arguments: list[str]) -> tuple[argparse.Namespace, list[str], list[str]]:
        """(options, names of recipes, fields)."""
        if arguments and arguments[0] in ("-h", "--help"):
            self.print_help()
            self.exit()
        options, rest = self.parse_known_args(arguments)
        first = next((i for i, word in enumerate(rest) if word.startswith("-")), len(rest))
        return options, rest[:first], rest[first:]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(USAGE, end="")
        return 0
    verb, rest = arguments[0], arguments[1:]
    if verb == "--version":
        from . import __version__

        print(__version__)
        return 0
    try:
        if verb not in VERBS:
            raise InputError(f"no verb is called {verb!r}; known: {', '.join(VERBS)}")
        return VERBS[verb](rest)
    except SystemExit as stop:  # --help
        return int(stop.code or 0)
    except InputError as error:
        print(f"mnemos: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("mnemos: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output has gone, as in `mnemos list | head -1`
        sys.stderr.close()
        return 0


def _list(arguments: list[str]) -> int:
    _Parser("list", "What there is: recipes, models, attentions, tasks.").parse_args(arguments)
    for failure in registry.load_plugins():
        print(f"mnemos: warning: {failure}", file=sys.stderr)
    for kind in registry.KINDS:
        print(f"{kind}s" if kind != "data" else "tasks (data)")
        places = registry.places(kind)
        width = max(map(len, places))
        for name, place in places.items():
            print(f"  {name:{width}}  {place.about}")
    print("\nStart with mnemos train demo, a minute on two cores; mnemos show RECIPE prints all that a recipe sets.")
    return 0


def _show(arguments: list[str]) -> int:
    parser = _RecipeParser("show", "A recipe, resolved, as JSON.", "RECIPE [--field value ...]")
    _, names, fields = parser.divided(arguments)
    name = _only("show", names)

    from .config import to_dict

    found = _recipe("show", name, fields)
    print(json.dumps(to_dict(found), indent=2))
    print(f"mnemos: {name} is the function {registry.places('recipe')[name]}", file=sys.stderr)
    if left := found.from_data():
        zeros = ", ".join(f"model.{field}" for field in left)
        print(f"mnemos: 0 means that a run takes the value from the data: {zeros}", file=sys.stderr)
    return 0


def _train(arguments: list[str]) -> int:
    takes = "RECIPE [--field value ...] [--out DIR] | --resume RUN"
    parser = _RecipeParser("train", "Train a recipe in a folder.", takes)
    parser.add_argument("--out", metavar="DIR", help="the run's folder; by default one of its own in runs")
    parser.add_argument("--resume", metavar="RUN", help="go on where this run stopped, exactly; given alone")
    options, names, fields = parser.divided(arguments)

    from .train.session import run, run_name

    if options.resume is not None:
        if names or fields or options.out:
            raise InputError("a resumed run keeps its recipe and its folder: give --resume RUN alone")
        return _training(lambda: run(None, Path(options.resume), resume=True))
    recipe = _recipe("train", _only("train", names), fields)
    return _training(lambda: run(recipe, Path(options.out) if options.out else Path("runs") / run_name(recipe)))


def _eval(arguments: list[str]) -> int:
    from .train.session import evaluate_run

    parser = _Parser("eval", "Score a run's model, and again with its memory emptied, exchanged and shut off.")
    parser.add_argument("run", help="its folder")
    parser.add_argument("--split", choices=("valid", "test"), default="test", help="what it is scored on (%(default)s)")
    options = parser.parse_args(arguments)
    return _training(lambda: evaluate_run(Path(options.run), options.split))


def _sample(arguments: list[str]) -> int:
    from .data.task import Sampling
    from .figures.image_grids import write_grids
    from .train.sample import sample_run

    default = Sampling()
    parser = _Parser("sample", "Let a run's model write: pictures into RUN/sampled, all else to the screen.")
    parser.add_argument("run", help="its folder")
    parser.add_argument("--count", type=int, help="how many pictures (24), texts (1) or rows (4)")
    parser.add_argument(
        "--length", type=int, default=default.length, help="tokens of text (%(default)s); a picture has its own"
    )
    parser.add_argument("--prompt", help="text to go on from")
    parser.add_argument(
        "--temperature", type=float, default=default.temperature, help="0 takes the likeliest (%(default)s)"
    )
    parser.add_argument("--top-k", type=int, default=default.top_k, help="draw among the k likeliest (0: all)")
    parser.add_argument(
        "--top-p", type=float, default=default.top_p, help="draw among the likeliest of this share (%(default)s)"
    )
    parser.add_argument("--seed", type=int, default=default.seed, help="of the draws (%(default)s)")
    fields = vars(parser.parse_args(arguments))
    folder = Path(fields.pop("run"))

    def work() -> None:
        if (written := sample_run(folder, Sampling(**fields))) is not None:
            print(*write_grids(written), sep="\n")

    return _training(work)


def _compare(arguments: list[str]) -> int:
    about = "Train recipes on the same data, seeds and order, and put them side by side."
    takes = "RECIPE RECIPE ... [--field value ...] [--seeds N] [--out DIR] [--unwritten]"
    parser = _RecipeParser("compare", about, takes)
    parser.add_argument("--seeds", type=int, default=1, metavar="N", help="runs of each recipe (%(default)s)")
    parser.add_argument("--out", metavar="DIR", help="their folder; by default one of its own in runs")
    about = "add each cached recipe's baseline, whose cache is never written"
    parser.add_argument("--unwritten", action="store_true", help=about)
    options, names, fields = parser.divided(arguments)
    if len(names) + options.unwritten < 2 and "--help" not in fields:
        raise InputError(f"compare takes two recipes or more, found {len(names)}; mnemos list names them")

    from .train.compare import compare
    from .train.session import run_name

    recipes = [_recipe("compare", name, fields) for name in names]
    folder = Path(options.out) if options.out else Path("runs") / run_name(recipes[0], "compare")
    return _training(lambda: compare(recipes, folder, options.seeds, unwritten=options.unwritten))


def _report(arguments: list[str]) -> int:
    from .figures import report

    parser = _Parser("report", "One HTML page of runs or a comparison.")
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a folder of a run or of a comparison")
    parser.add_argument("--out", metavar="FILE", help="the page; by default report.html in the first folder")
    options = parser.parse_args(arguments)
    print(report([Path(run) for run in options.runs], Path(options.out) if options.out else None))
    return 0


def _reproduce(arguments: list[str]) -> int:
    from .papers.reproduce import Options, chosen, listing, reproduce

    parser = _Parser("reproduce", "A paper's table or figure beside ours.")
    parser.add_argument("target", nargs="?", metavar="PAPER[/CLAIM]", help="without one: lists them")
    parser.add_argument("--data", type=Path, metavar="PATH", help="a folder of CIFAR-10, MNIST or recordings; text")
    parser.add_argument("--steps", type=int, metavar="N", help="updates of each run")
    parser.add_argument("--seeds", type=int, default=1, metavar="N", help="runs of each recipe (%(default)s)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where it goes; by default runs/reproduce/PAPER")
    parser.add_argument("--run", type=Path, help="a finished run to draw, instead of a new one")
    parser.add_argument("--recipes-only", action="store_true", help="train and time nothing: say what would be")
    options = parser.parse_args(arguments)
    if options.target is None:
        print(listing())
        return 0
    paper, _ = chosen(options.target)
    wanted = Options(
        out=options.out or Path("runs") / "reproduce" / paper.name,
        data=options.data,
        steps=options.steps,
        seeds=options.seeds,
        run=options.run,
        recipes_only=options.recipes_only,
    )
    return _training(lambda: reproduce(options.target, wanted))


def _training(work: Callable[[], object]) -> int:
    """Run what may fail or be interrupted, and say so in one line."""
    from .train.stopping import Interrupted, TrainingFailed

    try:
        work()
    except TrainingFailed as error:
        print(f"mnemos: {error}", file=sys.stderr)
        return 1
    except Interrupted as stop:
        print(f"mnemos: {stop}", file=sys.stderr)
        return 130
    return 0


def _only(verb: str, names: list[str]) -> str:
    if not names:
        raise InputError(f"mnemos {verb} takes the name of a recipe first; mnemos list names them")
    if len(names) > 1:
        raise InputError(f"mnemos {verb} takes one recipe, found {' '.join(names)}; mnemos compare takes several")
    return names[0]


def _recipe(verb: str, name: str, fields: list[str]) -> Any:
    """The named recipe with the given fields changed; what tyro refuses becomes one line."""
    import contextlib
    import io

    import tyro

    from .train.recipe import Recipe

    default = registry.load("recipe", name)()
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            return tyro.cli(
                Recipe,
                prog=f"mnemos {verb} {name}",
                args=fields,
                default=default,
                config=(tyro.conf.AvoidSubcommands, tyro.conf.FlagConversionOff),
            )
    except SystemExit as stop:
        if not stop.code:  # --help
            print(said.getvalue(), end="")
            raise
        raise InputError(_one_line(said.getvalue(), f"mnemos {verb} {name} --help")) from None


def _one_line(said: str, manual: str) -> str:
    """tyro's boxed message as a sentence: what was wrong, and the nearest right name where it gives one."""
    parts = [" ".join(part.split()) for part in re.split(r"\n\W*[-─]{8,}\W*\n", re.sub(r"[│╭╮╰╯]", " ", said))]
    problem = next((part for part in parts[1:] if part), parts[0])
    meant = re.search(r"Perhaps you meant:\W+(--[\w.-]+)", said)
    hint = f"did you mean {meant[1]}?" if meant else f"see {manual}"
    return f"{problem.rstrip('.')}; {hint}"


VERBS: dict[str, Callable[[list[str]], int]] = {
    "list": _list,
    "show": _show,
    "train": _train,
    "eval": _eval,
    "sample": _sample,
    "compare": _compare,
    "report": _report,
    "reproduce": _reproduce,
}

if __name__ == "__main__":
    raise SystemExit(main())
