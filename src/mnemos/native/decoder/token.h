// What one call of the kernel of single tokens is given: a recurrent layer of a language model between its projections.
#pragma once
#include "call.h"

namespace mnemos {

// Numbers [B, heads, n], as a projection wrote them: those of key head j begin at data + row·b + j·h.
RECORD(Part,
    const float* data;
    i64 b, h;
)

RECORD(Token,
    i64 B, heads, H, D, M, threads;  // key heads, value heads (a multiple), widths of keys and of values
    i64 scan;                        // not 0: Mamba-2, else the gated delta rule
    Part q, k, v;                    // before the convolution; a part of v has the value heads of a key head
    i64 at_q, at_k, at_v;            // channels of the convolution at which they begin
    // The convolution: the last K inputs [B, C, K], written; weights [C, W]; null: no bias.
    i64 C, K, W;
    float* window;
    const float *weight, *bias;
    // Gates. The logarithm of a decay is −e^rate·softplus(a + shift), or given as `decay` [B, H, D].
    Part a, b;
    const float *decay, *rate, *shift, *skip;  // skip [H]: y + skip·x, Mamba-2's D; null: none
    // The outputs' norm; null: none. In the delta rule a head's y/√(mean y² + ε)·norm·a(z), a(z) = z·σ(z), or σ(z) if
    // `sigmoid`. In Mamba-2 u/√(mean u² + ε)·norm, u = y·z·σ(z), with means over `group` channels.
    Part z;
    const float* norm;
    i64 sigmoid, group;
    float *s, *y;  // [B, H, D, M], in Mamba-2 [B, H, M, D], written; y [B, H, M]
)

// y = x/√(mean x² + ε)·(offset + weight), rows of n numbers without gaps.
RECORD(Norm,
    i64 rows, n, threads;
    const float *x, *weight;
    float* y;
)

struct TokenKernel {
    int (*run)(const Token&, double beta, double eps);  // returns 1 where there is no memory; beta: β of a logistic 1
    void (*norm)(const Norm&, double offset, double eps);
};

}  // namespace mnemos
