// Softmax attention, forward and backward, for one kind of processor (WIDTH floats a vector, table VARIANT), in blocks of
// queries and keys, of which no more than one is ever there (FlashAttention: Dao et al. 2022, Dao 2023).
//
//     forward     Z = K·(scale·Q)ᵀ      Pᵀ = e^(Z − m)      l += Pᵀ summed over keys      O += P·V      y = O / l
//     backward    δ = Σ dy ⊙ y          P = e^(Q̂·Kᵀ − lse)      dS = P ⊙ (dy·Vᵀ − δ)      with Q̂ = scale·Q
//                 dV += Pᵀ·dy           dK += dSᵀ·Q̂             dQ += scale·dS·K
//
// A gradient of lse is taken off δ; one of a query's largest score is added to dS where that score is: it is computed
// twice by the same operations in the same order, so it is equal to the last bit.
//
// m, a query's largest score, may be up to SLACK too small: only a larger difference multiplies what was summed so far.
// The scores of the forward lie as [keys, queries], so that a vector has the maxima and sums of as many queries.
// At the edge of what queries see (the diagonal, a window's end) a block is cut into strips of queries with the keys that
// they see, in whole vectors of those. As in all kernels of this kind, what a key there holds is multiplied by 0 for the
// queries that do not see it: a NaN may reach queries up to a block before it.
#include "softmax/softmax.h"

#include <cmath>
#include <memory>

#include "simd/product.h"
#include "threads.h"

namespace mnemos {
namespace {

constexpr i64 BLOCK = 64;       // queries, or keys, of a product
constexpr i64 STRIP = 32;       // queries of one at an edge
constexpr i64 QUERIES = 256;    // of a unit of the forward, for which keys are read once
constexpr float SLACK = 8;      // e^8 is far from overflow
constexpr float LOWEST = -3e38f;  // a finite number, so that e^(−∞ − m) is 0
constexpr i64 SERIAL = 1 << 18;  // multiply-adds below which other threads are not worth waking

ALWAYS i64 most(i64 a, i64 b) { return a > b ? a : b; }

// The larger one; b if one is NaN.
ALWAYS V larger(V a, V b) {
#ifdef __AVX512F__
    return _mm512_max_ps(a, b);
#else
    return a > b ? a : b;
#endif
}

ALWAYS bool any(I x) {
#ifdef __AVX512F__
    return _mm512_test_epi32_mask((__m512i)x, (__m512i)x);
#else
    std::int32_t lanes[W], found = 0;
    store(lanes, x);
    for (i64 i = 0; i < W; i++) found |= lanes[i];
    return found;
#endif
}

ALWAYS V lanes_from(float from) {
    V x;
    for (i64 i = 0; i < W; i++) x[i] = from + (float)i;
    return x;
}

struct Span {
    i64 from, to;

    Span within(i64 low, i64 high) const { return {most(from, low), least(to, high)}; }
};

struct Work {
    const Softmax& c;
    float scale;
    i64 share, offset, Dp, Mp;  // heads of a key head; the first query's position; rows of buffers
    i64 workers, each;
    float* scratch;
    std::unique_ptr<Memory> memory;

    Work(const Softmax& c, double scale)
        : c(c), scale((float)scale), share(c.H / c.heads), offset(c.S - c.T), Dp(rounded(c.D, LANES)),
          Mp(rounded(c.M, LANES)), workers(c.B * c.H * c.T * c.S * (c.D + c.M) < SERIAL ? 1 : c.threads) {}

    void common(Taker&) const {}

    // The keys that are seen by one query of [t0, t1) at least, and whether all of those see all of a span.
    Span seen(i64 t0, i64 t1) const {
        return {c.window ? most(0, t0 + offset + 1 - c.window) : 0, c.causal ? t1 + offset : c.S};
    }
    bool all_see(i64 t0, i64 t1, i64 from, i64 to) const {
        return seen(t1 - 1, t1).from <= from && seen(t0, t0 + 1).to >= to;
    }

