// The short causal convolution, forward and backward, for one kind of processor (WIDTH floats a vector, table VARIANT).
//
//     z_p = bias + Σ_i w_i ⊙ x_{p − S + i}, i = 0 … S, S = W − 1        y = a(z)
//     dz = a'(z) ⊙ dy      dx_p = Σ_i w_{S − i} ⊙ dz_{p + i}      dw_i = Σ_p dz_p ⊙ x_{p − S + i}      dbias = Σ_p dz_p
//
// Positions p count the valid tokens of a row; those before 0 are the state. A window is a list of addresses of rows, in
// which a row of zeros stands for what lies before a reset. So padding, resets and the state cost nothing in the loops,
// and dx is the same loop as y, over rows of dz with the weights turned round. GROUP positions that no reset parts are
// computed together, a vector of channels after the other: every row is read once, along its channels.
#include "convolution/convolution.h"

#include <memory>
#include <new>
#include <vector>

#include "simd/activation.h"
#include "simd/product.h"
#include "threads.h"

namespace mnemos {
namespace {

constexpr i64 SERIAL = 1 << 16;  // B·T·C below which other threads are not worth waking
constexpr i64 WIDEST = 8;
constexpr i64 GROUP = 8;      // positions at once
constexpr i64 SEGMENT = 512;  // positions of a unit
constexpr i64 PART = 64;      // positions of the backward whose dz is kept at once: with CHANNELS, in the second cache
constexpr i64 CHANNELS = 512; // of a unit of the backward

// The first n numbers of `from`, or of `to`; n < W at a row's end.
template <i64 TYPE>
ALWAYS V take(const char* from, i64 n) {
    constexpr i64 size = TYPE == FLOAT32 ? 4 : 2;
    if (n >= W) return widen<TYPE>(from);
    char rest[W * size] = {};
    std::memcpy(rest, from, n * size);
    return widen<TYPE>(rest);
}
template <i64 TYPE>
ALWAYS void give(char* to, V x, i64 n) {
    constexpr i64 size = TYPE == FLOAT32 ? 4 : 2;
    if (n >= W) return narrow<TYPE>(to, x);
    char rest[W * size];
    narrow<TYPE>(rest, x);
    std::memcpy(to, rest, n * size);
}

// Channels of a unit, [c0, c1), and weights [S + 1, ld] and bias for them; null: no bias. Of the S + 1 taps those from
// `first` to `end` belong to the window: the others are not multiplied by 0, because 0·∞ is not 0.
struct Taps {
    i64 c0, c1, ld, first, end;
    const float *weight, *bias;
};

template <i64 S, i64 N, i64 TYPE, class F>
ALWAYS void along(const Taps& k, const char* const* window, F use) {
    constexpr i64 size = TYPE == FLOAT32 ? 4 : 2;
    for (i64 c = k.c0; c < k.c1; c += W) {
        i64 left = k.c1 - c;
        auto both = [&](auto count) ALWAYS_LAMBDA {
            const i64 n = count;
            V x[S + N], z[N], bias = k.bias ? load<V>(k.bias + c) : V{};
#pragma GCC unroll 16
            for (i64 i = 0; i < S + N; i++) x[i] = take<TYPE>(window[i] + c * size, n);
#pragma GCC unroll 8
            for (i64 j = 0; j < N; j++) z[j] = bias;
#pragma GCC unroll 8
            for (i64 i = 0; i <= S; i++) {
                if (i < k.first || i >= k.end) continue;
                V w = load<V>(k.weight + i * k.ld + c);
#pragma GCC unroll 8
                for (i64 j = 0; j < N; j++) z[j] += w * x[i + j];
            }
            use(c, n, x, z);
        };
        if (left >= W)
            both(std::integral_constant<i64, W>{});
        else
            both(left);
    }
}

// y of N positions; `more`, if not null, is added to each where its address is not null.
template <i64 S, i64 N, i64 FROM, i64 TO>
void outputs(const Taps& k, const char* const* window, char* const* y, const char* const* more, bool silu) {
    constexpr i64 size = TO == FLOAT32 ? 4 : 2;
    along<S, N, FROM>(k, window, [&](i64 c, auto n, const V*, V* z) ALWAYS_LAMBDA {
#pragma GCC unroll 8
        for (i64 j = 0; j < N; j++) {
            if (silu) z[j] *= logistic(z[j]);
            if (more && more[j]) z[j] += take<TO>(more[j] + c * size, n);
            give<TO>(y[j] + c * size, z[j], n);
        }
    });
}

// dz of N positions; and of dw and dbias, if `sums` [S + 2, CHANNELS] is not null, what they give.
template <i64 S, i64 N, i64 TYPE>
void inner(const Taps& k, const char* const* window, const char* const* dy, float* const* dz, float* sums, bool silu) {
    constexpr i64 size = TYPE == FLOAT32 ? 4 : 2;
    along<S, N, TYPE>(k, window, [&](i64 c, auto n, const V* x, V* z) ALWAYS_LAMBDA {
        V total = V{};
#pragma GCC unroll 8
        for (i64 j = 0; j < N; j++) {
            V g = take<TYPE>(dy[j] + c * size, n);
            if (silu) {
                V s = logistic(z[j]);
                g *= s + z[j] * s * (1.0f - s);
            }
            store(dz[j] + c, g);
            z[j] = g, total += g;
        }
        if (!sums) return;
#pragma GCC unroll 8
        for (i64 i = 0; i <= S; i++) {
            V sum = load<V>(sums + i * CHANNELS + c);
#pragma GCC unroll 8
            for (i64 j = 0; j < N; j++) sum += z[j] * x[i + j];
            store(sums + i * CHANNELS + c, sum);
        }
        store(sums + (S + 1) * CHANNELS + c, load<V>(sums + (S + 1) * CHANNELS + c) + total);
    });
}

// [4, W] of [W, 4], rows ld apart: a product of one token takes no longer than to turn its weights number by number.
template <i64... LANE>
ALWAYS void turn_taps(const float* from, float* to, i64 ld, std::integer_sequence<i64, LANE...>) {
    V x[4], y[4];
    for (i64 i = 0; i < 4; i++) x[i] = load<V>(from + i * W);
    auto part = [](const V* x, V* y) ALWAYS_LAMBDA {  // even numbers, then odd ones
        for (i64 i = 0; i < 2; i++) {
            y[i] = pick(x[2 * i], x[2 * i + 1], std::integer_sequence<i64, 2 * LANE...>{});
            y[2 + i] = pick(x[2 * i], x[2 * i + 1], std::integer_sequence<i64, 2 * LANE + 1 ...>{});
        }
    };
    part(x, y), part(y, x);
    for (i64 i = 0; i < 4; i++) store(to + i * ld, x[i]);
}

// The valid tokens of a row, and whether a reset stands before each; `ended`: one stands behind the last.
struct Row {
    std::vector<std::int32_t> tokens;
    std::vector<unsigned char> starts;
    bool ended = false;
};

struct Work {
    const Convolution& c;
    i64 size, S, ld, segments, groups, each, workers;  // S of the window that is compiled, and `each` worker's numbers
    bool backward;
    std::vector<Row> rows;
    std::unique_ptr<Memory> block;
    float *weight, *turned, *bias, *zeros;  // [S + 1, ld] twice, [ld], and a row of zeros
    float *sums;                            // [units, S + 2, CHANNELS]

