// Causal linear attention, forward and backward, for one kind of processor (WIDTH floats a vector, table VARIANT).
//
// See scan.h for what is computed: four scans over the tokens, with φ and the normaliser around them. A worker takes a
// few heads of a row (and, where there are fewer heads than workers, a segment of the sequence) through all tokens,
// CHUNK at a time; what it touches is its states and a chunk's buffers, so nothing grows with T.
#include <cstdlib>
#include <initializer_list>

#include "simd/rows.h"
#include "linear/scan.h"
#include "threads.h"

namespace mnemos {
namespace {

constexpr i64 CHUNK = 8;           // tokens, a multiple of TILE: few, for what is asked for ahead to fit the cache too
constexpr i64 NARROW = 64;         // D + M up to which one chunk ahead is too short a notice
constexpr i64 SEGMENT_LEAST = 64;  // tokens that make a segment worth its sums
constexpr i64 SERIAL = 1 << 15;    // B·T·H·D·M below which other threads are not worth waking

// A call, cut into units of work: `groups` of heads a row, `segments` of the sequence.
struct Work {
    const Call& c;
    float eps;
    i64 heads, groups, segments, length;  // heads of a group, tokens of a segment
    i64 Dp, Mp, Lp;                       // D, M and M + 1 in whole vectors
    i64 workers, state, scratch;          // how many, and floats of a head's states and of a worker's memory
    float *memory, *starts, *ends;        // [workers, scratch]; [B·H, segments − 1, sums] twice, if segments > 1
    float* gammas;                        // [B, T, H], of the backward

    Work(const Call& c, double eps) : c(c), eps((float)eps), memory(nullptr), starts(nullptr), ends(nullptr), gammas(nullptr) {
        workers = c.B * c.T * c.H * c.D * c.M < SERIAL ? 1 : c.threads;
        groups = least(c.H, rounded(workers * 2, c.B) / c.B);
        heads = rounded(c.H, groups) / groups;
        groups = rounded(c.H, heads) / heads;
        // More segments than workers: a worker that is held up, or has the last segment to sum, holds up no other.
        i64 rows = c.B * c.H, most = c.T / SEGMENT_LEAST;
        segments = rows < workers ? least(rounded(4 * workers, rows) / rows, most) : 1;
        segments = segments < 1 ? 1 : segments;
        length = rounded((c.T + segments - 1) / segments, CHUNK);
        segments = c.T ? (c.T + length - 1) / length : 1;
        Dp = rounded(c.D, W), Mp = rounded(c.M, W), Lp = rounded(c.M + 1, W);
        i64 plain = (c.D + 1) * Mp + Dp, turned = (c.M + 1) * Dp;
        state = 2 * (plain > turned ? plain : turned);  // two of either, or one of each
        scratch = heads * state + CHUNK * (2 * Dp + 2 * Lp + (Dp > Lp ? Dp : Lp) + W);
    }
    ~Work() { std::free(memory); }
    Work(const Work&) = delete;

    i64 half() const { return c.D * c.M + c.D; }
    i64 sums() const { return 2 * half(); }  // s, z, and what they had no digits for
    bool prepare(bool gradients) {
        i64 between = c.B * c.H * (segments - 1) * sums();
        i64 tokens = gradients ? c.B * c.T * c.H : 0;
        i64 size = rounded((workers * scratch + 2 * between + tokens) * (i64)sizeof(float), 64);
        memory = (float*)std::aligned_alloc(64, size);
        if (!memory) return false;
        starts = memory + workers * scratch;
        ends = starts + between;
        gammas = ends + between;
        return true;
    }
    i64 units() const { return c.B * groups * segments; }
};

struct Sums {
    const float *s, *z;  // [D, M] and [D]
};

// What the call was given of a row and head: s and z, or their gradients; null is zeros.
Sums given(const Call& c, i64 row, bool gradients) {
    const float *s = gradients ? c.gs : c.s, *z = gradients ? c.gz : c.z;
    return s ? Sums{s + row * c.D * c.M, z + row * c.D} : Sums{nullptr, nullptr};
}

// A unit in a worker's hands: heads [h0, h1) of row b, tokens [t0, t1).
struct Unit {
    const Work& w;
    const Call& c;
    i64 b, h0, h1, segment, t0, t1;
    float *states, *q, *k, *v, *g, *out, *dots;
    float den[CHUNK];

