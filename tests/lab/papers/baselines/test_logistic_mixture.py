"""The mixture of discretised logistics against its definition by differences, and as the head of a Transformer."""

import pytest
import torch
from refusals import refuses

from mnemos import Transformer
from mnemos.attention.linear import LinearConfig
from mnemos.lab.evaluate.scores import evaluate
from mnemos.lab.papers.baselines import logistic_mixture as operator
from mnemos.lab.tasks.batch import IGNORE, Batch
from mnemos.lab.tasks.metrics import negative_log_likelihood, right_predictions
from mnemos.models.transformer import HeadConfig


def parameters(*shape: int, dtype: torch.dtype = torch.float64, scale: float = -2.0) -> torch.Tensor:
    torch.manual_seed(0)
    logits, means, log_scales = torch.randn(3, *shape, dtype=torch.float64)
    return torch.cat([logits, means, log_scales + scale], -1).to(dtype)


def probabilities(parameters: torch.Tensor, levels: int) -> torch.Tensor:
    """P(x = n) for every level n (Salimans et al. 2017, eq. 2), by differences of distribution functions.

    Each level has the interval of half a step to both sides; the first and the last extend to infinity.
    """
    logits, means, log_scales = parameters.double().chunk(3, -1)
    inner = (2 * torch.arange(levels - 1, dtype=torch.float64) + 1) / (levels - 1) - 1
    edges = torch.cat([inner.new_tensor([-torch.inf]), inner, inner.new_tensor([torch.inf])])
    below = torch.sigmoid((edges - means[..., None]) / torch.exp(log_scales.clamp(min=-7))[..., None])
    return (torch.softmax(logits, -1)[..., None] * below.diff(dim=-1)).sum(-2)


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
    best = p[0].view(3, 4)[1, p[0, :4].argmax()]
    assert operator.draw(p, levels, temperature=0) == ((best + 1) * 4).round().clamp(0, 8), "the likeliest mean"


def test_temperature_divides_the_logits():
    sharp = torch.tensor([0.0, 4.0, -1.0, 1.0, -9.0, -9.0])
    drawn = operator.draw(sharp.expand(20_000, -1), 2, 4.0, torch.Generator().manual_seed(0))
    assert drawn.float().mean() == pytest.approx(torch.tensor(1.0).sigmoid().item(), abs=0.02)


def test_a_level_out_of_range_is_refused():
    refuses("expected levels 0 to 255, found 0 to 256", operator.log_prob, parameters(2, 2), torch.tensor([0, 256]))


# ---- a model ----

FIELDS = {"vocab_size": 17, "dim": 16, "layers": 1, "num_heads": 2, "mlp": 32, "max_length": 20}


def model(**fields) -> Transformer:
    torch.manual_seed(0)
    return Transformer(**FIELDS | {"attention": LinearConfig(), "head": HeadConfig(mixture=4)} | fields).double()


def batch() -> Batch:
    x = torch.randint(17, (3, 12), generator=torch.Generator().manual_seed(1))
    targets = x.roll(-1, 1)
    targets[:, -1] = IGNORE
    return Batch(x, targets)


def test_the_score_is_the_mixtures():
    network, given = model().eval(), batch()
    outputs = network(given.inputs)[0]
    assert outputs.shape == (3, 12, 12)
    loss = negative_log_likelihood(network, outputs, given)
    right, count = right_predictions(network, outputs, given)
    p = probabilities(outputs, 17)
    counted = given.targets != IGNORE
    wanted = -p[counted].gather(-1, given.targets[counted][:, None]).log().sum()
    torch.testing.assert_close(loss, wanted)
    assert count == 33
    assert 0 <= right <= 33
    assert evaluate(network, [given])["loss"] == pytest.approx(wanted.item() / 33)
    loss.backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in network.parameters())


def test_a_fresh_mixture_covers_the_line():
    p = probabilities(torch.cat([torch.zeros(1, 4), *model().head.bias.detach().view(3, 4)[1:, None]], -1), 17)
    assert p.min() > 0.2 / 17
    assert p.max() < 3 / 17
