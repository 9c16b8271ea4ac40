"""Sub-words of translation: learned by byte-pair encoding, or read from a tokenizer.json."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from mnemos.atomic import write_text
from mnemos.lab.tasks.files import read_bytes
from mnemos.lab.tasks.vocabulary import as_characters
from mnemos.libraries import tokenizers
from mnemos.types import InputError

PAD, START, END, UNKNOWN = range(4)
SPECIAL = ("<pad>", "<s>", "</s>", "<unk>")  # of every tokenizer that translates, in this order
LEAST = 16  # sub-words: fewer hold the special tokens and hardly a letter
MARK = "▁"  # the beginning of a word


class SubWordTokens:
    """The sub-words of a tokenizer.json whose first four tokens are <pad>, <s>, </s> and <unk>.

    `train` makes such a file: byte-pair encoding (Sennrich et al. 2016) inside words and punctuation marks, with ▁ for
    the beginning of a word. The joined sub-words are the text, apart from repeated spaces and unknown characters.
    content: that of the file; source: its name, for errors.
    Raises InputError for other content, other special tokens, and if the library tokenizers is not installed.
    """

    def __init__(self, content: str, source: str = "the tokenizer") -> None:
        library: Any = tokenizers()
        self.content = content
        try:
            self.library: Any = library.Tokenizer.from_str(content)
        except Exception as error:  # the library raises Exception itself
            raise InputError(
                f"{source}: expected a tokenizer.json of the library tokenizers, found another file "
                f"({' '.join(str(error).split()):.80}); make one with mnemos tokenizer"
            ) from None
        first = tuple(self.library.id_to_token(i) for i in range(len(SPECIAL)))
        if first != SPECIAL:
            raise InputError(
                f"{source}: expected the first tokens {' '.join(SPECIAL)}, found {' '.join(map(str, first))}; make the "
                "tokenizer with mnemos tokenizer"
            )
        self.library.no_truncation()
        self.library.no_padding()
        self.library.encode_special_tokens = True  # "</s>" in a sentence is text
        self.size = int(self.library.get_vocab_size(with_added_tokens=True))
        normal = self.library.normalizer
        self.lowercase = normal is not None and normal.normalize_str("A").endswith("a")

    @classmethod
    def read(cls, path: str | Path) -> "SubWordTokens":
        """The sub-words of a tokenizer.json. Raises InputError if it cannot be read, and as the class."""
        return cls(as_characters(read_bytes(path), str(path)), str(path))

    @classmethod
    def train(
        cls,
        lines: Iterable[str],
        size: int,
        lowercase: bool = False,
        source: str = "the training split",
        option: str = "data.subwords",
    ) -> "SubWordTokens":
        """Byte-pair encoding with `size` sub-words, learned from lines of text, which are read once.

        lowercase: the text is lower-cased first. source: the name of the text, option: what sets the size, for errors.
        Equal lines in the same order give the same tokenizer. Memory: the distinct words of the text. Raises InputError
        for fewer than 16 sub-words, and for text that gives fewer than `size`.
        """
        if size < LEAST:
            raise InputError(f"{option}: expected at least {LEAST} sub-words, found {size}; raise it")
        library: Any = tokenizers()
        tokenizer = library.Tokenizer(library.models.BPE(unk_token=SPECIAL[UNKNOWN]))
        normal = [library.normalizers.NFC(), *([library.normalizers.Lowercase()] if lowercase else [])]
        tokenizer.normalizer = library.normalizers.Sequence(normal)
        tokenizer.pre_tokenizer = library.pre_tokenizers.Sequence(
            [library.pre_tokenizers.Metaspace(MARK), library.pre_tokenizers.Punctuation("isolated")]
        )
        tokenizer.decoder = library.decoders.Metaspace(MARK)
        trainer = library.trainers.BpeTrainer(vocab_size=size, special_tokens=list(SPECIAL), show_progress=False)
        tokenizer.train_from_iterator(lines, trainer)
        if (learned := tokenizer.get_vocab_size()) != size:
            problem, fix = "more characters", "raise"
            if learned < size:
                problem, fix = f"enough for {learned:,}, {len(SPECIAL)} of them special tokens", "lower"
            raise InputError(f"{source}: expected text for {size:,} sub-words, found {problem}; {fix} {option}")
        return cls(tokenizer.to_str())

    def write(self, path: str | Path) -> None:
        write_text(path, self.content)

    def encode(self, lines: Sequence[str]) -> list[list[int]]:
        """The sub-words of each line, without special tokens."""
        return [one.ids for one in self.library.encode_batch_fast(list(lines), add_special_tokens=False)]

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self.library.decode([token for token in tokens if token >= len(SPECIAL)]))
