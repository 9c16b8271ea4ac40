// What one call of the kernels of the selective scan is given.
#pragma once
#include "call.h"

namespace mnemos {

// x, y, g and dx are Rows [B, T, 1, C] of `type`; dt is one of floats, and so are `write` and `read`, [B, T, 1, N].
RECORD(Selective,
    i64 B, T, C, N, type, threads, keep;  // keep: tokens between two states that are kept
    Rows x, dt, write, read, y;           // write: B of the equation, read: C
    const float *a, *skip;                // A [C, N] and D [C]; no D: null
    Marks valid, resets;                  // without `valid` all tokens are
    const float* s;                       // [B, C, N]: before the first token; null: zeros
    float* s_end;                         // after the last one
    float* states;  // [B, (T − 1) / keep, groups, N, GROUP]: before every keep-th token but the first; null: not wanted
    // Backward. Gradients have no gaps; those of `write` and `read` are [B, T, N].
    Rows g, dx;
    float *d_dt, *d_a, *d_write, *d_read, *d_skip;
    const float* gs;  // of s_end; null: zeros
    float* ds;        // null: not wanted
)

// What a processor's variant offers. The functions return 0, or 1 where there is no memory.
struct SelectiveScan {
    int (*forward)(const Selective&);
    int (*backward)(const Selective&);
};

}  // namespace mnemos
