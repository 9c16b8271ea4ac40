// What one call of the kernels of the delta rule and of decayed attention is given.
#pragma once
#include "call.h"

namespace mnemos {

// Numbers [B, T, H], or [B, T, H, D] with a last stride of 1: an address and strides in numbers.
RECORD(Gates,
    const float* data;
    i64 b, t, h;
)

// Head h of the values has head h / (H / heads) of the queries and keys.
RECORD(Delta,
    i64 B, T, heads, H, D, M, type, threads;
    i64 channels;               // not 0: a decay per channel of the keys
    i64 keep;                   // tokens between two states that are kept, a multiple of 64
    Rows q, k, v, y;            // [B, T, heads, D] twice, [B, T, H, M] twice
    Gates decay, beta;          // logarithms <= 0, null: no decay; β, null: decayed attention, which corrects nothing
    const float* s;  // [B, H, D, M]: before the first token; null: zeros
    float* s_end;    // after the last one
    float* states;   // [B, H, (T − 1) / keep, D, M]: before every keep-th token but the first; null: not wanted
    // Backward. The heads that share a key head are divided into `parts`, each with gradients [B, T, heads, D] of its own,
    // one after the other: dq and dk. They are float32 if several heads share those of a key, else of the inputs' type.
    i64 parts;
    Rows g, dq, dk, dv;
    float *d_decay, *d_beta;  // without gaps; null where there is none
    const float* gs;          // of s_end; null: zeros
    float* ds;                // null: not wanted
)

// What a processor's variant offers. The functions return 0, or 1 where there is no memory.
struct DeltaRule {
    int (*forward)(const Delta&, double scale);
    int (*backward)(const Delta&, double scale);
};

}  // namespace mnemos
