"""Scores of translations: sacreBLEU, chrF and BLEU of Moses tokens, with their signatures, and the paired bootstrap."""

import functools
import math
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mnemos.atomic import parse
from mnemos.errors import say
from mnemos.lab.evaluate.predict import read_preprocessing
from mnemos.libraries import sacrebleu, sacremoses
from mnemos.types import InputError

from .parallel_text import read_lines
from .translate import TranslationPreprocessing

TRANSLATIONS = "translations.jsonl"  # in a run's folder: the test split, translated
BLEU, CHRF, TOKENISED = NAMES = "BLEU", "chrF", "tokenised BLEU"
# sacreBLEU's tokenisation of languages that write no spaces; "char" needs no dictionary.
_TOKENS = {"zh": "zh", "ja": "char", "th": "char", "km": "char", "my": "char", "lo": "char"}


class Scorer:
    """Scores translations into a language: BLEU and chrF of sacreBLEU, and tokenised BLEU.

    BLEU (Papineni et al. 2002) and chrF (Popović 2015) take sentences as people write them. Tokenised BLEU is that of
    fairseq's tables and of Moses' multi-bleu: translation and reference are first tokenised by Moses' rules
    (sacremoses), so it depends on the tokeniser, and differs from BLEU by a point or more. All are 0 to 100.
    lowercase: letters are compared without case, where a model writes lower case only.
    Raises InputError if sacrebleu or sacremoses is not installed.
    """

    def __init__(self, language: str, lowercase: bool = False) -> None:
        library: Any = sacrebleu()
        self.language, self.lowercase = language, lowercase
        self._metrics: dict[str, Any] = {
            BLEU: library.metrics.BLEU(lowercase=lowercase, tokenize=_TOKENS.get(language, "13a")),
            CHRF: library.metrics.CHRF(lowercase=lowercase),
            TOKENISED: library.metrics.BLEU(lowercase=lowercase, tokenize="none", force=True),
        }
        moses = sacremoses().MosesTokenizer(lang=language)
        tokens = functools.partial(moses.tokenize, return_str=True, escape=False)
        self.tokens: Any = functools.lru_cache(maxsize=65_536)(tokens)  # references are tokenised once

    def score(self, name: str, translations: Sequence[str], references: Sequence[str]) -> float:
        """A score of a whole corpus, by its name. NaN for a corpus without sentences."""
        if not translations:
            return math.nan
        ours, theirs = self._prepare(name, translations), self._prepare(name, references)
        return min(100.0, float(self._metrics[name].corpus_score(ours, [theirs]).score))  # not 100.00000000000004

    def _prepare(self, name: str, sentences: Sequence[str]) -> list[str]:
        sentences = [unicodedata.normalize("NFC", one) for one in sentences]  # as a vocabulary writes them
        return [self.tokens(sentence) for sentence in sentences] if name == TOKENISED else sentences

    @functools.cached_property
    def signatures(self) -> dict[str, str]:
        """How each score is computed: sacreBLEU's signature, and that of the tokeniser."""
        signatures = {}
        for name, metric in self._metrics.items():
            metric.corpus_score(["a b c d"], [["a b c d"]])
            signatures[name] = str(metric.get_signature().format())
        signatures[TOKENISED] += f"|moses:sacremoses-{sacremoses().__version__}-{self.language}"
        return signatures

    def paired(
        self, name: str, systems: Sequence[Sequence[str]], references: Sequence[str], samples: int
    ) -> list[tuple[float, float]]:
        """(a score, p) of several systems' translations of the same sentences, by sacreBLEU's paired bootstrap.

        p: the chance of a difference from the first system at least as large if the two were equally good, over
        `samples` draws of the sentences with replacement (Koehn 2004), always the same ones; 1 for the first itself.
        """
        from sacrebleu.significance import PairedTest

        named: Any = [(str(number), self._prepare(name, one)) for number, one in enumerate(systems)]
        test = PairedTest(named, {name: self._metrics[name]}, [self._prepare(name, references)], "bs", samples)
        results: Any = next(values for key, values in test()[1].items() if key != "System")
        # sacrebleu counts draws above the difference. Equal systems have none, and would get the least p there is.
        same = results[0].score
        return [(float(one.score), float(one.p_value) if one.score != same else 1.0) for one in results]


class _Translated(NamedTuple):
    """A test split as a run translated it: [{"source", "reference", "translation"}]."""

    languages: tuple[str, str]
    lowercase: bool
    rows: list[dict[str, str]]

    @property
    def sentences(self) -> list[tuple[str, str]]:
        return [(row["source"], row["reference"]) for row in self.rows]


def score_systems(paths: Sequence[Path], samples: int = 1000) -> None:
    """Print the scores of runs, and of files of translations, on a test split, and whether they differ from the first.

    paths: folders of runs, whose translations are those of translations.jsonl, and text files with a translation of
    each test sentence per line, as `mnemos translate` prints them. At least one is a run: it has the references.
    Letters are compared without case if a run writes lower case only. Raises InputError for runs that did not
    translate, or not the same sentences.
    """
    if samples < 1:
        raise InputError(f"--samples: expected at least 1, found {samples}; raise it")
    runs = {path: _read(path) for path in paths if not path.is_file()}
    if not runs:
        raise InputError(
            f"{paths[0]}: expected at least one run, whose test split has the references, found files only; add one"
        )
    folder, test = next(iter(runs.items()))
    systems: list[list[str]] = []
    for path in paths:
        if path in runs:
            if (runs[path].languages, runs[path].sentences) != (test.languages, test.sentences):
                raise InputError(
                    f"{path}: expected translations of the sentences of {folder}, found others; compare runs with the "
                    "same test split"
                )
            systems.append([row["translation"] for row in runs[path].rows])
        else:
            systems.append(list(read_lines(path)))
            if len(systems[-1]) != len(test.rows):
                raise InputError(
                    f"{path}: expected a line for each of the {len(test.rows):,} test sentences of {folder}, found "
                    f"{len(systems[-1]):,} lines; translate the same file"
                )

    scorer = Scorer(test.languages[1], any(run.lowercase for run in runs.values()))
    references = [reference for _, reference in test.sentences]
    scores = {name: scorer.paired(name, systems, references, samples) for name in NAMES}
    for number, path in enumerate(paths):
        say(f"{path}: " + ", ".join(f"{name} {scores[name][number][0]:.2f}" for name in NAMES))
        for name in NAMES if number else ():
            (first, _), (score, p) = scores[name][0], scores[name][number]
            say(f"  {name} {score - first:+.2f} against the first; p = {p:.3f} by paired bootstrap")
    say(*(f"{name}: {signature}" for name, signature in scorer.signatures.items()), sep="\n")


def _read(folder: Path) -> _Translated:
    about, path = read_preprocessing(folder), folder / TRANSLATIONS
    if not isinstance(about, TranslationPreprocessing) or not path.is_file():
        raise InputError(
            f"{folder}: expected a finished run whose task is translation, found no {TRANSLATIONS}; train one to its "
            "end, or write a file with mnemos translate and name that beside a run"
        )
    rows = [parse(line) for line in read_lines(path)]
    return _Translated((about.source, about.target), about.vocabularies().target.lowercase, rows)
