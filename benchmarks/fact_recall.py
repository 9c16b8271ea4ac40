"""Training on told facts, for `linearised_arms.py`: a decoder reads facts in text and learns to answer for them.

A row is a stretch of text with facts in its first part and a question and answer for each in the rest. The loss is that
of the answers' tokens, and, unless `language` is 0, that of all other tokens: answers alone cost the decoder its
language. Sentences, names and values are others than those of `assess.recall`.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mnemos.generators import generator
from mnemos.hosts.linearised import Linearised
from mnemos.lab.linearised.assess import Reading
from mnemos.lab.linearised.stages import original, transfer_loss
from mnemos.lab.tasks.metrics import SumMetric
from mnemos.lab.tasks.task import Task
from mnemos.types import InputError, State

_NAMES = (
    "Arthur Cecil Dora Edwin Frances George Harriet Isaac Julia Kate Leonard Martha Ned Oscar Peter Rachel Simon "
    "Thomas Victor Walter Agnes Bernard Charlotte Daniel Edith Frank Helen Ivan James Laura Martin Nora Oliver Philip "
    "Robert Sarah Theodore Violet William Alice Henry Jane Kenneth Lucy Michael Rose Samuel Emma"
)
NAMES = _NAMES.split()
_THINGS = (
    "book bottle box bread brush candle cap chair clock coat cup dress feather fish glass gun hat horse knife mirror "
    "needle paper pen picture pipe plate pot ring rope shield shirt shoe stick stone sword table tea ticket watch wheel"
)
_VENUES = (
    "bank beach bridge camp castle cave church city club coast college court factory farm field hall hill hospital "
    "hotel island lake market mill mine mountain office park port prison river road school shop station street town"
)
_TOWNS = "London Paris Rome Berlin Madrid Vienna Moscow Dublin Athens Boston Chicago Milan Oxford Cambridge York Delhi"
_ANIMALS = "dog cat cow goat sheep pig duck rabbit mouse fox wolf bear deer eagle monkey"
_COLOURS = "red blue green yellow black white brown purple pink gray silver gold"
FORMS = (  # a fact, and its question up to the answer; {n} the name, {v} the value
    ("{n} has the {v}.", "What has {n}? {n} has the", _THINGS.split()),
    ("{n} bought the {v}.", "What did {n} buy? {n} bought the", _THINGS.split()),
    ("{n} went to the {v}.", "Where did {n} go? {n} went to the", _VENUES.split()),
    ("{n} works at the {v}.", "Where does {n} work? {n} works at the", _VENUES.split()),
    ("{n} comes from {v}.", "Where does {n} come from? {n} comes from", _TOWNS.split()),
    ("{n} keeps a {v}.", "What does {n} keep? {n} keeps a", _ANIMALS.split()),
    ("The coat of {n} is {v}.", "Which colour is the coat of {n}? The coat of {n} is", _COLOURS.split()),
)
STAGES = ((320, 6), (320, 6), (512, 8), (768, 10), (1280, 12))  # tokens and facts of a row, in equal shares of updates
GAP = 80  # tokens of text between the facts and the first question, at least
TRANSFER = 0.4  # share of the updates of a state that are attention transfer
GRID = tuple(float(g) for g in range(-12, 5, 2))  # ln γ
_FROM = 8  # tokens of text before the first fact
_ASKED = 14  # tokens up to the answer, which weigh most in attention transfer


class Row(NamedTuple):
    """ids [1, T]; answers [1, T]: after which token the answer comes; targets [1, A]: the first tokens of the answers.

    transfer [1]: whether it is read for attention transfer.
    """

    ids: Tensor
    answers: Tensor
    targets: Tensor
    transfer: Tensor


def row(tokenizer: Any, text: Tensor, random: np.random.Generator, length: int, facts: int) -> Row:
    """`length` tokens of `text` [N] with so many facts and questions; all names and values are drawn anew."""

    def tokens(words: str) -> Tensor:
        return torch.tensor(tokenizer(words, add_special_tokens=False)["input_ids"], dtype=torch.int64)

    # --- facts, questions and answers, and the text around them ---
    told: list[Tensor] = []
    asked: list[Tensor] = []
    values: list[Tensor] = []
    for name in random.permutation(NAMES)[:facts]:
        fact, question, known = FORMS[int(random.integers(len(FORMS)))]
        value = known[int(random.integers(len(known)))]
        told.append(tokens("\n" + fact.format(n=name, v=value) + "\n"))
        asked.append(tokens("\n" + question.format(n=name)))
        values.append(tokens(f" {value}"))
    end = tokens(".\n")
    free = length - sum(len(x) for x in (*told, *asked, *values)) - len(end) * facts
    if free < GAP + 2 * _FROM or len(text) < free or len(NAMES) < facts:
        raise InputError(f"told facts: expected room for {facts} facts in {length} tokens, found {free} left")
    begin = int(random.integers(len(text) - free + 1))
    fill = text[begin : begin + free]

    # --- where they stand ---
    last = _FROM + (free - GAP - _FROM) // 2
    at_facts = sorted(random.integers(_FROM, last + 1, facts).tolist())
    at_questions = sorted(random.integers(at_facts[-1] + GAP, free + 1, facts).tolist())
    events: list[tuple[int, Tensor, Tensor | None]] = [(at, told[i], None) for i, at in enumerate(at_facts)]
    events += [(at, asked[i], values[i]) for at, i in zip(at_questions, random.permutation(facts), strict=True)]
    parts: list[Tensor] = []
    answers: list[int] = []
    targets: list[Tensor] = []
    done = 0
    for at, words, reply in events:
        parts += [fill[done:at], words]
        done = at
        if reply is not None:
            answers.append(sum(map(len, parts)) - 1)
            targets.append(reply[0])
            parts += [reply, end]
    ids = torch.cat([*parts, fill[done:]])
    marked = torch.zeros(len(ids), dtype=torch.bool)
    marked[answers] = True
    return Row(ids[None], marked[None], torch.stack(targets)[None], torch.zeros(1, dtype=torch.bool))


def _parts(model: nn.Module, logits: Tensor, batch: Row) -> tuple[Tensor, Tensor, Tensor]:
    """The loss of the answers, the share of right ones, and the loss of the other tokens."""
    if batch.transfer.any():
        return (logits.new_zeros(()),) * 3
    answers, ids = batch.answers[0], batch.ids[0]
    others = ~answers[:-1]
    right = (logits[answers].argmax(-1) == batch.targets[0]).float().mean()
    return (
        F.cross_entropy(logits[answers], batch.targets[0]),
        right,
        F.cross_entropy(logits[:-1][others], ids[1:][others]),
    )


def _with_count(part: int, model: nn.Module, logits: Tensor, batch: Row) -> tuple[Tensor, Tensor]:
    return _parts(model, logits, batch)[part], (~batch.transfer).sum()


class FactRecall(Task):
    """Rows of told facts for a decoder. predict(ids [1, T]): the logits [T, V]; changed: attentions to transfer first.

    updates: of the whole training; language: weight of the loss of all tokens that are no answers.
    """

    metrics = tuple(
        SumMetric(name, name == "right", sums=partial(_with_count, part))
        for part, name in enumerate(("answers", "right", "text"))
    )
    has_test = False
    max_length = max(length for length, _ in STAGES)

    def __init__(
        self,
        tokenizer: Any,
        text: Tensor,
        updates: int,
        predict: Callable[[Tensor], Tensor],
        language: float = 1.0,
        decoder: Any = None,
        changed: dict[str, nn.Module] | None = None,
    ) -> None:
        self.row, self.updates, self.predict = partial(row, tokenizer, text), updates, predict
        self.language, self.decoder, self.changed = language, decoder, changed or {}

    def train_batch(self, index: int, batch_size: int, seed: int) -> Row:
        length, facts = STAGES[min(int(index / self.updates * len(STAGES)), len(STAGES) - 1)]
        first = bool(self.changed) and index < TRANSFER * self.updates
        return self.row(generator(seed, index), length, facts)._replace(transfer=torch.tensor([first]))

    def batches(self, split: str, batch_size: int) -> Iterator[Row]:
        return (self.row(generator(2**31, index), *STAGES[-1]) for index in range(8))

    def size(self, split: str) -> int:
        return 0 if split == "train" else 8

    def forward(self, model: nn.Module, batch: Row, state: State) -> tuple[Tensor, None]:
        if batch.transfer.any():
            ends = F.pad(batch.answers[0].float(), (0, _ASKED - 1)).unfold(0, _ASKED, 1).amax(1)[None] + 0.05
            return transfer_loss(self.decoder, self.changed, batch.ids, ends) * len(self.changed), None
        return self.predict(batch.ids), None

    def loss(self, model: nn.Module, outputs: Tensor, batch: Row) -> Tensor:
        if batch.transfer.any():
            return outputs
        answers, _, text = _parts(model, outputs, batch)
        return answers + self.language * text

    def count(self, batch: Row) -> int:
        return 1

    def tokens(self, batch: Row) -> int:
        return batch.ids.numel()


class SegmentReading(Reading):
    """`Reading` of a decoder with memory tokens in segments, `mnemos.hosts.remembering.Segmented`."""

    def read(self, ids: Tensor) -> Tensor:
        logits: Tensor
        logits, self.cache = self.model(ids[None], self.cache)
        return logits[0]

    def copy(self) -> "SegmentReading":
        return SegmentReading(self.model, self.cache)  # states are never changed, so both have one


@torch.no_grad()
def fit_weights(model: Any, changed: dict[str, nn.Module], ids: Tensor) -> None:
    """Set γ of every head to that of `GRID` with the least error of its output on `ids` [B, T], T > w.

    The error is Σ‖y − y*‖² over the tokens beyond the window, y* softmax attention over all tokens, with the queries,
    keys and values of the model before it was linearised. Only γ changes: what heads of a trained decoder read beyond
    their window differs by several powers of e, and a fixed start is far too small in most.
    """
    calls: dict[str, tuple[Any, Any]] = {}
    hooks = [
        module.register_forward_hook(
            lambda _, given, named, output, name=name: calls.update({name: (given, named)}), with_kwargs=True
        )
        for name, module in changed.items()
    ]
    with original(model):
        model.base_model(input_ids=ids, use_cache=False)
    for hook in hooks:
        hook.remove()
    for name, module in changed.items():
        own: Any = module.linearised
        seen: list[Any] = []
        own.read = lambda *given, own=own, seen=seen: seen.append(given) or Linearised.read(own, *given)
        try:
            module(*calls[name][0], **calls[name][1])
        finally:
            del own.read
        ((tokens, state),) = seen
        sizes = tokens.sizes
        whole = own.read(tokens._replace(sizes=sizes._replace(window=tokens.q.shape[2])), state)[0]
        errors = []
        for value in GRID:
            own.log_gamma.fill_(value)
            y = own.read(tokens, state)[0]
            errors.append((y - whole)[:, sizes.window :].square().sum((0, 1, 3)))
        own.log_gamma.copy_(torch.tensor(GRID)[torch.stack(errors).argmin(0)])
