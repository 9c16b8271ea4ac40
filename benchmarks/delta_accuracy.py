"""Random calls of the delta rule, decayed attention and the short convolution beside the equations; a million tokens.

    python benchmarks/delta_accuracy.py [--cases 3000] [--seed 0] [--million] [--out results/delta_accuracy.json]
    python benchmarks/delta_accuracy.py --selective [--cases 3000]      # the selective scan in place of these three

Each case draws sizes, strides, heads that share keys, a mask (at the start, the end, or anywhere), resets, a state,
cuts of the sequence into calls, the number of threads and the instruction set. Decays are 1 to 10⁻⁶ (logarithms 0 to
−13.8), per head or per channel: of one strength, of any, or exactly 1. Every eighth case is a convolution. Outputs, the
final state and the gradients of all inputs are compared with the token by token reference in float64. An error is the
largest difference divided by the largest number of that tensor, or by 1 if that is larger. The command fails if one is
above 2·10⁻⁵.

--million: 2²⁰ tokens in one call and in calls of 1,000, beside a float64 loop. The error of y is the largest of each
tenth: without drift that of the last is that of the first.
"""

import itertools
import sys
from collections import Counter
from typing import Any

import numpy as np
import torch
from command import command, write
from torch import Tensor

import mnemos
from mnemos.ops import decayed_attention, delta_rule, selective_scan, short_convolution
from mnemos.ops.convolution.reference import reference_short_convolution
from mnemos.ops.delta.reference import reference_delta_rule
from mnemos.ops.selective.reference import reference_selective_scan

MOST = 2e-5
LEAST_LOG = -13.8
LONG = 2**20
Given = dict[str, Tensor]


class Drawn:
    """Random numbers of a case."""

    def __init__(self, seed: int) -> None:
        self.g = torch.Generator().manual_seed(seed)

    def between(self, low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=self.g))

    def one(self, *of: Any) -> Any:
        return of[self.between(0, len(of) - 1)]

    def normal(self, *shape: int) -> Tensor:
        return self.strange(torch.randn(shape, generator=self.g))

    def uniform(self, *shape: int) -> Tensor:
        return self.strange(torch.rand(shape, generator=self.g))

    def strange(self, x: Tensor) -> Tensor:
        """The same numbers with the axes in another order in memory and, at random, gaps between them."""
        order = torch.randperm(x.dim(), generator=self.g).tolist()
        size, gap = list(x.permute(order).shape), self.between(0, 2)
        size[-1] += gap
        y = torch.full(size, torch.nan)[..., : size[-1] - gap]
        y.copy_(x.permute(order))
        return y.permute([order.index(i) for i in range(x.dim())])

    def marks(self, b: int, t: int, share: float) -> Tensor:
        return torch.rand(b, t, generator=self.g) < share

    def options(self, b: int, t: int) -> dict[str, Any]:
        """mask and resets"""
        found: dict[str, Any] = {}
        mask, at = torch.ones(b, t, dtype=torch.bool), self.between(0, t)
        kind = self.one("none", "none", "left", "right", "middle", "anywhere")
        if kind == "left":
            mask[0, :at] = False
        elif kind == "right":
            mask[-1, at:] = False
        elif kind == "middle":
            mask[:, at : at + self.between(1, 20)] = False
        elif kind == "anywhere":
            mask = self.marks(b, t, 0.7)
        if kind != "none":
            found["mask"] = mask
        if self.one(True, False, False):
            found["resets"] = self.marks(b, t, self.one(0.02, 0.2))
        return found


def draw_delta(r: Drawn) -> tuple[Given, dict[str, Any]]:
    b, t, shared, share = r.between(1, 3), r.one(r.between(0, 10), r.between(1, 130)), r.between(1, 3), r.between(1, 3)
    h, d, m = shared * share, r.one(r.between(1, 20), r.between(1, 80)), r.one(r.between(1, 20), r.between(1, 140))
    k = r.normal(b, t, shared, d)
    given = {"q": r.normal(b, t, shared, d), "v": r.normal(b, t, h, m)}
    given["k"] = r.strange(k / k.norm(dim=-1, keepdim=True).clamp_min(0.1))
    options = {"scale": r.one(None, 0.7), "normalise_keys": False, **r.options(b, t)}
    rule = r.one("delta", "delta", "decayed")
    if rule == "delta":
        given["beta"] = r.uniform(b, t, h)
        options["normalise_keys"] = r.one(True, False, False)
    else:
        del options["normalise_keys"]
    if rule == "decayed" or r.one(True, True, False):
        shape = (b, t, h, d) if r.one(True, False) else (b, t, h)
        level = LEAST_LOG * float(torch.rand((), generator=r.g)) ** 3
        decay = r.one(LEAST_LOG * r.uniform(*shape), level * r.uniform(*shape), LEAST_LOG * r.uniform(*shape) ** 6)
        decay = torch.where(r.uniform(*shape) < r.one(0.0, 0.1), 0.0, decay)
        given["decay"] = r.strange(decay)
    if r.one(True, False):
        given["state"] = r.normal(b, h, d, m)
    return given, options


