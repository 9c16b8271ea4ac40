"""Random calls of every public operator beside its oracle: shapes, strides, types, masks, splits and states.

A case is a dictionary that hypothesis draws. It holds sizes, switches and a seed of the numbers, so a failure is
repeated by its dictionary alone. Values are compared in every type, gradients where the oracle has them and numbers are
not in half precision.
"""

import functools
import itertools

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from kernel_cases import close, gradients, weights

from mnemos import ops
from mnemos.ops.associative.reference import reference_associative_read, reference_associative_write, reference_dpfp
from mnemos.ops.convolution.reference import reference_short_convolution
from mnemos.ops.delta.reference import reference_delta_rule
from mnemos.ops.linear import LinearState
from mnemos.ops.linear.reference import (
    reference_bidirectional,
    reference_causal,
    reference_elu,
    reference_linear_attention,
    reference_relu,
)
from mnemos.ops.relative_position.reference import reference_relative_attention
from mnemos.ops.selective.reference import reference_selective_scan
from mnemos.ops.slot_memory.reference import (
    reference_biased_memory_norm,
    reference_slot_attention,
    reference_slot_write,
)

TOLERANCES = {torch.float64: 1e-9, torch.float32: 3e-5, torch.bfloat16: 0.04, torch.float16: 0.01}
WIDE, ALL = [torch.float64, torch.float32], list(TOLERANCES)


class Numbers:
    """Draws the tensors of a case, in the case's type and with strides of any kind."""

    def __init__(self, case):
        self.case, self.dtype = case, case["dtype"]
        self.g = torch.Generator().manual_seed(case["seed"])
        self.leaves = []

    def normal(self, *shape, size=1.0):
        return self.leaf(torch.randn(shape, generator=self.g, dtype=torch.float64) * size)

    def uniform(self, *shape, size=1.0):
        return self.leaf(torch.rand(shape, generator=self.g, dtype=torch.float64) * size)

    def leaf(self, x):
        """The numbers with the case's strides: as they come, permuted, with gaps, or one row for all."""
        x = x.to(self.dtype)
        kind = int(torch.randint(4, (), generator=self.g)) if self.case["strange"] else 0
        if kind == 1:
            x = x.permute(*reversed(range(x.dim()))).contiguous().permute(*reversed(range(x.dim())))
        elif kind == 2:
            wide = x.new_full((*x.shape[:-1], 2 * x.shape[-1] + 1), 7.0)
            wide[..., 1::2] = x
            x = wide[..., 1::2]
        elif kind == 3 and x.shape[0] > 1:
            x = x[:1].expand(x.shape)
        x = x.detach().requires_grad_()
        self.leaves.append(x)
        return x

    def mask(self, b, t):
        """No mask, some holes, nothing valid in a row, or everything valid."""
        kind = self.case["mask"]
        if kind == "none":
            return None
        if kind == "all":
            return torch.ones(b, t, dtype=torch.bool)
        valid = torch.rand(t, b, generator=self.g).T > 0.35
        if kind == "empty row":
            valid[-1] = False
        return valid

    def resets(self, b, t):
        return torch.rand(b, t, generator=self.g) < 0.2 if self.case.get("resets") else None


def compare(numbers, found, expected, differentiable=True):
    """Outputs and gradients, to the bound of the case's type."""
    bound, given = TOLERANCES[numbers.dtype], {}
    if differentiable and numbers.dtype in WIDE:
        given = {f"input {i}": x for i, x in enumerate(numbers.leaves)}
    results, above = [], weights(expected)
    for outputs in (found, expected):
        grads = gradients(outputs, given.values(), above, retain_graph=True) if given else ()
        results.append([*(y.detach() for y in outputs), *grads])
    close(*results, given, [bound] * len(found) + [10 * bound] * len(given))


def double(*given):
    return [x if x is None else x.double() for x in given]


