"""Every sentence of a look is measured: a recording in which it would be false changes it, or has none."""

from dataclasses import replace

import numpy as np
import pytest

import mnemos
from mnemos.lab.look.effects import WHOLE, Change, Effect, Prediction
from mnemos.lab.look.memories import Memory
from mnemos.lab.look.page import sentences
from mnemos.lab.look.readers import readers_of
from mnemos.lab.look.record import Asked, Document, Recording
from mnemos.lab.tasks.task import Question

UNITS = 8


def effect(p, name, *more):
    return Effect(Change(name, *more), np.array([p]))


def recorded(**changes):
    """32 tokens in four segments, of which the answer, known as .9, comes from a cache of 8 slots."""
    cache = Memory("layer 1, cache", "cache", tuple(f"slot {i + 1}" for i in range(UNITS)), "")
    document = Document((1,) * 32, (("w", 1),) * 32, (-1,) * 32, "", Question((0, 4), (1,), 1))
    asked = Asked([4, 8, 16, 31], [0.9, 0.9, 0.9, 0.9])
    gone = [effect(0.1, WHOLE), effect(0.1, "layer 1, cache", 0)]
    place = Prediction(32, 1, 0.9, 1, 0.9, "x", "x", [3], gone)
    one = Recording("", "", document, 8, [cache], [], np.full(32, 1.0), {"caches": np.full(32, 2.0)}, [place], asked)
    for name, value in changes.items():
        if name == "effects":
            one.predictions[0].effects = value
        else:
            setattr(one, name, value)
    return one


def text(**changes):
    """The same without a question."""
    one = recorded(asked=None, **changes)
    one.document = replace(one.document, question=None)
    return one


def alone(*enough, tried=UNITS):
    """Each slot emptied, which changes nothing, and kept alone, which is enough for some."""
    slots = [effect(0.9, f"slot {i + 1}", 0, i) for i in range(tried)]
    kept = [effect(0.8 if i in enough else 0.1, f"slot {i + 1}", 0, i, True) for i in range(tried)]
    return [effect(0.1, WHOLE), effect(0.1, "layer 1, cache", 0), *slots, *kept]


OTHER = Memory("layer 2, window", "window", (), "")
CASES = {
    "helps": (text(), ["1.000 as read; 2.000 with the caches emptied", "segment of 8 tokens"], ["Asked"]),
    "harms": (text(emptied={"caches": np.full(32, 0.5)}), ["1.000 as read; 0.500 with"], ["greater", "help"]),
    "nothing emptied": (text(emptied={}), ["Shown"], ["Nats", "emptied"]),
    "nothing counted": (text(surprise=np.full(32, np.nan)), ["Shown"], ["nan", "Nats"]),
    "lost": (
        recorded(asked=Asked([4, 8, 16, 31], [0.8, 0.9, 0.3, 0.2])),
        ["0.80, 4 tokens later 0.90, 12 tokens later 0.30, 27 tokens later 0.20.", "not known at the end"],
        ["lost without", "not known anywhere"],
    ),
    "never known": (
        recorded(asked=Asked([4, 8, 16, 31], [0.1, 0.2, 0.4, 0.3])),
        ["0.10, 27 tokens later 0.30: it is not known anywhere."],
        ["lost without"],
    ),
    "a memory": (recorded(), ["lost without layer 1, cache."], ["unit", "enough", "given"]),
    "some tried": (recorded(effects=alone(tried=2)), ["of whose 2 units tried, of 8, none is"], ["8 units none"]),
    "one alone": (recorded(effects=alone(4)), ["of whose 8 units slot 5 is enough alone"], ["none"]),
    "all": (recorded(effects=[effect(0.1, WHOLE), effect(0.9, "a", 0)]), ["but not without any one memory"], ["given"]),
    "not needed": (recorded(effects=[effect(0.8, WHOLE)]), ["given even without the whole state"], ["lost"]),
    "no boundary": (
        recorded(predictions=[Prediction(5, 1, 0.9, 1, 0.9)]),
        ["so nothing was emptied"],
        ["lost", "given"],
    ),
    "some layers": (text(memories=[OTHER, OTHER], layers={"window": 9}), ["window of 2 of 9 layers"], []),
}


@pytest.mark.parametrize(("one", "said", "unsaid"), CASES.values(), ids=CASES)
def test_sentences_follow_the_recording(one, said, unsaid):
    found = " ".join(sentences(one))
    assert [text for text in said if text not in found] == [], found
    assert [text for text in unsaid if text in found] == [], found


def test_boundaries_are_joined_where_the_same_is_needed():
    one = recorded()
    one.predictions[0].boundaries = [1, 2, 3]
    one.predictions[0].effects = [
        Effect(Change("slot 1", 0, 0), np.array([0.1, 0.1, 0.9])),
        Effect(Change(WHOLE), np.full(3, 0.1)),
    ]
    found = sentences(one)[-1]
    assert found.startswith("Before segments 2 to 3 the answer is lost without slot 1; before segment 4 the answer is")


SIZES = {"vocab_size": 9, "dim": 8, "num_heads": 2, "mlp": 8}
SEGMENTS = {**SIZES, "layers": 1, "segment": 4}
HALVES = {**SIZES, "encoder_layers": 1, "decoder_layers": 1, "segment": 4}


def transformer(window=None, **cache):
    attention = mnemos.SoftmaxConfig(window=window)
    grc = mnemos.GRC(**{"length": 2, "scope": "stream", **cache}) if cache else None
    return mnemos.Transformer(**SIZES, layers=1, max_length=9, attention=attention, cache=grc)


@pytest.mark.parametrize(
    ("model", "said", "unsaid"),
    [
        (lambda: transformer(6), "the last 5 tokens", "all earlier"),
        (lambda: transformer(6, block=2), "An update gate", "constant"),
        (lambda: transformer(6, write=False, inference="frozen", scope="shared"), "A constant", "update"),
        (lambda: transformer(6, write=False, block=2), "starts from the stored cache", "constant"),
        (lambda: mnemos.RMT(**SEGMENTS, memory=mnemos.TokensConfig(2, write=False)), "same ones", "behind"),
        (lambda: mnemos.Memformer(**HALVES, memory=mnemos.SlotsConfig(2, write=False)), "never written", "once"),
    ],
)
def test_what_is_said_of_a_memory_is_what_it_does(model, said, unsaid):
    found = " ".join(reader.about for reader in readers_of(model(), 9))
    assert said in found
    assert unsaid not in found
