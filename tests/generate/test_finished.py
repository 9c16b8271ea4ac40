"""When a sentence is done, and which hypotheses are kept, by each convention; worked by hand."""

import pytest
import torch

from mnemos.generate.beam import accept_hits, is_done

NONE = -torch.inf


@pytest.mark.parametrize(("stopping", "kept"), [("fairseq", [True, True, False]), ("early", [True, True, True])])
def test_fairseq_takes_the_first_that_end_until_there_are_k_and_transformers_the_best(stopping, kept):
    pool = torch.tensor([[-1.0, NONE, NONE]])
    hits = torch.ones(1, 3, dtype=torch.bool)
    assert accept_hits(pool, hits, torch.tensor([[False]]), stopping).tolist() == [kept]
    assert not accept_hits(pool, hits, torch.tensor([[True]]), stopping).any()


@pytest.mark.parametrize(
    ("stopping", "best", "penalty", "done"),
    [
        ("fairseq", -1.0, 1.0, True),  # two have ended
        ("early", -1.0, 1.0, True),
        ("heuristic", -8.0, 1.0, True),  # −8/4 = −2: not better than the worst, −2
        ("heuristic", -7.9, 1.0, False),
        ("never", -8.0, 1.0, False),  # −8/10 would be better
        ("never", -20.0, 1.0, True),
        ("never", -2.0, 0.0, True),  # without a penalty the length has no effect
        ("never", -0.9, -0.5, False),  # −0.9·√4 = −1.8: shorter is better, so the present length bounds
        ("never", -1.0, -0.5, True),
    ],
)
def test_a_full_pool_is_done_as_the_convention_says(stopping, best, penalty, done):
    lengths, best = torch.tensor([[4, 10]]), torch.tensor([[best]])
    assert bool(is_done(torch.tensor([[-1.0, -2.0]]), best, lengths, stopping, penalty)) == done
    assert not is_done(torch.tensor([[-1.0, NONE]]), best, lengths, stopping, penalty)
    assert is_done(torch.tensor([[-1.0, NONE]]), torch.tensor([[NONE]]), lengths, stopping, penalty)
