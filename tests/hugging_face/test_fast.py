"""`mnemos.fast`: models of Transformers have equal outputs, gradients and caches, and are as before after undo."""

import copy
import functools
import pickle
import threading

import pytest
import torch
from functional_models import CLOSE, agree, build, cached, run, short, tokens
from module_surgery import WAYS, adapt, hook_after, hook_before
from refusals import refuses

import mnemos
from mnemos.hugging_face import fast_model
from mnemos.hugging_face.fast_functions import torch_chunk_gated_delta_rule
from mnemos.hugging_face.fast_model import _CACHES, is_fast
from mnemos.hugging_face.fast_token import LAYERS, compute_token, norm_offset, normalise
from mnemos.libraries import transformers
from mnemos.types import leaves

DELTA = "Qwen3Next", "Qwen3_5", "Qwen3_5Moe", "Qwen4Exp", "LaraMini", "OlmoHybrid"
CHANNELS = "KimiLinear", "Glm5Next", "BailingHybrid"
SCALAR = "Mamba2", "Bamba", "FalconH1", "GraniteMoeHybrid", "NemotronH", "Zamba2"
SELECTIVE = "Mamba", "FalconMamba", "Jamba", "Zamba"
CONVOLUTIONS = "Lfm2", "Lfm3"
SERVED = [
    name for name in (*DELTA, *CHANNELS, *SCALAR, *SELECTIVE, *CONVOLUTIONS) if hasattr(transformers(), f"{name}Config")
]
EACH = pytest.mark.parametrize("name", SERVED)
LATER = 0 if mnemos.libraries.cache_name() == "cache" else 1


@EACH
def test_outputs_gradients_and_cached_steps_equal_those_of_transformers(name):
    model, x = build(name), tokens(2, 38)
    forwards = [type(layer).forward for layer in model.modules()]
    wanted = run(model, x, use_cache=False)
    mask = (torch.arange(33) >= torch.tensor([[0], [4]])).long()

    @torch.no_grad()
    def read():
        """Outputs of left padded rows, then of pieces and of single tokens after what the cache holds."""
        y, cache = cached(model, x[:, :33], [9, 21, 1, 1, 1], mask)
        return y[mask.bool()], cache

    theirs = read()
    with mnemos.fast(model) as report:
        changed = [model.get_submodule(found.name) for found in report.changed]
        assert len(changed) == 2
        assert all(map(is_fast, changed))
        agree(run(model, x, use_cache=False), wanted)
        ours = read()
        torch.testing.assert_close(ours[0], theirs[0], **CLOSE)
        for before, after in zip(theirs[1].layers, ours[1].layers, strict=True):
            for states in ("conv_states", "recurrent_states"):
                torch.testing.assert_close(
                    dict(getattr(after, states, {})), dict(getattr(before, states, {})), rtol=1e-3, atol=2e-5
                )
    assert not any("forward" in vars(layer) for layer in model.modules())
    assert [type(layer).forward for layer in model.modules()] == forwards
    assert torch.equal(run(model, x, use_cache=False)[0], wanted[0])


def note(seen, module, args, y):
    seen.append([x.detach().clone() for x in (*args, y) if isinstance(x, torch.Tensor)])


# A model of each way in which projections are read, and of each operator. The other models share these.
APART = {"Qwen3Next", "Qwen3_5", "OlmoHybrid", "KimiLinear", "BailingHybrid", "Mamba2", "Mamba", "Lfm2"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.exhaustive] * (name not in APART)) for name in SERVED]
)
def test_what_is_around_a_module_or_in_its_place_is_not_passed_by(name):
    """Hooks, forwards of instances, adapters and parametrisations, in training, prefill and decoding.

    They change the outputs as they do without `fast`, and every module is called as often and with the same numbers.
    """
    x = tokens(2, 8)
    first = short(name)
    report = mnemos.fast(first)
    parts = {
        f"{one.name}.{part}"
        for one in report.changed
        for part, _ in first.get_submodule(one.name).named_modules()
        if part
    }
    gated = {part for part in parts if type(first.get_submodule(part)).__name__.endswith("RMSNormGated")}
    groups = [parts - gated | set(report.norms), gated] if gated else [parts | set(report.norms)]
    report.undo()

    def changed(fast, ways, names):
        model, calls = copy.deepcopy(first), {}
        if fast:
            mnemos.fast(model)
        for i, part in enumerate(sorted(names, reverse=True)):
            ways[i % len(ways)](model, part)
        for part in names:
            model.get_submodule(part).register_forward_hook(functools.partial(note, calls.setdefault(part, [])))
        trained = len(ways) > 1 or ways[0] in (hook_after, adapt)
        grads = run(model, x, use_cache=False)[1] if trained else {}
        with torch.no_grad():
            return (cached(model, x, [7, 1])[0], grads), calls

    plain = changed(False, [lambda *_: None], ())[0][0]
    for names in groups:
        for ways in [[way] for way in WAYS] if name in APART else [WAYS]:
            (theirs, their_calls), (ours, our_calls) = changed(False, ways, names), changed(True, ways, names)
            assert ways == [hook_before] or (theirs[0] - plain).abs().max() > 1e-3
            agree(ours, theirs)
            torch.testing.assert_close(our_calls, their_calls, rtol=1e-3, atol=2e-4)


