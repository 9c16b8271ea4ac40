"""What users and issues of Transformers report of recurrent caches, by `mnemos.functional`; tests name their issues."""

import pytest
import torch
from functional_models import build, in_pieces, tokens

import mnemos

CLOSE = {"rtol": 0, "atol": 1e-5}
HYBRIDS = ["Jamba", "Bamba", "Qwen3Next", "Qwen3_5", "OlmoHybrid", "NemotronH", "GraniteMoeHybrid"]
pytestmark = pytest.mark.usefixtures("without_gradient")


@pytest.fixture
def without_gradient():
    with torch.no_grad():
        yield


@pytest.mark.parametrize("name", ["Mamba2", "Qwen3_5"])
def test_several_tokens_after_a_state(name):
    """46032 (Mamba-2), 45513 (Qwen3.5): chunks of a long sequence began anew, or lost all tokens but one."""
    step, x = mnemos.functional(build(name)), tokens(2, 20)
    torch.testing.assert_close(in_pieces(step, x, [8, 8, 4])[0], step.model(x, use_cache=False).logits, **CLOSE)


@pytest.mark.parametrize("name", HYBRIDS)
def test_padding_in_every_call_of_a_chunked_prefill(name):
    """47087: from the second call on, padding entered the recurrent states."""
    step, x = mnemos.functional(build(name)), tokens(2, 12)
    mask = torch.ones(2, 12, dtype=torch.bool)
    mask[1, [0, 1, 7, 8]] = False
    y, state = step(x[:, :6], None, mask[:, :6])
    rest, _ = step(x[:, 6:], state, mask[:, 6:])
    alone = step.model(x[1:, mask[1]], use_cache=False).logits[0]
    torch.testing.assert_close(torch.cat([y, rest], 1)[1, mask[1]], alone, **CLOSE)


@pytest.mark.parametrize("name", ["NemotronH", "Mamba2", "Qwen3Next"])
def test_a_prompt_that_is_padded_on_the_right_goes_on(name):
    """48256: the window held the padding, and the state had decayed over it."""
    step, x, more = mnemos.functional(build(name)), tokens(2, 12), tokens(2, 2, seed=1)
    mask = torch.ones(2, 12, dtype=torch.bool)
    mask[1, 5:] = False
    y, _ = step(more, step(x, None, mask)[1])
    row = torch.cat([x[1:, :5], more[1:]], 1)
    torch.testing.assert_close(y[1], step.model(row, use_cache=False).logits[0, 5:], **CLOSE)


@pytest.mark.parametrize("name", ["Qwen3_5", "Bamba", "Mamba"])
def test_padding_on_the_left_of_a_single_row(name):
    """46773: the mask was left out for a batch of one."""
    step, x = mnemos.functional(build(name)), tokens(1, 10)
    mask = torch.arange(10)[None] >= 4
    torch.testing.assert_close(step(x, None, mask)[0][:, 4:], step.model(x[:, 4:], use_cache=False).logits, **CLOSE)


def test_a_block_of_drafted_tokens_is_taken_back():
    """49036: `Cache.crop` left the recurrent states of Qwen3.5 where the rejected tokens had brought them."""
    step, prompt = mnemos.functional(build("Qwen3_5")), tokens(1, 9)
    _, state = step(prompt)
    step(tokens(1, 4, seed=1), state)  # a draft, of which nothing is accepted
    row = torch.cat([prompt, tokens(1, 3, seed=2)], 1)
    torch.testing.assert_close(step(row[:, 9:], state)[0], step.model(row, use_cache=False).logits[:, 9:], **CLOSE)


def test_outputs_do_not_depend_on_later_tokens_of_the_same_call():
    step, x = mnemos.functional(build("Qwen3Next")), tokens(1, 30)
    state = step(x[:, :14])[1]
    torch.testing.assert_close(step(x[:, 14:], state)[0][:, 0], step(x[:, 14:15], state)[0][:, 0], **CLOSE)


@pytest.mark.parametrize("name", ["Qwen3Next", "Mamba"])
def test_drafts_are_verified_at_once_and_rolled_back(name):
    """Greedy decoding with drafts of four tokens, wrong from some place on: the state before them is still there."""
    step, prompt = mnemos.functional(build(name)), tokens(1, 6)
    expected = mnemos.Stream(step).prefill(prompt).generate(9, temperature=0)[0][0].tolist()
    state, last, found, place = step(prompt[:, :-1])[1], prompt[:, -1:], [], 0
    while len(found) < 9:
        draft = torch.tensor([expected[len(found) : len(found) + 4]])
        draft[:, place % 3 :] = (draft[:, place % 3 :] + 1) % 17  # wrong from here on
        place += 1
        best = step(torch.cat([last, draft], 1), state)[0].argmax(-1)
        right = int((best[:, :-1] == draft).long().cumprod(1).sum())
        accepted = torch.cat([last, best[:, :right]], 1)
        _, state = step(accepted, state)
        last = best[:, right : right + 1]
        found += [*best[0, :right].tolist(), int(last)]
    assert found[:9] == expected
