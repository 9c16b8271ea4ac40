"""The mixture of discretised logistics against its definition by differences."""

import pytest
import torch

from mnemos.lab.papers.baselines.logistic_mixture import operator
from mnemos.lab.papers.baselines.logistic_mixture.reference import probabilities
from mnemos.types import InputError


def parameters(*shape: int, dtype: torch.dtype = torch.float64, scale: float = -2.0) -> torch.Tensor:
    torch.manual_seed(0)
    logits, means, log_scales = torch.randn(3, *shape, dtype=torch.float64)
    return torch.cat([logits, means, log_scales + scale], -1).to(dtype)


def every(p: torch.Tensor, levels: int) -> torch.Tensor:
    """log P of all levels, [.., levels]."""
    x = torch.arange(levels).expand(*p.shape[:-1], levels)
    return operator.log_prob(p[..., None, :].expand(*p.shape[:-1], levels, p.shape[-1]), x, levels)


@pytest.mark.parametrize("levels", [2, 3, 17, 256])
@pytest.mark.parametrize("components", [1, 10])
@pytest.mark.parametrize("scale", [-9.0, -4.0, 0.0, 3.0])
def test_values_equal_the_definition_and_sum_to_one(levels, components, scale):
    p = parameters(5, 3, components, scale=scale)
    wanted = probabilities(p, levels)
    found = every(p, levels)
    torch.testing.assert_close(found.exp(), wanted, rtol=1e-9, atol=1e-14)
    torch.testing.assert_close(found.logsumexp(-1), torch.zeros(5, 3, dtype=torch.float64), rtol=0, atol=1e-10)


def test_bins_sum_to_one_in_float32_at_the_scales_that_training_meets():
    for scale in (-7.0, -5.0, -3.0, 0.0):
        total = every(parameters(7, 10, dtype=torch.float32, scale=scale), 256).double().exp().sum(-1)
        torch.testing.assert_close(total, torch.ones_like(total), rtol=0, atol=1e-5)


def test_gradients():
    p = parameters(3, 2).requires_grad_()
    x = torch.tensor([0, 9, 16])
    assert torch.autograd.gradcheck(lambda p: operator.log_prob(p, x, 17), (p,))


def test_far_tails_stay_exact_where_a_difference_would_be_zero():
    p = torch.tensor([0.0, -1.0, -5.0], dtype=torch.float32, requires_grad=True)
    found = operator.log_prob(p, torch.tensor(200), 256)
    a = torch.tensor((2 * 200 / 255 - 1 + 1), dtype=torch.float64)
    inverse = torch.exp(torch.tensor(5.0, dtype=torch.float64))
    # Far above the mean, σ(a) − σ(b) = e^(−b) − e^(−a) to all digits.
    wanted = -inverse * (a - 1 / 255) + torch.log(-torch.expm1(-2 / 255 * inverse))
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=0)
    found.backward()
    assert torch.isfinite(p.grad).all()
    assert (p.grad != 0).sum() == 2  # one component's share is 1 whatever its logit


@pytest.mark.parametrize("extreme", [-1e4, 1e4])
def test_wild_parameters_have_finite_values_and_gradients(extreme):
    p = torch.zeros(6, requires_grad=True)
    x = torch.tensor([0, 128, 255])
    wild = torch.stack([p + extreme * torch.eye(6)[i] for i in range(6)])
    found = operator.log_prob(wild[:, None].expand(6, 3, 6), x.expand(6, 3))
    assert torch.isfinite(found).all()
    found.sum().backward()
    assert torch.isfinite(p.grad).all()


def test_half_precision_is_computed_in_float32():
    p = parameters(4, 10, dtype=torch.float32, scale=-4).bfloat16()
    x = torch.tensor([0, 100, 101, 255])
    found = operator.log_prob(p, x)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, operator.log_prob(p.float(), x))


def test_draws_follow_the_distribution():
    p = parameters(1, 4, scale=-2.0)
    generator = torch.Generator().manual_seed(1)
    levels, n = 9, 200_000
    drawn = operator.draw(p.expand(n, -1), levels, generator=generator)
    share = torch.bincount(drawn, minlength=levels) / n
    wanted = probabilities(p, levels)[0]
    error = (wanted * (1 - wanted) / n).sqrt()
    assert ((share - wanted).abs() < 5 * error + 1e-9).all(), (share, wanted)
    again = operator.draw(p.expand(n, -1), levels, generator=torch.Generator().manual_seed(1))
    assert torch.equal(drawn, again)


def test_temperature_and_mode():
    p = parameters(50, 3, scale=-3.0)
    still = operator.draw(p, temperature=0.0)
    assert torch.equal(still, operator.draw(p, temperature=0.0))
    assert torch.equal(operator.mode(p, 31), probabilities(p, 31).argmax(-1))


def test_bad_input():
    p = parameters(4, 2)
    with pytest.raises(InputError, match="3K"):
        operator.log_prob(p[:, :5], torch.zeros(4, dtype=torch.int64))
    with pytest.raises(InputError, match="levels as integers"):
        operator.log_prob(p, torch.zeros(3, dtype=torch.int64))
    with pytest.raises(InputError, match="levels as integers"):
        operator.log_prob(p, torch.zeros(4))
    with pytest.raises(InputError, match="at least 2"):
        operator.log_prob(p, torch.zeros(4, dtype=torch.int64), 1)