@pytest.mark.parametrize("name", ["Qwen3Next", "KimiLinear", "Mamba2", "Mamba"])
def test_checkpointed_layers_and_bfloat16(name):
    """Layers that are computed again have the same gradients; in bfloat16 outputs are as close as Transformers' are."""
    model, x = build(name).train(), tokens(2, 38)
    wanted = run(model, x, use_cache=False)
    half = copy.deepcopy(model).bfloat16().eval()
    with torch.no_grad():
        error = (half(x, use_cache=False)[0] - wanted[0]).abs().max()
        with mnemos.fast(half):
            assert (half(x, use_cache=False)[0] - wanted[0]).abs().max() < 1.5 * error
    model.activation_checkpointing_enable({"use_reentrant": False})
    with mnemos.fast(model):
        agree(run(model, x, use_cache=False), wanted)


WIDE = {
    "Qwen3Next": {"linear_key_head_dim": 20, "linear_value_head_dim": 36, "linear_conv_kernel_dim": 3},
    "Qwen3_5": {"linear_key_head_dim": 12, "linear_value_head_dim": 20},
    "OlmoHybrid": {"linear_key_head_dim": 24, "linear_value_head_dim": 16, "linear_allow_neg_eigval": True},
    "KimiLinear": {"linear_head_dim": 40},
    "BailingHybrid": {"linear_head_dim": 12},
    "Mamba2": {"hidden_size": 72, "state_size": 20, "head_dim": 36},
}


@pytest.fixture
def by_kernel(monkeypatch):
    """What the kernel returned for each token: None where it left it to the layer's own forward."""
    found = []

    def noted(*given):
        found.append(compute_token(*given))
        return found[-1]

    monkeypatch.setattr(fast_model, "compute_token", noted)
    return found


@pytest.mark.parametrize("name", [name for name in WIDE if name in SERVED])
@torch.no_grad()
def test_tokens_of_wide_layers_on_all_instruction_sets(name, by_kernel):
    """Widths of a few vectors and a rest, more rows than threads, and norms of both kinds."""
    model = build(name, **WIDE[name])
    layer = next(x for x in model.modules() if type(x).__name__ in LAYERS)
    norm = next(x for x in model.modules() if norm_offset(type(x)) is not None)
    x = torch.randn(3, 14, model.config.hidden_size, generator=torch.Generator().manual_seed(0))

    def read():
        cache = transformers().DynamicCache(config=model.config)
        y = [layer(part, **{_CACHES[LATER]: cache}) for part in x.split([9, *[1] * 5], 1)]
        return torch.cat(y, 1), norm(x), cache.layers[0].conv_states[0], cache.layers[0].recurrent_states[0]

    theirs = read()
    for instructions in mnemos.native.instruction_sets():
        with mnemos.native.instruction_set(instructions), mnemos.fast(model):
            assert compute_token(LAYERS[type(layer).__name__], layer, x[:, :1], None, None) is None
            torch.testing.assert_close(read(), theirs, rtol=1e-4, atol=2e-6)
        assert len(by_kernel) == 5
        assert not any(y is None for y in by_kernel)
        by_kernel.clear()


