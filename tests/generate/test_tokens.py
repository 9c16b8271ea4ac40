"""The tokens that a stream generates: rows that end separately, the iterator, and min_p."""

import pytest
import torch
from refusals import refuses
from test_stream import close, ids, model, seeded

from mnemos import Stream
from mnemos.generate.sampling import probabilities
from mnemos.models.transformer import HeadConfig


def ended(plain: list[int], ends: list[list[int]]) -> list[int]:
    """A row of plain tokens up to the first place at which it ends with one of the sequences."""
    at = [n for n in range(1, len(plain) + 1) if any(plain[max(0, n - len(end)) : n] == end for end in ends)]
    return plain[: at[0]] if at else plain


@pytest.mark.parametrize(
    ("kind", "settings", "ends", "fill"),
    [
        ("favor", {"eos": [3, 7]}, [[3], [7]], 3),
        ("softmax", {"stop": [2, 3]}, [[2, 3]], -1),
        ("window", {"stop": [torch.tensor([1, 5]), (8, 8)], "eos": 7}, [[1, 5], [8, 8], [7]], 7),
        ("cached", {"stop": [[1, 5], [10, 5]]}, [[1, 5], [10, 5]], -1),
        ("fused", {"stop": [[10, 10]], "eos": [7]}, [[10, 10], [7]], 7),
    ],
)
def test_rows_end_separately_and_go_on_after_their_own_end(kind, settings, ends, fill):
    network = model("linear").float() if kind == "fused" else model(kind)
    stream, length = Stream(network).prefill(ids(5, 5)), 30
    assert getattr(stream.step, "fused", False) == (kind == "fused")
    plain = stream.generate(length, 1.5, generator=seeded())[0].tolist()
    wanted = [ended(row, ends) for row in plain]
    assert len({*map(len, wanted)}) > 2, "they end at different places"
    tokens, after = stream.generate(length, 1.5, generator=seeded(), **settings)
    longest = max(map(len, wanted))
    assert tokens.tolist() == [row + [fill] * (longest - len(row)) for row in wanted]
    made = stream.tokens(length, 1.5, generator=seeded(), **settings)
    seen = [token for _, token in zip(range(12), made, strict=False)]
    assert torch.equal(torch.stack(seen, 1), tokens[:, :12])
    assert made.ended == [ended(row[:12], ends) == row and len(row) <= 12 for row in wanted]
    for last, found, most in ((after, tokens, longest), (made.stream, tokens[:, :12], 12)):
        for i, row in enumerate(wanted):
            alone = Stream(network).prefill(torch.cat([ids(5, 5)[i : i + 1], torch.tensor([row[:most]])], 1))
            tolerance = 1e-5 if kind == "fused" else 1e-10
            found = last.select(torch.tensor([i])).predict()
            torch.testing.assert_close(found, alone.predict(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kind", ["softmax", "window"])
def test_rows_with_padding_behind_them_go_on_after_their_own_end(kind):
    network, prompts = model(kind), ids(2, 6)
    x, mask = torch.zeros(2, 10, dtype=torch.int64), torch.zeros(2, 10, dtype=torch.bool)
    for row, start in ((0, 0), (1, 4)):
        x[row, start : start + 6], mask[row, start : start + 6] = prompts[row], True
    with torch.no_grad():
        _, state = network(x, None, mask)
    stream = Stream(network, state=state, last=torch.tensor([[1], [2]]))
    tokens, after = stream.generate(3, temperature=0, eos=int(stream.generate(1, temperature=0)[0][0, 0]))
    for row, count in ((0, 1), (1, 3)):
        read = torch.cat([prompts[row], stream.last[row], tokens[row, :count]])
        with torch.no_grad():
            torch.testing.assert_close(after.predict()[row], network(read[None])[0][0, -1])


def test_a_row_draws_the_same_whatever_ends_beside_it():
    network = model("linear")
    with torch.no_grad():
        network.head.weight.mul_(5)  # what a row draws depends on what it has read
    found = []
    for first in (0, 1, 2):
        prompts = torch.cat([ids(1, 5, seed=first), ids(2, 5)])
        made = Stream(network).prefill(prompts).tokens(20, generator=seeded(), eos=[1, 4])
        tokens = torch.stack(list(made), 1)
        found.append([ended(row, [[1], [4]]) for row in tokens.tolist()])
        assert made.stream.rows == 3
    assert found[0][1:] == found[1][1:] == found[2][1:]
    assert len({len(rows[0]) for rows in found}) > 1, "the first row ends at different places"


def test_the_iterator_makes_tokens_when_asked():
    steps = []
    network = model("linear")
    stream = Stream(network, lambda x, state: (steps.append(x), network(x, state))[1]).prefill(ids(2, 5), 9)
    made = stream.tokens(4, 0)
    tokens = [next(made), next(made)]
    assert len(steps) == 2
    rest, after = made.stream.generate(2, 0)
    whole, end = stream.generate(4, 0)
    assert torch.equal(torch.cat([torch.stack(tokens, 1), rest], 1), whole)
    close(after, end)
    assert len(list(made)) == 2
    assert next(made, None) is None
    assert stream.generate(0)[0].shape == (2, 0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"eos": 11}, "eos as a token id or several, each from 0 to 10, found"),
        ({"eos": "."}, "eos .* found '.'; encode the text"),
        ({"stop": "end"}, "stop as a sequence of token ids, or several, found 'end'; encode"),
        ({"stop": [[1], []]}, r"stop .* found \[\]"),
        ({"min_p": 1.5}, "min_p: expected a number of 0 to 1, found 1.5"),
    ],
)
def test_ends_that_are_none_are_refused(settings, message):
    refuses(message, Stream(model()).prefill(ids(1, 3)).tokens, 3, **settings)


def test_min_p_is_that_of_transformers():
    warpers = pytest.importorskip("transformers.generation.logits_process")
    scores = 3 * torch.randn(40, 30, generator=seeded())
    for temperature, k, top_p, min_p in (
        (1.0, 0, 1.0, 0.1),
        (0.7, 9, 0.9, 0.05),
        (2.0, 0, 0.8, 0.3),
        (1.0, 5, 1.0, 1.0),
    ):
        expected = warpers.TemperatureLogitsWarper(temperature)(None, scores)
        expected = warpers.TopKLogitsWarper(k)(None, expected) if k else expected
        expected = warpers.TopPLogitsWarper(top_p)(None, expected) if top_p < 1 else expected
        expected = warpers.MinPLogitsWarper(min_p)(None, expected).softmax(-1)
        torch.testing.assert_close(probabilities(scores, temperature, k, top_p, min_p), expected)
        of_rows = probabilities(scores.view(8, 5, 30), temperature, k, top_p, min_p)
        torch.testing.assert_close(of_rows.view(40, 30), expected)
    network = model("linear", vocab_size=17, head=HeadConfig(mixture=3))
    refuses("expected min_p 0, because", Stream(network).prefill(ids(1, 3)).generate, 1, min_p=0.1)


@pytest.mark.parametrize(("temperature", "mixture"), [(0.0, 0), (1.0, 0), (1.0, 3)])
def test_outputs_that_are_not_numbers_are_refused(temperature, mixture):
    network = model("linear", head=HeadConfig(mixture=mixture))
    torch.nn.init.constant_(network.head.weight, torch.nan)
    refuses("NaN", Stream(network).prefill(ids(2, 5)).generate, 3, temperature)
