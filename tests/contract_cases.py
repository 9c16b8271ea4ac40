"""The layers and models that the contracts are tested over, and which of them a test concerns.

Every registry entry is here by itself: a test names what a class declares (`mnemos.types`), and never a class. By
default the cases hold every pair of settings; with `--exhaustive`, every combination.
"""

import copy
import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pairwise import cover, pairwise

from mnemos import GRC, BlockSparseConfig, registry
from mnemos.attention import CompressiveConfig, GatedCacheAttention, RelativeConfig, SoftmaxConfig
from mnemos.testing.laws import LAWS
from mnemos.testing.probe import Probe
from mnemos.types import HeadAttention, leaves

DIM, HEADS, ROWS, TOKENS, BANDS, VOCABULARY = 12, 2, 3, 11, 7, 13

CACHES = {
    "": None,
    "paper": GRC(length=3, preset="paper"),
    "official": GRC(length=3, preset="official"),
    "mnemos": GRC(length=3, preset="mnemos"),
    "stream": GRC(length=3, scope="stream", block=5),
    "unwritten": GRC(length=3, scope="stream", block=5, write=False),
    "frozen-block2": GRC(length=3, inference="frozen", block=2, resample="linear"),
    "linear-branch": GRC(length=3, branch="linear", candidate="linear", read="sample", inference="transient"),
}
REGISTERED = {name: registry.load("attention", name)() for name in registry.names("attention")}
REGISTERED["block-sparse"] = BlockSparseConfig(block=1)  # sparse from 9 tokens on; blocks of 64 are not
# Settings that change what a registered attention declares.
VARIANTS = {
    "softmax-window": SoftmaxConfig(window=4),
    "softmax-grouped": SoftmaxConfig(kv_heads=1, query_key_norm=True),
    "relative-same": RelativeConfig(memory=4, same_length=True),
    "relative-live": RelativeConfig(memory=4, same_length=True, clamp=3, detached=False),
    "compressive-live": CompressiveConfig(memory=4, compressed=2, ratio=2, detached=False),
}
ATTENTIONS = REGISTERED | VARIANTS


def make(attention: str, cache: str, causal: bool) -> torch.nn.Module:
    """A layer in float64 with every parameter and buffer away from its initial value."""
    torch.manual_seed(0)
    layer = ATTENTIONS[attention].build(DIM, HEADS, causal=causal)
    if cache:
        layer = GatedCacheAttention(DIM, HEADS, layer, CACHES[cache], causal=causal)
    return scatter(layer)


@functools.cache
def declared(attention: str, cache: str, causal: bool) -> torch.nn.Module:
    """A layer to read declarations from."""
    return make(attention, cache, causal)


def _buildable(attention: str, cache: str, causal: bool, exhaustive: bool) -> bool:
    # By default every cache beside softmax attention, and a stream's beside linear attention.
    usual = exhaustive or attention == "softmax" or not cache or (attention, cache) == ("linear", "stream")
    if not usual or causal not in ATTENTIONS[attention].causal_modes:
        return False
    return not cache or isinstance(declared(attention, "", causal), HeadAttention)  # what a cache goes around


def over_layers(
    where: Callable[[torch.nn.Module], bool] = lambda layer: True,
    modes: tuple[bool, ...] = (True,),
    apart: bool = False,
    one_of_a_kind: bool = False,
):
    """A test of `layer` over all layers `where` this holds, in training mode or not, or both.

    apart: by default every registered attention without a cache, and beside softmax attention alone a cache of each
    scope, read and write; each once, causal if it can be. one_of_a_kind: by default, of the layers with a state of each
    kind, and of those with a cache, the one with the most parameters.
    """

    def cases(exhaustive: bool) -> list:
        def allowed(attention: str, cache: str, causal: bool, training: bool) -> bool:
            case = attention, cache, causal
            once = causal == max(ATTENTIONS[attention].causal_modes) and (not cache or attention == "softmax")
            alike = cache in ("official", "mnemos", "unwritten", "linear-branch")
            once = once and attention in REGISTERED and not alike
            return (exhaustive or once or not apart) and _buildable(*case, exhaustive) and where(declared(*case))

        axes = ATTENTIONS, CACHES, (False, True), modes
        found = filter(None, (c if allowed(*c) else None for c in itertools.product(*axes)))
        chosen = list(found) if exhaustive else pairwise(*axes, allowed=allowed)
        if one_of_a_kind and not exhaustive:
            by_size = sorted(chosen, key=lambda case: len(list(declared(*case[:3]).parameters())))
            chosen = list({bool(case[1]) or declared(*case[:3]).state_kind: case for case in by_size}.values())
        return [pytest.param(case, id=_name(*case)) for case in chosen]

    return lambda test: _with_cases(test, "layer", cases)