def draw_convolution(r: Drawn) -> tuple[Given, dict[str, Any]]:
    b, t, c, w = r.between(1, 3), r.one(r.between(0, 10), r.between(1, 300)), r.between(1, 90), r.between(2, 8)
    given = {"x": r.normal(b, t, c), "weight": r.normal(c, w)}
    if r.one(True, False):
        given["bias"] = r.normal(c)
    if r.one(True, False):
        given["state"] = r.normal(b, w - 1, c)
    return given, {"activation": r.one(None, "silu"), **r.options(b, t)}


def draw_selective(r: Drawn) -> tuple[Given, dict[str, Any]]:
    b, t, c, n = r.between(1, 3), r.one(r.between(0, 10), r.between(1, 130)), r.between(1, 300), r.between(1, 20)
    level = LEAST_LOG * float(torch.rand((), generator=r.g)) ** 3
    rates = r.one(LEAST_LOG * r.uniform(c, n), level * r.uniform(c, n), LEAST_LOG * r.uniform(c, n) ** 6)
    steps = torch.where(r.uniform(b, t, c) < r.one(0.0, 0.1), 0.0, r.uniform(b, t, c))
    given = {"x": r.normal(b, t, c), "dt": r.strange(steps), "A": r.strange(rates)}
    given |= {"B": r.normal(b, t, n), "C": r.normal(b, t, n)}
    if r.one(True, False):
        given["D"] = r.normal(c)
    if r.one(True, False):
        given["state"] = r.normal(b, c, n)
    return given, r.options(b, t)


def in_calls(call: Any, given: Given, options: dict[str, Any], cuts: list[int]) -> tuple[Tensor, Tensor]:
    """The sequence in several calls, each from the state of that before."""
    whole = {"weight", "bias", "state", "A", "D"}
    state, parts = given.get("state"), []
    for a, b in itertools.pairwise(cuts):
        part = {name: x if name in whole else x[:, a:b] for name, x in given.items()}
        marks = {name: x[:, a:b] if isinstance(x, Tensor) else x for name, x in options.items()}
        y, state = call(**{**part, "state": state}, **marks)
        parts.append(y)
    assert state is not None
    return torch.cat(parts, 1), state


def results(found: tuple[Tensor, Tensor], leaves: list[Tensor], seed: int) -> list[Tensor]:
    """y, the state and the gradients of a random sum of them."""
    g = torch.Generator().manual_seed(seed)
    above = [torch.randn(x.shape, generator=g).to(x.dtype) for x in found]
    pairs = [(x, a) for x, a in zip(found, above, strict=True) if x.requires_grad]
    outputs, above = [x for x, _ in pairs], [a for _, a in pairs]
    return [*found, *torch.autograd.grad(outputs, leaves, above, materialize_grads=True)]


def errors(seed: int, selective: bool) -> tuple[str, dict[str, float]]:
    """The error of every tensor of a case, and the case in words."""
    r = Drawn(seed)
    delta = seed % 8 != 7 and not selective
    given, options = (draw_selective if selective else draw_delta if delta else draw_convolution)(r)
    given = {name: x.detach().requires_grad_() for name, x in given.items()}
    exact = {name: x.detach().double().requires_grad_() for name, x in given.items()}
    call: Any = short_convolution if not delta else delta_rule if "beta" in given else decayed_attention
    call = selective_scan if selective else call
    t = next(iter(given.values())).shape[1]
    cuts = sorted([0, t, *(r.between(0, t) for _ in range(r.one(0, 0, 1, 3)))])
    threads, variant = r.between(1, 2), r.one(*mnemos.native.instruction_sets())
    torch.set_num_threads(threads)
    with mnemos.native.instruction_set(variant):
        a = results(in_calls(call, given, options, cuts), list(given.values()), seed)
    torch.set_num_threads(1)  # of small products they cost more than they give
    if delta:
        expected = reference_delta_rule(**{"beta": None, **exact}, **options)  # type: ignore[arg-type]
    else:
        expected = (reference_selective_scan if selective else reference_short_convolution)(**exact, **options)
    b = results(expected, list(exact.values()), seed)
    found = {}
    for name, x, y in zip(("y", "end", *given), a, b, strict=True):
        assert x.shape == y.shape, name
        size = max(1.0, float(y.detach().abs().max())) if y.numel() else 1.0
        off = float((x.detach().double() - y.detach()).abs().max()) / size if y.numel() else 0.0
        found[name] = off if off == off else float("inf")
    shapes = {name: tuple(x.shape) for name, x in given.items()}
    return f"seed {seed}: {call.__name__}, {variant}, {threads} threads, cuts {cuts}, {shapes}", found


