// One token of every row through a whole stack of blocks with linear attention, for one kind of processor.
//
// What a token must cost is reading the weights once; what it costs, one operation after the other, is their number. So
// the threads meet once a token, and then share out the rows of each matrix, with a barrier between one and the next.
// All of them hold the residual stream in common, and each normalises it for itself: that takes less than a barrier.
#include "decode.h"

#include <cstdlib>

#include "matrix.h"
#include "scan.h"

namespace mnemos {
namespace {

constexpr i64 EARLY = 4;  // heads' states that are asked for ahead of their use

class Decoding {
   public:
    Decoding(const Stack& m, const Layer* layers, const Step& c, const Sums* sums, double norm_eps, double eps)
        : m(m), c(c), layers(layers), sums(sums), norm_eps(norm_eps), eps((float)eps) {
        i64 width = rounded(m.width, UNIT), features = rounded(m.width / m.heads, W);
        i64 common = 5 * width + rounded(m.mlp, UNIT) + rounded(m.hidden, UNIT);
        own = rounded(c.rows * width + 2 * features, UNIT);
        memory = (float*)std::aligned_alloc(64, rounded((c.rows * common + c.threads * own) * sizeof(float), 64));
        float* at = memory;
        auto take = [&](i64 n) {
            Vectors found{at, rounded(n, UNIT)};
            at += c.rows * found.ld;
            return found;
        };
        x = take(m.width), qkv = take(3 * m.width), heads = take(m.width), mlp = take(m.mlp), hidden = take(m.hidden);
        private_ = at;
    }
    ~Decoding() { std::free(memory); }
    Decoding(const Decoding&) = delete;

    bool ready() const { return memory != nullptr; }

    static void run(void* self, i64 worker, i64 workers) {
        Decoding& one = *(Decoding*)self;
        if (one.m.weights == FULL) one.work<float>(worker, workers);
        if (one.m.weights == HALVED) one.work<Bfloat16>(worker, workers);
        if (one.m.weights == WHOLE) one.work<std::int8_t>(worker, workers);
    }

   private:
    const Stack& m;
    const Step& c;
    const Layer* layers;
    const Sums* sums;
    double norm_eps;
    float eps, *memory, *private_;
    i64 own;                            // floats of a thread's memory
    Vectors x, qkv, heads, mlp, hidden;  // [rows, ..]
    Barrier barrier;

    // The i-th matrix that a token meets: four of a layer, and then the head's.
    Matrix matrix(i64 i, i64 me, i64 all) const {
        if (i >= 4 * m.layers) {
            if (i == 4 * m.layers && m.hidden) return {m.before_head, m.hidden, m.width, me, all};
            return {m.head, m.outputs, m.hidden ? m.hidden : m.width, me, all};
        }
        const Layer& layer = layers[i / 4];
        if (i % 4 == 0) return {layer.qkv, 3 * m.width, m.width, me, all};
        if (i % 4 == 1) return {layer.output, m.width, m.width, me, all};
        if (i % 4 == 2) return {layer.expand, m.mlp, m.width, me, all};
        return {layer.contract, m.width, m.mlp, me, all};
    }

    template <class T>
    void work(i64 me, i64 all) {
        Vectors mine{private_ + me * own, rounded(m.width, UNIT)};
        // y = w·x + bias (+ more) with the next matrix, each thread some rows of w.
        i64 i = 0;
        auto multiply_next = [&](Vectors x, Vectors y, const Vectors* more = nullptr, bool active = false) {
            Matrix w = matrix(i++, me, all), next = matrix(i, me, all);
            multiply(w, c.rows, x, y, more, next.template row<T>(next.from));
            if (active)
                for (i64 b = 0; b < c.rows; b++) activate(m.gelu, y[b] + w.from, w.to - w.from);
            barrier.wait(all);
        };
        embed(me, all);
        const Affine* norm = nullptr;  // what the stream goes through before it is used
        for (i64 l = 0; l < m.layers; l++) {
            const Layer& layer = layers[l];
            Vectors in = enter(m.post ? norm : &layer.attention_norm, mine);
            multiply_next(in, qkv);
            attend(sums[l], me, all, mine[c.rows]);
            multiply_next(heads, x, m.post ? &in : &x);
            in = enter(m.post ? &layer.attention_norm : &layer.mlp_norm, mine);
            multiply_next(in, mlp, nullptr, true);
            multiply_next(mlp, x, m.post ? &in : &x);
            norm = &layer.mlp_norm;
        }
        Vectors in = enter(m.post ? norm : &m.final_norm, mine);
        if (m.hidden) multiply_next(in, hidden, nullptr, true);
        multiply_next(m.hidden ? hidden : in, {c.logits, m.outputs});
    }

