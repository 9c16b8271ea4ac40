"""The cost that a gated recurrent cache adds to an attention, by formula: multiply-adds, bytes and parameters.

T tokens and Tm slots, D channels in and D' out, Dm cached channels, V: width of the values, H heads. R rows: samples,
or windows, which are rows of the batch in Swin. K rows of keys and values: R, or 1 if all read the batch mean of C_t.

    =================== ======================= ================================================= ===================
    product             multiply-adds           once per                                          backward
    =================== ======================= ================================================= ===================
    update, source      3·Tm·Dm²                row (three products, the half for S̄)              3 × forward, with
    update, candidate   Tm·Dm²                  row (the half for g_r ⊙ C)                        its recomputation
    update, cache       2·Tm·Dm²                batch (two gates, the half for C)                 2 ×: C is a constant
    queries             T·Dm²                   row                                               2 ×
    keys and values     Tm·Dm·(Dm + V)          row; batch, for read="mean"                       2 ×
    scores and values   T·Tm·(Dm + V)           row                                               2½ × for V = Dm (with
                                                                                                  recomputation); 2 ×
    lift                T·Dm·D'                 row                                               2 ×
    convolution         9·T·D·D/Dm              row, T without class tokens                       2 ×
    =================== ======================= ================================================= ===================

In a host V = Dm, and `lift` projects to D'. In a layer of mnemos V = D' without a lift, because the layer's projection
follows. lift="pad" has V = Dm and lifts to Dm. A cache that is frozen at inference costs queries, scores and lift only:
its gates do not run, and its keys and values are projected once. A transient cache costs everything, with keys and
values per row. branch="linear" has K·Tm·Dm·V/H + R·T·Dm·(V/H + 1) instead of scores and values.

Bytes are numbers read and written by each operation: all its inputs and outputs, as if nothing stayed in a processor's
cache between operations. Attention is fused, so its scores are not written. These bytes are a lower bound: a library
may make further copies. Operations run one after another without overlap, so the predicted time is a sum over
operations of the larger of two times, FLOPs by the machine's rate and bytes by its bandwidth.

The formulas describe PyTorch's operations. The kernels (native.py) compute the same products; intermediates of at most
2¹⁸ numbers they keep instead of computing them again.
"""

from collections.abc import Iterable
from typing import Literal, NamedTuple, Protocol

Mode = Literal["training", "transient", "frozen"]


class Switches(Protocol):
    """The switches of a `mnemos.GRC` that change the cost; the costs know no other part of it."""

    @property
    def branch(self) -> str:
        """The attention over the slots."""
        ...

    @property
    def candidate(self) -> str | None:
        """The kind of candidate."""
        ...

    @property
    def convolution(self) -> bool | None:
        """Whether there is a positional convolution; None: where a grid is known."""
        ...

    @property
    def inference(self) -> str | None:
        """What eval() reads."""
        ...

    @property
    def lift(self) -> str | None:
        """How o_mem becomes as wide as the attention's heads."""
        ...

    @property
    def read(self) -> str | None:
        """Whether the batch mean is read."""
        ...


class Shape(NamedTuple):
    """The sizes of one cached attention: T, Tm, D, Dm, H, D' (None: D).

    rows: rows of its batch per sample (in Swin the number of windows; 1 if a cache spans all windows, whose tokens are
    then T). grid_tokens: T without class tokens and padding if they form a known grid, else 0 (then nothing is
    convolved). lifts: True in a host, whose output is projected already; False in a layer of mnemos. pooled: the tokens
    of the grid are averaged to slots.
    """

    tokens: int
    length: int
    width: int
    cache_width: int
    heads: int
    out_width: int | None = None
    rows: int = 1
    grid_tokens: int = 0
    lifts: bool = True
    pooled: bool = False


class CostPart(NamedTuple):
    """An operation, or several similar ones, of a batch: multiply-adds, and numbers moved (read and written).

    kept: numbers that its backward needs and that no other part of the model keeps.
    """

    name: str
    macs: int
    moved: int
    backward_macs: int
    backward_moved: int
    kept: int = 0


class _Sizes(NamedTuple):
    """The variables of the formulas, for a whole batch. lifted: channels after the lift, 0 without one."""

    rows: int
    key_rows: int
    slots: int  # Tm·Dm
    values: int  # V
    lifted: int
    out: int  # D'