    Unit(const Work& w, i64 index, i64 worker) : w(w), c(w.c) {
        segment = index % w.segments, index /= w.segments;
        h0 = index % w.groups * w.heads, b = index / w.groups;
        h1 = least(h0 + w.heads, c.H);
        t0 = segment * w.length, t1 = least(t0 + w.length, c.T);
        states = w.memory + worker * w.scratch;
        q = states + w.heads * w.state;
        k = q + CHUNK * w.Dp;
        v = k + CHUNK * w.Dp;
        g = v + CHUNK * w.Lp;
        dots = g + CHUNK * w.Lp;
        out = dots + CHUNK * W;
    }

    float* state(i64 h) const { return states + (h - h0) * w.state; }
    i64 row(i64 h) const { return b * c.H + h; }
    // The sums at the start of a segment, or their gradients at its end; made by `collect` and `add_up`.
    float* between(float* all, i64 h, i64 index) const { return all + (row(h) * (w.segments - 1) + index) * w.sums(); }

    // S and z at the start of this segment, or what they had no digits for (part 1); null is zeros.
    Sums before(i64 h, i64 part) const {
        if (segment) return apart(between(w.starts, h, segment - 1), part);
        return part ? Sums{nullptr, nullptr} : given(c, row(h), false);
    }
    Sums apart(const float* both, i64 part) const {
        return {both + part * w.half(), both + part * w.half() + c.D * c.M};
    }

    static i64 whole(i64 n) { return rounded(n, TILE); }
    char* at(const Rows& x, i64 t, i64 h) const { return x.data + (b * x.b + t * x.t + h * x.h) * bytes_of(c.type); }
    void read(float* to, i64 ld, const Rows& x, i64 t, i64 h, i64 n, i64 width, i64 map, bool masked) const {
        const unsigned char* mask = masked && c.mask ? c.mask + b * c.mask_b + t * c.mask_t : nullptr;
        FETCH[c.type][map](to, ld, at(x, t, h), x.t, n, width, mask, c.mask_t);
        std::memset(to + n * ld, 0, (whole(n) - n) * ld * sizeof(float));  // takes part, and adds nothing
    }
    void write(const float* from, i64 ld, const Rows& x, i64 t, i64 h, i64 n, i64 width, const float* scale) const {
        DELIVER[c.type](from, ld, at(x, t, h), x.t, n, width, scale);
    }
    // Rows of a head lie H·width apart, too far for the processor to guess: what comes next is asked for before a
    // scan. (Not inlined, GCC takes it for a function without effect, and drops it.)
    template <class... Of>
    ALWAYS void ask(i64 t, i64 h, bool backwards, i64 width, const Of&... of) const {
        for (i64 ahead = c.D + c.M <= NARROW ? 2 : 1; ahead > 0; ahead--)
            if (++h == h1) h = h0, t += backwards ? -CHUNK : CHUNK;
        if (t < t0 || t >= t1) return;
        i64 n = least(CHUNK, t1 - t);
        for (const Rows* x : {&of...}) {
            const char* row = at(*x, t, h);
            for (i64 i = 0; i < n; i++, row += x->t * bytes_of(c.type))
                for (i64 j = 0; j < width * bytes_of(c.type); j += 64) __builtin_prefetch(row + j, 0, 2);
        }
    }
    void keys(i64 t, i64 h, i64 n) const { read(k, w.Dp, c.k, t, h, n, c.D, c.map, true); }
    void queries(i64 t, i64 h, i64 n) const { read(q, w.Dp, c.q, t, h, n, c.D, c.map, false); }
    void values(i64 t, i64 h, i64 n, bool one) const {
        read(v, w.Lp, c.v, t, h, n, c.M, IDENTITY, true);
        if (one)
            for (i64 i = 0; i < n; i++) v[i * w.Lp + c.M] = 1;
    }
    float* denominator(i64 t, i64 h) const { return c.den + (b * c.T + t) * c.H + h; }
    // g' = [ĝ, γ] with ĝ = g/den. γ = −ĝ·y is what `dq` found (nullptr: 0).
    void upstream(i64 t, i64 h, i64 n, const float* gammas) const {
        read(g, w.Lp, c.g, t, h, n, c.M, IDENTITY, false);
        const float* den = denominator(t, h);
        for (i64 i = 0; i < n; i++, den += c.H) {
            V by = all(1 / *den);
            for (i64 m = 0; m < w.Mp; m += W) store(g + i * w.Lp + m, load<V>(g + i * w.Lp + m) * by);
            g[i * w.Lp + c.M] = gammas ? gammas[i * c.H] : 0;
        }
    }
    float* gamma(i64 t, i64 h) const { return w.gammas + (b * c.T + t) * c.H + h; }
    // out · dφ, in place
    void chain(const float* phi, i64 n) const {
        if (c.map == IDENTITY) return;
        for (i64 i = 0; i < n * w.Dp; i += W) store(out + i, load<V>(out + i) * slope(load<V>(phi + i), c.map));
    }
    // z [Dp] and behind it what it had no digits for
    void denominators(float* z, i64 n) {
        for (i64 i = 0; i < n; i++) store(dots + i * W, V{});
        for (i64 d = 0; d < w.Dp; d += W) {
            V at = load<V>(z + d), more = load<V>(z + w.Dp + d);
            for (i64 i = 0; i < n; i++) {
                more += load<V>(k + i * w.Dp + d);
                store(dots + i * W, load<V>(dots + i * W) + load<V>(q + i * w.Dp + d) * (at + more));
            }
            V now = at + more;
            store(z + d, now), store(z + w.Dp + d, more - (now - at));
        }
        for (i64 i = 0; i < n; i++) den[i] = sum(load<V>(dots + i * W)) + w.eps;
    }

