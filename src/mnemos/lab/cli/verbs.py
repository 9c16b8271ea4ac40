"""The commands by name, and `main`, which runs one and turns its errors into lines and exit codes.

0 done; 1 the work failed, the system refused, or of several files some could not be read; 2 wrong input; 130
interrupted, in training with a checkpoint saved. Each but 0 prints one line and no traceback.
"""

import importlib
import os
import shlex
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from mnemos.errors import InputError, UntestedVersion, near_name, printable, say
from mnemos.lab.errors import Interrupted, SkippedRows, TrainingFailed, one_line
from mnemos.lab.run.kept_memory import keep_freed_memory

from .interrupts import end_at_once


class Verb(NamedTuple):
    """A command: the module and name of its function, the arguments that its usage shows, and what it does."""

    function: str
    takes: str
    about: str


_GROUPS = {
    "Find and train": {
        "list": Verb("listing:list_names", "[TASK|FAMILY|RECIPE]", "list recipes, models, attentions and tasks"),
        "show": Verb("listing:show", "RECIPE [--field value ...]", "print a recipe with all its settings, as JSON"),
        "train": Verb("training:train", "RECIPE [--field value ...]", "train a recipe; --resume RUN continues a run"),
        "linearise": Verb(
            "linearising:linearise", "FOLDER --text PATH ... --out RUN", "give a trained decoder a state of its own"
        ),
        "tokenizer": Verb("training:tokenizer", "FILE ... --out FILE", "learn sub-words from text"),
    },
    "Compare and look": {
        "compare": Verb(
            "comparing:compare", "RECIPE ... [--field value ...]", "train recipes beside each other, over seeds"
        ),
        "report": Verb("comparing:report", "RUN ...", "write a page about runs or a comparison"),
        "look": Verb("comparing:look", "RUN ...", "write a page that shows what a memory wrote and read"),
        "eval": Verb(
            "comparing:evaluate", "RUN [--field value ...]", "score a run's model, with its memory and without"
        ),
        "bench-memory": Verb("benchmarking:bench_memory", "[TASK ...]", "train every memory on tasks of recall"),
        "reproduce": Verb("comparing:reproduce", "[PAPER[/CLAIM]]", "reproduce a table or figure of a paper"),
    },
    "Use a trained model": {
        "predict": Verb(
            "using:predict", "RUN FILE ...", "print classes of images, words of recordings, or how texts go on"
        ),
        "sample": Verb("using:sample", "RUN", "write images or text"),
        "translate": Verb("using:translate", "RUN < FILE", "translate text, line by line"),
        "detect": Verb("using:detect", "RUN PHOTO ...", "draw boxes and masks of objects on photos"),
        "chat": Verb("chat:chat", "FOLDER", "chat with a language model of Transformers"),
        "score": Verb("using:score", "RUN_OR_FILE ...", "BLEU and chrF of translations, and whether they differ"),
        "average": Verb("using:average", "RUN", "average the weights of a run's last checkpoints"),
        "export": Verb("using:export", "RUN", "write it for Transformers, ONNX or torch.export"),
    },
    "Check": {
        "verify": Verb("listing:verify", "[OPERATION ...]", "compare every operation with its plain equations"),
    },
}
VERBS = {name: verb for group in _GROUPS.values() for name, verb in group.items()}


def usage() -> str:
    """What `mnemos --help` prints."""
    lines = ["mnemos: memory for transformers. Train models with memories, compare them, look into them.", ""]
    lines += ["A recipe is a model, its data and the settings of a training; a run is the folder of a training."]
    lines += ["Start: `mnemos train demo --out runs/demo`, then `mnemos report runs/demo`."]
    for title, verbs in _GROUPS.items():
        lines += ["", title]
        lines += [f"  {f'mnemos {name} {verb.takes}':52} {verb.about}" for name, verb in verbs.items()]
    return "\n".join([*lines, "", _END])


_END = """\
Fields are settings of the recipe, for example --model.dim 128 --model.attention linear --model.cache none.
--model hf:NAME, timm:NAME or FOLDER trains a model of Hugging Face or timm further, with the recipe's cache.
RECIPE is a name, a Python file that defines one (my_file.py, or my_file.py:NAME of several), or a file of JSON, as
`mnemos show` prints it, or of YAML.
Every command takes --plugin FILE, a Python file that registers memories, models, tasks, recipes.
`mnemos train RECIPE --help` lists all fields, `mnemos COMMAND --help` the options of a command.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code. argv: by default the program's, which Ctrl-C then ends at once."""
    if argv is None:
        end_at_once()
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        code = _run(arguments)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of the output has closed it, as in `mnemos list | head -1`
        _discard_output()
        code = 0
    except Exception as error:
        line = one_line(error)
        if line is None:
            raise
        _discard_output()
        _say(line)
        code = 1
    return code


def _run(arguments: list[str]) -> int:
    verb, *words = arguments or ["--help"]
    if verb in ("-h", "--help", "help"):
        say(usage(), end="")
        return 0
    if verb == "--version":
        from mnemos import __version__

        say(__version__)
        return 0
    _limit_spinning()
    keep_freed_memory()
    from .parsers import run_command, with_plugins  # which the help does not need

    try:
        if verb not in VERBS:
            raise InputError(f"expected a command, found {verb!r}; {near_name(verb, VERBS)}")
        with _short_warnings():
            words = with_plugins(words)
            module, _, name = VERBS[verb].function.partition(":")
            function = getattr(importlib.import_module(f".{module}", __package__), name)
            return run_command(function, verb, VERBS[verb].takes, words)
    except SystemExit as stop:  # --help
        return int(stop.code or 0)
    except (InputError, TrainingFailed) as error:
        _say(str(error))
        return 2 if isinstance(error, InputError) else 1
    except (KeyboardInterrupt, Interrupted) as stop:
        line, *more = stop.args or ("interrupted",)
        again = f": mnemos {shlex.join([*arguments, *more])}" if "the same command" in line else ""
        _say(f"{line}{again}")
        return 130


def _say(line: str) -> None:
    """Print an error as one line: a name in it may hold line ends, or what a terminal would obey."""
    shown = "".join(c if c.isprintable() else repr(c)[1:-1] for c in line)
    say(f"mnemos: {shown}", file=sys.stderr)


def _discard_output() -> None:
    """Drop what the standard output cannot take, so that Python does not try again when it ends."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextmanager
def _short_warnings() -> Iterator[None]:
    """Show a warning about the user's files or libraries as one line, without the place in the source."""
    usual = warnings.formatwarning

    def short(message: Warning | str, category: type[Warning], *where: Any, **line: Any) -> str:
        if issubclass(category, SkippedRows | UntestedVersion):
            return printable(f"mnemos: warning: {message}\n")
        return usual(message, category, *where, **line)

    warnings.formatwarning = short
    try:
        yield
    finally:
        warnings.formatwarning = usual


def _limit_spinning() -> None:
    """Let the CPU threads of PyTorch sleep when they have waited a little, unless the environment says otherwise.

    OpenMP's spin for milliseconds, and hold up other programs; threads that sleep at once halve the speed of small
    models (log/2026-11-22-spinning-limit.md). The setting is read when torch is imported.
    """
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"} & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = "30000"  # a tenth of the default


if __name__ == "__main__":
    raise SystemExit(main())
