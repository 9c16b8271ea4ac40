"""Fused steps with weights in bfloat16 and int8: equal to a model with the rounded weights, few bits from the model."""

import copy
import pickle
from types import SimpleNamespace

import pytest
import torch
from fused_cases import ids, stream
from native_kernels import needs_kernels
from torch import nn

import mnemos
from mnemos import Transformer, native
from mnemos.attention.linear import LinearConfig
from mnemos.attention.recurrent import GLAConfig
from mnemos.models.transformer import HeadConfig

pytestmark = needs_kernels
KINDS = ("bfloat16", "int8")
SIZES = {
    "pre": {},
    "odd": {"dim": 21, "num_heads": 3, "mlp": 37, "norm": "post"},
    "deep head": {"head": HeadConfig(classes=5, hidden=19, pool="last")},
    "wide": {"dim": 128, "num_heads": 8, "mlp": 300, "vocab_size": 70},
    "low-rank decays": {"attention": GLAConfig(key_width=9), "layers": 1},  # matrices that a head reads its own rows of
}


def make(**fields):
    torch.manual_seed(0)
    sizes = {"vocab_size": 11, "dim": 24, "layers": 2, "num_heads": 2, "mlp": 40, "max_length": 64}
    return Transformer(**(sizes | {"attention": LinearConfig()} | fields)).eval()


@torch.no_grad()
def rounded(model, weights):
    """A copy in float64 whose matrices hold what the kernel's hold."""
    model = copy.deepcopy(model).double()
    for part in model.modules():
        if isinstance(part, nn.Linear):
            w = part.weight.float()
            scale = w.abs().amax(1, keepdim=True) / 127
            w = w.bfloat16().float() if weights == "bfloat16" else (w / scale).round() * scale
            part.weight = nn.Parameter(w.double())
    return model


def outputs(step, rows, length=5, vocab=11):
    return stream(step, ids(rows, length, vocab))[0]


@pytest.mark.each_value
@pytest.mark.parametrize("rows", [1, 5, 17])
@pytest.mark.parametrize("weights", KINDS)
@pytest.mark.parametrize("name", SIZES)
def test_equals_the_model_with_rounded_weights(name, weights, rows, variant, threads):
    model = make(**SIZES[name])
    threads(2)
    vocab = model.config.vocab_size
    found = outputs(mnemos.fused_step(model, weights=weights), rows, vocab=vocab)
    wanted = outputs(rounded(model, weights), rows, vocab=vocab)
    torch.testing.assert_close(found.double(), wanted, rtol=0, atol=3e-6 * max(1.0, float(wanted.abs().max())))


@pytest.mark.parametrize(("weights", "most"), [("bfloat16", 1e-4), ("int8", 1e-3)])
def test_costs_few_bits(weights, most):
    """KL divergence from the model's own next-token distribution, in bits per token: not zero, and small."""
    model = make(dim=64, layers=4, mlp=256, vocab_size=50)
    exact, found = (outputs(f, 4, 32, 50).log_softmax(-1) for f in (model, mnemos.fused_step(model, weights)))
    bits = ((exact.exp() * (exact - found)).sum(-1) / torch.log(torch.tensor(2.0))).mean()
    assert 0 < bits < most


@pytest.mark.parametrize("weights", KINDS)
def test_copies_follow_the_weights(weights):
    model = make()
    step = mnemos.fused_step(model, weights)
    before = outputs(step, 2)
    with torch.no_grad():
        model.blocks[0].mlp.expand.weight.mul_(2)
    after = outputs(step, 2)
    assert not torch.equal(before, after)
    assert torch.equal(after, outputs(mnemos.fused_step(model, weights), 2))
    again = pickle.loads(pickle.dumps(step))
    assert again.weights == weights
    assert torch.equal(after, outputs(again, 2))


@pytest.mark.parametrize("weights", KINDS)
def test_another_thread_may_copy_the_weights_meanwhile(weights, monkeypatch):
    """Writes to inference tensors are not counted, so each call copies them: those of a running call stay alive."""
    with torch.inference_mode():
        model = make(dim=64, mlp=64)
    step, load, junk = mnemos.fused_step(model, weights), native.load_kernels, []
    wanted = outputs(step, 2)

    def decode_late(*given):
        step._locate()
        junk.extend(torch.full((64, 64), -1, dtype=torch.int8 if weights == "int8" else torch.int16) for _ in range(40))
        return load()[0].mnemos_decode(*given)

    monkeypatch.setattr(native, "load_kernels", lambda: (SimpleNamespace(mnemos_decode=decode_late), load()[1]))
    assert torch.equal(outputs(step, 2), wanted)


def test_a_row_that_is_no_number_stays_so():
    model = make()
    with torch.no_grad():
        model.blocks[0].mlp.expand.weight[3, 5] = torch.nan
    assert outputs(mnemos.fused_step(model, "int8"), 2).isnan().all()


def test_a_row_of_zeros_stays_one():
    """int8: its largest number gives no scale."""
    model = make()
    with torch.no_grad():
        model.blocks[0].mlp.expand.weight[3].zero_()
    assert outputs(mnemos.fused_step(model, "int8"), 2).isfinite().all()


@pytest.mark.parametrize(("weights", "rows"), [("float32", 65), ("float32", 128), ("int8", 300)])
def test_there_is_no_cliff_between_numbers_of_rows(weights, rows, monkeypatch):
    """The kernel computes them: the model took 1.4 times as long for 65 rows as the kernel for 64."""
    model = make()
    step, x = mnemos.fused_step(model, weights), ids(rows, 1)
    wanted = stream(step, x[:40])[0]
    monkeypatch.setattr(Transformer, "forward", None)
    assert torch.equal(stream(step, x)[0][:40], wanted)
