// What one call of the kernels of linear attention is given, and what all kernels share.
#pragma once
#include <cstdint>

namespace mnemos {

using i64 = std::int64_t;

// A struct that Python packs, every field a word of 64 bits or a record of such words; and the text of its fields, which
// `layout` of native/__init__.py compares with Python's list when the library is loaded.
#define RECORD(NAME, ...)      \
    struct NAME {              \
        __VA_ARGS__            \
    };                         \
    inline constexpr char NAME##_fields[] = #__VA_ARGS__;

enum Type : i64 { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2 };
enum Map : i64 { IDENTITY = 0, ELU = 1, RELU = 2 };

// [B, T, H, width]: an address and three strides in numbers; the last stride is 1.
RECORD(Rows,
    char* data;
    i64 b, t, h;
)

// [B, T], not 0 = True; null: nowhere is.
RECORD(Marks,
    const unsigned char* data;
    i64 b, t;
)

RECORD(Call,
    i64 B, T, H, D, M, type, map, threads;
    Rows q, k, v, y;
    const unsigned char* mask;  // [B, T], not 0 = valid; null: all are
    i64 mask_b, mask_t;
    const float *s, *z;      // [B, H, D, M] and [B, H, D]: before the first token; null: zeros
    float *s_end, *z_end;    // after the last one
    float* den;              // [B, T, H]: written by the forward (null: not wanted), read by the backward
    Rows g, dq, dk, dv;      // upstream gradient of y; gradients
    const float *gs, *gz;    // upstream gradients of s_end and z_end; both null: zeros
    float *ds, *dz;          // gradients of s and z; both null: not wanted
)

// What a processor's variant offers. The functions return 0, or 1 where there is no memory.
struct Kernels {
    int (*forward)(const Call&, double eps);
    int (*backward)(const Call&);
    void (*map)(const float* x, float* y, i64 n, i64 map);
};

}  // namespace mnemos
