// The read of a gated cache, eq. 2 and 3 of Cached Transformers, forward and backward. See ops/gated_cache/read.py.
//
// Scores lie with their queries side by side, [slots, queries]: a softmax then runs over whole vectors of queries, and no
// vector is summed across. Queries pass by in blocks, so that scores stay in the processor's caches at any length. As in
// update.h every thread takes a group of rows and adds up their gradients by itself.
#pragma once
#include <cmath>

#include "gated_cache/cache.h"
#include "simd/product.h"
#include "threads.h"

namespace mnemos {
namespace {

constexpr i64 BLOCK = 64;  // queries at once

struct ReadScratch {
    float *x, *q, *turned, *scores, *out, *own, *cache, *keys, *values;
    float *g, *g_turned, *d_scores, *d_q, *d_x, *d_keys, *d_values, *d_k, *d_v, *d_cache;
    float *weights, *biases, *d_mix, *against;  // biases: [d, W] of the queries, [ld], [lv]; against: Σ g ⊙ own
    i64 wide;  // queries of this block, in whole vectors: the length of a row of scores
};

class Reader {
   public:
    Reader(const Reading& c, bool backward) : c(c), backward(backward), d(c.width), ld(rounded(d, LANES)), n(c.slots) {
        head = d / c.heads, v = c.heads * c.values, lv = rounded(v, LANES), lo = lv + LANES;
        lh = rounded(head, W), lm = rounded(c.values, W);
        block = least(BLOCK, rounded(c.T, LANES));
        groups = least(c.B, c.threads < 1 ? 1 : c.threads);
        alone = c.caches == 1;
        memory = lay_out(*this, groups, each, scratch);
        if (memory) pack();
    }
    bool ready() const { return memory != nullptr; }

    int run() {
        if (alone && !backward) project(c.cache, keys(0), values(0));
        parallel(c.threads, groups, backward ? run_backward : run_forward, this);
        if (backward) collect();
        return 0;
    }

    // Numbers that a forward keeps: queries of all rows, and keys and values of all caches.
    static i64 kept(const Reading& c) {
        i64 ld = rounded(c.width, LANES), lv = rounded(c.heads * c.values, LANES);
        return c.B * c.T * ld + c.caches * c.slots * (ld + lv) + LANES;
    }

   private:
    template <class Work>
    friend std::unique_ptr<Memory> lay_out(Work&, i64, i64&, float*&);

    const Reading& c;
    bool backward, alone;                            // alone: all rows read one cache
    i64 d, ld, n, head, v, lv, lh, lm, lo, block;    // widths of q, v and their heads; in whole vectors; of `out`
    i64 groups, each;
    std::unique_ptr<Memory> memory;
    float* scratch;
    Packed query, key, value, from_query, from_key, from_value;
    float *bias_q, *bias_k, *bias_v, *share, *own_keys, *own_values;  // share: σ(λ) of every channel of v

    void common(Taker& take) {
        share = take(lv);
        if (backward) {
            from_query = take.packed(d, ld), from_key = take.packed(d, ld), from_value = take.packed(v, ld);
            return;
        }
        query = take.packed(d, ld), key = take.packed(d, ld), value = take.packed(d, lv);
        bias_q = take(ld), bias_k = take(ld), bias_v = take(lv);
        own_keys = take(c.kept || !alone ? 0 : n * ld), own_values = take(c.kept || !alone ? 0 : n * lv);
    }
    ReadScratch own(Taker& take) const {
        ReadScratch s{};
        s.x = take(block * ld), s.q = take(c.kept ? 0 : block * ld), s.turned = take(d * block);
        s.scores = take(c.weights ? 0 : n * block), s.out = take(block * lo), s.cache = take(n * ld);
        s.own = take(lv);
        s.keys = take(c.kept || alone ? 0 : n * ld), s.values = take(c.kept || alone ? 0 : n * lv);
        if (!backward) return s;
        s.g = take(block * lv), s.g_turned = take(v * block), s.d_scores = take(n * block);
        s.d_q = take(d * block), s.d_x = take(block * ld), s.d_cache = take(n * ld);
        s.d_keys = take(c.heads * n * lh), s.d_values = take(c.heads * n * lm);
        s.d_k = take(n * ld), s.d_v = take(n * lv);
        s.weights = take((2 * d + v) * ld), s.biases = take(d * W + ld + lv), s.d_mix = take(c.heads);
        s.against = take(lv);
        return s;
    }
    ReadScratch of(i64 group) const {
        Taker take{scratch + group * each, 0};
        return own(take);
    }
    // Of row b, or of a cache that all rows read.
    float* keys(i64 b) const {
        if (!c.kept) return own_keys;
        return c.kept + c.B * c.T * ld + (alone ? 0 : b) * n * (ld + lv);
    }
    float* values(i64 b) const { return c.kept ? keys(b) + n * ld : own_values; }