    Work(const Convolution& c, bool backward)
        : c(c), size(bytes_of(c.type)), S(c.width <= 4 ? 3 : WIDEST - 1), ld(rounded(c.C, LANES)),
          segments(c.T > SEGMENT ? (c.T + SEGMENT - 1) / SEGMENT : 1),
          groups(backward ? (c.C + CHANNELS - 1) / CHANNELS : 1), workers(c.B * c.T * c.C < SERIAL ? 1 : c.threads),
          backward(backward) {
        each = backward ? (S + PART) * CHANNELS + LANES : 0;
        Taker count{nullptr, 0};
        lay(count);
        block = std::make_unique<Memory>(count.used);
    }
    Work(const Work&) = delete;

    i64 units() const { return c.B * segments * groups; }
    i64 valid(i64 b) const { return c.valid.data ? (i64)rows[b].tokens.size() : c.T; }

    int run() {
        if (!block->numbers()) return 1;
        Taker take{block->numbers(), 0};
        lay(take);
        std::memset(zeros, 0, ld * sizeof(float));
        std::memset(bias, 0, ld * sizeof(float));
        if (c.bias) std::memcpy(bias, c.bias, c.C * sizeof(float));
        std::memset(weight, 0, (S + 1) * ld * sizeof(float));
        i64 j = 0;
        if (c.width == 4)
            for (; j + W <= c.C; j += W) turn_taps(c.weight + j * 4, weight + j, ld, std::make_integer_sequence<i64, W>{});
        for (; j < c.C; j++)
            for (i64 i = 0; i < c.width; i++) weight[(S + 1 - c.width + i) * ld + j] = c.weight[j * c.width + i];
        for (i64 i = 0; backward && i <= S; i++) std::memcpy(turned + i * ld, weight + (S - i) * ld, ld * sizeof(float));
        if (c.valid.data || c.resets.data) list();
        parallel(workers, units(), S == 3 ? unit<3> : unit<WIDEST - 1>, this);
        if (backward)
            add_up();
        else
            for (i64 b = 0; b < c.B; b++) ends(b);
        return 0;
    }

   private:
    float* dz_of_workers;

