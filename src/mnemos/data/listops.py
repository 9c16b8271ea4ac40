"""Long ListOps (Long Range Arena): nested operations on digits, whose value is the class."""

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import ClassVar

from mnemos.config import DataConfig
from mnemos.types import InputError

from .arrays import ArrayTask, Rows
from .listops_generate import VOCABULARY, Rules
from .listops_stream import generate
from .listops_text import read_tsv, write_tsv

FILES = {"train": "basic_train.tsv", "valid": "basic_val.tsv", "test": "basic_test.tsv"}  # Long Range Arena's names


@dataclass(frozen=True)
class ListOpsConfig(DataConfig):
    """Long ListOps, generated from `seed`, or read from the three files of Long Range Arena in the folder `path`.

    A sample is a tree drawn as `listops_generate` says, with min_length < length < max_length (digits, operators
    and closing brackets), `max_depth` levels with the root as the first, 2 to `max_arguments` arguments, and a digit
    with `digit_probability` where both are possible. Samples differ from one another, across splits too. They come
    from one stream, test split first, then validation, then training: enlarging the training split changes
    nothing in the others. A folder's files are taken whole, whatever the sizes and rules here say.

    `workers`: processes that generate; 0 takes one a core where it pays. It never changes the samples.
    `bucketed`: batches of similar length, so that little of them is padding (on average 4%, not 45%).
    """

    name: ClassVar[str] = "listops"

    min_length: int = 500
    max_length: int = 2000
    max_depth: int = 10
    max_arguments: int = 10
    digit_probability: float = 0.75
    train_size: int = 96_000
    valid_size: int = 2_000
    test_size: int = 2_000
    seed: int = 0
    path: str | None = None
    workers: int = 0
    bucketed: bool = True

    def build(self) -> ArrayTask:
        """The task: 16 token ids (0 padding, digits 1–10, operators 11–14, closing bracket 15), 10 classes."""
        if self.path is None:
            splits = self.generate()
            longest = self.max_length - 1
        else:
            splits = {split: read_tsv(Path(self.path) / file) for split, file in FILES.items()}
            longest = max(int(rows.lengths.max()) for rows in splits.values())
        return ArrayTask(**splits, vocab_size=len(VOCABULARY), classes=10, max_length=longest, bucketed=self.bucketed)

    def generate(self) -> dict[str, Rows]:
        """The samples of the three splits."""
        sizes = {"test": self.test_size, "valid": self.valid_size, "train": self.train_size}
        for split, size in sizes.items():
            if size < 1:
                raise InputError(f"listops: expected {split}_size of at least 1, found {size}")
        rules = Rules(self.min_length, self.max_length, self.max_depth, self.max_arguments, self.digit_probability)
        rows = _generate(rules, self.seed, sum(sizes.values()), self.workers)
        splits, first = {}, 0
        for split, size in sizes.items():
            splits[split] = rows.part(first, first + size)
            first += size
        return splits

    def export(self, folder: str | Path) -> None:
        """Write the generated splits as the three files of Long Range Arena."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        for split, rows in self.generate().items():
            write_tsv(Path(folder) / FILES[split], rows)


# Runs that are compared build the same task one after the other; a hundred megabytes spare each of them seconds.
_generate = lru_cache(maxsize=1)(generate)
