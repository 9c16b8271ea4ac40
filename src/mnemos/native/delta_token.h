// The gated delta rule token by token (SPEC: u = β(v − S'ᵀk), S = S' + k·uᵀ, y = Sᵀq with S' = e^g ⊙ S), for decoding.
//
// The state is read once for S'ᵀk and S'ᵀq together, y = S'ᵀq + (q·k)·u, and once more, in the first cache, for its update.
#pragma once
#include "delta.h"
#include "vector.h"

namespace mnemos {
namespace {

constexpr i64 VECTORS = 4;  // columns of the state at once

// A token of one head: q, k and e^g [D], both times e^g, v [M] and β; q·k.
struct Token {
    const float *k, *decay, *decayed_q, *decayed_k, *v;
    float beta, dot;
    bool delta;
};

// One of `A`, N of them beside each other, at column m of from [D, M] and to [D, M], which may be the same.
template <i64 N, class A>
ALWAYS void columns(const Token& x, i64 D, i64 M, i64 m, const float* from, float* to, float* y) {
    constexpr i64 width = sizeof(A) / sizeof(float);
    A by_k[N] = {}, by_q[N] = {};
    for (i64 d = 0; d < D; d++)
        for (i64 j = 0; j < N; j++) {
            A s = load<A>(from + d * M + m + j * width);
            by_k[j] += x.decayed_k[d] * s, by_q[j] += x.decayed_q[d] * s;
        }
    A u[N];
    for (i64 j = 0; j < N; j++) {
        u[j] = load<A>(x.v + m + j * width);
        if (x.delta) u[j] = x.beta * (u[j] - by_k[j]);
        store(y + m + j * width, by_q[j] + x.dot * u[j]);
    }
    for (i64 d = 0; d < D; d++)
        for (i64 j = 0; j < N; j++) {
            i64 at = d * M + m + j * width;
            store(to + at, x.decay[d] * load<A>(from + at) + x.k[d] * u[j]);
        }
}

void token(const Token& x, i64 D, i64 M, const float* from, float* to, float* y) {
    i64 m = 0;
    for (; m + VECTORS * W <= M; m += VECTORS * W) columns<VECTORS, V>(x, D, M, m, from, to, y);
    for (; m + W <= M; m += W) columns<1, V>(x, D, M, m, from, to, y);
    for (; m < M; m++) columns<1, float>(x, D, M, m, from, to, y);
}

}  // namespace
}  // namespace mnemos
