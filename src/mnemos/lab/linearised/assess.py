"""What any causal decoder of Transformers predicts by position of the text, and whether it recalls facts told in it."""

import copy
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mnemos import libraries
from mnemos.generators import generator
from mnemos.lab.run.progress import NoProgress
from mnemos.lab.tasks.fact_recall import PEOPLE, PLACES
from mnemos.modes import evaluating
from mnemos.types import InputError, JSONObject

RANGES = ((0, 64), (64, 512), (512, 4096))
DISTANCES = (128, 256, 512, 1024, 2048, 4096)
_READ = 1024  # tokens that are read at once
_BEFORE = 64  # tokens before a fact
_FACT = 64  # more than the tokens of a fact and its question
_SILENT = NoProgress()


class Reading:
    """A row of text that a decoder has read so far, and its cache. `copy` makes another future of the same past."""

    def __init__(self, model: Any, cache: Any = None) -> None:
        self.model, self.cache = model, cache
        if cache is None and hasattr(model, "config"):
            self.cache = libraries.transformers().DynamicCache(config=model.config)

    def read(self, ids: Tensor) -> Tensor:
        """Read tokens [T]; returns the logits after each [T, V]."""
        logits: Tensor = self.model(input_ids=ids[None], past_key_values=self.cache, use_cache=True).logits
        return logits[0]

    def copy(self) -> "Reading":
        return Reading(self.model, copy.deepcopy(self.cache))


def nats_by_position(
    model: Any, pieces: Iterable[Tensor], read: int = _READ, begin_reading: Callable[[Any], Reading] = Reading
) -> Tensor:
    """−log p of each token of pieces [T] but the first, given all before it in the piece: [pieces, T − 1], float64."""
    every = []
    with torch.no_grad(), evaluating(model):
        for ids in pieces:
            reading, nats = begin_reading(model), []
            targets = F.pad(ids[1:], (0, 1), value=-100)
            for part, wanted in zip(ids.split(read), targets.split(read), strict=True):
                nats.append(F.cross_entropy(reading.read(part).float(), wanted, reduction="none"))
            every.append(torch.cat(nats)[:-1].double())
    return torch.stack(every)


def by_position(nats: Tensor, ranges: Sequence[tuple[int, int]] = RANGES) -> JSONObject:
    """The perplexity of tokens with first ≤ n < last tokens before them, for each range, and the nats of every piece.

    nats [pieces, T − 1]: of `nats_by_position`; token n has n before it. The first token is not predicted.
    """
    positions: JSONObject = {}
    for first, last in ranges:
        part = nats[:, max(first, 1) - 1 : last - 1]
        if part.shape[1]:
            means = part.mean(1)
            positions[f"{first}-{last}"] = {"perplexity": float(means.mean().exp()), "nats": means.tolist()}
    return positions


def bits_per_byte(nats: Tensor, pieces: Sequence[Tensor], tokenizer: Any) -> float:
    """Bits per byte of UTF-8 of the predicted tokens."""
    size = sum(len(tokenizer.decode(ids[1:]).encode()) for ids in pieces)
    return float(nats.sum()) / math.log(2) / size


