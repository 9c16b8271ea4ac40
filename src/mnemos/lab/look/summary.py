"""What a recording shows, in sentences that say what was measured and no more."""

import numpy as np

from mnemos.lab.report.markup import listed

from .effects import KNOWN, LOST, WHOLE, Prediction
from .record import Document, Recording


def sentences(one: Recording) -> list[str]:
    """What to say of a recording, the most important first."""
    # The memories on the page come first, so that the parts have been named before they are spoken of.
    names = []
    for kind in dict.fromkeys(memory.kind for memory in one.memories):
        alike = [memory for memory in one.memories if memory.kind == kind]
        all_layers = one.layers.get(kind, len(alike))
        layers = f"{len(alike)} of {all_layers}" if len(alike) < all_layers else all_layers
        name = alike[0].name
        names.append(name if all_layers == 1 else f"{name.rsplit(', ', 1)[-1]} of {layers} layers")
    shown = f"Shown: {'; '.join(names) or 'the text alone, as its memory has no reader here'}."
    if one.asked is not None:
        return [_when(one), shown, *(_where(one, prediction) for prediction in one.predictions[:1])]
    counted = ~np.isnan(one.surprise)
    if not counted.any() or not one.emptied:
        return [shown]
    parts = [f"{array[counted].mean():.3f} with the {kind} emptied" for kind, array in one.emptied.items()]
    nats = (
        f"Nats a token: {one.surprise[counted].mean():.3f} as read; {', '.join(parts)}, each time before a segment of "
        f"{one.length} tokens, with everything else as it was."
    )
    return [shown, nats]


def thresholds() -> str:
    """From which probability on an answer is called known, lost, and held by a unit alone."""
    return (
        f"Known: at least {LOST:.2f} times the greatest probability that it has when asked, if that is {KNOWN:.2f} or "
        f"more. Lost with a part emptied: less than {LOST:.2f} times what it has as read. Enough alone: at least that, "
        "with the other units of the memory emptied."
    )


def explained(document: Document) -> str:
    """What it means to empty a part, and what a guess is."""
    text = (
        "Emptied: as before the first token of a row, the position too where it is the whole state; the reading goes "
        "on from there."
    )
    if document.guess is not None:
        text += f" A guess, {document.guess:.2f}, is what an answer picked at random has."
    return text


def _when(one: Recording) -> str:
    assert one.asked is not None
    first, *_, last = one.asked.probability
    return f"Asked right after it was told, the answer has a probability of {first:.2f}, at the end one of {last:.2f}."


def _where(one: Recording, prediction: Prediction) -> str:
    """Without which parts the answer is lost, if they are emptied before its segment."""
    if one.asked is not None and not one.asked.known_at_end:
        return "The answer is not known at the end, so nothing was emptied."
    if not prediction.boundaries:
        return "No segment comes before the question, so nothing was emptied."
    # Segments count from 1 on the page; a boundary is before the segment of its number.
    when, least = f"Before segment {prediction.boundaries[-1] + 1}", LOST * prediction.probability
    at = [(change, float(p[-1])) for change, p in prediction.effects if len(p) == len(prediction.boundaries)]
    gone = [change for change, p in at if p < least and not change.alone]
    memories = [change for change in gone if change.memory is not None]
    parts = [change for change in memories if change.unit is not None]
    parts = parts or [change for change in memories if ": " in change.name]
    if not memories:
        lost = f"lost without {gone[0].name}, but not without any one memory" if gone else ""
        return f"{when} the answer is {lost or f'given even without {WHOLE}'}."
    text = f"{when} the answer is lost without {listed([change.name for change in parts or memories], 'or')}"
    numbers = {change.memory for change in memories}
    alone = [(change, p) for change, p in at if change.alone and change.memory in numbers and not np.isnan(p)]
    if parts or not alone:
        return f"{text}."
    units = sum(len(one.memories[number].units) for number in numbers if number is not None)
    tried = f"{len(alone)} units" if len(alone) == units else f"{len(alone)} units tried, of {units},"
    enough = [change.name if memories[1:] else change.name.rpartition(": ")[2] for change, p in alone if p >= least]
    return f"{text}, of whose {tried} {listed(enough, 'or') or 'none'} is enough alone."