def in_calls(split, cut, t, state, call):
    """y and the state of a sequence in one call, in two, or token by token; calls may be empty."""
    ends = {"tokens": range(t + 1) if t else (0, 0), "two": (0, cut % (t + 1), t), "one": (0, t)}[split]
    ys = []
    for a, b in itertools.pairwise(ends):
        y, state = call(lambda x, a=a, b=b: x if x is None else x[:, a:b], state)
        ys.append(y)
    return torch.cat(ys, 1), state


def hidden(x, mask):
    """The tensor with NaN in its padding."""
    return x if mask is None else torch.where(mask.reshape(*mask.shape, *[1] * (x.dim() - 2)), x, torch.nan)


def linear_attention(c):
    n = Numbers(c)
    b, t, h, d, m = (c[x] for x in "bthdm")
    q, k, v = n.normal(b, t, h, d), n.normal(b, t, h, d), n.normal(b, t, h, m)
    start = (n.uniform(b, h, d, m), n.uniform(b, h, d, size=3)) if c["state"] else None
    mask, causal = n.mask(b, t), c["causal"]
    phi = {"elu": reference_elu, "relu": reference_relu}[c["map"]]
    schedule = reference_causal if causal else reference_bidirectional
    eps = 0.1 if c["map"] == "relu" else 1e-6  # where all features are 0, a sum is divided by eps
    resets = n.resets(b, t) if causal else None
    expected = reference_linear_attention(
        *double(q, k, v), schedule, phi, start and tuple(double(*start)), mask, eps, resets
    )
    state = start and LinearState(*(x.to(q.dtype if q.dtype in WIDE else torch.float32) for x in start))
    keys, values = hidden(k, mask), hidden(v, mask)

    def call(at, state):
        given = at(q), at(keys), at(values), causal, c["map"], state, at(mask), eps
        return ops.linear_attention(*given, resets=at(resets))

    y, state = in_calls(c["split"] if causal else "one", c["seed"], t, state, call)
    wanted = expected[0]
    if mask is not None and causal:  # what padding reads is not compared
        y, wanted = (x.masked_fill(~mask[..., None, None], 0) for x in (y, wanted))
    compare(n, (y, *state), (wanted, *expected[1:]))


def recurrence(c, erases):
    n = Numbers(c)
    b, t, keys, d, m = (c[x] for x in "bthdm")
    h = keys * c["groups"]
    q, k, v = n.normal(b, t, keys, d), n.normal(b, t, keys, d, size=d**-0.5), n.normal(b, t, h, m)
    beta, decay = n.uniform(b, t, h) if erases else None, None
    if c["decay"] != "none":
        shape = (b, t, h) if c["decay"] == "head" else (b, t, h, d)
        decay = n.leaf(-3 * torch.rand(shape, generator=n.g, dtype=torch.float64) ** 3)
    state = n.normal(b, h, d, m) if c["state"] else None
    mask, resets = n.mask(b, t), n.resets(b, t)
    options = {"scale": c["scale"]} | ({"normalise_keys": c["normalise"]} if erases else {})
    expected = reference_delta_rule(*double(q, k, v, beta, decay, state), mask=mask, resets=resets, **options)
    operator = ops.delta_rule if erases else ops.decayed_attention

    def call(at, state):
        rates = [at(x) for x in (beta, decay)[not erases :]]
        return operator(at(q), at(k), at(v), *rates, state, mask=at(mask), resets=at(resets), **options)

    compare(n, in_calls(c["split"], c["seed"], t, state, call), expected)


def short_convolution(c):
    n = Numbers(c)
    b, t, width, taps = (c[x] for x in "btdm")
    x, weight = n.normal(b, t, width), n.normal(width, taps)
    bias = n.normal(width) if c["h"] > 1 else None
    state = n.normal(b, taps - 1, width) if c["state"] else None
    mask, resets, act = n.mask(b, t), n.resets(b, t), "silu" if c["causal"] else None
    expected = reference_short_convolution(*double(x, weight, bias, state), mask, resets, activation=act)
    dirty = hidden(x, mask)

    def call(at, state):
        return ops.short_convolution(at(dirty), weight, bias, state, at(mask), at(resets), act)

    compare(n, in_calls(c["split"], c["seed"], t, state, call), expected)


