// The gradients of a chunk (delta_chunk.h), from those of its outputs, dO, and of the state after it, dS:
//
//     E = QKᵀ·dO + K̃·dS − KKᵀ·dY      dY = β ⊙ E      (from the last row up)      dβ_i = e_i·y_i      dV = dY
//     dQ̂ = dO·Sᵀ      dK̂ = −dY·Sᵀ      dK̃ = U·dSᵀ      X = dO·Uᵀ, j <= i      Z = −dY·Uᵀ, j < i
//     dq_i = Λ_i ⊙ dq̂_i + Σ_j X_ij D_ij ⊙ k_j
//     dk_i = Λ_i ⊙ dk̂_i + λ_i ⊙ dk̃_i + Σ_j Z_ij D_ij ⊙ k_j + Σ_j D_ji ⊙ (X_ji q_j + Z_ji k_j)
//     dS ← Λ_n ⊙ dS + Q̂ᵀ·dO − K̂ᵀ·dY
//
// Of g_t the gradient is the sum of all terms that pass from before t to t or beyond it, each of which has its decay:
//
//     dg_t = Σ_{i >= t} (q̂_i ⊙ dq̂_i + k̂_i ⊙ dk̂_i) + Σ_{j < t} k̃_j ⊙ dk̃_j + Λ_n ⊙ (S ⊙ dS)·1
//          + Σ_{j < t <= i} D_ij ⊙ k_j ⊙ (X_ij q_i + Z_ij k_i)
//
// A cumulative sum of q ⊙ dq − k ⊙ dk is the same without rounding, but under strong decay it is a small difference of
// large sums: here nothing is added and taken off again.
#pragma once
#include "delta/chunk.h"

namespace mnemos {
namespace {

template <bool CHANNELS>
struct Gradient {
    using Tokens = Chunk<CHANNELS>;
    static constexpr i64 C = Tokens::C;
    Widths w;
    float *g, *e, *dy;                     // dO, E, dY
    float *from_q, *from_k, *to_end;       // dQ̂, −dK̂, dK̃
    float *x, *z;                          // X and −Z [C, C]
    float *u_turned, *s_turned, *d_turned; // Uᵀ, Sᵀ, dSᵀ
    float *across, *decay;                 // Λ_n ⊙ (S ⊙ dS)·1 [Dp]; dg [C, Dp], or [C]
    float *dq, *dk, *dv, *beta;

    Gradient(const Widths& w, Taker& take) : w(w) {
        g = take(C * w.Mp), e = take(C * w.Mp), dy = take(C * w.Mp);
        from_q = take(C * w.Dp), from_k = take(C * w.Dp), to_end = take(C * w.Dp);
        x = take(C * C), z = take(C * C);
        u_turned = take(w.M * C), s_turned = take(w.M * w.Dp), d_turned = take(w.M * w.Dp);
        across = take(w.Dp), decay = take(CHANNELS ? C * w.Dp : C);
        dq = take(C * w.Dp), dk = take(C * w.Dp), beta = take(C);
        dv = e;
    }

    // The gradients of chunk c, which began with S; dS becomes that of S.
    void compute(const Tokens& c, bool delta, bool decays, const float* S, float* dS) {
        i64 n = c.n;
        values(c, delta, dS);
        transpose(S, w.Mp, w.D, w.M, w.Mp, s_turned, w.Dp, 1);
        transpose(dS, w.Mp, w.D, w.M, w.Mp, d_turned, w.Dp, 1);
        transpose(c.u, w.Mp, n, w.M, w.Mp, u_turned, C, 1);
        product(n, w.M, w.D, rows_of(g, w.Mp), plain(s_turned, w.Dp), from_q, w.Dp, false);
        product(n, w.M, w.D, rows_of(c.u, w.Mp), plain(d_turned, w.Dp), to_end, w.Dp, false);
        product(n, w.M, n, rows_of(g, w.Mp), plain(u_turned, C), x, C, false);
        if (delta) {
            product(n, w.M, w.D, rows_of(dv, w.Mp), plain(s_turned, w.Dp), from_k, w.Dp, false);
            product(n, w.M, n, rows_of(dv, w.Mp), plain(u_turned, C), z, C, false);
        }
        before(c, delta, decays, S, dS);
        if (decays && !CHANNELS) by_head(c, delta);
        keys(c, delta);
        if constexpr (CHANNELS) by_channel(c, delta);
        product(w.D, n, w.M, columns_of(c.from_q, w.Dp), plain(g, w.Mp), dS, w.Mp, true);
        if (delta) product(w.D, n, w.M, columns_of(c.from_k, w.Dp), plain(dv, w.Mp), dS, w.Mp, true);
    }