def _name(attention: str, cache: str, causal: bool, training: bool) -> str:
    return f"{attention}{cache and '+'}{cache}/{'causal' if causal else 'whole'}/{'train' if training else 'eval'}"


def over_models(where: Callable[["ModelCase"], bool] = lambda case: True):
    """A test of `model` over all models `where` this holds of the case; by default each with every cache and mode."""

    def cases(exhaustive: bool) -> list:
        found = [case for case in MODELS if where(case)]
        if not exhaustive:
            values = [[(case.name, case.cache), (case.name, "causal" if case.causal else "whole")] for case in found]
            found = [found[number] for number in cover(values, pairs=False)]
        return [pytest.param(case, id=str(case)) for case in found]

    return lambda test: _with_cases(test, "model", cases)


def _with_cases(test: Callable, name: str, cases: Callable[[bool], list]) -> Callable:
    test.contract_cases = name, cases
    return test


def generate(metafunc: pytest.Metafunc) -> None:
    """What a contracts file calls in its `pytest_generate_tests`."""
    if found := getattr(metafunc.function, "contract_cases", None):
        name, cases = found
        metafunc.parametrize(name, cases(metafunc.config.getoption("exhaustive")), indirect=True)


@dataclasses.dataclass(frozen=True)
class ModelCase:
    """A registered model, its gated cache and, where it can be chosen, whether it is causal."""

    name: str
    cache: GRC | None
    causal: bool

    @property
    def inputs(self) -> str:
        return registry.load("model", self.name).inputs

    @property
    def predicts(self) -> bool:
        """Whether it is a causal language model: what it must then declare as autoregressive."""
        return self.inputs in ("tokens", "pairs") and self.causal

    def __str__(self) -> str:
        cache = "plain" if self.cache is None else self.cache.scope
        return f"{self.name}-{cache}-{'causal' if self.causal else 'whole'}"

    def build(self, **fields: object) -> torch.nn.Module:
        torch.manual_seed(0)
        config = registry.load("model", self.name)
        if self.inputs == "images":  # small as it is
            return scatter(config(classes=5, cache=self.cache).build())
        sizes = {**SMALL, **({"vocab_size": 4, "bands": BANDS} if self.inputs == "frames" else {}), **fields}
        config = config(**{k: v for k, v in sizes.items() if has(config, k)})
        if has(config, "cache"):
            config = dataclasses.replace(config, cache=self.cache)
        if not self.causal and has(config, "causal"):
            config = dataclasses.replace(config, causal=False, head=dataclasses.replace(config.head, classes=5))
        return scatter(config.build())


# Sizes of a model of tokens; each takes the fields that it has.
SMALL = {"vocab_size": VOCABULARY, "dim": DIM, "layers": 2, "num_heads": HEADS, "mlp": 16, "max_length": 12}
SMALL |= {"encoder_layers": 1, "decoder_layers": 2, "segment": 4, "classes": 5}


def has(config: object, field: str) -> bool:
    """Whether a configuration lets this be chosen."""
    return field in {f.name for f in dataclasses.fields(config)}


def _models() -> list[ModelCase]:
    cases = []
    for name in registry.names("model"):
        config = registry.load("model", name)
        if config.inputs == "photos":  # lists of images: tests/lab/vision/detection/test_task.py
            continue
        stores = (None, GRC(length=3), GRC(length=3, scope="stream")) if has(config, "cache") else (None,)
        if config.inputs == "images":  # a stream's cache is for sequences
            stores = stores[:2]
        scopes = getattr(config, "cache_scopes", ("shared", "stream"))
        stores = tuple(store for store in stores if store is None or store.scope in scopes)
        predicts = config.inputs in ("tokens", "pairs") and not has(config, "classes")
        modes = (True, False) if has(config, "causal") else (predicts,)
        cases += [ModelCase(name, cache, causal) for cache, causal in itertools.product(stores, modes)]
    return cases


MODELS = _models()


def scatter(module: torch.nn.Module) -> torch.nn.Module:
    module = module.double()
    if any(x.is_meta for x in module.parameters()):
        return module
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        kept = module.state_dict(keep_vars=True)  # buffers that are not saved, such as a host's angles, stay
        for tensor in dict.fromkeys(filter(torch.is_floating_point, kept.values())):
            tensor += 0.3 * torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype)
    return module


