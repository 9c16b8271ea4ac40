"""What a recording shows, in sentences from templates: where an answer is kept, and until when it is known."""

import numpy as np

from mnemos.lab.report.markup import capital, listed, plural

from .effects import KNOWN, LOST, Place
from .images import PictureRecording
from .memories import REACH
from .record import Document, Recording


def sentences(one: Recording) -> list[str]:
    """What to say of a recording, the most important first."""
    if one.asked is None:
        return [*_has(one), _helped(one)]
    return [
        _when(one),
        *_has(one),
        *(_where(one, place) for place in one.places[:1] if one.asked.known(max(one.asked.probability))),
    ]


def thresholds() -> str:
    """From which probability on an answer is called known, lost, and held by a unit alone."""
    return (
        f"Known: a probability of at least {KNOWN:.2f}. Lost: less than {LOST:.2f} times the greatest that it had; "
        f"with a part emptied, less than {LOST:.2f} times what it has as read. Enough alone: at least that, with the "
        "other units of the memory emptied."
    )


def explained(document: Document) -> str:
    """What it means to empty a part, and what a guess is."""
    said = "Emptied: set back to what it is before the first word of a row; the reading then goes on from there."
    if document.guess is not None:
        said += f" A guess, {document.guess:.2f}, is what an answer picked at random has. "
        said += "An answer that is lost may have less: the model then expects another one."
    return said


def _has(one: Recording) -> list[str]:
    """What a model can hold, kind by kind, so that the parts have been named before they are spoken of."""
    found = []
    for kind in dict.fromkeys(memory.kind for memory in one.memories):
        alike = [memory for memory in one.memories if memory.kind == kind]
        first, count = alike[0], len(alike[0].units)
        held = one.layers.get(kind, len(alike))
        layers = f" in {'each of ' if held > 1 else ''}{plural(held, 'layer')}"
        layers += f" ({len(alike)} shown)" if len(alike) < held else ""
        reach = first.received.shape[1] - one.length if first.received.size else 0
        if kind == "slots":
            found.append(plural(count, "slot"))
        elif kind == "tokens":
            found.append(plural(count, "memory token"))
        elif kind == "cache":
            found.append(f"a cache of {plural(count, 'slot')}{layers}")
        elif kind == "sums":
            heads = len({unit.partition(",")[0] for unit in first.units})
            window = f"a window of {plural(first.offset, 'word')}, and of the words before it " if first.offset else ""
            found.append(f"{window}the sums (a matrix) of {plural(heads, 'head')}{layers}")
        elif first.name.startswith("layer"):
            far = f", which together reach {reach * held:,} words back" if held > 1 and reach < REACH else ""
            found.append(f"a window of {'the' if reach == REACH else f'{reach:,}'} earlier words{layers}{far}")
        else:
            found.append(f"the words of {first.name}")
    return [f"What it holds from one segment to the next: {'; '.join(found)}."] if found else []


def _when(one: Recording) -> str:
    """Until when the answer is known."""
    assert one.asked is not None
    assert one.document.question is not None
    end, (after, known) = one.document.question.told[1], one.asked
    begin = f"Asked right after it was told, the answer has a probability of {known[0]:.2f}"
    if not one.asked.known(max(known)):
        return f"The answer is never known. {begin}, and at most {max(known):.2f} later."
    lost = one.asked.lost
    if lost is None:
        return f"{begin}; {after[-1] - end} words later it has {known[-1]:.2f}."
    return (
        f"{begin}. It is lost between {after[lost - 1] - end} and {after[lost] - end} words later, where it falls from "
        f"{known[lost - 1]:.2f} to {known[lost]:.2f}; at the end it has {known[-1]:.2f}."
    )


def _where(one: Recording, place: Place) -> str:
    """Where the answer is kept: the smallest parts that it is lost without, by the segments before which they go."""
    if one.asked is not None and not one.asked.known_at_end:
        return "The answer is not known at the end: nothing that is still held gives it."
    if not place.boundaries:
        return "No segment comes before the question, so no memory was emptied."
    runs: list[tuple[str, int, int]] = []
    for i, boundary in enumerate(place.boundaries):
        said = _holders(place, i)
        if runs and runs[-1][0] == said:
            runs[-1] = (said, runs[-1][1], boundary)
        else:
            runs.append((said, boundary, boundary))
    texts = [f"{_span(a, b)} {'it' if i else 'the answer'} is {said}" for i, (said, a, b) in enumerate(runs)]
    return capital("; ".join(texts)) + "."


def _span(first: int, end: int) -> str:
    """Segments count from 1 on the page; a boundary is before the segment of its number."""
    return f"when segment {first + 1} begins" if first == end else f"from segment {first + 1} to {end + 1}"


def _holders(place: Place, i: int) -> str:
    """What is needed for the answer at one boundary."""
    least = LOST * place.probability
    at = [(effect.change, float(effect.probability[i])) for effect in place.effects if i < len(effect.probability)]
    gone = [change for change, p in at if p < least and not change.alone]
    memories = [change for change in gone if change.memory is not None]
    parts = [change for change in memories if change.unit is not None]
    parts = parts or [change for change in memories if ": " in change.name]
    if parts:
        emptied = "it" if len(parts) == 1 else "any one of them"
        return f"kept in {listed([change.name for change in parts])}, and lost if {emptied} is emptied"
    if memories:
        alike = [(change, p) for change, p in at if change.alone and change.memory in {one.memory for one in memories}]
        enough = [change.name if memories[1:] else change.name.rsplit(": ", 1)[-1] for change, p in alike if p >= least]
        held = f"kept in {listed([_the(change.name) for change in memories])}"
        if not alike:
            return held
        if not enough:
            return f"{held}, spread over it: no unit is needed, and none is enough alone"
        if len(enough) == 1:
            return f"{held}: {enough[0]} is enough alone, and so are the others together"
        return f"{held}, more than once: each of {listed(enough)} is enough alone"
    if gone:
        return f"kept in more than one memory: it is lost without {gone[0].name}, but not without any one of them"
    return "not needed from the memory: with the whole state emptied the model still gives it"


def _the(name: str) -> str:
    """A memory's name in a sentence: the slots, but layer 2, cache."""
    return name if name.startswith(("layer", "the")) else f"the {name}"


def picture_sentences(one: PictureRecording) -> list[str]:
    """Which layers use their memory most."""
    shares = [(layer.share, layer.name) for layer in one.layers]
    (most, first), (least, end) = max(shares), min(shares)
    right = sum(label == guess for label, guess in zip(one.labels, one.guesses, strict=True))
    said = f"{plural(len(one.labels), 'picture')}, {right} classified correctly."
    if f"{most:.2f}" != f"{least:.2f}":
        said += f" The memory's share σ(λ) is greatest in {first} ({most:.2f}) and least in {end} ({least:.2f})."
    else:
        said += f" The memory's share σ(λ) is {most:.2f} in every layer."
    return [said]


def _helped(one: Recording) -> str:
    """How much the memory helped in the mean, and which words most."""
    known = one.helped[~np.isnan(one.helped)]
    if not known.size:
        return "No word of the text has a known next word."
    words = listed([f"“{place.answer_text.strip() or '␣'}”" for place in one.places])
    return (
        f"With the memory, ln p of a word is greater by {known.mean():.3f} on average than with it emptied before each "
        "segment" + (f"; it helped most with {words}." if words else ".")
    )
