"""What a recording shows, in sentences from templates: where an answer is kept, and until when it is known."""

from collections.abc import Sequence

import numpy as np

from mnemos.lab.report.markup import listed

from .effects import Change, Place
from .images import PictureRecording
from .record import Recording

LOST = 0.5  # of the probability as read: below it, the answer is lost


def sentences(one: Recording) -> list[str]:
    """What to say of a recording, the most important first."""
    found = []
    if one.asked is not None:
        found.append(_when(one))
    found += [_where(one, place) for place in one.places[:1] if one.asked is not None]
    if one.asked is None:
        found.append(_helped(one))
    return found


def _when(one: Recording) -> str:
    """Until when the answer is known."""
    assert one.asked is not None
    assert one.document.question is not None
    end, (after, known) = one.document.question.told[1], one.asked
    begin = f"Asked right after it was told, the answer has a probability of {known[0]:.2f}"
    lost = next((i for i, p in enumerate(known) if p < LOST * known[0]), None)
    if lost is None:
        return f"{begin}; {after[-1] - end} words later it still has {known[-1]:.2f}."
    return (
        f"{begin}. It is lost between {after[lost - 1] - end} and {after[lost] - end} words later, where it falls from "
        f"{known[lost - 1]:.2f} to {known[lost]:.2f}; at the end it has {known[-1]:.2f}."
    )


def _where(one: Recording, place: Place) -> str:
    """Where the answer is kept: the smallest parts that it is lost without, by the segments before which they go."""
    if not place.boundaries:
        return "No segment comes before the question, so no memory was emptied."
    if one.asked is not None and place.probability < LOST * max(one.asked.probability):
        return "The answer is not known at the end: nothing that is still held gives it."
    runs: list[tuple[str, int, int]] = []
    for i, boundary in enumerate(place.boundaries):
        said = _holders(place, i)
        if runs and runs[-1][0] == said:
            runs[-1] = (said, runs[-1][1], boundary)
        else:
            runs.append((said, boundary, boundary))
    return "The answer is kept: " + "; ".join(f"{_span(a, b)}, {said}" for said, a, b in runs) + "."


def _span(first: int, end: int) -> str:
    """Segments count from 1 on the page; a boundary is before the segment of its number."""
    return f"when segment {first + 1} begins" if first == end else f"from segment {first + 1} to {end + 1}"


def _holders(place: Place, i: int) -> str:
    """What is needed for the answer at one boundary."""
    least = LOST * place.probability
    at = [(effect.change, float(effect.probability[i])) for effect in place.effects if i < len(effect.probability)]
    gone = [change for change, p in at if p < least and not change.alone]
    units = [change for change in gone if change.unit is not None]
    if units:
        return f"in {listed([change.name for change in units])}: the answer is lost without it"
    memories = [change for change in gone if change.memory is not None]
    if parts := [change for change in memories if ": " in change.name]:
        return f"in {listed([change.name for change in parts])}: the answer is lost without it"
    if memories:
        alike = [(change, p) for change, p in at if change.alone and change.memory in {one.memory for one in memories}]
        enough = [change for change, p in alike if p >= least]
        held = f"in {listed([change.name for change in memories])}"
        if not enough:
            return f"{held}, spread: no unit is needed, and none is enough alone"
        if len(enough) == 1:
            return f"{held}: {_units(enough)} alone is enough, and the others together are too"
        return f"{held}, more than once: each of {_units(enough)} is enough alone"
    if gone:
        return f"in several memories at once ({listed([change.name for change in gone])})"
    return "in no part that was emptied: it is not lost, whatever is emptied"


def _units(changes: Sequence[Change]) -> str:
    return listed([change.name.rsplit(": ", 1)[-1] for change in changes])


def picture_sentences(one: PictureRecording) -> list[str]:
    """Which layers use their memory most."""
    shares = [(layer.share, layer.name) for layer in one.layers]
    (most, first), (least, end) = max(shares), min(shares)
    right = sum(label == guess for label, guess in zip(one.labels, one.guesses, strict=True))
    said = f"{one.name}: {len(one.labels)} pictures, {right} classified correctly."
    if len(shares) > 1:
        said += f" The memory's share σ(λ) is greatest in {first} ({most:.2f}) and least in {end} ({least:.2f})."
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
