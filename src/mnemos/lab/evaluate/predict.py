"""What a run's trained model says about new files: `mnemos predict RUN FILES`."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from mnemos import registry
from mnemos.atomic import parse, read_text
from mnemos.config import from_dict
from mnemos.lab.tasks.preprocessing import Predicted, Preprocessing
from mnemos.models.store import RUN_MODEL, load
from mnemos.types import InputError

PREPROCESSING = "preprocessing.json"  # in the model's folder; `Task.preprocessing` gives its content


def predict(folder: str | Path, files: Sequence[str | Path], **options: int | None) -> Iterator[Predicted]:
    """What a trained model says about each file: the classes of an image, the words of a recording, a text's end.

    folder: a finished run, or the folder of its model. files: also folders. options: those of the preprocessing
    (`Preprocessing.options`); None means the default. A file that cannot be read has a `Predicted` with a `problem`.
    Raises InputError for a run whose task reads no files, for options that do not fit, and for a folder without files.
    """
    about = read_preprocessing(Path(folder))
    chosen = {name: value for name, value in options.items() if value is not None}
    for name, value in chosen.items():
        if name not in about.options:
            names = ", ".join(f"--{one}" for one in about.options) or "no options"
            raise InputError(f"--{name}: expected {names} for a model of {about.name}, found --{name}; leave it out")
        if value < 1:
            raise InputError(f"--{name}: expected at least 1, found {value}; raise it")
    return about.predict(load(folder), [Path(file) for file in files], {**about.options, **chosen})


def _paths(folder: Path) -> tuple[Path, ...]:
    return folder / RUN_MODEL / PREPROCESSING, folder / PREPROCESSING


def has_preprocessing(folder: Path) -> bool:
    """Whether a run, or the folder of its model, has a preprocessing."""
    return any(path.is_file() for path in _paths(folder))


def read_preprocessing(folder: Path) -> Preprocessing:
    """The preprocessing that a finished run saved beside its model. folder: the run, or the folder of its model.

    Raises InputError if the run is not finished, or if files have no meaning for its task.
    """
    path = next((path for path in _paths(folder) if path.is_file()), None)
    if path is None:
        load(folder)  # raises for a folder that is no model, and for a run that is not finished
        kinds = ", ".join(sorted(registry.names("preprocessing")))
        raise InputError(
            f"{folder}: expected a model that reads files ({kinds}), found one whose task does not; evaluate it with "
            "mnemos eval RUN --data.FIELD value"
        )
    try:
        about: Preprocessing = from_dict(Preprocessing, parse(read_text(path)))
    except (ValueError, InputError) as error:
        raise InputError(f"{path}: expected a preprocessing as JSON, found an error ({error}); train again") from None
    return about
