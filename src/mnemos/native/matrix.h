// Matrix times a few vectors, and what stands between matrices: the norm and the activation.
#pragma once
#include <cmath>
#include <type_traits>
#include <utility>

#include "activation.h"
#include "decode.h"
#include "vector.h"

#define ALWAYS_LAMBDA __attribute__((always_inline))

namespace mnemos {
namespace {

constexpr i64 UNIT = 16;                   // rows of a matrix that a thread has at least: a cache line of y
constexpr i64 ROWS = WIDTH >= 16 ? 4 : 2;  // rows of a matrix by vectors at once: what the registers hold
constexpr i64 COLUMNS = 4;
constexpr i64 LINE = 16;     // numbers that come from memory together
constexpr i64 AHEAD = 8192;  // numbers that weights are asked for ahead of their use, to come into the second cache

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
            x[i] = fold<N>(x[2 * i], x[LEFT == 1 ? 0 : 2 * i + 1], std::make_integer_sequence<i64, W>{});
        sums<COUNT, (LEFT + 1) / 2, N / 2>(x, to);
    }
}

// to[c, r] = Σ_k w[r, k]·x[c, k], and `ahead` [R, in] is asked for, if it is not null.
template <i64 R, i64 C>
ALWAYS void products(const float* w, i64 in, const float* x, i64 ldx, float* to, const float* ahead) {
    V total[C * R];
    for (i64 i = 0; i < C * R; i++) total[i] = V{};
    auto add = [&](auto read, i64 k) {
        V a[R];
        for (i64 r = 0; r < R; r++) a[r] = read(w + r * in + k);
        if (ahead)
            for (i64 r = 0; r < R; r++) __builtin_prefetch(ahead + r * in + k, 0, 2);
        for (i64 c = 0; c < C; c++) {
            V b = read(x + c * ldx + k);
            for (i64 r = 0; r < R; r++) total[c * R + r] += a[r] * b;
        }
    };
    i64 k = 0;
    for (; k + W <= in; k += W) add([](const float* from) ALWAYS_LAMBDA { return load<V>(from); }, k);
    if (k < in) add([&](const float* from) ALWAYS_LAMBDA { return first(from, in - k); }, k);
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
    const float* row(i64 n) const { return m.weight + n * in; }
};

// y[c, n] = x[c]·w[n] + bias[n] (+ more[c, n], which may be y) of R rows n of w, for all `count` vectors x. As many
// weights from `ahead` on are asked for, a part in every pass over the rows: all at once would be waited for.
template <i64 R>
void strip(const Matrix& w, i64 n, i64 count, Vectors x, Vectors y, const Vectors* more, const float* ahead) {
    float bias[R], found[COLUMNS * R];
    for (i64 r = 0; r < R; r++) bias[r] = w.m.bias ? w.m.bias[n + r] : 0;
    i64 passes = count / COLUMNS + count % COLUMNS, asked = 0, each = rounded(R * w.in / passes + 1, LINE);
    auto pass = [&](auto columns, i64 c) {
        constexpr i64 C = decltype(columns)::value;
        if (passes > 1)
            for (i64 end = least(asked + each, R * w.in); asked < end; asked += LINE)
                __builtin_prefetch(ahead + asked, 0, 2);
        products<R, C>(w.row(n), w.in, x[c], x.ld, found, passes == 1 ? ahead : nullptr);
        for (i64 i = 0; i < C; i++)
            for (i64 r = 0; r < R; r++)
                y[c + i][n + r] = found[i * R + r] + bias[r] + (more ? (*more)[c + i][n + r] : 0);
    };
    i64 c = 0;
    for (; c + COLUMNS <= count; c += COLUMNS) pass(std::integral_constant<i64, COLUMNS>{}, c);
    for (; c < count; c++) pass(std::integral_constant<i64, 1>{}, c);
}

// This thread's rows, read once; what it reads after them begins at `next`.
void multiply(const Matrix& w, i64 count, Vectors x, Vectors y, const Vectors* more, const float* next) {
    auto ahead = [&](i64 n) {
        i64 beyond = (n - w.to) * w.in + AHEAD;
        return beyond < 0 ? w.row(n) + AHEAD : next + beyond;
    };
    i64 n = w.from;
    if (count < COLUMNS)
        for (; n + COLUMNS <= w.to; n += COLUMNS) strip<COLUMNS>(w, n, count, x, y, more, ahead(n));
    for (; n + ROWS <= w.to; n += ROWS) strip<ROWS>(w, n, count, x, y, more, ahead(n));
    for (; n < w.to; n++) strip<1>(w, n, count, x, y, more, ahead(n));
}

// (x − mean)/√(variance + eps)·weight + bias
void normalise(const Affine& m, i64 width, double eps, const float* x, float* y) {
    V total = V{};
    i64 i = 0, rest = width % W;
    for (; i + W <= width; i += W) total += load<V>(x + i);
    if (rest) total += first(x + i, rest);
    float mean = sum(total) / width;
    total = V{};
    for (i = 0; i + W <= width; i += W) total += (load<V>(x + i) - mean) * (load<V>(x + i) - mean);
    float squares = sum(total);
    for (; i < width; i++) squares += (x[i] - mean) * (x[i] - mean);
    float scale = 1 / std::sqrt(squares / width + (float)eps);
    for (i = 0; i + W <= width; i += W)
        store(y + i, (load<V>(x + i) - mean) * scale * load<V>(m.weight + i) + load<V>(m.bias + i));
    for (; i < width; i++) y[i] = (x[i] - mean) * scale * m.weight[i] + m.bias[i];
}

void activate(bool smooth, float* x, i64 n) {
    auto value = [&](V v) ALWAYS_LAMBDA { return smooth ? gelu(v) : v < 0.0f ? V{} : v; };
    i64 i = 0;
    for (; i + W <= n; i += W) store(x + i, value(load<V>(x + i)));
    V last = value(first(x + i, n - i));
    std::memcpy(x + i, &last, (n - i) * sizeof(float));
}

}  // namespace
}  // namespace mnemos