    static float* at(const Rows& x, i64 b, i64 t, i64 h) { return (float*)x.data + b * x.b + t * x.t + h * x.h; }
    bool valid(i64 b, i64 key) const { return !c.valid.data || c.valid.data[b * c.valid.b + key * c.valid.t]; }
    bool all_valid(i64 b, i64 from, i64 n) const {
        for (i64 i = 0; i < n; i++)
            if (!valid(b, from + i)) return false;
        return true;
    }
    // Keys or values, zeros where one is not valid.
    void read(float* to, i64 ld, const Rows& x, i64 b, i64 from, i64 h, i64 n, i64 width) const {
        const unsigned char* marks = c.valid.data ? c.valid.data + b * c.valid.b + from * c.valid.t : nullptr;
        fetch<FLOAT32, IDENTITY>(to, ld, (const char*)at(x, b, from, h), x.t, n, width, marks, c.valid.t);
    }
    // Rows of a head lie too far apart for the processor to expect them.
    void ask(const Rows& x, i64 b, i64 from, i64 h, i64 end, i64 width) const {
        for (i64 t = from; t < least(from + BLOCK, end); t++) ask_for(at(x, b, t, h), width);
    }
};

struct Forward : Work {
    struct Scratch {
        float *q, *out, *k, *v, *z;  // per block of queries (scale·Q)ᵀ [D, BLOCK] and O [BLOCK, Mp]; a block's K, V, Z
        float *top, *total, *most;   // m, l and the largest score of all queries
    };

    Forward(const Softmax& c, double scale) : Work(c, scale) { memory = lay_out(*this, workers, each, scratch); }

    Scratch own(Taker& take) const {
        Scratch s;
        s.q = take(QUERIES * c.D), s.out = take(QUERIES * Mp), s.k = take(BLOCK * Dp), s.v = take(BLOCK * Mp);
        s.z = take(BLOCK * BLOCK), s.top = take(QUERIES), s.total = take(QUERIES), s.most = take(QUERIES);
        return s;
    }
    i64 units() const { return c.B * c.H * ((c.T + QUERIES - 1) / QUERIES); }

    static void run(void* self, i64 unit, i64 worker) {
        const Forward& w = *(Forward*)self;
        Taker take{w.scratch + worker * w.each, 0};
        i64 row = unit % (w.c.B * w.c.H), segment = (w.units() - 1 - unit) / (w.c.B * w.c.H);  // the longest ones first
        w.attend(w.own(take), row / w.c.H, row % w.c.H, segment * QUERIES);
    }

    void attend(const Scratch& s, i64 b, i64 h, i64 t0) const {
        i64 t1 = least(t0 + QUERIES, c.T), n = t1 - t0, key_head = h / share;
        for (i64 i = 0; i < n; i += BLOCK)
            transpose(at(c.q, b, t0 + i, h), c.q.t, least(BLOCK, n - i), c.D, c.D, s.q + i * c.D, BLOCK, scale);
        std::memset(s.out, 0, n * Mp * sizeof(float));
        for (i64 i = 0; i < QUERIES; i++) s.top[i] = s.most[i] = LOWEST, s.total[i] = 0;

        Span all = seen(t0, t1);
        for (i64 key = all.from / BLOCK * BLOCK; key < all.to; key += BLOCK) {
            i64 keys = least(BLOCK, c.S - key);
            read(s.k, Dp, c.k, b, key, key_head, keys, c.D), read(s.v, Mp, c.v, b, key, key_head, keys, c.M);
            ask(c.k, b, key + BLOCK, key_head, all.to, c.D), ask(c.v, b, key + BLOCK, key_head, all.to, c.M);
            bool whole = all_valid(b, key, keys);
            for (i64 t = t0; t < t1; t += BLOCK) {
                i64 end = least(t + BLOCK, t1);
                if (all_see(t, end, key, key + keys)) {
                    step(s, b, t - t0, end - t0, key, {0, keys}, whole ? -1 : t);
                    continue;
                }
                for (i64 from = t; from < end; from += STRIP) {
                    Span some = seen(from, least(from + STRIP, end)).within(key, key + keys);
                    if (some.from < some.to)
                        step(s, b, from - t0, least(from + STRIP, end) - t0, key, {some.from - key, some.to - key}, from);
                }
            }
        }

        for (i64 i = 0; i < n; i++) {
            float total = s.total[i], by = total == 0 ? 0 : 1 / total;
            for (i64 m = 0; m < Mp; m += W) store(s.out + i * Mp + m, load<V>(s.out + i * Mp + m) * by);
            deliver_row(s.out + i * Mp, at(c.y, b, t0 + i, h), c.M);
            i64 number = (b * c.H + h) * c.T + t0 + i;
            c.lse[number] = total == 0 ? INFINITY : s.top[i] + std::log(total), c.top[number] = s.most[i];
        }
    }

