// A chunk of n tokens of one head of the gated delta rule. With the decay Λ_i = e^{g_1 + … + g_i} since the start of the
// chunk, λ_i = e^{g_{i+1} + … + g_n} up to its end and D_ij = e^{g_{j+1} + … + g_i} between two tokens i >= j,
//
//     Q̂ = Λ ⊙ Q      K̂ = Λ ⊙ K      K̃ = λ ⊙ K
//     QK_ij = q_i·(D_ij ⊙ k_j), j <= i      KK_ij = k_i·(D_ij ⊙ k_j), j < i
//     Y = V − K̂·S − KK·U      U = β ⊙ Y      (row after row: U takes part in the rows below it)
//     O = Q̂·S + QK·U          S ← Λ_n ⊙ S + K̃ᵀ·U
//
// which is the WY form with the system solved and not inverted. Decayed attention is U = V. With a decay per head, Λ, λ
// and D are numbers, and QK and KK products of matrices. With one per channel they are vectors, and QK and KK are made
// pair by pair, with products of e^g along the chunk. So every exponent is at most 0, and a decay of −∞ is a factor 0.
#pragma once
#include <type_traits>

#include "delta/delta.h"
#include "simd/product.h"
#include "simd/rows.h"

namespace mnemos {
namespace {

constexpr i64 HEAD_CHUNK = 32, CHANNEL_CHUNK = 16;  // tokens, for a decay per head and per channel
constexpr i64 BLOCK = 8;                            // rows of a triangular matrix that are multiplied at once
constexpr float LEAST_DECAY = -200;                 // e^−200 is 0; keeps sums of decays finite

template <bool CHANNELS>
constexpr i64 CHUNK = CHANNELS ? CHANNEL_CHUNK : HEAD_CHUNK;

ALWAYS V lanes_from(i64 from) {
    V x;
    for (i64 i = 0; i < W; i++) x[i] = (float)(from + i);
    return x;
}

// f(rows), which is known when this is compiled if all rows of a block are there.
template <class F>
ALWAYS void with_rows(i64 rows, F f) {
    if (rows == BLOCK)
        f(std::integral_constant<i64, BLOCK>{});
    else
        f(rows);
}

// C [n, columns] += A·B, where of A [n, n] only what is on and below its diagonal counts (LOWER), or on and above it.
// The rest is not multiplied: 0 times a NaN of a later token would reach an earlier one.
template <bool LOWER>
void triangular(i64 n, i64 columns, Left a, const float* b, i64 ldb, float* c, i64 ldc) {
    for (i64 i = 0; i < n; i += BLOCK) {
        i64 rows = least(BLOCK, n - i), k = LOWER ? 0 : i + rows, inner = LOWER ? i : n - k;
        const float* corner = a.data + i * (a.row + a.k);
        with_rows(rows, [&](auto given) ALWAYS_LAMBDA {
            const i64 count = given;
            for (i64 m = i * ldb, to = i * ldc; m < i * ldb + columns; m += W, to += W) {
                V from[BLOCK];
#pragma GCC unroll 8
                for (i64 r = 0; r < count; r++) from[r] = load<V>(b + m + r * ldb);
#pragma GCC unroll 8
                for (i64 r = 0; r < count; r++) {
                    V sum = load<V>(c + to + r * ldc);
#pragma GCC unroll 8
                    for (i64 j = LOWER ? 0 : r; j < (LOWER ? r + 1 : count); j++)
                        sum += all(corner[r * a.row + j * a.k]) * from[j];
                    store(c + to + r * ldc, sum);
                }
            }
        });
        if (inner > 0)
            product(rows, inner, columns, {a.data + i * a.row + k * a.k, a.row, a.k}, plain(b + k * ldb, ldb),
                    c + i * ldc, ldc, true);
    }
}

struct Widths {
    i64 D, M, Dp, Mp, Dw, Mw;  // as given, of rows of buffers, in whole vectors