    void pack() {
        for (i64 i = 0; i < v; i++) share[i] = c.own.data ? 1 / (1 + __builtin_expf(-c.mix[i / c.values])) : 1;
        if (backward) {
            from_query.put(c.query.weight, d, d, d, 0), from_key.put(c.key.weight, d, d, d, 0);
            return from_value.put(c.value.weight, d, v, d, 0);
        }
        query.put_turned(c.query.weight, d, d, 0), key.put_turned(c.key.weight, d, d, 0);
        value.put_turned(c.value.weight, d, v, 0);
        std::memcpy(bias_q, c.query.bias, d * sizeof(float)), std::memcpy(bias_k, c.key.bias, d * sizeof(float));
        std::memcpy(bias_v, c.value.bias, v * sizeof(float));
    }
    // to [rows, columns] = from [rows, d]·weight + bias
    void linear(i64 rows, const float* from, const Packed& weight, const float* bias, i64 columns, float* to) const {
        for (i64 i = 0; i < rows; i++)
            for (i64 j = 0; j < columns; j += W) store(to + i * columns + j, load<V>(bias + j));
        product(rows, d, columns, rows_of(from, ld), weight.right(), to, columns, true);
    }
    void project(const float* cache, float* keys, float* values) const {
        ReadScratch s = of(0);
        project(s, cache, keys, values);
    }
    void project(const ReadScratch& s, const float* cache, float* keys, float* values) const {
        fetch_rows(s.cache, ld, cache, d, n, d);
        linear(n, s.cache, key, bias_k, ld, keys);
        linear(n, s.cache, value, bias_v, lv, values);
    }

    // The softmax over the slots of scores [slots, wide].
    void softmax(const ReadScratch& s) const {
        float* scores = s.scores;
        i64 block = s.wide;
        for (i64 t = 0; t < block; t += W) {
            V most = load<V>(scores + t), total{};
            for (i64 j = 1; j < n; j++) {
                V x = load<V>(scores + j * block + t);
                most = x > most ? x : most;
            }
            for (i64 j = 0; j < n; j++) {
                V x = exponential(load<V>(scores + j * block + t) - most);
                store(scores + j * block + t, x);
                total += x;
            }
            total = 1.0f / total;
            for (i64 j = 0; j < n; j++) store(scores + j * block + t, load<V>(scores + j * block + t) * total);
        }
    }
    // The weights [slots, wide] of head h of row b, from queries turned to [d, wide] and scaled.
    void weigh(ReadScratch& s, const float* keys, i64 b, i64 h) const {
        if (c.weights) s.scores = c.weights + (b * c.heads + h) * n * block;  // all queries are one block
        if (c.weights && backward) return;
        product(n, head, s.wide, rows_of(keys + h * head, ld), plain(s.turned + h * head * s.wide, s.wide), s.scores, s.wide,
                false);
        softmax(s);
    }
    void turn_queries(const ReadScratch& s, const float* q, i64 count) const {
        transpose(q, ld, count, d, ld, s.turned, s.wide, 1 / std::sqrt((float)head));
    }

    // Row b's tokens of a short sequence; those of a long one would not stay in the processor's caches.
    void ask(const Tokens& from, i64 b, i64 width) const {
        if (!from.data || b >= c.B || c.T > BLOCK) return;
        for (i64 t = 0; t < c.T; t++) ask_for(from.data + b * from.b + t * from.t, width);
    }

