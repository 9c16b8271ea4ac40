"""The base class of tasks: their data, loss and metrics, and what a finished run writes beside its numbers."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from torch import Tensor, nn

from mnemos.types import InputError, State, leaves

from .batch import Batch, counted, each, pieces, row_count
from .metrics import ACCURACY, Metric, negative_log_likelihood

Split = Literal["train", "valid", "test"]


@dataclass(frozen=True)
class Sampling:
    """What `mnemos sample` generates; see `Stream.generate` for the draws. prompt: the beginning of a text.

    count: how many pictures, texts or rows; None: the task's default. length: tokens of a text.
    """

    count: int | None = None
    length: int = 500
    prompt: str | None = None
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0


class Task:
    """Base of tasks: a data set opened for training and evaluation, with its loss and its metrics.

    A subclass defines the data: `train_batch`, `batches` and `size`. All other methods work for batches of the type
    `Batch` and models that are called `model(inputs, state, mask=mask)`. A batch may be any other pytree of tensors
    whose first axis is the row; its task overrides `forward` and `loss`, and `count`, `tokens`, `resets` or `segments`
    if their defaults do not fit.

    inputs: the kind of inputs, which must equal `ModelConfig.inputs`. sizes: fields of the model's configuration that
    the data determine, by name; a field that is 0 in a recipe takes this value. metrics: runs are compared by the first
    one. reference: scores in the first metric for comparison, by name. carries_state: batch i + 1 continues the rows of
    batch i. cuts_rows: `segments` can cut rows. max_length: the greatest T of any batch; 0 without a T.
    """

    inputs: str = "tokens"
    metrics: tuple[Metric, ...] = (ACCURACY,)
    carries_state: bool = False
    cuts_rows: bool = False
    vocab_size: int = 0
    classes: int = 0
    max_length: int = 0
    reference: Mapping[str, float] = MappingProxyType({})

    @property
    def sizes(self) -> dict[str, int]:
        """By default the vocabulary, the classes (0 for all but classifications) and the longest length."""
        return {"vocab_size": self.vocab_size, "classes": self.classes, "max_length": self.max_length}

    # The data.

    def train_batch(self, index: int, batch_size: int, seed: int) -> Any:
        """Training batch `index`, of `batch_size` rows: a pure function of its arguments.

        The position in the data is the number i, so a run resumes exactly by asking for the next one, and two models
        are compared on the same order.
        """
        raise NotImplementedError

    def batches(self, split: Literal["valid", "test"], batch_size: int) -> Iterator[Any]:
        """Every row of a held-out split once, the last batch as short as it must be."""
        raise NotImplementedError

    def size(self, split: Split) -> int:
        """The number of counted targets in a split; 0 for training data without an end."""
        raise NotImplementedError

    def epoch(self, batch_size: int) -> float:
        """The number of updates in an epoch; 0 where it is not known."""
        return 0.0

    def example(self) -> Any:
        """A batch of one row of the greatest length, for counting FLOPs. By default the first validation row."""
        return each(next(iter(self.batches("valid", 1))), lambda x: x[:1])

    def close(self) -> None:
        """End worker processes, if there are any; batches can still be requested."""

    # The model on a batch.

    def forward(self, model: Any, batch: Any, state: State) -> tuple[Any, State]:
        """(outputs, state) of the model for a batch."""
        return model(batch.inputs, state, mask=batch.mask)

    def advance(self, model: Any, batch: Any, state: State) -> State:
        """The new state, for a model that has an `advance`; used for batches without a counted target."""
        return model.advance(batch.inputs, state, mask=batch.mask)

    def loss(self, model: nn.Module, outputs: Any, batch: Any) -> Tensor:
        """The sum of the losses over the batch's counted targets: a differentiable scalar.

        The trainer divides it by the number of counted targets in all micro-batches, segments and processes.
        """
        return negative_log_likelihood(model, outputs, batch)

    # Properties of a batch.

    def count(self, batch: Any) -> int:
        """Targets that the loss counts: those of a `Batch` that are not IGNORE; of any other, its rows."""
        return int(counted(batch.targets)) if isinstance(batch, Batch) else row_count(batch)

    def tokens(self, batch: Any) -> int:
        """The batch's share of the run's "tokens": tokens or frames without padding; rows of any other batch."""
        if not isinstance(batch, Batch) or not isinstance(batch.inputs, Tensor) or batch.inputs.dim() not in (2, 3):
            return row_count(batch)
        return batch.inputs.shape[:2].numel() if batch.mask is None else int(batch.mask.sum())

    def resets(self, batch: Any) -> Tensor | None:
        """[B] bool: the rows whose state is reset before the batch; None where no state is carried."""
        return batch.reset if isinstance(batch, Batch) else None

    def segments(self, batch: Any, length: int) -> Iterator[Any]:
        """The batch in segments of `length` tokens, which a model reads one after the other; 0: the batch itself."""
        return pieces([batch], length)

    def check(self, batch: Any, where: str) -> None:
        """Raise InputError, beginning with `where`, for a batch that is not what the task promises."""
        if not leaves(batch):
            raise InputError(f"{where}: expected a batch of tensors, found none in it; check the data")

    # Output of a trained model.

    def artifacts(self, model: nn.Module, folder: Path, split: Literal["valid", "test"]) -> dict[str, Any]:
        """Write files into a finished run's folder; returns entries for result.json.

        An entry that is a list of records {field: text} is shown in reports as a table where "examples" describes it:
        {"examples": {entry: {"title", "given": field, "found": field, "about": a sentence}}}.
        """
        return {}

    def show(self, model: nn.Module, split: Literal["valid", "test"]) -> Sequence[str]:
        """Lines that `mnemos eval` prints below the numbers."""
        return ()

    def sample_outputs(self, model: nn.Module, how: Sampling, folder: Path) -> bool:
        """Generate with the model, to the screen or into `folder`; returns whether it wrote pictures into `folder`.

        Raises InputError if the task's models do not generate, which is the default.
        """
        raise InputError("expected a run of a model that writes, found a task whose models do not; use mnemos eval")


SUPERVISED = Task()  # for evaluating batches of the type `Batch` without a data set