    explicit Widths(const Delta& c)
        : D(c.D), M(c.M), Dp(rounded(D, LANES)), Mp(rounded(M, LANES)), Dw(rounded(D, W)), Mw(rounded(M, W)) {}
};

// Buffers of a chunk. Rows of tokens are Dp, Mp or C numbers apart.
template <bool CHANNELS>
struct Chunk {
    static constexpr i64 C = CHUNK<CHANNELS>;
    Widths w;
    i64 n = 0;
    float *q, *k, *u, *y;              // scale·Q, K, U, and Y of the delta rule, as in the equations
    float *from_q, *from_k, *to_end;   // Q̂, −K̂, K̃
    float *qk, *kk;                    // QK and −KK [C, C], zeros where a pair has no part
    float *start, *end, *last, *pair;  // Λ, λ; Λ_n [Dp]; D [C, C], or e^g [C, Dp]
    float* beta;

    Chunk(const Widths& w, Taker& take) : w(w) {
        i64 gates = CHANNELS ? C * w.Dp : C;
        q = take(C * w.Dp), k = take(C * w.Dp), u = take(C * w.Mp), y = take(C * w.Mp);
        from_q = take(C * w.Dp), from_k = take(C * w.Dp), to_end = take(C * w.Dp);
        qk = take(C * C), kk = take(C * C), beta = take(C);
        start = take(gates), end = take(gates), last = take(w.Dp), pair = take(CHANNELS ? C * w.Dp : C * C);
    }

    static ALWAYS V gate(const float* gates, i64 i, i64 d, i64 ld) {
        return CHANNELS ? load<V>(gates + i * ld + d) : all(gates[i]);
    }

    // Decays from their logarithms [n, Dp], or [n].
    void decays(const float* g) {
        CHANNELS ? by_channel(g) : by_head(g);
        for (i64 i = 0; i < n; i++)
            for (i64 d = 0; d < w.Dw; d += W) {
                i64 at = i * w.Dp + d;
                V from = gate(start, i, d, w.Dp), key = load<V>(k + at);
                store(from_q + at, from * load<V>(q + at));
                store(from_k + at, -(from * key));
                store(to_end + at, gate(end, i, d, w.Dp) * key);
            }
    }
    void by_channel(const float* g) {
        for (i64 d = 0; d < w.Dw; d += W) {
            V since = all(1.0f), total = V{};
            for (i64 i = 0; i < n; i++) {
                V log = load<V>(g + i * w.Dp + d), e = exponential(log);
                since *= e, total += log;
                store(pair + i * w.Dp + d, e), store(start + i * w.Dp + d, since);
            }
            store(last + d, exponential(total));  // the state passes by every chunk: no rounding errors of n factors
            V left = all(1.0f);
            for (i64 i = n - 1; i >= 0; i--) {
                store(end + i * w.Dp + d, left);
                left *= load<V>(pair + i * w.Dp + d);
            }
        }
    }
    void by_head(const float* g) {
        float high[C] = {}, low[C] = {};  // the sums in two parts: a difference of large ones must be exact
        double sum = 0;
        for (i64 i = 0; i < n; i++) sum += g[i], high[i] = (float)sum, low[i] = (float)(sum - high[i]);
        V total = all(high[n - 1]), rest = all(low[n - 1]);
        for (i64 j = 0; j < C; j += W) {
            V to = load<V>(high + j), more = load<V>(low + j), lane = lanes_from(j);
            store(start + j, exponential(to)), store(end + j, exponential((total - to) + (rest - more)));
            for (i64 i = 0; i < n; i++) {
                V at = V{};
                if (i >= j) {
                    at = (all(high[i]) - to) + (all(low[i]) - more);
                    at = lane > (float)i ? V{} : exponential(at > 0.0f ? V{} : at);
                }
                store(pair + i * C + j, at);
            }
        }
        for (i64 d = 0; d < w.Dw; d += W) store(last + d, all(start[n - 1]));
    }

