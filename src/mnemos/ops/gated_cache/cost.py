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

from typing import Any, Literal, NamedTuple

Mode = Literal["training", "transient", "frozen"]


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


def parts(shape: Shape, grc: Any, batch: int = 1, mode: Mode = "training") -> list[CostPart]:
    """The operations of one layer's branch for `batch` samples, in order. `grc` is a GRC, every switch set."""
    t, tm, d = shape.tokens, shape.length, shape.cache_width
    rows, tokens, values, lifted, out = batch * shape.rows, batch * shape.rows * t, *_widths(shape, grc)
    shared = mode == "frozen" or grc.constant or (mode == "training" and grc.read == "mean")
    key_rows = 1 if shared else rows
    operations = []

    # --- the update keeps nothing: the host keeps the tokens of S̄, and the backward computes the rest again ---
    if mode != "frozen" and not grc.constant:
        for name, macs, backward in (("source", rows * tm * 3 * d * d, 3), ("cache", tm * 2 * d * d, 2),
                                     ("candidate", rows * tm * d * d, 3)):  # fmt: skip
            operations.append(CostPart(f"update, {name}", macs, backward * macs))

    # --- the read keeps queries and results of the tokens, and keys, values and C_t of the slots ---
    operations.append(_product("queries", tokens, d, d))
    if mode != "frozen":
        operations += [_product("keys", key_rows * tm, d, d), _product("values", key_rows * tm, d, values)]
    kept = tokens * (d + values) + key_rows * tm * (d + values) + key_rows * tm * d
    if grc.branch == "linear":
        each = d * values // shape.heads
        macs = key_rows * tm * each + tokens * (each + d)
        operations.append(CostPart("linear attention", macs, 2 * macs, kept))
    else:
        macs = tokens * tm * (d + values)
        # The fused kernel, for equal widths, does not keep its scores: five products backward for two forward.
        operations.append(CostPart("scores and values", macs, macs * 5 // 2 if values == d else 2 * macs, kept))
    if lifted:
        operations.append(_product("lift", tokens, d, lifted))
    if grc.lift == "pad":
        operations.append(CostPart("zeros", 0, 0, tokens * out))
    operations.append(CostPart("mix", 0, 0, tokens * out))
    if shape.grid_tokens and grc.convolution is not False:
        macs = 9 * rows * shape.grid_tokens * shape.width * shape.width // d
        operations.append(CostPart("convolution", macs, 2 * macs, rows * shape.grid_tokens * shape.width))
    return operations


def training_macs(shape: Shape, grc: Any, batch: int = 1) -> int:
    """Multiply-adds of a training forward of a batch. What the batch shares counts once."""
    return sum(part.macs for part in parts(shape, grc, batch, "training"))


def inference_macs(shape: Shape, grc: Any, batch: int = 1) -> int:
    """Multiply-adds of an eval() forward of a batch; of a frozen cache keys and values were projected before."""
    mode: Mode = "frozen" if grc.inference == "frozen" else "transient"
    return sum(part.macs for part in parts(shape, grc, batch, mode))


def backward_macs(shape: Shape, grc: Any, batch: int = 1) -> int:
    """Multiply-adds of the backward of a training forward; a training step costs these and `training_macs`."""
    return sum(part.backward_macs for part in parts(shape, grc, batch, "training"))


def kept_bytes(shape: Shape, grc: Any, batch: int = 1, width: int = 4) -> int:
    """Bytes that a training forward keeps for its backward: a lower bound of the memory that a cache adds.

    Parameters add four numbers each: the value, the gradient and AdamW's two averages.
    """
    return width * sum(part.kept for part in parts(shape, grc, batch, "training"))


def parameters(shape: Shape, grc: Any) -> int:
    """Parameters of one layer's branch: gates, queries, keys, values, lift, norm, λ, convolution, constant slots."""
    d = shape.cache_width
    values, lifted, _ = _widths(shape, grc)
    gates = 3 * (2 * d * d + d) + (2 * d if grc.candidate == "layernorm_gelu" else 0)
    reads = 2 * (d * d + d) + (d + 1) * values + (d + 1) * lifted
    convolves = shape.grid_tokens and grc.convolution is not False
    kernel = 9 * shape.width * shape.width // d + shape.width if convolves else 0
    return gates + reads + kernel + shape.heads + (shape.length * d if grc.constant else 0)


def _widths(shape: Shape, grc: Any) -> tuple[int, int, int]:
    """V, the channels after the lift (0 without one), and D'."""
    out = shape.out_width or shape.width
    if grc.lift == "pad":
        return shape.cache_width, shape.cache_width, out
    return (shape.cache_width, out, out) if shape.lifts else (out, 0, out)


def _product(name: str, n: int, k: int, m: int) -> CostPart:
    """[n, k]·[k, m] + bias: the backward is one product per factor."""
    return CostPart(name, n * k * m, 2 * n * k * m)