def selective_scan(c):
    n = Numbers(c)
    b, t, width, numbers = (c[x] for x in "btdm")
    x, dt, A = n.normal(b, t, width), n.uniform(b, t, width), n.leaf(-3 * torch.rand(width, numbers, generator=n.g))
    write, read = n.normal(b, t, numbers), n.normal(b, t, numbers)
    skip = n.normal(width) if c["h"] > 1 else None
    state = n.normal(b, width, numbers) if c["state"] else None
    mask, resets = n.mask(b, t), n.resets(b, t)
    expected = reference_selective_scan(*double(x, dt, A, write, read, skip, state), mask, resets)
    dirty = hidden(x, mask), hidden(dt, mask)

    def call(at, state):
        return ops.selective_scan(*map(at, dirty), A, at(write), at(read), skip, state, at(mask), at(resets))

    compare(n, in_calls(c["split"], c["seed"], t, state, call), expected)


def relative_attention(c):
    n = Numbers(c)
    b, t, h, d, m = (c[x] for x in "bthdm")
    causal, total = c["causal"], t + 1 + c["before"]
    q, k, v = n.normal(b, t + 1, h, d), n.normal(b, total, h, d), n.normal(b, total, h, m)
    r = n.normal(total if causal else total + t, h, d)
    u, w, mask = n.normal(h, d), n.normal(h, d), n.mask(b, total)
    rest = causal, mask, c["window"] if causal else None
    by_distance = {total - 1 - i: row for i, row in enumerate(r.double())}
    expected = reference_relative_attention(*double(q, k, v), by_distance, *double(u, w), *rest)
    compare(n, (ops.relative_attention(q, k, v, r, u, w, *rest),), (expected,))
    with torch.no_grad():  # another path
        compare(n, (ops.relative_attention(q, k, v, r, u, w, *rest),), (expected,), differentiable=False)


def slots(c):
    n = Numbers(c)
    b, t, h, d, m, count = (c[x] for x in (*"bthdm", "slots"))
    given = [n.normal(b, count, h * m), n.normal(b, count, h, d), n.normal(b, count, h, d)]
    given += [n.normal(b, t, h, d), n.normal(b, t, h, m)]
    return n, given, n.mask(b, t), n.normal(count, h) if c["state"] else None


def slot_attention(c):
    n, given, mask, logit = slots(c)
    used = given[1:4]
    n.leaves = [*used, *([] if logit is None else [logit])]
    expected = reference_slot_attention(*double(*used), mask, c["temperature"], *double(logit))
    compare(n, (ops.slot_attention(*used, mask, c["temperature"], logit),), (expected,))


def slot_write(c):
    n, given, mask, logit = slots(c)
    expected = reference_slot_write(*double(*given), mask, c["temperature"], *double(logit))
    compare(n, (ops.slot_write(*given, mask, c["temperature"], logit),), (expected,))


def biased_memory_norm(c):
    n = Numbers(c)
    memory, bias = n.normal(c["b"], c["slots"], c["d"]), n.normal(c["slots"], c["d"])
    expected = reference_biased_memory_norm(*double(memory, bias), c["scale"])
    compare(n, (ops.biased_memory_norm(memory, bias, c["scale"]),), (expected,))


def dpfp(c):
    n = Numbers(c)
    x = n.normal(c["b"], c["t"], c["d"])
    nu = min(c["slots"], 2 * c["d"] - 1)
    compare(n, (ops.dpfp(x, nu),), (reference_dpfp(x.double(), nu),))


def dense(c):
    n = Numbers(c)
    x, weight, bias = n.normal(c["b"], c["t"], c["d"]), n.normal(c["m"], c["d"]), n.normal(c["m"])
    compare(n, (ops.dense(x, weight, bias),), (x.double() @ weight.double().T + bias.double(),))