def random_cases(first: int, count: int, selective: bool) -> dict[str, Any]:
    worst: dict[str, float] = {}
    per_case, failed, kinds = [], 0, Counter[str]()
    for i in range(count):
        words, found = errors(first + i, selective)
        kinds[words.split()[2].rstrip(",")] += 1
        per_case.append(max(found.values()))
        for name, off in found.items():
            worst[name] = max(worst.get(name, 0.0), off)
        if per_case[-1] > MOST:
            failed += 1
            print(words, {name: f"{off:.1e}" for name, off in found.items() if off > MOST}, flush=True)
        if (i + 1) % 250 == 0:
            print(f"{i + 1} cases, largest error {max(per_case):.1e}, {failed} above {MOST}", flush=True)
    median = float(np.median(per_case))
    return {"cases": count, "first_seed": first, "of": kinds, "failed": failed, "bar": MOST, "largest": worst} | {
        "median_of_the_largest": median,
        "largest_of_all": max(per_case),
    }


def million(kind: str) -> dict[str, Any]:
    """One row, 2 heads, 16 × 16 states; decays near 1, a third of them exactly."""
    g, h, d = np.random.default_rng(0), 2, 16
    q, k, v = (g.standard_normal((LONG, h, d)).astype(np.float32) for _ in range(3))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    beta = g.random((LONG, h), dtype=np.float32)
    shape = (LONG, h, d) if "channel" in kind else (LONG, h)
    decay = -(10 ** g.uniform(-6, -2, shape)).astype(np.float32)
    decay[g.random(shape) < 1 / 3] = 0
    if kind == "delta":
        decay = np.zeros(shape, np.float32)
    s, exact = np.zeros((h, d, d)), np.empty((LONG, h, d))
    factors = np.exp(decay.astype(np.float64)).reshape(LONG, h, -1, 1)
    wide = [x.astype(np.float64) for x in (q, k, v, beta)]
    for i, (query, key, value, weight) in enumerate(zip(*wide, strict=True)):
        s *= factors[i]
        if kind != "decayed":
            value = weight[:, None] * (value - np.matmul(key[:, None], s)[:, 0])
        s += key[:, :, None] * value[:, None]
        exact[i] = np.matmul(query[:, None], s)[:, 0] * d**-0.5
    given = [torch.from_numpy(x)[None] for x in (q, k, v)]
    gates = [torch.from_numpy(x)[None] for x in (beta, decay)]
    call = decayed_attention if kind == "decayed" else delta_rule
    rest = gates[1:] if kind == "decayed" else gates
    found: dict[str, Any] = {"kind": kind, "tokens": LONG}
    for name, step in (("one call", LONG), ("calls of 1,000", 1000)):
        parts, state = [], None
        for a in range(0, LONG, step):
            y, state = call(*[x[:, a : a + step] for x in (*given, *rest)], state=state)
            parts.append(y)
        assert state is not None
        off = np.abs(torch.cat(parts, 1)[0].numpy() - exact).reshape(LONG, -1).max(1)
        size = np.abs(exact).max()
        tenths = [float(x.max() / size) for x in np.array_split(off, 10)]
        end = float(np.abs(state[0].numpy() - s).max() / np.abs(s).max())
        found[name] = {"y by tenths": tenths, "final state": end}
        print(f"{kind}, {name}: first tenth {tenths[0]:.1e}, last {tenths[-1]:.1e}, final state {end:.1e}", flush=True)
    return found


def main() -> None:
    parser = command(__doc__, cases=3000)
    parser.add_argument("--seed", type=int, default=0, help="of the first case")
    parser.add_argument("--selective", action="store_true", help="calls of the selective scan alone")
    parser.add_argument("--million", action="store_true", help="the million tokens too")
    options = parser.parse_args()
    if not mnemos.native.instruction_sets():
        parser.error(mnemos.native.why_not())
    found = random_cases(options.seed, options.cases, options.selective) if options.cases else {"failed": 0}
    if options.million:
        kinds = "delta", "gated delta", "gated delta per channel", "decayed"
        found["million"] = [million(kind) for kind in kinds]
    write(options.out, found, options.seed)
    sys.exit(1 if found["failed"] else 0)


if __name__ == "__main__":
    main()
