// Products of small matrices whose right factor is read a vector at a time, and their packing.
//
//     C[i, j] (+)= Σ_k A(i, k)·B(k, j)
//
// A number of A is multiplied with a vector of B's row, so A may have any two strides: its transpose costs nothing. B is
// read in panels of PANEL columns; a panel of a packed matrix is contiguous and stays in the first cache while the rows
// of A pass by. Columns are counted in whole vectors: what is beyond a matrix's width is computed and not used, so every
// buffer has a vector of slack at its end.
#pragma once
#include <atomic>
#include <cstdlib>
#include <memory>

#include "simd/vector.h"

namespace mnemos {
namespace {

constexpr i64 PANEL = 2 * WIDTH;
constexpr i64 TALL = WIDTH >= 16 ? 12 : 6;  // rows of A at once: 2·TALL sums must fit the registers
constexpr i64 LANES = 16;                   // buffers have rows of a multiple of this, for every kind of processor

struct Left {
    const float* data;
    i64 row, k;  // strides
};

struct Right {
    const float* data;
    i64 k, panel;  // strides of a row and of a panel
};

// A matrix as it lies in memory, rows `ld` apart.
ALWAYS Left rows_of(const float* data, i64 ld) { return {data, ld, 1}; }
ALWAYS Left columns_of(const float* data, i64 ld) { return {data, 1, ld}; }
ALWAYS Right plain(const float* data, i64 ld) { return {data, ld, PANEL}; }

template <i64 R, i64 N>
void piece(i64 inner, const float* a, i64 row, i64 step, const float* b, i64 ldb, float* c, i64 ldc, bool add) {
    V total[R][N];
#pragma GCC unroll 16
    for (i64 r = 0; r < R; r++)
#pragma GCC unroll 2
        for (i64 n = 0; n < N; n++) total[r][n] = add ? load<V>(c + r * ldc + n * W) : V{};
    for (i64 k = 0; k < inner; k++, a += step, b += ldb) {
        V from[N];
#pragma GCC unroll 2
        for (i64 n = 0; n < N; n++) from[n] = load<V>(b + n * W);
#pragma GCC unroll 16
        for (i64 r = 0; r < R; r++) {
            V by = all(a[r * row]);
#pragma GCC unroll 2
            for (i64 n = 0; n < N; n++) total[r][n] += by * from[n];
        }
    }
#pragma GCC unroll 16
    for (i64 r = 0; r < R; r++)
#pragma GCC unroll 2
        for (i64 n = 0; n < N; n++) store(c + r * ldc + n * W, total[r][n]);
}

typedef void (*Piece)(i64, const float*, i64, i64, const float*, i64, float*, i64, bool);

struct Pieces {
    Piece of[2][TALL];  // by vectors and rows, each less one
};

template <i64... R>
constexpr Pieces pieces(std::integer_sequence<i64, R...>) {
    return {{{piece<R + 1, 1>...}, {piece<R + 1, 2>...}}};
}

constexpr Pieces PIECES = pieces(std::make_integer_sequence<i64, TALL>{});

void product(i64 rows, i64 inner, i64 columns, Left a, Right b, float* c, i64 ldc, bool add) {
    i64 count = (rows + TALL - 1) / TALL;  // of pieces of nearly equal height
    for (i64 j = 0; j < columns; j += PANEL) {
        const Piece* height = PIECES.of[columns - j > W];
        for (i64 p = 0; p < count; p++) {
            i64 from = rows * p / count, n = rows * (p + 1) / count - from;
            height[n - 1](inner, a.data + from * a.row, a.row, a.k, b.data + j / PANEL * b.panel, b.k,
                          c + from * ldc + j, ldc, add);
        }
    }
}

// Swaps the off-diagonal squares of S numbers in every square of 2·S.
template <i64 S, i64... LANE>
ALWAYS void swap_squares(V& a, V& b, std::integer_sequence<i64, LANE...>) {
    V x = pick(a, b, std::integer_sequence<i64, (LANE & S ? W + LANE - S : LANE)...>{});
    b = pick(a, b, std::integer_sequence<i64, (LANE & S ? W + LANE : LANE + S)...>{});
    a = x;
}

// The transpose of W vectors.
template <i64 S = W / 2>
ALWAYS void turn(V* x) {
    if constexpr (S > 0) {
#pragma GCC unroll 16
        for (i64 i = 0; i < W; i++)
            if (!(i & S)) swap_squares<S>(x[i], x[i + S], std::make_integer_sequence<i64, W>{});
        turn<S / 2>(x);
    }
}

// to[j, i] = by·from[i, j] for n rows of `width` numbers, of which `readable` >= width may be read; zeros behind n up
// to whole vectors. Rows of `to` are ldt apart.
void transpose(const float* from, i64 ld, i64 n, i64 width, i64 readable, float* to, i64 ldt, float by) {
    V x[W];
    for (i64 i = 0; i < n; i += W)
        for (i64 j = 0; j < width; j += W) {
#pragma GCC unroll 16
            for (i64 r = 0; r < W; r++) {
                const float* at = from + (i + r) * ld + j;
                x[r] = i + r >= n ? V{} : (j + W <= readable ? load<V>(at) : first(at, readable - j)) * by;
            }
            turn(x);
            for (i64 r = 0; r < least(W, width - j); r++) store(to + (j + r) * ldt + i, x[r]);
        }
}

// A packed right factor [inner, columns]: panels of PANEL columns, row after row, zeros behind the last column.
struct Packed {
    float* data;
    i64 inner;

