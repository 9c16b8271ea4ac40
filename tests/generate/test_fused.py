"""Decoding in one call of the kernels, against the model itself in float64."""

import pytest
import torch
from fused_cases import SMALL, close, equal, exactly, ids, make, stream
from native_kernels import needs_kernels
from refusals import refuses
from torch import nn

import mnemos
from mnemos import GRC, Transformer
from mnemos.attention.linear import LinearConfig
from mnemos.attention.recurrent import (
    DeltaConfig,
    GatedDeltaConfig,
    GLAConfig,
    KimiDeltaConfig,
    Mamba2Config,
    RetentionConfig,
)
from mnemos.attention.relative import RelativeConfig
from mnemos.attention.softmax import SoftmaxConfig
from mnemos.generate import fused as decoding
from mnemos.models.transformer import HeadConfig
from mnemos.native import library
from mnemos.ops.positions import Rotary
from mnemos.types import map_state, reset, select

pytestmark = needs_kernels
MODELS = {
    "pre": {},
    "post": {"norm": "post"},
    # A sum of relu's may be all but eps: at 1e-2 the model in float32 is 3e-6 from float64, the kernel 1e-6 to 4e-6.
    "silu": {"activation": "silu"},
    "relu": {"activation": "relu", "attention": LinearConfig("relu", eps=0.1)},
    "odd": {"dim": 21, "num_heads": 3, "mlp": 37, "layers": 1, "norm": "post"},
    "one head": {"dim": 35, "num_heads": 1, "mlp": 3, "layers": 2},
    "tiny": {"dim": 1, "num_heads": 1, "mlp": 1, "vocab_size": 1},
    "wide": {"dim": 128, "num_heads": 8, "mlp": 300, "vocab_size": 70, "layers": 5},
    "learned": {"position": "learned"},
    "scaled": {"scale_embedding": True},
    "rotary": {"position": "rotary", "rotary": Rotary(base=300.0, scaling=1.7)},
    "gated": {"activation": "swiglu", "norm": "rms"},
    "gated, post": {"activation": "swiglu", "norm": "post", "mlp": 17},
    "gated, deep head": {"head": HeadConfig(classes=5, hidden=19, pool="mean"), "activation": "swiglu", "norm": "rms"},
    "delta": {"attention": DeltaConfig(key_width=5, value_width=9), "position": "none", "layers": 1},
    "gated delta": {"attention": GatedDeltaConfig(key_heads=2, doubled_beta=True), "num_heads": 4, "norm": "rms"},
    "kimi delta": {"attention": KimiDeltaConfig(), "norm": "post", "layers": 2},
    "gla": {"attention": GLAConfig(), "dim": 28, "layers": 1},
    "wide gla": {"attention": GLAConfig(key_width=9, value_width=5), "norm": "post", "layers": 1},
    "retention": {"attention": RetentionConfig(), "norm": "rms", "layers": 2},
    "odd retention": {"attention": RetentionConfig(key_width=2, value_width=7), "position": "none", "layers": 1},
    "mamba2": {"attention": Mamba2Config(key_width=5, key_heads=2), "num_heads": 4, "layers": 2},
    "wide mamba2": {"attention": Mamba2Config(key_width=33, value_width=19), "num_heads": 3, "layers": 1},
    "wide gated delta": {"attention": GatedDeltaConfig(), "dim": 128, "num_heads": 2, "layers": 1, "position": "none"},
    "tied": {"head": HeadConfig(tied=True)},
    "classes": {"head": HeadConfig(classes=5, pool="last"), "norm": "post"},
    "deep head": {"head": HeadConfig(classes=5, hidden=19, pool="mean")},
    "deep head, relu": {"head": HeadConfig(classes=5, hidden=9, pool="mean"), "activation": "relu"},
}


@pytest.mark.each_value
@pytest.mark.parametrize("rows", [1, 2, 3, 16, 17])
@pytest.mark.parametrize("name", MODELS)
def test_equals_the_model(name, rows, variant, poisoned, monkeypatch):
    model = make(**MODELS[name])
    step = mnemos.fused_step(model)
    assert step.fused
    assert step.why == ""
    x = ids(rows, vocab=model.config.vocab_size)
    with monkeypatch.context() as alone:  # the kernel answers all of it
        alone.setattr(Transformer, "forward", None)
        y, state = stream(step, x)
    wanted, end = stream(exactly(model), x)
    assert [type(part) for part in (state, *state.layers)] == [type(part) for part in (end, *end.layers)]
    close((y, state), (wanted, end))


DELTA = {"num_heads": 4, "attention": GatedDeltaConfig(key_heads=2), "position": "none"}
SOFTMAX = {"position": "rotary", "attention": SoftmaxConfig()}


