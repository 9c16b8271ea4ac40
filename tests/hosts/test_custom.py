"""Modules that the user names, any [B, T, D] -> [B, T, D], and attention classes that the user registers."""

import copy
import warnings
from dataclasses import replace

import pytest
import torch
from hosts import build, close, open_caches
from refusals import refuses
from torch import Tensor, nn

import mnemos
from mnemos import GRC
from mnemos.hosts import Call, Host, adapters
from mnemos.hosts.named import make_reader
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


X = torch.randn(3, 7, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("exampled", [True, False])
@pytest.mark.parametrize(
    ("where", "chosen"),
    [
        ("mixers.*", ["mixers.0", "mixers.1"]),
        (["mixers.0", "pair"], ["mixers.0", "pair"]),
        (lambda name, module: isinstance(module, Mixer), ["mixers.0", "mixers.1", "pair"]),
    ],
    ids=["a pattern", "patterns", "a function"],
)
def test_a_named_module_gets_a_cache(where, chosen, exampled):
    torch.manual_seed(0)
    host = Model(says=not exampled).double()
    cached = copy.deepcopy(host)
    report = mnemos.cache(cached, GRC(), where=where, example=X if exampled else None)
    assert [one.name for one in report.swapped] == chosen
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


class Reading(nn.Module):
    """Mixes tokens, or fails, in the way that `kind` names; a mask of padding is read by the name of its argument."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.dim, self.kind, self.weight = 12, kind, nn.Parameter(torch.eye(12))

    def forward(self, x: Tensor, context: Tensor | None = None, mask: Tensor | None = None, key_padding_mask=None):
        x = x @ self.weight
        if self.kind == "fails":
            raise RuntimeError("one line\nand another")
        if self.kind == "dict":
            return {"y": x}
        if self.kind == "causal":
            return x.cumsum(1)
        if self.kind.startswith("time leads"):
            return x - x.mean(0, keepdim=True)
        if self.kind == "across":
            assert context is not None
            return x + context.mean(1, keepdim=True)
        if self.kind == "local":
            return x + nn.functional.pad(x, (0, 0, 0, 1))[:, 1:] + nn.functional.pad(x, (0, 0, 1, 0))[:, :-1]
        if self.kind in ("tokenwise", "zero"):
            return x.relu() * (self.kind != "zero")
        valid = torch.ones_like(x[..., 0], dtype=torch.bool)
        if mask is not None and mask.shape == valid.shape:
            valid = mask
        if key_padding_mask is not None and key_padding_mask.shape == valid.shape:
            valid = ~key_padding_mask
        share = valid.to(x.dtype)[..., None]
        return (x * share).sum(1, keepdim=True).expand_as(x) / share.sum(1, keepdim=True)


def test_a_map_of_tokens_is_read_in_rows():
    module, x = Reading("mean"), torch.randn(2, 3, 4, 12)
    read = make_reader(module)
    call = read(module, (x,), {"mask": torch.arange(12)[None] < torch.tensor([[12], [5]])})
    assert torch.equal(call.x, x.flatten(1, 2))
    assert call.mask.sum(1).tolist() == [12, 5]
    for shape in ((2, 12, 4, 5), (2, 5, 4, 5)):  # the width that it says, or as many as the last axis
        refuses("which may be a map", read, module, (torch.randn(shape),), {})
    refuses("a mask of padding named", read, module, (X, None, None, None), {"other": torch.ones(3, 7).bool()})
    for other in (torch.ones(3, 7), torch.ones(3, 2).bool()):  # weights of tokens, and what is no mask of theirs
        assert read(module, (X, None, None, None), {"other": other}).mask is None
    refuses("a second sequence", read, module, (X, X + 1), {})
    refuses(r"Reading: expected a call with \[B, T, D\] first", read, module, (X[0],), {})


class Around(nn.Module):
    """Calls a `Reading` with what it reads."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.inside = Reading(kind)

    def forward(self, x: Tensor, **kwargs: Tensor) -> Tensor:
        if self.inside.kind == "across":
            return self.inside(x, x.flip(1) * 2)
        if self.inside.kind == "windows":  # are rows of its batch
            return self.inside(torch.cat([x[:, :4], x[:, 3:]]))
        if self.inside.kind == "time leads":
            return self.inside(x.transpose(0, 1)).transpose(0, 1)
        return self.inside(x, **kwargs)


@pytest.mark.parametrize(
    ("kind", "example", "words"),
    [
        *(("causal", example, "not depend on later tokens") for example in (None, X)),
        *(("tokenwise", example, "no other token") for example in (None, X)),
        ("zero", X, "one output for all tokens.* load trained weights"),  # as attentions that start with zeros
        ("across", None, r"expected a module that takes tokens alone.*give cache\(\) an example="),
        ("across", X, "a second sequence"),
        *(("time leads", example, "as where time leads") for example in (None, X)),
        ("time leads everywhere", X[:1].transpose(0, 1), "as where time leads"),
    ],
)
def test_a_module_that_reads_the_future_or_elsewhere_is_refused(kind, example, words):
    host, before = Around(kind).double(), torch.get_rng_state()
    refuses(words, mnemos.cache, host, GRC(length=3), where="inside", example=example)
    assert not caches(host)
    if kind in ("causal", "tokenwise"):  # nothing was drawn for a cache
        assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("example", [None, X])
@pytest.mark.parametrize("kind", ["local", "mean", "windows"])
def test_a_module_that_reads_other_tokens_is_taken(kind, example, dtype):
    host, example = Around(kind).to(dtype), example if example is None else example.to(dtype)
    mnemos.cache(host, GRC(length=3), where="inside", example=example)
    host(X.to(dtype))
    host = Around("causal").to(dtype)
    refuses("not depend on later tokens", mnemos.cache, host, GRC(length=3), where="inside", example=example)


def test_what_declares_that_it_is_not_causal_is_taken_where_no_call_can_show_it():
    for kind, example, words in (
        ("across", None, "takes tokens alone, found AssertionError"),
        ("mean", X[:, :1], "several tokens, to test for causality, found one"),
    ):
        host = Around(kind).double()
        refuses(words, mnemos.cache, host, GRC(length=3), where="inside", example=example)
        host.inside.is_causal = False
        assert len(mnemos.cache(host, GRC(length=3), where="inside", example=example).swapped) == 1
    mnemos.cache(Around("mean").double(), GRC(length=3), where="inside", example=X[:, :2])
    with torch.device("meta"):
        host = Model(says=True)
    assert len(mnemos.cache(host, GRC(length=3), where="mixers.*").swapped) == 2
    assert all(branch.cache.is_meta for branch in caches(host))


@pytest.mark.parametrize(
    ("make", "where", "example", "words"),
    [
        (Model, "mixers.*", None, "mixers.0: expected a width D, found none of embed_dim, .*; give example="),
        (
            lambda: nn.Sequential(nn.Sequential(nn.Linear(12, 12), nn.MultiheadAttention(12, 2))),
            "0",
            None,
            "0: expected a width D, .*; name the attention inside, '0.1'",
        ),
        (lambda: nn.Sequential(Reading("dict")), "0", X, "Reading: expected a tensor first, found dict; leave it out"),
        (lambda: nn.Sequential(Reading("fails")), "0", X, "accepts, found RuntimeError: one line and another"),
        (lambda: nn.Sequential(Reading("fails")), "0", None, "tokens alone, found RuntimeError: one line and another"),
        (lambda: nn.Sequential(nn.Linear(12, 9)), "0", X, r"0: expected a module that maps \[B, T, 12\] .*found .*9\)"),
        (lambda: nn.Sequential(Reading("mean")), "0", X[0], r"0: Reading: expected a call with \[B, T, D\] first"),
    ],
)
def test_modules_that_cannot_be_read_are_refused(make, where, example, words):
    refuses(words, mnemos.cache, make().double(), GRC(length=3), where=where, example=example)


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
    refuses("causally", host, X, **{name: causal if name == "mask" else ~causal})


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


class Pooling(nn.Module):
    """A host that no library has: every token gets the mean."""

    width, parts = 8, 2

    def forward(self, tokens: Tensor) -> Tensor:
        return tokens.mean(1, keepdim=True).expand_as(tokens)


def test_a_class_of_another_package_is_registered(monkeypatch):
    monkeypatch.setattr(adapters, "_registered", {})
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 8), Pooling()), torch.randn(2, 5, 8)
    refuses("found none", mnemos.cache, model)
    kind, ours = f"{__name__}:Pooling", "torch.nn.modules.activation:MultiheadAttention"
    host = Host(kind, ("tokens",), width="width", heads="parts", call=lambda module, args, kwargs: Call(args[0]))
    assert mnemos.register_host(host) is host
    assert mnemos.register_host(host) is host
    before = model(x)
    assert [one.name for one in mnemos.cache(model, GRC(length=4)).swapped] == ["1"]
    assert not torch.equal(model(x), before)
    assert torch.equal(mnemos.uncache(model)(x), before)
    for other, words in ((replace(host, width="dim"), "Pooling.*test_custom"), (replace(host, kind=ours), "adapters")):
        refuses(words, mnemos.register_host, other)
