// Linear attention over all keys, forward and backward, for one kind of processor (WIDTH floats a vector, table VARIANT).
//
//     forward    S = Σ φ(k)ᵀ·v, z = Σ φ(k)       then   den = φ(q)·z + eps, y = φ(q)·S / den
//     backward   ĝ = g/den, a = ĝ·Sᵀ, γ = −φ(q)·a/den, dφ(q) = a + γ·z, R = Σ φ(q)ᵀ·ĝ, w = Σ γ·φ(q)
//                then   dφ(k) = v·Rᵀ + w, dv = φ(k)·R
//
// γ is −ĝ·y. It is computed from a, which is float32, because y may have been rounded to 16 bits.
//
// Either direction is two passes over tokens, with a sum of matrices between them. A unit of work is a segment of tokens
// of a few heads of a row; it takes CHUNK tokens of one head after the other, because the heads of a token lie together
// in memory. The sums of a chunk are added to those of its segment by a compensated sum (Kahan's), and these likewise.
#include "linear/bidirectional.h"

#include <memory>

#include "linear/cut.h"
#include "simd/pairs.h"
#include "simd/product.h"
#include "simd/rows.h"
#include "threads.h"

namespace mnemos {
namespace {

constexpr i64 SERIAL = 1 << 15;  // multiply-adds below which other threads are not worth waking

// total + low is the sum so far; n numbers, in whole vectors.
ALWAYS void accumulate(float* total, float* low, const float* more, i64 n) {
    for (i64 i = 0; i < n; i += W) {
        V by = load<V>(more + i) + load<V>(low + i), old = load<V>(total + i), now = old + by;
        store(total + i, now);
        store(low + i, by - (now - old));
    }
}

class Attention {
   public:
    Attention(const Everything& c, double eps, bool backward)
        : c(c), eps((float)eps), backward(backward), Dp(rounded(c.D, W)), Mp(rounded(c.M, W)),
          workers((c.T + c.N) * c.B * c.H * c.D * c.M < SERIAL ? 1 : c.threads), queries(c, c.T, workers),
          keys(c, c.N, workers), halved(DOTS && c.type == BFLOAT16), shift(c.map == ELU ? 1.0f : 0.0f) {
        sums = c.D * Mp + Dp;
        Taker count{nullptr, 0};
        share(count);
        i64 fixed = count.used;
        own(count);
        each = count.used - fixed;
        memory = std::make_unique<Memory>(fixed + workers * each);
        if (!memory->numbers()) return;
        Taker taker{memory->numbers(), 0};
        share(taker);
        scratch = memory->numbers() + fixed;
    }

    int run() {
        if (!memory->numbers()) return 1;
        i64 rows = c.B * c.H;
        if (backward) {
            parallel(workers, rows, call<&Attention::turn_given>, this);
            parallel(workers, queries.units(c.B), call<&Attention::query_gradients>, this);
            parallel(workers, rows, call<&Attention::add_gradients>, this);
            parallel(workers, keys.units(c.B), call<&Attention::key_gradients>, this);
        } else {
            parallel(workers, keys.units(c.B), call<&Attention::add_keys>, this);
            parallel(workers, rows, call<&Attention::add_up>, this);
            parallel(workers, queries.units(c.B), call<&Attention::answer>, this);
        }
        return 0;
    }

   private:
    struct Scratch {
        float *a, *b, *out, *chunk;  // tokens of D and of M numbers, results, and the sums of a chunk
        Pair *words, *more;          // halved: tokens of D or of M numbers, and of M
    };

    const Everything& c;
    float eps;
    bool backward;
    i64 Dp, Mp, workers;  // D and M in whole vectors
    Cut queries, keys;
    i64 sums, each;         // numbers of S [D, Mp] with z [Dp] behind it
    float *parts, *totals;  // of each segment and head, total and low: [B, segments, H, 2, sums]; S and z [B, H, sums]
    float *turned;          // backward: Sᵀ and then Rᵀ, [B, H, M, Dp]
    bool halved;            // products that allow it have factors in bfloat16
    float shift;            // φ less this is such a factor: for x > 0, x has the digits for it, and φ = x + 1 has not
    float *factors, *means;  // halved: two right factors, [B, H, paired()]; means of values, [B, H, Mp]
    float* scratch;
    std::unique_ptr<Memory> memory;

