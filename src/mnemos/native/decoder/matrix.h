// Matrix times a few vectors, and what stands between matrices: the norm and the activation.
#pragma once
#include <cmath>
#include <type_traits>
#include <utility>

#include "simd/activation.h"
#include "decoder/decode.h"
#include "simd/vector.h"

namespace mnemos {
namespace {

constexpr i64 UNIT = 16;                   // rows of a matrix that a thread has at least: a cache line of y
constexpr i64 ROWS = WIDTH >= 16 ? 4 : 2;  // rows of a matrix by COLUMNS vectors at once: what the registers hold
constexpr i64 COLUMNS = 5;                 // a beam of five is one pass over the weights
constexpr i64 ROWS_OF_FEW = 4;             // rows by one or two vectors
constexpr i64 LINE = 16;                   // numbers that come from memory together
constexpr i64 AHEAD = 8192;                // floats that weights are asked for ahead of their use, to come into the second cache

// A weight in bfloat16. Rows of such weights have a multiple of PAIRS numbers, zeros at their end, and every PAIRS of them
// lie in the order 0, PAIRS/2, 1, PAIRS/2 + 1, ...: then a vector of 32-bit words holds two vectors of neighbouring
// weights, and a shift and a mask make floats of them. To widen 16-bit numbers in their natural order takes twice the
// instructions, and more time than reading the weights.
struct Bfloat16 {
    std::uint16_t bits;
};
constexpr i64 PAIRS = 32;

// Numbers of a row of `in` weights where they lie.
template <class T>
constexpr i64 stored(i64 in) {
    return std::is_same<T, Bfloat16>::value ? (in + PAIRS - 1) / PAIRS * PAIRS : in;
}

// W weights of other types as floats.
typedef std::int8_t Bytes __attribute__((vector_size(WIDTH)));
ALWAYS V widened(const float* from) { return load<V>(from); }
ALWAYS V widened(const std::int8_t* from) {
#if defined(__AVX512F__)  // GCC would convert one number after the other
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)from)));
#elif defined(__AVX2__)
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)from)));
#else
    return __builtin_convertvector(load<Bytes>(from), V);
#endif
}
template <class T>
ALWAYS V widened(const T* from, i64 n) {  // the first n, and zeros
    T parts[W] = {};
    std::memcpy(parts, from, n * sizeof(T));
    return widened(parts);
}

// to[c, r] = Σ_k w[r, k]·x[c, k], and `ahead`, as much as the R rows, is asked for, if it is not null.
template <i64 R, i64 C, class T>
ALWAYS void products(const T* w, i64 in, const float* x, i64 ldx, float* to, const char* ahead) {
    constexpr i64 size = sizeof(T), line = LINE * sizeof(float) / size;
    i64 ld = stored<T>(in);
    V total[C * R];
    for (i64 i = 0; i < C * R; i++) total[i] = V{};
    auto ask = [&](i64 k) ALWAYS_LAMBDA {
        if (ahead && (line <= W || k % line == 0))
            for (i64 r = 0; r < R; r++) __builtin_prefetch(ahead + (r * ld + k) * size, 0, 2);
    };
    auto add = [&](auto read, const V* a, i64 k) ALWAYS_LAMBDA {
        for (i64 c = 0; c < C; c++) {
            V b = read(x + c * ldx + k, k);
            for (i64 r = 0; r < R; r++) total[c * R + r] += a[r] * b;
        }
    };
    auto whole = [](auto* from, i64) ALWAYS_LAMBDA { return widened(from); };
    auto rest = [&](auto* from, i64 k) ALWAYS_LAMBDA { return widened(from, in - k < 0 ? 0 : least(W, in - k)); };
    V a[R];
    i64 k = 0;
    if constexpr (std::is_same<T, Bfloat16>::value) {
        V b[R];
        auto pairs = [&](auto read) ALWAYS_LAMBDA {
            ask(k);
            for (i64 i = 0; i < PAIRS / 2; i += W) {
                for (i64 r = 0; r < R; r++) {
                    U both = load<U>(w + r * ld + k + 2 * i);
                    a[r] = (V)(both << 16), b[r] = (V)(both & 0xffff0000u);
                }
                add(read, a, k + i), add(read, b, k + PAIRS / 2 + i);
            }
        };
        for (; k + PAIRS <= in; k += PAIRS) pairs(whole);
        if (k < in) pairs(rest);
    } else {
        auto vector = [&](auto read) ALWAYS_LAMBDA {
            for (i64 r = 0; r < R; r++) a[r] = read(w + r * ld + k, k);
            ask(k);
            add(read, a, k);
        };
        for (; k + W <= in; k += W) vector(whole);
        if (k < in) vector(rest);
    }
    sums<C * R>(total, to);
}

// Rows of numbers, [.., ld].
struct Vectors {
    float* data;
    i64 ld;
    float* operator[](i64 row) const { return data + row * ld; }
};

// Weights [out, in] and bias, of which a thread has the rows [from, to).
struct Matrix {
    Affine m;
    i64 out, in, from, to;

    Matrix(const Affine& m, i64 out, i64 in, i64 me, i64 all) : m(m), out(out), in(in) {
        i64 units = rounded(out, UNIT) / UNIT;
        from = least(units * me / all * UNIT, out), to = least(units * (me + 1) / all * UNIT, out);
    }
    template <class T>
    const T* row(i64 n) const {
        return (const T*)m.weight + n * stored<T>(in);
    }
};

