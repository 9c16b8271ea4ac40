"""What a task is: the batches of a data set, the loss and metrics by which a model is judged, and what to look at."""

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Literal, NamedTuple

from torch import Tensor, nn

from mnemos.config import Config
from mnemos.types import InputError, JSONObject, State, leaves

from .batch import Batch, counted, each, pieces, row_count
from .metrics import ACCURACY, Metric, negative_log_likelihood
from .preprocessing import Preprocessing

HeldOut = Literal["valid", "test"]
Split = Literal["train", "valid", "test"]
SPLITS: tuple[Split, ...] = ("train", "valid", "test")


@dataclass(frozen=True)
class DataConfig(Config):
    """Base of the configurations of tasks: `build()` opens the data and returns a `mnemos.Task`."""

    kind: ClassVar[str] = "data"
    version: ClassVar[int] = 1  # of a generator: raised when equal settings begin to give other data

    def files(self) -> Sequence[str | Path] | None:
        """The files that `build` reads, in a fixed order, for a run's provenance; () for none, None if unknown."""
        return None

    def build_to_score(self, split: HeldOut, trained: Any = None) -> Any:
        """The task by which `mnemos eval` scores `split` of other data than those of the run; by default `build`'s.

        trained: the run's `Task.preprocessing`, such as its vocabulary. Data without splits are scored whole.
        """
        return self.build()

    def require(self, *rules: str) -> None:
        """Raise InputError, which quotes it, for the first rule, an expression of the fields, that does not hold."""
        for rule in rules:
            code = compile(rule, rule, "eval")
            fields = {name: getattr(self, name) for name in code.co_names if hasattr(self, name)}
            if not eval(code, {}, fields):
                values = ", ".join(f"{name} {value!r}" for name, value in fields.items())
                fix = "change one of these" if len(fields) > 1 else "change it"
                raise InputError(f"data.{next(iter(fields))}: expected {rule}, found {values}; {fix}")

    def trained_on(self, updates: int) -> str:
        """What the first `updates` updates read along the axis of the results, such as lengths: a sentence, or ""."""
        return ""

    @property
    def valid_is_test(self) -> bool:
        """Whether the validation split is the test split, by which nothing may be chosen."""
        return False

    def unscored(self) -> frozenset[str]:
        """Fields that change neither the data that are scored nor the scores: reports rank runs that differ in them."""
        return frozenset()


@dataclass(frozen=True)
class Sampling:
    """The settings of `mnemos sample`: how much a model generates, and how tokens are drawn (`Stream.generate`).

    count: number of images or texts; None: the task's default. prompt: text that the model continues.
    stop: of tasks that write text, the text at whose end a text ends; None: after `length` tokens.
    """

    count: int | None = None
    length: int = 500  # tokens of text; the length of an image is fixed
    prompt: str | None = None
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    stop: str | None = None
    seed: int = 0


class Question(NamedTuple):
    """The tokens (first, end) of a row that say a fact, those that ask for it anywhere later, and the answer."""

    fact: tuple[int, int]
    ask: tuple[int, ...]
    answer: int