    const Cut& summed() const { return backward ? queries : keys; }
    void share(Taker& take) {
        parts = take(c.B * summed().segments * c.H * 2 * sums), totals = take(c.B * c.H * sums);
        turned = take(backward ? c.B * c.H * c.M * Dp : 0);
        factors = take(halved ? c.B * c.H * paired() : 0), means = take(halved && backward ? c.B * c.H * Mp : 0);
    }
    Scratch own(Taker& take) const {
        Scratch s;
        s.a = take(CHUNK * Dp), s.b = take(CHUNK * Mp), s.out = take(CHUNK * (Dp > Mp ? Dp : Mp)), s.chunk = take(sums);
        s.words = (Pair*)take(halved ? CHUNK * (Dp > Mp ? Dp : Mp) / 2 : 0);
        s.more = (Pair*)take(halved ? CHUNK * Mp / 2 : 0);
        return s;
    }
    Scratch of(i64 worker) const {
        Taker take{scratch + worker * each, 0};
        return own(take);
    }
    template <void (Attention::*what)(i64, i64)>
    static void call(void* self, i64 unit, i64 worker) {
        (((Attention*)self)->*what)(unit, worker);
    }

    float* part(const Part& p, i64 h) const {
        return parts + ((p.b * summed().segments + p.segment) * c.H + h) * 2 * sums;
    }
    float* total(i64 b, i64 h) const { return totals + (b * c.H + h) * sums; }
    float* turned_of(i64 b, i64 h) const { return turned + (b * c.H + h) * c.M * Dp; }

    // Right factors in bfloat16 of a row and head: S or R [D, Mp], Sᵀ or Rᵀ [M, Dp], and of each the row behind it.
    i64 paired() const { return (c.D / 2 + 2) * Mp + (c.M / 2 + 2) * Dp; }
    RightPairs factor(i64 b, i64 h) const {
        float* at = factors + (b * c.H + h) * paired();
        return {(Pair*)at, at + (c.D + 1) / 2 * Mp};
    }
    RightPairs turned_factor(i64 b, i64 h) const {
        float* at = factors + (b * c.H + h) * paired() + (c.D / 2 + 2) * Mp;
        return {(Pair*)at, at + (c.M + 1) / 2 * Dp};
    }
    float* mean(i64 b, i64 h) const { return means + (b * c.H + h) * Mp; }

