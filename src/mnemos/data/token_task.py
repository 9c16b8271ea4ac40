"""What tasks of tokens have in common: classes per row, or the next token at every place."""

from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from mnemos.generate.stream import Stream
from mnemos.types import InputError

from .batch import IGNORE, Batch
from .batch_checks import check_tokens
from .metrics import ACCURACY, BITS, LOSS, PERPLEXITY, Metric
from .task import Sampling, Task


class TokenTask(Task):
    """Base of tasks whose inputs are tokens [B, T], at most `max_length` of them, below `vocab_size`."""

    inputs: Literal["tokens"] = "tokens"

    def sample(self) -> Tensor:
        """One row of zeros [1, T], int64, as long as any batch."""
        return torch.zeros(1, self.max_length, dtype=torch.int64)

    def example(self) -> Batch:
        """One row of zeros."""
        return Batch(self.sample(), self.sample())

    def check(self, batch: Batch, where: str) -> None:
        """Raise InputError for tokens, targets or lengths out of range, or a missing `reset`."""
        check_tokens(batch, where, self.vocab_size, self.classes, self.max_length)
        if self.carries_state and batch.reset is None:
            raise InputError(f"{where}: expected `reset`, as the task carries state, found none; check the data")


class LanguageTask(TokenTask):
    """Base of tasks whose targets [B, T] are the tokens after each; judged by the loss where no guess can be right."""

    metrics: tuple[Metric, ...] = (LOSS, BITS, PERPLEXITY, ACCURACY)
    cuts_rows = True

    def sample_outputs(self, model: nn.Module, how: Sampling, folder: Path) -> bool:
        """Print rows of the test split up to what counts in them, then what is written, and what would be right."""
        if how.prompt is not None:
            raise InputError("--prompt is for text; this task's models go on from rows of its test split; leave it out")
        batch = next(iter(self.batches("test", how.count or 4)))
        for inputs, targets in zip(batch.inputs, batch.targets, strict=True):
            counted = (targets != IGNORE).nonzero().flatten()
            if not len(counted):
                continue
            first, last = int(counted[0]), int(counted[-1])
            stream = Stream(model).prefill(inputs[None, : first + 1])
            written = stream.generate(last - first + 1, generator=drawing(how), **options(how))[0][0]
            wanted = targets[first : last + 1]
            hit = int(((written == wanted) & (wanted != IGNORE)).sum())
            print(f"read    {' '.join(map(str, inputs[: first + 1].tolist()))}")
            print(f"wrote   {' '.join(map(str, written.tolist()))}")
            print(f"wanted  {' '.join('·' if t == IGNORE else str(t) for t in wanted.tolist())}")
            print(f"        {hit} of {len(counted)} right\n")
        return False


class AnsweringTask(LanguageTask):
    """A language task whose counted targets have one right answer: judged by accuracy."""

    metrics = (ACCURACY, BITS, PERPLEXITY)


def options(how: Sampling) -> dict[str, Any]:
    """How tokens are drawn, as `Stream.generate` takes it."""
    return {"temperature": how.temperature, "top_k": how.top_k, "top_p": how.top_p}


def drawing(how: Sampling) -> torch.Generator:
    """The generator that tokens are drawn with."""
    return torch.Generator().manual_seed(how.seed)
