"""The command line. Each command parses its arguments and calls the library function that does the work.

Exit codes: 0 done; 1 the work failed, the system refused (a full disk, a folder that cannot be written, memory), or a
file could not be predicted; 2 wrong input; 130 interrupted, in training with a checkpoint saved. Each but 0 prints one
line and no traceback.
"""

import json
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mnemos import registry
from mnemos.errors import InputError, SkippedFile, one_line

from .interrupts import end_at_once
from .parsers import CommandParser, RecipeParser, check_verb, with_plugins
from .usage import USAGE

if TYPE_CHECKING:
    from mnemos.lab.run.recipe import Recipe


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code. argv: by default the program's, which Ctrl-C then ends at once."""
    if argv is None:
        end_at_once()
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        code = _command(arguments)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of the output has closed it, as in `mnemos list | head -1`
        _discard_output()
        code = 0
    except Exception as error:
        line = one_line(error)
        if line is None:
            raise
        _discard_output()
        print(f"mnemos: {line}", file=sys.stderr)
        code = 1
    return code


def _discard_output() -> None:
    """Drop what the standard output cannot take, so that Python does not try again when it ends."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _command(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(USAGE, end="")
        return 0
    verb, rest = arguments[0], arguments[1:]
    if verb == "--version":
        from mnemos import __version__

        print(__version__)
        return 0
    _limit_spinning()
    try:
        check_verb(verb, VERBS)
        with _short_warnings():
            return VERBS[verb](with_plugins(rest))
    except SystemExit as stop:  # --help
        return int(stop.code or 0)
    except InputError as error:
        print(f"mnemos: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("mnemos: interrupted", file=sys.stderr)
        return 130


@contextmanager
def _short_warnings() -> Iterator[None]:
    """Show a warning about the user's files as one line, without the place in the source that raised it."""
    usual = warnings.formatwarning

    def short(message: Warning | str, category: type[Warning], *place: Any, **line: Any) -> str:
        shown = usual(message, category, *place, **line)
        return f"mnemos: warning: {message}\n" if issubclass(category, SkippedFile) else shown

    warnings.formatwarning = short
    try:
        yield
    finally:
        warnings.formatwarning = usual


def _limit_spinning() -> None:
    """Let the CPU threads of PyTorch sleep when they have waited a little, unless the environment says otherwise.

    By default GNU's OpenMP lets waiting threads spin for milliseconds. If another program uses the cores, they hold up
    the thread that they wait for. Threads that sleep at once halve the speed of small models on a quiet machine
    (log/2026-11-22-spinning-limit.md). OpenMP reads the setting when torch is imported; the number of threads and the
    results stay the same.
    """
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"} & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = "30000"  # a tenth of the default


def _list(arguments: list[str]) -> int:
    from .listing import ABOUT, show_names

    show_names(CommandParser("list", ABOUT), arguments)
    return 0


def _show(arguments: list[str]) -> int:
    parser = RecipeParser("show", "Print a recipe with all its settings, as JSON.", "RECIPE [--field value ...]")
    _, names, fields = parser.split(arguments)
    name = _only("show", names)

    from mnemos.config import to_dict

    found = _recipe("show", name, fields)
    print(json.dumps(to_dict(found), indent=2))
    if place := registry.places("recipe").get(name):
        print(f"mnemos: {name} is the function {place}", file=sys.stderr)
    if left := found.from_data():
        zeros = ", ".join(f"model.{field}" for field in left)
        print(f"mnemos: these fields are 0, so a run takes their values from its data: {zeros}", file=sys.stderr)
    return 0


def _train(arguments: list[str]) -> int:
    takes = "RECIPE [--field value ...] [--out DIR] [--from RUN] | --resume RUN [--train.steps N] "
    takes += "[--accept-changed-data]"
    parser = RecipeParser("train", "Train a recipe in a folder.", takes)
    parser.add_argument("--out", metavar="DIR", help="the run's folder; by default a new one in runs")
    about = (
        "continue this run where it stopped; takes no other arguments, except --train.steps N to train it for longer"
    )
    parser.add_argument("--resume", metavar="RUN", help=about)
    about = "start with the weights of this run, where names and shapes agree"
    parser.add_argument("--from", dest="start", metavar="RUN", help=about)
    about = "with --resume: continue although the data have changed since the run's last checkpoint"
    parser.add_argument("--accept-changed-data", action="store_true", help=about)
    options, names, fields = parser.split(arguments)

    from mnemos.lab.run.session import run, run_name

    if options.resume is not None:
        steps = _longer(fields)
        if names or options.out or options.start or (fields and steps is None):
            raise InputError(
                "expected --resume RUN alone or with --train.steps N, because a resumed run keeps its recipe and "
                "folder, found others; leave them out"
            )
        accept = options.accept_changed_data
        return _training(lambda: run(None, Path(options.resume), True, steps=steps, accept_changed_data=accept))
    if options.accept_changed_data:
        raise InputError("--accept-changed-data: expected --resume RUN beside it, found none; leave it out")
    if "" in (options.out, options.start):
        raise InputError("mnemos train: expected a folder after --out and --from, found an empty name; give its path")
    fields += ["--train.init-from", options.start] if options.start else []
    recipe = _recipe("train", _only("train", names), fields)
    return _training(lambda: run(recipe, Path(options.out) if options.out else Path("runs") / run_name(recipe)))