def recall(
    model: Any,
    tokenizer: Any,
    text: Tensor,
    rows: int,
    distances: Sequence[int] = DISTANCES,
    seed: int = 0,
    begin_reading: Callable[[Any], Reading] = Reading,
    display: NoProgress = _SILENT,
    name: str = "text",
) -> JSONObject:
    """Facts told in real text and asked for later: the share of right answers at each distance in tokens.

    Each of `rows` rows is a stretch of the tokens `text` [N]. After 64 of them stands a line "Anna is in the garden.",
    one of ten people and ten places. After every distance a copy of the row goes on with "Where is Anna? Anna is in
    the". Two scores: "choice", whether the right place is the likeliest of the ten by its first token (a guess is 0.1),
    and "own words", whether it is the likeliest of the vocabulary. Returns {"distances": [{"distance", "choice": [bool
    a row], "own_words": [...], "nats": [...]}], "rows", "seed"}. Cost: max(distances) + 100 tokens a row.
    """
    first_of = _first_tokens(tokenizer)
    if len(set(first_of)) < len(PLACES):
        raise InputError("recall: expected a tokenizer with another first token for each place, found two alike")
    length = _BEFORE + max(distances)
    if len(text) < length:
        raise InputError(f"recall: expected at least {length:,} tokens of text, found {len(text):,}; add text")
    scores: list[JSONObject] = [{"distance": d, "choice": [], "own_words": [], "nats": []} for d in sorted(distances)]
    with torch.no_grad(), evaluating(model):
        for row in display.evaluation(name, rows, range(rows), lambda _: 1, "told facts"):
            random = generator(seed, row)
            begin = int(random.integers(len(text) - length + 1))
            person, place = str(random.choice(PEOPLE)), int(random.integers(len(PLACES)))
            ids, reading = text[begin : begin + length], begin_reading(model)
            fact = _tokens(tokenizer, f"\n{person} is in the {PLACES[place]}.\n")
            question = _tokens(tokenizer, f"\nWhere is {person}? {person} is in the")
            reading.read(torch.cat([ids[:_BEFORE], fact]))
            done = 0
            for entry in scores:
                for part in ids[_BEFORE + done : _BEFORE + entry["distance"]].split(_READ):
                    reading.read(part)
                done = entry["distance"]
                logs = reading.copy().read(question)[-1].float().log_softmax(-1)
                entry["choice"].append(bool(logs[first_of].argmax() == place))
                entry["own_words"].append(bool(logs.argmax() == first_of[place]))
                entry["nats"].append(-float(logs[first_of[place]]))
    return {"rows": rows, "seed": seed, "distances": scores}


def _first_tokens(tokenizer: Any) -> list[int]:
    return [tokenizer(f" {place}", add_special_tokens=False)["input_ids"][0] for place in PLACES]


def _tokens(tokenizer: Any, text: str) -> Tensor:
    return torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"], dtype=torch.int64)


def assess(
    model: Any,
    tokenizer: Any,
    text: str,
    *,
    pieces: int = 4,
    context: int = 4096,
    rows: int = 8,
    distances: Sequence[int] = DISTANCES,
    begin_reading: Callable[[Any], Reading] = Reading,
    display: NoProgress = _SILENT,
    name: str = "text",
) -> JSONObject:
    """Perplexity by position, bits per byte and recall of told facts in one text, for too short ones InputError.

    pieces: of `context` tokens, evenly spaced in the text. rows: of `recall`; 0: none. display, name: of the progress.
    """
    ids = _whole_pieces(tokenizer, text, pieces, context)
    whole = len(ids) // context
    chosen = [ids[context * (i * whole // pieces) :][:context] for i in range(pieces)]
    shown = display.evaluation(name, pieces, chosen, lambda _: 1, "pieces")
    nats = nats_by_position(model, shown, begin_reading=begin_reading)
    measured: JSONObject = {
        "tokens": pieces * context,
        "positions": by_position(nats),
        "bits_per_byte": bits_per_byte(nats, chosen, tokenizer),
        "bits_per_byte_of_pieces": [bits_per_byte(n, [p], tokenizer) for n, p in zip(nats, chosen, strict=True)],
    }
    if rows:
        options: JSONObject = {"begin_reading": begin_reading, "display": display, "name": name}
        measured["recall"] = recall(model, tokenizer, ids, rows, distances, **options)
    return measured


def plan_assessment(tokenizer: Any, text: str, positions: int, name: str = "text") -> JSONObject:
    """The arguments of `assess` for a decoder with so many positions, which a training asks for before it begins.

    Recall is left out where a row does not fit, or where the tokenizer begins two places alike. Errors as of `assess`.
    """
    context = min(RANGES[-1][1], positions)
    ids = _whole_pieces(tokenizer, text, 4, context, name)
    fits = min(positions - _BEFORE - _FACT, len(ids) - _BEFORE)
    distances = [distance for distance in DISTANCES if distance <= fits]
    asked = distances and len(set(_first_tokens(tokenizer))) == len(PLACES)
    return {"pieces": 4, "context": context, "rows": 8 if asked else 0, "distances": distances}


def _whole_pieces(tokenizer: Any, text: str, pieces: int, context: int, name: str = "text") -> Tensor:
    ids = _tokens(tokenizer, text)
    if len(ids) < pieces * context:
        raise InputError(f"{name}: expected at least {pieces * context:,} tokens, found {len(ids):,}; add text")
    return ids