// f(n) of a number n, 1 to COLUMNS, that is known when this is compiled.
template <i64 N = COLUMNS, class F>
ALWAYS void with_constant(i64 n, F f) {
    if constexpr (N == 1) {
        f(std::integral_constant<i64, 1>{});
    } else {
        if (n == N)
            f(std::integral_constant<i64, N>{});
        else
            with_constant<N - 1>(n, f);
    }
}

// y[c, n] = x[c]·w[n] + bias[n] (+ more[c, n], which may be y) of R rows n of w, for all `count` vectors x, in passes
// of nearly equal numbers of vectors. As many weights from `ahead` on are asked for, a part in every pass: all at once
// would be waited for.
template <i64 R, class T>
void strip(const Matrix& w, i64 n, i64 count, Vectors x, Vectors y, const Vectors* more, const char* ahead) {
    float bias[R], scale[R], found[COLUMNS * R];
    for (i64 r = 0; r < R; r++) bias[r] = w.m.bias ? w.m.bias[n + r] : 0;
    for (i64 r = 0; r < R; r++) scale[r] = w.m.scale ? w.m.scale[n + r] : 1;
    constexpr i64 line = LINE * sizeof(float);
    i64 size = R * stored<T>(w.in) * (i64)sizeof(T), passes = (count + COLUMNS - 1) / COLUMNS, asked = 0;
    i64 each = rounded(size / passes + 1, line);
    for (i64 p = 0; p < passes; p++) {
        i64 c = count * p / passes;
        if (passes > 1)
            for (i64 end = least(asked + each, size); asked < end; asked += line)
                __builtin_prefetch(ahead + asked, 0, 2);
        with_constant(count * (p + 1) / passes - c, [&](auto columns) {
            constexpr i64 C = decltype(columns)::value;
            products<R, C>(w.row<T>(n), w.in, x[c], x.ld, found, passes == 1 ? ahead : nullptr);
            for (i64 i = 0; i < C; i++)
                for (i64 r = 0; r < R; r++)
                    y[c + i][n + r] = found[i * R + r] * scale[r] + bias[r] + (more ? (*more)[c + i][n + r] : 0);
        });
    }
}

// This thread's rows, read once; what it reads after them begins at `next`.
template <class T>
void multiply(const Matrix& w, i64 count, Vectors x, Vectors y, const Vectors* more, const T* next) {
    auto ahead = [&](i64 n) {
        constexpr i64 far = AHEAD * sizeof(float) / sizeof(T);
        i64 beyond = (n - w.to) * stored<T>(w.in) + far;
        return (const char*)(beyond < 0 ? w.row<T>(n) + far : next + beyond);
    };
    i64 n = w.from;
    if (count <= 2)
        for (; n + ROWS_OF_FEW <= w.to; n += ROWS_OF_FEW) strip<ROWS_OF_FEW, T>(w, n, count, x, y, more, ahead(n));
    for (; n + ROWS <= w.to; n += ROWS) strip<ROWS, T>(w, n, count, x, y, more, ahead(n));
    for (; n < w.to; n++) strip<1, T>(w, n, count, x, y, more, ahead(n));
}

// (x − mean)/√(variance + eps)·weight + bias; of an RMSNorm, x/√(mean of x² + eps)·weight.
void normalise(const Affine& m, bool rms, i64 width, double eps, const float* x, float* y) {
    V total = V{};
    i64 i = 0, rest = width % W;
    for (; i + W <= width; i += W) total += load<V>(x + i);
    if (rest) total += first(x + i, rest);
    float mean = rms ? 0 : sum(total) / width;
    total = V{};
    for (i = 0; i + W <= width; i += W) total += (load<V>(x + i) - mean) * (load<V>(x + i) - mean);
    float squares = sum(total);
    for (; i < width; i++) squares += (x[i] - mean) * (x[i] - mean);
    float scale = 1 / std::sqrt(squares / width + (float)eps);
    const float* gain = (const float*)m.weight;
    for (i = 0; i + W <= width; i += W) {
        V found = (load<V>(x + i) - mean) * scale * load<V>(gain + i);
        store(y + i, m.bias ? found + load<V>(m.bias + i) : found);
    }
    for (; i < width; i++) y[i] = (x[i] - mean) * scale * gain[i] + (m.bias ? m.bias[i] : 0);
}

template <class F>
ALWAYS void for_each(F value, float* x, i64 n) {
    i64 i = 0;
    for (; i + W <= n; i += W) store(x + i, value(load<V>(x + i)));
    V last = value(first(x + i, n - i));
    std::memcpy(x + i, &last, (n - i) * sizeof(float));
}

void activate(i64 activation, float* x, i64 n) {
    if (activation == GELU) for_each([](V v) ALWAYS_LAMBDA { return gelu(v); }, x, n);
    if (activation == SILU) for_each([](V v) ALWAYS_LAMBDA { return v * logistic(v); }, x, n);
    if (activation == RECTIFY) for_each([](V v) ALWAYS_LAMBDA { return v < 0.0f ? V{} : v; }, x, n);
}

}  // namespace
}  // namespace mnemos