    void forward(i64 group) const {
        ReadScratch s = of(group);
        for (i64 b = c.B * group / groups; b < c.B * (group + 1) / groups; b++) {
            float *K = c.kept || alone ? keys(b) : s.keys, *V_ = c.kept || alone ? values(b) : s.values;
            if (!alone) project(s, c.cache + b * n * d, K, V_);
            ask(c.x, b + 1, d), ask(c.own, b + 1, v);
            for (i64 t = 0; t < c.T; t += block) {
                i64 count = least(block, c.T - t);
                s.wide = rounded(count, W);
                float* q = c.kept ? c.kept + (b * c.T + t) * ld : s.q;
                fetch_rows(s.x, ld, c.x.data + b * c.x.b + t * c.x.t, c.x.t, count, d);
                linear(count, s.x, query, bias_q, ld, q);
                turn_queries(s, q, count);
                for (i64 h = 0; h < c.heads; h++) {
                    weigh(s, K, b, h);
                    // What is behind a head's last channel is overwritten by the next head.
                    product(count, n, lm, columns_of(s.scores, s.wide), plain(V_ + h * c.values, lv),
                            s.out + h * c.values, lo, false);
                }
                for (i64 i = 0; i < count; i++) write(s, b, t + i, s.out + i * lo);
            }
        }
    }
    // Token t of row b, the heads side by side, with zeros behind them.
    void gather(const Tokens& from, i64 b, i64 t, float* to) const {
        const float* at = from.data + b * from.b + t * from.t;
        if (from.h == c.values) return fetch_row(to, lv, at, v);
        std::memset(to + v, 0, (lv - v) * sizeof(float));
        for (i64 h = 0; h < c.heads; h++) std::memcpy(to + h * c.values, at + h * from.h, c.values * sizeof(float));
    }
    void write(const ReadScratch& s, i64 b, i64 t, float* found) const {
        if (c.own.data) {
            gather(c.own, b, t, s.own);
            for (i64 j = 0; j < lv; j += W) {
                V own = load<V>(s.own + j);
                store(found + j, own + load<V>(share + j) * (load<V>(found + j) - own));
            }
        }
        deliver_row(found, c.y + (b * c.T + t) * v, v);
    }

