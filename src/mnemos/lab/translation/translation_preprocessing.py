"""`mnemos predict` and `mnemos translate` for models that translate: their sub-words and how they search."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from mnemos.lab.tasks.files import read_bytes
from mnemos.lab.tasks.preprocessing import Predicted, Preprocessing
from mnemos.registry import register
from mnemos.types import InputError

from .parallel_corpus import Vocabularies
from .parallel_text import lines_of
from .translating import Decoding, Translator
from .translation_vocabulary import SubWordTokens

_STDIN = "-"


@register
@dataclass(frozen=True)
class TranslationPreprocessing(Preprocessing):
    """Translations of text files, line by line; - is the standard input.

    source, target: the languages. tokenizer: the content of the tokenizer.json of the source, and of both languages if
    `target_tokenizer` is "". longest: sub-words of a sentence. The others: see `translating.Decoding`.
    """

    name: ClassVar[str] = "translation"

    source: str
    target: str
    tokenizer: str
    target_tokenizer: str = ""
    longest: int = 250
    beams: int = 5
    length_penalty: float = 1.0

    def vocabularies(self) -> Vocabularies:
        """The run's sub-words. Raises InputError where the library tokenizers is missing."""
        source = SubWordTokens(self.tokenizer, "the run's tokenizer")
        target = SubWordTokens(self.target_tokenizer, "the run's tokenizer") if self.target_tokenizer else source
        return Vocabularies(source, target)

    def translator(self, model: Any) -> Translator:
        """The model with its sub-words. Raises InputError for a model that has others, as far as their number shows."""
        vocabularies, config = self.vocabularies(), getattr(model, "config", None)
        target = getattr(config, "vocab_size", vocabularies.target.size)
        source = getattr(config, "source_vocab_size", 0) or target  # 0: those of the target
        for side, size, found in (("source", source, vocabularies.source), ("target", target, vocabularies.target)):
            if found.size != size:
                raise InputError(
                    f"preprocessing.json: expected {size:,} sub-words of the {side}, as the model has, found a "
                    f"tokenizer of {found.size:,}; restore the file that the run wrote"
                )
        return Translator(model, vocabularies, self.longest)

    def difference(self, other: Preprocessing) -> str | None:
        """See the base class: languages and sub-words must be those of the run."""
        if not isinstance(other, TranslationPreprocessing):
            return super().difference(other)
        if (self.source, self.target) != (other.source, other.target):
            return (
                f"expected text from {self.source} to {self.target}, as the run has, found {other.source} to "
                f"{other.target}; set data.source and data.target"
            )
        if (self.tokenizer, self.target_tokenizer) != (other.tokenizer, other.target_tokenizer):
            return "expected the run's sub-words, found another tokenizer; leave data.tokenizer and data.subwords out"
        return None

    def start_problem(self, other: Preprocessing) -> str | None:
        """See the base class: as many other sub-words would take over the embeddings of these."""
        if isinstance(other, TranslationPreprocessing):
            for one, two in zip(self.vocabularies(), other.vocabularies(), strict=True):
                if one.size == two.size and one.content != two.content:
                    return (
                        f"expected a run with the {two.size:,} sub-words of the data, found one with as many others; "
                        "train both with one data.tokenizer"
                    )
        return None

    def predict(self, model: Any, files: Sequence[Path], options: Mapping[str, int]) -> Iterator[Predicted]:
        """The translation of each file, a line for each of its lines."""
        translator, decoding = self.translator(model), Decoding(self.beams, 1, self.length_penalty)
        for path in files:
            try:
                if path.is_dir():
                    raise InputError(f"{path}: expected a text file, found a folder; name the files")
                text = sys.stdin.buffer.read() if str(path) == _STDIN else read_bytes(path)
                lines = list(lines_of(iter([text]), path))  # as `mnemos translate` divides them
                found = dict(translator.translate(translator.encode(lines, _of_line(path)), decoding))
            except InputError as error:
                yield Predicted(str(path), "", problem=str(error))
                continue
            yield Predicted(str(path), "\n".join(found[i][0].text for i in range(len(lines))))


def _of_line(path: Path) -> Any:
    return lambda number: f"{path}: line {number + 1:,}"
