"""What users of Transformers report of recurrent models, each as they reproduce it, through `mnemos.functional`."""

import pytest
import torch
from functional_models import in_pieces, step_of, tokens

import mnemos

CLOSE = {"rtol": 0, "atol": 1e-5}


@pytest.mark.parametrize("name", ["Mamba2", "Bamba", "Mamba"])
@torch.no_grad()
def test_a_long_sequence_in_batches_of_tokens_continues_from_the_state(name):
    step, x = step_of(name), tokens(2, 50)
    y, _ = in_pieces(step, x, [5] * 10)
    torch.testing.assert_close(y, step.model(x).logits, **CLOSE)


@torch.no_grad()
def test_outputs_do_not_depend_on_later_tokens_of_the_same_call():
    step, x = step_of("Qwen3Next"), tokens(1, 30)
    state = step(x[:, :14])[1]
    torch.testing.assert_close(step(x[:, 14:], state)[0][:, 0], step(x[:, 14:15], state)[0][:, 0], **CLOSE)


@pytest.mark.parametrize("name", ["Jamba", "Bamba", "Qwen3Next"])
@torch.no_grad()
def test_padding_of_a_continued_call_does_not_enter_the_state(name):
    step, x = step_of(name), tokens(2, 14)
    mask = torch.ones(2, 7, dtype=torch.bool)
    mask[1, :4] = False
    _, state = step(x[:, :7])
    y, state = step(x[:, 7:], state, mask)
    alone = step.model(torch.cat([x[1:, :7], x[1:, 11:]], 1)).logits
    torch.testing.assert_close(y[1, 4:], alone[0, 7:], **CLOSE)


@pytest.mark.parametrize("name", ["Mamba", "Mamba2", "Jamba", "Bamba"])
@torch.no_grad()
def test_prompts_that_are_padded_on_the_right_continue_as_without(name):
    step, x, more = step_of(name), tokens(2, 10), tokens(2, 3, seed=1)
    mask = torch.arange(10) < torch.tensor([[10], [4]])
    y = step(more, step(x, None, mask)[1])[0]
    torch.testing.assert_close(y[1], step.model(torch.cat([x[1:, :4], more[1:]], 1)).logits[0, 4:], **CLOSE)


@pytest.mark.parametrize("name", ["Bamba", "Qwen3Next"])
@torch.no_grad()
def test_padding_counts_in_a_batch_of_one_row(name):
    step, x = step_of(name), tokens(1, 9)
    mask = torch.arange(9)[None] >= 5
    torch.testing.assert_close(step(x, None, mask)[0][:, 5:], step.model(x[:, 5:]).logits, **CLOSE)


@pytest.mark.parametrize("name", ["Qwen3Next", "Mamba"])
@torch.no_grad()
def test_drafts_are_verified_at_once_and_rolled_back(name):
    """Greedy decoding with drafts of four tokens, wrong from some place on: the state before them is still there."""
    step, prompt = step_of(name), tokens(1, 6)
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