    // QK and −KK; `turned` [D, C] is for Kᵀ, or decayed keys.
    void pairs(bool delta, float* turned) {
        if constexpr (CHANNELS) return by_pair(turned);
        transpose(k, w.Dp, n, w.D, w.Dp, turned, C, 1);
        product(n, w.D, n, rows_of(q, w.Dp), plain(turned, C), qk, C, false);
        if (delta) product(n, w.D, n, rows_of(k, w.Dp), plain(turned, C), kk, C, false);
        for (i64 j = 0; j < rounded(n, W); j += W) {
            V lane = lanes_from(j);
            for (i64 i = 0; i < n; i++) {
                i64 at = i * C + j;
                V by = load<V>(pair + at);
                store(qk + at, by == 0.0f ? V{} : by * load<V>(qk + at));
                if (delta) store(kk + at, lane < (float)i ? -(by * load<V>(kk + at)) : V{});
            }
        }
    }
    void by_pair(float* decayed) {
        for (i64 i = 0; i < C * C; i += W) store(qk + i, V{}), store(kk + i, V{});
        for (i64 j = 0; j < n; j++) {
            V of_q[C] = {}, of_k[C] = {};
            float sums_q[C], sums_k[C];
            for (i64 d = 0; d < w.Dw; d += W) {
                V key = load<V>(k + j * w.Dp + d);
                store(decayed + d, key), of_q[j] += key * load<V>(q + j * w.Dp + d);
            }
            for (i64 i = j + 1; i < n; i++) {
                V a = V{}, b = V{};
                for (i64 d = 0; d < w.Dw; d += W) {
                    i64 at = i * w.Dp + d;
                    V key = load<V>(decayed + d) * load<V>(pair + at);
                    store(decayed + d, key);
                    a += key * load<V>(q + at), b += key * load<V>(k + at);
                }
                of_q[i] = a, of_k[i] = b;
            }
            sums<C>(of_q, sums_q), sums<C>(of_k, sums_k);
            for (i64 i = j; i < n; i++) qk[i * C + j] = sums_q[i], kk[i * C + j] = -sums_k[i];
        }
    }

    // U of values that lie in `y`, and with β in place of them Y. Without β they lie in u, and stay there.
    void solve(bool delta, const float* S) {
        if (!delta) return;
        product(n, w.D, w.M, rows_of(from_k, w.Dp), plain(S, w.Mp), y, w.Mp, true);
        for (i64 i = 0; i < n; i += BLOCK) {
            i64 rows = least(BLOCK, n - i);
            if (i) product(rows, i, w.M, rows_of(kk + i * C, C), plain(u, w.Mp), y + i * w.Mp, w.Mp, true);
            with_rows(rows, [&](auto given) ALWAYS_LAMBDA {
                const i64 count = given;
                for (i64 m = i * w.Mp; m < i * w.Mp + w.Mw; m += W) {
                    V known[BLOCK];
#pragma GCC unroll 8
                    for (i64 r = 0; r < count; r++) {
                        const float* by = kk + (i + r) * C + i;
                        V sum = load<V>(y + m + r * w.Mp);
#pragma GCC unroll 8
                        for (i64 j = 0; j < r; j++) sum += all(by[j]) * known[j];
                        known[r] = sum * beta[i + r];
                        store(y + m + r * w.Mp, sum), store(u + m + r * w.Mp, known[r]);
                    }
                }
            });
        }
    }

    void outputs(const float* S, float* o) const {
        product(n, w.D, w.M, rows_of(from_q, w.Dp), plain(S, w.Mp), o, w.Mp, false);
        triangular<true>(n, w.M, rows_of(qk, C), u, w.Mp, o, w.Mp);
    }

    // From S to the state after the chunk, `to`, which may be S.
    void advance(const float* S, float* to) const {
        for (i64 d = 0; d < w.D; d++) {
            V by = all(last[d]);
            for (i64 m = 0; m < w.Mw; m += W) store(to + d * w.Mp + m, by * load<V>(S + d * w.Mp + m));
        }
        product(w.D, n, w.M, columns_of(to_end, w.Dp), plain(u, w.Mp), to, w.Mp, true);
    }
};

}  // namespace
}  // namespace mnemos