    void forward() {
        i64 last = w.segments - 1;
        for (i64 h = h0; h < h1; h++) {
            float *X = state(h), *z = X + 2 * c.D * w.Mp;
            std::memset(z, 0, 2 * w.Dp * sizeof(float));
            for (i64 part = 0; part < 2; part++) {
                Sums from = before(h, part);
                put<2>(X, c.D, c.M, from.s, part);
                if (from.z) std::memcpy(z + part * w.Dp, from.z, c.D * sizeof(float));
            }
        }
        for (i64 t = t0; t < t1; t += CHUNK)
            for (i64 h = h0; h < h1; h++) {
                i64 n = least(CHUNK, t1 - t);
                float *X = state(h), *z = X + 2 * c.D * w.Mp;
                keys(t, h, n), queries(t, h, n), values(t, h, n, false);
                ask(t, h, false, c.D, c.q, c.k), ask(t, h, false, c.M, c.v, c.y);
                scan<2, true>(X, c.D, w.Mp, k, q, w.Dp, v, out, w.Lp, whole(n), false);
                denominators(z, n);
                for (i64 i = 0; c.den && i < n; i++) denominator(t, h)[i * c.H] = den[i];
                for (i64 i = 0; i < n; i++) den[i] = 1 / den[i];
                write(out, w.Lp, c.y, t, h, n, c.M, den);
            }
        for (i64 h = h0; segment == last && h < h1; h++) {
            const float *X = state(h), *z = X + 2 * c.D * w.Mp;
            get<2>(X, c.D, c.M, c.s_end + row(h) * c.D * c.M, 0);
            std::memcpy(c.z_end + row(h) * c.D, z, c.D * sizeof(float));
        }
    }