    char* at(const Rows& x, i64 b, i64 t, i64 h) const {
        return x.data + (b * x.b + t * x.t + h * x.h) * bytes_of(c.type);
    }
    void read(float* to, i64 ld, const Rows& x, i64 b, i64 t, i64 h, i64 n, i64 width, i64 map, bool masked) const {
        const unsigned char* mask = masked && c.mask ? c.mask + b * c.mask_b + t * c.mask_t : nullptr;
        FETCH[c.type][map](to, ld, at(x, b, t, h), x.t, n, width, mask, c.mask_t);
    }
    void write(const float* from, i64 ld, const Rows& x, i64 b, i64 t, i64 h, i64 n, i64 width,
               const float* scale) const {
        DELIVER[c.type](from, ld, at(x, b, t, h), x.t, n, width, scale);
    }
    // The left factor of rows of M numbers of bfloat16, as they are.
    LeftPairs words(const Scratch& s, const Rows& x, i64 b, i64 t, i64 h, i64 n, bool masked) const {
        const unsigned char* mask = masked && c.mask ? c.mask + b * c.mask_b + t * c.mask_t : nullptr;
        char* to = (char*)s.words;
        for (i64 i = 0; i < n; i++, to += 2 * Mp) {
            i64 valid = mask && !mask[i * c.mask_t] ? 0 : 2 * c.M;
            std::memcpy(to, at(x, b, t + i, h), valid), std::memset(to + valid, 0, 2 * Mp - valid);
        }
        return {s.words, Mp / 2, 1};
    }
    // That of φ, which was read.
    LeftPairs words(const Scratch& s, i64 n) const {
        pack_row(s.a, n * Dp, shift, s.words);
        return {s.words, Dp / 2, 1};
    }
    // each(h, t, n) for every chunk of n tokens of a part and head
    template <class Each>
    ALWAYS void chunks(const Part& p, Each each) const {
        for (i64 t = p.t0; t < p.t1; t += CHUNK)
            for (i64 h = p.h0; h < p.h1; h++) each(h, t, least(CHUNK, p.t1 - t));
    }
    // Rows of a head lie H·width apart, too far for the processor to expect them: the next chunk's are asked for early.
    template <class... Of>
    ALWAYS void ask(const Part& p, i64 h, i64 t, i64 width, const Of&... of) const {
        if (++h == p.h1) h = p.h0, t += CHUNK;
        i64 n = least(CHUNK, p.t1 - t), bytes = width * bytes_of(c.type);
        for (const Rows* x : {&of...}) {
            const char* row = n > 0 ? at(*x, p.b, t, h) : nullptr;
            for (i64 i = 0; i < n; i++, row += x->t * bytes_of(c.type))
                for (i64 j = 0; j < bytes; j += 64) __builtin_prefetch(row + j, 0, 2);
        }
    }
    void clear(const Part& p) const {
        for (i64 h = p.h0; h < p.h1; h++) std::memset(part(p, h), 0, 2 * sums * sizeof(float));
    }
    // The sums of a part and head grow by aᵀ·b [D, Mp] and Σ by_t·a_t [Dp] (null: 1) of n tokens.
    void grow(const Scratch& s, float* to, i64 n, const float* by) const {
        if (halved && !backward && c.map != ELU) {  // φ and v have no more digits
            pack(s.a, n, Dp, s.words), pack(s.b, n, Mp, s.more);
            product(c.D, (n + 1) / 2, Mp, LeftPairs{s.words, 1, Dp}, {s.more, nullptr}, s.chunk);
        } else {
            product(c.D, n, Mp, columns_of(s.a, Dp), plain(s.b, Mp), s.chunk, Mp, false);
        }
        float* z = s.chunk + c.D * Mp;
        for (i64 d = 0; d < Dp; d += W) {
            V sum{};
            for (i64 t = 0; t < n; t++) sum += load<V>(s.a + t * Dp + d) * (by ? by[t] : 1.0f);
            store(z + d, sum);
        }
        accumulate(to, to + sums, s.chunk, sums);
    }
    // S and z, or their gradients, of a row and head: what was given and what its segments add, in rows of Mp.
    void join(i64 b, i64 h, const float* s, const float* z, float* s_end, float* z_end) {
        i64 row = b * c.H + h;
        float* to = total(b, h);
        std::memset(to, 0, sums * sizeof(float));
        for (i64 d = 0; s && d < c.D; d++) fetch_row(to + d * Mp, Mp, s + (row * c.D + d) * c.M, c.M);
        if (z) fetch_row(to + c.D * Mp, Dp, z + row * c.D, c.D);
        float* first = parts + (b * summed().segments * c.H + h) * 2 * sums;
        float* low = first + sums;  // what the first segment had no digits for begins the sum of such parts
        accumulate(to, low, first, sums);
        for (i64 i = 1; i < summed().segments; i++) {
            const float* next = first + i * c.H * 2 * sums;
            accumulate(to, low, next, sums);
            accumulate(to, low, next + sums, sums);
        }
        for (i64 i = 0; i < sums; i += W) store(to + i, load<V>(to + i) + load<V>(low + i));
        for (i64 d = 0; s_end && d < c.D; d++) deliver_row(to + d * Mp, s_end + (row * c.D + d) * c.M, c.M);
        if (z_end) deliver_row(to + c.D * Mp, z_end + row * c.D, c.D);
    }
    void turn(i64 b, i64 h) const {  // of S [D, Mp] the transpose [M, Dp], zeros behind D
        transpose(total(b, h), Mp, c.D, c.M, Mp, turned_of(b, h), Dp, 1);
    }