    static i64 size(i64 inner, i64 columns) { return rounded(columns, PANEL) * inner; }
    Right right() const { return {data, PANEL, inner * PANEL}; }
    float* at(i64 k, i64 column) const { return data + column / PANEL * inner * PANEL + k * PANEL + column % PANEL; }

    // Columns [from, from + outs) are the rows of a weight [outs, inner], its rows ld apart; `from` is in whole vectors.
    void put_turned(const float* weight, i64 ld, i64 outs, i64 from) const {
        for (i64 out = 0; out < outs; out += W)
            transpose(weight + out * ld, ld, least(W, outs - out), inner, inner, at(0, from + out), PANEL, 1);
    }
    // Rows [from, from + n) are those of a weight [n, columns].
    void put(const float* weight, i64 ld, i64 n, i64 columns, i64 from) const {
        for (i64 k = 0; k < n; k++)
            for (i64 j = 0; j < columns; j += W) {
                const float* row = weight + k * ld + j;
                store(at(from + k, j), j + W <= columns ? load<V>(row) : first(row, columns - j));
            }
    }
};

// A row of `width` numbers with zeros behind it up to `ld`, and back.
ALWAYS void fetch_row(float* to, i64 ld, const float* from, i64 width) {
    i64 i = 0;
    for (; i + W <= width; i += W) store(to + i, load<V>(from + i));
    if (i < width) store(to + i, first(from + i, width - i)), i += W;
    for (; i < ld; i += W) store(to + i, V{});
}
ALWAYS void deliver_row(const float* from, float* to, i64 width) {
    i64 i = 0;
    for (; i + W <= width; i += W) store(to + i, load<V>(from + i));
    if (i < width) std::memcpy(to + i, from + i, (width - i) * sizeof(float));
}
// The same of n rows, which are `stride` apart outside.
ALWAYS void fetch_rows(float* to, i64 ld, const float* from, i64 stride, i64 n, i64 width) {
    for (i64 i = 0; i < n; i++) fetch_row(to + i * ld, ld, from + i * stride, width);
}
ALWAYS void deliver_rows(const float* from, i64 ld, float* to, i64 stride, i64 n, i64 width) {
    for (i64 i = 0; i < n; i++) deliver_row(from + i * ld, to + i * stride, width);
}

// to += from
ALWAYS void add_to(float* to, const float* from, i64 n) {
    i64 i = 0;
    for (; i + W <= n; i += W) store(to + i, load<V>(to + i) + load<V>(from + i));
    for (; i < n; i++) to[i] += from[i];
}

// Asks for n numbers ahead of their use: rows of tokens lie too far apart for the processor to expect them.
ALWAYS void ask_for(const float* at, i64 n) {
    for (i64 i = 0; i < n; i += 16) __builtin_prefetch(at + i, 0, 2);
}

// Memory of n numbers. The last that was given back is kept for the next call: new pages from the system cost more than
// the work of a small call.
class Memory {
   public:
    explicit Memory(i64 n) {
        block = spare.exchange(nullptr);
        if (block && block->size >= n) return;
        std::free(block);
        block = (Block*)std::aligned_alloc(64, sizeof(Block) + rounded(n, 16) * sizeof(float));
        if (block) block->size = n;
    }
    ~Memory() {
        Block* kept = block;
        if (block && block->size <= MOST) kept = spare.exchange(block);
        std::free(kept);
    }
    Memory(const Memory&) = delete;

    float* numbers() const { return block ? (float*)(block + 1) : nullptr; }

   private:
    struct alignas(64) Block {
        i64 size;
    };
    static constexpr i64 MOST = 1 << 22;
    static inline std::atomic<Block*> spare{nullptr};
    Block* block;
};

// Takes buffers from one allocation, each followed by LANES numbers of slack; without an allocation it only counts.
struct Taker {
    float* base;
    i64 used;

    float* operator()(i64 n) {
        float* found = base ? base + used : nullptr;
        used += rounded(n, LANES) + LANES;
        return found;
    }
    Packed packed(i64 inner, i64 columns) { return {(*this)(Packed::size(inner, columns)), inner}; }
};

// Memory for a call's work: what its threads share (`work.common`), of zeros, as what is behind a row is read; and behind
// it, from `own` on, `each` numbers of every group's own (`work.own`). Null where there is none.
template <class Work>
std::unique_ptr<Memory> lay_out(Work& work, i64 groups, i64& each, float*& own) {
    Taker count{nullptr, 0};
    work.common(count);
    i64 shared = count.used;
    work.own(count);
    each = count.used - shared;
    auto memory = std::make_unique<Memory>(shared + groups * each);
    if (!memory->numbers()) return nullptr;
    std::memset(memory->numbers(), 0, shared * sizeof(float));
    Taker taker{memory->numbers(), 0};
    work.common(taker);
    own = memory->numbers() + shared;
    return memory;
}

}  // namespace
}  // namespace mnemos
