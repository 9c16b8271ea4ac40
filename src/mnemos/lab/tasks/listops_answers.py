"""Long ListOps for models that read from left to right: an expression, then "=", where its value is predicted."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from mnemos.registry import register
from mnemos.types import InputError

from .arrays import Rows
from .batch import IGNORE, Batch
from .buckets import Order
from .generated import GeneratedConfig
from .listops import ListOpsConfig
from .listops_generate import VOCABULARY, ZERO
from .token_task import AnsweringTask

EQUALS = len(VOCABULARY)  # the token "="


@register
@dataclass(frozen=True)
class ListOpsAnswersConfig(GeneratedConfig):
    """Long ListOps with its value as an answer: the tokens of an expression, then "=", where a digit is predicted.

    The expressions are those of `ListOpsConfig` with the same settings: min_length < length < max_length tokens of
    digits, operators and brackets, at most `max_depth` levels, 2 to `max_arguments` arguments, and digits above the
    last level with `digit_probability`. The defaults are those of Long Range Arena. `examples`: training expressions.
    The validation and the test split have `rows` expressions each. All are distinct, and drawn from `seed`.

    Shorter rows of a batch are padded behind "=", so the padding changes no prediction of a causal model. Rows of
    similar length share a batch.
    """

    name: ClassVar[str] = "listops-answers"

    min_length: int = 500
    max_length: int = 2000
    max_depth: int = 10
    max_arguments: int = 10
    digit_probability: float = 0.75
    examples: int = 96_000
    rows: int = 2_000
    seed: int = 0

    def build(self) -> "ListOpsAnswers":
        """The task: 17 tokens, those of `listops` and "=", and T = max_length. Raises InputError as `listops` does."""
        for name in ("examples", "rows"):
            if getattr(self, name) < 1:
                raise InputError(f"data.{name}: expected at least 1 expression, found {getattr(self, name)}; raise it")
        rules = (self.min_length, self.max_length, self.max_depth, self.max_arguments, self.digit_probability)
        expressions = ListOpsConfig(*rules, self.examples, self.rows, self.rows, self.seed)
        return ListOpsAnswers(expressions.generate(), self.max_length)


class ListOpsAnswers(AnsweringTask):
    """The task of `ListOpsAnswersConfig` over the three splits: one counted target per row."""

    def __init__(self, splits: dict[str, Rows], max_length: int) -> None:
        self.vocab_size, self.max_length = EQUALS + 1, max_length
        self._splits = splits
        self._order = Order(len(splits["train"]), splits["train"].lengths)

    def train_batch(self, index: int, batch_size: int, seed: int) -> Batch:
        """Training batch `index`, in the endless order that `seed` determines. T is that of its longest row."""
        return _batch(self._splits["train"], self._order.batch(index, batch_size, seed))

    def batches(self, split: Literal["valid", "test"], batch_size: int) -> Iterator[Batch]:
        """Batches that hold every row of a held-out split once, in the order of their lengths."""
        rows = self._splits[split]
        order = np.argsort(rows.lengths, kind="stable")
        for first in range(0, len(rows), batch_size):
            yield _batch(rows, order[first : first + batch_size])

    def size(self, split: Literal["train", "valid", "test"]) -> int:
        """The number of rows in a split, which is that of its answers."""
        return len(self._splits[split])

    def epoch(self, batch_size: int) -> float:
        """The number of updates in one epoch: every training row is used once."""
        return self.size("train") / batch_size

    def written(self, row: Sequence[int]) -> str:
        """The text of tokens; padding is not written."""
        return " ".join([*VOCABULARY, "="][token] for token in row if token)


def _batch(rows: Rows, chosen: NDArray[np.int64]) -> Batch:
    """Inputs and targets [B, T] of the chosen rows."""
    batch = rows.batch(chosen)
    inputs = torch.nn.functional.pad(batch.inputs, (0, 1))
    targets = torch.full_like(inputs, IGNORE)
    last = torch.from_numpy(rows.lengths[chosen])[:, None]
    inputs.scatter_(1, last, EQUALS)
    targets.scatter_(1, last, batch.targets[:, None] + ZERO)
    return Batch(inputs, targets)
