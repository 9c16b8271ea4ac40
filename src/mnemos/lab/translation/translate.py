"""Sentences translated by a trained run: `mnemos.translate` and `mnemos translate RUN < FILE`."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from mnemos.lab.evaluate.predict import read_preprocessing
from mnemos.models.store import load
from mnemos.types import InputError

from .translating import Decoding, Translation, Translator
from .translation_preprocessing import TranslationPreprocessing

MOST_BEAMS = 1000  # time and memory of a search grow with it; more than a few dozen rarely change a translation
CHUNK = 1000  # sentences that are translated, the longest first, before the first of them is returned

Progress = Callable[[int, int], None]  # (sentences that are translated, all sentences)


class TrainedTranslator:
    """The model and the sub-words of a finished run, or of the folder of its model, and how the run searches.

    Raises InputError for a path that is no folder, or whose task is not translation.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        about = read_preprocessing(self.folder)
        if not isinstance(about, TranslationPreprocessing):
            raise InputError(
                f"{folder}: expected a run whose task is translation, found one of {about.name}; use mnemos predict"
            )
        self.about = about
        self.translator: Translator = about.translator(load(self.folder).eval())

    def decoding(self, beams: int | None, n_best: int, length_penalty: float | None) -> Decoding:
        """The search; None: as the run's test split was translated. Raises InputError for numbers out of range."""
        if beams is not None and not 1 <= beams <= MOST_BEAMS:
            raise InputError(
                f"beams: expected 1 to {MOST_BEAMS:,}, the hypotheses that are kept, found {beams:,}; "
                f"{'raise' if beams < 1 else 'lower'} it"
            )
        found = Decoding(
            self.about.beams if beams is None else beams,
            n_best,
            self.about.length_penalty if length_penalty is None else length_penalty,
        )
        if not 1 <= n_best <= found.beams:
            raise InputError(f"n_best: expected 1 to {found.beams}, the number of beams, found {n_best}; change n_best")
        return found

    def translate(
        self, sentences: Sequence[str], decoding: Decoding, where: str = "sentence", progress: Progress | None = None
    ) -> Iterator[list[Translation]]:
        """The translations of each sentence, best first, in order. All sentences are checked before the first one.

        decoding: what the method of this name returns. `mnemos.translate(translator, sentences)` calls both.
        """
        for number, sentence in enumerate(sentences):
            if not isinstance(sentence, str):
                raise InputError(
                    f"{where} {number + 1:,}: expected a text (str), found {type(sentence).__name__}; decode it"
                )
        rows = self.translator.encode(sentences, lambda number: f"{where} {number + 1:,}")
        for first in range(0, len(rows), CHUNK):
            chunk: dict[int, list[Translation]] = {}
            for number, found in self.translator.translate(rows[first : first + CHUNK], decoding):
                chunk[number] = found
                if progress is not None:
                    progress(first + len(chunk), len(rows))
            yield from (chunk[number] for number in range(len(chunk)))


def translate(
    run: str | Path | TrainedTranslator,
    sentences: Sequence[str],
    beams: int | None = None,
    n_best: int = 1,
    length_penalty: float | None = None,
    progress: Progress | None = None,
) -> list[list[Translation]]:
    """Translate sentences with a trained run: a list of `n_best` (text, score) for each sentence, best first.

        mnemos.translate("runs/multi30k", ["Two dogs play."])[0][0].text

    run: the folder of a finished run or of its model; to translate again and again, a `TrainedTranslator`, which loads
    them once. sentences: as people write them; an empty one has an empty translation. beams, length_penalty: by default
    those with which the run's test split was scored. progress(done, all) is called after each sentence. Sentences of
    similar length are searched together, at most 4,096 tokens at once.
    score: the sum of the log-probabilities of the sub-words and of the end, divided by their number to the power of
    `length_penalty`, in nats. Raises InputError for a run of another task, and for a sentence that is too long.
    """
    if isinstance(sentences, str):
        raise InputError("mnemos.translate: expected a list of sentences, found a text; put it in a list")
    opened = run if isinstance(run, TrainedTranslator) else TrainedTranslator(run)
    return list(opened.translate(list(sentences), opened.decoding(beams, n_best, length_penalty), progress=progress))