def _longer(fields: list[str]) -> int | None:
    """The number of steps, if the fields are --train.steps N alone."""
    match = re.fullmatch(r"--train.steps[ =](\d+)", " ".join(fields))
    return int(match[1]) if match else None


def _eval(arguments: list[str]) -> int:
    from mnemos.lab.run.trained import evaluate_run

    about = "Evaluate a run's model, as trained and with its memory emptied, exchanged, frozen and closed."
    more = "--data.FIELD value changes a setting of the data. --data.path OTHER (photos: --data.folder) scores a "
    more += "file or folder: the test split if it has splits of its own, else the whole of it. --model.FIELD value "
    more += "changes how far the model reads, such as --model.attention.memory 640; it changes no weights."
    parser = CommandParser(
        "eval",
        about,
        usage="mnemos eval RUN [--split SPLIT] [--rows N] [--data.FIELD value ...] [--model.FIELD value ...]",
        epilog=more,
    )
    parser.add_argument("run", help="the run's folder")
    parser.add_argument("--split", choices=("valid", "test"), default="test", help="the split (%(default)s)")
    parser.add_argument("--rows", type=int, default=0, metavar="N", help="score N rows, in whole batches (all)")
    options, fields = parser.parse_known_args(arguments)
    return _training(lambda: evaluate_run(Path(options.run), options.split, fields, options.rows))


def _predict(arguments: list[str]) -> int:
    from mnemos.lab.evaluate.predict import predict

    about = "Print what a run's model says about files: the most probable classes of images, the words of recordings, "
    parser = CommandParser("predict", f"{about}or the most probable continuation of texts.")
    parser.add_argument("run", help="the run's folder")
    about = "an image, a wav file or a text, as the model reads them, or a folder of them; - is a text from stdin"
    parser.add_argument("files", nargs="+", metavar="FILE", help=about)
    parser.add_argument("--top", type=int, metavar="N", help="classes per image (3)")
    parser.add_argument("--length", type=int, metavar="N", help="tokens that continue a text (200)")
    options = parser.parse_args(arguments)
    failed = False
    for found in predict(options.run, options.files, top=options.top, length=options.length):
        failed |= bool(found.problem)
        if found.problem:
            print(f"mnemos: {found.problem}", file=sys.stderr, flush=True)
        else:
            print(f"{found.file}: {found.text}", flush=True)
    return int(failed)


def _detect(arguments: list[str]) -> int:
    from .detection import ABOUT, detect

    return detect(CommandParser("detect", ABOUT), arguments)


def _sample(arguments: list[str]) -> int:
    from mnemos.lab.report.image_grids import write_grids
    from mnemos.lab.run.trained import sample_run
    from mnemos.lab.tasks.task import Sampling

    default = Sampling()
    parser = CommandParser("sample", "Generate with a run's model: images are written to RUN/sampled, text is printed.")
    parser.add_argument("run", help="the run's folder")
    parser.add_argument("--count", type=int, help="number of images (24), texts (1) or rows (4)")
    parser.add_argument("--length", type=int, default=default.length, help="tokens of a text (%(default)s)")
    parser.add_argument("--prompt", help="text that the model continues")
    parser.add_argument(
        "--temperature", type=float, default=default.temperature, help="0: the most probable token (%(default)s)"
    )
    parser.add_argument("--top-k", type=int, default=default.top_k, help="sample from the k most probable (0: all)")
    about = "sample from the most probable tokens of this total probability"
    parser.add_argument("--top-p", type=float, default=default.top_p, help=about)
    parser.add_argument("--min-p", type=float, default=default.min_p, help="least share of the greatest probability")
    parser.add_argument("--stop", metavar="TEXT", help="end a text where this text is written")
    parser.add_argument("--seed", type=int, default=default.seed, help="random seed (%(default)s)")
    parser.add_argument("--draft", metavar="RUN|lookup", help="draft text with a smaller run, or with the text so far")
    parser.add_argument("--drafted", type=int, default=default.drafted, help="tokens of a draft (%(default)s)")
    fields = vars(parser.parse_args(arguments))
    folder = Path(fields.pop("run"))

    def work() -> None:
        if (written := sample_run(folder, Sampling(**fields))) is not None:
            print(*write_grids(written), sep="\n")

    return _training(work)


