"""What every memory promises (the house's rule: registering is being tested), over every registry entry.

A class says what it can do (`splits`, `rows_independent`, `state_gradient`, `causal`, a model's `inputs`); no test
knows a name.
"""

import copy
import dataclasses
import itertools

import pytest
import torch

import mnemos
from mnemos import GRC, registry
from mnemos.attention import GatedCacheAttention, RelativeConfig
from mnemos.memory import gated_cache
from mnemos.types import leaves, map_state, reset, select

DIM, HEADS, ROWS, TOKENS, BANDS = 12, 2, 3, 11, 7

CACHES = {
    "": None,
    "+paper": GRC(length=3, preset="paper"),
    "+official": GRC(length=3, preset="official"),
    "+mnemos": GRC(length=3, preset="mnemos"),
    "+stream": GRC(length=3, scope="stream"),
    "+unwritten": GRC(length=3, scope="stream", write=False),
    "+frozen-block2": GRC(length=3, inference="frozen", block=2, resample="linear"),
    "+linear-branch": GRC(length=3, branch="linear", candidate="linear", read="sample", inference="transient"),
}
# Every attention as it comes, and those whose settings change what they promise.
ATTENTIONS = {name: registry.load("attention", name)() for name in registry.names("attention")}
ATTENTIONS |= {
    "relative-same": RelativeConfig(memory=4, same_length=True),
    "relative-live": RelativeConfig(memory=4, same_length=True, clamp=3, detached=False),
}
LAYERS = [f"{name}{cache}/{kind}" for name, cache, kind in itertools.product(ATTENTIONS, CACHES, ("whole", "causal"))]


def make(case: str) -> torch.nn.Module:
    """A layer in float64 with every parameter and buffer away from its initial value."""
    torch.manual_seed(0)
    name, kind = case.split("/")
    name, plus, cache = name.partition("+")
    layer = ATTENTIONS[name].build(DIM, HEADS, causal=kind == "causal")
    if plus:
        layer = GatedCacheAttention(DIM, HEADS, layer, CACHES[plus + cache], causal=kind == "causal")
    return scatter(layer)


# Sizes of a model of tokens, whatever it has of them.
SMALL = {"vocab_size": 13, "dim": DIM, "layers": 2, "num_heads": HEADS, "mlp": 16, "max_length": TOKENS}
SMALL |= {"encoder_layers": 1, "decoder_layers": 2, "segment": 4}


def make_model(name: str, cache: object, causal: bool) -> torch.nn.Module:
    torch.manual_seed(0)
    config = registry.load("model", name)
    if config.inputs == "images":  # small as it is
        return scatter(config(classes=5, cache=cache).build())
    if config.inputs == "frames":  # of the paper's size, which a few frames do not make slow
        return scatter(config(vocab_size=4, bands=BANDS).build())
    config = config(**{k: v for k, v in SMALL.items() if has(config, k)})
    if has(config, "cache"):
        config = dataclasses.replace(config, cache=cache)
    if not causal:
        config = dataclasses.replace(config, causal=False, head=dataclasses.replace(config.head, classes=5))
    return scatter(config.build())


def has(config: type, field: str) -> bool:
    """Whether a configuration lets this be chosen."""
    return field in {f.name for f in dataclasses.fields(config)}


def scatter(module: torch.nn.Module) -> torch.nn.Module:
    module = module.double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for tensor in filter(torch.is_floating_point, itertools.chain(module.parameters(), module.buffers())):
            tensor += 0.3 * torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype)
    return module


