"""Base classes of tasks whose inputs are tokens: classification of rows, and prediction of the next token."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from mnemos.generate.speculative import Lookup, Statistics, speculate
from mnemos.generate.stream import Stream
from mnemos.types import InputError, State, likelihood_of

from .batch import IGNORE, Batch
from .batch_checks import check_tokens
from .metrics import ACCURACY, BITS, LOSS, PERPLEXITY, Metric
from .task import Sampling, Task

LARGE = 1024  # tokens of a vocabulary: from here on the logits are most of the work of a small model


class TokenTask(Task):
    """Base of tasks whose inputs are tokens [B, T] in 0 … vocab_size − 1, with T at most `max_length`."""

    inputs: Literal["tokens"] = "tokens"

    def sample(self) -> Tensor:
        """One row of zeros [1, max_length], int64."""
        return torch.zeros(1, self.max_length, dtype=torch.int64)

    def example(self) -> Batch:
        """One row of zeros."""
        return Batch(self.sample(), self.sample())

    def check(self, batch: Batch, where: str) -> None:
        """Raise InputError for tokens, targets or lengths out of range, or a missing `reset`."""
        check_tokens(batch, where, self.vocab_size, self.classes, self.max_length)
        if self.carries_state and batch.reset is None:
            raise InputError(
                f"{where}: expected a tensor `reset`, because the task carries its state, found None; check the data"
            )


class LanguageTask(TokenTask):
    """Base of tasks whose targets [B, T] are the next tokens. The first metric is the loss."""

    metrics: tuple[Metric, ...] = (LOSS, BITS, PERPLEXITY, ACCURACY)
    splits_rows = True

    def sample_outputs(self, model: nn.Module, sampling: Sampling, folder: Path) -> bool:
        """Print rows of the test split up to their first counted target, the model's continuation, and the targets."""
        if sampling.prompt is not None:
            raise InputError(
                "--prompt: expected none, because this task's models continue rows of the test split, found "
                f"{sampling.prompt!r}; leave it out"
            )
        batch = next(iter(self.batches("test", sampling.count or 4)))
        for inputs, targets in zip(batch.inputs, batch.targets, strict=True):
            counted = (targets != IGNORE).nonzero().flatten()
            if not len(counted):
                continue
            first, last = int(counted[0]), int(counted[-1])
            stream = Stream(model).prefill(inputs[None, : first + 1])
            written = stream.generate(
                last - first + 1, generator=sampling_generator(sampling), **sampling_options(sampling)
            )[0][0]
            wanted = targets[first : last + 1]
            hit = int(((written == wanted) & (wanted != IGNORE)).sum())
            print(f"read    {self.written(inputs[: first + 1].tolist())}")
            print(f"wrote   {self.written(written.tolist())}")
            print(f"wanted  {' '.join('·' if t == IGNORE else self.written([t]) for t in wanted.tolist())}")
            print(f"        {hit} of {len(counted)} right\n")
        return False

    def written(self, row: Sequence[int]) -> str:
        """Tokens as text, for a reader: their numbers, unless the task has names for them."""
        return " ".join(map(str, row))


class AnsweringTask(LanguageTask):
    """A language task whose counted targets have one right answer. The first metric is the accuracy."""

    metrics = (ACCURACY, BITS, PERPLEXITY)

    def forward(self, model: nn.Module, batch: Batch, state: State) -> tuple[Tensor, State]:
        """Run the model on a batch: (logits, new state).

        With a vocabulary of `LARGE` tokens or more, logits are [n, V], of the n positions that have a target, if the
        model's last layer is `head`, a linear map of all positions: it is most of the work of a small model, and few
        positions count. The state is the same.
        """
        head = getattr(model, "head", None)
        compiled = hasattr(model, "_orig_mod")  # a compiled graph has the hooks of its first call
        if self.vocab_size < LARGE or not isinstance(head, nn.Linear) or likelihood_of(model) is not None or compiled:
            return super().forward(model, batch, state)
        answered = batch.targets != IGNORE

        def chosen(_: nn.Module, given: tuple[Tensor]) -> tuple[Tensor]:
            return (given[0][answered],) if given[0].shape[:-1] == answered.shape else given

        hook = head.register_forward_pre_hook(chosen)
        try:
            return super().forward(model, batch, state)
        finally:
            hook.remove()


def sampling_options(sampling: Sampling) -> dict[str, Any]:
    """The arguments of `Stream.generate` that say how tokens are drawn."""
    return {name: getattr(sampling, name) for name in ("temperature", "top_k", "top_p", "min_p")}


def sampling_generator(sampling: Sampling) -> torch.Generator:
    """The random generator for drawing tokens, seeded with `sampling.seed`."""
    return torch.Generator().manual_seed(sampling.seed)


def generated(
    model: nn.Module, prompts: Tensor, sampling: Sampling, enough: Callable[[list[Tensor]], bool] | None = None
) -> tuple[Tensor, Statistics | None]:
    """The tokens [B, sampling.length] after prompts [B, T]; and what the draft has done, if there is one.

    enough: whether the tokens so far, each [B], suffice; asked after each one if there is no draft.
    """
    stream = Stream(model).prefill(prompts)
    settings = {"generator": sampling_generator(sampling), **sampling_options(sampling)}
    if sampling.draft is None:
        tokens: list[Tensor] = []
        for token in stream.tokens(sampling.length, **settings):
            tokens.append(token)
            if enough is not None and enough(tokens):
                break
        return torch.stack(tokens, 1) if tokens else prompts.new_empty(len(prompts), 0), None
    draft = Lookup(prompts) if sampling.draft == "lookup" else Stream(sampling.draft).prefill(prompts)
    found = speculate(stream, draft, sampling.length, sampling.drafted, **settings)
    return found.tokens, found.statistics