class Task:
    """A data set that is opened for training and evaluation, how models are judged on it, and what there is to see.

    A subclass defines the data by `train_batch`, `batches` and `size`; everything else has a default. A batch is a
    `Batch`, or any pytree of tensors whose first axis is the row. The default loss and metrics are those of class
    `Batch` and of models called as model(inputs, state, mask=mask). A task with other batches overrides `forward` and
    `loss`, and if necessary `count`, `tokens`, `resets` and `segments`.

    Attributes:
        inputs: the kind of input (tokens, images, frames), which must equal `inputs` of the model's configuration.
        vocab_size, classes, max_length: 0 where the data have none; max_length is the greatest T of any batch.
        shuffled: `batches` has the rows in a random order, so the first batches are a random part of the split.
        carries_state: training batch i + 1 continues the rows of batch i. splits_rows: `segments` can split rows.
        about: lines that are printed before training, such as which files each split has.
        has_test: there is a test split; a run without one is scored on the validation split, and has no result "test".
        whole: every split holds all of the data, because they have no splits of their own (`build_to_score`).
        metrics: comparisons and reports use the first.
        reference: scores in the first metric to compare with, by name.
        writes_text: `sample_outputs` writes text, and knows `Sampling.prompt` and `.stop`.
        pictured: rows are pictures of classes: there are `names` of classes, and `picture(split, index)`, uint8
            [H, W, 1 or 3], by which `evaluate.explain` shows what caches do.
        other: how `words` writes every word that the vocabulary lacks, where a reader has to be told.
    """

    inputs: str = "tokens"
    vocab_size: int = 0
    classes: int = 0
    max_length: int = 0
    shuffled: bool = False
    carries_state: bool = False
    splits_rows: bool = False
    about: Sequence[str] = ()
    has_test: bool = True
    whole: bool = False
    metrics: tuple[Metric, ...] = (ACCURACY,)
    reference: Mapping[str, float] = MappingProxyType({})
    writes_text: bool = False
    pictured: bool = False
    other: str = ""

    # --- batches ---

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes that the data determine, by name of the model's field; a field that is 0 in the recipe is filled in."""
        return {"vocab_size": self.vocab_size, "classes": self.classes, "max_length": self.max_length}

    @property
    def unit(self) -> str:
        """The name of what `tokens` counts, for the tables of comparisons."""
        if self.inputs in ("images", "frames"):
            return self.inputs
        return "tokens" if self.inputs in ("tokens", "pairs") else "tokens or rows"

    def train_batch(self, index: int, batch_size: int, seed: int) -> Any:
        """Training batch `index`, from 0, a pure function of its arguments, so runs resume exactly at any."""
        raise NotImplementedError

    def batches(self, split: HeldOut, batch_size: int) -> Iterator[Any]:
        """Every row of a held-out split once; the last batch may have fewer rows."""
        raise NotImplementedError

    def size(self, split: Split) -> int:
        """The number of counted targets of a split; 0 for training data without an end."""
        raise NotImplementedError

    def epoch(self, batch_size: int) -> float:
        """The number of updates per epoch of the training split; 0 if it is unknown."""
        return 0.0

    def rows_of_batches(self, split: HeldOut, batch_size: int) -> Sequence[int] | None:
        """The rows of each of `batches`, if they are known without reading the data; None, the default, if not."""
        return None

    def chosen_batches(self, split: HeldOut, batch_size: int, numbers: Container[int]) -> Iterator[tuple[int, Any]]:
        """(number, batch) of some of `batches`, in order. By default all are read, and the others left out."""
        return ((i, batch) for i, batch in enumerate(self.batches(split, batch_size)) if i in numbers)

    def fewest_rows(self, batch_size: int) -> int:
        """The rows of the smallest training batch; fewer than `batch_size` where tokens limit a batch."""
        return batch_size

    def mean_rows(self, batch_size: int) -> float:
        """The mean number of rows of a training batch."""
        return float(batch_size)

    def example(self) -> Any:
        """A batch of one row of the greatest length, for counting FLOPs. By default the first validation row."""
        return each(next(iter(self.batches("valid", 1))), lambda x: x[:1])

    def check(self, batch: Any, where: str) -> None:
        """Raise InputError, whose text begins with `where`, for a batch that does not fit the task."""
        if not leaves(batch):
            raise InputError(f"{where}: expected a batch of tensors, found none in it; check the data")

    def close(self) -> None:
        """Stop processes that prepare batches in advance. The task can still return batches."""

    # --- loss and metrics ---

    def forward(self, model: nn.Module, batch: Any, state: State) -> tuple[Any, State]:
        """Run the model on a batch: (outputs, new state)."""
        return model(batch.inputs, state, mask=batch.mask)

    def advance(self, model: Any, batch: Any, state: State) -> State:
        """The new state only, by the model's `advance`: used for batches without a counted target."""
        return model.advance(batch.inputs, state, mask=batch.mask)

    def loss(self, model: nn.Module, outputs: Any, batch: Any) -> Tensor:
        """The sum of the losses over counted targets; the trainer divides it by their number in an update."""
        return negative_log_likelihood(model, outputs, batch)

    def count(self, batch: Any) -> int:
        """The targets that the loss counts: those that are not IGNORE; for other batches, the rows."""
        return int(counted(batch.targets)) if isinstance(batch, Batch) else row_count(batch)

    def tokens(self, batch: Any) -> int:
        """Tokens or frames without padding, for the run's token counter; for other batches, the rows."""
        if not isinstance(batch, Batch) or not isinstance(batch.inputs, Tensor) or batch.inputs.dim() not in (2, 3):
            return row_count(batch)
        return batch.inputs.shape[:2].numel() if batch.mask is None else int(batch.mask.sum())

    def resets(self, batch: Any) -> Tensor | None:
        """[B] bool: rows whose state is reset before the batch; None for tasks that carry no state."""
        return batch.reset if isinstance(batch, Batch) else None

    def segments(self, batch: Any, length: int) -> Iterator[Any]:
        """Split the batch into segments of `length` tokens, which a model reads in order; 0: the batch itself."""
        return pieces([batch], length)

    def check_model(self, model: nn.Module) -> None:
        """Raise InputError for a model that this task's data do not fit. A run calls it before it has a folder."""

    # --- results: only these methods may generate ---

    def artifacts(self, model: nn.Module, folder: Path, split: HeldOut) -> JSONObject:
        """Write files (images, transcriptions, …) to a finished run's folder; returns entries for its result.json.

        Reports show an entry that is a list of records {field: text} as a table if "examples" describes it:
        {"examples": {entry: {"title", "given": field, "found": field, "about": a sentence, "exact": whether the second
        field should equal the first (true if absent), "beside": a field that is shown before these, "compared": true to
        mark where variants differ}}}.
        """
        return {}

    def scored_artifacts(self, model: nn.Module, folder: Path, split: HeldOut, batches: Iterable[Any]) -> JSONObject:
        """`artifacts` of a run that scores `batches`, all or a part of the split (`TrainConfig.test_rows`)."""
        return self.artifacts(model, folder, split)

    def preprocessing(self) -> Preprocessing | None:
        """How `mnemos predict` prepares new files and names the outputs; None, the default, where it has no meaning."""
        return None

    def show(self, model: nn.Module, split: HeldOut) -> Sequence[str]:
        """Lines that `mnemos eval` prints below the scores."""
        return ()

    def sample_outputs(self, model: nn.Module, sampling: Sampling, folder: Path) -> bool:
        """Print what the model generates, or write images: whether it wrote images. By default InputError."""
        raise InputError(
            "expected a run of a model that generates text or images, found a task whose models do not; use mnemos "
            "eval or mnemos predict"
        )

    def words(self, tokens: Sequence[int]) -> list[tuple[str, int]] | None:
        """Group tokens into words: (text, number of tokens). None, the default, where tokens are no text."""
        return None

    def encode(self, text: bytes, where: str) -> Sequence[int]:
        """The tokens of a text; `where` says in errors where it is from. By default InputError: tokens are no text."""
        raise InputError(f"{where}: expected a run of a model that reads text, found a task of another kind")

    def question(self, tokens: Sequence[int]) -> Question | None:
        """The question that a row of tokens ends with; None, the default, where rows ask none."""
        return None


SUPERVISED = Task()  # the default methods, to evaluate batches of class `Batch` without a data set