def parts(shape: Shape, grc: Switches, batch: int = 1, mode: Mode = "training") -> list[CostPart]:
    """The operations of one layer's branch for `batch` samples, in order. `grc` is a GRC, every switch set."""
    sizes = _sizes(shape, grc, batch, mode)
    found = [] if mode == "frozen" else _update(shape, grc, sizes, mode)
    found += _read(shape, grc, sizes, mode)
    return found


def training_macs(shape: Shape, grc: Switches, batch: int = 1) -> int:
    """Multiply-adds of a training forward of a batch. What the batch shares counts once."""
    return sum(part.macs for part in parts(shape, grc, batch, "training"))


def inference_macs(shape: Shape, grc: Switches, batch: int = 1) -> int:
    """Multiply-adds of an eval() forward of a batch; of a frozen cache keys and values were projected before."""
    mode: Mode = "frozen" if grc.inference == "frozen" else "transient"
    return sum(part.macs for part in parts(shape, grc, batch, mode))


def backward_macs(shape: Shape, grc: Switches, batch: int = 1) -> int:
    """Multiply-adds of the backward of a training forward; a training step costs these and `training_macs`."""
    return sum(part.backward_macs for part in parts(shape, grc, batch, "training"))


def forward_bytes(shape: Shape, grc: Switches, batch: int = 1, mode: Mode = "training", width: int = 4) -> int:
    """Bytes that a forward of a batch reads and writes, of `width` bytes per number (4: float32)."""
    return width * sum(part.moved for part in parts(shape, grc, batch, mode))


def backward_bytes(shape: Shape, grc: Switches, batch: int = 1, width: int = 4) -> int:
    """Bytes that the backward of a training forward reads and writes."""
    return width * sum(part.backward_moved for part in parts(shape, grc, batch, "training"))


def kept_bytes(shape: Shape, grc: Switches, batch: int = 1, width: int = 4) -> int:
    """Bytes that a training forward keeps for its backward: a lower bound of the memory that a cache adds.

    Parameters add four numbers each: the value, the gradient and AdamW's two averages.
    """
    return width * sum(part.kept for part in parts(shape, grc, batch, "training"))


def seconds(found: Iterable[CostPart], macs: float, moved: float, backward: bool = False) -> float:
    """Predicted seconds on a machine of `macs` multiply-adds and `moved` numbers per second: Σ max(work / rate)."""
    total = 0.0
    for part in found:
        total += max(part.macs / macs, part.moved / moved)
        if backward:
            total += max(part.backward_macs / macs, part.backward_moved / moved)
    return total


def parameters(shape: Shape, grc: Switches) -> int:
    """Parameters of one layer's branch: gates, queries, keys, values, lift, norm, λ, convolution."""
    d = shape.cache_width
    sizes = _sizes(shape, grc, 1, "training")
    gates = 3 * (2 * d * d + d) + (2 * d if grc.candidate == "layernorm_gelu" else 0)
    reads = 2 * (d * d + d) + (d + 1) * sizes.values + (d + 1) * sizes.lifted
    kernel = 9 * shape.width * shape.width // d + shape.width if _convolves(shape, grc) else 0
    return gates + reads + kernel + shape.heads


def macs_without_attention(shape: Shape, grc: Switches, batch: int = 1) -> int:
    """Multiply-adds of a training forward of a batch in the paper's convention.

    The paper's FLOPs are multiply-adds, and do not count the products of queries with keys and of weights with values.
    """
    apart = ("scores and values", "linear attention")
    return sum(part.macs for part in parts(shape, grc, batch, "training") if part.name not in apart)


def _sizes(shape: Shape, grc: Switches, batch: int, mode: Mode) -> _Sizes:
    rows = batch * shape.rows
    out = shape.out_width or shape.width
    shared = mode == "frozen" or (mode == "training" and grc.read == "mean")
    if grc.lift == "pad":
        values = lifted = shape.cache_width
    else:
        values, lifted = (shape.cache_width, out) if shape.lifts else (out, 0)
    return _Sizes(rows, 1 if shared else rows, shape.length * shape.cache_width, values, lifted, out)


def _product(name: str, n: int, k: int, m: int) -> CostPart:
    """[n, k]·[k, m] + bias: the backward is one product per factor, and a sum for the bias."""
    macs, moved = n * k * m, n * k + k * m + n * m
    return CostPart(name, macs, moved, 2 * macs, 2 * moved + n * m)


