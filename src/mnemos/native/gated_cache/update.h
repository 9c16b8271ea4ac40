// The update of a gated cache, eq. 4 and 5 of Cached Transformers, forward and backward. See ops/gated_cache/update.py.
//
// The slots of a row pass through three products of its tokens (both gates and the candidate, side by side in one
// matrix), one product of g_r ⊙ C, and one pass over the numbers between. The backward computes them again. Each thread
// takes a group of rows, in the order of the batch, and adds up the gradients of the weights by itself: they do not
// depend on which thread was faster.
#pragma once
#include <cmath>

#include "simd/activation.h"
#include "gated_cache/cache.h"
#include "simd/product.h"
#include "threads.h"

namespace mnemos {
namespace {

constexpr float NORM_EPS = 1e-5f;

// What a group of rows works in, and the gradients that it adds up. Rows of buffers are `ld` numbers apart.
struct Scratch {
    float *source, *gates, *gated, *cache, *old, *sum;     // S̄; [u, r, candidate]; g_r ⊙ C; C; its part of u, r; Σ C_t
    float *g, *d_gated, *d_source, *d_cache, *inner, *slope;  // inner, slope: of one slot
    float *weights, *biases, *norm, *sums, *d_shared;
    i64 *places, *valid;  // the token of each slot; the valid tokens
};

class Updating {
   public:
    Updating(const Update& c, bool backward) : c(c), d(c.width), ld(rounded(d, LANES)), n(c.slots), one(n * ld) {
        this->backward = backward;
        shared = c.cache_b == 0;
        groups = least(c.B, c.threads < 1 ? 1 : c.threads);
        memory = lay_out(*this, groups, each, scratch);
        if (memory) pack();
    }
    bool ready() const { return memory != nullptr; }

    int run() {
        parallel(c.threads, groups, backward ? run_backward : run_forward, this);
        backward ? collect() : average();
        return 0;
    }

   private:
    template <class Work>
    friend std::unique_ptr<Memory> lay_out(Work&, i64, i64&, float*&);

    const Update& c;
    i64 d, ld, n, one, groups, each;
    bool backward, shared;
    std::unique_ptr<Memory> memory;
    float* scratch;
    Packed tokens, reset, olds;                         // right factors of the forward: S̄, g_r ⊙ C, C
    Packed from_tokens[3], from_reset, from_olds[2];    // of the backward: from a product to its left factor
    float *bias, *gain, *shift, *inside;                // with zeros behind; inside: 1, and 0 behind
    float *cache, *old, *g_mean;                        // shared: C and its products; what every row's C_t gets

    void common(Taker& take) {
        tokens = take.packed(d, 3 * ld), reset = take.packed(d, ld), olds = take.packed(d, 2 * ld);
        bias = take(3 * ld), gain = take(ld), shift = take(ld), inside = take(ld);
        cache = take(one), old = take(2 * one), g_mean = take(one);
        if (!backward) return;
        for (Packed& p : from_tokens) p = take.packed(d, ld);
        for (Packed& p : from_olds) p = take.packed(d, ld);
        from_reset = take.packed(d, ld);
    }

    Scratch own(Taker& take) const {
        Scratch s{};
        s.source = take(one), s.gates = take(3 * one), s.gated = take(one), s.sum = take(one);
        s.cache = take(shared ? 0 : one), s.old = take(shared ? 0 : 2 * one);
        s.places = (i64*)take(2 * n), s.valid = (i64*)take(2 * c.T);
        s.inner = take(ld);
        if (!backward) return s;
        s.g = take(one), s.d_gated = take(one), s.d_source = take(one), s.d_cache = take(one);
        s.slope = take(ld);
        s.weights = take(6 * d * ld), s.biases = take(3 * ld), s.norm = take(2 * ld);
        s.sums = take(shared ? 2 * one : 0), s.d_shared = take(shared ? one : 0);
        return s;
    }
    Scratch of(i64 group) const {
        Taker take{scratch + group * each, 0};
        return own(take);
    }