    void add_keys(i64 unit, i64 worker) {
        Part p(keys, unit, c.H, c.N);
        Scratch s = of(worker);
        clear(p);
        chunks(p, [&](i64 h, i64 t, i64 n) {
            read(s.a, Dp, c.k, p.b, t, h, n, c.D, c.map, true);
            read(s.b, Mp, c.v, p.b, t, h, n, c.M, IDENTITY, true);
            ask(p, h, t, c.D, c.k), ask(p, h, t, c.M, c.v);
            grow(s, part(p, h), n, nullptr);
        });
    }
    void add_up(i64 row, i64) {
        join(row / c.H, row % c.H, c.s, c.z, c.s_end, c.z_end);
        if (halved) pack_shifted(total(row / c.H, row % c.H), c.D, Mp, shift, factor(row / c.H, row % c.H));
    }
    void answer(i64 unit, i64 worker) {
        Part p(queries, unit, c.H, c.T);
        Scratch s = of(worker);
        chunks(p, [&](i64 h, i64 t, i64 n) {
            const float *S = total(p.b, h), *z = S + c.D * Mp;
            float scale[CHUNK], *kept = c.den ? c.den + (p.b * c.T + t) * c.H + h : nullptr;
            read(s.a, Dp, c.q, p.b, t, h, n, c.D, c.map, false);
            ask(p, h, t, c.D, c.q), ask(p, h, t, c.M, c.y);
            if (halved)
                product(n, (c.D + 1) / 2, Mp, words(s, n), factor(p.b, h), s.out);
            else
                product(n, c.D, Mp, rows_of(s.a, Dp), plain(S, Mp), s.out, Mp, false);
            for (i64 i = 0; i < n; i++) {
                float den = dot(s.a + i * Dp, z, Dp) + eps;
                if (kept) kept[i * c.H] = den;
                scale[i] = 1 / den;
            }
            write(s.out, Mp, c.y, p.b, t, h, n, c.M, scale);
        });
    }