    // Backward.
    void differentiate(i64 group) const {
        ReadScratch s = of(group);
        std::memset(s.weights, 0, (scratch + (group + 1) * each - s.weights) * sizeof(float));
        if (alone) clear(s);
        for (i64 b = c.B * group / groups; b < c.B * (group + 1) / groups; b++) {
            const float *K = keys(b), *V_ = values(b);
            if (!alone) clear(s);
            ask(c.x, b + 1, d), ask(c.own, b + 1, v), ask(c.g, b + 1, v);
            for (i64 t = 0; t < c.T; t += block) {
                i64 count = least(block, c.T - t);
                s.wide = rounded(count, W);
                const float* q = c.kept + (b * c.T + t) * ld;
                fetch_rows(s.x, ld, c.x.data + b * c.x.b + t * c.x.t, c.x.t, count, d);
                for (i64 i = 0; i < count; i++) upstream(s, b, t + i, s.g + i * lv);
                if (!c.weights) turn_queries(s, q, count);
                transpose(s.g, lv, count, v, lv, s.g_turned, s.wide, 1);
                for (i64 i = 0; c.own.data && i < count; i++)
                    for (i64 j = i * lv; j < (i + 1) * lv; j += W)
                        store(s.g + j, load<V>(s.g + j) * load<V>(share + j - i * lv));
                for (i64 h = 0; h < c.heads; h++) differentiate(s, K, V_, q, b, h, count);
                finish(s, b, t, count);
            }
            if (!alone) through_projections(s, c.cache + b * n * d, c.d_cache ? c.d_cache + b * n * d : nullptr);
        }
    }
    void clear(const ReadScratch& s) const {
        std::memset(s.d_keys, 0, c.heads * n * lh * sizeof(float));
        std::memset(s.d_values, 0, c.heads * n * lm * sizeof(float));
    }
    // A query's gradient, and what the attention's own output gets of it.
    void upstream(const ReadScratch& s, i64 b, i64 t, float* g) const {
        gather(c.g, b, t, g);
        if (!c.own.data) return;
        gather(c.own, b, t, s.own);
        for (i64 j = 0; j < lv; j += W) {
            store(s.against + j, load<V>(s.against + j) + load<V>(g + j) * load<V>(s.own + j));
            store(s.own + j, (1.0f - load<V>(share + j)) * load<V>(g + j));
        }
        if (c.d_own) deliver_row(s.own, c.d_own + (b * c.T + t) * v, v);
    }
    // Of a head: scores again, their gradients, and from these those of queries [d, wide], keys and values.
    void differentiate(ReadScratch& s, const float* K, const float* V_, const float* q, i64 b, i64 h,
                       i64 count) const {
        weigh(s, K, b, h);
        product(n, c.values, s.wide, rows_of(V_ + h * c.values, lv), plain(s.g_turned + h * c.values * s.wide, s.wide),
                s.d_scores, s.wide, false);
        V mixed{};
        float scale = share[h * c.values] / std::sqrt((float)head);
        for (i64 t = 0; t < s.wide; t += W) {
            V total{};
            for (i64 j = 0; j < n; j++) total += load<V>(s.scores + j * s.wide + t) * load<V>(s.d_scores + j * s.wide + t);
            mixed += total;
            for (i64 j = 0; j < n; j++) {
                float* at = s.d_scores + j * s.wide + t;
                store(at, (load<V>(at) - total) * load<V>(s.scores + j * s.wide + t) * scale);
            }
        }
        s.d_mix[h] += sum(mixed);  // queries behind the last have no gradient
        product(n, count, lm, rows_of(s.scores, s.wide), plain(s.g + h * c.values, lv), s.d_values + h * n * lm, lm, true);
        product(n, count, lh, rows_of(s.d_scores, s.wide), plain(q + h * head, ld), s.d_keys + h * n * lh, lh, true);
        product(head, n, s.wide, columns_of(K + h * head, ld), plain(s.d_scores, s.wide), s.d_q + h * head * s.wide, s.wide,
                false);
    }
    // The gradients of x and of the queries' weights.
    void finish(const ReadScratch& s, i64 b, i64 t, i64 count) const {
        product(count, d, ld, columns_of(s.d_q, s.wide), from_query.right(), s.d_x, ld, false);
        deliver_rows(s.d_x, ld, c.d_x + (b * c.T + t) * d, d, count, d);
        product(d, count, ld, rows_of(s.d_q, s.wide), plain(s.x, ld), s.weights, ld, true);
        for (i64 j = 0; j < d; j++) {
            V total = load<V>(s.biases + j * W);
            for (i64 i = 0; i < s.wide; i += W) total += load<V>(s.d_q + j * s.wide + i);
            store(s.biases + j * W, total);
        }
    }
    // From the gradients of keys and values to those of their weights and of the cache.
    void through_projections(const ReadScratch& s, const float* cache, float* d_cache) const {
        fetch_rows(s.cache, ld, cache, d, n, d);
        float *bias_k = s.biases + d * W, *bias_v = bias_k + ld;
        for (i64 j = 0; j < n; j++) {
            for (i64 h = 0; h < c.heads; h++) { 
                deliver_row(s.d_keys + (h * n + j) * lh, s.d_k + j * ld + h * head, head);
                deliver_row(s.d_values + (h * n + j) * lm, s.d_v + j * lv + h * c.values, c.values);
            }
            add_to(bias_k, s.d_k + j * ld, d), add_to(bias_v, s.d_v + j * lv, v);
        }
        if (d_cache) {
            product(n, d, ld, rows_of(s.d_k, ld), from_key.right(), s.d_cache, ld, false);
            product(n, v, ld, rows_of(s.d_v, lv), from_value.right(), s.d_cache, ld, true);
            deliver_rows(s.d_cache, ld, d_cache, d, n, d);
        }
        product(d, n, ld, columns_of(s.d_k, ld), plain(s.cache, ld), s.weights + d * ld, ld, true);
        product(v, n, ld, columns_of(s.d_v, lv), plain(s.cache, ld), s.weights + 2 * d * ld, ld, true);
    }
    void collect() const {
        ReadScratch s = of(0);
        i64 count = scratch + each - s.weights, keys = c.heads * n * lh, values = c.heads * n * lm;
        for (i64 g = 1; g < groups; g++) {
            ReadScratch other = of(g);
            add_to(s.weights, other.weights, count);
            if (alone) add_to(s.d_keys, other.d_keys, keys), add_to(s.d_values, other.d_values, values);
        }
        if (alone) through_projections(s, c.cache, c.d_cache);
        deliver_rows(s.weights, ld, c.d_query.weight, d, d, d);
        deliver_rows(s.weights + d * ld, ld, c.d_key.weight, d, d, d);
        deliver_rows(s.weights + 2 * d * ld, ld, c.d_value.weight, d, v, d);
        for (i64 j = 0; j < d; j++) c.d_query.bias[j] = sum(load<V>(s.biases + j * W));
        std::memcpy(c.d_key.bias, s.biases + d * W, d * sizeof(float));
        std::memcpy(c.d_value.bias, s.biases + d * W + ld, v * sizeof(float));
        for (i64 h = 0; c.d_mix && h < c.heads; h++) {
            float part = share[h * c.values], total = s.d_mix[h];
            for (i64 m = 0; m < c.values; m++) total -= s.against[h * c.values + m];
            c.d_mix[h] = total * part * (1 - part);
        }
    }

    static void run_forward(void* self, i64 group, i64) { ((Reader*)self)->forward(group); }
    static void run_backward(void* self, i64 group, i64) { ((Reader*)self)->differentiate(group); }
};

}  // namespace
}  // namespace mnemos
