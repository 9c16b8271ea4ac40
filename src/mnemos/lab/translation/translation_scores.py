"""Scores of translations: sacreBLEU, chrF and BLEU of Moses tokens, with their signatures, and the paired bootstrap."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

from mnemos.libraries import sacrebleu, sacremoses

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
        self._moses = sacremoses().MosesTokenizer(lang=language)
        self.tokens = functools.lru_cache(maxsize=65_536)(self._tokens)  # references are tokenised once

    def _tokens(self, sentence: str) -> str:
        """A sentence as Moses' tokens, with spaces between them."""
        return str(self._moses.tokenize(sentence, return_str=True, escape=False))

    def score(self, name: str, translations: Sequence[str], references: Sequence[str]) -> float:
        """A score of a whole corpus, by its name. 0 for a corpus without sentences."""
        if not translations:
            return 0.0
        given = [self._prepared(name, side) for side in (translations, references)]
        return float(self._metrics[name].corpus_score(given[0], [given[1]]).score)

    def _prepared(self, name: str, sentences: Sequence[str]) -> list[str]:
        return [self.tokens(sentence) for sentence in sentences] if name == TOKENISED else list(sentences)

    @functools.cached_property
    def signatures(self) -> dict[str, str]:
        """How each score is computed: sacreBLEU's signature, and that of the tokeniser."""
        found = {}
        for name, metric in self._metrics.items():
            metric.corpus_score(["a b c d"], [["a b c d"]])
            found[name] = str(metric.get_signature().format())
        found[TOKENISED] += f"|moses:sacremoses-{sacremoses().__version__}-{self.language}"
        return found

    def compared(
        self, baseline: Sequence[str], other: Sequence[str], references: Sequence[str], samples: int = 1000
    ) -> dict[str, "Difference"]:
        """The paired bootstrap of two systems' translations of the same sentences (Koehn 2004), by sacreBLEU.

        Both systems are scored on `samples` draws of the sentences with replacement, always the same draws (seed 12345,
        or SACREBLEU_SEED of the environment).
        """
        from sacrebleu import significance

        paired: Any = significance.PairedTest

        found = {}
        for name, metric in self._metrics.items():
            systems = [
                (label, self._prepared(name, side)) for label, side in (("baseline", baseline), ("other", other))
            ]
            test = paired(systems, {name: metric}, [self._prepared(name, references)], "bs", samples)
            _, results = test()
            one, two = (next(iter(value for key, value in results.items() if key != "System")))[:2]
            # sacrebleu counts draws above the difference. Equal systems have none, and would get the least p there is.
            p_value = two.p_value if one.score != two.score else 1.0
            values = (one.score, two.score, one.mean, one.ci, two.mean, two.ci, p_value)
            found[name] = Difference(*(float(value) for value in values))
        return found


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
