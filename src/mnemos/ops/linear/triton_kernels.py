# mypy: disable-error-code="no-untyped-def,no-untyped-call,valid-type"
"""The kernels of triton.py, in a module of their own because importing Triton takes long.

One scan computes all results. It goes through chunks of C tokens with a tile X of a running sum of outer products in
registers. For each chunk it writes the rows, from a masked product within the chunk and from X, then adds the chunk to
X:

    OUT    in time    X [D, M], n [D]                  a row of the result
    y      forwards   S = Σ k vᵀ, z = Σ k              (q·S + Σ_{j≤i} (q·k_j) v_j) / den
    dq     forwards   S, z                             S ĝ + γ z + Σ_{j≤i} (ĝ·v_j + γ) k_j
    dk     backwards  R = Σ q ĝᵀ, w = Σ γ q            R v + w + Σ_{i≥j} (ĝ_i·v + γ_i) q_i
    dv     backwards  R, w                             Rᵀ k + Σ_{i≥j} (q_i·k) ĝ_i
    s, r   any        S, z or R, w, from zero          none: computes only the sums of a part of the sequence

with q, k after the feature map, ĝ = g/den and γ = −(ĝ·y). A row of y or dv sums over D, so programs divide M among
themselves; a row of dq or dk sums over M, so they divide D. No two programs write the same address, so every run has
the same result.
"""

import os

import triton
import triton.language as tl
from triton.runtime.errors import OutOfResources

__all__ = ["OutOfResources", "running", "scan", "step"]

# The interpreter multiplies bfloat16 as integers, so there the rounded numbers are float32.
FACTOR = tl.constexpr(tl.float32 if os.environ.get("TRITON_INTERPRET") == "1" else tl.bfloat16)


@triton.jit
def _phi(x, KIND: tl.constexpr):
    # Comparisons instead of tl.maximum, which replaces NaN by a number.
    if KIND == 1:
        x = tl.where(x > 0, x + 1.0, tl.exp(x))
    elif KIND == 2:
        x = tl.where(x < 0, 0.0, x)
    return x


@triton.jit
def _sloped(gradient, phi, KIND: tl.constexpr):
    """The gradient times dφ/dx, a function of φ(x)."""
    if KIND == 1:
        gradient = tl.where(phi < 1, gradient * phi, gradient)
    elif KIND == 2:
        gradient = tl.where(phi > 0, gradient, 0.0)
    return gradient


@triton.jit
def _product(a, b, PRECISION: tl.constexpr):
    """The product a·b in float32. bf16: both rounded to bfloat16; bf16x2: b rounded, a as a sum of two bfloat16."""
    if PRECISION == "bf16" or PRECISION == "bf16x2":
        rounded, b = a.to(tl.bfloat16), b.to(tl.bfloat16).to(FACTOR)
        c = tl.dot(rounded.to(FACTOR), b)
        if PRECISION == "bf16x2":
            c = tl.dot((a - rounded.to(tl.float32)).to(tl.bfloat16).to(FACTOR), b, c)
    else:
        c = tl.dot(a, b, input_precision=PRECISION)
    return c


@triton.jit
def _rows(base, t, stride, column, keep):
    """Rows [C, width] in float32, 0 where not `keep`."""
    return tl.load(base + t[:, None] * stride + column[None, :], mask=keep, other=0.0).to(tl.float32)


@triton.jit
def _features(base, t, stride, column, keep, KIND: tl.constexpr):
    """φ of rows, 0 where not `keep`, because φ(0) may differ from 0."""
    return tl.where(keep, _phi(_rows(base, t, stride, column, keep), KIND), 0.0)


@triton.jit
def _centred(x, n):
    """S − n·cᵀ, and c: a mean of the values. The difference rounds with their spread, not with their size.

    c = Sᵀn/|n|² makes each column of the difference least, so none is larger than that of S, also where features have
    both signs. c is 0 where there is no finite mean: its choice changes no result.
    """
    total = tl.sum(n * n, 0)
    c = tl.sum(x * n[:, None], 0) / tl.where(total == 0, 1.0, total)
    c = tl.where(tl.abs(c) < float("inf"), c, 0.0)
    return x - n[:, None] * c[None, :], c


