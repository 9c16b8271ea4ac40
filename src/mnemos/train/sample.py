"""`mnemos sample RUN`: what a trained model writes."""

import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from mnemos.data.batch import IGNORE, Task
from mnemos.data.pixels import PixelTask
from mnemos.data.text import TextConfig
from mnemos.evaluate.generated_images import write_pictures
from mnemos.generate.stream import Stream
from mnemos.types import InputError

from .recipe import Recipe
from .session import open_run


@dataclass(frozen=True)
class Sampling:
    """How much is written, and how it is drawn; see `Stream.generate`. prompt: text to go on from.

    count: pictures, texts or rows; None: 24 pictures, one text, four rows.
    """

    count: int | None = None
    length: int = 500  # of text; a picture has its own
    prompt: str | None = None
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0


def sample_run(folder: Path, how: Sampling) -> Path | None:
    """Let a run's model write: pictures into RUN/sampled, which is returned, everything else to the screen.

    Raises InputError for a run of another kind than language, and for settings that it has no use for.
    """
    if (how.count is not None and how.count < 1) or how.length < 1:
        raise InputError(f"--count and --length must be at least 1, found {how.count} and {how.length}")
    recipe, task, model = open_run(folder)
    if task.kind != "language":
        raise InputError(f"{folder}: expected a run of a model that writes, found a task of {task.kind}; see eval")
    if isinstance(task, PixelTask):
        return _pictures(folder / "sampled", task, model, how)
    if isinstance(recipe.data, TextConfig):
        _text(model, how)
    else:
        _tokens(recipe, task, model, how)
    return None


def _pictures(folder: Path, task: PixelTask, model: nn.Module, how: Sampling) -> Path:
    if how.prompt is not None:
        raise InputError("--prompt is for text; a model of pictures goes on from half pictures")
    start = time.perf_counter()
    count = 24 if how.count is None else how.count
    drawn = {"temperature": how.temperature, "top_k": how.top_k, "top_p": how.top_p}
    folder.mkdir(exist_ok=True)
    found = write_pictures(model, task, folder, count, min(count, 8), how.seed, **drawn)
    completed = len(found["completions"].flatten(0, 1)) if "completions" in found else 0
    size = " x ".join(map(str, task.shape))
    seconds = time.perf_counter() - start
    print(f"{count} pictures of {size} bytes and {completed} completions of half pictures in {seconds:.1f} s")
    return folder


def _text(model: nn.Module, how: Sampling) -> None:
    prompt = (how.prompt or "").encode() or b"\0"  # byte 0 is where documents start
    stream = Stream(model).prefill(torch.tensor([list(prompt)]).expand(1 if how.count is None else how.count, -1))
    tokens, _ = stream.generate(how.length, how.temperature, how.top_k, how.top_p, _generator(how))
    for i, row in enumerate(tokens.tolist()):
        print(("\n" + "─" * 40 + "\n") * bool(i) + (prompt.strip(b"\0") + bytes(row)).decode(errors="replace"))


def _tokens(recipe: Recipe, task: Task, model: nn.Module, how: Sampling) -> None:
    """Rows of the test split, as far as what counts in them; then what is written, and what would be right."""
    if how.prompt is not None:
        raise InputError(f"--prompt is for text; {recipe.data.name} goes on from rows of its test split")
    batch = next(iter(task.batches("test", how.count or 4)))
    for inputs, targets in zip(batch.inputs, batch.targets, strict=True):
        counted = (targets != IGNORE).nonzero().flatten()
        if not len(counted):
            continue
        first, last = int(counted[0]), int(counted[-1])
        stream = Stream(model).prefill(inputs[None, : first + 1])
        written = stream.generate(last - first + 1, how.temperature, how.top_k, how.top_p, _generator(how))[0][0]
        wanted = targets[first : last + 1]
        hit = int(((written == wanted) & (wanted != IGNORE)).sum())
        print(f"read    {' '.join(map(str, inputs[: first + 1].tolist()))}")
        print(f"wrote   {' '.join(map(str, written.tolist()))}")
        print(f"wanted  {' '.join('·' if t == IGNORE else str(t) for t in wanted.tolist())}")
        print(f"        {hit} of {len(counted)} right\n")


def _generator(how: Sampling) -> torch.Generator:
    return torch.Generator().manual_seed(how.seed)
