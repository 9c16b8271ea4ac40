// The gated delta rule token by token for decoding: S' = e^g ⊙ S, u = β(v − S'ᵀk), S = S' + k·uᵀ.
//
// The state is read once for S'ᵀk and S'ᵀq together, y = Sᵀq = S'ᵀq + (q·k)·u, and once more for its update. Some of
// its columns stay in the first cache while all tokens pass by.
#pragma once
#include "delta/delta.h"
#include "simd/vector.h"

namespace mnemos {
namespace {

constexpr i64 VECTORS = 4;  // columns of the state at once

// Tokens of a head: k, e^g, and both of q and k times e^g [n, ld]; v and y [n, ldv]; β and q·k [n].
struct Few {
    i64 n, ld, ldv;
    bool delta;
    const float *k, *decay, *decayed_q, *decayed_k, *v, *beta, *dots;
    float* y;
};

// Columns m to m + N·(numbers of an A) of from [D, M] and to [D, M], which may be the same.
template <i64 N, class A>
ALWAYS void columns(const Few& x, i64 D, i64 M, i64 m, const float* from, float* to) {
    constexpr i64 width = sizeof(A) / sizeof(float);
    for (i64 t = 0; t < x.n; t++, from = to) {
        const float *k = x.k + t * x.ld, *decay = x.decay + t * x.ld;
        const float *decayed_k = x.decayed_k + t * x.ld, *decayed_q = x.decayed_q + t * x.ld;
        A by_k[N] = {}, by_q[N] = {}, u[N];
        for (i64 d = 0; d < D; d++)
            for (i64 j = 0; j < N; j++) {
                A s = load<A>(from + d * M + m + j * width);
                by_k[j] += decayed_k[d] * s, by_q[j] += decayed_q[d] * s;
            }
        for (i64 j = 0; j < N; j++) {
            i64 at = t * x.ldv + m + j * width;
            u[j] = load<A>(x.v + at);
            if (x.delta) u[j] = x.beta[t] * (u[j] - by_k[j]);
            store(x.y + at, by_q[j] + x.dots[t] * u[j]);
        }
        for (i64 d = 0; d < D; d++)
            for (i64 j = 0; j < N; j++) {
                i64 at = d * M + m + j * width;
                store(to + at, decay[d] * load<A>(from + at) + k[d] * u[j]);
            }
    }
}

void one_by_one(const Few& x, i64 D, i64 M, const float* from, float* to) {
    i64 m = 0;
    for (; m + VECTORS * W <= M; m += VECTORS * W) columns<VECTORS, V>(x, D, M, m, from, to);
    for (; m + W <= M; m += W) columns<1, V>(x, D, M, m, from, to);
    for (; m < M; m++) columns<1, float>(x, D, M, m, from, to);
}

}  // namespace
}  // namespace mnemos
