"""Scores of translations, side by side, with the paired bootstrap: `mnemos score RUN RUN_OR_FILE ...`."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from mnemos.json_text import parse
from mnemos.lab.evaluate.predict import read_preprocessing
from mnemos.types import InputError, JSONObject

from .parallel_text import read_lines
from .translation_preprocessing import TranslationPreprocessing
from .translation_scores import NAMES, Difference, Scorer
from .translation_task import TRANSLATIONS


class _Translated(NamedTuple):
    """The test split as a run, or another system, translated it.

    search: the beam search, in words; "" if it is unknown.
    """

    folder: Path
    languages: tuple[str, str]
    lowercase: bool
    search: str
    sources: list[str]
    references: list[str]
    translations: list[str]


def score_runs(runs: Sequence[str | Path], samples: int = 1000) -> JSONObject:
    """Print and return the scores of runs on their test split, and the paired bootstrap of each against the first.

    runs: folders of runs, whose translations are those of translations.jsonl, and text files with a translation of each
    test sentence per line, as `mnemos translate` prints them. At least one is a run: it has the references.
    Returns {"signatures": {score: how it is computed}, "scores": {run: {score: value}}, "compared": {run: {score:
    `Difference` as a dict}}}. Letters are compared without case if a run writes lower case only. A line says where the
    beam search of a run differs from the first's. Raises InputError for runs that did not translate, or not the same
    sentences.
    """
    if samples < 1:
        raise InputError(f"--samples: expected at least 1, found {samples}; raise it")
    given = [Path(run) for run in runs]
    read = {path: _read(path) for path in given if not path.is_file()}
    if not read:
        raise InputError(
            f"{given[0]}: expected at least one run, whose test split has the references, found files only; add one"
        )
    test_split = next(iter(read.values()))
    found = [read[path] if path in read else _hypotheses(path, test_split) for path in given]
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
            if first.search and one.search and first.search != one.search:
                print(f"  searched with {one.search}, and the first with {first.search}: this adds to the difference")
    print(*(f"{name}: {signature}" for name, signature in scorer.signatures.items()), sep="\n")
    return {"signatures": scorer.signatures, "scores": scores, "compared": compared}


def _said(name: str, found: Difference) -> str:
    return (
        f"{name} {found.other - found.baseline:+.2f} against the first; p = {found.p_value:.3f} by paired bootstrap; "
        f"mean over the draws with its 95 % interval: first {found.baseline_mean:.2f} ± {found.baseline_interval:.2f}, "
        f"this {found.other_mean:.2f} ± {found.other_interval:.2f}"
    )


def _hypotheses(path: Path, test_split: _Translated) -> _Translated:
    """The translations in a text file, one per line, of the sentences of a run's test split."""
    lines = list(read_lines(path))
    if len(lines) != len(test_split.sources):
        raise InputError(
            f"{path}: expected a line for each of the {len(test_split.sources):,} test sentences of "
            f"{test_split.folder}, found {len(lines):,} lines; translate the same file"
        )
    return test_split._replace(folder=path, search="", translations=lines)


def _read(folder: Path) -> _Translated:
    about = read_preprocessing(folder)
    path = folder / TRANSLATIONS
    if not isinstance(about, TranslationPreprocessing) or not path.is_file():
        raise InputError(
            f"{folder}: expected a finished run whose task is translation, found no {TRANSLATIONS}; train one, or name "
            "an averaged model"
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
    search = f"a beam of {about.beams} and length penalty {about.length_penalty:g}"
    return _Translated(folder, (about.source, about.target), lowercase, search, sources, references, translations)