def _update(shape: Shape, grc: Switches, sizes: _Sizes, mode: Mode) -> list[CostPart]:
    d, tm = shape.cache_width, shape.length
    all_slots = sizes.rows * sizes.slots
    resampled = 0 if shape.tokens == tm else 2 * all_slots
    if shape.pooled:  # reads every token, writes the slots; its sums are no multiply-adds
        resampled = sizes.rows * shape.grid_tokens * d + all_slots
    # Sum and σ of two gates, g_r ⊙ C, sum of the candidate, interpolation. C itself is small and not counted.
    elementwise = (4 + 4 + 2 + 3 + 3) * all_slots
    # The forward again without its interpolation; grad ⊙ g_u, (C̃ − C) ⊙ grad, g_r ⊙ C, σ' of both, batch sums.
    backward = (13 + 3 + 5 + 2 + 10 + 2) * all_slots
    if grc.candidate == "layernorm_gelu":
        elementwise += 4 * all_slots
        backward += (4 + 6) * all_slots
    if mode == "training":
        elementwise += all_slots  # the batch mean that is stored
    cache = _product("update, cache", tm, d, 2 * d)
    # Nothing is kept: the host keeps the tokens that S̄ is made of, and the backward recomputes the rest.
    return [
        CostPart("resampling", 0, resampled, 0, 2 * resampled),
        _again(_product("update, source", sizes.rows * tm, d, 3 * d)),
        cache._replace(backward_macs=2 * cache.macs, backward_moved=2 * cache.moved),
        _again(_product("update, candidate", sizes.rows * tm, d, d)),
        CostPart("update, elementwise", 0, elementwise, 0, backward),
    ]


def _again(part: CostPart) -> CostPart:
    """An operation that the backward computes a second time."""
    return part._replace(backward_macs=part.backward_macs + part.macs, backward_moved=part.backward_moved + part.moved)


def _read(shape: Shape, grc: Switches, sizes: _Sizes, mode: Mode) -> list[CostPart]:
    t, tm, d, values = shape.tokens, shape.length, shape.cache_width, sizes.values
    tokens = sizes.rows * t
    found = [_product("queries", tokens, d, d)]
    if mode != "frozen":
        slots = sizes.key_rows * tm
        found += [_product("keys", slots, d, d), _product("values", slots, d, values)]
    moved = tokens * (d + values) + sizes.key_rows * tm * (d + values)
    kept = moved + sizes.key_rows * sizes.slots  # queries, keys, values and the result; C_t
    if grc.branch == "linear":
        each = d * values // shape.heads
        macs = sizes.key_rows * tm * each + tokens * (each + d)
        found.append(CostPart("linear attention", macs, moved, 2 * macs, 2 * moved, kept))
    else:
        macs = tokens * tm * (d + values)
        # The fused kernel, for equal widths, does not keep its scores: five products backward for two forward.
        backward = macs * 5 // 2 if values == d else 2 * macs
        found.append(CostPart("scores and values", macs, moved, backward, 2 * moved, kept))
    if sizes.lifted:
        found.append(_product("lift", tokens, d, sizes.lifted))
    if grc.lift == "pad":
        padded = tokens * (d + sizes.out)
        found.append(CostPart("zeros", 0, padded, 0, padded, tokens * sizes.out))
    mixed = 3 * tokens * sizes.out  # reads both branches, writes one tensor
    found.append(CostPart("mix", 0, mixed, 0, mixed * 3 // 2, tokens * sizes.out))
    # The gradient of Dm channels is padded to D and added to the self-attention's; so is that of the summary.
    for _ in range(1 if mode == "frozen" else 2):
        found.append(CostPart("gradient of the input", 0, 0, 0, tokens * (d + 4 * shape.width)))
    if _convolves(shape, grc):
        width, pixels = shape.width, sizes.rows * shape.grid_tokens
        macs = 9 * pixels * width * width // d
        moved = 2 * pixels * width + 3 * tokens * sizes.out
        found.append(CostPart("convolution", macs, moved, 2 * macs, 2 * moved, pixels * width))
    return found


def _convolves(shape: Shape, grc: Switches) -> bool:
    """Whether the tokens form a grid and convolution is not False (None: on for a grid)."""
    return bool(shape.grid_tokens) and grc.convolution is not False
