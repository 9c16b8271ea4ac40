"""The report section on write attention: drawn from write_attention.json, refused if malformed, else left out."""

import json
import re

import pytest
from synthetic_runs import write_run

from mnemos.lab.report.read import read
from mnemos.lab.report.slot_attention import section
from mnemos.types import InputError


def measured(segments=6, words=True):
    text = [["def", 3], [" ", 1], ["f<b>", 4], ["\n", 1]]
    kinds = {"holds": (3, 0.5), "mixes": (2, 0.75), "overwrites": (1, 1.0)}
    examples = []
    for slot, kind, itself in ((4, "holds", 0.95), (1, "mixes", 0.5), (2, "overwrites", 0.05)):
        weights = [(1 - itself) / 9] * 3 + [(1 - itself) / 18] * 6
        examples.append({"slot": slot, "kind": kind, "itself": itself, "bias": 0.5, "weights": weights})
    return {
        **{"split": "test", "documents": 2, "segment": 9, "slots": 6, "heads": 2, "radius": 2.0},
        **{"thresholds": [0.1, 0.9], "counts": [2] * segments},
        "shares": {"holds": [0.5] * segments, "mixes": [0.25] * segments, "overwrites": [0.25] * segments},
        "middle": {"holds": 0.5, "mixes": 0.25, "overwrites": 0.25},
        "kinds": {kind: {"slots": n, "bias": b, "least": b, "most": b} for kind, (n, b) in kinds.items()},
        "shown": {"place": 2, "of": segments, "first": 9, "examples": examples, "words": text if words else None},
    }


def written(tmp_path, found):
    run = write_run(tmp_path / "run", "demo")
    (run / "write_attention.json").write_text(json.dumps(found))
    return run


def test_the_section_shows_kinds_examples_and_words(tmp_path):
    part = re.sub(r"\s+", " ", section(read([written(tmp_path, measured())]))).replace("\xa0", " ")
    for sentence in (
        "50% of the slots hold (the paper, of text: 60–80%), 25% mix and 25% are overwritten (the paper, of text: ",
        "is 2.00 times that of slots that usually hold (the paper, of text, one slot each: 2.78)",
        "Slot 4 holds: 0.95 on itself",
        "Slot 2 is overwritten: 0.05 on itself",
        "segment 3 of 6 of the first document",
        "Slot 1, which mixes",
        "0.250 (0.250 to 0.250)",  # ‖v_bias‖ .5 over a radius of 2
    ):
        assert sentence in part, sentence
    assert "Slot 4, which" not in part, "a slot that holds has no words"
    # A byte of the second word has half of what one of the first has, however long they are: 85 % and 42 %.
    assert re.findall(r'<mark style="--weight:(\d+)%">(.*?)</mark>', part)[:2] == [("85", "def"), ("42", "f&lt;b&gt;")]
    assert part.count('class="chart"') == 4
    assert not re.findall(r"(?:stroke|fill): (#[0-9a-f]{6})", part)


def test_no_words_and_one_segment_are_drawn_too(tmp_path):
    part = section(read([written(tmp_path, measured(1, words=False))]))
    assert "<mark" not in part
    assert part.count('class="chart"') == 4


@pytest.mark.parametrize(
    ("spoil", "word"),
    [
        (lambda found: found["middle"].update(holds="many"), "middle.holds"),
        (lambda found: found["shown"]["examples"][0].update(kind="sleeps"), "sleeps"),
        (lambda found: found.pop("shares"), "shares"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(tmp_path, spoil, word):
    found = measured()
    spoil(found)
    run = written(tmp_path, found)
    with pytest.raises(InputError, match=r"write_attention\.json") as caught:
        read([run])
    assert word in str(caught.value)
    assert "\n" not in str(caught.value)
