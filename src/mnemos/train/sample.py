"""`mnemos sample RUN`: what a trained model writes."""

from pathlib import Path

from mnemos.data.task import Sampling
from mnemos.types import InputError

from .session import open_run


def sample_run(folder: Path, how: Sampling) -> Path | None:
    """Let a run's model write, to the screen or, pictures, into RUN/sampled, which is then returned.

    Raises InputError for a run whose task has nothing to write, and for settings that it has no use for.
    """
    if (how.count is not None and how.count < 1) or how.length < 1:
        raise InputError(f"--count and --length must be at least 1, found {how.count} and {how.length}")
    _, task, model = open_run(folder)
    try:
        return folder / "sampled" if task.sample_outputs(model, how, folder / "sampled") else None
    except InputError as error:
        raise InputError(f"{folder}: {error}") from None