    void lay(Taker& take) {
        weight = take((S + 1) * ld), turned = take((S + 1) * ld), bias = take(ld), zeros = take(ld);
        sums = take(backward ? units() * (S + 2) * CHANNELS : 0), dz_of_workers = take(workers * each);
    }
    void list() {
        rows.resize(c.B);
        for (i64 b = 0; b < c.B; b++) {
            Row& row = rows[b];
            row.tokens.reserve(c.T), row.starts.reserve(c.T);
            for (i64 t = 0; t < c.T; t++) {
                if (c.resets.data && c.resets.data[b * c.resets.b + t * c.resets.t]) row.ended = true;
                if (c.valid.data && !c.valid.data[b * c.valid.b + t * c.valid.t]) continue;
                row.tokens.push_back((std::int32_t)t), row.starts.push_back(row.ended), row.ended = false;
            }
        }
    }
    i64 token(i64 b, i64 p) const { return rows.empty() ? p : rows[b].tokens[p]; }
    bool starts(i64 b, i64 p) const { return !rows.empty() && rows[b].starts[p]; }

    char* at(const Rows& x, i64 b, i64 p) const { return x.data + (b * x.b + token(b, p) * x.t) * size; }
    const char* nothing() const { return (const char*)zeros; }
    // Position p of the inputs; below 0 of the state.
    const char* input(i64 b, i64 p) const {
        if (p >= 0) return at(c.x, b, p);
        i64 kept = c.width - 1;
        return c.s && p >= -kept ? c.s + (b * kept + kept + p) * c.C * size : nothing();
    }
    // The inputs that position p reads before its own: to[S − 1] is the last of them.
    void before(i64 b, i64 p, const char** to) const {
        bool seen = true;
        for (i64 i = 1; i <= S; i++) {
            if (p - i + 1 < valid(b) && p - i + 1 >= 0 && starts(b, p - i + 1)) seen = false;
            to[S - i] = seen ? input(b, p - i) : nothing();
        }
    }
    // How many positions from p on, at most n, no reset parts: GROUP of them or one.
    i64 together(i64 b, i64 p, i64 n) const {
        if (n < GROUP) return 1;
        for (i64 i = 1; i < GROUP; i++)
            if (starts(b, p + i)) return 1;
        return GROUP;
    }

    // f(N) of a number of positions that is known when this is compiled, and of the type.
    template <class F>
    ALWAYS void with(i64 n, F f) const {
        auto typed = [&](auto count) ALWAYS_LAMBDA {
            if (c.type == FLOAT32) f(count, std::integral_constant<i64, FLOAT32>{});
            if (c.type == BFLOAT16) f(count, std::integral_constant<i64, BFLOAT16>{});
            if (c.type == FLOAT16) f(count, std::integral_constant<i64, FLOAT16>{});
        };
        if (n == GROUP)
            typed(std::integral_constant<i64, GROUP>{});
        else
            typed(std::integral_constant<i64, 1>{});
    }

    template <i64 S>
    static void unit(void* context, i64 index, i64 worker) {
        Work& work = *(Work*)context;
        i64 group = index % work.groups, segment = index / work.groups % work.segments;
        i64 b = index / work.groups / work.segments, first = segment * SEGMENT;
        i64 end = least(first + SEGMENT, work.valid(b));
        if (work.backward)
            work.back<S>(b, first, end, group * CHANNELS, index, worker);
        else
            work.forward<S>(b, first, end);
    }

    template <i64 S>
    void forward(i64 b, i64 first, i64 end) const {
        Taps taps{0, c.C, ld, S + 1 - c.width, S + 1, weight, c.bias ? bias : nullptr};
        for (i64 p = first, n; p < end; p += n) {
            const char* window[S + GROUP];
            char* y[GROUP];
            n = together(b, p, end - p);
            before(b, p, window);
            for (i64 i = 0; i < n; i++) window[S + i] = at(c.x, b, p + i), y[i] = at(c.y, b, p + i);
            with(n, [&](auto count, auto type) ALWAYS_LAMBDA {
                outputs<S, decltype(count)::value, decltype(type)::value, decltype(type)::value>(taps, window, y, nullptr,
                                                                                                c.silu);
            });
        }
    }

    void ends(i64 b) const {
        i64 kept = c.width - 1;
        const char* last[WIDEST];
        before(b, valid(b), last);
        bool ended = !rows.empty() && rows[b].ended;
        for (i64 i = 0; i < kept; i++)
            std::memcpy(c.s_end + (b * kept + i) * c.C * size, ended ? nothing() : last[S - kept + i], c.C * size);
    }