def materialised(build: Callable[[], torch.nn.Module], original: torch.nn.Module) -> list[torch.nn.Module]:
    """Models built on the meta device, with the weights of another, in both ways."""
    with torch.device("meta"):
        emptied, assigned = build().double(), build().double()
    emptied = emptied.to_empty(device="cpu")
    with torch.no_grad():
        for x in (*emptied.parameters(), *emptied.buffers()):
            x.fill_(torch.nan if x.is_floating_point() else 10**6)
    emptied.load_state_dict(original.state_dict())
    assigned.load_state_dict(original.state_dict(), assign=True)
    return [emptied.eval(), assigned.eval()]


def tokens(seed: int = 2, t: int = TOKENS, rows: int = ROWS) -> torch.Tensor:
    return torch.randn(rows, t, DIM, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def holds(law: str, layer: torch.nn.Module) -> None:
    """Fail with the counterexample, if there is one, of what the layer declares."""
    declared = {name: value for name in Probe.__dataclass_fields__ if (value := getattr(layer, name, None)) is not None}
    probe = Probe(layer, DIM, **{name: value for name, value in declared.items() if name not in ("layer", "width")})
    assert LAWS[law].needs(probe) == ""
    found = LAWS[law].counterexample(probe)
    assert found is None, f"{law}: {found}"


def holds_where(module: Any) -> None:
    """New states are on the device and in the precision of the weights, or where they are asked for."""
    for state in (module.initial_state(ROWS, "meta", torch.float16), copy.deepcopy(module).to("meta").initial_state(2)):
        assert {x.device.type for x in leaves(state)} <= {"meta"}
    assert {x.dtype for x in leaves(module.initial_state(1)) if x.is_floating_point()} <= {torch.float64}


def close(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def same_state(a: object, b: object) -> None:
    assert len(leaves(a)) == len(leaves(b))
    for x, y in zip(leaves(a), leaves(b), strict=True):
        close(x, y)


def numbers(state: object) -> int:
    """How many numbers a state has."""
    return sum(leaf.numel() for leaf in leaves(state))


# Padding before, between and behind the tokens of a row; behind them; everywhere; before them.
PADDED = torch.tensor(
    [[0, 0, 1, 1, 0, 1, 1, 0], [1, 1, 1, 1, 1, 0, 0, 0], [0] * 8, [0, 0, 0, 0, 0, 0, 0, 1]], dtype=torch.bool
)
CALLS = [torch.ones_like(PADDED), PADDED, PADDED.flip(0, 1), torch.ones_like(PADDED)]


def padding_changes_nothing(module: torch.nn.Module, x: torch.Tensor, call: Callable, alone: bool = True) -> None:
    """Calls with padding give each row what its valid tokens alone give, in states and gradients too.

    x [4, 32, ..]: the tokens of four calls. call(x, state, mask, rows) -> y, state. alone=False: compared with zeros in
    the padding, and not with each row by itself.
    """
    valid = torch.cat(CALLS, 1)
    padding, vectors = ~valid[(..., *[None] * (x.dim() - 2))], x.is_floating_point()
    holds = x.masked_fill(padding, torch.nan if vectors else 1)
    if vectors:
        holds[:, 1::2] = holds[:, 1::2].nan_to_num(torch.inf)
    given, *found = _read(module, holds, [slice(0, 4)], call, gaps=True)
    rows = [slice(row, row + 1) for row in range(4)] if alone else [slice(0, 4)]
    expected = _read(module, x.masked_fill(padding, 0), rows, call, gaps=not alone)[1:]
    for name, a, b in zip(("outputs", *dict(module.named_parameters()), "x"), found, expected, strict=False):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9, msg=lambda text, name=name: f"{name}: {text}")
    if vectors:
        assert not given.grad.masked_select(padding).any()


def _read(module, x, parts, call, gaps):
    """x, the outputs of the valid tokens row by row, and the gradients of the parameters and of x."""
    x = x.clone().requires_grad_(x.is_floating_point())
    outputs = [[] for _ in x]
    for rows in parts:
        state = None
        for i, masks in enumerate(CALLS):
            here, mask = x[rows, 8 * i : 8 * i + 8], masks[rows]
            if not gaps:
                here, mask = here[:, mask[0]], mask[:, mask[0]]
            if here.shape[1]:
                y, state = call(here, state, mask if gaps and i % 3 else None, rows)
                for row, (one, valid) in enumerate(zip(y, mask, strict=True), rows.start):
                    outputs[row].append(one[valid] if y.dim() > 2 else one[None, : bool(valid.any()) * len(one)])
    found = torch.cat([one for row in outputs for one in row if one.numel()])
    module.zero_grad()
    (found * torch.randn(found.shape, generator=torch.Generator().manual_seed(9), dtype=found.dtype)).sum().backward()
    grads = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in module.parameters()]
    return x, found.detach(), *grads, *([x.grad] if x.is_floating_point() else [])