@pytest.mark.each_value
@pytest.mark.parametrize("count", [2, 3, 7])
@pytest.mark.parametrize("fields", [{"dim": 64, "num_heads": 4, "mlp": 100}, DELTA, SOFTMAX], ids=str)
def test_any_number_of_threads_and_of_rows_makes_the_same_numbers(fields, count, variant, threads):
    """To the last bit: a row does not know of the others, nor of who computes it."""
    model, x = make(**fields), ids(9)
    step = mnemos.fused_step(model)
    with torch.no_grad():
        _, start = model(x[:, :3])
    threads(1)
    wanted, end = stream(step, x, start)
    threads(count)
    for rows in map(torch.tensor, (range(9), [4], [7, 2], [0, 3, 5, 8, 1])):
        y, state = stream(step, x[rows], select(start, rows))
        assert torch.equal(y, wanted[rows])
        assert equal(state, select(end, rows))


@pytest.mark.parametrize("fields", [{}, {"norm": "post"}, {"position": "learned"}, SOFTMAX], ids=str)
def test_a_stream_may_change_between_the_two_at_any_token(fields):
    model = make(**fields)
    step, x = mnemos.fused_step(model), ids(3, 10)
    wanted, end = stream(exactly(model), x)
    state, outputs = None, []
    with torch.no_grad():
        for i in range(10):
            y, state = (step, model)[i * 7 % 3 % 2](x[:, i : i + 1], state)
            outputs.append(y)
        close((torch.stack(outputs, 1), state), (wanted, end))
        prompt, state = step(x[:, :6])  # a prompt goes through the model
        close([prompt], [wanted[:, :6, 0]])
        y, _ = stream(step, x[:, 6:], state)
    close([y], [wanted[:, 6:]])


@pytest.mark.parametrize("fields", [{}, DELTA, SOFTMAX], ids=str)
def test_rows_are_selected_and_reset(fields):
    model = make(**fields)
    step, x = mnemos.fused_step(model), ids(4)
    _, state = stream(step, x)
    rows = torch.tensor([3, 1, 1])
    y, _ = stream(step, x[rows], select(state, rows))
    exact = exactly(model)
    wanted, _ = stream(exact, x[rows], select(stream(exact, x)[1], rows))
    close([y], [wanted])
    fresh = torch.tensor([True, False, True, False])
    y, _ = stream(step, x, reset(state, fresh))
    close([y[fresh]], [stream(step, x[fresh])[0]])
    close([y[~fresh]], [stream(step, x, state)[0][~fresh]])


def test_rows_of_retention_count_their_own_tokens():
    """And where the layers have counted others than the model, the model answers."""
    model = make(attention=RetentionConfig(), position="none")
    step, x = mnemos.fused_step(model), ids(3)
    state = reset(stream(step, x)[1], torch.tensor([False, True, False]))
    y, end = stream(step, x, state)
    wanted, other = stream(model, x, state)
    close((y, end), (wanted, other))
    late = state._replace(layers=tuple(one._replace(seen=one.seen + 1) for one in state.layers))
    assert equal(step(x[:, :1], late), model(x[:, :1], late))


def test_weights_may_change_in_place_and_move():
    model = make()
    step = mnemos.fused_step(model)
    x = ids(2)
    stream(step, x)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.1)
    close([stream(step, x)[0]], [stream(exactly(model), x)[0]])
    model.load_state_dict({name: p * 0.9 for name, p in model.state_dict().items()}, assign=True)
    close([stream(step, x)[0]], [stream(exactly(model), x)[0]])
    model.double()
    assert stream(step, x)[0].dtype == torch.float64
    assert not step.fused
    assert step.why == "the kernel needs torch.float32 on cpu, found weights of torch.float64 on cpu"
    model.float()
    close([stream(step, x)[0]], [stream(exactly(model), x)[0]])
    assert step.fused
    model.head.weight.data = torch.randn(24, 11).T
    close([stream(step, x)[0]], [stream(exactly(model), x)[0]])
    assert "expected a contiguous weight" in step.why
    model.head.weight.data = model.head.weight.data.contiguous()
    model.head.bias = None
    assert stream(step, x)[0].shape[-1] == 11
    assert step.why == "a bias was added or removed"


def test_any_position_is_exact(variant):
    """The state of a stream a million tokens old: positions, and sums that have become large."""
    model = make()
    x = ids(3)
    _, state = stream(model, x)
    state = state._replace(
        seen=torch.tensor([10**6, 123_456_789, 2**31 + 5]), layers=map_state(lambda s: 1e5 * s, state.layers)
    )
    wide = state._replace(layers=map_state(torch.Tensor.double, state.layers))
    close([stream(mnemos.fused_step(model), x, state)[0]], [stream(exactly(model), x, wide)[0]])


def test_two_thousand_steps_equal_the_parallel_pass():
    model = make(max_length=2000)
    x = ids(2, 2000)
    y, state = stream(mnemos.fused_step(model), x)
    with torch.no_grad():
        wanted, end = exactly(model)(x)
    close((y[:, :, 0], state), (wanted, end), 2e-5)


