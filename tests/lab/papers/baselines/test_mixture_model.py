"""A Transformer whose outputs are mixtures of logistics."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import mnemos
from mnemos import GRC, InputError, Transformer
from mnemos.attention.linear import LinearConfig
from mnemos.lab.evaluate.controls import controls
from mnemos.lab.evaluate.scores import evaluate
from mnemos.lab.papers.baselines.logistic_mixture.reference import probabilities
from mnemos.lab.tasks.batch import IGNORE, Batch
from mnemos.lab.tasks.metrics import negative_log_likelihood, right_predictions
from mnemos.memory.gated_cache import caches
from mnemos.models.transformer import HeadConfig

FIELDS = {"vocab_size": 17, "dim": 16, "layers": 1, "num_heads": 2, "mlp": 32, "max_length": 20}


def model(**fields) -> Transformer:
    torch.manual_seed(0)
    return Transformer(**FIELDS | {"attention": LinearConfig(), "head": HeadConfig(mixture=4)} | fields).double()


def batch() -> Batch:
    x = torch.randint(17, (3, 12), generator=torch.Generator().manual_seed(1))
    targets = x.roll(-1, 1)
    targets[:, -1] = IGNORE
    return Batch(x, targets)


def test_a_likelihood_may_be_a_submodule():
    """Which is in no attribute of the class or of the instance."""

    class Squares(nn.Module):
        def loss(self, outputs, targets, mask=None):
            return (outputs - targets).square().sum()

    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.likelihood = Squares()

    found = negative_log_likelihood(Own(), torch.ones(2, 3), Batch(None, torch.full((2, 3), 3)))
    assert found.item() == 24


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
    found = evaluate(network, [given])
    assert found["loss"] == pytest.approx(wanted.item() / 33)


def test_a_model_of_logits_is_scored_as_before():
    network, given = model(head=HeadConfig()), batch()
    outputs = network(given.inputs)[0]
    assert network.likelihood is None
    loss = negative_log_likelihood(network, outputs, given)
    assert loss == cross_entropy(outputs.flatten(0, 1), given.targets.flatten(), ignore_index=IGNORE, reduction="sum")


def test_a_fresh_mixture_covers_the_line():
    p = probabilities(torch.cat([torch.zeros(1, 4), *model().head.bias.detach().view(3, 4)[1:, None]], -1), 17)
    assert p.min() > 0.2 / 17
    assert p.max() < 3 / 17


def test_gradients_reach_everything():
    network, given = model(), batch()
    negative_log_likelihood(network, network(given.inputs)[0], given).backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in network.parameters())


def test_saved_and_loaded(tmp_path):
    network = model()
    mnemos.save(network.float(), tmp_path)
    assert torch.equal(mnemos.load(tmp_path)(batch().inputs)[0], network.eval()(batch().inputs)[0])


@pytest.mark.parametrize("head", [HeadConfig(mixture=-1), HeadConfig(mixture=2, tied=True), HeadConfig(2, mixture=2)])
def test_heads_that_cannot_be_are_refused(head):
    with pytest.raises(InputError, match="mixture"):
        model(head=head)


def test_controls_of_a_cached_mixture_are_scored_by_the_mixture():
    network = model(cache=GRC(length=3, block=4, scope="stream")).eval()
    given = batch()
    found = controls(network, lambda: [given])
    assert found["closed"]["loss"] > 0
    with torch.no_grad():
        for cache in caches(network):
            cache.mix.fill_(-torch.inf)
    assert found["closed"]["loss"] == pytest.approx(evaluate(network, [given])["loss"])
