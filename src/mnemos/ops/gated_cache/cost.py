"""The cost that a gated recurrent cache adds to an attention, by formula: multiply-adds, parameters and bytes kept.

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

In a host V = Dm, and `lift` projects to D'. In a layer of mnemos, and in a host with mix="heads", V = D' without a
lift, because the projection follows. lift="pad" has V = Dm and lifts to Dm. A cache that is frozen at inference costs
queries, scores and lift only: its gates do not run, and its keys and values are projected once. A transient cache costs
everything, with keys and values per row. branch="linear" has K·Tm·Dm·V/H + R·T·Dm·(V/H + 1) instead of
scores and values.

The formulas describe PyTorch's operations. Attention is fused, so its scores are not kept. The kernels (native.py)
compute the same products; intermediates of at most 2¹⁸ numbers they keep instead of computing them again.
"""

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

    @property
    def constant(self) -> bool:
        """Whether the cache is a learned constant, which no forward updates."""
        ...


class Shape(NamedTuple):
    """The sizes of one cached attention: T, Tm, D, Dm, H, D' (None: D).

    rows: rows of its batch per sample (in Swin the number of windows; 1 if a cache spans all windows, whose tokens are
    then T). grid_tokens: T without class tokens and padding if they form a known grid, else 0 (then nothing is
    convolved). lifts: True in a host whose output is projected already; False in a layer of mnemos and for
    mix="heads", whose D' is the width of all heads.
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


class CostPart(NamedTuple):
    """An operation, or several similar ones, of a batch, in multiply-adds.

    kept: numbers that its backward needs and that no other part of the model keeps.
    """

    name: str
    macs: int
    backward_macs: int
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
    found = [] if mode == "frozen" or grc.constant else _update(shape, sizes)
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


def kept_bytes(shape: Shape, grc: Switches, batch: int = 1, width: int = 4) -> int:
    """Bytes that a training forward keeps for its backward: a lower bound of the memory that a cache adds.

    Parameters add four numbers each: the value, the gradient and AdamW's two averages.
    """
    return width * sum(part.kept for part in parts(shape, grc, batch, "training"))


def parameters(shape: Shape, grc: Switches) -> int:
    """Parameters of one layer's branch: gates, queries, keys, values, lift, norm, λ, convolution, constant slots."""
    d = shape.cache_width
    sizes = _sizes(shape, grc, 1, "training")
    gates = 3 * (2 * d * d + d) + (2 * d if grc.candidate == "layernorm_gelu" else 0)
    reads = 2 * (d * d + d) + (d + 1) * sizes.values + (d + 1) * sizes.lifted
    kernel = 9 * shape.width * shape.width // d + shape.width if _convolves(shape, grc) else 0
    return gates + reads + kernel + shape.heads + (sizes.slots if grc.constant else 0)


def _sizes(shape: Shape, grc: Switches, batch: int, mode: Mode) -> _Sizes:
    rows = batch * shape.rows
    out = shape.out_width or shape.width
    shared = mode == "frozen" or grc.constant or (mode == "training" and grc.read == "mean")
    if grc.lift == "pad":
        values = lifted = shape.cache_width
    else:
        values, lifted = (shape.cache_width, out) if shape.lifts else (out, 0)
    return _Sizes(rows, 1 if shared else rows, shape.length * shape.cache_width, values, lifted, out)


def _product(name: str, n: int, k: int, m: int) -> CostPart:
    """[n, k]·[k, m] + bias: the backward is one product per factor."""
    macs = n * k * m
    return CostPart(name, macs, 2 * macs)


def _update(shape: Shape, sizes: _Sizes) -> list[CostPart]:
    """The products of the update. Nothing is kept: the host keeps the tokens of S̄, the backward recomputes the rest."""
    d, tm = shape.cache_width, shape.length
    cache = _product("update, cache", tm, d, 2 * d)
    return [
        _again(_product("update, source", sizes.rows * tm, d, 3 * d)),
        cache._replace(backward_macs=2 * cache.macs),
        _again(_product("update, candidate", sizes.rows * tm, d, d)),
    ]


def _again(part: CostPart) -> CostPart:
    """An operation that the backward computes a second time."""
    return part._replace(backward_macs=part.backward_macs + part.macs)


def _read(shape: Shape, grc: Switches, sizes: _Sizes, mode: Mode) -> list[CostPart]:
    t, tm, d, values = shape.tokens, shape.length, shape.cache_width, sizes.values
    tokens = sizes.rows * t
    found = [_product("queries", tokens, d, d)]
    if mode != "frozen":
        slots = sizes.key_rows * tm
        found += [_product("keys", slots, d, d), _product("values", slots, d, values)]
    # Queries and results of the tokens; keys, values and C_t of the slots.
    kept = tokens * (d + values) + sizes.key_rows * tm * (d + values) + sizes.key_rows * sizes.slots
    if grc.branch == "linear":
        each = d * values // shape.heads
        macs = sizes.key_rows * tm * each + tokens * (each + d)
        found.append(CostPart("linear attention", macs, 2 * macs, kept))
    else:
        macs = tokens * tm * (d + values)
        # The fused kernel, for equal widths, does not keep its scores: five products backward for two forward.
        backward = macs * 5 // 2 if values == d else 2 * macs
        found.append(CostPart("scores and values", macs, backward, kept))
    if sizes.lifted:
        found.append(_product("lift", tokens, d, sizes.lifted))
    if grc.lift == "pad":
        found.append(CostPart("zeros", 0, 0, tokens * sizes.out))
    found.append(CostPart("mix", 0, 0, tokens * sizes.out))
    if _convolves(shape, grc):
        width, pixels = shape.width, sizes.rows * shape.grid_tokens
        macs = 9 * pixels * width * width // d
        found.append(CostPart("convolution", macs, 2 * macs, pixels * width))
    return found


def _convolves(shape: Shape, grc: Switches) -> bool:
    """Whether the tokens form a grid and convolution is not False (None: on for a grid)."""
    return bool(shape.grid_tokens) and grc.convolution is not False