    void pack() {
        const Linear* all[3] = {&c.update, &c.reset, &c.candidate};
        for (i64 p = 0; p < 3; p++) {
            tokens.put_turned(all[p]->weight, 2 * d, d, p * ld);
            std::memcpy(bias + p * ld, all[p]->bias, d * sizeof(float));
            if (backward) from_tokens[p].put(all[p]->weight, 2 * d, d, d, 0);
        }
        reset.put_turned(c.candidate.weight + d, 2 * d, d, 0);
        if (backward) from_reset.put(c.candidate.weight + d, 2 * d, d, d, 0);
        for (i64 p = 0; p < 2; p++) {
            olds.put_turned(all[p]->weight + d, 2 * d, d, p * ld);
            if (backward) from_olds[p].put(all[p]->weight + d, 2 * d, d, d, 0);
        }
        for (i64 j = 0; j < d; j++) inside[j] = 1;
        if (c.norm.weight) {
            std::memcpy(gain, c.norm.weight, d * sizeof(float));
            std::memcpy(shift, c.norm.bias, d * sizeof(float));
        }
        if (shared) remember(c.cache, cache, old);
        if (backward && c.g_mean) {
            fetch_rows(g_mean, ld, c.g_mean, d, n, d);
            float share = *c.rows > 1 ? 1 / *c.rows : 1;
            for (i64 j = 0; j < one; j++) g_mean[j] *= share;
        }
    }
    // C [n, ld] and its products for both gates.
    void remember(const float* from, float* to, float* products) const {
        fetch_rows(to, ld, from, d, n, d);
        product(n, d, 2 * ld, rows_of(to, ld), olds.right(), products, 2 * ld, false);
    }

    void ask(i64 b) const {
        for (i64 t = 0; b < c.B && t < least(c.T, 256); t++) ask_for(c.source.data + b * c.source.b + t * c.source.t, d);
    }

    // Finds the token of every slot of row b; false if the row has no valid token.
    bool locate(i64 b, const Scratch& s) const {
        i64 count = c.T;
        if (c.mask) {
            const unsigned char* mask = c.mask + b * c.mask_b;
            count = 0;
            for (i64 t = 0; t < c.T; t++)
                if (mask[t * c.mask_t]) s.valid[count++] = t;
        }
        for (i64 i = 0; count && i < n; i++) {
            i64 at = i * count / n;
            s.places[i] = c.resampled ? i : c.mask ? s.valid[at] : at;
        }
        return count > 0;
    }

    // u, r, g_r ⊙ C and the candidate before its bias; of row b, whose C and products are `cache` and `old`.
    void compute(i64 b, Scratch& s) const {
        for (i64 i = 0; i < n; i++)
            fetch_row(s.source + i * ld, ld, c.source.data + b * c.source.b + s.places[i] * c.source.t, d);
        if (c.kept && backward) {  // copied: the backward may run twice
            std::memcpy(s.gates, c.kept + 3 * b * one, 3 * one * sizeof(float));
            for (i64 i = 0; i < n; i++)
                for (i64 j = 0; j < ld; j += W) {
                    i64 at = i * ld + j;
                    store(s.gated + at, load<V>(s.gates + (3 * i + 1) * ld + j) * load<V>(s.cache + at));
                }
            return;
        }
        if (c.kept) s.gates = c.kept + 3 * b * one;
        product(n, d, 3 * ld, rows_of(s.source, ld), tokens.right(), s.gates, 3 * ld, false);
        for (i64 i = 0; i < n; i++) {
            float *u = s.gates + 3 * i * ld, *r = u + ld;
            const float *before = s.old + 2 * i * ld, *C = s.cache + i * ld;
            for (i64 j = 0; j < ld; j += W) {
                store(u + j, logistic(load<V>(u + j) + load<V>(before + j) + load<V>(bias + j)));
                V gate = logistic(load<V>(r + j) + load<V>(before + ld + j) + load<V>(bias + ld + j));
                store(r + j, gate), store(s.gated + i * ld + j, gate * load<V>(C + j));
            }
        }
        product(n, d, ld, rows_of(s.gated, ld), reset.right(), s.gates + 2 * ld, 3 * ld, true);
    }
    void enter(i64 b, Scratch& s) const {
        if (shared)
            s.cache = cache, s.old = old;
        else
            remember(c.cache + b * c.cache_b, s.cache, s.old);
    }

    struct Moments {
        float mean, scale;
    };
    Moments moments(const float* x) const {
        V total{};
        for (i64 j = 0; j < ld; j += W) total += load<V>(x + j);
        float mean = sum(total) / d;
        total = V{};
        for (i64 j = 0; j < ld; j += W) {
            V apart = (load<V>(x + j) - mean) * load<V>(inside + j);
            total += apart * apart;
        }
        return {mean, 1 / std::sqrt(sum(total) / d + NORM_EPS)};
    }

