"""What benchmarks/stability.py rests on: it runs the library's code, and the bounds hold."""

import importlib
import math
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
BOUNDED, UPDATES = ("official", "mnemos"), 2000


@pytest.fixture(scope="module")
def stability() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.syspath_prepend(str(BENCHMARKS))
        yield importlib.import_module("stability")


def lanes(stability: ModuleType, preset: str) -> tuple[list, tuple[torch.Tensor, ...], Any]:
    """A lane for every kind of weights and input; where there is a norm, its gain and shift are anything."""
    made = [stability.layer(preset, weights) for weights in stability.WEIGHTS]
    generator = torch.Generator().manual_seed(3)
    for m in made:
        if m.candidate_norm is not None:
            m.candidate_norm.weight.normal_(0, 2, generator=generator)
            m.candidate_norm.bias.normal_(0, 2, generator=generator)

    def feed(n: int, start: int) -> torch.Tensor:
        kinds = [stability.tokens(kind, n, start, stability.SIZE, 0) for kind in stability.INPUTS]
        each = [stability.sources(made[0], x).expand(n, -1, -1, -1) for x in kinds]
        return torch.stack(each, 1).repeat(1, len(made), 1, 1, 1)

    each = [m for m in made for _ in stability.INPUTS]
    return each, stability.stacked(each), feed


def bound(layer: Any) -> torch.Tensor:
    """√(Dm − 1)·|gain| + |shift| [Dm]."""
    norm = layer.candidate_norm
    return math.sqrt(layer.cache_dim - 1) * norm.weight.abs() + norm.bias.abs()


@pytest.mark.parametrize("preset", BOUNDED)
def test_bounded_presets_stay_under_the_proven_bound(stability, preset, exhaustive):
    layers, p, feed = lanes(stability, preset)
    found = stability.run(p, feed, UPDATES if exhaustive else UPDATES // 20)
    assert all(found["finite"])
    limits = torch.stack([bound(m) for m in layers])
    assert (found["cache"].abs() <= limits[:, None] * (1 + 1e-5)).all(), "channel by channel"
    assert (torch.tensor(found["peak"]) <= limits.amax(1) * (1 + 1e-5)).all(), "and every row at every update"


@pytest.mark.parametrize("preset", BOUNDED)
def test_from_any_start_channel_by_channel(stability, preset):
    layers, p, feed = lanes(stability, preset)
    cache = 20 * torch.randn(len(layers), *layers[0].cache.shape, generator=torch.Generator().manual_seed(4))
    norm = torch.stack([bound(m) for m in layers])[:, None]
    limit = torch.maximum(cache.abs().amax(1, keepdim=True), norm) * (1 + 1e-5)
    for source in feed(50, 0):
        new, _ = stability.update(source, cache, *p)
        assert (new.abs() <= limit[:, None]).all()
        cache = new.mean(1)
    assert (limit > norm * (1 + 1e-5)).any(), "where it starts outside, it need not come in"


def test_the_bound_is_reached(stability):
    layer = stability.layer("mnemos", "gates open")
    d = layer.cache_dim
    layer.candidate.weight.copy_(torch.cat([torch.eye(d), torch.zeros(d, d)], 1))
    layer.candidate.bias.zero_()
    source = torch.zeros(1, 1, *layer.cache.shape)
    source[..., 0] = 1e4
    new, _ = stability.update(source, layer.cache[None], *stability.stacked([layer]))
    torch.testing.assert_close(new[0, 0, :, 0], bound(layer)[0].expand(len(layer.cache)))


@pytest.mark.slow
@pytest.mark.exhaustive
def test_the_linear_candidate_overflows_with_large_weights(stability):
    """Documented behaviour: nothing bounds it. The same weights at their first size stay finite."""
    rows = {row["weights"]: row for row in stability.table("paper", UPDATES, 0, kinds=("normal",))}
    assert rows["default"]["finite"]
    assert rows["default"]["peak"] < 3
    diverged = rows["candidate x4.5"]
    assert not diverged["finite"]
    assert diverged["first_not_finite"] < UPDATES
    assert diverged["rms"][0] < 1.5, "it began like any other"
    assert diverged["rms"][-1] is None
    assert max(diverged["radius"][:3]) > 1 > max(rows["default"]["radius"][:3])