@triton.jit
def scan(
    q,
    k,
    v,
    g,
    y,
    den,
    gamma,
    mask,
    offsets,
    out,
    x_start,
    n_start,
    x_end,
    n_end,
    eps,
    q_b,
    q_t,
    q_h,
    k_b,
    k_t,
    k_h,
    v_b,
    v_t,
    v_h,
    g_b,
    g_t,
    g_h,
    mask_b,
    mask_t,
    T,
    H,
    length,
    parts,
    blocks,
    D: tl.constexpr,
    M: tl.constexpr,
    OUT: tl.constexpr,
    KIND: tl.constexpr,
    MASKED: tl.constexpr,
    PACKED: tl.constexpr,
    ENDS: tl.constexpr,
    EXACT: tl.constexpr,
    C: tl.constexpr,
    BD: tl.constexpr,
    BM: tl.constexpr,
    PRECISION: tl.constexpr,
    SUMS: tl.constexpr,
):
    """See the top of the file. Grid (rows or sequences · H · blocks, parts of `length` tokens).

    x_start, n_start, x_end, n_end are contiguous [rows · H, parts, D, M] and [rows · H, parts, D]; out, y, den and
    gamma contiguous over [B, T, H]; the last axis of q, k, v, g has stride 1. den is written by y, gamma by dq;
    EXACT: y writes its result to `y` too, in float32.
    """
    FORWARDS: tl.constexpr = OUT == "y" or OUT == "dq" or OUT == "s"
    OVER_D: tl.constexpr = OUT == "dq" or OUT == "dk"
    HAS_G: tl.constexpr = OUT != "y" and OUT != "s"
    HAS_GAMMA: tl.constexpr = OUT == "dk" or OUT == "r"
    part = tl.program_id(1)
    block = tl.program_id(0) % blocks
    head = tl.program_id(0) // blocks  # index over rows and heads
    h = (head % H).to(tl.int64)
    b = (head // H).to(tl.int64)
    if PACKED:
        # Clamped, so that wrong offsets cannot address memory outside the tensors.
        first = tl.minimum(tl.maximum(tl.load(offsets + b), 0), T).to(tl.int32)
        last = tl.minimum(tl.maximum(tl.load(offsets + b + 1), 0), T).to(tl.int32)
        b = b * 0
    else:
        first = part * length
        last = tl.minimum(first + length, T)
    if OVER_D:
        d = block * BD + tl.arange(0, BD)
        m = tl.arange(0, BM)
    else:
        d = tl.arange(0, BD)
        m = block * BM + tl.arange(0, BM)
    in_d = (d < D)[None, :]
    in_m = (m < M)[None, :]
    in_x = (d < D)[:, None] & in_m
    q += b * q_b + h * q_h
    k += b * k_b + h * k_h
    v += b * v_b + h * v_h
    if HAS_G:
        g += b * g_b + h * g_h
    if MASKED:
        mask += b * mask_b

    state = head.to(tl.int64) * parts + part
    of_x = state * D * M + d[:, None] * M + m[None, :]
    of_n = state * D + d
    if OUT == "s" or OUT == "r":
        x = tl.zeros([BD, BM], tl.float32)
        n = tl.zeros([BD], tl.float32)
    else:
        x = tl.load(x_start + of_x, mask=in_x, other=0.0)
        n = tl.load(n_start + of_n, mask=d < D, other=0.0)

    c = tl.arange(0, C)
    earlier = c[:, None] >= c[None, :]  # a key not after the query
    chunks = tl.cdiv(tl.maximum(last - first, 0), C)
    for index in range(0, chunks):
        at = index if FORWARDS else chunks - 1 - index
        t = first + at * C + c
        here = t < last
        t = t.to(tl.int64)
        row = (b * T + t) * H + h
        valid = here
        if MASKED:
            valid = here & (tl.load(mask + t * mask_t, mask=here, other=0) != 0)
        if OUT != "s":
            query = _features(q, t, q_t, d, here[:, None] & in_d, KIND)
        if OUT != "r":
            key = _features(k, t, k_t, d, valid[:, None] & in_d, KIND)
        if OUT != "r" and OUT != "dv":
            value = _rows(v, t, v_t, m, valid[:, None] & in_m)
        if HAS_G:
            # 1/den multiplies the other factor: g must not be rounded, because g·v and g·y may cancel.
            above = _rows(g, t, g_t, m, here[:, None] & in_m)
            inverse = (1.0 / tl.load(den + row, mask=here, other=1.0))[:, None]
        if HAS_GAMMA:
            share = tl.load(gamma + row, mask=here, other=0.0)

        if OUT == "y":
            if PRECISION == "bf16":
                query = query.to(tl.bfloat16).to(tl.float32)
            weights = tl.where(earlier, _product(query, tl.trans(key), PRECISION), 0.0)
            if PRECISION == "bf16":
                # Numerator and denominator use the same rounded weights, so that their rounding cancels for few keys.
                weights = weights.to(tl.bfloat16).to(tl.float32)
            before = tl.sum(query * n[None, :], 1)
            below = tl.sum(weights, 1) + before + eps
            spread, centre = _centred(x, n)
            # A product with 0 does not remove a NaN, so values of later tokens that are not finite are left out of it.
            finite = tl.abs(value) < float("inf")
            result = _product(query, spread, PRECISION) + before[:, None] * centre[None, :]
            result += _product(weights, tl.where(finite, value, 0.0), PRECISION)
            if tl.sum(tl.where(finite, 0, 1)) > 0:
                result += tl.cumsum(tl.where(finite, 0.0, value), 0)
            result = result / below[:, None]
            tl.store(out + row[:, None] * M + m[None, :], result.to(out.dtype.element_ty), mask=here[:, None] & in_m)
            if EXACT:
                tl.store(y + row[:, None] * M + m[None, :], result, mask=here[:, None] & in_m)
            tl.store(den + row, below, mask=here & (block == 0))
        if OUT == "dq":
            share = -tl.sum(above * _rows(y, row, M, m, here[:, None] & in_m) * inverse, 1)
            tl.store(gamma + row, share, mask=here & (block == 0))
        if OVER_D:
            weights = _product(above, tl.trans(value), PRECISION) * inverse + share[:, None]
            weights = tl.where(earlier, weights, 0.0)
            if OUT == "dq":
                spread, centre = _centred(x, n)
                result = _product(above, tl.trans(spread), PRECISION) * inverse + _product(weights, key, PRECISION)
                share += tl.sum(above * centre[None, :] * inverse, 1)
                result = _sloped(result + share[:, None] * n[None, :], query, KIND)
            else:
                # R·v + w cancel where the values have a mean: it is multiplied in float32.
                centre = tl.sum(value, 0) / C
                result = _product(value - centre[None, :], tl.trans(x), PRECISION)
                result += _product(tl.trans(weights), query, PRECISION)
                total = n + tl.sum(x * centre[None, :], 1)
                # An invalid key has φ = 0 here, and no gradient.
                result = tl.where(valid[:, None], _sloped(result + total[None, :], key, KIND), 0.0)
            tl.store(out + row[:, None] * D + d[None, :], result.to(out.dtype.element_ty), mask=here[:, None] & in_d)
        if OUT == "dv":
            weights = tl.where(earlier, _product(query, tl.trans(key), PRECISION), 0.0) * inverse
            result = _product(key, x, PRECISION) + _product(tl.trans(weights), above, PRECISION)
            result = tl.where(valid[:, None], result, 0.0)
            tl.store(out + row[:, None] * M + m[None, :], result.to(out.dtype.element_ty), mask=here[:, None] & in_m)

        if FORWARDS:
            x += _product(tl.trans(key), value, SUMS)
            n += tl.sum(key, 0)
        else:
            x += _product(tl.trans(query * inverse), above, SUMS)
            if HAS_GAMMA:
                n += tl.sum(query * share[:, None], 0)

    if ENDS:
        # S is written by all blocks of y, R by those of dv; z by the first block of y, w by all of dk.
        if OUT != "dk":
            tl.store(x_end + of_x, x, mask=in_x)
        if OUT == "dk":
            tl.store(n_end + of_n, n, mask=d < D)
        elif OUT != "dv":
            tl.store(n_end + of_n, n, mask=(d < D) & (block == 0))


@triton.jit
def running(totals, start, end, parts, size, BACKWARDS: tl.constexpr, BLOCK: tl.constexpr):
    """Replace totals [heads, parts, size] by start [heads, size] plus the sum of the parts before; end: after the last.

    Grid (heads, blocks of size). torch.cumsum on a GPU may sum in another order at each call.
    """
    head = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    so_far = tl.load(start + head * size + column, mask=inside, other=0.0)
    for index in range(0, parts):
        part = parts - 1 - index if BACKWARDS else index
        at = totals + (head * parts + part) * size + column
        here = tl.load(at, mask=inside, other=0.0)
        tl.store(at, so_far, mask=inside)
        so_far += here
    tl.store(end + head * size + column, so_far, mask=inside)


@triton.jit
def step(
    q,
    k,
    v,
    mask,
    y,
    exact,
    den,
    s,
    z,
    s_end,
    z_end,
    eps,
    q_b,
    q_h,
    k_b,
    k_h,
    v_b,
    v_h,
    mask_b,
    H,
    blocks,
    D: tl.constexpr,
    M: tl.constexpr,
    KIND: tl.constexpr,
    MASKED: tl.constexpr,
    EXACT: tl.constexpr,
    BD: tl.constexpr,
    BM: tl.constexpr,
):
    """One token (eq. 18 to 20): S and z are read once and written once. Grid (B · H · blocks of M)."""
    block = tl.program_id(0) % blocks
    head = (tl.program_id(0) // blocks).to(tl.int64)
    b, h = head // H, head % H
    d = tl.arange(0, BD)
    m = block * BM + tl.arange(0, BM)
    in_d, in_m = d < D, m < M
    key_d, value_m = in_d, in_m
    if MASKED:
        valid = tl.load(mask + b * mask_b) != 0
        key_d, value_m = in_d & valid, in_m & valid
    query = tl.load(q + b * q_b + h * q_h + d, mask=in_d, other=0.0).to(tl.float32)
    query = tl.where(in_d, _phi(query, KIND), 0.0)
    key = tl.load(k + b * k_b + h * k_h + d, mask=key_d, other=0.0).to(tl.float32)
    key = tl.where(key_d, _phi(key, KIND), 0.0)
    value = tl.load(v + b * v_b + h * v_h + m, mask=value_m, other=0.0).to(tl.float32)

    of_x = head * D * M + d[:, None] * M + m[None, :]
    in_x = in_d[:, None] & in_m[None, :]
    x = tl.load(s + of_x, mask=in_x, other=0.0) + key[:, None] * value[None, :]
    n = tl.load(z + head * D + d, mask=in_d, other=0.0) + key
    below = tl.sum(query * n, 0) + eps
    result = tl.sum(query[:, None] * x, 0) / below
    tl.store(y + head * M + m, result.to(y.dtype.element_ty), mask=in_m)
    if EXACT:
        tl.store(exact + head * M + m, result, mask=in_m)
    tl.store(s_end + of_x, x, mask=in_x)
    if block == 0:
        tl.store(den + head, below)
        tl.store(z_end + head * D + d, n, mask=in_d)
