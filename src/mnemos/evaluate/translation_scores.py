"""Scores of runs that translate, side by side, with the paired bootstrap: `mnemos score RUN RUN ...`."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from mnemos.data.parallel_text import read_lines
from mnemos.data.translation_preprocessing import TranslationPreprocessing
from mnemos.data.translation_scores import NAMES, Difference, Scorer
from mnemos.data.translation_task import TRANSLATIONS
from mnemos.json_text import parse
from mnemos.types import InputError, JSONObject

from .predict import read_preprocessing


class _Translated(NamedTuple):
    """The test split as a run translated it."""

    folder: Path
    languages: tuple[str, str]
    lowercase: bool
    sources: list[str]
    references: list[str]
    translations: list[str]


def score_runs(runs: Sequence[str | Path], samples: int = 1000) -> JSONObject:
    """Print and return the scores of runs on their test split, and the paired bootstrap of each against the first.

    The translations are those of translations.jsonl, which a run writes at its end. Returns {"signatures": {score: how
    it is computed}, "scores": {run: {score: value}}, "compared": {run: {score: `Difference` as a dict}}}. Letters are
    compared without case if a run writes lower case only. Raises InputError for runs that did not translate, or not the
    same sentences.
    """
    if samples < 1:
        raise InputError(f"--samples: expected at least 1, found {samples}; raise it")
    found = [_read(Path(run)) for run in runs]
    first = found[0]
    for other in found[1:]:
        if (other.languages, other.sources, other.references) != (first.languages, first.sources, first.references):
            raise InputError(
                f"{other.folder}: expected translations of the sentences of {first.folder}, found others; compare runs "
                "with the same test split"
            )
    scorer = Scorer(first.languages[1], any(one.lowercase for one in found))
    scores, compared = {}, {}
    for one in found:
        scores[str(one.folder)] = {name: scorer.score(name, one.translations, one.references) for name in NAMES}
        print(f"{one.folder}: " + ", ".join(f"{name} {value:.2f}" for name, value in scores[str(one.folder)].items()))
        if one is not first:
            test = scorer.compared(first.translations, one.translations, first.references, samples)
            compared[str(one.folder)] = {name: difference._asdict() for name, difference in test.items()}
            print(*(f"  {_said(name, difference)}" for name, difference in test.items()), sep="\n")
    print(*(f"{name}: {signature}" for name, signature in scorer.signatures.items()), sep="\n")
    return {"signatures": scorer.signatures, "scores": scores, "compared": compared}


def _said(name: str, found: Difference) -> str:
    return (
        f"{name} {found.other - found.baseline:+.2f} against the first; p = {found.p_value:.3f} by paired bootstrap; "
        f"95 % intervals {found.baseline_mean:.2f} ± {found.baseline_interval:.2f} and {found.other_mean:.2f} ± "
        f"{found.other_interval:.2f}"
    )


def _read(folder: Path) -> _Translated:
    about = read_preprocessing(folder)
    path = folder / TRANSLATIONS
    if not isinstance(about, TranslationPreprocessing) or not path.is_file():
        raise InputError(
            f"{folder}: expected a finished run whose task is translation, found no {TRANSLATIONS}; train one"
        )
    rows = []
    for number, line in enumerate(read_lines(path), start=1):
        try:
            row = parse(line)
            rows.append((row["source"], row["reference"], row["translation"]))
        except (ValueError, KeyError, TypeError):
            raise InputError(
                f"{path}: line {number:,}: expected a sentence with its translation as JSON, found {line!r:.40}; train "
                "the run again"
            ) from None
    sources, references, translations = (list(column) for column in zip(*rows, strict=True))
    lowercase = about.vocabularies().target.lowercase
    return _Translated(folder, (about.source, about.target), lowercase, sources, references, translations)
