"""A task: data that are pure functions of their position, the loss, the metrics, and what a finished run leaves."""

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
    """How much `mnemos sample` writes, and how it is drawn; see `Stream.generate`. prompt: text to go on from.

    count: pictures, texts or rows; None: as many as the task chooses.
    """

    count: int | None = None
    length: int = 500  # of text; a picture has its own
    prompt: str | None = None
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0


class Task:
    """Base of tasks: a data set opened for training and evaluation, with its loss and its metrics.

    A subclass gives the data: `train_batch`, `batches` and `size`. What else the trainer asks has an answer here for
    batches that are `Batch`es and models that are called `model(inputs, state, mask=mask)`. A task of other batches,
    any pytree of tensors that lead with the rows, overrides `forward` and `loss`, and where they differ `count`,
    `tokens`, `resets` and `segments`.

    inputs: what a model is given, which must be what the model's configuration says it takes. sizes: what the data
    decide of a model: fields of its configuration, by name; one that is 0 in a recipe is filled in with it.
    metrics: the first is what the task is judged by. reference: scores in the first metric to set the others against,
    by name. carries_state: training batches i and i + 1 continue the same rows. cuts_rows: `segments` can cut rows.
    max_length: the longest T of any batch, 0 where there is no T.
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
        """How many targets of a split are counted; 0 for training data without an end."""
        raise NotImplementedError

    def epoch(self, batch_size: int) -> float:
        """In how many updates as much is seen as the training split holds; 0 where that is not known."""
        return 0.0

    def example(self) -> Any:
        """A batch of one row, as long as any: what FLOPs are counted on. By default the first validation row."""
        return each(next(iter(self.batches("valid", 1))), lambda x: x[:1])

    def close(self) -> None:
        """End what works ahead, if anything does; the task can still be asked for batches."""

    # What a model makes of a batch.

    def forward(self, model: Any, batch: Any, state: State) -> tuple[Any, State]:
        """(outputs, state) of the model for a batch."""
        return model(batch.inputs, state, mask=batch.mask)

    def advance(self, model: Any, batch: Any, state: State) -> State:
        """The state alone, for a model that has an `advance`; asked where a batch has no counted target."""
        return model.advance(batch.inputs, state, mask=batch.mask)

    def loss(self, model: nn.Module, outputs: Any, batch: Any) -> Tensor:
        """The sum of the losses of the batch's counted targets: a scalar with its gradient.

        The trainer divides it by the targets counted in all micro-batches, segments and processes of an update.
        """
        return negative_log_likelihood(model, outputs, batch)

    # What the trainer asks of a batch.

    def count(self, batch: Any) -> int:
        """Targets that the loss counts: those of a `Batch` that are not IGNORE; of any other, its rows."""
        return int(counted(batch.targets)) if isinstance(batch, Batch) else row_count(batch)

    def tokens(self, batch: Any) -> int:
        """What the run's counter of tokens counts: tokens or frames that are no padding; of other batches, rows."""
        if not isinstance(batch, Batch) or not isinstance(batch.inputs, Tensor) or batch.inputs.dim() not in (2, 3):
            return row_count(batch)
        return batch.inputs.shape[:2].numel() if batch.mask is None else int(batch.mask.sum())

    def resets(self, batch: Any) -> Tensor | None:
        """[B] bool, the rows whose state is made fresh before the batch; None where no state is carried."""
        return batch.reset if isinstance(batch, Batch) else None

    def segments(self, batch: Any, length: int) -> Iterator[Any]:
        """The batch in segments of `length` tokens, which a model reads one after the other; 0: the batch itself."""
        return pieces([batch], length)

    def check(self, batch: Any, where: str) -> None:
        """Raise InputError, beginning with `where`, for a batch that is not what the task promises."""
        if not leaves(batch):
            raise InputError(f"{where}: expected a batch of tensors, found none in it; check the data")

    # What is left and shown of a trained model.

    def artifacts(self, model: nn.Module, folder: Path, split: Literal["valid", "test"]) -> dict[str, Any]:
        """Write into a finished run's folder what the numbers do not say; returns what result.json says of it.

        An entry that is a list of records {field: text} is shown in reports as a table where "examples" describes it:
        {"examples": {entry: {"title", "given": field, "found": field, "about": a sentence}}}.
        """
        return {}

    def show(self, model: nn.Module, split: Literal["valid", "test"]) -> Sequence[str]:
        """Lines that `mnemos eval` prints below the numbers."""
        return ()

    def sample_outputs(self, model: nn.Module, how: Sampling, folder: Path) -> bool:
        """Let the model write, to the screen or into `folder`; whether there are pictures in the folder now.

        Raises InputError where nothing can be written: by default, always.
        """
        raise InputError("expected a run of a model that writes, found a task whose models do not; use mnemos eval")


SUPERVISED = Task()  # the answers for `Batch`es, where there are batches but no data set