    // Queries [i0, i1) of the unit with some keys of a block, the first of which is `key`. first: the query i0, if there
    // are keys that not all see, else −1.
    void step(const Scratch& s, i64 b, i64 i0, i64 i1, i64 key, Span some, i64 first) const {
        i64 n = some.to - some.from, queries = i1 - i0;
        const float* q = s.q + i0 / BLOCK * BLOCK * c.D + i0 % BLOCK;
        product(n, c.D, queries, rows_of(s.k + some.from * Dp, Dp), plain(q, BLOCK), s.z, BLOCK, false);
        for (i64 i = 0; i < queries; i += W) {
            float *z = s.z + i, *top = s.top + i0 + i, *total = s.total + i0 + i, *most = s.most + i0 + i;
            if (first >= 0) hide(z, b, first + i, key + some.from, n);
            V high[2] = {all(LOWEST), all(LOWEST)};
            for (i64 r = 0; r + 1 < n; r += 2)
                high[0] = larger(load<V>(z + r * BLOCK), high[0]), high[1] = larger(load<V>(z + (r + 1) * BLOCK), high[1]);
            high[0] = larger(high[0], larger(load<V>(z + (n - 1) * BLOCK), high[1]));
            store(most, larger(high[0], load<V>(most)));
            V now = load<V>(top);
            if (any(high[0] > now + SLACK)) {
                V next = larger(high[0], now), by = exponential(now - next);
                float factors[W];
                store(factors, by), store(top, next), store(total, load<V>(total) * by);
                for (i64 r = 0; r < least(W, queries - i); r++) {
                    float* out = s.out + (i0 + i + r) * Mp;
                    for (i64 m = 0; m < Mp; m += W) store(out + m, load<V>(out + m) * factors[r]);
                }
                now = next;
            }
            V sum[2] = {load<V>(total), V{}};
            for (i64 r = 0; r < n; r++) {
                V p = exponential(load<V>(z + r * BLOCK) - now);
                store(z + r * BLOCK, p), sum[r & 1] += p;
            }
            store(total, sum[0] + sum[1]);
        }
        product(queries, n, c.M, columns_of(s.z, BLOCK), plain(s.v + some.from * Mp, Mp), s.out + i0 * Mp, Mp, true);
    }
    // −∞ for the scores of queries `first`, … with keys `key`, … that they do not see: a vector of n rows.
    void hide(float* z, i64 b, i64 first, i64 key, i64 n) const {
        V lane = lanes_from(0), none = all(-INFINITY);
        for (i64 r = 0; r < n; r++, z += BLOCK) {
            i64 from = c.causal ? key + r - offset - first : 0, to = c.window ? from + c.window : W;
            if (!valid(b, key + r)) to = from = W;
            if (from <= 0 && to >= W) continue;
            V score = load<V>(z);
            store(z, lane < (float)from ? none : lane < (float)to ? score : none);
        }
    }
};

struct Backward : Work {
    struct Scratch {
        float *q, *g, *dq, *delta, *dtop;  // of all queries and heads of the unit: Q̂, dy, dQ/scale, δ, gradients of maxima
        float *k, *v, *k_turned, *v_turned, *dk, *dv;  // of a block of keys
        float *p, *ds, *shown;           // P and dS [BLOCK, BLOCK]; 1 where a key is valid, else 0
    };
    i64 heads;  // of a unit, at most

