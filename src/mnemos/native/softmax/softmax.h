// What one call of the kernels of softmax attention is given.
#pragma once
#include "call.h"

namespace mnemos {

// Head h of the queries has head h / (H / heads) of the keys and values. The T queries are the last of the S positions.
RECORD(Softmax,
    i64 B, T, S, heads, H, D, M, threads;
    i64 causal;    // not 0: no query reads a key behind it
    i64 window;    // if causal, keys that a query reads, its own the last of them; 0: all
    Rows q, k, v, y;  // [B, T, H, D], [B, S, heads, D], [B, S, heads, M], [B, T, H, M]
    Marks valid;      // keys [B, S] that are read
    float *lse, *top; // [B, H, T]: log Σ e^score of a query, infinity if it reads nothing, and the largest score
    // Backward. The heads that share a key head are divided into `parts`, each with gradients [B, S, heads, ·] of its own,
    // one after the other: dk and dv.
    i64 parts;
    const float *glse, *gtop;  // gradients of lse and top; null: zeros
    Rows g, dq, dk, dv;
)

// What a processor's variant offers. The functions return 0, or 1 where there is no memory.
struct SoftmaxAttention {
    int (*forward)(const Softmax&, double scale);
    int (*backward)(const Softmax&, double scale);
};

}  // namespace mnemos