def _compare(arguments: list[str]) -> int:
    from mnemos.lab.compare.compare_arguments import ABOUT, TAKES, add_options, settings

    parser = RecipeParser("compare", ABOUT, TAKES)
    add_options(parser)
    options, names, fields = parser.split(arguments)
    if not names and "--help" in fields:
        parser.print_help()
        return 0
    several = any("," in values for _, values in options.vary)
    count = len(names) + several + (options.unwritten or options.baselines)
    alone = count < 2 and options.seeds == 1 and "," not in (options.rates or "")
    if not names or (alone and "--help" not in fields):
        raise InputError(f"compare: expected several recipes, seeds or rates, found {len(names)}; see mnemos list")

    from mnemos.lab.compare.compare import compare
    from mnemos.lab.compare.variants import variants
    from mnemos.lab.run.session import run_name

    recipes = variants(names, fields, options.vary)
    folder = Path(options.out) if options.out else Path("runs") / run_name(recipes[0], "compare")
    switches = settings(options)
    return _training(lambda: compare(recipes, folder, **switches))


def _report(arguments: list[str]) -> int:
    from mnemos.lab.report import report

    parser = CommandParser("report", "Write an HTML page about runs or a comparison.")
    parser.add_argument("runs", nargs="+", metavar="RUN", help="the folder of a run or of a comparison")
    parser.add_argument("--out", metavar="FILE", help="the page; by default report.html in the first folder")
    options = parser.parse_args(arguments)
    print(report([Path(run) for run in options.runs], Path(options.out) if options.out else None))
    return 0


def _reproduce(arguments: list[str]) -> int:
    from mnemos.lab.papers.reproduce import Options, chosen, listing, reproduce

    parser = CommandParser("reproduce", "Reproduce a table or figure of a paper, beside the paper's numbers.")
    parser.add_argument("target", nargs="?", metavar="PAPER[/CLAIM]", help="without it, all claims are listed")
    parser.add_argument("--data", type=Path, metavar="PATH", help="a folder of CIFAR-10, MNIST or recordings; a text")
    parser.add_argument("--steps", type=int, metavar="N", help="steps (updates) per run")
    parser.add_argument("--seeds", type=int, default=1, metavar="N", help="runs per recipe (%(default)s)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="the results' folder; by default runs/reproduce/PAPER")
    parser.add_argument("--run", type=Path, help="a finished run to draw, instead of training a new one")
    parser.add_argument("--recipes-only", action="store_true", help="train nothing: print the recipes that would run")
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


def _bench_memory(arguments: list[str]) -> int:
    from mnemos.lab.bench import bench_memory
    from mnemos.lab.bench.arguments import ABOUT, read

    options = read(CommandParser("bench-memory", ABOUT), arguments)
    return _training(lambda: bench_memory(options))


def _export(arguments: list[str]) -> int:
    from mnemos.lab.run.export import ABOUT, command

    command(CommandParser("export", ABOUT), arguments)
    return 0


def _of_translation(verb: str) -> Callable[[list[str]], int]:
    """A command of translation, whose arguments `translation_cli` reads."""

    def run(arguments: list[str]) -> int:
        from .translation import ABOUT, command

        return command(verb, CommandParser(verb, ABOUT[verb]), arguments)

    return run


def _training(work: Callable[[], object]) -> int:
    """Run work that may fail or be interrupted; prints a one-line message then. Returns the exit code."""
    from mnemos.errors import Interrupted, TrainingFailed
    from mnemos.lab.run.kept_memory import keep_freed_memory

    keep_freed_memory()
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
        raise InputError(
            f"mnemos {verb}: expected the name of a recipe first, found none; mnemos list prints the names"
        )
    if len(names) > 1:
        raise InputError(f"mnemos {verb}: expected one recipe, found {' '.join(names)}; use mnemos compare for several")
    return names[0]


def _recipe(verb: str, name: str, fields: list[str]) -> "Recipe":
    """The named recipe, or that of a JSON file, with the given fields changed."""
    from mnemos.lab.run.recipe_fields import with_fields
    from mnemos.lab.run.recipe_files import find_recipe

    return with_fields(find_recipe(name), fields, f"mnemos {verb} {name}")


VERBS: dict[str, Callable[[list[str]], int]] = {
    "list": _list,
    "show": _show,
    "train": _train,
    "eval": _eval,
    "predict": _predict,
    "detect": _detect,
    "sample": _sample,
    "translate": _of_translation("translate"),
    "compare": _compare,
    "score": _of_translation("score"),
    "average": _of_translation("average"),
    "tokenizer": _of_translation("tokenizer"),
    "export": _export,
    "report": _report,
    "reproduce": _reproduce,
    "bench-memory": _bench_memory,
}

if __name__ == "__main__":
    raise SystemExit(main())