def tokens(seed: int = 2, t: int = TOKENS) -> torch.Tensor:
    return torch.randn(ROWS, t, DIM, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def close(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def same_state(a: object, b: object) -> None:
    assert len(leaves(a)) == len(leaves(b))
    for x, y in zip(leaves(a), leaves(b), strict=True):
        close(x, y)


@pytest.fixture(params=LAYERS)
def layer(request: pytest.FixtureRequest) -> torch.nn.Module:
    return make(request.param)


@pytest.mark.parametrize("training", [True, False])
def test_split_and_resume_equals_whole(layer, training):
    layer.train(training)
    x = tokens()
    with gated_cache.hold_caches(layer):
        whole, end = layer(x)
        if layer.splits == "never":
            assert end is None, "a layer that cannot be resumed returns no state"
            return
        if layer.splits == "segments":
            # The segments are the computation: a stored state goes on as the live one does.
            _, state = layer(x[:, :4])
            kept = map_state(torch.clone, state)
            close(layer(x[:, 4:], state)[0], layer(x[:, 4:], kept)[0])
            return
        for cuts in ([1], [4, 5], [3, 6, 9], range(1, TOKENS)):
            state, parts = None, []
            for a, b in itertools.pairwise([0, *cuts, TOKENS]):
                y, state = layer(x[:, a:b], state)
                parts.append(y)
            close(torch.cat(parts, 1), whole)
            same_state(state, end)
        # An explicit fresh state is None's long form.
        close(layer(x, layer.initial_state(ROWS, dtype=torch.float64))[0], whole)


@pytest.mark.parametrize("training", [True, False])
def test_the_future_cannot_change_the_past(layer, training):
    layer.train(training)
    x = tokens()
    for j in range(TOKENS):
        other = x.clone()
        other[:, j] += 1
        with gated_cache.hold_caches(layer):
            before, after = layer(x)[0], layer(other)[0]
        if layer.causal:
            close(before[:, :j], after[:, :j])
        assert not torch.equal(before[:, j:], after[:, j:])


def test_rows_are_independent_or_declared_not_to_be(layer):
    layer.train()
    x = tokens()
    other = x.clone()
    other[1] += 1
    with gated_cache.hold_caches(layer):
        same = torch.allclose(layer(x)[0][0], layer(other)[0][0], rtol=1e-9, atol=1e-9)
    assert same == layer.rows_independent


def test_a_given_state_is_never_changed_and_can_be_forked(layer):
    layer.eval()
    with torch.no_grad():
        _, state = layer(tokens())
        before = map_state(torch.clone, state)
        first, _ = layer(tokens(3, 1), state)
        second, after = layer(tokens(4, 1), state)
        again, _ = layer(tokens(3, 1), state)
        layer(tokens(5, 2), after)
        close(first, again)
        same_state(state, before)
        assert not torch.equal(first, second)


def test_selected_and_reset_rows(layer):
    layer.eval()
    with torch.no_grad():
        _, state = layer(tokens())
        if state is None:
            return
        x = tokens(3, 5)
        y, _ = layer(x, state)
        rows = torch.tensor([2, 0, 2])
        close(layer(x[rows], select(state, rows))[0], y[rows])
        fresh = layer(x)[0]
        mixed = layer(x, reset(state, torch.tensor([False, True, False])))[0]
        close(mixed[1], fresh[1])
        close(mixed[[0, 2]], y[[0, 2]])


def test_every_parameter_gets_a_gradient(layer):
    layer.train()
    layer(tokens())[0].square().sum().backward()
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None, name
        if "bias" not in name:  # a key's bias shifts every score alike: its gradient is zero
            assert parameter.grad.abs().max() > 1e-9, name


def test_gradients_are_the_derivatives(layer):
    layer.train()
    x = tokens(t=7)[:2].requires_grad_()
    with gated_cache.hold_caches(layer):
        _, state = layer(tokens(3, 4)[:2])
        assert torch.autograd.gradcheck(lambda x: layer(x, state)[0], x, fast_mode=True)


def test_gradient_through_the_state_equals_the_whole(layer):
    if layer.splits != "anywhere" or not layer.state_gradient:
        state, inner = layer(tokens())[1], layer
        if isinstance(layer, GatedCacheAttention) and state is not None:
            (state, walk), inner = state, layer.inner
            if layer.grc.scope == "shared":
                assert not any(leaf.requires_grad for leaf in leaves(walk)), "declared detached"
        if not inner.state_gradient:
            assert not any(leaf.requires_grad for leaf in leaves(state)), "declared detached"
        return
    layer.train()
    gradients = []
    for cuts in ([], [2, 7]):
        x = tokens().requires_grad_()
        layer.zero_grad()
        state, loss = None, 0.0
        with gated_cache.hold_caches(layer):
            for a, b in itertools.pairwise([0, *cuts, TOKENS]):
                y, state = layer(x[:, a:b], state)
                loss = loss + y.square().sum()
        loss.backward()
        gradients.append([x.grad, *(p.grad.clone() for p in layer.parameters())])
    for whole, split in zip(*gradients, strict=True):
        close(split, whole)


def test_a_mask_hides_padding(layer):
    """Valid tokens read the same whatever padding stands behind them."""
    layer.eval()
    x = tokens()
    mask = torch.ones(ROWS, TOKENS, dtype=torch.bool)
    mask[1, 7:] = False
    other = torch.where(mask[..., None], x, 100.0)
    with torch.no_grad():
        close(layer(x, None, mask)[0][mask], layer(other, None, mask)[0][mask])
        close(layer(x, None, mask)[0][1, :7], layer(x[1:2, :7])[0][0])
        empty = mask.clone()
        empty[2] = False
        assert layer(x, None, empty)[0].isfinite().all()


def test_saved_and_loaded_before_the_first_forward(layer):
    layer.train()
    layer(tokens())
    fresh = copy.deepcopy(layer)
    for tensor in itertools.chain(fresh.parameters(), fresh.buffers()):
        torch.nn.init.zeros_(tensor)
    fresh.load_state_dict(layer.state_dict(), strict=True)
    close(fresh.eval()(tokens(5))[0], layer.eval()(tokens(5))[0])


def test_bf16_autocast_stays_close(layer):
    layer.float().train()
    x = tokens().float()
    with gated_cache.hold_caches(layer):
        y = layer(x)[0]
        with torch.autocast("cpu", torch.bfloat16):
            low, state = layer(x)
    assert low.isfinite().all()
    assert (low.float() - y).abs().max() < 0.05 * y.abs().max()
    if isinstance(layer, GatedCacheAttention):
        assert layer.cache.dtype == torch.float32
        assert state is None or state.walk is None or state.walk.cache.dtype == torch.float32


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["whole", "causal"])
@pytest.mark.parametrize("cache", ["", "+paper", "+stream"])
@pytest.mark.parametrize("name", registry.names("attention"))
def test_compiled_equals_eager(name, cache, kind):
    case = f"{name}{cache}/{kind}"
    layer = make(case).train()
    torch._dynamo.reset()
    compiled = torch.compile(copy.deepcopy(layer), backend="aot_eager")
    for seed in (3, 4):  # the second forward meets the cache that the first one wrote
        x, z = tokens(seed).requires_grad_(), tokens(seed).requires_grad_()
        layer(x)[0].square().sum().backward()
        compiled(z)[0].square().sum().backward()
        close(x.grad, z.grad)
    for (name, a), b in zip(layer.state_dict().items(), compiled.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, msg=name)


def _models() -> list[tuple[str, object, bool]]:
    """What is given tokens has a state to carry, and may be causal or not; images and frames have neither."""
    cases: list[tuple[str, object, bool]] = []
    for name in registry.names("model"):
        config = registry.load("model", name)
        if config.inputs == "images":
            cases += itertools.product([name], (None, GRC(length=3)), [False])
        elif config.inputs == "frames":
            cases.append((name, None, False))
        else:
            stores = (None, GRC(length=3, scope="stream"), GRC(length=3)) if has(config, "cache") else (None,)
            cases += itertools.product([name], stores, [True, False] if has(config, "causal") else [True])
    return cases


MODELS = _models()


@pytest.fixture(
    params=MODELS, ids=lambda m: f"{m[0]}-{m[1].scope if m[1] else 'plain'}-{'causal' if m[2] else 'whole'}"
)
def model(request: pytest.FixtureRequest) -> torch.nn.Module:
    return make_model(*request.param)


def inputs(model: torch.nn.Module, seed: int = 2) -> torch.Tensor:
    """What the model says that it is given."""
    c, generator = model.config, torch.Generator().manual_seed(seed)
    if c.inputs == "images":
        return torch.randn(ROWS, c.channels, c.image, c.image, dtype=torch.float64, generator=generator)
    if c.inputs == "frames":
        return torch.randn(ROWS, TOKENS, c.bands, dtype=torch.float64, generator=generator)
    return torch.randint(13, (ROWS, TOKENS), generator=generator)


def causal(model: torch.nn.Module) -> bool:
    return model.config.inputs == "tokens" and getattr(model.config, "causal", True)


def test_model_split_and_resume(model):
    model.eval()
    x = inputs(model)
    whole, end = model(x)
    if not causal(model):
        assert whole.shape == ((ROWS, TOKENS, 5) if model.config.inputs == "frames" else (ROWS, 5))
        assert model.config.inputs == "tokens" or end is None, "images and frames carry no state"
        return
    assert whole.shape == (ROWS, TOKENS, 13)
    for cuts in ([4], range(1, TOKENS)):
        state, parts = None, []
        for a, b in itertools.pairwise([0, *cuts, TOKENS]):
            y, state = model(x[:, a:b], state)
            parts.append(y)
        close(torch.cat(parts, 1), whole)
        same_state(state, end)
    fresh = reset(end, torch.tensor([True, False, True]))
    close(model(x, fresh)[0][[0, 2]], whole[[0, 2]])


def test_model_rows_are_independent(model):
    model.eval()
    x = inputs(model)
    whole = model(x)[0]
    close(whole[1:2], model(x[1:2])[0])
    other = x.clone()
    other[0] = inputs(model, 3)[0]
    close(model(other)[0][1:], whole[1:])


def test_model_mask_hides_padding(model):
    """What a row without padding gives, it gives beside a longer one, whatever its padding holds."""
    if model.config.inputs == "images":
        return
    model.eval()
    x = inputs(model)
    mask = torch.ones(ROWS, TOKENS, dtype=torch.bool)
    mask[1, 7:] = False
    other = torch.where(mask.reshape(ROWS, TOKENS, *[1] * (x.dim() - 2)), x, 1 if x.dim() == 2 else 100.0)
    with torch.no_grad():
        padded, alone = model(other, None, mask=mask)[0], model(x[1:2, :7])[0][0]
        close(
            model(x, None, mask=mask)[0][1, : len(alone)] if padded.dim() == 3 else model(x, None, mask=mask)[0][1],
            alone,
        )
        close(padded[1, : len(alone)] if padded.dim() == 3 else padded[1], alone)


def test_model_causality(model):
    if not causal(model):
        return
    model.train()
    x = inputs(model)
    for j in range(TOKENS):
        other = x.clone()
        other[:, j] = (other[:, j] + 1) % 13
        with gated_cache.hold_caches(model):
            close(model(x)[0][:, :j], model(other)[0][:, :j])


def test_model_gradients_and_save(model, tmp_path):
    model.train()
    model(inputs(model))[0].square().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        if "bias" not in name:
            assert parameter.grad.abs().max() > 1e-12, name
    mnemos.save(model, tmp_path)
    loaded = mnemos.load(tmp_path).double()
    assert loaded.config == model.config
    for (name, a), b in zip(model.state_dict().items(), loaded.state_dict().values(), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=0, atol=1e-6, msg=name)