    // The part of n units that is this thread's.
    static void share(i64 me, i64 all, i64 n, i64& from, i64& to) { from = n * me / all, to = n * (me + 1) / all; }

    Vectors enter(const Affine* norm, Vectors mine) {
        if (!norm) return x;
        for (i64 b = 0; b < c.rows; b++) normalise(*norm, m.width, norm_eps, x[b], mine[b]);
        return mine;
    }

    // Tokens' vectors and their positions'; angles in double precision, so that any position is exact.
    void embed(i64 me, i64 all) {
        i64 from, to;
        share(me, all, rounded(m.width, UNIT) / UNIT, from, to);
        from = from * UNIT, to = least(to * UNIT, m.width);
        for (i64 b = 0; b < c.rows; b++) {
            const float* token = m.embedding + c.tokens[b * c.stride] * m.width;
            i64 place = c.seen ? c.seen[b] : 0;
            for (i64 i = from; i < to; i++) x[b][i] = token[i];
            if (m.position == LEARNED)
                for (i64 i = from; i < to; i++) x[b][i] += m.positions[place * m.width + i];
            if (m.position == SINUSOIDAL)
                for (i64 i = from; i < to; i++) {
                    double angle = place * m.frequencies[i / 2];
                    x[b][i] += (float)(i % 2 ? std::cos(angle) : std::sin(angle));
                }
        }
        barrier.wait(all);
    }

    // s' = s + φ(k)·vᵀ, z' = z + φ(k), y = φ(q)·s' / (φ(q)·z' + eps); each thread some heads of all rows'.
    void attend(const Sums& t, i64 me, i64 all, float* q) {
        i64 D = m.width / m.heads, from, to;
        float* k = q + rounded(D, W);
        share(me, all, c.rows * m.heads, from, to);
        for (i64 i = from; i < to; i++) {
            i64 b = i / m.heads, h = i % m.heads;
            const float* later = t.s + (i + EARLY) * D * D;
            for (i64 j = 0; i + EARLY < to && j < D * D; j += LINE) __builtin_prefetch(later + j, 0, 2);
            float *row = qkv[b] + h * D, *y = heads[b] + h * D, den = eps;
            mapped(row, q, D), mapped(row + m.width, k, D);
            for (i64 d = 0; d < D; d++) t.z_end[i * D + d] = t.z[i * D + d] + k[d], den += q[d] * t.z_end[i * D + d];
            const float* s = t.s + i * D * D;
            float* s_end = t.s_end + i * D * D;
            token<false>(s, s, s_end, s_end, D, D, k, q, row + 2 * m.width, y);  // the second s is not looked at
            for (i64 d = 0; d < D; d++) y[d] /= den;
        }
        barrier.wait(all);
    }

    void mapped(const float* from, float* to, i64 D) const {
        auto f = m.map == ELU ? fetch<FLOAT32, ELU> : fetch<FLOAT32, RELU>;
        f(to, rounded(D, W), (const char*)from, D, 1, D, nullptr, 0);
    }
};

int decode(const Stack& m, const Layer* layers, const Step& c, const Sums* sums, double norm_eps, double eps) {
    for (i64 b = 0; b < c.rows; b++) {
        i64 token = c.tokens[b * c.stride], place = c.seen ? c.seen[b] : 0;
        if (token < 0 || token >= m.vocabulary || (m.position == LEARNED && (place < 0 || place >= m.limit))) return 1;
    }
    Decoding one(m, layers, c, sums, norm_eps, eps);
    if (!one.ready()) return 1;
    together(c.threads, Decoding::run, &one);
    return 0;
}

}  // namespace

namespace decoding {

extern const Decoder VARIANT;
const Decoder VARIANT = {decode, activate};

}  // namespace decoding
}  // namespace mnemos
