"""The commands that train: `mnemos train` and `tokenizer`."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import arg

from mnemos.errors import InputError, say

from .parsers import Words, chosen_recipe, names_and_fields, only


def train(
    words: Words = (),
    *,
    out: str | None = None,
    start: Annotated[str | None, arg(name="from")] = None,
    log: Literal["tensorboard", "wandb", "mlflow"] | None = None,
    resume: str | None = None,
) -> int:
    """Train a recipe. The run is a folder with model, scores and checkpoints.

    Fields are settings of the recipe: `mnemos train RECIPE --help` lists them.

    Args:
        out: the run's folder; by default a new one in runs
        start: start with the weights of this run, where names and shapes agree
        log: send the measurements to this library as well, which must be installed
        resume: continue this run where it stopped; takes no other arguments, except --train.steps N to train it for
            longer
    """
    from mnemos.lab.run.session import run, run_name

    names, fields = names_and_fields(words)
    if resume is not None:
        count = " ".join(fields).replace("=", " ").removeprefix("--train.steps ")
        if names or out or start or log or (fields and not count.isdecimal()):
            raise InputError(
                "expected --resume RUN alone or with --train.steps N, because a resumed run keeps its recipe and "
                f"folder, found {' '.join([*names, *fields]) or 'other options'} too; leave it out, or start a new run "
                f"with its weights: mnemos train {Path(resume) / 'recipe.json'} --from {resume}"
            )
        run(None, Path(resume), True, steps=int(count) if fields else None)
        return 0
    if "" in (out, start):
        raise InputError("mnemos train: expected a folder after --out and --from, found an empty name; give its path")
    fields += ["--train.init-from", start] if start else []
    fields += ["--train.log", log] if log else []
    recipe = chosen_recipe("train", only("train", names), fields)
    run(recipe, Path(out) if out else Path("runs") / run_name(recipe))
    return 0


def tokenizer(files: list[Path], *, out: Path, size: int = 10_000, lowercase: bool = False) -> int:
    """Learn sub-words from text files by byte-pair encoding, and write them as a tokenizer.json.

    Args:
        files: text, a sentence per line, gzipped or not
        out: the tokenizer.json
        size: sub-words
        lowercase: lower-case the text first
    """
    from mnemos.lab.tasks.files import first_names
    from mnemos.lab.translation.parallel_text import read_lines
    from mnemos.lab.translation.translation_vocabulary import SubWordTokens

    if out.exists():
        raise InputError(f"--out {out}: expected a new file, found one; name another, or remove it")
    if not out.parent.is_dir():
        raise InputError(f"--out {out}: expected a file in a folder that exists, found no folder {out.parent}; make it")

    def lines() -> Iterator[str]:
        for file in files:
            yield from (" ".join(line.split()) for line in read_lines(file))

    made = SubWordTokens.train(lines(), size, lowercase, first_names(list(map(str, files))), "--size")
    made.write(out)
    more = "" if lowercase else " (with --data.lowercase False for recipes that lower-case)"
    say(f"{out}: {made.size:,} sub-words; --data.tokenizer {out} trains a translation with them{more}")
    return 0
