// What one call of the kernels of the short causal convolution is given.
#pragma once
#include "call.h"

namespace mnemos {

// x, y, g and dx are Rows [B, T, 1, C].
RECORD(Convolution,
    i64 B, T, C, width, type, threads, silu;
    Rows x, y;
    const float *weight, *bias;  // [C, width] and [C]; no bias: null
    Marks valid, resets;         // without `valid` all tokens are
    const char *s;               // [B, width − 1, C]: inputs before the first token; null: zeros
    char *s_end;                 // after the last one
    // Backward.
    Rows g, dx;
    float *d_weight, *d_bias;    // [width, C] and [C]
    const char *gs;              // of s_end; null: zeros
    char *ds;
)

// What a processor's variant offers. The functions return 0, or 1 where there is no memory.
struct ShortConvolution {
    int (*forward)(const Convolution&);
    int (*backward)(const Convolution&);
};

}  // namespace mnemos