    void forward(i64 group) const {
        Scratch s = of(group);
        std::memset(s.sum, 0, one * sizeof(float));
        i64 rows = 0;
        for (i64 b = c.B * group / groups; b < c.B * (group + 1) / groups; b++) {
            enter(b, s);
            ask(b + 1);
            const float* next = s.cache;
            if (locate(b, s)) {
                compute(b, s);
                for (i64 i = 0; i < n; i++) mix(s, i);
                next = s.gated, rows++;
                add_to(s.sum, next, one);
            }
            if (c.next) deliver_rows(next, ld, c.next + b * n * d, d, n, d);
        }
        *(i64*)s.valid = rows;
    }
    // C_t of a slot, in the place of g_r ⊙ C.
    void mix(const Scratch& s, i64 i) const {
        float *u = s.gates + 3 * i * ld, *x = u + 2 * ld, *to = s.gated + i * ld;
        const float* C = s.cache + i * ld;
        Moments m{0, 1};
        if (c.norm.weight) {
            for (i64 j = 0; j < ld; j += W) store(s.inner + j, gelu(load<V>(x + j) + load<V>(bias + 2 * ld + j)));
            m = moments(x = s.inner);
        }
        for (i64 j = 0; j < ld; j += W) {
            V v = load<V>(x + j), old = load<V>(C + j);
            v = c.norm.weight ? (v - m.mean) * m.scale * load<V>(gain + j) + load<V>(shift + j)
                              : v + load<V>(bias + 2 * ld + j);
            store(to + j, old + load<V>(u + j) * (v - old));
        }
    }
    void average() const {
        if (!c.mean) return;
        i64 rows = 0;
        float* total = of(0).sum;
        for (i64 g = 0; g < groups; g++) {
            Scratch s = of(g);
            rows += *(i64*)s.valid;
            if (g) add_to(total, s.sum, one);
        }
        for (i64 j = 0; j < one; j++) total[j] /= rows > 1 ? rows : 1;
        deliver_rows(total, ld, c.mean, d, n, d);
        *c.rows = (float)rows;
    }

    // Backward.
    void differentiate(i64 group) const {
        Scratch s = of(group);
        std::memset(s.weights, 0, (scratch + (group + 1) * each - s.weights) * sizeof(float));
        for (i64 b = c.B * group / groups; b < c.B * (group + 1) / groups; b++) {
            enter(b, s);
            ask(b + 1);
            if (c.g_next)
                fetch_rows(s.g, ld, c.g_next + b * n * d, d, n, d);
            else
                std::memset(s.g, 0, one * sizeof(float));
            bool any = locate(b, s);
            if (any) {
                if (c.g_mean) add_to(s.g, g_mean, one);
                compute(b, s);
                row(s);
            } else {
                std::memcpy(s.d_cache, s.g, one * sizeof(float));
            }
            if (c.d_source) scatter(b, s, any);
            if (shared && c.d_cache) add_to(s.d_shared, s.d_cache, one);
            if (!shared && c.d_cache) deliver_rows(s.d_cache, ld, c.d_cache + b * n * d, d, n, d);
        }
    }
    // The gradients of a row, from that of its C_t.
    void row(const Scratch& s) const {
        i64 wide = 3 * ld, size = d * ld;
        float *u = s.gates, *r = u + ld, *x = r + ld;
        for (i64 i = 0; i < n; i++) c.norm.weight ? through_norm(s, i) : through_line(s, i);
        product(n, d, ld, rows_of(x, wide), from_reset.right(), s.d_gated, ld, false);
        for (i64 i = 0; i < n; i++)
            for (i64 j = 0; j < ld; j += W) {
                V gate = load<V>(r + i * wide + j), g = load<V>(s.d_gated + i * ld + j);
                store(s.d_cache + i * ld + j, load<V>(s.d_cache + i * ld + j) + g * gate);
                g = g * load<V>(s.cache + i * ld + j) * gate * (1.0f - gate);
                store(r + i * wide + j, g);
                store(s.biases + ld + j, load<V>(s.biases + ld + j) + g);
            }
        if (c.d_source)
            for (i64 p = 0; p < 3; p++)
                product(n, d, ld, rows_of(u + p * ld, wide), from_tokens[p].right(), s.d_source, ld, p > 0);
        if (shared) {
            for (i64 i = 0; i < n; i++) add_to(s.sums + 2 * i * ld, u + i * wide, 2 * ld);
        } else if (c.d_cache) {
            for (i64 p = 0; p < 2; p++)
                product(n, d, ld, rows_of(u + p * ld, wide), from_olds[p].right(), s.d_cache, ld, true);
        }
        if (!c.d_update.weight) return;
        for (i64 p = 0; p < 3; p++)
            product(d, n, ld, columns_of(u + p * ld, wide), plain(s.source, ld), s.weights + p * size, ld, true);
        for (i64 p = 0; p < 2 && !shared; p++)
            product(d, n, ld, columns_of(u + p * ld, wide), plain(s.cache, ld), s.weights + (3 + p) * size, ld, true);
        product(d, n, ld, columns_of(x, wide), plain(s.gated, ld), s.weights + 5 * size, ld, true);
    }
    // Of a slot: dC̃ and g_u, and what C gets directly. Gates turn into the gradients of what they are the σ of.
    ALWAYS void gate(const Scratch& s, float* u, i64 at, i64 j, V g, V candidate) const {
        V gate = load<V>(u + j), old = load<V>(s.cache + at + j);
        store(s.d_cache + at + j, g * (1.0f - gate));
        V d_u = g * (candidate - old) * gate * (1.0f - gate);
        store(u + j, d_u);
        store(s.biases + j, load<V>(s.biases + j) + d_u);
    }
    void through_line(const Scratch& s, i64 i) const {
        float *u = s.gates + 3 * i * ld, *x = u + 2 * ld;
        for (i64 j = 0; j < ld; j += W) {
            V g = load<V>(s.g + i * ld + j), d_x = g * load<V>(u + j);
            gate(s, u, i * ld, j, g, load<V>(x + j) + load<V>(bias + 2 * ld + j));
            store(x + j, d_x);
            store(s.biases + 2 * ld + j, load<V>(s.biases + 2 * ld + j) + d_x);
        }
    }
    void through_norm(const Scratch& s, i64 i) const {
        float *u = s.gates + 3 * i * ld, *x = u + 2 * ld;
        for (i64 j = 0; j < ld; j += W) {
            V v = load<V>(x + j) + load<V>(bias + 2 * ld + j);
            Normal at = normal(v);
            store(s.inner + j, v * at.below), store(s.slope + j, at.below + v * at.density);
        }
        Moments m = moments(s.inner);
        V direct{}, along{};
        for (i64 j = 0; j < ld; j += W) {
            V unit = (load<V>(s.inner + j) - m.mean) * m.scale * load<V>(inside + j);
            V g = load<V>(s.g + i * ld + j), d_new = g * load<V>(u + j), d_unit = d_new * load<V>(gain + j);
            gate(s, u, i * ld, j, g, unit * load<V>(gain + j) + load<V>(shift + j));
            store(s.norm + j, load<V>(s.norm + j) + d_new * unit);
            store(s.norm + ld + j, load<V>(s.norm + ld + j) + d_new);
            store(s.inner + j, unit), store(x + j, d_unit);
            direct += d_unit, along += d_unit * unit;
        }
        float mean = sum(direct) / d, slant = sum(along) / d;
        for (i64 j = 0; j < ld; j += W) {
            V d_x = (load<V>(x + j) - mean - load<V>(s.inner + j) * slant) * m.scale * load<V>(s.slope + j);
            store(x + j, d_x);
            store(s.biases + 2 * ld + j, load<V>(s.biases + 2 * ld + j) + d_x);
        }
    }
    // Every token gets the sum of its slots' gradients.
    void scatter(i64 b, const Scratch& s, bool any) const {
        float* to = c.d_source + b * c.T * d;
        std::memset(to, 0, c.T * d * sizeof(float));
        for (i64 i = 0; any && i < n; i++) add_to(to + s.places[i] * d, s.d_source + i * ld, d);
    }

