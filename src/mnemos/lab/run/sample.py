"""`mnemos sample RUN`: text, tokens or images that a trained model generates."""

from dataclasses import replace
from pathlib import Path

from torch import nn

from mnemos.lab.evaluate.predict import read_preprocessing
from mnemos.lab.tasks.task import Sampling, Task
from mnemos.types import InputError

from .recipe_files import recipe_of_model
from .session import open_run, trained_model


def sample_run(folder: Path, sampling: Sampling) -> Path | None:
    """Print what a run's model generates, or write images to RUN/sampled. Returns this folder, or None for text.

    sampling.draft: a model, "lookup", or the folder of the run that drafts, whose vocabulary must be the same.
    Raises InputError for a run whose model generates nothing, and for options that the task does not have.
    """
    if (sampling.count is not None and sampling.count < 1) or sampling.length < 1:
        raise InputError(
            f"--count and --length: expected at least 1, found {sampling.count} and {sampling.length}; raise them"
        )
    _, task, model = open_run(folder)
    try:
        if sampling.stop is not None and not task.drafts:
            raise InputError(
                "--stop: expected none, because this task's models continue no text, found "
                f"{sampling.stop!r:.60}; leave it out"
            )
        if sampling.draft is not None:
            sampling = replace(sampling, draft=_draft(task, sampling.draft))
        return folder / "sampled" if task.sample_outputs(model, sampling, folder / "sampled") else None
    except InputError as error:
        raise InputError(f"{folder}: {error}") from None


def _draft(task: Task, draft: nn.Module | str | Path) -> nn.Module | str:
    """What drafts tokens for a task's model."""
    if not task.drafts:
        raise InputError("--draft: expected none, because this task's models continue no text, found one; leave it out")
    if isinstance(draft, nn.Module) or draft == "lookup":
        return draft
    folder, own = Path(draft), task.preprocessing()
    model = trained_model(folder, recipe_of_model(folder))
    if own is not None and (difference := own.difference(read_preprocessing(folder))) is not None:
        raise InputError(f"--draft {folder}: {difference.partition('; ')[0]}; use a run with the same vocabulary")
    return model
