// Products of bfloat16 factors with sums in float32, two numbers along the inner axis at a time: one instruction of
// AVX512-BF16 (vdpbf16ps) does the work of two multiply-adds of float32.
//
//     C[i, j] = start[j] + Σ_k A(i, k)·B(k, j)
//
// A word of 32 bits holds the numbers 2·k and 2·k + 1 along the inner axis. So a row of bfloat16 is a row of words of A as
// it lies in memory, and a row of words of B holds two rows of numbers. A factor that is rounded to bfloat16 has relative
// errors of up to 2⁻⁸, so what is common to all rows of C belongs into `start`, which is float32.
#pragma once
#include "simd/product.h"

namespace mnemos {
namespace {

typedef std::uint32_t Pair;

#ifdef __AVX512BF16__
constexpr bool DOTS = true;
ALWAYS V add_dots(V total, Pair a, U b) {
    return (V)_mm512_dpbf16_ps((__m512)total, (__m512bh)_mm512_set1_epi32((int)a), (__m512bh)b);
}
#else
constexpr bool DOTS = false;  // the same in more instructions than it saves: it is not used
ALWAYS V add_dots(V total, Pair a, U b) {
    V low = (V)((U{} + a) << 16), high = (V)((U{} + a) & 0xffff0000u);
    return total + low * (V)(b << 16) + high * (V)(b & 0xffff0000u);
}
#endif

template <i64 R, i64 N>
void piece_of_pairs(i64 inner, const Pair* a, i64 row, i64 step, const Pair* b, i64 ldb, const float* start, float* c,
                    i64 ldc) {
    V total[R][N];
#pragma GCC unroll 16
    for (i64 r = 0; r < R; r++)
#pragma GCC unroll 2
        for (i64 n = 0; n < N; n++) total[r][n] = start ? load<V>(start + n * W) : V{};
    for (i64 k = 0; k < inner; k++, a += step, b += ldb) {
        U from[N];
#pragma GCC unroll 2
        for (i64 n = 0; n < N; n++) from[n] = load<U>(b + n * W);
#pragma GCC unroll 16
        for (i64 r = 0; r < R; r++)
#pragma GCC unroll 2
            for (i64 n = 0; n < N; n++) total[r][n] = add_dots(total[r][n], a[r * row], from[n]);
    }
#pragma GCC unroll 16
    for (i64 r = 0; r < R; r++)
#pragma GCC unroll 2
        for (i64 n = 0; n < N; n++) store(c + r * ldc + n * W, total[r][n]);
}

typedef void (*PieceOfPairs)(i64, const Pair*, i64, i64, const Pair*, i64, const float*, float*, i64);

struct PiecesOfPairs {
    PieceOfPairs of[2][TALL];  // by vectors and rows, each less one
};

template <i64... R>
constexpr PiecesOfPairs pieces_of_pairs(std::integer_sequence<i64, R...>) {
    return {{{piece_of_pairs<R + 1, 1>...}, {piece_of_pairs<R + 1, 2>...}}};
}

constexpr PiecesOfPairs PIECES_OF_PAIRS = pieces_of_pairs(std::make_integer_sequence<i64, TALL>{});

struct LeftPairs {
    const Pair* words;
    i64 row, k;  // strides
};

// Words [inner, columns], and the row that every row of the product begins with (null: zeros).
struct RightPairs {
    Pair* words;
    float* start;
};

// `inner` counts words; C [rows, columns] has rows of `columns` numbers.
void product(i64 rows, i64 inner, i64 columns, LeftPairs a, RightPairs b, float* c) {
    i64 count = (rows + TALL - 1) / TALL;  // of pieces of nearly equal height
    for (i64 j = 0; j < columns; j += PANEL) {
        const PieceOfPairs* height = PIECES_OF_PAIRS.of[columns - j > W];
        for (i64 p = 0; p < count; p++) {
            i64 from = rows * p / count, n = rows * (p + 1) / count - from;
            height[n - 1](inner, a.words + from * a.row, a.row, a.k, b.words + j, columns,
                          b.start ? b.start + j : nullptr, c + from * columns + j, columns);
        }
    }
}

// Words that hold two rows each of a matrix [rows, columns], whose columns are whole vectors.
void pack(const float* from, i64 rows, i64 columns, Pair* to) {
    for (i64 i = 0; i < rows; i += 2, from += 2 * columns, to += columns)
        for (i64 j = 0; j < columns; j += W) {
            Half low, high{};
            narrow<BFLOAT16>(&low, load<V>(from + j));
            if (i + 1 < rows) narrow<BFLOAT16>(&high, load<V>(from + columns + j));
            store(to + j, __builtin_convertvector(low, U) | __builtin_convertvector(high, U) << 16);
        }
}

// Words of a row of n numbers less `shift`; n is in whole vectors.
ALWAYS void pack_row(const float* from, i64 n, float shift, Pair* to) {
    for (i64 i = 0; i < n; i += W) narrow<BFLOAT16>((std::uint16_t*)to + i, load<V>(from + i) - shift);
}

// The right factor x [rows, columns] for rows of a left factor that are less `shift`.
void pack_shifted(const float* x, i64 rows, i64 columns, float shift, RightPairs to) {
    pack(x, rows, columns, to.words);
    for (i64 j = 0; j < columns; j += W) {
        V sum{};
        for (i64 i = 0; i < rows; i++) sum += load<V>(x + i * columns + j);
        store(to.start + j, sum * shift);
    }
}

// x [rows, columns] less z ⊗ mean, with the `mean` [columns] that makes the squares of the rest least.
void centre(float* x, i64 rows, i64 columns, const float* z, float* mean) {
    float squares = 0;
    for (i64 i = 0; i < rows; i++) squares += z[i] * z[i];
    for (i64 j = 0; j < columns; j += W) {
        V sum{};
        for (i64 i = 0; i < rows; i++) sum += load<V>(x + i * columns + j) * z[i];
        sum = squares > 0.0f ? sum * (1 / squares) : V{};
        store(mean + j, sum);
        for (i64 i = 0; i < rows; i++) {
            float* at = x + i * columns + j;
            store(at, load<V>(at) - sum * z[i]);
        }
    }
}

// to[i] = Σ_j mean[j]·(x[i, j] − x[i, j] in bfloat16)
void lost(const float* x, i64 rows, i64 columns, const float* mean, float* to) {
    for (i64 i = 0; i < rows; i++, x += columns) {
        V total{};
        for (i64 j = 0; j < columns; j += W) {
            Half bits;
            narrow<BFLOAT16>(&bits, load<V>(x + j));
            total += load<V>(mean + j) * (load<V>(x + j) - widen<BFLOAT16>(&bits));
        }
        to[i] = sum(total);
    }
}

}  // namespace
}  // namespace mnemos
