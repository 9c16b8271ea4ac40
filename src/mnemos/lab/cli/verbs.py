"""The command line: finds the function of a command, runs it, and turns errors into lines and exit codes.

Each command is a function of its arguments that returns an exit code; a module holds those that belong together. It
parses the arguments and calls the library function that does the work.

Exit codes: 0 done; 1 the work failed, the system refused (a full disk, a folder that cannot be written, memory), or of
several files some could not be read; 2 wrong input; 130 interrupted, in training with a checkpoint saved. Each but 0
prints one line and no traceback.
"""

import importlib
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from mnemos.errors import InputError, UntestedVersion, printable, say
from mnemos.lab.errors import Interrupted, SkippedFile, TrainingFailed, one_line
from mnemos.lab.run.kept_memory import keep_freed_memory

from .interrupts import end_at_once
from .parsers import check_verb, with_plugins

VERBS = {
    "list": "listing:list_names",
    "show": "listing:show",
    "train": "training:train",
    "eval": "trained:evaluate",
    "predict": "trained:predict",
    "detect": "trained:detect",
    "sample": "trained:sample",
    "chat": "chat:chat",
    "translate": "translation:translate",
    "compare": "training:compare",
    "score": "translation:score",
    "average": "trained:average",
    "tokenizer": "translation:tokenizer",
    "linearise": "linearising:linearise",
    "export": "trained:export",
    "report": "trained:report",
    "look": "looking:look",
    "reproduce": "training:reproduce",
    "bench-memory": "training:bench_memory",
    "verify": "verify:verify",
}
USAGE = """mnemos: memory for transformers. Train models with memories, compare them, look into them.

A recipe is a model, its data and the settings of a training; a run is the folder of a training.
Start: `mnemos train demo --out runs/demo`, then `mnemos report runs/demo`.

Find and train
  mnemos list [TASK|FAMILY|RECIPE]             list the recipes, models, attentions and tasks; the recipes of a task or
                                               a family, a recipe with its variants    [--all: every recipe]
  mnemos show RECIPE [--field value ...]       print a recipe with all its settings, as JSON
  mnemos train RECIPE [--field value ...]      train a recipe    [--out DIR] [--from RUN]
  mnemos train --resume RUN                    continue an interrupted run exactly where it stopped
                                               [--train.steps N: train it for longer] [--accept-changed-data]
  mnemos linearise FOLDER --text PATH ... --out RUN
                                               give a trained decoder a state of constant size, and train what is new
                                               [--state none|linear|hedgehog|delta] [--tokens N] [--test PATH ...]
                                               [--trust-remote-code]
  mnemos tokenizer FILE ...                    learn sub-words from text    --out FILE [--size N] [--lowercase]

Compare and look
  mnemos compare RECIPE [RECIPE ...] [--field value ...]
                                               train recipes beside each other, over seeds
                                               [--seeds N] [--unwritten: and with memories that store nothing]
                                               [--baselines: also with as many parameters and no memory]
                                               [--vary FIELD V1,V2 ...] [--rates R1,R2: the best for each recipe]
                                               [--equal updates|samples|parameters|flops|time] [--minutes M]
                                               [--against NAME] [--jobs N] [--out DIR]
  mnemos report RUN ...                        write an HTML page about runs or a comparison    [--out FILE | --watch]
  mnemos look RUN ...                          write a page that shows what a memory wrote and read    [--text FILE]
                                               [--document N] [--segments N] [--out FILE]
  mnemos eval RUN                              score a run's model, with its memory and without
                                               [--split valid|test] [--rows N] [--data.FIELD value ...: on other data]
                                               [--model.FIELD value ...: settings of how far it reads]
  mnemos bench-memory [TASK ...]               train every memory on tasks of recall    [--quick: ten minutes]
                                               [--memories A,B] [--seeds N] [--steps N] [--dim N] [--rates R1,R2]
                                               [--books PATH] [--jobs N] [--out DIR]
  mnemos reproduce PAPER[/CLAIM]               reproduce a table or figure of a paper    [--data DIR] [--steps N]
                                               [--seeds N] [--out DIR] [--run RUN] [--recipes-only]

Use a trained model
  mnemos predict RUN FILE ...                  print the classes of images, the words of recordings, or how texts
                                               continue (- reads the standard input)    [--top N] [--length N]
  mnemos sample RUN                            write images or text    [--count N] [--length N] [--prompt TEXT]
                                               [--temperature T] [--top-k K] [--top-p P] [--seed N]
  mnemos translate RUN < FILE                  translate text, line by line    [--beams N] [--n-best N]
                                               [--length-penalty X]
  mnemos detect RUN PHOTO ...                  draw boxes and masks of objects on photos    [--out DIR] [--score S]
                                               [--json: print them in COCO's result format]
  mnemos chat FOLDER                           chat with a language model of Transformers    [--window N]
                                               [--sinks N] [--system TEXT] [--length N] [--temperature T] [--top-k K]
                                               [--top-p P] [--seed N] [--trust-remote-code]
  mnemos score RUN RUN ...                     BLEU and chrF of translations, and whether they differ    [--samples N]
  mnemos average RUN                           average the weights of a run's last checkpoints    [--last N] [--out DIR]
  mnemos export RUN                            write it for Transformers, ONNX or torch.export
                                               [--to hf|onnx|onnxruntime|torch] [--out DIR] [--push REPOSITORY]

Check
  mnemos verify [OPERATION ...]                compare every operation on this machine with its plain equations

Fields are settings of the recipe, for example --model.dim 128 --model.attention linear --model.cache none.
--model hf:NAME, timm:NAME or FOLDER trains a model of Hugging Face or timm further, with the recipe's cache.
RECIPE is a name, a Python file that defines one (my_file.py, or my_file.py:NAME of several), or a JSON file that
`mnemos show` printed. Every command takes --plugin FILE, a Python file that registers memories, models, tasks, recipes.
`mnemos train RECIPE --help` lists all fields, `mnemos COMMAND --help` the options of a command.
"""


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
        _say(line)
        code = 1
    return code


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


def _command(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        say(USAGE, end="")
        return 0
    verb, rest = arguments[0], arguments[1:]
    if verb == "--version":
        from mnemos import __version__

        say(__version__)
        return 0
    _limit_spinning()
    keep_freed_memory()
    try:
        check_verb(verb, VERBS)
        with _short_warnings():
            module, _, name = VERBS[verb].partition(":")
            return int(getattr(importlib.import_module(f".{module}", __package__), name)(with_plugins(rest)))
    except SystemExit as stop:  # --help
        return int(stop.code or 0)
    except (InputError, TrainingFailed) as error:
        _say(str(error))
        return 2 if isinstance(error, InputError) else 1
    except (KeyboardInterrupt, Interrupted) as stop:
        _say(str(stop) or "interrupted")
        return 130


@contextmanager
def _short_warnings() -> Iterator[None]:
    """Show a warning about the user's files or libraries as one line, without the place in the source."""
    usual = warnings.formatwarning

    def short(message: Warning | str, category: type[Warning], *place: Any, **line: Any) -> str:
        shown = usual(message, category, *place, **line)
        return (
            printable(f"mnemos: warning: {message}\n") if issubclass(category, SkippedFile | UntestedVersion) else shown
        )

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


if __name__ == "__main__":
    raise SystemExit(main())