    // The positions and channels of one unit, in parts. `ring` holds the rows of dz of a part; its first S rows were
    // computed by the part before.
    template <i64 S>
    void back(i64 b, i64 first, i64 end, i64 c0, i64 index, i64 worker) const {
        i64 c1 = least(c0 + CHANNELS, c.C), all = valid(b), kept = c.width - 1;
        if (first == 0) first = -kept;
        // Addresses of channel c0 are those of channel 0 of buffers that begin at c0.
        float *ring = dz_of_workers + worker * each - c0, *total = sums + index * (S + 2) * CHANNELS;
        std::memset(total, 0, (S + 2) * CHANNELS * sizeof(float));
        i64 known = first < 0 ? 0 : first;  // positions whose dz is computed
        for (i64 from = first; from < end || (from == first && first < 0); from += PART) {
            i64 to = least(from + PART, end), stop = least(to + S, all);
            auto row = [&](i64 p) { return ring + (p - from) * CHANNELS; };
            if (from > first)
                for (i64 p = from; p < known; p++)
                    std::memcpy(row(p) + c0, row(p) + PART * CHANNELS + c0, (c1 - c0) * sizeof(float));
            for (i64 n; known < stop; known += n) {
                bool counts = known < end;
                n = together(b, known, (counts ? least(end, stop) : stop) - known);
                const char *window[S + GROUP], *dy[GROUP];
                float* dz[GROUP];
                before(b, known, window);
                for (i64 i = 0; i < n; i++) {
                    window[S + i] = at(c.x, b, known + i), dy[i] = at(c.g, b, known + i), dz[i] = row(known + i);
                }
                inner_at<S>(n, c0, c1, window, dy, dz, counts ? total : nullptr);
            }
            for (i64 p = from, n; p < to; p += n) {
                n = to - p < GROUP || p < 0 ? 1 : GROUP;
                for (i64 i = 1; n > 1 && i < GROUP + S && p + i < all; i++)
                    if (starts(b, p + i)) n = 1;
                const char *window[S + GROUP], *more[GROUP];
                char* dx[GROUP];
                bool seen = true;
                for (i64 i = 0; i < S + n; i++) {
                    i64 q = p + i;
                    if (i && q >= 0 && q < all && starts(b, q)) seen = false;
                    window[i] = seen && q >= 0 && q < all ? (const char*)row(q) : nothing() - c0 * sizeof(float);
                }
                for (i64 i = 0; i < n; i++) dx[i] = gradient(b, p + i), more[i] = from_end(b, p + i);
                Taps taps{c0, c1, ld, 0, c.width, turned, nullptr};
                with(n, [&](auto count, auto type) ALWAYS_LAMBDA {
                    outputs<S, decltype(count)::value, FLOAT32, decltype(type)::value>(taps, window, dx, more, false);
                });
            }
        }
    }
    template <i64 S>
    void inner_at(i64 n, i64 c0, i64 c1, const char* const* window, const char* const* dy, float* const* dz,
                  float* total) const {
        Taps taps{c0, c1, ld, S + 1 - c.width, S + 1, weight, c.bias ? bias : nullptr};
        with(n, [&](auto count, auto type) ALWAYS_LAMBDA {
            inner<S, decltype(count)::value, decltype(type)::value>(taps, window, dy, dz, total ? total - c0 : nullptr,
                                                                    c.silu);
        });
    }
    char* gradient(i64 b, i64 p) const {
        i64 kept = c.width - 1;
        return p >= 0 ? at(c.dx, b, p) : c.ds + (b * kept + kept + p) * c.C * size;
    }
    // The gradient of the state after the call where position p is in it, or null.
    const char* from_end(i64 b, i64 p) const {
        i64 all = valid(b), kept = c.width - 1, place = p - (all - kept);
        if (!c.gs || place < 0 || (!rows.empty() && rows[b].ended)) return nullptr;
        for (i64 q = p < 0 ? 0 : p + 1; q < all; q++)
            if (starts(b, q)) return nullptr;
        return c.gs + (b * kept + place) * c.C * size;
    }

    void add_up() const {
        for (i64 j = 0; j < c.C; j += CHANNELS) {
            i64 width = least(CHANNELS, c.C - j);
            for (i64 i = 0; i <= c.width; i++) {
                float* to = (i < c.width ? c.d_weight + i * c.C : c.d_bias) + j;
                std::memset(to, 0, width * sizeof(float));
                for (i64 u = j / CHANNELS; u < units(); u += groups) {
                    const float* from = sums + (u * (S + 2) + S + 1 - c.width + i) * CHANNELS;
                    for (i64 n = 0; n < width; n++) to[n] += from[n];
                }
            }
        }
    }
};

int forward(const Convolution& c) { return Work(c, false).run(); }
int backward(const Convolution& c) { return Work(c, true).run(); }

}  // namespace

namespace convolution {

extern const ShortConvolution VARIANT;
const ShortConvolution VARIANT = {forward, backward};

}  // namespace convolution
}  // namespace mnemos
