"""The commands that compare and show: `mnemos compare`, `eval`, `reproduce`, `report` and `look`."""

from pathlib import Path
from typing import Literal

from tyro.conf import UseAppendAction

from mnemos.errors import InputError, say
from mnemos.lab.errors import Interrupted

from .parsers import Words, names_and_fields


def compare(
    words: Words = (),
    *,
    seeds: int = 1,
    jobs: int = 1,
    out: str | None = None,
    unwritten: bool = False,
    baselines: bool = False,
    vary: UseAppendAction[tuple[tuple[str, str], ...]] = (),
    equal: str = "updates",
    minutes: float | None = None,
    rates: str | None = None,
    against: str | None = None,
    log: Literal["tensorboard", "wandb", "mlflow"] | None = None,
) -> int:
    """Train recipes on the same data, seeds and data order, and compare their scores and costs.

    By default all make equal updates of equal batches; --equal makes something else equal. Fields are settings of all
    recipes: `mnemos compare RECIPE --help` lists them.

    Args:
        seeds: runs per recipe
        jobs: runs at a time; several have one thread each
        out: the comparison's folder; by default a new one in runs
        unwritten: add each recipe with a memory again with one that stores nothing (never written): the difference is
            what the memory is worth. Where a cache is frozen at inference, a learned constant
        baselines: add this one, and one with as many parameters and no memory
        vary: FIELD V1,V2: train each recipe with each value of a field, such as model.cache.length 8,32; of several
            fields with each combination
        equal: updates (of equal batches), samples (rows, or tokens of text in segments), flops, time: the steps of each
            recipe follow from what the first one spends; parameters: MLPs get the widths that make them equal within
            5 %; also parameters,time and so on
        minutes: with --equal time: minutes of updates per run, by default those of the first recipe with its steps
        rates: learning rates, such as 3e-4,1e-3,3e-3: each recipe is trained with each and its first seed; the best on
            the validation split gets the other seeds and is reported
        against: the recipe that the others are tested against, with several seeds (the first)
        log: send the measurements to this library as well, which must be installed
    """
    names, fields = names_and_fields(words)
    count = len(names) + any("," in values for _, values in vary) + (unwritten or baselines)
    alone = count < 2 and seeds == 1 and "," not in (rates or "")
    if not names or (alone and "--help" not in fields):
        raise InputError(f"compare: expected several recipes, seeds or rates, found {len(names)}; see mnemos list")

    from mnemos.lab.compare.arguments import variants
    from mnemos.lab.compare.compare import compare
    from mnemos.lab.compare.equal import read_equal
    from mnemos.lab.compare.runs import read_rates
    from mnemos.lab.run.session import run_name

    recipes = variants(names, [*fields, *(["--train.log", log] if log else [])], vary)
    folder = Path(out) if out else Path("runs") / run_name(recipes[0], "compare")
    try:
        compare(
            recipes,
            folder,
            seeds=seeds,
            unwritten=unwritten,
            baselines=baselines,
            equal=read_equal(equal),
            minutes=minutes,
            rates=() if rates is None else read_rates(rates),
            jobs=jobs,
            against=against,
        )
    except Interrupted as stop:  # a new folder of runs has the time in its name
        raise Interrupted(stop.args[0], *(() if out else ("--out", str(folder)))) from None
    return 0


def evaluate(
    run: Path, *, split: Literal["valid", "test"] = "test", rows: int | None = None, fields: Words = ()
) -> int:
    """Evaluate a run's model, as trained and with its memory emptied, exchanged, frozen and closed.

    --data.FIELD value changes a setting of the data. --data.path OTHER (photos: --data.folder) scores a file or folder:
    the test split if it has splits of its own, else the whole of it. --model.FIELD value changes how far the model
    reads, such as --model.attention.memory 640; it changes no weights.

    Args:
        run: the run's folder
        split: the split
        rows: score so many rows, rounded up to whole batches of the run's train.batch_size; 0: all; by default as many
            as the run scored, and all of other data
    """
    from mnemos.lab.run.trained import evaluate_run

    evaluate_run(run, split, list(fields), rows)
    return 0


def reproduce(
    target: str | None = None,
    *,
    data: Path | None = None,
    steps: int | None = None,
    seeds: int = 1,
    jobs: int = 1,
    out: Path | None = None,
    run: Path | None = None,
) -> int:
    """Reproduce a table or figure of a paper, beside the paper's numbers.

    Args:
        target: PAPER or PAPER/CLAIM; without it, all claims are listed
        data: a folder of CIFAR-10, MNIST or recordings; a text
        steps: steps (updates) per run
        seeds: runs per recipe
        jobs: runs at a time; several have one thread each
        out: the results' folder; by default runs/reproduce/PAPER
        run: a finished run to draw, instead of training a new one
    """
    from mnemos.lab.papers.reproduce import Options, chosen, listing, reproduce

    if target is None:
        say(listing())
        return 0
    out = out or Path("runs") / "reproduce" / chosen(target)[0].name
    options = Options(out=out, data=data, steps=steps, seeds=seeds, jobs=jobs, run=run)
    reproduce(target, options)
    return 0


def report(runs: list[Path], *, out: Path | None = None) -> int:
    """Write an HTML page about runs or a comparison.

    Args:
        runs: the folder of a run or of a comparison
        out: the page; by default report.html in the first folder
    """
    from mnemos.lab.report import report as write_report

    page = write_report(runs, out)
    say(page)
    say(f"Open {page.resolve().as_uri()} in a browser.")
    return 0


def look(
    runs: list[Path],
    *,
    text: str | None = None,
    document: int | None = None,
    segments: int | None = None,
    out: str | None = None,
) -> int:
    """Write a page on which one looks, segment by segment, at what the memories of trained models hold.

    It shows what was written and read, what a prediction used, and what is lost when a part is emptied.

    Args:
        runs: the folder of a run or of a comparison (one run of each recipe), or a decoder of Transformers with --text
        text: a text that the models read; by default a document of the test split
        document: which document of the test split, from 0; by default the first, or of rows that ask a question, one
            told far back whose answer the models do not guess
        segments: segments at most (200), and at most 40,000 tokens of all models together
        out: the page; by default look.html in the first folder
    """
    from mnemos.lab.look.viewer import SEGMENTS, look_at_runs

    say(look_at_runs(runs, text, out, document, SEGMENTS if segments is None else segments))
    return 0