    // The gradients of the weights and of a shared cache, from those of all groups.
    void collect() const {
        Scratch s = of(0);
        i64 size = d * ld, count = scratch + each - s.weights;
        for (i64 g = 1; g < groups; g++) add_to(s.weights, of(g).weights, count);
        for (i64 p = 0; p < 2 && shared; p++) {
            if (c.d_update.weight)
                product(d, n, ld, columns_of(s.sums + p * ld, 2 * ld), plain(cache, ld), s.weights + (3 + p) * size, ld,
                        true);
            if (c.d_cache)
                product(n, d, ld, rows_of(s.sums + p * ld, 2 * ld), from_olds[p].right(), s.d_shared, ld, true);
        }
        if (shared && c.d_cache) deliver_rows(s.d_shared, ld, c.d_cache, d, n, d);
        if (!c.d_update.weight) return;
        const LinearGradient* all[3] = {&c.d_update, &c.d_reset, &c.d_candidate};
        for (i64 p = 0; p < 3; p++) {
            deliver_rows(s.weights + p * size, ld, all[p]->weight, 2 * d, d, d);
            deliver_rows(s.weights + (3 + p) * size, ld, all[p]->weight + d, 2 * d, d, d);
            std::memcpy(all[p]->bias, s.biases + p * ld, d * sizeof(float));
        }
        if (!c.norm.weight) return;
        std::memcpy(c.d_norm.weight, s.norm, d * sizeof(float));
        std::memcpy(c.d_norm.bias, s.norm + ld, d * sizeof(float));
    }

    static void run_forward(void* self, i64 group, i64) { ((Updating*)self)->forward(group); }
    static void run_backward(void* self, i64 group, i64) { ((Updating*)self)->differentiate(group); }
};

}  // namespace
}  // namespace mnemos