@pytest.mark.skipif(not mnemos.native.instruction_sets(), reason="the kernels are not built")
@torch.no_grad()
def test_single_tokens_are_read_by_the_kernel(by_kernel):
    model, x, found = build("Qwen3Next"), tokens(2, 9), by_kernel
    mnemos.fast(model)
    model.generate(x, max_new_tokens=4, min_new_tokens=4, do_sample=False)
    assert len(found) == 6
    assert None not in found
    found.clear()
    cache = model(x, use_cache=True)[mnemos.libraries.cache_name()]
    mask = torch.tensor([[1], [0]])
    layer = model.get_submodule("model.layers.0.linear_attn")
    token = torch.zeros(2, 1, 16)
    layer(token, cache, mask)  # padding
    with torch.enable_grad():
        layer(token, copy.deepcopy(cache))
    with torch.autocast("cpu", torch.bfloat16):
        layer(token, copy.deepcopy(cache))
    layer(token, transformers().DynamicCache(config=model.config))
    layer.bfloat16()(token.bfloat16(), cache)
    assert found == [None] * 5
    norm = model.get_submodule("model.layers.0.input_layernorm")
    offset = norm_offset(type(norm))
    assert normalise(norm, token, offset) is not None
    for given in (token.double(), torch.zeros(2, 1, 8)):
        assert normalise(norm, given, offset) is None
    with torch.enable_grad():
        assert normalise(norm, token, offset) is None
    assert normalise(norm.double(), token, offset) is None


