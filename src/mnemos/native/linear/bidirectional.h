// What one call of linear attention that is not causal is given.
#pragma once
#include "call.h"

namespace mnemos {

// y_t = φ(q_t)·S / (φ(q_t)·z + eps) with S = s + Σ φ(k_n)·v_nᵀ and z = z_0 + Σ φ(k_n) over all N keys.
RECORD(Everything,
    i64 B, T, N, H, D, M, type, map, threads;  // T queries, N keys
    Rows q, k, v, y;
    const unsigned char* mask;  // [B, N], not 0 = valid; null: all are
    i64 mask_b, mask_t;
    const float *s, *z;    // [B, H, D, M] and [B, H, D]: in the forward those before the keys (null: zeros), then S and z
    float *s_end, *z_end;  // S and z, written by the forward
    float* den;            // [B, T, H]: written by the forward (null: not wanted), read by the backward
    Rows g, dq, dk, dv;    // upstream gradient of y; gradients
    const float *gs, *gz;  // upstream gradients of s_end and z_end; both null: zeros
    float *ds, *dz;        // gradients of s and z; both null: not wanted
)

// What a processor's variant offers. It returns 0, or 1 where there is no memory.
struct Bidirectional {
    int (*run)(const Everything&, double eps, bool backward);
};

}  // namespace mnemos
