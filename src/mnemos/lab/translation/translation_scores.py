"""Scores of translations: sacreBLEU, chrF and BLEU of Moses tokens, with their signatures."""

import functools
from collections.abc import Sequence
from typing import Any

from mnemos.libraries import sacrebleu, sacremoses

BLEU, CHRF, TOKENISED = "BLEU", "chrF", "tokenised BLEU"
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