    void turn_given(i64 row, i64) {
        float* to = total(row / c.H, row % c.H);
        for (i64 d = 0; d < c.D; d++) fetch_row(to + d * Mp, Mp, c.s + (row * c.D + d) * c.M, c.M);
        fetch_row(to + c.D * Mp, Dp, c.z + row * c.D, c.D);
        i64 b = row / c.H, h = row % c.H;
        // In bfloat16 the mean of the values would drown what S·ĝ and γ·z leave over.
        if (halved) centre(to, c.D, Mp, to + c.D * Mp, mean(b, h));
        turn(b, h);
        if (halved) pack(turned_of(b, h), c.M, Dp, turned_factor(b, h).words);
    }
    void query_gradients(i64 unit, i64 worker) {
        Part p(queries, unit, c.H, c.T);
        Scratch s = of(worker);
        clear(p);
        chunks(p, [&](i64 h, i64 t, i64 n) {
            const float *z = total(p.b, h) + c.D * Mp, *den = c.den + (p.b * c.T + t) * c.H + h;
            float by[CHUNK];
            read(s.a, Dp, c.q, p.b, t, h, n, c.D, c.map, false);
            read(s.b, Mp, c.g, p.b, t, h, n, c.M, IDENTITY, false);
            ask(p, h, t, c.D, c.q, c.dq), ask(p, h, t, c.M, c.g);
            for (i64 i = 0; i < n; i++)
                for (i64 m = 0; m < Mp; m += W)
                    store(s.b + i * Mp + m, load<V>(s.b + i * Mp + m) * (1 / den[i * c.H]));
            if (halved)
                product(n, (c.M + 1) / 2, Dp, words(s, c.g, p.b, t, h, n, false), {turned_factor(p.b, h).words, nullptr},
                        s.out);
            else
                product(n, c.M, Dp, rows_of(s.b, Mp), plain(turned_of(p.b, h), Dp), s.out, Dp, false);
            for (i64 i = 0; i < n; i++) {
                float *phi = s.a + i * Dp, *out = s.out + i * Dp, one = 1 / den[i * c.H], more;
                if (halved) {  // out is den·(a − (ĝ·mean)·z): what a has of the mean, γ·z takes away but for eps
                    float mean = dot(s.b + i * Mp, this->mean(p.b, h), Mp), seen = dot(phi, z, Dp) * one;
                    for (i64 d = 0; d < Dp; d += W) store(out + d, load<V>(out + d) * one);
                    float rest = -dot(phi, out, Dp) * one;
                    by[i] = rest - mean * seen, more = rest + mean * (1 - seen);
                } else {
                    more = by[i] = -dot(phi, out, Dp) / den[i * c.H];
                }
                for (i64 d = 0; d < Dp; d += W)
                    store(out + d, (load<V>(out + d) + load<V>(z + d) * more) * slope(load<V>(phi + d), c.map));
            }
            write(s.out, Dp, c.dq, p.b, t, h, n, c.D, nullptr);
            grow(s, part(p, h), n, by);
        });
    }
    void add_gradients(i64 row, i64) {
        join(row / c.H, row % c.H, c.gs, c.gz, c.ds, c.dz);
        turn(row / c.H, row % c.H);
        if (halved) pack_gradients(row / c.H, row % c.H);
    }
    // The factors of φ(k)·R and of v·Rᵀ. The latter begins with w and with what R's rounding takes from a mean value.
    void pack_gradients(i64 b, i64 h) {
        float *R = total(b, h), *w = R + c.D * Mp;
        RightPairs to = turned_factor(b, h);
        pack_shifted(R, c.D, Mp, shift, factor(b, h)), pack(turned_of(b, h), c.M, Dp, to.words);
        std::memset(to.start, 0, Dp * sizeof(float));
        lost(R, c.D, Mp, mean(b, h), to.start);
        for (i64 d = 0; d < Dp; d += W) store(to.start + d, load<V>(to.start + d) + load<V>(w + d));
    }
    void key_gradients(i64 unit, i64 worker) {
        Part p(keys, unit, c.H, c.N);
        Scratch s = of(worker);
        chunks(p, [&](i64 h, i64 t, i64 n) {
            const float *R = total(p.b, h), *w = R + c.D * Mp;
            read(s.a, Dp, c.k, p.b, t, h, n, c.D, c.map, true);
            ask(p, h, t, c.D, c.k, c.dk), ask(p, h, t, c.M, c.v, c.dv);
            if (halved) {
                product(n, (c.M + 1) / 2, Dp, words(s, c.v, p.b, t, h, n, true), turned_factor(p.b, h), s.out);
            } else {
                read(s.b, Mp, c.v, p.b, t, h, n, c.M, IDENTITY, true);
                for (i64 i = 0; i < n; i++) std::memcpy(s.out + i * Dp, w, Dp * sizeof(float));
                product(n, c.M, Dp, rows_of(s.b, Mp), plain(turned_of(p.b, h), Dp), s.out, Dp, true);
            }
            for (i64 i = 0; i < n * Dp; i += W) store(s.out + i, load<V>(s.out + i) * slope(load<V>(s.a + i), c.map));
            hide(p.b, t, n, s.out, Dp);
            write(s.out, Dp, c.dk, p.b, t, h, n, c.D, nullptr);
            if (halved)
                product(n, (c.D + 1) / 2, Mp, words(s, n), factor(p.b, h), s.out), hide(p.b, t, n, s.out, Mp);
            else  // 0 where a key is masked, as its φ is
                product(n, c.D, Mp, rows_of(s.a, Dp), plain(R, Mp), s.out, Mp, false);
            write(s.out, Mp, c.dv, p.b, t, h, n, c.M, nullptr);
        });
    }
    // No gradient of what the mask hides.
    void hide(i64 b, i64 t, i64 n, float* out, i64 ld) const {
        for (i64 i = 0; c.mask && i < n; i++)
            if (!c.mask[b * c.mask_b + (t + i) * c.mask_t]) std::memset(out + i * ld, 0, ld * sizeof(float));
    }
    static float dot(const float* x, const float* y, i64 n) {
        V total{};
        for (i64 i = 0; i < n; i += W) total += load<V>(x + i) * load<V>(y + i);
        return sum(total);
    }
};

int run(const Everything& c, double eps, bool backward) {
    return c.B && c.H ? Attention(c, eps, backward).run() : 0;
}

}  // namespace

namespace bidirectional {

extern const Bidirectional VARIANT;
const Bidirectional VARIANT = {run};

}  // namespace bidirectional
}  // namespace mnemos
