"""`mnemos sample RUN`: text, tokens or images that a trained model generates."""

from pathlib import Path

from mnemos.data.task import Sampling
from mnemos.types import InputError

from .session import open_run


def sample_run(folder: Path, sampling: Sampling) -> Path | None:
    """Print what a run's model generates, or write images to RUN/sampled. Returns this folder, or None for text.

    Raises InputError for a run whose model generates nothing, and for options that the task does not have.
    """
    if (sampling.count is not None and sampling.count < 1) or sampling.length < 1:
        raise InputError(
            f"--count and --length: expected at least 1, found {sampling.count} and {sampling.length}; raise them"
        )
    _, task, model = open_run(folder)
    try:
        return folder / "sampled" if task.sample_outputs(model, sampling, folder / "sampled") else None
    except InputError as error:
        raise InputError(f"{folder}: {error}") from None
