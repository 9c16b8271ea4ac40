// What one call of the gated cache's kernels is given: the update and the read. All numbers are float32.
#pragma once
#include "call.h"

namespace mnemos {

// y = weight·x + bias: weight [out, in] without gaps, bias [out].
RECORD(Linear,
    const float *weight, *bias;
)

// The gradients of a `Linear`, like it.
RECORD(LinearGradient,
    float *weight, *bias;
)

// Sources [B, T, width], or with H heads [B, T, H, width]: an address and strides in numbers; the last stride is 1.
RECORD(Tokens,
    const float* data;
    i64 b, t, h;
)

// C_t = (1 − g_u) ⊙ C + g_u ⊙ C̃ of every row, and its mean over the rows that have a valid token.
RECORD(Update,
    i64 B, T, slots, width, threads;
    i64 resampled;              // not 0: token i is slot i, and T = slots
    Tokens source;              // [B, T, width]
    const unsigned char* mask;  // [B, T], not 0 = valid; null: all are
    i64 mask_b, mask_t;
    const float* cache;  // [slots, width], or one such matrix per row, cache_b apart
    i64 cache_b;         // 0: all rows have the same
    Linear update, reset, candidate;  // weights [width, 2·width]
    Linear norm;                      // gain and shift of the candidate's layer norm; null: a linear candidate
    float *next, *mean, *rows;  // C_t [B, slots, width]; their mean, and of how many rows (given to the backward)
    float* kept;                 // gates and candidates for the backward, [B, slots, 3·width in LANES]; null: again
    // What is null is not wanted, or zero where it is a gradient that comes in.
    const float *g_next, *g_mean;
    float *d_source, *d_cache;  // [B, T, width] without gaps; like the cache
    LinearGradient d_update, d_reset, d_candidate, d_norm;  // all or none; d_norm is null without a norm
)

// y = (1 − σ(λ))·own + σ(λ)·softmax(q·kᵀ/√d)·v for queries of x and keys and values of a cache.
RECORD(Reading,
    i64 B, caches, T, slots, width, heads, values, threads;  // caches: 1 or B; values: channels per head
    Tokens x;                                                // [B, T, width]
    const float* cache;                                      // [caches, slots, width]
    Linear query, key, value;
    Tokens own;        // [B, T, heads, values]; data null: y = softmax(..)·v
    const float* mix;  // λ [heads]
    float* y;          // [B, T, heads, values]
    float* kept;       // q, k, v for the backward; null: not wanted
    float* weights;    // of the values, for the backward: [B, heads, slots, T in LANES]; null: computed again
    // Backward; all of it is wanted, but for d_cache and those of `own`, which may be null.
    Tokens g;  // of y
    float *d_x, *d_cache;
    LinearGradient d_query, d_key, d_value;
    float *d_own, *d_mix;
)

// What a processor's variant offers. The functions return 0, or 1 where there is no memory.
struct Cache {
    int (*update)(const Update&);
    int (*update_backward)(const Update&);
    int (*read)(const Reading&);
    int (*read_backward)(const Reading&);
};

}  // namespace mnemos