   private:
    // E, dY and dβ.
    void values(const Tokens& c, bool delta, const float* dS) {
        i64 n = c.n;
        product(n, w.D, w.M, rows_of(c.to_end, w.Dp), plain(dS, w.Mp), e, w.Mp, false);
        triangular<false>(n, w.M, columns_of(c.qk, C), g, w.Mp, e, w.Mp);
        dv = delta ? dy : e;
        if (!delta) return;
        for (i64 i = (n - 1) / BLOCK * BLOCK; i >= 0; i -= BLOCK) {
            i64 rows = least(BLOCK, n - i), below = i + rows;
            if (below < n)
                product(rows, n - below, w.M, columns_of(c.kk + below * C + i, C), plain(dy + below * w.Mp, w.Mp),
                        e + i * w.Mp, w.Mp, true);
            with_rows(rows, [&](auto given) ALWAYS_LAMBDA {
                const i64 count = given;
                V dots[BLOCK] = {};
                for (i64 m = i * w.Mp; m < i * w.Mp + w.Mw; m += W) {
                    V known[BLOCK];
#pragma GCC unroll 8
                    for (i64 r = count - 1; r >= 0; r--) {
                        const float* by = c.kk + i * C + i + r;
                        V sum = load<V>(e + m + r * w.Mp);
#pragma GCC unroll 8
                        for (i64 j = r + 1; j < count; j++) sum += all(by[j * C]) * known[j];
                        known[r] = sum * c.beta[i + r];
                        dots[r] += sum * load<V>(c.y + m + r * w.Mp);
                        store(dy + m + r * w.Mp, known[r]);
                    }
                }
                for (i64 r = 0; r < count; r++) beta[i + r] = sum(dots[r]);
            });
        }
    }

    // dS decays, and the parts of dg that pass by the chunk's ends, of which dq and dk begin with theirs.
    void before(const Tokens& c, bool delta, bool decays, const float* S, float* dS) {
        V passed = V{};
        for (i64 d = 0; d < w.D; d++) {
            V by = all(c.last[d]), dot = V{};
            for (i64 m = 0; m < w.Mw; m += W) {
                V now = by * load<V>(dS + d * w.Mp + m);
                dot += now * load<V>(S + d * w.Mp + m);
                store(dS + d * w.Mp + m, now);
            }
            if (CHANNELS && decays) across[d] = sum(dot);
            passed += dot;
        }
        if (CHANNELS && decays) {
            for (i64 d = w.D; d < w.Dw; d++) across[d] = 0;
            for (i64 d = 0; d < w.Dw; d += W) {
                V total = load<V>(across + d);
                for (i64 i = 0; i < c.n; i++) {
                    store(decay + i * w.Dp + d, total);
                    total += load<V>(c.to_end + i * w.Dp + d) * load<V>(to_end + i * w.Dp + d);
                }
                total = V{};
                for (i64 i = c.n - 1; i >= 0; i--) {
                    total += read(c, delta, i, d);
                    store(decay + i * w.Dp + d, load<V>(decay + i * w.Dp + d) + total);
                }
            }
        } else if (decays) {
            float total = sum(passed), later[C];
            for (i64 i = 0; i < c.n; i++) {
                V from = V{}, to = V{};
                for (i64 d = 0; d < w.Dw; d += W) {
                    from += read(c, delta, i, d);
                    to += load<V>(c.to_end + i * w.Dp + d) * load<V>(to_end + i * w.Dp + d);
                }
                decay[i] = total, total += sum(to), later[i] = sum(from);
            }
            total = 0;
            for (i64 i = c.n - 1; i >= 0; i--) total += later[i], decay[i] += total;
        }
    }
    ALWAYS V read(const Tokens& c, bool delta, i64 i, i64 d) const {
        i64 at = i * w.Dp + d;
        V found = load<V>(c.from_q + at) * load<V>(from_q + at);
        return delta ? found + load<V>(c.from_k + at) * load<V>(from_k + at) : found;
    }

