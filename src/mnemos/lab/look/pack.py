"""A recording as JSON of bounded size: arrays as bytes of 8 bits, in base64."""

import base64
from typing import Any

import numpy as np

from mnemos.types import JSONObject

from .memories import Array
from .record import Document, Recording

BYTES = 2_500_000  # of arrays in a page, before base64
LEVELS = 254  # of a value; 255 is NaN


def pack(recording: Recording, share: float = 1.0) -> JSONObject:
    """What a page shows of a recording. share: of `BYTES`, where a page has several recordings.

    Values are rounded to 254 levels; of the weights between units and tokens the largest are kept where all do not fit.
    """

    def short(values: Any) -> list[float | None]:  # of more digits than are shown, so that these are rounded once
        return [None if np.isnan(value) else round(float(value), 6) for value in values]

    document = recording.document
    texts, counts = [word for word, _ in document.words], [count for _, count in document.words]
    asked = recording.asked
    packed: JSONObject = {
        **{"name": recording.name, "about": recording.about, "explained": explained(document)},
        **{"length": recording.length, "count": len(document.tokens), "words": texts},
        "counts": None if set(counts) <= {1} else counts,
        "p": dense(np.exp(-recording.surprise), 1.0),
        "emptied": [{"kind": kind, "p": dense(np.exp(-array), 1.0)} for kind, array in recording.emptied.items()],
        "told": None if document.question is None else list(document.question.fact),
        "sources": [
            {"name": one.name, "parts": list(one.parts), "share": dense(one.share, 1.0)} for one in recording.sources
        ],
        "predictions": [
            {
                **{"token": one.token, "answer": one.answer_text, "p": round(one.probability, 6)},
                **{"guess": one.guess_text, "certainty": round(one.certainty, 6), "boundaries": one.boundaries},
                "effects": [change._asdict() | {"p": short(p)} for change, p in one.effects],
            }
            for one in recording.predictions
        ],
        "asked": asked and {"after": asked.after, "p": short(asked.probability), "known": asked.known_at_end},
    }

    # --- the memories, in what is left of the bytes ---
    memories = recording.memories
    budget = BYTES * share - len(str(packed)) * 3 / 4
    budget -= sum(array.size for one in memories for array in (one.moved, one.received, *one.values.values()))
    part = min(1.0, max(0.0, budget) / max(1, sum(one.written.size + one.readers.size for one in memories)))
    packed["memories"] = []
    for one in memories:
        read = np.zeros((0, 0))
        if one.readers.size:  # the mean over the segment's words; the last segment may be short
            begin = recording.length * np.arange(len(one.readers))[:, None]
            read = one.readers.sum(1) / np.clip(len(document.tokens) - begin, 1, recording.length)
        curves = {"moved": one.moved, **({"read": read} if read.size else {}), **one.values}
        title = one.name.rsplit(", ", 1)[0]
        sources = [  # numbers of the layers, and of the memory's parts in them
            [i, source.parts.index(own)]
            for i, source in enumerate(recording.sources)
            for own in one.own
            if own in source.parts and (title == one.name or source.name == title)
        ]
        packed["memories"].append(
            {
                **{"name": one.name, "kind": one.kind, "about": one.about},
                **{"units": list(one.units), "offset": one.offset},
                "curves": {name: dense(array) for name, array in curves.items() if array.size},
                "written": strongest(one.written, part),
                "readers": strongest(one.readers, part),
                "received": dense(one.received),
                "sources": sources,
            }
        )
    return packed


def explained(document: Document) -> str:
    """What it means to empty a part, and what a guess is."""
    text = (
        "Emptied: as before the first token of a row, the position too where it is the whole state; the reading goes "
        "on from there."
    )
    if document.guess is not None:
        text += f" A guess, {document.guess:.2f}, is what an answer picked at random has."
    return text


def dense(array: Array, most: float | None = None) -> JSONObject | None:
    """An array as {"shape", "most": what `LEVELS` stands for, "bytes"}, negative values as 0; None if it is empty."""
    if not array.size:
        return None
    if most is None:
        most = float(np.nanmax(array)) if np.isfinite(array).any() else 0.0
    levels = np.where(np.isnan(array), 255, np.clip(np.rint(array / (most or 1.0) * LEVELS), 0, LEVELS))
    return {"shape": list(array.shape), "most": most, "bytes": _text(levels.astype(np.uint8))}


def strongest(array: Array, part: float) -> JSONObject | None:
    """An array [S, A, B] as `dense`, or with the largest values of the last axis, at least one, beside their indices.

    part: the share of the array's bytes that may be used. {"top": n, "places": indices [S, A, n] of 8 or 16 bits}.
    """
    if not array.size or part >= 1:
        return dense(array)
    width = 1 if array.shape[-1] <= 256 else 2
    n = max(1, int(part * array.shape[-1] / (1 + width)))
    indices = np.argpartition(-array, n - 1, -1)[..., :n]
    order = np.argsort(-np.take_along_axis(array, indices, -1), -1, kind="stable")
    indices = np.take_along_axis(indices, order, -1)
    values = dense(np.take_along_axis(array, indices, -1))
    assert values is not None
    packed = _text(indices.astype(np.uint8 if width == 1 else "<u2"))
    return values | {"shape": list(array.shape), "top": n, "wide": width, "places": packed}


def _text(array: Array) -> str:
    return base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()