    // With a = S·ĝ, whose product with q is den·(ĝ·y): γ = −(q·a)/den and dq = a + γ·z. A γ of the y that was returned
    // would have that one's rounding, and times z it would drown dq: S·ĝ and γ·z cancel wherever v has a mean.
    void dq() {
        for (i64 h = h0; h < h1; h++) {
            Sums from = before(h, 0);
            float* z = state(h) + c.M * w.Dp;
            put_turned<1, false>(state(h), c.D, c.M, from.s, from.z, 0);
            std::memset(z, 0, w.Dp * sizeof(float));
            if (from.z) std::memcpy(z, from.z, c.D * sizeof(float));
        }
        for (i64 t = t0; t < t1; t += CHUNK)
            for (i64 h = h0; h < h1; h++) {
                i64 n = least(CHUNK, t1 - t);
                keys(t, h, n), queries(t, h, n), values(t, h, n, false), upstream(t, h, n, nullptr);
                ask(t, h, false, c.D, c.q, c.k, c.dq), ask(t, h, false, c.M, c.v, c.g);
                scan<1, true>(state(h), c.M, w.Dp, v, g, w.Lp, k, out, w.Dp, whole(n), false);
                normalised(state(h) + c.M * w.Dp, t, h, n);
                chain(q, n);
                write(out, w.Dp, c.dq, t, h, n, c.D, nullptr);
            }
    }
    // γ of n tokens, and out + γ·z in the place of out, which is a; z [Dp] takes in the keys.
    void normalised(float* z, i64 t, i64 h, i64 n) const {
        const float* den = denominator(t, h);
        float* to = gamma(t, h);
        for (i64 i = 0; i < n; i++) {
            float *a = out + i * w.Dp, *key = k + i * w.Dp, *query = q + i * w.Dp;
            V dot = V{};
            for (i64 d = 0; d < w.Dp; d += W) dot += load<V>(a + d) * load<V>(query + d);
            float found = to[i * c.H] = -sum(dot) / den[i * c.H];
            for (i64 d = 0; d < w.Dp; d += W) {
                V now = load<V>(z + d) + load<V>(key + d);
                store(z + d, now), store(a + d, load<V>(a + d) + found * now);
            }
        }
    }

    void dkv() {
        i64 turned = (c.M + 1) * w.Dp;
        for (i64 h = h0; h < h1; h++) {
            Sums from = segment < w.segments - 1 ? apart(between(w.ends, h, segment), 0) : given(c, row(h), true);
            put_turned<1>(state(h), c.D, c.M, from.s, from.z, 0);
            put<1>(state(h) + turned, c.D, c.M, from.s, 0);
        }
        for (i64 t = t0 + (t1 - t0 - 1) / CHUNK * CHUNK; t >= t0; t -= CHUNK)
            for (i64 h = h0; h < h1; h++) {
                i64 n = least(CHUNK, t1 - t);
                keys(t, h, n), queries(t, h, n), values(t, h, n, true), upstream(t, h, n, gamma(t, h));
                ask(t, h, true, c.D, c.q, c.k, c.dk), ask(t, h, true, c.M, c.v, c.g, c.dv);
                scan<1, true>(state(h), c.M + 1, w.Dp, g, v, w.Lp, q, out, w.Dp, whole(n), true);
                chain(k, n);
                clear(t, n, w.Dp);
                write(out, w.Dp, c.dk, t, h, n, c.D, nullptr);
                scan<1, true>(state(h) + turned, c.D, w.Mp, q, k, w.Dp, g, out, w.Lp, whole(n), true);
                clear(t, n, w.Lp);
                write(out, w.Lp, c.dv, t, h, n, c.M, nullptr);
            }
        for (i64 h = h0; c.ds && segment == 0 && h < h1; h++)
            get_turned<1>(state(h), c.D, c.M, c.ds + row(h) * c.D * c.M, c.dz + row(h) * c.D, 0);
    }

    // No gradient of what the mask hides.
    void clear(i64 t, i64 n, i64 ld) const {
        for (i64 i = 0; c.mask && i < n; i++)
            if (!c.mask[b * c.mask_b + (t + i) * c.mask_t]) std::memset(out + i * ld, 0, ld * sizeof(float));
    }