    // Pairs j < t <= i of dg_t: rows from the last one up are added, and of their sum what is left of t.
    void by_head(const Tokens& c, bool delta) {
        V below[C / W] = {};
        for (i64 t = c.n - 1; t > 0; t--) {
            V total = V{};
            for (i64 j = 0; j < t; j += W) {
                i64 at = t * C + j;
                V more = load<V>(x + at) * load<V>(c.qk + at);
                if (delta) more += load<V>(z + at) * load<V>(c.kk + at);
                V now = below[j / W] + more;
                below[j / W] = now = lanes_from(j) < (float)t ? now : V{};
                total += now;
            }
            decay[t] += sum(total);
        }
    }

    // dq and dk; with decays per channel without what passes between two tokens.
    void keys(const Tokens& c, bool delta) {
        i64 n = c.n;
        for (i64 i = 0; i < n; i++)
            for (i64 d = 0; d < w.Dw; d += W) {
                i64 at = i * w.Dp + d;
                V from = Tokens::gate(c.start, i, d, w.Dp), to = Tokens::gate(c.end, i, d, w.Dp);
                V key = to * load<V>(to_end + at);
                if (delta) key -= from * load<V>(from_k + at);
                store(dq + at, from * load<V>(from_q + at)), store(dk + at, key);
            }
        if constexpr (!CHANNELS) {
            for (i64 j = 0; j < rounded(n, W); j += W)
                for (i64 i = 0; i < n; i++) {
                    i64 at = i * C + j;
                    V by = load<V>(c.pair + at);
                    store(x + at, by == 0.0f ? V{} : by * load<V>(x + at));
                    if (delta) store(z + at, lanes_from(j) < (float)i ? -(by * load<V>(z + at)) : V{});
                }
            triangular<true>(n, w.D, rows_of(x, C), c.k, w.Dp, dq, w.Dp);
            triangular<false>(n, w.D, columns_of(x, C), c.q, w.Dp, dk, w.Dp);
            if (!delta) return;
            triangular<true>(n, w.D, rows_of(z, C), c.k, w.Dp, dk, w.Dp);
            triangular<false>(n, w.D, columns_of(z, C), c.k, w.Dp, dk, w.Dp);
        }
    }

    // What passes between two tokens, with its decays: of dq, dk and dg.
    void by_channel(const Tokens& c, bool delta) {
        for (i64 j = 0; j < c.n; j++)
            for (i64 d = 0; d < w.Dw; d += W) {
                i64 own = j * w.Dp + d;
                V key = load<V>(c.k + own), passed = all(1.0f), decays[C];
                for (i64 i = j + 1; i < c.n; i++) decays[i] = passed *= load<V>(c.pair + i * w.Dp + d);
                V same = all(x[j * C + j]), total = V{}, dkey = load<V>(dk + own) + same * load<V>(c.q + own);
                store(dq + own, load<V>(dq + own) + same * key);
                for (i64 i = c.n - 1; i > j; i--) {
                    i64 at = i * w.Dp + d;
                    V of_q = all(x[i * C + j]), more = of_q * load<V>(c.q + at), by = decays[i] * key;
                    store(dq + at, load<V>(dq + at) + of_q * by);
                    if (delta) {
                        V of_k = all(-z[i * C + j]);
                        more += of_k * load<V>(c.k + at);
                        store(dk + at, load<V>(dk + at) + of_k * by);
                    }
                    dkey += decays[i] * more, total += by * more;
                    store(decay + at, load<V>(decay + at) + total);
                }
                store(dk + own, dkey);
            }
    }
};

}  // namespace
}  // namespace mnemos
