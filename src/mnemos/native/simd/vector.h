// WIDTH floats at a time, in the compiler's own vectors: one source for every processor.
//
// Everything here is local to its file, which is compiled once for every processor: a function that files shared might
// be kept in the variant that another processor cannot run.
#pragma once
#ifdef __AVX2__
#include <immintrin.h>
#endif

#include <cstring>
#include <utility>

#include "call.h"

namespace mnemos {
namespace {

constexpr i64 W = WIDTH;
typedef float V __attribute__((vector_size(4 * WIDTH)));
typedef std::int32_t I __attribute__((vector_size(4 * WIDTH)));
typedef std::uint32_t U __attribute__((vector_size(4 * WIDTH)));
typedef std::uint16_t Half __attribute__((vector_size(2 * WIDTH)));

#define ALWAYS inline __attribute__((always_inline))
#define ALWAYS_LAMBDA __attribute__((always_inline))

template <class A>
ALWAYS A load(const void* from) {
    A x;
    std::memcpy(&x, from, sizeof x);
    return x;
}

template <class A>
ALWAYS void store(void* to, A x) {
    std::memcpy(to, &x, sizeof x);
}

ALWAYS V all(float x) { return x - V{}; }

// Lane i of the vectors a and b, taken for one of 2·W numbers.
template <i64... LANE>
ALWAYS V pick(V a, V b, std::integer_sequence<i64, LANE...>) {
#ifdef __clang__
    return __builtin_shufflevector(a, b, LANE...);
#else
    return __builtin_shuffle(a, b, I{LANE...});
#endif
}

// Every lane and the one N before or after it, added.
template <i64 N, i64... LANE>
ALWAYS V across(V x, std::integer_sequence<i64, LANE...>) {
    return x + pick(x, x, std::integer_sequence<i64, (LANE ^ N)...>{});
}

template <i64 N = W / 2>
ALWAYS float sum(V x) {
    if constexpr (N == 0)
        return x[0];
    else
        return sum<N / 2>(across<N>(x, std::make_integer_sequence<i64, W>{}));
}

// The first n of W numbers, and zeros.
ALWAYS V first(const float* from, i64 n) {
    float parts[W] = {};
    std::memcpy(parts, from, n * sizeof(float));
    return load<V>(parts);
}

// e^x for x <= 0, subnormal results and NaN included: 2^n·e^r with |r| <= ln(2)/2, and a minimax polynomial for e^r.
ALWAYS V exponential(V x) {
    x = x < -104.0f ? all(-104.0f) : x;  // rounds to 0; keeps the powers below in range
    const V magic = all(12582912.0f);    // 1.5·2^23: adding it rounds to an integer
    V shifted = x * 1.44269504089f + magic;
    V n = shifted - magic;
    V r = x - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    V p = all(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = (p * r) * r + r + 1.0f;
#ifdef __AVX512F__
    return _mm512_scalef_ps(p, n);
#else
    I whole = (I)shifted - (I)magic;
    I half = whole >> 1;  // 2^n alone may be too small for a float
    V low = (V)((half + 127) << 23), high = (V)((whole - half + 127) << 23);
    return p * low * high;
#endif
}

template <i64 MAP>
ALWAYS V apply(V x) {
    if (MAP == ELU) return x > 0.0f ? x + 1.0f : exponential(x > 0.0f ? V{} : x);
    if (MAP == RELU) return x < 0.0f ? V{} : x;
    return x;
}

// dφ/dx, read off φ(x).
ALWAYS V slope(V phi, i64 map) {
    if (map == ELU) return phi > 1.0f ? all(1.0f) : phi;
    if (map == RELU) return phi > 0.0f ? all(1.0f) : V{};
    return all(1.0f);
}

template <i64 TYPE>
ALWAYS V widen(const void* from) {
    if (TYPE == FLOAT32) return load<V>(from);
    U x = __builtin_convertvector(load<Half>(from), U);
    if (TYPE == BFLOAT16) return (V)(x << 16);
    // float16: the exponent is moved by an addition; a subnormal number, which has none, counts units of 2^-24. (A
    // multiplication by 2^112 would move both, but as float32 a subnormal one is denormal, and flushed: see flush.h.)
    U magnitude = x & 0x7fffu, moved = magnitude << 13;
    U tiny = (U)(magnitude < 0x400u), special = (U)(magnitude >= 0x7c00u);
    U units = (U)(__builtin_convertvector((I)magnitude, V) * 5.9604644775390625e-8f);
    U value = (tiny & units) | (~tiny & (moved + (112u << 23)));
    return (V)((special & (moved | 0x7f800000u)) | (~special & value) | ((x & 0x8000u) << 16));
}

template <i64 TYPE>
ALWAYS void narrow(void* to, V value) {
    if (TYPE == FLOAT32) return store(to, value);
#ifdef __AVX512BF16__
    if (TYPE == BFLOAT16) return store(to, _mm512_cvtneps_pbh((__m512)value));
#endif
    U x = (U)value;
    U sign = (x >> 16) & 0x8000u, magnitude = x & 0x7fffffffu;
    U nan = (U)(magnitude > 0x7f800000u), out;
    if (TYPE == BFLOAT16) {
        out = (magnitude + 0x7fffu + ((magnitude >> 16) & 1u)) >> 16;
        out = (nan & 0x7fc0u) | (~nan & out);
    } else {
        U normal = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
        U tiny = (U)((V)magnitude + 0.5f) - 0x3f000000u;  // the sum is rounded where a subnormal float16 ends
        U small = (U)(magnitude < 0x38800000u), large = (U)(magnitude >= 0x477ff000u);
        out = (small & tiny) | (~small & normal);
        out = (large & 0x7c00u) | (~large & out);
        out = (nan & 0x7e00u) | (~nan & out);
    }
    store(to, __builtin_convertvector(out | sign, Half));
}

ALWAYS i64 rounded(i64 n, i64 to) { return (n + to - 1) / to * to; }
ALWAYS i64 least(i64 a, i64 b) { return a < b ? a : b; }
ALWAYS i64 bytes_of(i64 type) { return type == FLOAT32 ? 4 : 2; }

// Both vectors hold sums of N lanes beginning at every 2·N-th lane: the sums of 2·N, a's and then b's.
template <i64 N, i64... J>
ALWAYS V fold(V a, V b, std::integer_sequence<i64, J...>) {
    return pick(a, b, std::integer_sequence<i64, (J / N * 2 * N + J % N)...>{}) +
           pick(a, b, std::integer_sequence<i64, (J / N * 2 * N + J % N + N)...>{});
}

// The sum of each of COUNT vectors, added up in the same order for any COUNT; x is used up.
template <i64 COUNT, i64 LEFT = COUNT, i64 N = W / 2>
ALWAYS void sums(V* x, float* to) {
    if constexpr (N == 0) {
        std::memcpy(to, x, COUNT * sizeof(float));
    } else {
        for (i64 i = 0; i < (LEFT + 1) / 2; i++)
            x[i] = fold<N>(x[2 * i], x[least(2 * i + 1, LEFT - 1)], std::make_integer_sequence<i64, W>{});
        sums<COUNT, (LEFT + 1) / 2, N / 2>(x, to);
    }
}

// n rows of `width` numbers as floats, φ applied; `to` [n, ld] is 0 behind a row, and wherever a row is not valid.
template <i64 TYPE, i64 MAP>
void fetch(float* to, i64 ld, const char* from, i64 stride, i64 n, i64 width, const unsigned char* mask, i64 mask_t) {
    constexpr i64 size = TYPE == FLOAT32 ? 4 : 2;
    for (i64 t = 0; t < n; t++, to += ld, from += stride * size) {
        if (mask && !mask[t * mask_t]) {
            std::memset(to, 0, ld * sizeof(float));
            continue;
        }
        i64 i = 0;
        for (; i + W <= width; i += W) store(to + i, apply<MAP>(widen<TYPE>(from + i * size)));
        if (i < width) {
            char rest[W * size] = {};
            std::memcpy(rest, from + i * size, (width - i) * size);
            store(to + i, apply<MAP>(widen<TYPE>(rest)));
            std::memset(to + width, 0, (i + W - width) * sizeof(float));
            i += W;
        }
        for (; i < ld; i += W) store(to + i, V{});
    }
}

// The other way: n rows [n, ld], each multiplied by its `scale` if there is one.
template <i64 TYPE>
void deliver(const float* from, i64 ld, char* to, i64 stride, i64 n, i64 width, const float* scale) {
    constexpr i64 size = TYPE == FLOAT32 ? 4 : 2;
    for (i64 t = 0; t < n; t++, from += ld, to += stride * size) {
        V by = all(scale ? scale[t] : 1.0f);
        i64 i = 0;
        for (; i + W <= width; i += W) narrow<TYPE>(to + i * size, load<V>(from + i) * by);
        if (i < width) {
            char rest[W * size];
            narrow<TYPE>(rest, load<V>(from + i) * by);
            std::memcpy(to + i * size, rest, (width - i) * size);
        }
    }
}

}  // namespace
}  // namespace mnemos
