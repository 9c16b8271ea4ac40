"""Scores of translations: sacreBLEU, chrF and BLEU of Moses tokens, with their signatures, and the paired bootstrap.

`mnemos score RUN RUN_OR_FILE ...` compares systems side by side.
"""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mnemos.atomic import parse
from mnemos.errors import say
from mnemos.lab.evaluate.predict import read_preprocessing
from mnemos.libraries import sacrebleu, sacremoses
from mnemos.types import InputError, JSONObject

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
        """A score of a whole corpus, by its name. 0 for a corpus without sentences."""
        if not translations:
            return 0.0
        ours, theirs = self._prepare(name, translations), self._prepare(name, references)
        return float(self._metrics[name].corpus_score(ours, [theirs]).score)

    def _prepare(self, name: str, sentences: Sequence[str]) -> list[str]:
        return [self.tokens(sentence) for sentence in sentences] if name == TOKENISED else list(sentences)

    @functools.cached_property
    def signatures(self) -> dict[str, str]:
        """How each score is computed: sacreBLEU's signature, and that of the tokeniser."""
        signatures = {}
        for name, metric in self._metrics.items():
            metric.corpus_score(["a b c d"], [["a b c d"]])
            signatures[name] = str(metric.get_signature().format())
        signatures[TOKENISED] += f"|moses:sacremoses-{sacremoses().__version__}-{self.language}"
        return signatures

    def compare(
        self, baseline: Sequence[str], other: Sequence[str], references: Sequence[str], samples: int = 1000
    ) -> dict[str, "Difference"]:
        """The paired bootstrap of two systems' translations of the same sentences (Koehn 2004), by sacreBLEU.

        Both systems are scored on `samples` draws of the sentences with replacement, always the same draws (seed 12345,
        or SACREBLEU_SEED of the environment).
        """
        from sacrebleu import significance

        paired: Any = significance.PairedTest
        differences = {}
        for name, metric in self._metrics.items():
            systems = [(label, self._prepare(name, side)) for label, side in (("baseline", baseline), ("other", other))]
            test: Any = paired(systems, {name: metric}, [self._prepare(name, references)], "bs", samples)
            _, results = test()
            one, two = next(value for key, value in results.items() if key != "System")[:2]
            # sacrebleu counts draws above the difference. Equal systems have none, and would get the least p there is.
            p_value = two.p_value if one.score != two.score else 1.0
            values = (one.score, two.score, one.mean, one.ci, two.mean, two.ci, p_value)
            differences[name] = Difference(*(float(value) for value in values))
        return differences


class Difference(NamedTuple):
    """Two systems' scores: of the whole corpus, means and half-widths of the 95 % intervals over draws, and p.

    p_value: the chance of a difference at least as large if the systems were equally good.
    """

    baseline: float
    other: float
    baseline_mean: float
    baseline_interval: float
    other_mean: float
    other_interval: float
    p_value: float


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
    # --- read all: runs, and files beside the sentences of the first run ---
    paths = [Path(run) for run in runs]
    systems = {path: _read(path) for path in paths if not path.is_file()}
    if not systems:
        raise InputError(
            f"{paths[0]}: expected at least one run, whose test split has the references, found files only; add one"
        )
    test_split = next(iter(systems.values()))
    for path in paths:
        if path not in systems:
            lines = list(read_lines(path))
            if len(lines) != len(test_split.sources):
                raise InputError(
                    f"{path}: expected a line for each of the {len(test_split.sources):,} test sentences of "
                    f"{test_split.folder}, found {len(lines):,} lines; translate the same file"
                )
            systems[path] = test_split._replace(folder=path, search="", translations=lines)
    first = systems[paths[0]]
    for other in systems.values():
        if (other.languages, other.sources, other.references) != (first.languages, first.sources, first.references):
            raise InputError(
                f"{other.folder}: expected translations of the sentences of {first.folder}, found others; compare runs "
                "with the same test split"
            )

    # --- score each, and compare it with the first ---
    scorer = Scorer(first.languages[1], any(one.lowercase for one in systems.values()))
    scores, compared = {}, {}
    for path in paths:
        one, run = systems[path], str(path)
        scores[run] = {name: scorer.score(name, one.translations, one.references) for name in NAMES}
        say(f"{run}: " + ", ".join(f"{name} {value:.2f}" for name, value in scores[run].items()))
        if one is first:
            continue
        test = scorer.compare(first.translations, one.translations, first.references, samples)
        compared[run] = {name: difference._asdict() for name, difference in test.items()}
        for name, d in test.items():
            say(
                f"  {name} {d.other - d.baseline:+.2f} against the first; p = {d.p_value:.3f} by paired bootstrap; "
                f"mean over the draws with its 95 % interval: first {d.baseline_mean:.2f} ± {d.baseline_interval:.2f}, "
                f"this {d.other_mean:.2f} ± {d.other_interval:.2f}"
            )
        if first.search and one.search and first.search != one.search:
            say(f"  searched with {one.search}, and the first with {first.search}: this adds to the difference")
    say(*(f"{name}: {signature}" for name, signature in scorer.signatures.items()), sep="\n")
    return {"signatures": scorer.signatures, "scores": scores, "compared": compared}


def _read(folder: Path) -> _Translated:
    about = read_preprocessing(folder)
    path = folder / TRANSLATIONS
    written = path.is_file() and path.stat().st_size > 0
    if not isinstance(about, TranslationPreprocessing) or not written:
        raise InputError(
            f"{folder}: expected a finished run whose task is translation, found no {TRANSLATIONS} or an empty "
            "one; train one"
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
