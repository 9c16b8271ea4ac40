"""Perplexity by position and recall, on models whose answers are known."""

from types import SimpleNamespace

import pytest
import torch
from refusals import refuses
from torch import nn

from mnemos.lab.linearised import assess
from mnemos.lab.linearised.assess import bits_per_byte, by_position, nats_by_position, recall

PLACES = assess.PLACES
VOCABULARY = 128


class Known(nn.Module):
    """Predicts the next token with the probability 1/2 while fewer than 10 were read, else 1/8, the others evenly.

    The tokens are 0, 1, 2, ….
    """

    def forward(self, input_ids, past_key_values, use_cache):
        p = torch.where(input_ids < 9, 0.5, 0.125)[..., None]
        right = torch.arange(VOCABULARY) == input_ids[..., None] + 1
        return SimpleNamespace(logits=torch.where(right, p, (1 - p) / (VOCABULARY - 1)).log())


class Recalls(nn.Module):
    """Answers with the place that was told at most 300 tokens before, and with a word that is no place after that."""

    def forward(self, input_ids, past_key_values, use_cache):
        past_key_values.extend(input_ids[0].tolist())
        read, logits = past_key_values, torch.zeros(1, input_ids.shape[1], VOCABULARY)
        logits[0, -1, 50] = 1.0
        for i in range(len(PLACES)):
            if 100 + i in read[-340:]:
                logits[0, -1, 100 + i] = 2.0
        return SimpleNamespace(logits=logits)


def tokenizer(text, **_):
    """One token for each word: 100 + i for the places, 1 for others."""
    words = text.replace(".", "").split()
    return {"input_ids": [100 + PLACES.index(word) if word in PLACES else 1 for word in words]}


@pytest.fixture(autouse=True)
def no_cache(monkeypatch):
    def start(self, model, cache=None):
        self.model, self.cache = model, [] if cache is None else cache

    monkeypatch.setattr(assess.Reading, "__init__", start)


def test_nats_by_position():
    pieces = [torch.arange(100), torch.arange(100)]
    nats = nats_by_position(Known(), pieces, read=7)
    assert nats.shape == (2, 99)
    found = by_position(nats, ((0, 10), (10, 40), (40, 100)))
    assert found["0-10"]["perplexity"] == pytest.approx(2)  # tokens 1 … 9, before which 1 … 9 tokens were read
    assert [found[name]["perplexity"] for name in ("10-40", "40-100")] == pytest.approx([8, 8])
    assert len(found["0-10"]["nats"]) == 2
    decodes = SimpleNamespace(decode=lambda ids: "é" * len(ids))
    assert bits_per_byte(nats, pieces, decodes) == pytest.approx((9 + 90 * 3) / (99 * 2))


def test_recall_is_planned_where_it_fits():
    words = " ".join(["word"] * 4000)
    assert assess.plan_assessment(tokenizer, words, 1000) == {
        "pieces": 4,
        "context": 1000,
        "rows": 8,
        "distances": [128, 256, 512],
    }
    alike = assess.plan_assessment(lambda text, **_: {"input_ids": [1] * len(text.split())}, words, 1000)
    assert alike["rows"] == 0


def test_texts_that_are_too_short_and_places_that_begin_alike_are_refused():
    ids = torch.ones(64 + 128, dtype=torch.int64)
    assert recall(Recalls(), tokenizer, ids, 1, (128,))["rows"] == 1
    words = "recall: expected at least 192 tokens of text, found 191; add text"
    refuses(words, recall, Recalls(), tokenizer, ids[1:], 1, (128,))
    alike = lambda text, **_: {"input_ids": [1] * len(text.split())}  # noqa: E731
    refuses("another first token for each place, found two alike", recall, Recalls(), alike, ids, 1, (128,))
    few = " ".join(["word"] * 7)
    refuses("notes: expected at least 8 tokens, found 7; add text", assess.plan_assessment, tokenizer, few, 2, "notes")
    assert assess.plan_assessment(tokenizer, f"{few} more", 2, "notes")["rows"] == 0


def test_a_text_is_assessed_by_pieces_that_are_spread_over_it():
    class Tokenizer:
        def __call__(self, text, **named):
            return (
                {"input_ids": [int(word) for word in text.split()]} if text[0].isdigit() else tokenizer(text, **named)
            )

        def decode(self, ids):
            return "ab" * len(ids)

    class Both(Recalls):
        def forward(self, input_ids, past_key_values, use_cache):
            recalled = super().forward(input_ids, past_key_values, use_cache)
            return recalled if rows else Known()(input_ids, past_key_values, use_cache)

    # Of 7 pieces of 20 tokens the first, the third and the fifth: only they hold the tokens that come next.
    text = " ".join(str(n % 20 if n // 20 in (0, 2, 4) else 50) for n in range(150))
    for rows in (0, 2):
        found = assess.assess(Both(), Tokenizer(), text, pieces=3, context=20, rows=rows, distances=(64,))
        assert found["tokens"] == 60
        assert found.get("recall", {}).get("rows", 0) == rows
        if not rows:
            assert found["positions"]["0-64"]["perplexity"] == pytest.approx(2 ** ((9 + 10 * 3) / 19))
            assert found["bits_per_byte"] == pytest.approx((9 + 10 * 3) / 19 / 2)
            assert found["bits_per_byte_of_pieces"] == pytest.approx([(9 + 10 * 3) / 19 / 2] * 3)


def test_recall_asks_at_each_distance():
    found = recall(Recalls(), tokenizer, torch.ones(2000, dtype=torch.int64), rows=5, distances=(128, 256, 1024))
    right = {one["distance"]: (sum(one["choice"]), sum(one["own_words"])) for one in found["distances"]}
    assert right[128] == right[256] == (5, 5)
    assert right[1024][1] == 0
    assert right[1024][0] < 5  # the first place, where all are alike
