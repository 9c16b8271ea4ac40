"""What a task gives to the loop: batches that are pure functions of their position."""

from collections.abc import Iterable, Iterator
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

# Text and pictures, of which no guess is right, are judged by loss; what is heard by the edits that would mend it.
Metric = Literal["accuracy", "loss", "token error rate"]
IGNORE = -100  # a target that no loss and no metric counts


class Batch(NamedTuple):
    """One step's data.

    inputs [B, T] int64 token ids, [B, C, H, W] float32 images, normalised, or [B, T, bands] float32 frames of sound;
    targets [B] (a class a row), [B, classes] float32 (probabilities, where training mixes images or smooths labels),
    [B, T] (the token after each, IGNORE where none counts) or, of frames, [B, L] (the tokens said, IGNORE behind them);
    mask [B, T] bool, True = valid, or None where nothing is padded; reset [B] bool, True where the row starts a new
    document and its state must be made fresh first, or None where no state is carried.
    """

    inputs: Tensor
    targets: Tensor
    mask: Tensor | None = None
    reset: Tensor | None = None


def pieces(batches: Iterable[Batch], length: int) -> Iterator[Batch]:
    """Batches of rows of tokens [B, T], each in pieces [B, length], the last maybe shorter; 0: batches as they are.

    A model reads them one after the other and hands its state on: `reset` says that all rows of a first piece start.
    """
    for batch in batches:
        if not length:
            yield batch
            continue
        for start in range(0, batch.inputs.shape[1], length):
            span = slice(start, start + length)
            fresh = torch.full((len(batch.inputs),), start == 0, device=batch.inputs.device)
            mask = None if batch.mask is None else batch.mask[:, span]
            yield Batch(batch.inputs[:, span], batch.targets[:, span], mask, fresh)


class Task(Protocol):
    """A data set opened for training and evaluation.

    `train_batch(i, ...)` is a pure function of its arguments: the position in the data is the number i, so a
    run resumes exactly by asking for the next one, and two models are compared on the same order.
    """

    kind: Literal["classification", "language", "transcription"]
    inputs: Literal["tokens", "images", "frames"]
    vocab_size: int  # of frames: how many tokens can be said; 0 for images
    classes: int  # 0 for all but classification
    max_length: int  # the longest T of any batch; 0 for images
    carries_state: bool  # train batches i and i+1 continue the same streams
    majority: float | None  # share of the commonest class in the test split; None for all but classification
    metric: Metric  # what it is judged by on its test split

    def train_batch(self, index: int, batch_size: int, seed: int) -> Batch: ...

    def batches(self, split: Literal["valid", "test"], batch_size: int) -> Iterator[Batch]: ...

    def size(self, split: Literal["train", "valid", "test"]) -> int:
        """Rows (classification) or tokens (language, transcription) in a split."""
        ...

    def epoch(self, batch_size: int) -> float:
        """How many updates see as much as the training split holds; 0 where there is no telling."""
        ...

    def sample(self) -> Tensor:
        """Inputs of one row, zeros: int64 [1, T] or float32 [1, T, bands] at the longest length, or [1, C, H, W]."""
        ...

    def close(self) -> None:
        """End what works ahead, if anything does; the task can still be asked for batches."""
        ...


class TokenTask:
    """What tasks of tokens have in common."""

    inputs: Literal["tokens"] = "tokens"
    metric: Metric = "accuracy"
    max_length: int

    def sample(self) -> Tensor:
        """One row of zeros [1, T], int64, as long as any batch."""
        return torch.zeros(1, self.max_length, dtype=torch.int64)

    def epoch(self, batch_size: int) -> float:
        """No telling: sequences are drawn without an end, or rows of many lengths are read side by side."""
        return 0.0

    def close(self) -> None:
        """Nothing to end."""