    Backward(const Softmax& c, double scale) : Work(c, scale), heads((share + c.parts - 1) / c.parts) {
        memory = lay_out(*this, workers = least(workers, units()), each, scratch);
    }

    Scratch own(Taker& take) const {
        Scratch s;
        s.q = take(heads * c.T * Dp), s.g = take(heads * c.T * Mp), s.dq = take(heads * c.T * Dp);
        s.delta = take(heads * c.T), s.dtop = take(heads * c.T), s.k = take(BLOCK * Dp), s.v = take(BLOCK * Mp);
        s.k_turned = take(c.D * BLOCK), s.v_turned = take(c.M * BLOCK), s.dk = take(BLOCK * Dp), s.dv = take(BLOCK * Mp);
        s.p = take(BLOCK * BLOCK), s.ds = take(BLOCK * BLOCK), s.shown = take(BLOCK);
        return s;
    }
    i64 units() const { return c.B * c.heads * c.parts; }

    static void run(void* self, i64 unit, i64 worker) {
        const Backward& w = *(Backward*)self;
        Taker take{w.scratch + worker * w.each, 0};
        i64 part = unit % w.c.parts, row = unit / w.c.parts;
        w.derive(w.own(take), row / w.c.heads, row % w.c.heads, part);
    }

    void derive(const Scratch& s, i64 b, i64 key_head, i64 part) const {
        // --- what there is of each query ---
        i64 h0 = key_head * share + share * part / c.parts, h1 = key_head * share + share * (part + 1) / c.parts;
        float* row = s.v;
        for (i64 h = h0; h < h1; h++)
            for (i64 t = 0, i = (h - h0) * c.T; t < c.T; t++, i++) {
                fetch_row(s.q + i * Dp, Dp, at(c.q, b, t, h), c.D);
                for (i64 d = 0; d < Dp; d += W) store(s.q + i * Dp + d, load<V>(s.q + i * Dp + d) * scale);
                fetch_row(s.g + i * Mp, Mp, at(c.g, b, t, h), c.M), fetch_row(row, Mp, at(c.y, b, t, h), c.M);
                V sum = V{};
                for (i64 m = 0; m < Mp; m += W) sum += load<V>(s.g + i * Mp + m) * load<V>(row + m);
                i64 number = (b * c.H + h) * c.T + t;
                s.delta[i] = mnemos::sum(sum) - (c.glse ? c.glse[number] : 0), s.dtop[i] = c.gtop ? c.gtop[number] : 0;
            }
        std::memset(s.dq, 0, (h1 - h0) * c.T * Dp * sizeof(float));

        // --- a block of keys after the other ---
        for (i64 key = 0; key < c.S; key += BLOCK) {
            i64 keys = least(BLOCK, c.S - key);
            read(s.k, Dp, c.k, b, key, key_head, keys, c.D), read(s.v, Mp, c.v, b, key, key_head, keys, c.M);
            ask(c.k, b, key + BLOCK, key_head, c.S, c.D), ask(c.v, b, key + BLOCK, key_head, c.S, c.M);
            transpose(s.k, Dp, keys, c.D, Dp, s.k_turned, BLOCK, 1);
            transpose(s.v, Mp, keys, c.M, Mp, s.v_turned, BLOCK, 1);
            std::memset(s.dk, 0, keys * Dp * sizeof(float)), std::memset(s.dv, 0, keys * Mp * sizeof(float));
            for (i64 i = 0; i < BLOCK; i++) s.shown[i] = i < keys && valid(b, key + i);
            bool whole = all_valid(b, key, keys);
            Span near = {c.causal ? most(0, key - offset) : 0,
                         c.window ? least(c.T, key + keys - 1 - offset + c.window) : c.T};
            for (i64 h = h0; h < h1; h++)
                for (i64 t = near.from / BLOCK * BLOCK; t < near.to; t += BLOCK) {
                    i64 end = least(t + BLOCK, c.T);
                    if (all_see(t, end, key, key + keys)) {
                        pair(s, b, h, h0, t, end, key, {0, keys}, !whole);
                        continue;
                    }
                    for (i64 from = t; from < end; from += STRIP) {
                        i64 to = least(from + STRIP, end);
                        Span some = seen(from, to).within(key, key + keys);
                        some.from = some.from / LANES * LANES;
                        if (some.from < some.to)
                            pair(s, b, h, h0, from, to, key, {some.from - key, some.to - key}, true);
                    }
                }
            i64 before = part * c.B * c.S * c.heads;
            deliver_rows(s.dk, Dp, at(c.dk, b, key, key_head) + before * c.D, c.dk.t, keys, c.D);
            deliver_rows(s.dv, Mp, at(c.dv, b, key, key_head) + before * c.M, c.dv.t, keys, c.M);
        }

        for (i64 h = h0; h < h1; h++)
            for (i64 t = 0, i = (h - h0) * c.T; t < c.T; t++, i++) {
                for (i64 d = 0; d < Dp; d += W) store(s.dq + i * Dp + d, load<V>(s.dq + i * Dp + d) * scale);
                deliver_row(s.dq + i * Dp, at(c.dq, b, t, h), c.D);
            }
    }

