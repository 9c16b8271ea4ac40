"""The branch beside a host against eq. 2 to 5 written out in float64, a sample, a head and a slot at a time."""

import math
from typing import Any

import pytest
import torch
from refusals import refuses
from torch import Tensor

from mnemos import GRC
from mnemos.hosts import HostBranch
from mnemos.hosts.host import AttentionInput, Host, TokenReader
from mnemos.memory.gated_cache import hold_caches
from mnemos.ops.gated_cache import Windows
from mnemos.ops.gated_cache.reference import reference_attend, reference_mix, reference_resample, reference_update

HOST = Host("tests:Attention", ("x",), "", "", TokenReader("x"))
B = 3


def build(dim: int, out: int, heads: int, grc: dict[str, Any], place: AttentionInput | None = None) -> HostBranch:
    torch.manual_seed(0)
    branch = HostBranch(HOST, place or AttentionInput(), GRC(**grc), dim, out, heads).double()
    with torch.no_grad():
        for value in (*branch.parameters(), branch.cache):
            value += 0.4 * torch.randn_like(value)
    return branch


def calls(dim: int, out: int, t: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    made = [torch.randn(B, t, n, dtype=torch.float64, generator=generator) for n in (dim, out)]
    return made[0].requires_grad_(), made[1].requires_grad_()


def linear(module: Any, x: Tensor) -> Tensor:
    return torch.stack([module.weight @ row + module.bias for row in x])


def weights(branch: HostBranch) -> dict[str, Tensor]:
    found = {}
    for short, module in (("u", branch.update_gate), ("r", branch.reset_gate), ("c", branch.candidate)):
        found[f"W_{short}"], found[f"b_{short}"] = module.weight, module.bias
    if branch.candidate_norm is not None:
        found["gain"], found["shift"] = branch.candidate_norm.weight, branch.candidate_norm.bias
    return found


def halfway(tokens: Tensor, place: float) -> Tensor:
    """Between the two tokens around a place, the outermost ones beyond the ends."""
    place = min(max(place, 0.0), len(tokens) - 1.0)
    low = math.floor(place)
    high = min(low + 1, len(tokens) - 1)
    return (1 - (place - low)) * tokens[low] + (place - low) * tokens[high]


def in_windows(windows: Windows, tokens: Tensor) -> Tensor:
    """Tokens of whole grids, a window a row."""
    return tokens.reshape(-1, windows.window[0] * windows.window[1], tokens.shape[-1])


def slots_of(branch: HostBranch, tokens: Tensor) -> Tensor:
    """Valid tokens [n, Dm] to [Tm, Dm]. Windows and grids are compared with those of models in `test_lengths`."""
    if branch.windows is not None:
        (tokens,) = branch.windows.to_grid(in_windows(branch.windows, tokens))
    if branch.pool > 1:
        (rows, columns), side = branch.grid, branch.pool
        squares: dict[tuple[int, int], list[Tensor]] = {}
        for i in range(rows):
            for j in range(columns):
                squares.setdefault((i // side, j // side), []).append(tokens[i * columns + j])
        return torch.stack([sum(squares[key]) / len(squares[key]) for key in sorted(squares)])
    length, n = branch.cache.shape[0], len(tokens)
    if branch.grc.resample == "nearest":
        return reference_resample(tokens, length)
    if branch.grc.resample == "linear":
        return torch.stack([halfway(tokens, (i + 0.5) * n / length - 0.5) for i in range(length)])
    (rows, columns), (height, width) = branch.grid, (2, 3)  # what the test asks for
    lines = tokens.reshape(rows, columns, -1)
    lines = torch.stack([halfway(lines, (i + 0.5) * rows / height - 0.5) for i in range(height)])
    cells = [[halfway(line, (j + 0.5) * columns / width - 0.5) for j in range(width)] for line in lines]
    return torch.stack([cell for line in cells for cell in line])


def convolved(branch: HostBranch, x: Tensor) -> Tensor:
    """The grouped 3x3 convolution of one sample's grid: at each tap a matrix of a block a group; class tokens: none."""
    assert branch.convolution is not None
    assert branch.grid is not None
    (rows, columns), each = branch.grid, branch.dim // branch.cache_dim
    tokens = x[branch.prefix :] if branch.windows is None else branch.windows.to_grid(in_windows(branch.windows, x))
    image = tokens.reshape(rows, columns, -1)
    taps = {}
    for a in range(3):
        for b in range(3):
            blocks = branch.convolution.weight[:, :, a, b].split(each)  # each of outputs of one group
            taps[a - 1, b - 1] = torch.block_diag(*blocks)
    zero, out = torch.zeros(branch.dim, dtype=x.dtype), []
    for i in range(rows):
        for j in range(columns):
            seen = [
                matrix @ image[i + a, j + b]
                for (a, b), matrix in taps.items()
                if 0 <= i + a < rows and 0 <= j + b < columns
            ]
            out.append(branch.convolution.bias + sum(seen))
    found = torch.stack(out)[None]
    found = found if branch.windows is None else branch.windows.to_windows(found)
    return torch.cat([zero.expand(branch.prefix, -1), found.flatten(0, -2)])


def remembered(branch: HostBranch, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    if branch.grc.branch == "softmax":
        return reference_attend(q, k, v)
    feature = lambda z: torch.clamp(z, min=0) + torch.exp(torch.clamp(z, max=0))  # noqa: E731
    rows = []
    for query in feature(q):
        share = feature(k) @ query
        rows.append(share @ v / (share.sum() + 1e-6))
    return torch.stack(rows)


def oracle(branch: HostBranch, x: Tensor, y: Tensor, mask: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
    """What it makes of x and y, and the cache that it leaves."""
    grc, h, d = branch.grc, branch.num_heads, branch.cache_dim
    new, counted = [], []
    for sample, own, valid in zip(x, y, mask[:, branch.prefix :], strict=True):
        tokens = (sample if grc.source == "input" else own)[branch.prefix :][valid][:, :d]
        counted.append(len(tokens) > 0)
        if counted[-1]:
            new.append(reference_update(slots_of(branch, tokens), cache, weights(branch), grc.candidate))
        else:
            new.append(cache)
    seen = [one for one, counts in zip(new, counted, strict=True) if counts]
    mean = sum(seen) / len(seen) if seen else cache
    outputs = []
    for i, (sample, own) in enumerate(zip(x, y, strict=True)):
        read = new[i]
        if branch.training and grc.read == "mean":
            read = mean
        elif not branch.training and grc.inference == "frozen":
            read = cache
        q, k, v = linear(branch.to_query, sample[:, :d]), linear(branch.to_key, read), linear(branch.to_value, read)
        q, k, v = (z.reshape(len(z), h, -1) for z in (q, k, v))
        o = torch.stack([remembered(branch, q[:, j], k[:, j], v[:, j]) for j in range(h)], 1)
        if grc.mix != "heads":
            o = linear(branch.lift, o.flatten(1)).reshape(len(sample), h, -1)
        if grc.lift == "pad":
            o = torch.cat([o, o.new_zeros(len(sample), h, branch.out_dim // h - d // h)], -1)
        out = reference_mix(o, own.reshape(len(own), h, -1), branch.mix).flatten(1)
        outputs.append(out + convolved(branch, sample) if branch.convolution is not None else out)
    return torch.stack(outputs), mean.detach()


# Odd sizes: D = 15 over 3 heads, Dm = 6, D' = 21, T = 7, Tm = 5.
SIZES = (15, 21, 3)
SQUARE = (18, 18, 3)  # D % Dm = 0, for the release's convolution
GRID = AttentionInput(prefix=1, grid=(3, 5))
ACROSS = AttentionInput(grid=(3, 5), pool=4, windows=Windows((3, 5), (2, 2), (1, 1)))  # six windows of 2 x 2
PADDED = AttentionInput(grid=(2, 3), windows=Windows((2, 3), (2, 2), (1, 1), pads_first=True))  # two of them
CASES: dict[str, tuple[tuple[int, int, int], int, dict[str, Any], AttentionInput | None]] = {
    "paper": (SIZES, 7, {"preset": "paper", "length": 5}, None),
    "official": (SIZES, 7, {"preset": "official", "length": 5}, None),
    "mnemos": (SIZES, 7, {"preset": "mnemos", "length": 5}, None),
    "as long as the tokens": (SIZES, 5, {"preset": "mnemos", "length": 5}, None),
    "longer than the tokens": (SIZES, 3, {"preset": "paper", "length": 5}, None),
    "one slot, one head": ((5, 3, 1), 7, {"preset": "paper", "length": 1}, None),
    "whole width": (SIZES, 7, {"preset": "mnemos", "length": 5, "ratio": 1.0}, None),
    "linear resampling": (SIZES, 7, {"preset": "mnemos", "length": 5, "resample": "linear"}, None),
    "linear attention": (SIZES, 7, {"preset": "mnemos", "length": 5, "branch": "linear"}, None),
    "class token": (SIZES, 8, {"preset": "mnemos", "length": 5}, AttentionInput(prefix=1)),
    "mean, two class tokens": (SIZES, 8, {"preset": "paper", "length": 5}, AttentionInput(prefix=2)),
    "official on a grid": (SQUARE, 16, {"preset": "official", "length": 5}, GRID),
    "grid to grid": (SIZES, 16, {"preset": "paper", "length": 6, "resample": "grid"}, GRID),
    "pooled": (SIZES, 16, {"preset": "paper", "length": 6}, GRID._replace(pool=2)),
    "pooled across windows": (SQUARE, 24, {"preset": "paper", "length": 2, "convolution": True}, ACROSS),
    "across padded windows": (SQUARE, 8, {"preset": "official", "length": 6}, PADDED),
    "output, frozen": (SIZES, 7, {"preset": "official", "length": 5, "inference": "frozen"}, None),
    "heads": (SIZES, 8, {"preset": "mnemos", "length": 5, "mix": "heads"}, AttentionInput(prefix=1)),
    "heads, across": (SQUARE, 24, {"preset": "paper", "length": 2, "convolution": True, "mix": "heads"}, ACROSS),
    "mean, transient": (SIZES, 7, {"preset": "paper", "length": 5, "inference": "transient"}, None),
}


def masks(t: int, seed: int) -> Tensor:
    """Some tokens of each row, all of one, none of another."""
    mask = torch.rand(B, t, generator=torch.Generator().manual_seed(seed)) < 0.6
    mask[seed % B], mask[(seed + 1) % B] = True, False
    return mask


def gradients(branch: HostBranch, out: Tensor, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    upstream = torch.sin(torch.arange(out.numel(), dtype=out.dtype)).view_as(out)
    wanted = {"x": x, "y": y, **dict(branch.named_parameters())}
    found = torch.autograd.grad((out * upstream).sum(), list(wanted.values()), allow_unused=True)
    return {
        name: torch.zeros_like(value) if grad is None else grad
        for (name, value), grad in zip(wanted.items(), found, strict=True)
    }


def call(branch: HostBranch, x: Tensor, y: Tensor, mask: Tensor | None) -> Tensor:
    """A call with all tokens of a sample in one row, which a cache across windows gets as rows of windows."""
    if branch.windows is None:
        return branch(x, y, mask)
    return branch(in_windows(branch.windows, x), in_windows(branch.windows, y)).view_as(y)


WHOLE = {"grid to grid", "pooled", "pooled across windows", "across padded windows", "heads, across"}  # grids
# These differ from others with padding in the place of the cache, or in how it is read.
LIKE_ANOTHER = {"whole width", "class token", "output, frozen", "mean, transient"}
MASKED = [(case, masked) for case in CASES for masked in (False, True) if not (masked and case in WHOLE | LIKE_ANOTHER)]


@pytest.mark.slow
@pytest.mark.parametrize(("case", "masked"), MASKED)
def test_values_and_gradients_of_the_equations_while_the_cache_evolves(case, masked):
    (dim, out, heads), t, grc, place = CASES[case]
    branch = build(dim, out, heads, grc, place)
    expected_cache = branch.cache.clone()
    for seed, training in ((1, True), (2, False), (3, True)):  # the later ones read what the first one wrote
        x, y = calls(dim, out, t, seed)
        mask = masks(t, seed) if masked else None
        expected_mask = torch.ones(B, t, dtype=torch.bool) if mask is None else mask
        torch.testing.assert_close(branch.eval().cache, expected_cache)
        expected, left = oracle(branch.train(training), x, y, expected_mask, expected_cache)
        found = call(branch, x, y, mask)
        torch.testing.assert_close(found, expected)
        if seed > 1:
            theirs = gradients(branch, expected, x, y)
            for name, grad in gradients(branch, found, x, y).items():
                torch.testing.assert_close(grad, theirs[name], msg=lambda m, n=name: f"{n}: {m}")
        if training:
            expected_cache = left
        else:
            with torch.no_grad():
                for _ in range(2):  # the second time, what was projected is there
                    torch.testing.assert_close(call(branch, x, y, mask), expected)
    torch.testing.assert_close(branch.eval().cache, expected_cache)


def test_inputs_of_any_layout_are_read_right():
    branch = build(*SIZES, {"preset": "mnemos", "length": 5})
    x, y = calls(15, 21, 7, 1)
    expected = branch(x, y)
    with hold_caches(branch):
        for spread in (lambda z: z.transpose(0, 1).contiguous().transpose(0, 1), lambda z: z.mT.contiguous().mT):
            for mode in (torch.enable_grad(), torch.no_grad()):
                with mode:
                    torch.testing.assert_close(branch(spread(x), spread(y)), expected)
        same = branch(x[:1].expand(4, -1, -1), y[:1].expand(4, -1, -1))
        torch.testing.assert_close(same, expected[:1].expand(4, -1, -1))


def test_shapes_that_do_not_fit_are_refused():
    branch = build(*SIZES, {"preset": "mnemos", "length": 5})
    x, y = calls(15, 21, 7, 1)
    for bad in ((x[..., :9], y), (x, y[..., :9]), (x[:, :3], y), (x[0], y[0])):
        refuses(r"\[B, T, 15\] to \[B, T, 21\]", branch, *bad)
    for mask in (torch.ones(B, 6, dtype=torch.bool), torch.ones(B, 7), torch.ones(7, dtype=torch.bool)):
        refuses("mask of booleans", branch, x, y, mask)
    pooled = build(SIZES[0], SIZES[1], 3, *CASES["pooled"][2:])
    x, y = calls(15, 21, 16, 1)
    refuses('length="paper".: expected no padding mask', pooled, x, y, torch.ones(B, 16, dtype=torch.bool))


def test_a_call_that_raised_writes_nothing_and_the_next_one_does():
    branch, other = (build(*SIZES, {"preset": "mnemos", "length": 5}) for _ in range(2))
    first, second = calls(15, 21, 7, 1), calls(15, 21, 7, 2)

    def fail(*_: Any) -> None:
        raise ZeroDivisionError

    branch.observer = fail
    with pytest.raises(ZeroDivisionError):
        branch(*first)
    branch.observer = None
    for inputs in (second, first):
        assert torch.equal(branch(*inputs), other(*inputs))
    assert torch.equal(branch.eval().cache, other.eval().cache)