def test_what_the_kernel_does_not_take_the_model_answers():
    model = make()
    step = mnemos.fused_step(model)
    many = ids(decoding.ROWS + 1)
    for x in (many, ids(2).int()):
        y, state = stream(step, x)
        assert not y.requires_grad
        wanted, end = stream(model, x)
        assert torch.equal(y, wanted)
        assert equal(state, end)
    with torch.autocast("cpu", torch.bfloat16):
        assert step(ids(2, 1))[0].dtype == torch.bfloat16
    seen = []
    for register in (model.register_forward_pre_hook, model.blocks[1].mlp.register_forward_hook):
        with register(lambda *_: seen.append(1)):  # later than the step
            y, state = step(many[:2, :1])
            step(many[:2, :1], state)
    assert len(seen) == 4
    for part in (model, model.dropout):  # there is dropout, also where a part alone is in training mode
        part.train()
        assert not torch.equal(step(many[:60, :1])[0], step(many[:60, :1])[0])
        model.eval()
        assert torch.equal(step(many[:60, :1])[0], step(many[:60, :1])[0])


class Louder(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class Another(Transformer):
    pass


def altered(change, **fields):
    model = make(**fields)
    change(model)
    return model


REASONS = {
    "attention": (lambda: make(attention=RelativeConfig(memory=3), position="none"), "found RelativeAttention"),
    "favor": (lambda: make(attention=LinearConfig("favor")), "elu and relu, found 'favor'"),
    "backend": (lambda: make(attention=LinearConfig(backend="chunked")), "the backend 'chunked'"),
    "cache": (lambda: make(cache=GRC(length=3)), "found GatedCacheAttention"),
    "both ways": (lambda: make(causal=False, head=HeadConfig(classes=3)), "is not causal"),
    "no MLP": (lambda: make(mlp=0), "its blocks have no MLP"),
    "float64": (lambda: make().double(), "found weights of torch.float64 on cpu"),
    "hook": (lambda: altered(lambda m: m.blocks[1].mlp.register_forward_hook(print)), "hook on blocks.1.mlp"),
    "forward": (
        lambda: altered(lambda m: setattr(m.blocks[1].mlp.expand, "forward", lambda x: x.repeat(1, 1, 2)[..., :40])),
        "a forward of its own",
    ),
    "another model": (lambda: Another(SMALL), "found Another"),
    "another module": (lambda: altered(lambda m: setattr(m.blocks[1].mlp, "expand", Louder(24, 40))), "found Louder"),
    "another size": (lambda: altered(lambda m: setattr(m.blocks[2], "mlp_norm", nn.LayerNorm(24, 0.1))), "eps=0.1"),
    "one more": (lambda: altered(lambda m: m.blocks[0].add_module("adapter", nn.Linear(2, 2))), "0.adapter: a module"),
    "layers differ": (
        lambda: altered(lambda m: setattr(m.blocks[1].attention, "eps", 1.0)),
        "differs in kind, heads, eps, feature map, rotary positions or window",
    ),
    "retention differs": (
        lambda: altered(lambda m: setattr(m.blocks[1].attention, "rotary", Rotary(50.0)), attention=RetentionConfig()),
        "differs in kind, heads, eps, feature map, rotary positions or window",
    ),
    "grouped heads": (lambda: make(attention=SoftmaxConfig(kv_heads=1)), "share keys and values"),
    "normalised queries": (lambda: make(attention=SoftmaxConfig(query_key_norm=True)), "queries and keys are norm"),
}


@pytest.mark.parametrize("name", REASONS)
def test_where_no_kernel_serves_it_says_why_and_steps_all_the_same(name, capsys):
    build, reason = REASONS[name]
    model = build().eval()
    step = mnemos.fused_step(model)
    assert not step.fused
    assert reason in step.why
    assert "\n" not in step.why
    y, state = step(ids(2, 1))
    assert not y.requires_grad
    wanted, end = model(ids(2, 1))
    assert torch.equal(y, wanted)
    assert equal(state, end)


def test_a_model_of_vectors_has_no_kernel_and_weights_have_a_known_type():
    assert mnemos.fused_step(make(features=3)).why == "it reads vectors, and the kernel reads tokens"
    refuses("weights of float32, bfloat16, int8, found 'int4'", mnemos.fused_step, make(), "int4")


def test_gelu_over_its_whole_range(variant):
    """To a few units in the last place, also where it is all but 0 and 1 + erf would cancel.

    Below the normal numbers the tail is rounded to 2^-149 before x, which is 13 there, multiplies it.
    """
    x = torch.cat([torch.linspace(-15, 15, 400_001), torch.logspace(-30, 0, 5001), -torch.logspace(-30, 2, 5001)])
    y = x.clone()
    library().mnemos_activate(variant, 1, y.data_ptr(), y.numel())
    exact = 0.5 * x.double() * torch.special.erfc(-x.double() * 0.5**0.5)
    unit = torch.exp2((torch.frexp(exact).exponent - 24).clamp(min=-147).double())
    assert ((y.double() - exact).abs() / unit).max() < 5
    special = torch.tensor([torch.inf, torch.nan, 0.0, 3e38, -3e38])
    library().mnemos_activate(variant, 1, special.data_ptr(), len(special))
    assert torch.equal(special.nan_to_num(7.0, posinf=8.0), torch.tensor([8.0, 7.0, 0.0, 3e38, 0.0]))
    y = x.clone()
    library().mnemos_activate(variant, 0, y.data_ptr(), y.numel())
    assert torch.equal(y, x.relu())
