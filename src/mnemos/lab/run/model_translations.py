"""The test split as an averaged model translates it: a run writes its translations at its end, `average` does not."""

from pathlib import Path

from mnemos.lab.evaluate.predict import has_preprocessing, read_preprocessing
from mnemos.lab.translation.translate import TranslationPreprocessing
from mnemos.lab.translation.translation import TRANSLATIONS

from .recipe_files import is_model
from .session import open_run


def translate_test_split(folder: Path) -> None:
    """Write translations.jsonl of the test split to the folder of a model that translates and has none yet.

    Does nothing for other folders. Cost: the beam search of the run's recipe over the test split. Raises InputError if
    the run's data are missing.
    """
    if not is_model(folder) or (folder / TRANSLATIONS).is_file() or not has_preprocessing(folder):
        return
    if not isinstance(read_preprocessing(folder), TranslationPreprocessing):
        return
    print(f"{folder}: translating the test split", flush=True)
    _, task, model = open_run(folder)
    try:
        task.artifacts(model, folder, "test")
    finally:
        task.close()
