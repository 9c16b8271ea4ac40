"""Training on told facts: a decoder with a window reads facts in real text and learns to answer for them later.

    rows = ToldRows(tokenizer, text)
    train_told(model, parameters, rows, TellingConfig(updates=300), folder)

A row is a stretch of text with facts in its first part and a question and answer for each in the rest. The loss is that
of the answers' tokens, and, unless `language` is 0, that of all other tokens: answers alone cost the decoder its
language. Sentences, names and values are others than those of `assess.recall`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mnemos.errors import say
from mnemos.generators import generator
from mnemos.lab.run import checkpoint
from mnemos.types import InputError, JSONObject

_NAMES = (
    "Arthur Cecil Dora Edwin Frances George Harriet Isaac Julia Kate Leonard Martha Ned Oscar Peter Rachel Simon "
    "Thomas Victor Walter Agnes Bernard Charlotte Daniel Edith Frank Helen Ivan James Laura Martin Nora Oliver Philip "
    "Robert Sarah Theodore Violet William Alice Henry Jane Kenneth Lucy Michael Rose Samuel Emma"
)
NAMES = tuple(_NAMES.split())
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
# A fact, and its question up to the answer; {n} the name, {v} the value.
FORMS = (
    ("{n} has the {v}.", "What has {n}? {n} has the", _THINGS.split()),
    ("{n} bought the {v}.", "What did {n} buy? {n} bought the", _THINGS.split()),
    ("{n} went to the {v}.", "Where did {n} go? {n} went to the", _VENUES.split()),
    ("{n} works at the {v}.", "Where does {n} work? {n} works at the", _VENUES.split()),
    ("{n} comes from {v}.", "Where does {n} come from? {n} comes from", _TOWNS.split()),
    ("{n} keeps a {v}.", "What does {n} keep? {n} keeps a", _ANIMALS.split()),
    ("The coat of {n} is {v}.", "Which colour is the coat of {n}? The coat of {n} is", _COLOURS.split()),
)
_FROM = 8  # tokens of text before the first fact


class ToldRow(NamedTuple):
    """ids [T]; answers [T]: after which token the answer comes; targets [A]: the first tokens of the answers."""

    ids: Tensor
    answers: Tensor
    targets: Tensor


class ToldRows:
    """Makes rows of told facts in the tokens `text` [N]. All names and values of a row are drawn anew."""

    def __init__(self, tokenizer: Any, text: Tensor, gap: int = 80) -> None:
        self.tokenizer, self.text, self.gap = tokenizer, text, gap

    def row(self, random: np.random.Generator, length: int, facts: int) -> ToldRow:
        """`length` tokens with so many facts and questions, at least `gap` tokens of text between both.

        Raises InputError if they do not fit.
        """
        names = random.permutation(NAMES)[:facts]
        told: list[Tensor] = []
        asked: list[Tensor] = []
        values: list[Tensor] = []
        for name in names:
            fact, question, known = FORMS[int(random.integers(len(FORMS)))]
            value = known[int(random.integers(len(known)))]
            told.append(self._ids("\n" + fact.format(n=name, v=value) + "\n"))
            asked.append(self._ids("\n" + question.format(n=name)))
            values.append(self._ids(f" {value}"))
        end = self._ids(".\n")
        free = length - sum(len(x) for x in (*told, *asked, *values)) - len(end) * facts
        if free < self.gap + 2 * _FROM or len(self.text) < free or len(names) < facts:
            raise InputError(f"told facts: expected room for {facts} facts in {length} tokens, found {free} left")
        begin = int(random.integers(len(self.text) - free + 1))
        fill = self.text[begin : begin + free]
        last = _FROM + (free - self.gap - _FROM) // 2
        places = sorted(random.integers(_FROM, last + 1, facts).tolist())
        later = sorted(random.integers(places[-1] + self.gap, free + 1, facts).tolist())
        events: list[tuple[int, Tensor, Tensor | None]] = [(place, told[i], None) for i, place in enumerate(places)]
        events += [(place, asked[i], values[i]) for place, i in zip(later, random.permutation(facts), strict=True)]
        parts: list[Tensor] = []
        answers: list[int] = []
        targets: list[Tensor] = []
        at = 0
        for place, words, reply in events:
            parts += [fill[at:place], words]
            at = place
            if reply is not None:
                answers.append(sum(map(len, parts)) - 1)
                targets.append(reply[0])
                parts += [reply, end]
        ids = torch.cat([*parts, fill[at:]])
        marked = torch.zeros(len(ids), dtype=torch.bool)
        marked[answers] = True
        return ToldRow(ids, marked, torch.stack(targets))

    def _ids(self, text: str) -> Tensor:
        return torch.tensor(self.tokenizer(text, add_special_tokens=False)["input_ids"], dtype=torch.int64)


@dataclass(frozen=True)
class TellingConfig:
    """The settings of `train_told`.

    Attributes:
        updates: updates of one row each.
        stages: tokens and facts of a row, one after the other in equal shares of the updates.
        warmup: updates in which the rates rise.
        decay: share of the updates at the end in which they fall to 0.
        language: weight of the mean loss of all tokens that are no answers, beside that of the answers.
        seed: random seed of the rows.
    """

    updates: int = 300
    stages: Sequence[tuple[int, int]] = ((320, 6), (320, 6), (512, 8), (768, 10), (1280, 12))
    warmup: int = 10
    decay: float = 0.2
    language: float = 1.0
    seed: int = 0


def train_told(
    predict: Callable[[ToldRow], Tensor],
    groups: Sequence[tuple[float, dict[str, nn.Parameter]]],
    rows: ToldRows,
    settings: TellingConfig,
    folder: Path,
    before: Callable[[ToldRow, float], bool] | None = None,
) -> JSONObject:
    """Train parameters on the answers of told facts, from the newest checkpoint in `folder` on.

    predict(row): the logits [T, V] after each of its tokens. groups: (rate, parameters by name). before(row, share):
    called first in every update, with the share of the updates that are done; True: it has added gradients, and nothing
    is predicted. Returns {"updates", "loss", "right", "text"}: the mean loss and share of right answers, and the mean
    loss of the other tokens, in the last stage.
    Raises RuntimeError for gradients that are not finite.
    """
    named = {name: value for _, found in groups for name, value in found.items()}
    optimizer = torch.optim.AdamW(
        [{"params": list(found.values()), "rate": rate} for rate, found in groups if found],
        weight_decay=0.0,
        betas=(0.9, 0.98),
    )
    for value in named.values():
        value.requires_grad_(True)
    folder.mkdir(parents=True, exist_ok=True)
    done, seen = _load(folder, named, optimizer)
    each = settings.updates / len(settings.stages)
    for update in range(done, settings.updates):
        length, facts = settings.stages[int(update / each)]
        row = rows.row(generator(settings.seed, update), length, facts)
        if before is None or not before(row, update / settings.updates):
            every = predict(row)
            logits = every[row.answers]
            loss = F.cross_entropy(logits, row.targets)
            others = F.cross_entropy(every[:-1][~row.answers[:-1]], row.ids[1:][~row.answers[:-1]])
            (loss + settings.language * others).backward()
            seen.append([loss.item(), (logits.argmax(-1) == row.targets).float().mean().item(), others.item()])
        falling = (settings.updates - update) / max(settings.decay * settings.updates, 1.0)
        for one in optimizer.param_groups:
            one["lr"] = one["rate"] * min(1.0, (update + 1) / settings.warmup, falling)
        nn.utils.clip_grad_norm_(named.values(), 1.0, error_if_nonfinite=True)
        optimizer.step()
        optimizer.zero_grad()
        if (update + 1) % 20 == 0 or update + 1 == settings.updates:
            _keep(folder, update + 1, seen, named, optimizer)
            if seen:
                shown = np.mean(seen[-20:], 0)
                words = f"loss {shown[0]:.3f}, right {shown[1]:.2f}, text {shown[2]:.3f}"
                say(f"{update + 1}/{settings.updates}: {words}", flush=True)
    last = np.mean(seen[-max(int(each), 1) :], 0) if seen else [float("nan")] * 3
    return {"updates": settings.updates, "loss": float(last[0]), "right": float(last[1]), "text": float(last[2])}


def _keep(
    folder: Path, update: int, seen: list[list[float]], named: dict[str, nn.Parameter], optimizer: torch.optim.Optimizer
) -> None:
    state = {
        "seen": torch.tensor(seen).view(-1, 3),
        **checkpoint.of_parameters(named, optimizer),
    }
    checkpoint.write(checkpoint.path_of(folder, update), state)
    checkpoint.prune(folder, update, keep=1)


def _load(
    folder: Path, named: dict[str, nn.Parameter], optimizer: torch.optim.Optimizer
) -> tuple[int, list[list[float]]]:
    found = checkpoint.newest(folder)
    if found is None:
        return 0, []
    update, state, _ = found
    checkpoint.into_parameters(state, named, optimizer)
    return update, state["seen"].tolist()
