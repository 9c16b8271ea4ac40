"""How a prediction changes when a part of the memory is emptied, at each boundary of segments before it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from mnemos.types import InputError, State, join, leaves, likelihood_of, reset

from .memories import Array, Memory, Reader

WHOLE = "the whole state"
PREDICTIONS = 6  # words whose prediction is looked at, where the document asks no question
TRACED = 32  # boundaries before a prediction, at which memory is emptied
KNOWN = 0.5  # a probability that is never as great is no answer
LOST = 0.5  # of the probability as read: below it, the answer is lost
_LEAST = 40  # rows of a prediction
UNITS = 64  # that are emptied one by one; of more, those that were read most
BYTES = 256 << 20  # of states that are held at once
WORK = 3e12  # operations of all rows with an emptied part, about a minute of one core


class Change(NamedTuple):
    """What was emptied: a memory by number, and a unit of it; unit None: all of it; memory None: several memories.

    alone: all units of the memory but this one were emptied.
    """

    name: str
    memory: int | None = None
    unit: int | None = None
    alone: bool = False


class Effect(NamedTuple):
    """A change, and the probability of the answer after it, made before each of `boundaries`; NaN: not made."""

    change: Change
    probability: Array


@dataclass
class Prediction:
    """A predicted token, as read and with parts of the memory emptied."""

    token: int  # its number in the document (N: after the end)
    answer: int  # which token it is
    probability: float  # of the answer, as read
    guess: int  # the likeliest token
    certainty: float  # its probability
    answer_text: str = ""
    guess_text: str = ""
    boundaries: list[int] = field(default_factory=list)  # segments before which memory was emptied
    effects: list[Effect] = field(default_factory=list)


def choose_targets(targets: Sequence[int], helped: Array, length: int) -> list[int]:
    """The targets to look at, by position: all if they are few, else those that memory helped most, one a segment."""
    counted = [i for i, target in enumerate(targets) if target >= 0]
    if len(counted) <= PREDICTIONS:
        return counted
    chosen: dict[int, int] = {}  # by segment
    gains = np.nan_to_num(helped[1:], nan=-np.inf)
    for i in np.argsort(-gains, kind="stable").tolist():
        if len(chosen) == PREDICTIONS or not gains[i] > 0:
            break
        chosen.setdefault(i // length, i)
    return sorted(chosen.values())


def emptied_by_kind(readers: Sequence[Reader], state: State) -> dict[str, State]:
    """The state with all memories of one kind as in a new row, by kind; those with nothing to empty are left out."""
    states: dict[str, State] = {}
    for reader in readers:
        changed = reader.emptied(states.get(reader.plural, state), None)
        if changed is not None:
            states[reader.plural] = changed
    return states


def look_at_targets(
    model: nn.Module,
    readers: Sequence[Reader],
    every: Sequence[Reader],
    memories: Sequence[Memory],
    tokens: Tensor,
    targets: Tensor,
    wanted: Sequence[int],
    length: int,
    state: State,
    emptied: bool = True,
) -> list[Prediction]:
    """The predictions of some targets with their probabilities, as read and with parts of the memory emptied.

    memories: what the readers recorded; every: the readers of all layers. tokens [1, N], targets [N]; wanted: numbers
    of the tokens that predict. emptied: False: only as read. Cost: for each boundary before a target, up to `TRACED`, a
    row for each part that is emptied, read from there to the target.
    """
    # --- how much is emptied, by the work that it makes: targets, then units of memories, then boundaries ---
    parameters = sum(p.numel() for p in model.parameters())
    rows_most = int(WORK / (2 * parameters * length))  # segments of one row that may be read with an emptied part
    wanted = list(wanted)[: max(1, rows_most // _LEAST)]
    of_target = rows_most // max(1, len(wanted))
    units_most = max(4, min(UNITS, of_target // 2 - len(readers), sum(len(one.units) for one in memories)))
    reach = max(1, min(TRACED, of_target // (2 * (units_most + len(readers))))) if emptied else 1

    # --- the states at the boundaries before the targets ---
    near = {i: range(max(0, i // length - reach + 1), i // length + 1) for i in wanted}
    states: dict[int, State] = {}
    for segment in range(max((span.stop for span in near.values()), default=0)):
        if any(segment in span for span in near.values()):
            states[segment] = state
        _, state = model(tokens[:, segment * length : (segment + 1) * length], state)

    predictions = []
    for i, boundaries in near.items():
        last = boundaries.stop * length
        outputs, _ = model(tokens[:, last - length : last], states[boundaries[-1]])
        p = log_probabilities(model, outputs[0, i % length]).exp()
        answer, guess = int(targets[i]), int(p.argmax())
        one = Prediction(i + 1, answer, float(p[answer]), guess, float(p[guess]))
        predictions.append(one)

        # --- from each boundary on, rows with a part emptied, in batches of at most `BYTES` of states ---
        # Units are emptied one by one: all of them, or those that the target's segment read most.
        read = {
            (m, u): float(memory.readers[boundaries[-1], :, u].sum()) if memory.readers.size else 0.0
            for m, memory in enumerate(memories)
            for u in range(len(memory.units))
        }
        units = set(sorted(read, key=lambda key: -read[key])[:units_most])
        effects: dict[Change, list[float]] = {}
        for boundary in boundaries if emptied else ():
            if states[boundary] is None:
                continue
            changed = _emptied_states(readers, every, states[boundary], units)
            size = max(1, BYTES // max(1, _bytes(states[boundary])))
            for start in range(0, len(changed), size):
                part = dict(list(changed.items())[start : start + size])
                x = tokens[:, boundary * length : last].expand(len(part), -1)
                outputs, _ = read_segments(model, x, join(list(part.values())), length)
                values = log_probabilities(model, outputs[:, i % length])[:, answer].exp().tolist()
                for change, value in zip(part, values, strict=True):
                    before = effects.setdefault(change, [])
                    before += [np.nan] * (len(one.boundaries) - len(before)) + [value]
            one.boundaries.append(boundary)
        one.effects = [Effect(change, np.array(values)) for change, values in effects.items()]
    return predictions


def _emptied_states(
    readers: Sequence[Reader], every: Sequence[Reader], state: State, units: set[tuple[int, int]]
) -> dict[Change, State]:
    fresh = reset(state, torch.ones(1, dtype=torch.bool, device=leaves(state)[0].device))
    kinds = [reader.plural for reader in every]
    states: dict[Change, State | None] = {Change(WHOLE): fresh}
    for kind, changed in emptied_by_kind(every, state).items():
        if kinds.count(kind) > 1:
            states[Change(f"all {kind}")] = changed
    several = sum(bool(reader.units) for reader in readers) > 1
    for m, reader in enumerate(readers):
        states[Change(reader.name, m)] = reader.emptied(state, None)
        states |= {Change(name, m): group for name, group in reader.groups(state).items()}
        for u, unit in enumerate(reader.units):
            if (m, u) in units:
                name = f"{reader.name}: {unit}" if several else unit
                states[Change(name, m, u)] = reader.emptied(state, u)
                states[Change(name, m, u, True)] = reader.alone(state, u)
    return {change: changed for change, changed in states.items() if changed is not None}


def _bytes(state: State) -> int:
    return sum(leaf.numel() * leaf.element_size() for leaf in leaves(state))


def check_finite(outputs: Tensor) -> None:
    """Raises InputError for the outputs of a model whose training diverged."""
    if not bool(outputs.isfinite().all()):
        raise InputError(
            "look: expected a model with finite outputs, found NaN or infinity; its training diverged, look at another"
        )


def read_segments(model: nn.Module, tokens: Tensor, state: State, length: int) -> tuple[Tensor, State]:
    """Read tokens [B, T] in segments, as training does; returns the last segment's outputs, and the state."""
    for part in tokens.split(length, 1):
        outputs, state = model(part, state)
    return outputs, state


def log_probabilities(model: nn.Module, outputs: Tensor) -> Tensor:
    """ln p of every token, [.., V], from a model's outputs."""
    own = likelihood_of(model)
    return torch.log_softmax(outputs.float(), -1) if own is None else own.log_prob(outputs)