def associations(c):
    n = Numbers(c)
    b, t, d, m = (c[x] for x in "btdm")
    given = [n.normal(b, d, m), n.uniform(b, d, size=2.0), n.uniform(b, t, d), n.normal(b, t, m), n.uniform(b, t)]
    given[2] = torch.nn.functional.normalize(given[2] + 0.1, dim=-1)  # features of length 1
    if c["state"] and t > 1:
        given[2] = torch.cat([given[2][:, :-1], torch.zeros(b, 1, d, dtype=n.dtype)], 1)  # and of zeros
    return n, given


def associative_read(c):
    n, given = associations(c)
    n.leaves = n.leaves[:3]
    expected = reference_associative_read(*double(*given[:3]), c["causal"])
    compare(n, (ops.associative_read(*given[:3], c["causal"]),), (expected,))


def associative_write(c):
    n, given = associations(c)
    expected = reference_associative_write(*double(*given), c["causal"])
    # One key alone is at the bend of the bound: its gradient is of either side.
    compare(n, tuple(ops.associative_write(*given, c["causal"])), tuple(expected), differentiable=c["t"] > 1)


def draws(**more):
    """What every case has; `more` replaces some of it."""
    return {
        "seed": st.integers(0, 2**31),
        "dtype": st.sampled_from(WIDE),
        "strange": st.booleans(),
        "mask": st.sampled_from(["none", "none", "holes", "empty row", "all"]),
        "b": st.integers(1, 2),
        "t": st.integers(0, 9),
        "h": st.integers(1, 2),
        "d": st.integers(1, 5),
        "m": st.integers(1, 5),
        "state": st.booleans(),
        "causal": st.booleans(),
        "split": st.sampled_from(["one", "two", "tokens"]),
    } | more


HALF = {"dtype": st.sampled_from(ALL)}
SOME = {"t": st.integers(1, 9)}  # the other oracles need a token
RESETS = {"resets": st.booleans()}
FAMILY = {"groups": st.integers(1, 2), "decay": st.sampled_from(["none", "head", "channel"])}
FAMILY |= {"scale": st.sampled_from([None, 0.5]), "normalise": st.booleans()} | HALF | RESETS
SLOTS = {"slots": st.integers(1, 4), "temperature": st.sampled_from([0.25, 1.0]), "scale": st.sampled_from([None, 2.0])}
DISTANT = {"t": st.sampled_from([0, 1, 2, 6]), "before": st.sampled_from([0, 1, 4, 12])}
DISTANT |= {"window": st.sampled_from([None, 1, 3])}
OPERATORS = {
    test.__name__: (test, draws(**more))
    for test, more in (
        (linear_attention, HALF | SOME | RESETS | {"map": st.sampled_from(["elu", "relu"])}),
        (short_convolution, HALF | RESETS),
        (selective_scan, HALF | RESETS),
        (relative_attention, DISTANT),
        (slot_attention, SLOTS),
        (slot_write, SLOTS),
        (biased_memory_norm, SLOTS),
        (dpfp, SLOTS | SOME),
        (dense, SOME),
        (associative_read, SOME),
        (associative_write, SOME),
    )
}
OPERATORS["delta_rule"] = functools.partial(recurrence, erases=True), draws(**FAMILY)
OPERATORS["decayed_attention"] = functools.partial(recurrence, erases=False), draws(**FAMILY)


def test_every_public_operator_is_tried():
    missing = set(ops.__all__) - {"backends", "which", "Linear"} - set(OPERATORS)
    assert not missing, "add it to this file"


@pytest.mark.parametrize("name", OPERATORS)
def test_equals_its_oracle(name):
    failed = search(name)
    assert not failed


def test_a_difference_is_found(monkeypatch):
    right = ops.short_convolution
    monkeypatch.setattr(ops, "short_convolution", lambda x, weight, *rest: right(x, weight * 1.001, *rest))
    assert search("short_convolution")


def search(name, count=12):
    """The random cases of an operator that fail, of `count`, the same each time; smaller ones are not looked for."""
    test, strategy = OPERATORS[name]
    failed = []

    def one(case):
        try:
            test(case)
        except Exception as error:
            failed.append((error, case))

    checks = settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    seed(7)(checks(given(st.fixed_dictionaries(strategy))(one)))()
    return failed