    // Queries [t0, t1) with some keys of a block, the first of which is `key`. edge: there are keys that not all see.
    void pair(const Scratch& s, i64 b, i64 h, i64 h0, i64 t0, i64 t1, i64 key, Span some, bool edge) const {
        i64 n = t1 - t0, keys = some.to - some.from, i0 = (h - h0) * c.T + t0;
        const float *q = s.q + i0 * Dp, *g = s.g + i0 * Mp, *lse = c.lse + (b * c.H + h) * c.T + t0;
        const float* top = c.top + (b * c.H + h) * c.T + t0;
        product(n, c.D, keys, rows_of(q, Dp), plain(s.k_turned + some.from, BLOCK), s.p, BLOCK, false);
        product(n, c.M, keys, rows_of(g, Mp), plain(s.v_turned + some.from, BLOCK), s.ds, BLOCK, false);
        for (i64 i = 0; i < n; i++) {
            V less = all(lse[i]), mean = all(s.delta[i0 + i]);
            float *p = s.p + i * BLOCK, *ds = s.ds + i * BLOCK;
            Span own = seen(t0 + i, t0 + i + 1);
            V low = all((float)(own.from - key)), high = all((float)(own.to - key));
            for (i64 j = 0; j < keys; j += W) {
                V score = load<V>(p + j), weight = exponential(score - less), slope = weight * (load<V>(ds + j) - mean);
                if (edge) {
                    V lane = lanes_from((float)(some.from + j)), shown = load<V>(s.shown + some.from + j);
                    I hidden = (lane < low) | (lane >= high) | (shown == 0.0f);
                    weight = hidden ? V{} : weight, slope = hidden ? V{} : slope, score = hidden ? all(-INFINITY) : score;
                }
                if (s.dtop[i0 + i] != 0 && any(score == top[i]))
                    for (i64 r = 0; r < W; r++)
                        if (score[r] == top[i]) slope[r] += s.dtop[i0 + i], s.dtop[i0 + i] = 0;  // of equals the first
                store(p + j, weight), store(ds + j, slope);
            }
        }
        float *k = s.k + some.from * Dp, *dk = s.dk + some.from * Dp, *dv = s.dv + some.from * Mp;
        product(keys, n, c.M, columns_of(s.p, BLOCK), plain(g, Mp), dv, Mp, true);
        product(n, keys, c.D, rows_of(s.ds, BLOCK), plain(k, Dp), s.dq + i0 * Dp, Dp, true);
        product(keys, n, c.D, columns_of(s.ds, BLOCK), plain(q, Dp), dk, Dp, true);
    }
};

template <class Direction>
int run(const Softmax& c, double scale) {
    if (!c.B || !c.H) return 0;
    Direction work(c, scale);
    if (!work.memory) return 1;
    parallel(work.workers, work.units(), Direction::run, &work);
    return 0;
}

}  // namespace

namespace softmax {
extern const SoftmaxAttention VARIANT;
const SoftmaxAttention VARIANT = {run<Forward>, run<Backward>};
}  // namespace softmax

}  // namespace mnemos
