"""What a call of the delta rule promises beside its numbers: backends, errors, memory, transforms, torch.compile."""

import pytest
import torch
from delta_cases import EXACT, HERE, KINDS, B, D, H, compare, equations, holes, inputs, run
from torch.func import grad, vmap

from mnemos.ops import decayed_attention, delta_rule
from mnemos.ops.delta import chunked
from mnemos.types import InputError


@pytest.mark.parametrize("backend", HERE)
@pytest.mark.parametrize("channels", [False, True])
def test_kept_for_the_backward_are_the_inputs_and_few_states(channels, backend):
    """At most two numbers per token and channel beside the inputs."""
    t, width = 2048, 32
    given = [torch.randn(1, t, 2, width, requires_grad=True) for _ in range(3)]
    decay = -torch.rand(1, t, 2, *[width] * channels)
    kept = {}

    def pack(x):
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        delta_rule(*given, torch.rand(1, t, 2), decay, backend=backend)
    inside = sum(kept.values()) - sum(x.untyped_storage().nbytes() for x in (*given, decay))
    assert 0 < inside < 2 * 4 * t * 2 * width


@pytest.mark.each_value
@pytest.mark.parametrize("backend", HERE)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("t", [1, 20])
def test_transforms_have_the_derivatives_of_the_equations(t, kind, backend):
    given = inputs(kind, t, torch.float32)
    mask = holes(t)

    def loss(given, of):
        y, state = of(given, mask=mask)
        return y.square().sum() + state.sin().sum()

    plain = {name: x.detach() for name, x in given.items()}
    expected = torch.autograd.grad(loss(given, equations), list(given.values()))
    rows = vmap(grad(lambda x: loss(x, lambda *a, **o: run(*a, backend=backend, **o))))(
        {name: torch.stack([x, x / 2]) for name, x in plain.items()}
    )
    for (name, x), y in zip(rows.items(), expected, strict=True):
        torch.testing.assert_close(x[0], y, rtol=1e-4, atol=1e-4, msg=name)


@pytest.mark.slow
@pytest.mark.each_value
@pytest.mark.parametrize("backend", HERE)
@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=[pytest.mark.exhaustive] * (k not in KINDS[2:4])) for k in KINDS]
)
def test_compiled_whole_equals_eager(kind, backend, exhaustive, monkeypatch):
    torch._dynamo.reset()
    dtype, tolerance = EXACT[backend]
    lengths = (70, 1)
    if not exhaustive and backend != "native":  # the halves of a chunk take PyTorch's compiler seconds
        monkeypatch.setattr(chunked, "CHUNK", 8)
        lengths = (11,)
    for t in lengths:
        given = inputs(kind, t, dtype)
        compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
        compare(compiled(given, mask=holes(t), backend=backend), run(given, mask=holes(t)), given, tolerance)


def test_a_wrong_call_says_what_was_expected():
    given = {name: x.detach() for name, x in inputs("gated delta", 4, torch.float32).items()}
    wrong = {
        "H a multiple of K, found": {
            "v": given["v"][:, :, :3],
            "beta": given["beta"][..., :3],
            "decay": None,
            "state": None,
        },
        r"floating k \[B=2, T=4, K=2, D=5\], found torch.float32 \[2, 3, 2, 5\]; .* use transpose": {
            "k": given["k"][:, :3]
        },
        "D at least 1": {"q": given["q"][..., :0], "k": given["k"][..., :0], "state": None},
        "or None, found -0.1": {"decay": -0.1},
        "as scale, found 'x'": {"scale": "x"},
        "use decayed_attention": {"beta": None},
        "found nan": {"decay": given["decay"].log()},
        "use factor.log": {"decay": given["decay"].exp()},
        "did you mean 'chunked'": {"backend": "chunk"},
    }
    for message, change in wrong.items():
        with pytest.raises(InputError, match=message):
            delta_rule(**{**given, **change})
    mask = torch.zeros(B, 4, dtype=torch.bool)
    delta_rule(**{**given, "decay": given["decay"].exp()}, mask=mask)  # what is invalid has no decay
    del given["beta"]
    with pytest.raises(InputError, match=r"use factor\.log"):
        decayed_attention(**{**given, "decay": torch.full((B, 4, H, D), 0.5)})
