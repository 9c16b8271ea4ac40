"""Modules that the user names: any [B, T, D] -> [B, T, D], by a pattern or a function."""

import copy
import warnings

import pytest
import torch
from hosts import build, close, open_caches
from torch import Tensor, nn

import mnemos
from mnemos import GRC, InputError
from mnemos.memory.gated_cache import caches


class Mixer(nn.Module):
    """Mixes tokens; says nothing of its width."""

    def __init__(self, dim: int, says: bool = False) -> None:
        super().__init__()
        self.mixing = nn.Linear(dim, dim)
        if says:
            self.dim, self.num_heads = dim, 2

    def forward(self, x: Tensor) -> Tensor:
        return self.mixing(x) - x.mean(1, keepdim=True)


class Pair(Mixer):
    """Returns its weights beside, and takes its tokens by name."""

    def forward(self, *, tokens: Tensor, scale: float = 1.0) -> tuple[Tensor, float]:  # type: ignore[override]
        return scale * super().forward(tokens), scale


class Model(nn.Module):
    def __init__(self, says: bool = False) -> None:
        super().__init__()
        self.mixers = nn.ModuleList(Mixer(12, says) for _ in range(2))
        self.pair = Pair(12, says)
        self.attention = nn.MultiheadAttention(12, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        for mixer in self.mixers:
            x = x + mixer(x)
        x = x + self.pair(tokens=x, scale=0.5)[0]
        return x + self.attention(x, x, x)[0]


def model(says: bool = False) -> nn.Module:
    torch.manual_seed(0)
    return Model(says).double()


X = torch.randn(3, 7, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
CHOICES = {
    "a pattern": "mixers.*",
    "patterns": ["mixers.0", "pair"],
    "a function": lambda name, module: isinstance(module, Mixer),
}
CHOSEN = {
    "a pattern": ["mixers.0", "mixers.1"],
    "patterns": ["mixers.0", "pair"],
    "a function": ["mixers.0", "mixers.1", "pair"],
}


@pytest.mark.parametrize("exampled", [True, False])
@pytest.mark.parametrize("choice", CHOICES)
def test_a_named_module_gets_a_cache(choice, exampled):
    host = model(says=not exampled)
    cached = copy.deepcopy(host)
    report = mnemos.cache(cached, GRC(), where=CHOICES[choice], example=X if exampled else None)
    assert [one.name for one in report.swapped] == CHOSEN[choice]
    assert [one.length for one in report.swapped] == [7 if exampled else 64] * len(report.swapped)
    assert {one.heads for one in report.swapped} == {1 if exampled else 2}
    assert [one.name for one in report.left] == ["attention"]
    for branch in caches(cached):
        nn.init.constant_(branch.mix, -torch.inf)
    for training in (True, False):
        close(cached.train(training)(X), host.train(training)(X))
    open_caches(cached)
    for branch in caches(cached):
        nn.init.zeros_(branch.mix)
    cached.train()(X).square().sum().backward()
    cached(X)
    for branch in caches(cached):
        assert branch.cache.abs().max() > 0
        assert all(p.grad is not None for p in branch.parameters())
    assert (cached(X) - host(X)).abs().max() > 1e-3
    mnemos.uncache(cached)
    close(cached(X), host(X))


def test_a_pattern_that_meets_an_attention_means_it_alone():
    vit = build("timm_vit")
    report = mnemos.cache(vit, GRC(length=3), where="blocks.*.*")  # norms, drop paths and MLPs, too
    assert [one.name for one in report.swapped] == ["blocks.0.attn", "blocks.1.attn"]


def test_a_module_that_is_not_what_it_was_taken_for():
    widening = nn.Sequential(nn.Linear(12, 9)).double()
    with pytest.raises(InputError, match=r"0: expected a module that maps \[B, T, 12\] to the same shape, found .*9\)"):
        mnemos.cache(widening, GRC(length=3), where="0", example=X)
    mean = nn.Sequential(Reading("mean")).double()
    mnemos.cache(mean, GRC(length=3), where="0", example=X)
    with pytest.raises(InputError, match=r"Reading: expected a call with \[B, T, D\] first"):
        mean(X[0])


class Reading(nn.Module):
    """Mixes tokens in the way that `kind` names; a mask of padding is read by the name of its argument."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.dim, self.kind, self.weight = 12, kind, nn.Parameter(torch.eye(12))

    def forward(self, x: Tensor, context: Tensor | None = None, mask: Tensor | None = None, key_padding_mask=None):
        x = x @ self.weight
        if self.kind == "causal":
            return x.cumsum(1)
        if self.kind == "across":
            assert context is not None
            return x + context.mean(1, keepdim=True)
        if self.kind == "local":
            return x + nn.functional.pad(x, (0, 0, 0, 1))[:, 1:] + nn.functional.pad(x, (0, 0, 1, 0))[:, :-1]
        if self.kind == "tokenwise":
            return x.relu()
        valid = torch.ones_like(x[..., 0], dtype=torch.bool)
        if mask is not None and mask.shape == valid.shape:
            valid = mask
        if key_padding_mask is not None and key_padding_mask.shape == valid.shape:
            valid = ~key_padding_mask
        share = valid.to(x.dtype)[..., None]
        return (x * share).sum(1, keepdim=True).expand_as(x) / share.sum(1, keepdim=True)


class Around(nn.Module):
    """Calls a `Reading` with what it reads."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.inside = Reading(kind)

    def forward(self, x: Tensor, **kwargs: Tensor) -> Tensor:
        if self.inside.kind == "across":
            return self.inside(x, x.flip(1) * 2)
        return self.inside(x, **kwargs)


@pytest.mark.parametrize("example", [None, X])
@pytest.mark.parametrize("kind", ["causal", "across", "local", "tokenwise", "mean"])
def test_a_module_that_reads_the_future_or_elsewhere_is_refused(kind, example):
    host = Around(kind).double()
    before = torch.get_rng_state()
    refused = {"causal": "not depend on later tokens", "across": "no other token", "tokenwise": "no other token"}
    if kind == "across" and example is None:
        with pytest.raises(InputError, match=r"expected a module that takes tokens alone.*give cache\(\) an example="):
            mnemos.cache(host, GRC(length=3), where="inside")
    elif kind in refused:
        expected = "a second sequence" if kind == "across" else refused[kind]
        with pytest.raises(InputError, match=expected):
            mnemos.cache(host, GRC(length=3), where="inside", example=example)
        assert not caches(host)
    else:
        mnemos.cache(host, GRC(length=3), where="inside", example=example)
        host(X)
    if kind in refused:  # nothing was drawn for a cache
        assert torch.equal(torch.get_rng_state(), before) or kind == "across"


class TimeFirst(nn.Module):
    """Tokens [B, T, D], or [T, B, D] if `outside`, through a layer of [T, B, D]."""

    def __init__(self, outside: bool) -> None:
        super().__init__()
        self.outside, self.mixer = outside, Mixer(12, says=True)
        self.mixer.forward = lambda x: self.mixer.mixing(x) - x.mean(0, keepdim=True)

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.outside else x.transpose(0, 1)
        x = x + self.mixer(x)
        return x if self.outside else x.transpose(0, 1)


@pytest.mark.parametrize(("outside", "rows"), [(False, None), (True, 1), (False, 3)])
def test_a_module_that_leads_with_time_is_refused(outside, rows):
    host = TimeFirst(outside).double()
    example = None if rows is None else torch.randn((7, rows, 12) if outside else (rows, 7, 12)).double()
    with pytest.raises(InputError, match="as where time leads"):
        mnemos.cache(host, GRC(length=3), where="mixer", example=example)
    assert not caches(host)


def test_windows_are_rows_of_a_batch():
    class Windows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mixer = Mixer(12)

        def forward(self, x: Tensor) -> Tensor:
            x = x.unflatten(1, (4, 2)).flatten(0, 1)
            return (x + self.mixer(x)).unflatten(0, (-1, 4)).flatten(1, 2)

    report = mnemos.cache(Windows().double(), GRC(length=2), where="mixer", example=torch.randn(3, 8, 12).double())
    assert [one.name for one in report.swapped] == ["mixer"]


@pytest.mark.parametrize("name", ["mask", "key_padding_mask"])
def test_padding_is_kept_out_of_a_named_modules_cache(name):
    host = Around("mean").double()
    mnemos.cache(host, GRC(length=3), where="inside", example=X)
    open_caches(host)
    valid = torch.arange(7) < torch.tensor([7, 4, 2])[:, None]
    longer = nn.functional.pad(X, (0, 0, 0, 3), value=9.0)
    masks = [valid, nn.functional.pad(valid, (0, 3))]
    found = [host.eval()(x, **{name: m if name == "mask" else ~m}) for x, m in zip((X, longer), masks, strict=True)]
    close(found[1][:, :7][valid], found[0][valid])
    causal = torch.ones(7, 7, dtype=torch.bool).tril()
    with pytest.raises(InputError, match="causally"):
        host(X, **{name: causal if name == "mask" else ~causal})


def test_an_example_shows_which_attentions_cannot_have_a_cache():
    class Across(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own, self.other = (nn.MultiheadAttention(12, 2, batch_first=True) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            y = x + self.own(x, x, x)[0]
            return y + self.other(y, x.flip(1), x.flip(1))[0]

    host = Across().double()
    report = mnemos.cache(host, GRC(length=3), example=X)
    assert [one.name for one in report.swapped] == ["own"]
    assert [one.name for one in report.left] == ["other"]
    assert "its call in the example" in report.left[0].why
    host(X)


def test_parts_of_pyramids_are_cached_with_a_warning(tmp_path):
    """It names the line that calls `cache`, and is not said again where the part is loaded."""
    layer, again = (next(m for m in build("hf_pvt").modules() if type(m).__name__ == "PvtLayer") for _ in range(2))
    with pytest.warns(UserWarning, match="without the model around") as said:
        mnemos.cache(layer, GRC(length=3))
    assert said[0].filename == __file__
    mnemos.hosts.save(layer, tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mnemos.hosts.load(again, tmp_path)