class Logits(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return self.model(x, use_cache=False).logits


@pytest.mark.parametrize("name", ["Llama", "Mamba2"])
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
@torch.no_grad()
def test_a_trace_computes_other_tokens(name):
    model = Logits(build(name))
    mnemos.fast(model)
    traced = torch.jit.trace(model, tokens(2, 9))
    other = tokens(2, 9, seed=5)
    torch.testing.assert_close(traced(other), model(other), **CLOSE)


def test_other_models_copies_pickles_and_threads():
    model, x = build("Qwen3Next"), tokens(2, 9)
    other = build("Qwen3Next")
    with torch.no_grad():
        wanted = model(x).logits
    report = mnemos.fast(model)
    name = report.changed[0].name
    assert report.changed[0].functions == (
        "causal_conv1d_fn",
        "causal_conv1d_update",
        "torch_chunk_gated_delta_rule",
        "torch_recurrent_gated_delta_rule",
    )
    assert len(report.norms) == 9
    assert not any(map(is_fast, other.modules()))
    copied, loaded = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    assert copied.get_submodule(name).forward.__self__ is copied.get_submodule(name)
    assert is_fast(copied.get_submodule(name))
    assert not is_fast(loaded.get_submodule(name))
    mnemos.functional(loaded)(x)  # and its class has another forward from now on
    again = pickle.loads(pickle.dumps(step := mnemos.functional(model)))
    assert torch.equal(again(x)[0], step(x)[0])
    mnemos.fast(loaded).undo()
    lost = copy.deepcopy(model)
    with mnemos.fast(lost) as again:
        assert again.changed == report.changed
    assert is_fast(lost.get_submodule(name))  # as before the block
    mnemos.fast(lost).undo()
    assert not any("forward" in vars(layer) for layer in lost.modules())
    found = {}

    def run(i):
        with torch.no_grad():
            found[i] = [(model, copied, loaded, other)[i](x).logits for _ in range(3)]

    threads = [threading.Thread(target=run, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for outputs in found.values():
        for y in outputs:
            torch.testing.assert_close(y, wanted, **CLOSE)
    assert torch.equal(found[3][0], wanted)
    report.undo()
    report.undo()
    assert torch.equal(model(x).logits, wanted)
    assert "until undo() was called" in str(report)
    refuses("call fast\\(model\\) again", report.__enter__)


def test_sequences_in_one_row_are_read_apart_and_some_may_be_empty():
    q, k, v = torch.randn(3, 1, 9, 2, 4).unbind(0)
    g, beta = -torch.rand(1, 9, 2), torch.rand(1, 9, 2)
    ends = torch.tensor([0, 0, 4, 4, 9, 9])
    whole, _ = torch_chunk_gated_delta_rule(q, k, v, g, beta, cu_seqlens=ends)
    for part in (slice(4), slice(4, 9)):
        alone, _ = torch_chunk_gated_delta_rule(*(x[:, part] for x in (q, k, v, g, beta)))
        torch.testing.assert_close(whole[:, part], alone)


def test_what_is_left_is_said():
    assert {x.kind for x in mnemos.fast(build("Rwkv")).left} == {"RwkvSelfAttention", "RwkvFeedForward"}
    model = build("Mamba2")
    mixer = type(model.backbone.layers[0].mixer)
    model.backbone.layers[1].mixer.__class__ = type(
        "Mixer", (mixer,), {"forward": lambda *x, **y: mixer.forward(*x, **y)}
    )
    assert ["Mamba2Mixer" in x.reason for x in mnemos.fast(model).left] == [True]
    model.backbone.layers[1].mixer.__class__ = mixer
    mnemos.fast(model).undo()
    layer = model.backbone.layers[0].mixer
    own = layer.forward.__func__
    layer.forward = own = functools.partial(own, layer)
    report = mnemos.fast(model)
    assert [x.name for x in report.left] == ["backbone.layers.0.mixer"]
    assert layer.forward is own
    other = model.backbone.layers[1].mixer
    mine, other.forward = other.forward, own
    refuses(r"backbone\.layers\.1\.mixer", report.undo)
    other.forward = mine
    report.undo()
    refuses("int", mnemos.fast, 3)


def test_where_nothing_was_changed_the_report_says_why():
    ours = mnemos.Transformer(vocab_size=50, dim=16, num_heads=2, layers=1)
    for other, reason in [(ours, "a model of mnemos"), (torch.nn.ReLU(), "no layer that mnemos.fast serves")]:
        report = str(mnemos.fast(other))
        assert report.startswith("nothing was changed: ")
        assert reason in report
    refuses(r"functional: .*; mnemos\.fast\(model\) serves", mnemos.functional, build("KimiLinear"))


@pytest.mark.parametrize("name", ["Qwen3Next", "Mamba2"])
def test_packed_sequences_are_kept_apart(name):
    model, x = build(name), tokens(1, 14)
    lengths = [3, 7, 4]
    ends = torch.tensor([0, 3, 10, 14], dtype=torch.int32)
    numbers = torch.arange(3, dtype=torch.int32).repeat_interleave(torch.tensor(lengths))[None]
    with torch.no_grad():
        apart = torch.cat([model(part).logits for part in x.split(lengths, 1)], 1)
    layers = [layer for layer in model.modules() if hasattr(layer, "conv1d")]
    inputs = torch.randn(1, 14, 16)
    wanted = torch.cat([layers[0](part) for part in inputs.split(lengths, 1)], 1)
    packed = {"seq_idx": numbers, **({"cu_seq_lens_q": ends} if name == "Qwen3Next" else {})}
    with pytest.raises(ValueError, match="packed"):
        layers[0](inputs, **packed)
    with mnemos.fast(model):
        torch.testing.assert_close(layers[0](inputs, **packed), wanted, **CLOSE)
        if name == "Mamba2":  # its model hands nothing on
            return
        places = torch.cat([torch.arange(length) for length in lengths])[None]
        given = {"position_ids": places, "use_cache": False}  # with a cache the attention layers mix the rows
        torch.testing.assert_close(model(x, **given, **packed).logits, apart, **CLOSE)
        for one in packed:
            refuses(f"found {one} alone", model, x, **given, **{one: packed[one]})
    kimi, zamba = build("KimiLinear"), build("Zamba")
    with mnemos.fast(kimi):
        refuses("does not hand the ends", kimi, x, **packed)
    with mnemos.fast(zamba):
        refuses(r"ZambaMambaMixer .* does not hand the ends", zamba, x, seq_idx=numbers)


def test_with_functional_in_both_orders():
    x = tokens(2, 12)
    first, second = build("Qwen3Next"), build("Qwen3Next")
    mnemos.fast(first)
    step = mnemos.functional(first)
    late = mnemos.functional(second)
    mnemos.fast(second)
    for one in (step, late):
        y, state = one(x[:, :5])
        rest, _ = one(x[:, 5:], state)
        torch.testing.assert_close(torch.cat([y, rest], 1), one.model(x).logits, **CLOSE)
        before = [x.clone() for x in leaves(state)]
        with torch.no_grad():  # the kernel for a token would write into the state
            token, _ = one(x[:, 5:6], state)
        torch.testing.assert_close(token, rest[:, :1], **CLOSE)
        assert all(map(torch.equal, leaves(state), before))


def test_compiled_and_exported_layers():
    model, x = build("Mamba2"), torch.randn(2, 9, 16)
    layer = model.backbone.layers[0].mixer
    wanted = layer(x)
    mnemos.fast(model)
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    y = compiled(x)
    torch.testing.assert_close(y, wanted, **CLOSE)
    y.sum().backward()
    program = torch.export.export(layer, (x,), strict=False)
    assert "mnemos" not in str(program.graph)
    torch.testing.assert_close(program.module()(x), wanted, **CLOSE)