    // What a segment adds to [S, z], or if `gradients` to [R, w].
    void collect(bool gradients) {
        for (i64 h = h0; h < h1; h++) {
            float *X = state(h), *to = between(gradients ? w.ends : w.starts, h, gradients ? segment - 1 : segment);
            for (i64 part = 0; part < 2; part++) put_turned<2>(X, c.D, c.M, nullptr, nullptr, part);
            for (i64 t = t0; t < t1; t += CHUNK) {
                i64 n = least(CHUNK, t1 - t);
                gradients ? queries(t, h, n) : keys(t, h, n);
                gradients ? upstream(t, h, n, gamma(t, h)) : values(t, h, n, true);
                const float *p = gradients ? g : v, *r = gradients ? q : k;
                scan<2, false>(X, c.M + 1, w.Dp, p, p, w.Lp, r, out, w.Dp, whole(n), false);
            }
            for (i64 part = 0; part < 2; part++, to += w.half()) get_turned<2>(X, c.D, c.M, to, to + c.D * c.M, part);
        }
    }
};

// From what each segment adds to what there is before it (forward) or after it (gradients).
void add_up(const Work& w, bool gradients) {
    const Call& c = w.c;
    i64 n = w.segments - 1, size = c.D * c.M, half = w.half();
    for (i64 row = 0; row < c.B * c.H; row++) {
        float* all = (gradients ? w.ends : w.starts) + row * n * w.sums();
        Sums first = given(c, row, gradients);
        auto start = [&](i64 j) { return !first.s ? 0 : j < size ? first.s[j] : first.z[j - size]; };
        for (i64 i = 0; i < n; i++) {
            float* to = all + (gradients ? n - 1 - i : i) * w.sums();
            const float* from = gradients ? to + w.sums() : to - w.sums();
            for (i64 j = 0; j < half; j++)
                add(to[j], to[half + j], i ? from[j] : start(j), i ? from[half + j] : 0);
        }
    }
}

void run_forward(void* w, i64 unit, i64 worker) { Unit(*(Work*)w, unit, worker).forward(); }
void run_dq(void* w, i64 unit, i64 worker) { Unit(*(Work*)w, unit, worker).dq(); }
void run_dkv(void* w, i64 unit, i64 worker) { Unit(*(Work*)w, unit, worker).dkv(); }
void run_sums(void* w, i64 unit, i64 worker) {
    Unit u(*(Work*)w, unit, worker);
    if (u.segment < u.w.segments - 1) u.collect(false);
}
void run_gradient_sums(void* w, i64 unit, i64 worker) {
    Unit u(*(Work*)w, unit, worker);
    if (u.segment > 0) u.collect(true);
}

// A single token: S and z are read once and written once, to another place.
void run_token(void* work, i64 unit, i64 worker) {
    Unit u(*(Work*)work, unit, worker);
    const Call& c = u.c;
    for (i64 h = u.h0; h < u.h1; h++) {
        u.keys(0, h, 1), u.queries(0, h, 1), u.values(0, h, 1, false);
        i64 s = u.row(h) * c.D * c.M, z = u.row(h) * c.D;
        float den = u.w.eps;
        for (i64 d = z; d < z + c.D; d++) den += u.q[d - z] * grown(c.z + d, c.z_end + d, u.k[d - z], 1.0f);
        token(c.s + s, c.s_end + s, c.D, c.M, u.k, u.q, u.v, u.out);
        if (c.den) *u.denominator(0, h) = den;
        den = 1 / den;
        u.write(u.out, u.w.Lp, c.y, 0, h, 1, c.M, &den);
    }
}

int forward(const Call& c, double eps) {
    if (!c.B || !c.H) return 0;
    Work w(c, eps);
    if (!w.prepare(false)) return 1;
    if (w.segments > 1) {
        parallel(w.workers, w.units(), run_sums, &w);
        add_up(w, false);
    }
    parallel(w.workers, w.units(), c.T == 1 && c.s ? run_token : run_forward, &w);
    return 0;
}

int backward(const Call& c) {
    if (!c.B || !c.H) return 0;
    Work w(c, 0);
    if (!w.prepare(true)) return 1;
    bool several = w.segments > 1;
    if (several) {
        parallel(w.workers, w.units(), run_sums, &w);
        add_up(w, false);
    }
    parallel(w.workers, w.units(), run_dq, &w);
    if (several) {  // R needs γ, which dq finds
        parallel(w.workers, w.units(), run_gradient_sums, &w);
        add_up(w, true);
    }
    parallel(w.workers, w.units(), run_dkv, &w);
    return 0;
}

void map(const float* x, float* y, i64 n, i64 kind) {
    i64 most = n / W * W;
    FETCH[FLOAT32][kind](y, most, (const char*)x, most, 1, most, nullptr, 0);
    float rest[W];
    FETCH[FLOAT32][kind](rest, W, (const char*)(x + most), W, 1, n - most, nullptr, 0);
    std::memcpy(y + most, rest, (n - most) * sizeof(float));
}

}  // namespace

namespace causal {
extern const Kernels VARIANT;
const Kernels VARIANT = {forward, backward, map};
}  // namespace causal

}  // namespace mnemos
